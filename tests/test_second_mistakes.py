"""A second bank of mistakes of a first day, beside `test_first_mistakes.py`.

They were written from the documentation alone, each with the answer that it should get: its class or exit
code, what it must name, and what it must say to do.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import graft
from graft.cli import main
from graft.envs.base import BaseEnv

TINY = """
run: {eval_tasks: 0, trackers: []}
model: {shape: {width: 16, layers: 1, heads: 2, kv_heads: 1, head_dim: 8, ff: 16, max_positions: 96}}
task: {env: calculator}
rollout: {tasks: 1, samples: 2, max_tokens: 4, max_turns: 2, max_context: 64}
train: {steps: 1}
"""
ROWS = '{"question": "2+3", "answer": "5"}\n{"question": "2+4", "answer": "6"}\n'
BARE = "model: {shape: {width: 16}}\ntask: {env: calculator}\n"
REWARDS = "def brief(task, trajectory):\n    return 1.0\n"
AGENT = "train t.yaml task.env=prompts task.args.data=rows.jsonl model.alphabet=bytes task.reward=exact_match"
PROMPTS = "train t.yaml task.env=prompts model.alphabet=bytes"


class Slip(NamedTuple):
    command: str
    names: tuple[str, ...]
    """What was seen: every one of these is in the answer."""
    remedy: str
    code: int = 2
    files: dict[str, str] = {}


def slip(command: str, *names: str, do: str, code: int = 2, **files: str) -> Slip:
    named = {name.replace("_", "."): text for name, text in files.items()}
    return Slip(command, names, do, code, named)


COMMANDS = [
    slip("trian quickstart", "'trian'", do="'train'"),
    slip("train", "recipe", do="A YAML file, or the name of a bundled recipe"),
    slip("train t.yaml train.lr 1e-4", "'train.lr'", do="train.lr=1e-4"),
    slip("train t.yaml train.lr=fast", "train.lr='fast'", do="number"),
    slip("train t.yaml train.steps=2.5", "train.steps=2.5", do="integer"),
    slip("train --config-name t.yaml", "--config-name", do="graft train t.yaml"),
    slip("train tabs.yaml", "tabs.yaml", "line 2", do="blanks", tabs_yaml="train:\n\tlr: 1\n"),
    slip("train none.yaml", "none.yaml", "no model", do="model.path", none_yaml=""),
    slip(
        "train rows.jsonl", "'rows.jsonl'", "rows", do="args: {data: rows.jsonl}", rows_jsonl=ROWS
    ),
    slip("train bare.yaml", "no model", do="model.shape", bare_yaml="task: {env: calculator}\n"),
    slip(
        "train t.yaml task.reward=mine.py:brief",
        "mine.py:brief",
        do="'mine:brief'",
        mine_py=REWARDS,
    ),
    slip("train t.yaml task.reward=own:breif", "'breif'", do="'brief'", own_py=REWARDS),
    slip(f"{PROMPTS} task.args.data=rows.jsn", "'rows.jsn'", do="'rows.jsonl'", rows_jsonl=ROWS),
    slip(
        f"{PROMPTS} task.args.data=odd.jsonl",
        "odd.jsonl",
        "text, label",
        do="prompt_key=COLUMN",
        code=1,
        odd_jsonl='{"text": "2+3", "label": "5"}\n',
    ),
    slip(
        "data show none.jsonl", "none.jsonl", "no rows", do="one row or more", code=1, none_jsonl=""
    ),
    slip("data show a.parquet", "a.parquet", "not a parquet", do=".jsonl", code=1, a_parquet=ROWS),
    slip("eval nosuchrun", "'nosuchrun'", do="graft runs"),
    slip("eval RUN --k 1-8", "--k '1-8'", do="1,4,8"),
    slip("export RUN", "folder to write", do="--out FOLDER"),
    slip("export RUN --out x --dtype fp16", "'fp16'", do="float16"),
    slip("play calculater", "'calculater'", do="'calculator'"),
    slip("play calculator digits=many", "digits='many'", do="two numbers (low, high)"),
    slip("init full", "full", "exists", do="another name", full="x"),
    slip(
        f"{AGENT} 'task.agent=no-such-agent x'", "'no-such-agent'", do="its path", rows_jsonl=ROWS
    ),
    slip(
        f"{AGENT} 'task.agent=python a.py {{task.prmpt}}'",
        "{task.prmpt}",
        do="{task.prompt}",
        rows_jsonl=ROWS,
    ),
    slip(
        "train t.yaml engine.name=vlm",
        "engine.name='vlm'",
        do="'vllm'? known: native, vllm, sglang",
    ),
    slip("train t.yaml model.device=gpu", "'gpu'", do="cuda"),
    slip(
        "sft t.yaml sft.data=rows.jsonl sft.steps=3 sft.epochs=2 model.alphabet=bytes",
        "sft.steps=3",
        "sft.epochs=2",
        do="set one to 0",
        rows_jsonl=ROWS,
    ),
    slip("train t.yaml lora.rank=8", "lora.rank=8", do="model.path"),
    slip("data make calculator --n 3", "--out", do=".jsonl or .parquet"),
    slip("eval RUN --tasks -5", "--tasks", "'-5'", do="greater than or equal to 1"),
    slip("view RUN --port web", "--port", "'web'", do="integer"),
    slip("rollout RUN --taks 1+2=", "--taks", do="--task"),
    slip("generate RUN", "'--prompt'", do="May be given several times"),
    slip(
        "train latin.yaml",
        "latin.yaml",
        do="save it as UTF-8",
        latin_yaml="run: {name: caf\udce9}\n",
    ),
    slip("train t.yaml run.trackers=wandb", "run.trackers='wandb'", do="run.trackers=[wandb]"),
    slip("resume RUN", "'resume'", do="the same `graft train` command"),
    slip("train t.yaml rollout.max_context=4", "rollout.max_context=4", do="raise the second"),
    slip("export RUN --out RUN", "exists and is not empty", do="another --out"),
    slip("train t.yaml 'task.reward={judge: {}}'", "judge", do="$JUDGE_URL"),
    slip(
        "data show roles.jsonl",
        "row 1, messages",
        "'asistant'",
        do="assistant",
        code=1,
        roles_jsonl='{"messages": [{"role": "user", "content": "a"}, {"role": "asistant"}]}\n',
    ),
    slip("train s.yaml", "rollout=8", do="'rollout.samples'", s_yaml=f"{BARE}rollout: 8\n"),
    slip("train t.yaml train.betas=0.9", "train.betas=0.9", do="train.betas=[0.9, ...]"),
    slip("train t.yaml algo.kl_coef=-0.1", "algo.kl_coef=-0.1", do="greater than or equal to 0"),
    slip("train t.yaml rollout.temperature=0", "rollout.temperature=0", do="more than 0"),
    slip("train t.yaml run.dir=t.yaml", "run.dir='t.yaml'", do="name a folder"),
    slip("train t.yaml model.shape={} model.path=.", "'.'", "no config.json", do="OWNER/NAME"),
]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "t.yaml").write_text(TINY)
    return graft.train(folder / "t.yaml", f"run.dir={folder}", progress=False).folder


@pytest.mark.parametrize("given", COMMANDS, ids=lambda given: given.command)
def test_a_command_is_answered_with_its_code_what_and_how(
    given: Slip, tmp_path: Path, request, monkeypatch, capfd
):
    for name, text in {"t.yaml": TINY, **given.files}.items():
        (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    words = shlex.split(given.command)
    if "RUN" in words:
        finished = str(request.getfixturevalue("finished"))
        words = [finished if word == "RUN" else word for word in words]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["graft", *words])
    monkeypatch.setattr(sys, "path", [*sys.path])  # a command adds the folder that it runs in,
    monkeypatch.delitem(sys.modules, "own", raising=False)  # imports from there,
    for name in ("stdout", "stderr"):  # masks secrets in what it prints,
        monkeypatch.setattr(sys, name, getattr(sys, name))
    for name in ("OMP_WAIT_POLICY", "TORCH_CPP_LOG_LEVEL"):  # and sets these for its libraries
        monkeypatch.setenv(name, "")
    with pytest.raises(SystemExit) as end:
        main()
    answer = "".join(capfd.readouterr())
    assert "Traceback" not in answer
    assert [part for part in (*given.names, given.remedy) if part not in answer] == [], answer
    assert end.value.code == given.code


SHAPE = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "ff": 16}


class Letters(BaseEnv):
    def pose(self):
        self.answer = self.rng.choice("abc")
        return f"{self.answer}?"

    def respond(self, action):
        return graft.Turn(reward=float(action == self.answer), terminated=True)


class Silent(Letters):
    respond = BaseEnv.respond


class Numeric(Letters):
    def respond(self, action):  # type: ignore[override]
        return 1.0


class Unready(Letters):
    def __init__(self):
        self.size = 3


class Gym(Letters):
    def pose(self):  # type: ignore[override]
        return {"observation": "a?"}


class OldGym(Letters):
    def respond(self, action):  # type: ignore[override]
        return "", 1.0, True, {}


class Wordy(Letters):
    def respond(self, action):
        return graft.Turn(reward="1.0", terminated=True)  # type: ignore[arg-type]


def act(env: Any) -> Any:
    env = graft.make(env)
    env.reset(seed=0)
    return env.step("a")


class Loop(NamedTuple):
    """What the cases have at hand."""

    policy: graft.Policy
    engine: graft.Engine

    def collect(self, env: Any = Letters, **options: Any) -> list[graft.Episode]:
        settings = {"tasks": 1, "samples": 16, "max_tokens": 8, **options}
        return graft.collect(self.engine, env, **settings)

    def learner(self, **options: Any) -> graft.Learner:
        return graft.Learner(self.policy, **options)


def forget(task, trajectory):
    float(trajectory.answer_text == task.answer)


def write(task, trajectory):
    return "1.0"


def one_per_row(advantages, batch):
    return batch.reward


async def fail(task, client):
    return task.meta["gold"]


def idle(task):
    return 1.0


def hide(place: object) -> str:
    """Hide there."""
    return str(place)


def close_and_collect(at: Loop) -> Any:
    at.engine.close()
    return at.collect()


def load_weights(at: Loop) -> Any:
    at.policy.save("mine")
    return graft.load("mine/model.safetensors")


def reward_with_a_text(at: Loop) -> Any:
    with graft.agent(at.engine) as gateway, gateway.session("a?") as session:
        session.reward("good")  # type: ignore[arg-type]


def open_with_a_message(at: Loop) -> Any:
    with graft.agent(at.engine) as gateway:
        gateway.session({"role": "user", "content": "a?"})  # type: ignore[arg-type]


def save_below_a_file(at: Loop) -> Any:
    Path("file").write_text("x")
    return at.policy.save("file/mine")


def save_to_a_file(at: Loop) -> Any:
    Path("file").write_text("x")
    return at.policy.save("file")


class Case(NamedTuple):
    do: Callable[[Loop], Any]
    error: type[Exception]
    names: tuple[str, ...]
    remedy: str


PYTHON = {
    "load a name without an owner": Case(
        lambda at: graft.load("Qwen3-0.6B"), ValueError, ("'Qwen3-0.6B'",), "OWNER/Qwen3-0.6B"
    ),
    "load a shape as source": Case(
        lambda at: graft.load(SHAPE),  # type: ignore[arg-type]
        ValueError,
        ("a dict", "'width': 16"),
        "shape=",
    ),
    "load: a field of shape": Case(
        lambda at: graft.load(shape={"layer": 2}, alphabet="a"), ValueError, ("layer",), "'layers'"
    ),
    "load: an alphabet for a model that has one": Case(
        lambda at: graft.load("mine", alphabet="abc"),
        ValueError,
        ("'abc'", "'mine'"),
        "leave it out",
    ),
    "Engine of a name": Case(
        lambda at: graft.Engine("Qwen/Qwen3-0.6B"),  # type: ignore[arg-type]
        ValueError,
        ("'Qwen/Qwen3-0.6B'",),
        "graft.load",
    ),
    "Engine(temperature=)": Case(
        lambda at: graft.Engine(at.policy, temperature=0.7),  # type: ignore[call-arg]
        TypeError,
        ("'temperature'",),
        "generate() have it",
    ),
    "Learner(learning_rate=)": Case(
        lambda at: at.learner(learning_rate=1e-4), TypeError, ("'learning_rate'",), "'lr'"
    ),
    "Learner(lr=) as a word": Case(
        lambda at: at.learner(lr="1e-4x"), ValueError, ("lr='1e-4x'",), "number"
    ),
    "an unknown credit": Case(
        lambda at: at.learner(credit="grop"), ValueError, ("'grop'",), "'grpo'"
    ),
    "collect: env before engine": Case(
        lambda at: graft.collect(Letters, at.engine),  # type: ignore[arg-type]
        ValueError,
        ("the class Letters",),
        "graft.Engine",
    ),
    "collect(num_generations=)": Case(
        lambda at: at.collect(num_generations=8), TypeError, ("'num_generations'",), "'samples'"
    ),
    "collect: a misspelt env": Case(
        lambda at: at.collect("game:Wordel-v0"),
        ValueError,
        ("'game:Wordel-v0'",),
        "'game:Wordle-v0'",
    ),
    "a reward of one parameter": Case(
        lambda at: at.collect(reward=lambda completion: 1.0),
        ValueError,
        ("(completion)",),
        "(task, trajectory)",
    ),
    "a reward without return": Case(
        lambda at: at.collect(reward=forget), ValueError, ("forget", "None"), "`return`"
    ),
    "a reward that is a text": Case(
        lambda at: at.collect(reward=write), ValueError, ("write", "'1.0'"), "a finite number"
    ),
    "prompts without a reward": Case(
        lambda at: graft.collect(at.engine, tasks=["a?"]), ValueError, ("prompts",), "reward="
    ),
    "tasks as a text": Case(
        lambda at: at.collect(tasks="8"), ValueError, ("tasks", "'8'"), "a number, or a list"
    ),
    "a step of nothing": Case(
        lambda at: at.learner().step([]), ValueError, ("no episodes",), "graft.collect"
    ),
    "a step of trajectories": Case(
        lambda at: at.learner().step(list(at.collect()[0].trajectories())),  # type: ignore[arg-type]
        ValueError,
        ("episodes[0]", "Trajectory"),
        "graft.collect",
    ),
    "evaluate on nothing": Case(lambda at: graft.evaluate(at.policy), ValueError, ("on",), "on="),
    "generate(max_new_tokens=)": Case(
        lambda at: graft.generate(at.policy, ["a?"], max_new_tokens=5),  # type: ignore[call-arg]
        TypeError,
        ("'max_new_tokens'",),
        "'max_tokens'",
    ),
    "generate beyond the alphabet": Case(
        lambda at: graft.generate(at.policy, "hello"), ValueError, ("'h'", "'hello'"), "alphabet"
    ),
    "make: a misspelt argument": Case(
        lambda at: graft.make("calculator", operand=(2, 2)),
        ValueError,
        ("'operand'",),
        "'operands'",
    ),
    "make: a module that is not there": Case(
        lambda at: graft.make("nosuchmodule:Cls"),
        ValueError,
        ("'nosuchmodule'",),
        "installed, or in",
    ),
    "an env without respond": Case(
        lambda at: at.collect(Silent), ValueError, ("Silent",), "def respond(self, action)"
    ),
    "respond returns a number": Case(
        lambda at: at.collect(Numeric), UserWarning, ("Numeric.respond", "the float 1.0"), "Turn("
    ),
    "step before reset": Case(
        lambda at: graft.make(Letters).step("a"), RuntimeError, ("no episode",), "reset()"
    ),
    "a seed as a text": Case(
        lambda at: graft.make("calculator").reset(seed="one"),
        TypeError,
        ("seed='one'",),
        "whole number",
    ),
    "@tool: a misspelt option": Case(
        lambda at: graft.tool(nmae="spin")(forget), ValueError, ("'nmae'",), "'name'"
    ),
    "train: a setting as a keyword": Case(
        lambda at: graft.train("quickstart", lr=1e-4),  # type: ignore[call-arg]
        TypeError,
        ("'lr'",),
        "'train.lr=1e-4'",
    ),
    "load_recipe: overrides as a dict": Case(
        lambda at: graft.load_recipe("quickstart", {"train.lr": 1e-4}),  # type: ignore[arg-type]
        ValueError,
        ("{'train.lr': 0.0001}",),
        "['train.lr=1e-4']",
    ),
    "save to a file": Case(save_to_a_file, ValueError, ("'file' is a file",), "another name"),
    "an agent that raises": Case(
        lambda at: graft.collect(at.engine, tasks=["a?"], samples=2, agent=fail),
        UserWarning,
        ("KeyError: 'gold'",),
        "in fail",
    ),
    "an agent that never asks": Case(
        lambda at: graft.collect(at.engine, tasks=["a?"], samples=2, agent=idle),
        UserWarning,
        ("2 failed",),
        "without a call that was answered",
    ),
    "an engine after close()": Case(
        close_and_collect, ValueError, ("closed",), "graft.Engine(policy)"
    ),
    "a misspelt function": Case(
        lambda at: graft.evalute,  # type: ignore[attr-defined]
        AttributeError,
        ("'evalute'",),
        "'evaluate'",
    ),
    "policy.generate": Case(
        lambda at: at.policy.generate("a?"),  # type: ignore[attr-defined]
        AttributeError,
        ("'generate'",),
        "graft.generate(...)",
    ),
    "a credit of one number a row": Case(
        lambda at: at.learner(credit=one_per_row).step(at.collect()),
        ValueError,
        ("one_per_row", "of shape [16]"),
        "reward[:, None] * batch.mask",
    ),
    "restore from nowhere": Case(
        lambda at: at.learner().restore("nowhere"), ValueError, ("'nowhere'",), "learner.save"
    ),
    "Sampling(top_p=1.5)": Case(
        lambda at: graft.Sampling(top_p=1.5), ValueError, ("top_p=1.5",), "(0, 1]"
    ),
    "Sampling: a word for a number": Case(
        lambda at: graft.Sampling(temperature="hot"),  # type: ignore[arg-type]
        TypeError,
        ("temperature='hot'",),
        "a number",
    ),
    "generate without prompts": Case(
        lambda at: graft.generate(at.policy),  # type: ignore[call-arg]
        TypeError,
        ("prompts",),
        "generate(policy, prompts, ...)",
    ),
    "Task: a misspelt field": Case(
        lambda at: graft.Task("t", "toy", anwser="5"),  # type: ignore[call-arg]
        TypeError,
        ("'anwser'",),
        "'answer'",
    ),
    "save below a file": Case(save_below_a_file, OSError, ("'file/mine'",), "may write to"),
    "a tool with an object": Case(
        lambda at: graft.tool(hide), ValueError, ("'hide'", "'place'"), "place: str"
    ),
    "an argument for an env without any": Case(
        lambda at: Letters(max_turns=3),  # type: ignore[call-arg]
        TypeError,
        ("Letters()", "'max_turns'"),
        "attributes of the class",
    ),
    "an env without super().__init__()": Case(
        lambda at: act(Unready), ValueError, ("Unready",), "super().__init__()"
    ),
    "pose returns a dict": Case(
        lambda at: act(Gym), ValueError, ("Gym.pose", "'observation'"), "a text, or messages"
    ),
    "respond returns four values": Case(
        lambda at: act(OldGym), ValueError, ("OldGym.respond", "four"), "Turn(observation, reward"
    ),
    "a reward as a text in a Turn": Case(
        lambda at: act(Wordy), ValueError, ("Wordy.respond", "'1.0'"), "a finite number"
    ),
    "Task: a text as prompt": Case(
        lambda at: graft.Task("t", "toy", prompt="a?"),  # type: ignore[arg-type]
        TypeError,
        ("prompt='a?'",),
        "'role': 'user'",
    ),
    "tasks as dicts": Case(
        lambda at: graft.collect(at.engine, tasks=[{"prompt": "a?"}], reward=write),  # type: ignore
        ValueError,
        ("tasks[0]", "a dict"),
        "graft.Task",
    ),
    "k as on the command line": Case(
        lambda at: graft.evaluate(at.policy, on=Letters, k="1,8"),  # type: ignore[arg-type]
        ValueError,
        ("k", "'1,8'"),
        "k=(1, 8)",
    ),
    "one of two sets misspelt": Case(
        lambda at: graft.evaluate(at.policy, on="calculator,countdwn"),
        ValueError,
        ("'countdwn'",),
        "'countdown'",
    ),
    "session.reward of a text": Case(
        reward_with_a_text, ValueError, ("session.reward()", "'good'"), "a finite number"
    ),
    "a session of one message": Case(
        open_with_a_message, ValueError, ("session()", "a dict"), "a list of messages"
    ),
    "load the file of the weights": Case(
        load_weights, ValueError, ("'mine/model.safetensors'",), "the folder"
    ),
    "Learner(epochs=0)": Case(
        lambda at: at.learner(epochs=0), ValueError, ("epochs=0",), "greater than or equal to 1"
    ),
    "Learner of a name": Case(
        lambda at: graft.Learner("Qwen/Qwen3-0.6B"),  # type: ignore[arg-type]
        ValueError,
        ("'Qwen/Qwen3-0.6B'",),
        "graft.load",
    ),
}


@pytest.fixture(scope="module")
def policy() -> graft.Policy:
    """No case trains it."""
    return graft.load(shape=SHAPE, alphabet="abc?")


@pytest.fixture
def at(policy: graft.Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.chdir(tmp_path)
    with graft.Engine(policy) as engine:
        yield Loop(policy, engine)


@pytest.mark.parametrize("name", PYTHON)
def test_a_call_is_answered_with_its_class_what_and_how(name: str, at: Loop):
    case = PYTHON[name]
    with pytest.raises(case.error) as error:
        case.do(at)
    text = str(error.value)
    assert [part for part in (*case.names, case.remedy) if part not in text] == [], text


def test_a_new_model_without_an_alphabet_reads_any_text():
    policy = graft.load(shape=SHAPE)
    assert len(graft.generate(policy, "häh?", max_tokens=1)) == 1


def test_there_are_a_hundred():
    assert len([*COMMANDS, *PYTHON]) >= 100
