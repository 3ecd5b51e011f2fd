"""Mistakes of users: in commands and recipes, in calls from Python, in environments, rewards and other parts
of their own. None may go on without an error or end in a traceback: each row has what the answer names (the
object or its file and line, what came) and what it says to do.
"""

from __future__ import annotations

import itertools
import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

import graft
from graft.cli import main
from graft.config import ConfigError
from graft.envs.base import BaseEnv
from graft.envs.dataset.prompts import PromptsEnv
from graft.envs.tool_env import ToolEnv
from graft.tools import make_tools

SHAPE = {"width": 16, "layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "ff": 16}

# commands and recipes

TINY = """
run: {eval_tasks: 0, trackers: []}
model: {shape: {width: 16, layers: 1, heads: 2, kv_heads: 1, head_dim: 8, ff: 16, max_positions: 96}}
task: {env: calculator}
rollout: {tasks: 1, samples: 2, max_tokens: 4, max_turns: 3, max_context: 64}
train: {steps: 1}
"""
ROWS = '{"question": "2+3", "answer": "5"}\n{"question": "2+4", "answer": "6"}\n'
BARE = "model: {shape: {width: 16}}\ntask: {env: calculator}\n"
BRIEF = "def brief(task, trajectory):\n    return 1.0\n"
PROMPTS = "train t.yaml task.env=prompts model.alphabet=bytes"
WINDOWS = "train t.yaml model.shape.family=mistral model.shape.qk_norm=false model.shape.windows"
EXPERTS = "train t.yaml model.shape.family=qwen3_moe"
AGENT = f"{PROMPTS} task.args.data=rows.jsonl task.reward=exact_match"


class Slip(NamedTuple):
    command: str
    fragments: tuple[str, ...]
    code: int
    files: dict[str, str]


def slip(command: str, *fragments: str, code: int = 2, **files: str) -> Slip:
    """`t_yaml="..."` is the text of t.yaml."""
    named = {name if "." in name else name.replace("_", "."): text for name, text in files.items()}
    return Slip(command, fragments, code, named)


COMMANDS = [
    slip("init", "NAME", "The folder to create"),
    slip("init my/agent", "'my/agent'", "letters", "my-agent"),
    slip("translate", "SETTINGS", ".yaml"),
    slip("translate missing.sh", "'missing.sh'", "a file that exists", "--learning_rate"),
    slip("train t.yml", "'t.yml'", "'t.yaml'"),
    slip("train py.py", "'py.py'", "YAML", "graft init", py_py="print(1)\n"),
    slip("plan quikstart", "'quikstart'", "'quickstart'"),
    slip("eval nothing", "'nothing'", "runs/", "graft runs", "OWNER/nothing"),
    slip("eval t.yaml", "'t.yaml'", "--recipe"),
    slip("view nothing", "'nothing'", "runs/", "graft runs"),
    slip("replay nothing --step 3", "'nothing'", "graft runs"),
    slip("export nothing --out x", "'nothing'", "OWNER/nothing"),
    slip("generate nothing --prompt x", "'nothing'", "OWNER/NAME", code=1),
    slip("explain rewrd", "'rewrd'", "reward"),
    slip("config t.yaml --key", "--key", "--keys"),
    slip("data make calculator --out x.foo", "x.foo", ".jsonl"),
    slip("train t.yaml train.lr", "'train.lr'", "train.lr=VALUE"),
    slip("train t.yaml algo.name=GRPO2", "'GRPO2'", "'grpo'"),
    slip("train t.yaml task.env=calculater", "'calculater'", "'calculator'"),
    slip("train t.yaml task.env=mine:Mine", "'mine:Mine'", "cannot import 'mine'", "installed"),
    slip("train t.yaml task.reward=exact", "'exact'", "'exact_match'"),
    slip("train t.yaml model.path=Qwen3-0.6B model.shape={}", "=Qwen3-0.6B", "OWNER/Qwen3-0.6B", code=1),
    slip("train t.yaml model.path=https://hf.co/a/b model.shape={}", "https://hf.co/a/b", "'a/b'", code=1),
    slip("train t.yaml rollout.samples=0", "rollout.samples=0", "greater than or equal to 1"),
    slip("train t.yaml run.trackers=[tensorbord]", "'tensorbord'", "'tensorboard'"),
    slip("train t.yaml run.name=../up", "run.name='../up'", "run.dir"),
    slip("train t.yaml task.wrappers=[python_tol]", "'python_tol'", "'python_tool'"),
    slip("train t.yaml algo.loss={clip:{lo:0.2}}", "clip:{lo:0.2}", "blank after the colon"),
    slip("train t.yaml task.args.operand=3", "'operand'", "'operands'"),
    slip("train t.yaml model.shape.widht=3", "widht", "'width'"),
    slip("train t.yaml model.shape.heads=3 model.shape.kv_heads=2", "heads=3", "kv_heads=2"),
    slip("train t.yaml modle.path=x", "'modle.path'", "'model.path'"),
    slip("train l.yaml", "l.yaml", "a list", "task:", l_yaml="- a\n- b\n"),
    slip("train d.yaml", "d.yaml", "line 7", "train", "keep one",
         d_yaml=f"{TINY}train: {{steps: 2}}\n"),
    slip("sft t.yaml", "t.yaml", "nothing to do", "sft.steps"),
    slip("data show rows.jsonl", "'rows.jsonl'", "train@OWNER/NAME"),
    slip("data show rows.jsonl", "rows.jsonl, line 1", "JSON", "double quotes", code=1,
         rows_jsonl="{'a': 1}\n"),
    slip("data show rows.jsonl", "rows.jsonl", "no rows", "empty", code=1, rows_jsonl=""),
    slip("data show rows.csv", "rows.csv, line 2", "quote left open", code=1, rows_csv='a,b\n"1,2\n'),
    slip("data show rows.txt", "rows.txt", "'.txt'", ".jsonl", code=1, rows_txt="hello\n"),
    slip("data show rows.jsonl", "rows.jsonl", "question", code=1, rows_jsonl='{"x": 1}\n'),
    slip("train t.yaml sft.data=rows.jsonl sft.epochs=1", "'rows.jsonl'", "train@OWNER/NAME"),
    slip("train t.yaml task.env=prompts", "no rows", "data="),
    slip("trian quickstart", "'trian'", "'train'"),
    slip("train", "recipe", "A YAML file, or the name of a bundled recipe"),
    slip("train t.yaml train.lr 1e-4", "'train.lr'", "train.lr=1e-4"),
    slip("train t.yaml train.lr=fast", "train.lr='fast'", "number"),
    slip("train t.yaml train.steps=2.5", "train.steps=2.5", "integer"),
    slip("train --config-name t.yaml", "--config-name", "graft train t.yaml"),
    slip("train tabs.yaml", "tabs.yaml", "line 2", "blanks", tabs_yaml="train:\n\tlr: 1\n"),
    slip("train none.yaml", "none.yaml", "no model", "model.path", none_yaml=""),
    slip("train rows.jsonl", "'rows.jsonl'", "rows", "args: {data: rows.jsonl}", rows_jsonl=ROWS),
    slip("train bare.yaml", "no model", "model.shape", bare_yaml="task: {env: calculator}\n"),
    slip("train t.yaml task.reward=mine.py:brief", "mine.py:brief", "'mine:brief'", mine_py=BRIEF),
    slip("train t.yaml task.reward=own:breif", "'breif'", "'brief'", own_py=BRIEF),
    slip(f"{PROMPTS} task.args.data=rows.jsn", "'rows.jsn'", "'rows.jsonl'", rows_jsonl=ROWS),
    slip(f"{PROMPTS} task.args.data=odd.jsonl", "odd.jsonl", "text, label", "prompt_key=COLUMN", code=1,
         odd_jsonl='{"text": "2+3", "label": "5"}\n'),
    slip("data show a.parquet", "a.parquet", "not a parquet", ".jsonl", code=1, a_parquet=ROWS),
    slip("eval RUN --k 1-8", "--k '1-8'", "1,4,8"),
    slip("eval RUN --checkpoint 99", "--checkpoint", "by its folder", "RUN/checkpoints/rl-"),
    slip("export RUN", "folder to write", "--out FOLDER"),
    slip("export RUN --out x --dtype fp16", "'fp16'", "float16"),
    slip("play calculater", "'calculater'", "'calculator'"),
    slip("play calculator digits=many", "digits='many'", "two numbers (low, high)"),
    slip("init full", "full", "exists", "another name", full="x"),
    slip(f"{AGENT} 'task.agent=no-such-agent x'", "'no-such-agent'", "its path", rows_jsonl=ROWS),
    slip(f"{AGENT} 'task.agent=python a.py {{task.prmpt}}'", "{task.prmpt}", "{task.prompt}",
         rows_jsonl=ROWS),
    slip("train t.yaml engine.name=vlm", "engine.name='vlm'", "'vllm'? known: native, vllm, sglang"),
    slip("train t.yaml model.device=gpu", "'gpu'", "cuda"),
    slip("sft t.yaml sft.data=rows.jsonl sft.steps=3 sft.epochs=2 model.alphabet=bytes", "sft.steps=3",
         "sft.epochs=2", "set one to 0", rows_jsonl=ROWS),
    slip("train t.yaml lora.rank=8", "lora.rank=8", "model.path"),
    slip("data make calculator --n 3", "--out", ".jsonl or .parquet"),
    slip("eval RUN --tasks -5", "--tasks", "'-5'", "greater than or equal to 1"),
    slip("view RUN --port web", "--port", "'web'", "integer"),
    slip("rollout RUN --taks 1+2=", "--taks", "--task"),
    slip("generate RUN", "'--prompt'", "May be given several times"),
    slip("train latin.yaml", "latin.yaml", "save it as UTF-8", latin_yaml="run: {name: caf\udce9}\n"),
    slip("train t.yaml run.trackers=wandb", "run.trackers='wandb'", "run.trackers=[wandb]"),
    slip("resume RUN", "'resume'", "the same `graft train` command"),
    slip("train t.yaml rollout.max_context=4", "rollout.max_context=4", "raise the second"),
    slip("export RUN --out RUN", "exists and is not empty", "another --out"),
    slip("train t.yaml 'task.reward={judge: {}}'", "judge", "$JUDGE_URL"),
    slip("data show roles.jsonl", "row 1, messages", "'asistant'", "assistant", code=1,
         roles_jsonl='{"messages": [{"role": "user", "content": "a"}, {"role": "asistant"}]}\n'),
    slip("train s.yaml", "rollout=8", "'rollout.samples'", s_yaml=f"{BARE}rollout: 8\n"),
    slip("train t.yaml train.betas=0.9", "train.betas=0.9", "train.betas=[0.9, ...]"),
    slip("train t.yaml algo.kl_coef=-0.1", "algo.kl_coef=-0.1", "greater than or equal to 0"),
    slip("train t.yaml rollout.temperature=0", "rollout.temperature=0", "more than 0"),
    slip("train t.yaml run.dir=t.yaml", "run.dir='t.yaml'", "name a folder"),
    slip("train t.yaml model.shape={} model.path=.", "'.'", "no config.json", "OWNER/NAME"),
    slip(f"{WINDOWS}=16", "model.shape", "windows=16", "a list of whole numbers"),
    slip(f"{WINDOWS}=all", "windows='all'", "a list of whole numbers"),
    slip(f"{EXPERTS} model.shape.experts=4", "experts=4", "{count: 8, top_k: 2, ff: 64}"),
    slip(f"{EXPERTS} 'model.shape.experts={{count: 4, top_k: 8, ff: 16}}'", "experts.top_k=8", "from 1 to 4"),
    slip(f"{EXPERTS} 'model.shape.dense_layers=[7]' 'model.shape.experts={{count: 4, top_k: 2, ff: 16}}'",
         "dense_layers=[7]", "from 0 to 0"),
    slip("train t.yaml train.router_balance=0.001", "train.router_balance=0.001", "no experts"),
    slip("train t.yaml 'rollout.answer_schema={type: objekt}' model.alphabet=bytes",
         "rollout.answer_schema", "objekt"),
    slip("train t.yaml rollout.answer_schema=schema.json", "'schema.json'", "the schema itself"),
    slip("train t.yaml 'rollout.answer_schema={name: string}'", "{'name': 'string'}", '"properties"'),
    slip("generate RUN --prompt 1+2= --schema s.json", "s.json", "'requierd'", "'required'",
         s_json='{"type": "object", "requierd": []}'),
    slip("generate RUN --prompt 1+2= --schema s.json", "no token of this vocabulary", code=1,
         s_json='{"type": "object"}'),
    slip("train t.yaml 'agent.main={tools: bash}'", "agent.main", "task.agent is empty"),
    slip(f"{AGENT} task.agent=python 'agent.models={{gpt-4: polcy}}'", "gpt-4: 'polcy'",
         "{frozen: CHECKPOINT}", rows_jsonl=ROWS),
    slip(f"{AGENT} task.agent=python 'agent.models={{gpt-4: {{url: x}}}}'", "{'url': 'x'}", "{endpoint: URL",
         rows_jsonl=ROWS),
    slip(f"{AGENT} task.agent=python agent.host=8399", "agent.host=8399", "127.0.0.1:8399", rows_jsonl=ROWS),
    slip(f"{AGENT} 'task.agent=python a.py | tee log'", "'|'", "sh -c", rows_jsonl=ROWS),
    slip("train t.yaml task.env=terminal task.args.data=h task.args.program=dokcer model.alphabet=bytes",
         "program='dokcer'", "docker, podman", **{"h/instruction.md": "Do it.\n", "h/tests/test.sh": "true\n",
         "h/task.toml": 'schema_version = "1.4"\n', "h/environment/Dockerfile": "FROM debian\n"}),
    slip("export RUN --out x.gguf", "'x.gguf'", "a Hugging Face folder", "convert_hf_to_gguf.py"),
    slip("export RUN --out x --push my model", "quotes", "'my model'"),
]  # fmt: skip


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
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
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
    assert [part for part in given.fragments if part not in answer] == [], answer
    assert end.value.code == given.code


# calls from Python


class Letters(BaseEnv):
    def pose(self):
        self.answer = self.rng.choice("abc")
        return f"{self.answer}?"

    def respond(self, action):
        return graft.Turn(reward=float(action == self.answer), terminated=True)


class Numeric(Letters):
    def respond(self, action):  # type: ignore[override]
        return 1.0


class Half:
    name = "half"

    def __call__(self, content: str) -> str:
        return content

    def fork(self) -> Half:
        return self


class Loop(NamedTuple):
    """What the cases have at hand."""

    policy: graft.Policy
    engine: graft.Engine

    def collect(self, env: Any = Letters, **options: Any) -> list[graft.Episode]:
        settings = {"tasks": 1, "samples": 16, "max_tokens": 8, **options}
        return graft.collect(self.engine, env, **settings)

    def learner(self, **options: Any) -> graft.Learner:
        return graft.Learner(self.policy, **options)


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


def undescribed(place: int) -> str:
    return str(place)


def untyped(place):
    """Look."""


def pose(name: str) -> Any:
    env = graft.make(name)
    env.reset(0)
    return env


def close_and_collect(at: Loop) -> Any:
    at.engine.close()
    return at.collect()


def load_weights(at: Loop) -> Any:
    at.policy.save("mine")
    return graft.load("mine/model.safetensors")


def load_a_run_that_is_nearly_named(at: Loop) -> Any:
    Path("runs/quickstart").mkdir(parents=True)
    Path("runs/quickstart/config.yaml").write_text("{}")
    return graft.load("quikstart")


def reward_with_a_text(at: Loop) -> Any:
    with graft.agent(at.engine) as gateway, gateway.session("a?") as session:
        session.reward("good")  # type: ignore[arg-type]


def open_with_a_message(at: Loop) -> Any:
    with graft.agent(at.engine) as gateway:
        gateway.session({"role": "user", "content": "a?"})  # type: ignore[arg-type]


def open_with_no_role(at: Loop) -> Any:
    with graft.agent(at.engine) as gateway:
        gateway.session([{"content": "a?"}])


def save_at(place: str) -> Callable[[Loop], Any]:
    def save(at: Loop) -> Any:
        Path("file").write_text("x")
        return at.policy.save(place)

    return save


PROMPT = {"prompt": "1?", "answer": "1"}


def wrap(**options: Any) -> Any:
    return graft.make("game:GuessTheNumber-v0-easy", wrappers=[{"python_tool": options}])


class Case(NamedTuple):
    do: Callable[[Loop], Any]
    error: type[Exception]
    fragments: tuple[str, ...]


def case(do: Callable[[Any], Any], error: type[Exception], *fragments: str) -> Case:
    return Case(do, error, fragments)


CALLS = [
    case(lambda at: graft.train(None), ValueError, "a recipe is a file", "NoneType"),
    case(lambda at: graft.train({"task": {"reward": len}}), ValueError, "task.reward", "'module:name'"),
    case(lambda at: graft.train({"lr": 1}), ValueError, "unknown key 'lr'", "train.lr"),
    case(lambda at: graft.make(None), ValueError, "or an instance of it, not None", "'module:Class'"),
    case(lambda at: graft.make(Half), ValueError, "class half (tests/test_mistakes.py", "derive it"),
    case(lambda at: graft.tool(3), TypeError, "the int 3", "a function or method"),
    case(lambda at: ToolEnv(None, []), ValueError, "not around None", "graft.make"),
    case(lambda at: ToolEnv(Half, []), ValueError, "the class Half", "MyEnv()"),
    case(lambda at: ToolEnv(graft.make("arithmetic"), [Half()]), ValueError,
         "tool half (tests/test_mistakes.py:", "no reset and no close", "is_stateful = False"),
    case(lambda at: pose("arithmetic").step(5), TypeError, "step() was given the int 5",
         "the text that the policy wrote"),
    case(lambda at: pose("calculator").step(None), TypeError, "was given None", "the text"),
    case(lambda at: graft.make("arithmetic").reset(7.0), TypeError, "seed=7.0", "a whole number from 0"),
    case(lambda at: graft.load("quikstart"), ValueError, "'quikstart'", "graft train quickstart"),
    case(lambda at: graft.load(), ValueError, "source", "shape="),
    case(lambda at: graft.Learner(at.policy, algo="gropo"), ValueError, "'gropo'", "'grpo'"),
    case(lambda at: graft.collect(graft.Engine(at.policy), Letters, tasks=0), ValueError, "tasks=0",
         "equal to 1"),
    case(lambda at: graft.evaluate(at.policy, on="mth500"), ValueError, "'mth500'", "MATH500"),
    case(lambda at: graft.evaluate(at.policy, on=Letters, k=(0,)), ValueError, "k is the int 0", "from 1"),
    case(lambda at: graft.train({"modle": {}}), ValueError, "'modle'", "'model.path'"),
    case(lambda at: graft.tool(undescribed), ValueError, "'undescribed'", "docstring", "description="),
    case(lambda at: graft.tool(untyped), ValueError, "'untyped'", "'place'", "place: str"),
    case(lambda at: graft.generate(at.policy, 3), ValueError, "the int 3", "a list of texts"),
    case(lambda at: graft.register("calculator", Letters), ValueError, "'calculator'", "another id"),
    case(lambda at: graft.load("Qwen3-0.6B"), ValueError, "'Qwen3-0.6B'", "OWNER/Qwen3-0.6B"),
    case(lambda at: graft.load(SHAPE), ValueError, "a dict", "'width': 16", "shape="),
    case(lambda at: graft.load(shape={"layer": 2}, alphabet="a"), ValueError, "layer", "'layers'"),
    case(lambda at: graft.load("mine", alphabet="abc"), ValueError, "'abc'", "'mine'", "leave it out"),
    case(lambda at: graft.Engine("Qwen/Qwen3-0.6B"), ValueError, "'Qwen/Qwen3-0.6B'", "graft.load"),
    case(lambda at: graft.Engine(at.policy, temperature=0.7), TypeError, "'temperature'",
         "generate() have it"),
    case(lambda at: at.learner(learning_rate=1e-4), TypeError, "'learning_rate'", "'lr'"),
    case(lambda at: at.learner(lr="1e-4x"), ValueError, "lr='1e-4x'", "number"),
    case(lambda at: at.learner(credit="grop"), ValueError, "'grop'", "'grpo'"),
    case(lambda at: graft.collect(Letters, at.engine), ValueError, "the class Letters", "graft.Engine"),
    case(lambda at: at.collect(num_generations=8), TypeError, "'num_generations'", "'samples'"),
    case(lambda at: at.collect("game:Wordel-v0"), ValueError, "'game:Wordel-v0'", "'game:Wordle-v0'"),
    case(lambda at: at.collect(reward=lambda completion: 1.0), ValueError, "(completion)",
         "(task, trajectory)"),
    case(lambda at: graft.collect(at.engine, tasks=["a?"]), ValueError, "prompts", "reward="),
    case(lambda at: at.collect(tasks="8"), ValueError, "tasks", "'8'", "a number, or a list"),
    case(lambda at: at.learner().step([]), ValueError, "no episodes", "graft.collect"),
    case(lambda at: at.learner().step(list(at.collect()[0].trajectories())), ValueError, "episodes[0]",
         "Trajectory", "graft.collect"),
    case(lambda at: graft.evaluate(at.policy), ValueError, "on", "on="),
    case(lambda at: graft.generate(at.policy, ["a?"], max_new_tokens=5), TypeError, "'max_new_tokens'",
         "'max_tokens'"),
    case(lambda at: graft.generate(at.policy, "hello"), ValueError, "'h'", "'hello'", "alphabet"),
    case(lambda at: graft.make("calculator", operand=(2, 2)), ValueError, "'operand'", "'operands'"),
    case(lambda at: graft.make("calculator", wrapper="concat"), ValueError, "'wrapper'", "'wrappers'"),
    case(lambda at: at.collect(Numeric), UserWarning, "Numeric.respond", "the float 1.0", "Turn("),
    case(lambda at: graft.make(Letters).step("a"), RuntimeError, "no episode", "reset()"),
    case(lambda at: graft.make("calculator").reset(seed="one"), TypeError, "seed='one'", "whole number"),
    case(lambda at: graft.train("quickstart", lr=1e-4), TypeError, "'lr'", "'train.lr=1e-4'"),
    case(lambda at: graft.load_recipe("quickstart", {"train.lr": 1e-4}), ValueError, "{'train.lr': 0.0001}",
         "['train.lr=1e-4']"),
    case(save_at("file"), ValueError, "'file' is a file", "another name"),
    case(lambda at: graft.collect(at.engine, tasks=["a?"], samples=2, agent=fail), UserWarning,
         "KeyError: 'gold'", "in fail"),
    case(lambda at: graft.collect(at.engine, tasks=["a?"], samples=2, agent=idle), UserWarning, "2 failed",
         "without a call that was answered"),
    case(close_and_collect, ValueError, "closed", "graft.Engine(policy)"),
    case(lambda at: graft.evalute, AttributeError, "'evalute'", "'evaluate'"),
    case(lambda at: at.policy.generate("a?"), AttributeError, "'generate'", "graft.generate(...)"),
    case(lambda at: at.learner().restore("nowhere"), ValueError, "'nowhere'", "learner.save"),
    case(lambda at: graft.Sampling(top_p=1.5), ValueError, "top_p=1.5", "(0, 1]"),
    case(lambda at: graft.Sampling(temperature="hot"), TypeError, "temperature='hot'", "a number"),
    case(lambda at: graft.generate(at.policy), TypeError, "prompts", "generate(policy, prompts, ...)"),
    case(lambda at: graft.Task("t", "toy", anwser="5"), TypeError, "'anwser'", "'answer'"),
    case(save_at("file/mine"), OSError, "'file/mine'", "may write to"),
    case(lambda at: graft.tool(hide), ValueError, "'hide'", "'place'", "place: str"),
    case(lambda at: Letters(max_turns=3), TypeError, "Letters()", "'max_turns'", "attributes of the class"),
    case(lambda at: graft.Task("t", "toy", prompt="a?"), TypeError, "prompt='a?'", "'role': 'user'"),
    case(lambda at: graft.collect(at.engine, tasks=[{"prompt": "a?"}], reward=write), ValueError,
         "tasks[0]", "a dict", "graft.Task"),
    case(lambda at: graft.evaluate(at.policy, on=Letters, k="1,8"), ValueError, "k", "'1,8'", "k=(1, 8)"),
    case(lambda at: graft.evaluate(at.policy, on="calculator,countdwn"), ValueError, "'countdwn'",
         "'countdown'"),
    case(reward_with_a_text, ValueError, "session.reward()", "'good'", "a finite number"),
    case(open_with_no_role, ValueError, "session()", "a list of", "'role': 'user'"),
    case(open_with_a_message, ValueError, "session()", "a dict", "a list of messages"),
    case(load_weights, ValueError, "'mine/model.safetensors'", "the folder"),
    case(lambda at: at.learner(epochs=0), ValueError, "epochs=0", "greater than or equal to 1"),
    case(lambda at: graft.Learner("Qwen/Qwen3-0.6B"), ValueError, "'Qwen/Qwen3-0.6B'", "graft.load"),
    case(lambda at: make_tools([{"calculator": {"max_operations": -1}}]), ValueError, "max_operations=-1"),
    case(lambda at: make_tools([{"fetch": {"concurrency": -1}}]), ValueError, "concurrency=-1"),
    case(lambda at: make_tools([{"python": {"concurrency": 0}}]), ValueError, "concurrency=0"),
    case(lambda at: PromptsEnv(rows=[PROMPT], timeout=-1), ValueError, "timeout=-1"),
    case(lambda at: PromptsEnv(rows=[PROMPT], skip_bad=-1), ValueError, "skip_bad=-1"),
    case(lambda at: PromptsEnv(rows=[PROMPT], skip_bad=2), ValueError, "skip_bad=2"),
    case(lambda at: wrap(max_tool_reward=-1), ValueError, "max_tool_reward=-1"),
    case(lambda at: wrap(max_uses=-1), ValueError, "max_uses=-1"),
    case(lambda at: graft.train("quickstart", ["train.lr=1"]), ConfigError, "a list of 1", "'train.lr=1e-4'"),
    case(lambda at: at.learner(credit=one_per_row).step(at.collect()), ValueError, "one_per_row",
         "of shape [16]", "reward[:, None] * batch.mask"),
    case(load_a_run_that_is_nearly_named, ValueError, "'quickstart'"),
    case(lambda at: graft.generate(at.policy, "a?", schema={"properties": {"a": {"typ": "integer"}}}),
         ValueError, "{'typ': 'integer'}", "did you mean 'type'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def policy() -> graft.Policy:
    """No case trains it."""
    return graft.load(shape=SHAPE, alphabet="abc?")


@pytest.fixture
def at(policy: graft.Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loop]:
    monkeypatch.chdir(tmp_path)
    with graft.Engine(policy) as engine:
        yield Loop(policy, engine)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: " ".join(call.fragments))
def test_a_call_is_answered_with_its_class_what_and_how(call: Case, at: Loop):
    with pytest.raises(call.error) as error:
        call.do(at)
    text = str(error.value)
    assert [part for part in call.fragments if part not in text] == [], text


def test_a_new_model_without_an_alphabet_reads_any_text():
    policy = graft.load(shape=SHAPE)
    assert len(graft.generate(policy, "häh?", max_tokens=1)) == 1


def test_a_number_as_a_text_counts_as_the_number(at: Loop):
    """samples="8" was taken for 8 in one place and for a text in another."""
    (episode,) = at.collect(samples="2", max_tokens=2)
    assert len(episode.leaves) == 2


# modules of a user, each tried in a run of one step

HEAD = """
import asyncio, math, torch
import numpy as np
import graft
from graft.envs.base import BaseEnv, Wrapper
from graft.envs.tool_env import ToolEnv
from graft.types import Author, Turn


class Env(BaseEnv):
    alphabet = "0123456789?hl[];"
    max_turns = 2
    observe_as = "inline"
    stop = tuple(alphabet)  # a turn is one character

    def pose(self):
        self.answer = "3"
        return "?"

    def respond(self, action):
        if self.turns:
            return Turn("", 1.0, terminated=True)
        return Turn("h", 0.5)


class Plain:
    alphabet = "0123456789?hl[];"
    blocking, forkable, stop, observe_as = False, True, tuple(alphabet), "inline"

    def reset(self, seed=None):
        return "?", {"answer": "3"}

    def step(self, action):
        return Turn("", 1.0, True)

    def fork(self):
        return type(self)()

    def close(self):
        pass
"""


class Mistake(NamedTuple):
    name: str
    code: str
    fragments: tuple[str, ...]
    """All of these are in the message; "FILE" is the module's, with a line behind it."""
    changes: dict[str, Any] = {}


numbers = itertools.count()


def recipe(folder: Path, module: str, changes: dict[str, Any]) -> dict[str, Any]:
    sections = yaml.safe_load(TINY)
    sections["run"] |= {"dir": str(folder), "name": "run", "log_episodes": 0}
    sections["task"] = {"env": f"{module}:Mine"}
    for key, value in json.loads(json.dumps(changes).replace("MINE", module)).items():
        section, _, name = key.partition(".")
        sections.setdefault(section, {})[name] = value
    return sections


def run(mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The message of the error that ends the run."""
    module = f"mine_{next(numbers)}"
    (tmp_path / f"{module}.py").write_text(f"{HEAD}\n\n{mistake.code}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(Exception) as error:
            graft.train(recipe(tmp_path / "runs", module, mistake.changes))
    finally:
        sys.modules.pop(module, None)
    name = type(error.value).__module__
    assert name.startswith("graft.") or type(error.value) is ValueError, repr(error.value)
    return str(error.value).replace(f"{module}.py", "FILE.py").replace(module, "MODULE")


def env(name: str, body: str, *fragments: str, base: str = "Env", **changes: Any) -> Mistake:
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    return Mistake(f"env: {name}", f"class Mine({base}):\n{lines}", fragments, changes)


def beside(name: str, code: str, fragments: tuple[str, ...], key: str, value: Any) -> Mistake:
    """A part that stands in the module of an environment."""
    return Mistake(name, f"class Mine(Env):\n    pass\n\n\n{code}", fragments, {key: value})


def reward(name: str, body: str, *fragments: str, head: str = "def score(task, row):") -> Mistake:
    return beside(f"reward: {name}", f"{head}\n    {body}", fragments, "task.reward", "MINE:score")


def part(what: str, name: str, code: str, *fragments: str) -> Mistake:
    """A loss, credit, weight, reduction or branch called `mine`."""
    key = {"branch": "rollout.branch", "weight": "algo.weights"}.get(what, f"algo.{what}")
    value: Any = ["MINE:mine"] if what in ("credit", "weight") else "MINE:mine"
    return beside(f"{what}: {name}", code, fragments, key, value)


def wrapper(name: str, code: str, *fragments: str) -> Mistake:
    return beside(name, code, fragments, "task.wrappers", ["MINE:around"])


CALLING = """
class Mine(Env):
    {mark}
    def poke(self{parameters}){annotation}:
        '''Poke it.'''
        {body}

    def respond(self, action):
        return Turn(terminated=True)

    def step(self, action):
        return super().step(action)


class Calling(ToolEnv):
    '''Every turn is a call.'''

    def step(self, action):
        return super().step("<poke></poke>")


def make():
    env = Mine()
    return Calling(env, [env.poke])
"""


def tool(name: str, body: str, *fragments: str, annotation: str = "", **more: str) -> Mistake:
    fields = {"mark": "@graft.tool", "parameters": "", **more}
    code = CALLING.format(body=body, annotation=annotation, **fields)
    return Mistake(f"tool: {name}", code, fragments, {"task.env": "MINE:make"})


RESPOND = "def respond(self, action):\n    return "
POSE = "def pose(self):\n    return "
LOSS = "def mine():\n    def loss(logp, entropy, batch):\n        return {}\n    return loss"
DIRECT = "def mine({}):\n    return {}"

MODULES = [
    env("observation 42", RESPOND + "Turn(42)", "Mine.respond (FILE.py:", "the int 42", "a text"),
    env("reward too large", RESPOND + "Turn('h', 1e300)", "Mine.respond (FILE.py:", "1e+300", "to 1e12"),
    env("half a character", RESPOND + "Turn('\\ud800')", "lone surrogate", "errors='replace'"),
    env("observation bytes", RESPOND + "Turn(b'x')", "Mine.respond", "bytes", "a text"),
    env("step returns None", RESPOND + "None", "Mine.respond (FILE.py:", "None", "Turn", "`return`"),
    env("step returns text", RESPOND + "'h'", "Mine.respond", "the text 'h'", "a Turn"),
    env("step returns 4", RESPOND + "('h', 1.0, True, {})", "Mine.respond", "four values", "Turn("),
    env("step returns class", RESPOND + "Turn", "Mine.respond", "the class Turn", "a Turn"),
    env("no teacher", "pass", "Mine has no teacher", "demonstrate()", "sft.data", **{"sft.steps": 1}),
    env("teacher's keyword", "def demonstrate(self, rng):\n    return []", "Mine.demonstrate (FILE.py:",
        "no argument 'rate'", **{"sft.steps": 1, "sft.demo_args": {"rate": 1}}),
    env("prefill", "pass", "task.prefill='abc'", "character 'a'", **{"task.prefill": "abc"}),
    env("prompt empty", POSE + "''", "prompt of env Mine.pose (FILE.py:", "is empty", "continue"),
    env("prompt of other characters", POSE + "'abc'", "prompt of env Mine.pose (FILE.py:", "character 'a'",
        "add it to the alphabet"),
    env("prompt role misspelled", POSE + "[{'role': 'usr', 'content': '?'}]", "Mine.pose", "'usr'",
        "'user'"),
    env("reward text", RESPOND + "Turn('h', '1')", "Mine.respond", "reward the text '1'", "number"),
    env("reward None", RESPOND + "Turn('h', None)", "Mine.respond", "reward None", "number"),
    env("reward array", RESPOND + "Turn('h', np.ones(3))", "Mine.respond", "shape [3]", "number"),
    env("reward huge", RESPOND + "Turn('h', 10 ** 400)", "Mine.respond", "int", "finite number"),
    env("reward NaN", RESPOND + "Turn('h', math.nan)", "Mine.respond", "nan", "a finite number"),
    env("terminated text", RESPOND + "Turn('h', 1, 'yes')", "terminated the text 'yes'", "True or"),
    env("info list", RESPOND + "Turn('h', 1, info=[1])", "Mine.respond", "info a list", "dict"),
    env("info number of tools", RESPOND + "Turn('h', info={'tools/x': 'a'})", "info['tools/x']", "'a'"),
    env("async respond", "async def respond(self, action):\n    return Turn()", "is async", "blocking"),
    env("respond yields", "def respond(self, action):\n    yield Turn()", "generator", "a Turn"),
    env("pose None", POSE + "None", "Mine.pose (FILE.py:", "None", "a text", "`return` missing"),
    env("pose empty list", POSE + "[]", "Mine.pose", "list of 0", "a text, or messages"),
    env("pose list of str", POSE + "['?']", "Mine.pose", "'?' is no message", '"role"'),
    env("pose message without role", POSE + "[{'content': '?'}]", "no message", '"role"'),
    env("no pose", "pose = BaseEnv.pose", "class Mine (FILE.py:"),
    env("no respond", "respond = BaseEnv.respond", "class Mine (FILE.py:", "def respond(self, action)"),
    env("respond without action", "def respond(self):\n    return Turn()", "respond() takes", "2 were"),
    env("answer tensor", "def pose(self):\n    self.answer = torch.ones(1)\n    return '?'",
        "info['answer']", "tensor", "plain data"),
    env("answer NaN", "def pose(self):\n    self.answer = math.nan\n    return '?'", "info['answer'] nan"),
    env("raises", "def respond(self, action):\n    return self.board[action]",
        "AttributeError: 'Mine' object has no attribute 'board'", "FILE.py:", "in respond", "errors.log"),
    env("exit", "def respond(self, action):\n    raise SystemExit(3)", "SystemExit: 3", "in respond"),
    env("stop is a text", "stop = ']'", "class Mine (FILE.py:", "stop = ']'", "tuple of texts"),
    env("stop of numbers", "stop = (1,)", "stop = (1,)", "tuple of texts"),
    env("observe_as", "observe_as = 'assistant'", "observe_as = 'assistant'", "user, tool, inline"),
    env("blocking", "blocking = 'no'", "blocking = 'no'", "True or False"),
    env("max_turns 0", "max_turns = 0", "max_turns = 0", "from 1"),
    env("needs arguments", "def __init__(self, size):\n    super().__init__()", "needs size", "task.args",
        "FILE.py:"),
    env("no super init", "def __init__(self):\n    pass", "class Mine (FILE.py:", "super().__init__()"),
    env("fork returns self", "def fork(self):\n    return self", "Mine.fork (FILE.py:", "itself", "copy"),
    env("fork returns None", "def fork(self):\n    pass", "Mine.fork", "returned None", "a copy"),
    env("fork raises", "def fork(self):\n    raise OSError('no')", "OSError: no", "FILE.py:"),
    env("lock in it",
        "def pose(self):\n    import threading\n    self.lock = threading.Lock()\n" "    return '?'",
        "class Mine (FILE.py:", "'lock'", "cannot be copied", "forkable = False"),
    env("reset without seed", "def reset(self):\n    return '?', {}", "Mine.reset (FILE.py:", "seed=None",
        base="Plain"),
    env("reset None", "def reset(self, seed=None):\n    pass", "Mine.reset", "None", "(observation, info)",
        base="Plain"),
    env("reset info", "def reset(self, seed=None):\n    return '?', 3", "Mine.reset", "info the int 3",
        base="Plain"),
    env("meta", "def reset(self, seed=None):\n    return '?', {'meta': 3}", "Mine.reset", "the int 3",
        "dict", base="Plain"),
    env("step without action", "def step(self):\n    return Turn()", "Mine.step", "(self, action)",
        base="Plain"),
    env("async reset", "async def reset(self, seed=None):\n    return '?', {}", "Mine.reset", "is async",
        base="Plain"),
    env("plain class", "pass", "class Mine (FILE.py:", "has no reset, step, fork", "BaseEnv",
        base="object"),
    env("gym class",
        "def reset(self, seed=None):\n    return '?', {}\n\n" "def step(self, action):\n    return 1",
        "has no fork, close", "BaseEnv", base="object"),
    env("message without content", POSE + "[{'role': 'user'}]", "Mine.pose", "it has no content"),
    env("message of a number", POSE + "[{'role': 'user', 'content': 3}]", "content is the int 3"),
    env("observed as", RESPOND + "Turn('h', info={'observe_as': 'nobody'})", "Mine.respond", "'nobody'",
        "user, tool"),
    env("info tools", "def reset(self, seed=None):\n    return '?', {'tools': 'look'}", "Mine.reset",
        "info['tools'] the text 'look'", "a list of function schemas", base="Plain"),
    env("init raises", "def __init__(self):\n    super().__init__()\n    self.x = {}['size']",
        "KeyError: 'size'", "FILE.py:", "in __init__"),
    env("init exits early",
        "def __init__(self):\n    super().__init__()\n    raise ValueError('too small')",
        "ValueError: too small", "FILE.py:"),
    env("close raises", "def close(self):\n    raise OSError('closed twice')", "close() of Mine (FILE.py:",
        "OSError: closed twice"),
    env("turn with a wrong name", RESPOND + "Turn(obs='h')", "Turn() has no argument 'obs'", "FILE.py:"),
    env("coroutine of a helper", RESPOND + "asyncio.sleep(0)", "Mine.respond", "coroutine", "a Turn"),
    env("own tool without self", "@graft.tool\ndef look() -> str:\n    'Look.'\n    return ''",
        "tool Mine.look (FILE.py:", "is `self` missing"),
    env("own tool of unknown type",
        "@graft.tool\ndef look(self, x: 'Thing') -> str:\n    'Look.'\n    return ''",
        "tool Mine.look (FILE.py:", "'Thing' is not defined"),
    env("tool options", "tool_options = {'uses': 1}\n\n@graft.tool\ndef look(self) -> str:\n    'Look.'",
        "tool_options of Mine", "'uses'", "max_uses"),
    reward("text", "return '1'", "reward score (FILE.py:", "the text '1'", "finite number"),
    reward("None", "pass", "reward score (FILE.py:", "None", "finite number", "`return` missing"),
    Mistake("answer missing", "class Mine(Env):\n    def pose(self):\n        return '?'",
            ("no answer to compare with", "column answer", "self.answer"), {"task.reward": "exact_match"}),
    Mistake("without a call", "class Mine(Env):\n    pass\n\n\nclass Score:\n    pass",
            ("reward Score (FILE.py:", "__call__(self, task, trajectory)"), {"task.reward": "MINE:Score"}),
    reward("of three", "return 1", "score(prompt, completion, answer)", "(task, trajectory)",
           head="def score(prompt, completion, answer):"),
    reward("too large", "return -1e30", "reward score (FILE.py:", "-1e+30", "from -1e12 to 1e12"),
    reward("NaN", "return math.nan", "reward score", "nan", "a finite number"),
    reward("tensor", "return torch.ones(3)", "reward score", "Tensor of shape [3]", "finite number"),
    reward("raises", "return task.meta['gold']", "reward score", "KeyError: 'gold'", "FILE.py:",
           "in score"),
    reward("exit", "raise SystemExit(2)", "reward score", "exit(2)", "finite number"),
    reward("async", "return 1.0", "async", "plain function", head="async def score(task, row):"),
    reward("one parameter", "return 1.0", "score(task)", "(task, trajectory)", head="def score(task):"),
    reward("not a function", "pass", "reward", "int", "function", head="score = 3\nif True:"),
    reward("verl's text", "return 'yes'", "score", "'yes'", "finite number",
           head="def score(data_source, solution_str, ground_truth):"),
    reward("method without self", "def __call__(task, row):\n        return 1.0", "reward score(row)",
           "(task, trajectory)", head="class score:"),
    reward("generator", "yield 1.0", "reward score", "generator", "finite number"),
    reward("future", "return asyncio.sleep(0)", "reward score", "coroutine", "finite number"),
    part("credit", "exits", "def mine(adv, batch):\n    raise SystemExit(3)", "credit mine (FILE.py:",
         "called exit(3)", "FILE.py:"),
    part("loss", "scalar", LOSS.format("(-logp.mean(), {})"), "loss", "FILE.py:", "shape []", "per token"),
    part("loss", "one value", LOSS.format("-logp"), "loss", "Tensor of shape", "(loss, metrics)"),
    part("loss", "None", LOSS.format("None"), "loss", "None", "(loss, metrics)"),
    part("loss", "a row", LOSS.format("(-logp.sum(1), {})"), "shape [2]", "one number per token"),
    part("loss", "no gradient", LOSS.format("(-logp.detach(), {})"), "does not depend on logp", "FILE.py:"),
    part("loss", "integers", LOSS.format("(logp.long(), {})"), "torch.int64", "float"),
    part("loss", "metrics list", LOSS.format("(-logp, [1])"), "metrics a list", "dict"),
    part("loss", "metric text", LOSS.format("(-logp, {'a': 'b'})"), "metric 'a'", "the text 'b'", "number"),
    part("loss", "metric of rows", LOSS.format("(-logp, {'a': logp.sum(1)})"), "metric 'a'", "shape [2]"),
    part("loss", "metric name", LOSS.format("(-logp, {3: logp})"), "called 3", "texts"),
    part("loss", "raises", LOSS.format("batch.nothing"), "loss", "AttributeError", "FILE.py:"),
    part("loss", "factory None", "def mine():\n    pass", "loss mine (FILE.py:", "None", "a function"),
    part("loss", "direct scalar", DIRECT.format("logp, entropy, batch", "(logp.sum(), {})"), "shape []"),
    part("loss", "a metric of graft", LOSS.format("(-logp, {'loss': logp})"), "(FILE.py:", "called 'loss'",
         "another name"),
    part("weight", "NaN", DIRECT.format("logp, batch", "logp * math.nan"), "by weight mine (FILE.py:",
         "not a finite number"),
    part("weight", "one number", DIRECT.format("logp, batch", "1.0"), "weight mine (FILE.py:", "per token"),
    part("weight", "integers", DIRECT.format("logp, batch", "batch.mask.long()"), "torch.int64",
         ".float()"),
    part("weight", "in place", "def mine(logp, batch):\n    batch.mask[:] = False\n    return logp",
         "weight mine (FILE.py:", "batch.mask in place"),
    part("credit", "one parameter", DIRECT.format("adv", "adv"), "credit mine (FILE.py:", "takes (adv)",
         "it must take (advantages, batch)"),
    part("loss", "NaN", LOSS.format("(logp * math.nan, {})"), "loss", "FILE.py:", "not a finite number"),
    part("loss", "log-probs in place", LOSS.format("(-logp.mul_(0), {})"), "loss", "FILE.py:", "in place"),
    part("loss", "an object", "mine = 3", "loss 'MODULE:mine'", "the int 3", "function"),
    part("credit", "[N]", DIRECT.format("adv, batch", "batch.reward"), "credit mine (FILE.py:", "shape [2]",
         "per token"),
    part("credit", "NaN", DIRECT.format("adv, batch", "adv * math.nan"), "credit mine", "NaN", "finite"),
    part("credit", "None", DIRECT.format("adv, batch", "None"), "credit mine", "None", "tensor of shape"),
    part("credit", "raises", DIRECT.format("adv, batch", "batch['reward']"), "credit mine", "TypeError"),
    part("reduction", "scalar", DIRECT.format("batch", "torch.tensor(1.0)"), "reduction mine", "shape []"),
    part("reduction", "zero", DIRECT.format("batch", "batch.zeros()"), "reduction mine", "with 0"),
    part("reduction", "NaN", DIRECT.format("batch", "batch.zeros() / 0"), "reduction mine", "NaN"),
    part("branch", "unfinished", "async def mine(b):\n    await b.root()\n    await b.root()",
         "branch mine (FILE.py:", "2 of its 2 attempts were not over", "trajectory.finish()"),
    part("branch", "fewer", "async def mine(builder):\n    await (await builder.root()).finish()",
         "branch mine (FILE.py:", "made 1 attempts", "rollout.samples=2"),
    part("branch", "more",
         "async def mine(builder):\n    for _ in range(3):\n" "        await (await builder.root()).finish()",
         "made 3 attempts", "rollout.samples=2"),
    part("branch", "not async", "def mine(builder):\n    pass", "branch mine", "None", "async def"),
    part("branch", "raises", "async def mine(builder):\n    builder.nothing", "branch mine",
         "AttributeError", "FILE.py:"),
    part("name", "preset", "mine = {'loss': 'clip'}", "algorithm 'MODULE:mine'", "dict of 1", "a Preset"),
    part("credit", "in place", "def mine(adv, batch):\n    batch.reward.add_(1)\n    return adv + 1",
         "credit mine (FILE.py:", "batch.reward in place", "leave the batch"),
    part("loss", "in place", LOSS.format("(-logp * batch.advantages.mul_(2), {})"),
         "batch.advantages in place"),
    part("loss", "numpy", LOSS.format("(-logp.detach().numpy(), {})"), "a ndarray of shape", "per token"),
    part("branch", "object", "mine = object()", "branch 'MODULE:mine'", "object", "function"),
    tool("object", "return object()", "tool poke (FILE.py:", "an object", "JSON"),
    tool("None", "pass", "tool poke (FILE.py:", "None", "-> None"),
    tool("None for str", "pass", "tool poke", "None", annotation=" -> str"),
    tool("generator", "yield 1", "tool poke", "generator", "JSON"),
    tool("coroutine", "return asyncio.sleep(0)", "tool poke", "coroutine", "JSON"),
    tool("variadic", "return '1'", "tool 'poke'", "*x", "name every parameter", parameters=", *x: str"),
    tool("option", "return '1'", "@tool", "'nam'", "did you mean 'name'", mark="@graft.tool(nam='x')"),
    tool("property", "return '1'", "@tool", "property", mark="@graft.tool\n    @property"),
    wrapper("wrapper None", "def around(env):\n    Wrapper(env)", "wrapper around (FILE.py:", "None"),
    wrapper("wrapper raises", "def around(env):\n    return env.nothing", "around (FILE.py:",
            "no attribute"),
    wrapper("wrapper text", "def around(env):\n    return 'env'", "around (FILE.py:", "has no reset"),
    wrapper("wrapper needs more", "def around(env, size):\n    return env", "MODULE:around", "needs size="),
    wrapper("wrapper changes step",
            "class around(Wrapper):\n    def step(self, action):\n        return 'h'",
            "around.step (FILE.py:", "the text 'h'", "a Turn"),
    Mistake("missing package", "import no_such_package\n\n\nclass Mine(Env):\n    pass",
            ("cannot import 'no_such_package'", "imported at FILE.py:")),
    Mistake("raises at import", "x = {}['key']", ("KeyError: 'key'", "FILE.py:", "cannot be imported")),
    Mistake("syntax", "def f(:\n    pass", ("SyntaxError", "FILE.py:", "def f(:")),
    Mistake("typo", "class Mien(Env):\n    pass", ("has no 'Mine'", "did you mean 'Mien'")),
    Mistake("an instance", "Mine = Env()", ("an Env", "name a class", "its own instance")),
    Mistake("returns a class", "def Mine():\n    return Env", ("the class Env", "name a class")),
    Mistake("returns None", "def Mine():\n    Env()", ("gave None", "returns an environment")),
    Mistake("returns one twice", "ENV = Env()\n\n\ndef Mine():\n    return ENV",
            ("same environment Env (FILE.py:", "twice", "inside the function")),
    Mistake("a file", "", ("names a file", "'mine:Mine'"), {"task.env": "mine.py:Mine"}),
    Mistake("an argument", "class Mine(Env):\n    pass", ("has no argument 'size'", "known: none"),
            {"task.args": {"size": 3}}),
    Mistake("tracker without methods",
            "class Mine(Env):\n    pass\n\n\n" "def track(folder, config):\n    return 3",
            ("tracker track (FILE.py:", "the int 3", "log, truncate_after, close"),
            {"run.trackers": ["MINE:track"]}),
    Mistake("demonstrate None", "class Mine(Env):\n    def demonstrate(self, rng):\n        pass",
            ("Mine.demonstrate (FILE.py:", "None", "Author.POLICY"), {"sft.steps": 1}),
    Mistake("demonstrate texts", "class Mine(Env):\n    def demonstrate(self, rng):\n        return ['3']",
            ("Mine.demonstrate (FILE.py:", "'3' is no entry", "Author.POLICY"), {"sft.steps": 1}),
    Mistake("demonstrate unknown author",
            "class Mine(Env):\n    def demonstrate(self, rng):\n" "        return [('me', '3')]",
            ("Mine.demonstrate", "('me', '3') is no entry"), {"sft.steps": 1}),
    Mistake("tool of a global",
            "ENV = Env()\n\n\ndef look() -> str:\n    '''Look.'''\n"
            "    return str(ENV.turns)\n\n\ndef Mine():\n    return ToolEnv(ENV, [look])",
            ("tool look (FILE.py:", "the global ENV", "@graft.tool def look(self")),
]  # fmt: skip


@pytest.mark.parametrize("mistake", MODULES, ids=lambda mistake: mistake.name)
def test_a_mistake_is_named_with_its_place_what_came_and_what_is_wanted(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    message = run(mistake, tmp_path, monkeypatch)
    assert [part for part in mistake.fragments if part not in message] == [], message


FINE = """
class Mine(Env):
    def respond(self, action):
        if self.turns:
            return "", np.float32(1), np.bool_(True), 0, None
        return "h", torch.tensor(0.5), False, False, {}


def score(task, row):
    return np.bool_(True)


def mine(logp, entropy, batch):
    return -batch.advantages * logp, {"loss/mean": logp.mean(), "loss/one": 1}


def credit(adv, batch):
    return batch.reward[:, None] * batch.mask
"""


def test_what_is_right_goes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Five values as a tuple, numpy and torch scalars, functions instead of factories, a dict as recipe."""
    (tmp_path / "fine.py").write_text(f"{HEAD}\n\n{FINE}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    changes = {
        "algo.loss": "fine:mine",
        "algo.credit": ["fine:credit"],
        "task.reward": "fine:score",
        "run.log_episodes": 1,
    }
    graft.train(recipe(tmp_path, "fine", changes))
    (line,) = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    metrics = json.loads(line)
    assert metrics["reward"] == 1.0 and metrics["loss/one"] == pytest.approx(1.0)


def test_a_traceback_is_kept_in_the_episode_and_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    body = "def respond(self, action):\n    return self.board"
    monkeypatch.setenv("GRAFT_DEBUG", "1")
    message = run(env("raises", body), tmp_path, monkeypatch)
    assert "FILE.py:" in message and "in respond" in message
    assert str(tmp_path / "runs" / "run" / "errors.log") in message
    log = (tmp_path / "runs" / "run" / "errors.log").read_text()
    for text in (log, capsys.readouterr().err):
        assert "Traceback (most recent call last)" in text and "return self.board" in text
