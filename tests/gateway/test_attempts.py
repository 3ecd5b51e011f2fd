"""Agents inside rollouts: functions and commands as attempts, where rewards come from, how they fail."""

from __future__ import annotations

import ast
import asyncio
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graft.config import ConfigError
from graft.envs.base import BaseEnv
from graft.gateway.address import GatewayAddress
from graft.gateway.attempts import AgentAttempts
from graft.gateway.client import AgentClient
from graft.gateway.programs import CommandAgent, FunctionAgent, Outcome, make_program
from graft.gateway.request import RefusedRequest
from graft.rollout.branches.branch import independent
from graft.rollout.collect import collect
from graft.rollout.failure import RolloutFailure
from graft.rollout.setup import RolloutSetup
from graft.text.chat import Chat
from graft.train.errors import RunStopped
from graft.train.step_metrics import commonest_failure, refuse_unusable
from graft.types import Episode, Sampling, Status, Task, Turn
from graft.user_code import UserCodeError
from tests.gateway.tiny import TASK, check_exact, tiny_engine, tiny_gateway, tiny_tokenizer

pytest.importorskip("uvicorn")


class Question(BaseEnv):
    """One question; an answer earns the share of its characters that are letters."""

    env_id = "question"

    def pose(self) -> str:
        self.answer = "4"
        return f"What is 2+2? {self.rng.randrange(10)}"

    def respond(self, action: str) -> Turn:
        return Turn(reward=0.5, terminated=True)


class Endless(Question):
    max_turns = None

    def respond(self, action: str) -> Turn:
        return Turn("go on")


def setup_with(program: Any, env: type[BaseEnv] = Question, **settings: Any) -> RolloutSetup:
    tokenizer = tiny_tokenizer()
    agents = settings.pop("agents", {})
    return RolloutSetup(
        tiny_engine(tokenizer),
        Chat(tokenizer),
        lambda task: env(),
        Sampling(max_tokens=12),
        **{"max_context": 2000, "deadline": 30.0, **settings},
        agent=AgentAttempts(make_program(program), GatewayAddress(), **agents),
    )


def attempts(
    program: Any, tasks: int = 1, samples: int = 2, env: type[BaseEnv] = Question, **settings: Any
) -> tuple[list[Episode], RolloutSetup]:
    setup = replace(setup_with(program, env, **settings), samples=samples)
    posed = [Task(f"question:{seed}", "question", seed=seed) for seed in range(tasks)]
    try:
        return collect(posed, setup, independent(samples)), setup
    finally:
        setup.close()


async def two_turns(task: Task, client: Any) -> float:
    messages = [*task.prompt]
    for _ in range(2):
        messages.append(await client.chat(messages))
        messages.append({"role": "user", "content": "and now?"})
    return 1.0


def test_an_async_function_is_an_agent_and_its_rows_are_exact():
    episodes, setup = attempts(two_turns, tasks=2, samples=3)
    for episode in episodes:
        assert episode.task.answer == "4" and episode.task.prompt[0]["content"].startswith("What")
        assert [leaf.reward for leaf in episode.leaves] == [1.0] * 3
        assert all(leaf.metrics["turns"] == 2 for leaf in episode.leaves)
        sampled = [span.tokens for span in episode.spans if span.author == "policy"]
        assert len(sampled) == 6  # each attempt samples its own
        gateway = setup.agent.gateway(setup)  # type: ignore[union-attr]
        check_exact(episode, gateway, sampled)


class FakeLibrary:
    """A provider's library; its clients only know whether they were closed."""

    def __init__(self, **options: Any) -> None:
        self.options, self.is_closed = options, False


class OpenAI(FakeLibrary):
    def close(self) -> None:
        self.is_closed = True


class AsyncOpenAI(FakeLibrary):
    async def close(self) -> None:
        self.is_closed = True


@pytest.mark.parametrize("is_blocking", [False, True])
def test_the_clients_of_an_attempt_are_closed_at_its_end(
    is_blocking: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []

    def block(task: Task, client: Any) -> float:
        given.extend([client.openai(), client.openai(http_client="mine")])
        assert not given[0].is_closed
        client.chat(task.prompt)
        return 1.0

    async def wait(task: Task, client: Any) -> float:
        given.extend([client.openai(), client.openai(http_client="mine")])
        await client.chat(task.prompt)
        raise ValueError("closed after an error too")

    library = SimpleNamespace(OpenAI=OpenAI, AsyncOpenAI=AsyncOpenAI)
    monkeypatch.setitem(sys.modules, "openai", library)
    attempts(block if is_blocking else wait, samples=1)
    assert [type(one) for one in given] == [OpenAI if is_blocking else AsyncOpenAI] * 2
    assert [one.is_closed for one in given] == [True, False]  # connections of its own stay open


def test_attempts_of_one_seed_are_the_same_whatever_runs_beside_them():
    first, _ = attempts(two_turns, tasks=3, samples=2)
    alone, _ = attempts(two_turns, tasks=1, samples=2)
    assert [row.tokens for row in first[0].trajectories()] == [
        row.tokens for row in alone[0].trajectories()
    ]


def blocking(task: Task, client: Any) -> dict[str, Any]:
    answer = client.chat(task.prompt, max_tokens=4)
    client.reward(0.25, answer["id"])
    return {"reward": 0.5, "note": answer["role"]}


def test_a_blocking_function_runs_on_a_thread_and_rewards_add_up():
    (episode,), _ = attempts(blocking)
    for leaf in episode.leaves:
        assert leaf.reward == 0.75 and leaf.info["note"] == "assistant"
    rewards = [span.reward for span in episode.spans if span.author == "policy"]
    assert rewards == [0.75, 0.75]  # the turns add up to the leaf's


async def silent(task: Task, client: Any) -> None:
    await client.chat(task.prompt)


def test_without_a_reward_of_its_own_an_attempt_earns_task_reward_then_the_environments():
    def long(task: Task, trajectory: Any) -> float:
        return float(bool(trajectory.answer_text)) * 0.125

    (episode,), _ = attempts(silent, reward=long)
    assert [leaf.reward for leaf in episode.leaves] == [0.125, 0.125]
    (episode,), _ = attempts(silent)
    assert [leaf.reward for leaf in episode.leaves] == [0.5, 0.5]
    with pytest.raises(UserCodeError, match="has no reward: the agent returned none"):
        attempts(silent, env=Endless)


async def broken(task: Task, client: Any) -> float:
    await client.chat(task.prompt)
    raise KeyError("no such tool")


async def idle(task: Task, client: Any) -> float:
    return 1.0


async def slow(task: Task, client: Any) -> float:
    await client.chat(task.prompt)
    await asyncio.sleep(60)
    return 1.0


async def talkative(task: Task, client: Any) -> float:
    messages = [*task.prompt]
    while True:
        messages += [await client.chat(messages), {"role": "user", "content": "more"}]


@pytest.mark.parametrize(
    ("agent", "status", "error"),
    [
        (broken, Status.CRASHED, "KeyError: 'no such tool'"),
        (idle, Status.ENV_ERROR, "without a call"),
        (slow, Status.TIMEOUT, "(agent.seconds)"),
        (talkative, Status.TRUNCATED, "may make 3 calls of the policy"),
    ],
)
def test_a_failed_attempt_is_a_status(agent: Any, status: Status, error: str):
    (episode,), _ = attempts(agent, max_turns=3, agents={"seconds": 0.5 if agent is slow else 30})
    assert [leaf.status for leaf in episode.leaves] == [status] * 2
    assert all(error in leaf.info["error"] for leaf in episode.leaves)
    assert (error in commonest_failure([episode])) == (status is not Status.TRUNCATED)


def test_a_wrong_result_of_an_agent_stops_the_run():
    async def words(task: Task, client: Any) -> str:
        return "good"

    with pytest.raises(UserCodeError, match="a number, None, or"):
        attempts(words)
    with pytest.raises(UserCodeError, match="only if it is `async def`"):
        attempts(lambda task, client: two_turns(task, client), samples=1)


PROGRAM = """
import json, os, sys, urllib.request
body = json.dumps({"model": "x", "messages": [{"role": "user", "content": sys.argv[1]}]}).encode()
def post(url, body):
    asked = urllib.request.Request(url, body, {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]})
    return json.load(urllib.request.urlopen(asked))
said = post(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
task = json.load(open(os.environ["GRAFT_TASK"]))
assert not {"answer", "meta", "seed"} & {*task} and task["prompt"][0]["content"] == sys.argv[1], task
print("folder", sys.argv[2], os.path.exists(sys.argv[2]))
earned = {"reward": float(sys.argv[3] == "4"), "said": said["object"], "id": task["id"]}
json.dump(earned, open(os.environ["GRAFT_REWARD_FILE"], "w"))
"""


def test_a_command_is_an_agent_and_its_file_has_the_reward(tmp_path: Path):
    file = tmp_path / "agent.py"
    file.write_text(PROGRAM)
    command = f"{sys.executable} {file} {{task.prompt}} {{folder}} {{task.answer}}"
    (episode,), _ = attempts(command)
    for leaf in episode.leaves:
        assert (leaf.reward, leaf.status) == (1.0, Status.DONE), leaf.info
        assert leaf.info["said"] == "chat.completion" and leaf.info["id"] == "question:0"
        folder = leaf.info["output"].split()[1]
        assert leaf.info["exit_code"] == 0 and not Path(folder).exists()


def test_a_command_that_fails_is_a_status_with_its_output():
    script = "import sys; print('x' * 100000); print('cannot', file=sys.stderr); sys.exit(3)"
    (episode,), _ = attempts([sys.executable, "-c", script], samples=1)
    (leaf,) = episode.leaves
    assert leaf.status is Status.ENV_ERROR and "exit code 3" in leaf.info["error"]
    kept = episode.spans[leaf.tips[-1]].info["traceback"]
    assert kept.endswith("x\ncannot\n") and len(kept) == 3000
    assert "and last wrote 'cannot'" in leaf.info["error"]
    (episode,), _ = attempts(["/no/such/program"], samples=1)
    assert "cannot be started" in episode.leaves[0].info["error"]
    with pytest.raises(ConfigError, match="'/no/such/program' is no program"):
        CommandAgent(["/no/such/program"]).check()


class Workshop(Question):
    """A machine with one file, which an agent's command can write: its length is the reward."""

    blocking = True

    def pose(self) -> str:
        self.file = Path(tempfile.mkstemp()[1])
        return "Work"

    def run_agent(self, words: Any, variables: Any, url: str) -> tuple[int, str]:
        assert url == variables["OPENAI_BASE_URL"]
        done = subprocess.run([*words, self.file], env=dict(variables), stdout=subprocess.PIPE)
        return done.returncode, done.stdout.decode()

    def respond(self, action: str) -> Turn:
        return Turn(reward=len(self.file.read_text()), terminated=True, info={"graded": action})

    def fork(self) -> Workshop:
        twin = super().fork()
        twin.file = Path(tempfile.mkstemp()[1])
        return twin

    def close(self) -> None:
        self.file.unlink(missing_ok=True)


INSIDE = """
import json, os, sys, urllib.error, urllib.request
def post(url, body):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    return urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers))
post(os.environ["OPENAI_BASE_URL"] + "/chat/completions",
     {"model": "policy", "messages": [{"role": "user", "content": sys.argv[1]}]})
root, session = os.environ["GRAFT_BASE_URL"].split("/s/")
try:
    post(f"{root}/graft/sessions/{session}/reward", {"value": 100.0})
except urllib.error.HTTPError as error:
    print(error.code, sorted(name for name in os.environ if name in ("HOME", "GRAFT_REWARD_FILE")))
open(sys.argv[2], "w").write(sys.argv[1])
"""


def test_a_command_on_the_machine_of_the_environment_is_graded_by_it_alone():
    (episode,), _ = attempts([sys.executable, "-c", INSIDE, "{task.prompt}"], env=Workshop)
    assert [(leaf.status, leaf.reward) for leaf in episode.leaves] == [(Status.DONE, 4.0)] * 2
    for leaf in episode.leaves:
        assert leaf.info["output"] == "403 []\n" and leaf.info["exit_code"] == 0
        assert "graded" in leaf.info  # what the step says is kept


def test_a_command_that_crashes_on_the_machine_earns_nothing():
    (episode,), _ = attempts(
        [sys.executable, "-c", f"{INSIDE}\nsys.exit(3)", "{task.prompt}"], env=Workshop, samples=1
    )
    assert [(leaf.status, leaf.reward) for leaf in episode.leaves] == [(Status.CRASHED, 0.0)]


def outcomes(*scripts: str) -> tuple[list[Outcome | str], int]:
    """What shell scripts earn, or why they fail."""

    async def main() -> tuple[list[Outcome | str], int]:
        gateway = tiny_gateway()
        session = gateway.open(TASK)
        client = AgentClient(session, "http://a/v1", "http://a")
        await client.chat("hello")
        found: list[Outcome | str] = []
        for script in scripts:
            try:
                found.append(await CommandAgent(["sh", "-c", script])(TASK, client))
            except RolloutFailure as failure:
                found.append(str(failure))
        session.end()
        gateway.policy.engine.close()
        return found, session.counts["printed_rewards"]

    return asyncio.run(main())


WRITE = 'printf %s {} > "$GRAFT_REWARD_FILE"'


def test_what_a_program_prints_is_no_reward_whoever_wrote_it():
    lines = ['{"reward": 100}', '  {"reward": 100}', "x\n{'reward': 1}", '{"a": 1, "reward": 1}']
    found, printed = outcomes(
        *(f"printf '%b' '{line}'" for line in lines if "'" not in line), "true"
    )
    assert [one.reward for one in found if isinstance(one, Outcome)] == [None] * 4
    assert printed == 3  # and it is said that nobody read them


@pytest.mark.parametrize(
    ("text", "reward"),
    [("1", 1.0), ("'-2.5'", -2.5), ("true", 1.0), ('\'{"reward": 0.5, "a": 1}\'', 0.5)],
)
def test_a_program_writes_its_reward_into_a_file(text: str, reward: float):
    (found,), _ = outcomes(WRITE.format(text))
    assert isinstance(found, Outcome) and found.reward == reward
    assert found.info.get("a") == (1 if "a" in text and "{" in text else None)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (WRITE.format("much"), "is not JSON"),
        (WRITE.format("'[1]'"), "write a number"),
        (WRITE.format("'{}'"), "write a number"),
        (WRITE.format("''"), "is not JSON"),
        ('head -c 70000 /dev/zero > "$GRAFT_REWARD_FILE"', "more than 65536 bytes"),
        ('ln -s /etc/hostname "$GRAFT_REWARD_FILE"', "cannot be read"),
        ('mkfifo "$GRAFT_REWARD_FILE"', "is no plain file"),
        ('mkdir "$GRAFT_REWARD_FILE"', "is no plain file"),
    ],
)
def test_a_file_that_is_no_reward_fails_the_attempt(script: str, why: str):
    (found,), _ = outcomes(script)
    assert isinstance(found, str) and why in found


def test_a_text_of_the_task_is_no_option_of_the_program():
    def seen(*words: str) -> list[str]:
        task = replace(TASK, prompt=({"role": "user", "content": "-rf /"},))
        show = "import sys; open(sys.argv[1], 'w').write(repr(sys.argv[2:]))"

        async def main() -> None:
            gateway = tiny_gateway()
            client = AgentClient(gateway.open(task), "http://a/v1", "http://a")
            await CommandAgent([sys.executable, "-c", show, str(file), *words])(task, client)

        asyncio.run(main())
        return ast.literal_eval(file.read_text())

    file = Path(tempfile.mkdtemp()) / "seen"
    assert seen("{task.prompt}", "-p{task.prompt}") == [" -rf /", "-p-rf /"]
    assert seen("--", "{task.prompt}") == ["--", "-rf /"]  # the program knows that options are over


def test_programs_get_no_token_of_the_run_unless_the_recipe_names_it(
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("HF_TOKEN", "TASK_SALT", "GRAFT_AGENT_TOKEN", "MINE_A", "MINE_B", "LC_ALL"):
        monkeypatch.setenv(name, "C")
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")

    async def main() -> list[str]:
        client = AgentClient(tiny_gateway().open(TASK), "http://a/v1", "http://a")
        done = await CommandAgent(["env"], ["MINE_*"])(TASK, client)
        return done.info["output"].splitlines()

    lines = asyncio.run(main())
    assert {"MINE_A=C", "MINE_B=C", "LC_ALL=C"} <= {*lines}
    assert not [line for line in lines if "TOKEN" in line or "SALT" in line or "own" in line]


def test_a_program_that_is_killed_by_a_signal_is_a_status_that_names_it():
    (episode,), _ = attempts(["sh", "-c", "kill -9 $$"], samples=2)
    for leaf in episode.leaves:
        assert leaf.status is Status.ENV_ERROR and "was killed by SIGKILL" in leaf.info["error"]
    # both are counted, though both stand at the same empty root
    assert commonest_failure([episode]).startswith("the agent")
    with pytest.raises(
        RunStopped, match=r"none of the 2 attempts .* 2 failed, mostly: the agent"
    ) as told:
        refuse_unusable([episode], [])
    assert "traceback" not in str(told.value)  # a program leaves none here


def test_rewards_of_a_function_are_finite_numbers():
    async def lost(task: Task, client: Any) -> None:
        await client.chat("hello")
        client.reward(float("nan"))

    (episode,), _ = attempts(lost, samples=1)
    assert episode.leaves[0].status is Status.ENV_ERROR
    assert "the float nan" in episode.leaves[0].info["error"]

    async def odd(task: Task, client: Any) -> float:
        return await client.chat(5)

    (episode,), _ = attempts(odd, samples=1)
    assert "takes messages or a text, not 5" in episode.leaves[0].info["error"]


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except OSError:
        return False


@pytest.mark.slow  # the programs need seconds to start on a busy machine
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs /proc")
def test_at_its_deadline_a_command_is_killed_with_all_its_children(tmp_path: Path):
    script = (
        "import os, subprocess, sys, time\n"
        "wait = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "a, b = subprocess.Popen(wait), subprocess.Popen(wait, start_new_session=True)\n"
        f"open({str(tmp_path / 'pids')!r}, 'w').write(f'{{os.getpid()}} {{a.pid}} {{b.pid}}')\n"
        "time.sleep(60)"
    )
    (episode,), _ = attempts([sys.executable, "-c", script], samples=1, agents={"seconds": 8.0})
    assert episode.leaves[0].status is Status.TIMEOUT
    pids = [int(word) for word in (tmp_path / "pids").read_text().split()]
    until = time.monotonic() + 5
    while any(map(is_running, pids)) and time.monotonic() < until:
        time.sleep(0.02)
    assert not any(map(is_running, pids))


def test_at_most_so_many_attempts_run_at_a_time():
    running, most = [0], [0]

    async def counted(task: Task, client: Any) -> float:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await client.chat(task.prompt)
        running[0] -= 1
        return 0.0

    attempts(counted, tasks=3, samples=3, agents={"concurrency": 2})
    assert most == [2]


def test_placeholders_are_parts_of_arguments_and_unknown_ones_are_refused():
    for program, *named in (
        ("agent --ask {task.question}", "{task.question}", "{task.id}"),
        ("agent {prompt}", "{prompt}", "{task.prompt}"),
        ("agent --url={url}/v1", "{url}", "{base_url}"),
        (lambda task, client, more: 1.0, "'more'"),
        ([], "empty"),
        ("agent 'unbalanced", "'unbalanced"),
    ):
        with pytest.raises(ConfigError) as error:
            make_program(program)
        assert all(name in str(error.value) for name in named), str(error.value)
    make_program("sh -c 'echo ${key} {print}'")  # of a shell, of awk
    make_program(lambda task, client, more=3: 1.0)
    made = make_program("agent --json '{\"a\": {}}' {task.meta.level}")
    assert isinstance(made, CommandAgent) and made.words[2] == '{"a": {}}'
    assert isinstance(make_program("json:dumps"), FunctionAgent)
    assert isinstance(make_program(two_turns), FunctionAgent)


def test_a_refusal_reaches_a_function_as_an_exception():
    async def careful(task: Task, client: Any) -> float:
        with pytest.raises(RefusedRequest, match="image"):
            await client.chat([{"role": "user", "content": [{"type": "image_url"}]}])
        await client.chat("hello")
        return 1.0

    (episode,), _ = attempts(careful, samples=1)
    assert episode.leaves[0].status is Status.DONE
    assert json.loads(episode.dumps())
