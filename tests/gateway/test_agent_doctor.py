"""`graft doctor` on agents: what their clients do with histories, settings and tools; if they repeat."""

from __future__ import annotations

import re
import sys
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import graft.gateway.session
from graft.config import load_config
from graft.doctor.agents import agent_checks
from graft.doctor.recipe import examine_recipe
from graft.gateway.roots import REASONS
from graft.models.io.save import save_model
from graft.train.monitor.check import FAIL, PASS, WARN, Check
from graft.train.monitor.metric_docs import explain
from graft.types import Task
from tests.gateway.test_attempts import Question, setup_with, two_turns
from tests.gateway.test_session import scripted
from tests.gateway.tiny import CALCULATOR, tiny_engine, tiny_tokenizer

pytest.importorskip("uvicorn")

TASK = Task("question:0", "question", seed=0)


def checks_of(
    program: Any, wants_forks: bool = False, texts: tuple[str, ...] = (), **settings: Any
) -> dict[str, Check]:
    setup = setup_with(program, Question, **settings)
    if texts:
        scripted(SimpleNamespace(policy=setup), *texts)
    try:
        return {check.name: check for check in agent_checks(setup, TASK, wants_forks)}
    finally:
        setup.close()


def test_an_agent_that_sends_back_what_it_was_answered_passes():
    found = checks_of(two_turns)
    assert {name: one.verdict for name, one in found.items()} == {
        "agent": PASS,
        "agent contexts": PASS,
        "agent tokens": PASS,
        "agent forks": PASS,
    }
    assert found["agent"].seen == "2 calls at task question:0, ended done"
    assert found["agent contexts"].seen == "1 context: first 1"
    data = found["agent tokens"].data
    assert data is not None and 0 < data["shared_tokens"] < data["prompt_tokens"]
    assert "repeats 2 requests: attempts can fork" in found["agent forks"].seen


async def rewriting(task: Task, client: Any) -> float:
    messages = [*task.prompt]
    answer = await client.chat(messages, temperature=0.25)
    messages += [{**answer, "content": "six"}, {"role": "user", "content": "sure?"}]
    await client.chat(messages, [CALCULATOR], tool_choice="required")
    await client.chat(messages, [CALCULATOR], tool_choice="required")
    return 1.0


def test_what_a_client_changes_or_asks_for_in_vain_is_a_warning():
    found = checks_of(rewriting)
    warned = {name for name, one in found.items() if one.verdict == WARN}
    assert warned == {"agent", "agent contexts", "agent sampling", "agent choice", "agent tools"}
    assert "3 calls, 1 retried" in found["agent"].seen
    lines = found["agent contexts"].seen.splitlines()
    assert lines[0] == "2 contexts: first 1, other tools 1"
    assert lines[1].startswith("other tools at tools")
    assert [line.split() for line in lines[2:]] == [["before"], ["after", "add"]]
    assert "temperature=0.25 in 1 call;" in found["agent sampling"].seen
    assert "required in 1 answer" in found["agent choice"].seen
    honoured = checks_of(rewriting, agents={"honour_client": True})["agent sampling"]
    assert honoured.verdict == WARN and "are not trained" in honoured.seen


async def forgetful(task: Task, client: Any) -> float:
    messages = [*task.prompt]
    answer = await client.chat(messages)
    said = [{**answer, "content": f"{answer['content']} indeed"}]
    await client.chat([*messages, *said, {"role": "user", "content": "sure?"}])
    return 1.0


def test_a_rewritten_answer_is_shown_before_and_after():
    check = checks_of(forgetful)["agent contexts"]
    _, reason, before, after = check.seen.splitlines()
    assert check.verdict == WARN and reason.startswith("rewritten history at message 2 (")
    assert before.split()[0] == "before" and after.endswith(" indeed")
    assert check.data is not None and check.data["contexts"][1]["reason"] == "rewritten history"


_numbers = count()


async def restless(task: Task, client: Any) -> float:
    await client.chat(task.prompt)
    await client.chat([*task.prompt, {"role": "user", "content": f"at {next(_numbers)} o'clock"}])
    return 1.0


async def seeded(task: Task, client: Any) -> float:
    await client.chat(task.prompt, seed=next(_numbers))
    return 1.0


def test_an_agent_that_does_not_repeat_shows_what_differs():
    check = checks_of(restless)["agent forks"]
    first, place, before, after = check.seen.splitlines()
    assert check.verdict == PASS and "repeats 1 of 2 requests" in first
    assert place == "it differs at message 2"
    assert before.endswith("o'clock") and after.endswith("o'clock") and before != after
    assert checks_of(restless, wants_forks=True)["agent forks"].verdict == WARN
    assert "\n  seed: " in checks_of(seeded)["agent forks"].seen


async def with_a_clock(task: Task, client: Any) -> float:
    messages: list[Any] = [*task.prompt]
    for minute in (1, 2):
        text = f"You are an assistant for sums. The time is 09:0{minute}. Show your work."
        messages.append(await client.chat([{"role": "system", "content": text}, *messages]))
        messages.append({"role": "user", "content": "and now?"})
    return 1.0


async def with_a_sub_agent(task: Task, client: Any) -> float:
    for text in ("You add numbers.", "You search the web."):
        await client.chat([{"role": "system", "content": text}, *task.prompt])
    return 1.0


def test_a_prompt_that_changes_with_the_time_is_a_warning_and_another_prompt_is_none():
    check = checks_of(with_a_clock)["agent contexts"]
    assert check.verdict == WARN and "changes from request to request" in check.remedy
    assert check.seen.splitlines()[0] == "2 contexts: first 1, other system prompt 1"
    assert checks_of(with_a_sub_agent)["agent contexts"].verdict == PASS


async def broken(task: Task, client: Any) -> float:
    await client.chat(task.prompt)
    raise KeyError("no such tool")


async def idle(task: Task, client: Any) -> float:
    return 1.0


def test_an_agent_that_fails_or_makes_no_call_is_a_failure():
    found = checks_of(broken)
    assert found["agent"].verdict == FAIL and "no such tool" in found["agent"].seen
    assert found["agent"].seen.startswith("1 call at task question:0, ended crashed\n")
    assert "agent contexts" in found and "agent forks" not in found
    program = "print('about to'); raise SystemExit('no key')"
    check = checks_of([sys.executable, "-c", program])["agent"]
    assert check.verdict == FAIL and check.seen.endswith(
        "exit code 1, and last wrote 'no key'\nabout to\nno key"
    )
    (check,) = checks_of(idle).values()
    assert check.verdict == FAIL and "without a call" in check.seen


def test_a_limit_that_refuses_calls_is_a_warning():
    check = checks_of(two_turns, max_turns=1)["agent"]
    assert check.verdict == WARN and "1 refused: this attempt may make 1 calls" in check.seen
    assert "ended truncated" in check.seen and "rollout.max_turns" in check.seen


async def calling(task: Task, client: Any) -> float:
    messages: list[Any] = [*task.prompt]
    for _ in range(3):
        messages.append(await client.chat(messages, [CALCULATOR]))
        messages.append({"role": "user", "content": "go on"})
    return 1.0


def test_malformed_calls_and_what_a_second_rendering_would_change_are_shown():
    texts = ("<tool_call>{add}</tool_call>", '<tool_call>{"name":"add","arguments":{}}</tool_call>')
    found = checks_of(calling, texts=(*texts, "done"))
    assert found["agent tools"].verdict == WARN
    assert (
        "1 tool call in 3 answers with tools (json); 1 cannot be read" in found["agent tools"].seen
    )
    assert texts[0] in found["agent tools"].seen
    tokens = found["agent tokens"]
    assert tokens.verdict == PASS and tokens.data is not None
    assert tokens.data["rendered_otherwise"] == 1  # the template writes a space after each colon
    assert "rendered again, 1 of 2 continued prompts" in tokens.seen
    assert [line.split()[0] for line in tokens.seen.splitlines()[-2:]] == ["sent", "rendered"]


def test_every_reason_and_every_count_of_a_session_is_explained():
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")
    for reason, words in REASONS.items():
        assert f"| {reason} | {words} |" in page
        assert f'"{reason}"' in explain(f"agent/roots/{reason}").what
    source = (Path(graft.gateway.session.__file__)).read_text(encoding="utf-8")
    counted = set(re.findall(r'counts\["(\w+)"\]', source))
    assert {"calls", "retries", "dropped"} < counted
    for name in counted:
        assert explain(f"agent/{name}").healthy


RECIPE = """
run: {eval_tasks: 0, trackers: []}
model: {path: MODEL}
task: {env: countdown, agent: "tests.gateway.test_agent_doctor:forgetful"}
rollout: {tasks: 2, samples: 2, max_tokens: 8, max_context: 1024}
train: {steps: 1}
"""


@pytest.mark.slow
def test_a_recipe_with_an_agent_is_examined_as_it_will_be_trained(tmp_path: Path):
    tokenizer = tiny_tokenizer()
    save_model(tiny_engine(tokenizer).decoder, tmp_path / "model")
    tokenizer.save(tmp_path / "model")
    (tmp_path / "r.yaml").write_text(RECIPE.replace("MODEL", str(tmp_path / "model")))

    def examined(*changes: str) -> dict[str, Check]:
        config = load_config(str(tmp_path / "r.yaml"), changes)
        return {one.name: one for one in examine_recipe(config)}

    found = examined()
    assert [name for name, one in found.items() if one.verdict == FAIL] == []
    assert found["agent contexts"].verdict == WARN and found["agent forks"].verdict == PASS
    assert "8 attempts at 4 tasks, 0 failed" in found["attempts"].seen
    assert "a sampled attempt" in found["loss mask"].seen
    assert "differ by" in found["log-probs"].seen
    elsewhere = examined("task.agent=external")
    assert elsewhere["agent"].verdict == WARN and "attempts" not in elsewhere
