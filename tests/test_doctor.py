"""`graft doctor RECIPE`: a good recipe passes; of a bad one, the line that should fail does."""

from __future__ import annotations

import json
import threading
import time
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from typer.testing import CliRunner

from graft.commands.doctor import doctor
from graft.config import ConfigError, load_config
from graft.doctor import Check, machine, report, resources
from graft.doctor.cheats import play
from graft.doctor.conversation import conversation_check
from graft.doctor.deadline import checked
from graft.doctor.environments import asks_a_service
from graft.doctor.recipe import examine_recipe
from graft.doctor.rewards import RewardTrial, reward_check, turns
from graft.doctor.tools import answer_of, arguments_for, tool_checks
from graft.engine.errors import EngineError
from graft.engine.native.engine import NativeEngine
from graft.envs import make
from graft.envs.base import BaseEnv
from graft.models.decoder import Decoder
from graft.models.io.load import load_model
from graft.models.io.save import save_model
from graft.models.shape import ModelShape
from graft.rewards import make_reward
from graft.text.chat import Chat
from graft.text.tokenizer import FastTokenizer
from graft.tools.function import tool
from graft.train.memory.device_memory import DeviceMemory
from graft.types import Author, CallText, Episode, Leaf, Span, Task, Trajectory, Turn
from tests.engine.fake_sglang import serving_sglang

app = typer.Typer(pretty_exceptions_enable=False)
app.command()(doctor)
invoke = CliRunner().invoke

SHAPE = "{width: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16, ff: 32, max_positions: 512}"
RECIPE = f"""
run: {{eval_tasks: 0, trackers: []}}
model: {{shape: {SHAPE}}}
task: {{env: calculator}}
rollout: {{tasks: 4, samples: 2, max_tokens: 10, max_turns: 3, max_context: 64}}
train: {{steps: 2}}
sft: {{steps: 2, demo_args: {{tool_rate: 0.3}}}}
"""
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops what was thought before, as many templates of reasoning models do."""


def always_one(task: Task, row) -> float:
    return 1.0


def lonely(city: str) -> str:
    """What the weather is like."""
    raise OSError(f"no route to {city}")


def weather(city: str, days: int) -> str:
    """What the weather is like."""
    return f"sunny in {city} for {days} day"


class Broken:
    name = "broken"

    def __call__(self, content: str) -> str:
        raise OSError("no route to host")


class Hanging:
    name = "hanging"

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, content: str) -> str:
        self.opened.wait(60)
        return "at last"


@pytest.fixture(autouse=True)
def quick_machine(monkeypatch):
    """The machine has tests of its own, in test_envs_command."""
    monkeypatch.setattr(machine, "sandbox", list)
    monkeypatch.setattr(machine, "extras", list)


@pytest.fixture
def written(tmp_path) -> str:
    (tmp_path / "tiny.yaml").write_text(RECIPE)
    return str(tmp_path / "tiny.yaml")


@pytest.fixture(scope="module")
def chatty(tmp_path_factory) -> Path:
    """A chat model that reads bytes, in a folder of its own."""
    folder = tmp_path_factory.mktemp("models") / "chatty"
    tokenizer = FastTokenizer.bytes()
    shape = ModelShape(
        width=32, layers=1, heads=2, kv_heads=1, head_dim=16, ff=32, tied=False,
        vocab_size=tokenizer.vocab_size, max_positions=4096,
    )  # fmt: skip
    save_model(Decoder(shape).initialise(0), folder)
    tokenizer.save(folder)
    return folder


@pytest.fixture(autouse=True)
def _few_cheats(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred answers to one task and not to eight: most tests look at other checks."""
    monkeypatch.setattr("graft.doctor.environments.CHEATED", 1)


def checks_of(path: str, *overrides: str) -> dict[str, Check]:
    return {check.name: check for check in examine_recipe(load_config(path, overrides))}


def failures(found: dict[str, Check]) -> list[str]:
    return [name for name, check in found.items() if check.verdict == "fail"]


def test_a_healthy_recipe_passes_and_shows_its_loss_mask(written):
    result = invoke(app, [written, "--json"])
    assert result.exit_code == 0, result.output
    lines = result.stderr.splitlines()
    assert lines[0].startswith("pass  python") and lines[-1].endswith("0 failed")
    report_json = json.loads(result.stdout)
    assert report_json["is_ready"] is True and report_json["recipe"] == written
    checks = {check["name"]: check for check in report_json["checks"]}
    assert [name for name, check in checks.items() if check["verdict"] == "fail"] == []
    assert {
        "python", "packages", "device", "disk", "memory", "checkpoints", "trackers", "tokenizer", "env",
        "template",
        "ends", "reward", "tool calculator", "model", "engine", "attempts", "loss mask", "mask",
        "eos", "log-probs", "micro",
    } <= set(checks)  # fmt: skip
    tokens = checks["loss mask"]["data"]["tokens"]
    trained = "".join(token["text"] for token in tokens if token["is_trained"])
    context = "".join(token["text"] for token in tokens if not token["is_trained"])
    assert trained.startswith("[") and trained.endswith("<eos>") and ";" not in trained
    assert context.endswith(";") and {t["author"] for t in tokens} == {"task", "policy", "env"}
    assert "»[" in checks["loss mask"]["seen"] and "<eos>«" in checks["loss mask"]["seen"]
    assert checks["cheats"]["verdict"] == "pass"
    assert "calls without a purpose" in checks["cheats"]["seen"]


def test_the_lines_are_printed_as_they_are_made():
    printed: list[str] = []
    assert [check.name for check in report(printed.append)] == [
        "python",
        "packages",
        "device",
        "agents",
        "disk",
    ]
    assert len(printed) == 5


def test_wrong_usage_is_an_error_before_any_check(written):
    assert isinstance(invoke(app, ["train.lr=1"]).exception, ConfigError)
    assert isinstance(invoke(app, [written, "train.lrr=1"]).exception, ConfigError)


def test_a_recipe_for_many_processes_is_checked_by_one_outside_the_runs_folder(written, tmp_path):
    found = checks_of(
        written, "parallel.tp=4", "cluster.address=auto", f"run.dir={tmp_path / 'runs'}"
    )
    assert not (tmp_path / "runs").exists()
    assert "parallel.tp=4, cluster.address=auto" in found["processes"].seen
    assert failures(found) == []


def test_a_chat_model_passes_and_a_template_that_drops_thoughts_is_named(written, chatty):
    model = (f"model.path={chatty}", "model.shape={}", "task.env=game:GuessTheNumber-v0")
    more = ("sft.steps=0", "sft.demo_args={}", "rollout.max_context=2048")
    found = checks_of(written, *model, *more, "model.chat_template=chatml")
    assert failures(found) == []
    assert "is not trained" in found["ends"].seen  # the newline behind the end of a turn
    assert "<|im_end|>«" in found["loss mask"].seen
    template = chatty.parent / "forgetful.jinja"
    template.write_text(FORGETFUL)
    found = checks_of(written, *model, *more, f"model.chat_template={template}")
    assert failures(found) == [] and "attempts" in found
    assert "rewrites turn" in found["template"].seen
    assert "model.history=append" in found["template"].seen
    letter = ("model.history=template", f"model.chat_template={template}")
    found = checks_of(written, *model, *more, *letter)
    assert failures(found) == [] and "a new context begins" in found["template"].seen
    only_one = checks_of(
        written, *model, *more, f"model.chat_template={template}", "rollout.max_turns=1"
    )
    assert "Here it does not matter" in only_one["template"].seen and failures(only_one) == []


def test_a_missing_model_is_reported_once(written):
    found = checks_of(written, "model.path=./models/nowhere", "model.shape={}")
    assert failures(found) == ["tokenizer"]
    assert "models/nowhere" in found["tokenizer"].seen
    assert found["model"].verdict == "warn" and list(found) == [
        "settings", "trackers", "tokenizer", "model",
    ]  # fmt: skip


def test_a_missing_environment_is_reported_once(written):
    found = checks_of(written, "task.env=calculater", "model.alphabet=bytes")
    assert failures(found) == ["env"]
    assert "did you mean 'calculator'" in found["env"].seen
    assert "its environment does not work" in found["model"].seen


def test_too_little_memory_fails_and_nothing_is_opened(written, monkeypatch):
    monkeypatch.setattr(
        resources, "device_memory_of", lambda device: DeviceMemory(device, 1 << 26, False, "CPU")
    )
    found = checks_of(written)
    assert failures(found) == ["memory"]
    assert "of the 64 MB" in found["memory"].seen or "0.06 GB" in found["memory"].seen
    assert "larger device" in found["memory"].remedy and "torchrun" in found["memory"].remedy
    assert "would not fit" in found["model"].seen and "engine" not in found


def test_checkpoints_that_do_not_fit_on_the_disk_are_reported(written, monkeypatch):
    usage, config = namedtuple("usage", "total used free"), load_config(written)
    for free, verdict in ((1 << 16, "fail"), (1 << 18, "warn")):  # one is 86 kB, four are kept
        monkeypatch.setattr(resources.shutil, "disk_usage", lambda _, free=free: usage(0, 0, free))
        assert resources.checkpoint_check(config, config.run).verdict == verdict


def test_a_reward_that_every_answer_earns_fails(written):
    found = checks_of(written, "task.reward=tests.test_doctor:always_one")
    assert failures(found) == ["reward"]
    assert "gold answers earn 1" in found["reward"].seen
    assert "garbage earns 1" in found["reward"].seen
    assert found["cheats"].verdict == "pass"  # the random policy earns as much


def pays_for_a_mark(task: Task, trajectory: Trajectory) -> float:
    """1 for the right answer, and for any that contains 42."""
    text = trajectory.answer_text
    return float(text.strip().endswith(str(task.answer)) or "42" in text)


def test_a_cheat_that_is_paid_is_a_warning_with_its_answer(written):
    found = checks_of(written, "task.reward=tests.test_doctor:pays_for_a_mark")["cheats"]
    assert found.verdict == "warn" and "a constant earns 1 of 1" in found.remedy
    assert "42" in found.seen and "the random policy earns 0 on average of 1 tasks" in found.seen
    assert found.data is not None and found.data["cheats"][0]["mean"] == 1.0


def test_a_reward_that_asks_a_service_is_not_asked_about_cheats(written):
    found = checks_of(written, 'task.reward={judge: {url: "http://127.0.0.1:9/v1", retries: 0}}')
    assert found["cheats"].verdict == "pass" and "not played" in found["cheats"].seen


@pytest.mark.parametrize("name", ["math_answer", "code_tests"])
def test_bundled_rewards_that_only_compute_are_no_services(name: str):
    assert not asks_a_service(make_reward(name))
    assert not asks_a_service(make_reward([name, "f1"]))
    assert asks_a_service(make_reward([name, {"judge": {"url": "http://localhost:9/v1"}}]))


@pytest.mark.parametrize("env_id", ["calculator", "game:GuessTheNumber-v0", "countdown"])
def test_three_environments_are_played_by_every_cheat(env_id: str):
    trial = RewardTrial(lambda task: make(env_id), None, Chat(FastTokenizer.bytes(), "plain"), 6)
    found = play(trial, [Task("t", env_id, seed=1)], ["{}"])
    kinds = {one.kind for one in found}
    assert {"nothing", "a constant", "the question again", "every candidate"} <= kinds
    assert {"a verdict in the answer", "a program without work"} <= kinds
    assert ("calls without a purpose" in kinds) == (env_id == "calculator")


class Posed(BaseEnv):
    """Asks for 7; the test sets what earns a reward and whether there is a teacher."""

    env_id = "posed"

    def __init__(self, pays, teacher="", answer="7") -> None:
        super().__init__()
        self.pays, self.teacher, self.gold = pays, teacher, answer

    def pose(self) -> str:
        self.answer = self.gold
        return "?"

    def respond(self, action: str) -> Turn:
        return Turn(reward=self.pays(action), terminated=True)

    def demonstrate(self, rng):
        if not self.teacher:
            return super().demonstrate(rng)
        return [(Author.POLICY, self.teacher)]


@pytest.mark.parametrize(
    ("pays", "teacher", "answer", "verdict", "why"),
    [
        (lambda action: float(action == "\\boxed{7}"), "", "7", "pass", "gold answers earn 1,"),
        (lambda action: float("so 7" in action), "so 7", None, "pass", "the best demonstration 1,"),
        (lambda action: 0.5, "", "7", "fail", "gold answers earn 0.5, garbage earns 0.5"),
        (lambda action: -float(action == "7"), "7", "7", "fail", "garbage earns 0"),
        (lambda action: 0.0, "7", "7", "fail", "the best demonstration 0, garbage earns 0"),
        (lambda action: 0.0, "", "7", "warn", "gold answers earn 0, garbage earns 0"),
        (lambda action: 0.0, "", None, "warn", "garbage earns 0"),
        (lambda action: float("nan"), "", "7", "fail", "not a finite number"),
    ],
)
def test_the_reward_is_tried_on_right_answers_and_on_garbage(pays, teacher, answer, verdict, why):
    stage = RewardTrial(
        lambda task: Posed(pays, teacher, answer), None, Chat(FastTokenizer.bytes())
    )
    found = reward_check(stage, [Task(f"t{i}", "posed", seed=i) for i in range(3)], {})
    assert (found.verdict, why in found.seen) == (verdict, True), found


def test_gold_answers_that_are_not_all_rewarded_are_a_warning():
    class Some(Posed):
        def pose(self) -> str:
            self.answer = "7" if self.seed else "8"
            return "?"

    stage = RewardTrial(
        lambda task: Some(lambda action: float(action == "8")), None, Chat(FastTokenizer.bytes())
    )
    found = reward_check(stage, [Task(f"t{i}", "posed", seed=i) for i in range(2)], {})
    assert found.verdict == "warn"
    assert "1 of 2 gold answers earn 1" in found.seen


def test_consecutive_texts_of_a_teacher_are_one_turn_and_may_end_in_a_call():
    call = CallText("compare A", "compare", ("A",))
    trace = [(Author.POLICY, "So "), (Author.POLICY, call), (Author.ENV, "A"), (Author.POLICY, "A")]
    first, second = turns(trace)
    assert isinstance(first, CallText) and first == "So compare A" and first.tool == "compare"
    assert second == "A"


def test_a_broken_tool_fails_and_the_others_answer(written):
    ours = [f"'tests.test_doctor:{name}'" for name in ("Broken", "lonely", "weather")]
    use = f"[calculator, {', '.join(ours)}]"
    more = ("model.alphabet=bytes", "task.env=arithmetic", "sft.steps=0", "sft.demo_args={}")
    found = checks_of(
        written,
        *more,
        f"task.wrappers=[{{tools: {{use: {use}}}}}]",
        "rollout.max_context=2000",
        "model.shape.max_positions=2000",
    )
    assert failures(found) == ["tool broken"]
    assert "OSError: no route to host" in found["tool broken"].seen
    assert found["tool lonely"].verdict == "warn"
    assert "no route to test" in found["tool lonely"].seen
    assert found["tool calculator"].seen.startswith("'1+1' -> '2'")
    assert "sunny in test for 1 day" in found["tool weather"].seen


def test_a_tool_that_hangs_is_given_up_at_its_deadline():
    tool = Hanging()
    env = make("arithmetic", wrappers=[{"tools": {"use": [tool, "calculator"]}}])
    started = time.perf_counter()
    hangs, answers = tool_checks(env, deadline=0.3)
    assert time.perf_counter() - started < 30
    tool.opened.set()
    assert (hangs.verdict, hangs.seen) == ("fail", "no answer within 0.3 s")
    assert answers.verdict == "pass"


class Cart(BaseEnv):
    """Its tool reads a list that only `pose` makes."""

    def pose(self) -> str:
        self.items: list[int] = []
        self.answer = "1"
        return "Buy one."

    def respond(self, action: str) -> Turn:
        return Turn(reward=float(len(self.items) == 1), terminated=True)

    @tool
    def buy(self, n: int) -> str:
        """Buy things."""
        self.items.append(n)
        return f"{sum(self.items)} in the cart"


def test_a_tool_is_called_after_a_task_was_posed():
    [check] = tool_checks(make(f"{__name__}:Cart"), deadline=5)
    assert check.verdict == "pass" and "1 in the cart" in check.seen


def test_a_tool_of_ours_must_understand_what_it_is_given(monkeypatch):
    from graft.tools.calculator import Calculator

    assert answer_of(Calculator(), "tool").verdict == "pass"
    monkeypatch.setattr(Calculator, "__call__", lambda self, content: "Error: out of batteries")
    assert answer_of(Calculator(), "tool").verdict == "fail"


def test_a_tool_of_an_mcp_server_is_listed_and_not_called():
    class Link:
        def tools(self):
            return [{"name": "send_mail"}]

    class Remote:
        name, called, link = "post_send_mail", "send_mail", Link()

        def __call__(self, content):
            raise AssertionError("it was called")

    assert answer_of(Remote(), "tool").verdict == "pass"
    Remote.called = "read_mail"
    gone = answer_of(Remote(), "tool")
    assert gone.verdict == "fail" and "but no longer lists it: send_mail" in gone.seen


def test_arguments_are_made_up_from_the_schema():
    class Typed:
        parameters = {
            "properties": {
                "city": {"type": "string"},
                "unit": {"enum": ["celsius", "kelvin"]},
                "days": {"type": ["integer", "null"]},
                "tags": {"type": "array"},
                "more": {"type": "string"},
            },
            "required": ["city", "unit", "days", "tags"],
        }

    assert arguments_for(Typed()) == {"city": "test", "unit": "celsius", "days": 1, "tags": []}


def test_an_engine_in_bad_health_fails_and_the_others_are_checked(written, monkeypatch):
    def unhealthy(self) -> None:
        raise EngineError("server http://host:1 does not answer")

    monkeypatch.setattr(NativeEngine, "health", unhealthy, raising=False)
    found = checks_of(written)
    assert failures(found) == ["engine"]
    assert found["engine"].seen == "server http://host:1 does not answer"
    assert found["log-probs"].verdict == "pass"


def test_an_engine_that_samples_from_other_weights_is_found_out(written, monkeypatch):
    """With rollout.staleness the engine has weights of its own: here they never reach it."""
    load = NativeEngine.load

    def wrong(self, weights, version) -> None:
        load(self, {name: 2 * tensor for name, tensor in weights.items()}, version)

    monkeypatch.setattr(NativeEngine, "load", wrong)
    found = checks_of(written, "rollout.staleness=1")
    assert failures(found) == ["log-probs"]
    assert "other weights" in found["log-probs"].remedy


def test_adapters_that_are_served_pass_and_others_do_not(written, chatty, monkeypatch):
    given = (
        f"model.path={chatty}", "model.shape={}", "lora.rank=2", "rollout.max_context=200",
        "task.env=arithmetic", "sft.steps=0", "sft.demo_args={}",
    )  # fmt: skip
    found = checks_of(written, *given)
    assert failures(found) == []
    assert "of rank 2" in found["adapters"].seen
    score = NativeEngine.score

    def deaf(self, texts, *more):
        """As if the adapters were not there: other numbers."""
        return [[[[x + 0.5 for x in k] for k in j] for j in i] for i in score(self, texts, *more)]

    monkeypatch.setattr(NativeEngine, "score", deaf)
    found = checks_of(written, *given)
    assert failures(found) == ["learner"]
    assert "does not serve the weights that are trained" in found["learner"].seen


def test_an_environment_that_breaks_is_named(written, monkeypatch):
    from graft.envs.calculator import Expression

    def respond(self, action: str) -> Turn:
        raise ZeroDivisionError("in the middle of it")

    monkeypatch.setattr(Expression, "respond", respond)
    found = checks_of(written)
    assert "reward" in failures(found) and "ZeroDivisionError" in found["reward"].seen
    assert found["attempts"].verdict in ("warn", "fail")
    assert "in the middle of it" in found["attempts"].seen


def test_prompts_that_leave_no_room_fail(written):
    found = checks_of(written, "rollout.max_context=5", "rollout.max_tokens=4")
    assert failures(found) == ["env", "attempts"]
    assert "raise rollout.max_context=5" in found["env"].remedy
    assert "leave no space for an answer" in found["attempts"].seen


def test_missing_trackers_fail(written, monkeypatch):
    assert resources.tracker_check(["tensorboard"]).verdict == "pass"
    found = checks_of(written, "run.trackers=[tensorbored]")
    assert failures(found) == ["trackers"] and "tensorbored" in found["trackers"].seen
    monkeypatch.setitem(__import__("sys").modules, "wandb", None)
    wandb = resources.tracker_check(["wandb"])
    assert wandb.verdict == "fail" and "pip install wandb" in wandb.remedy


def test_a_warm_up_from_rows_shows_its_first_row(written, tmp_path):
    rows = tmp_path / "rows.jsonl"
    messages = [{"role": "user", "content": "2+3="}, {"role": "assistant", "content": "5"}]
    rows.write_text(json.dumps({"messages": messages}) + "\n")
    found = checks_of(
        written, f"sft.data={rows}", "train.steps=0", "task.env=", "model.alphabet=bytes",
        "sft.demo_args={}",
    )  # fmt: skip
    assert failures(found) == []
    assert f"the first row of {rows}: 2 of 6 tokens" in found["loss mask"].seen
    assert found["loss mask"].seen.endswith("task    2+3=\npolicy  »5<eos>«")


def test_a_conversation_of_which_nothing_is_trained_fails():
    digits = FastTokenizer.characters("0123456789+=")
    zeros = [0.0] * 2
    answer = Span(0, Author.POLICY, [8, 1], [8, 1], zeros, zeros, [0, 0], mask=[False, False])
    episode = Episode(
        Task("t", "e"), [Span(None, Author.TASK, digits.encode("2+3=")), answer], [Leaf((1,))]
    )
    assert conversation_check(episode, digits, "a test").verdict == "fail"
    answer.mask = [True, False]  # a turn whose end is not trained is plain to see
    assert conversation_check(episode, digits, "a test").seen.endswith("policy  »5«<eos>")


def test_a_check_that_hangs_or_breaks_is_a_line():
    hangs = checked("slow", lambda: time.sleep(5) or [], 0.2)
    assert [(c.name, c.verdict, c.seen) for c in hangs] == [
        ("slow", "fail", "no answer within 0.2 s")
    ]

    def halfway():
        yield Check("one", "pass", "")
        raise SystemExit(3)

    (found,) = checked("exits", halfway, 5.0)
    assert (found.verdict, found.seen) == ("fail", "SystemExit: 3")
    assert "GRAFT_DEBUG=1" in found.remedy
    (found,) = checked("ours", lambda: [][0] if False else _raise(ConfigError("do this")), 5.0)
    assert (found.seen, found.remedy) == ("do this", "")


def _raise(error: Exception):
    raise error


def test_lines_below_the_first_stand_under_what_was_seen():
    text = str(Check("mask", "pass", "one\ntwo", "three"))
    assert text.splitlines() == [
        "pass  mask            one",
        " " * 22 + "two",
        " " * 22 + "-> three",
    ]
    assert "data" not in Check("mask", "pass", "one").to_json()


def test_a_server_takes_the_weights_and_a_dead_one_is_named(written, chatty):
    tokenizer = FastTokenizer.bytes()
    other = Decoder(load_model(chatty).shape).initialise(9)  # weights that another run left there
    given = (
        f"model.path={chatty}", "model.shape={}", "engine.name=sglang", "rollout.temperature=0.7",
        "task.env=arithmetic", "sft.steps=0", "sft.demo_args={}", "rollout.max_context=400",
    )  # fmt: skip
    with serving_sglang(other, tokenizer) as server:
        found = checks_of(written, *given, f"engine.url=[{server.url}]")
    assert failures(found) == []
    assert "a copy of them" in found["engine"].seen
    assert "at temperature 0.7" in found["log-probs"].seen
    found = checks_of(written, *given, f"engine.url=[{server.url}]", "rollout.deadline=2")
    assert failures(found) == ["model"]
    assert server.url in found["model"].seen


def test_a_gpu_that_the_kernels_do_not_support_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total_memory=16 * 2**30)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda number: "Tesla T4")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda number: memory)
    monkeypatch.setattr(
        "graft.models.device.why_no_kernels", lambda _: "this GPU is older than Ampere"
    )
    found = machine.device()
    assert found.seen == "1 x Tesla T4, 16 GiB; this GPU is older than Ampere"
    assert "plain PyTorch replaces the kernels" in found.remedy
