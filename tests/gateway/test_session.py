"""A session: calls of an agent become one forest, and what was sampled is trained once."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from tiny import CALCULATOR, TASK, asks, check_exact, said, tiny_gateway

from graft.gateway.canonical import names_of
from graft.gateway.changes import PromptChange
from graft.gateway.request import RefusedRequest
from graft.rollout.batching import to_batch, trajectories_of
from graft.text.template import TEMPLATES
from graft.types import Author, Finish, Sampling, Status

SYSTEM = {"role": "system", "content": "You add numbers."}


async def test_a_conversation_is_one_context_and_its_answers_are_not_rendered_again(
    gateway, session
):
    (a,) = await session.answer(asks(SYSTEM, "2+3?"))
    (b,) = await session.answer(asks(SYSTEM, "2+3?", said(a), "and 4?"))
    (c,) = await session.answer(asks(SYSTEM, "2+3?", said(a), "and 4?", said(b), "and 5?"))
    answers = [a, b, c]
    session.reward(1.0)
    leaf = session.end()
    episode = session.forest.episode()
    assert (leaf.reward, leaf.status, leaf.metrics["turns"]) == (1.0, Status.DONE, 3.0)
    assert len(leaf.tips) == 1 and [s.author for s in episode.spans] == [
        *[Author.TASK, Author.POLICY],
        *[Author.ENV, Author.POLICY] * 2,
    ]
    (row,) = episode.trajectories()
    assert row.tokens == gateway.policy.chat.prompt(
        [SYSTEM, {"role": "user", "content": "2+3?"}]
    ) + [token for span in row.spans[1:] for token in span.tokens]
    assert [one.cached_tokens for one in answers[1:]] == [
        one.prompt_tokens + len(one.tokens) for one in answers[:2]
    ]
    check_exact(episode, gateway, [one.tokens for one in answers])
    assert episode.spans[-1].reward == 1.0


async def test_what_clients_rewrite_still_continues(session):
    await session.answer(asks(SYSTEM, "2+3?", tools=(CALCULATOR,)))
    (done,) = session.history.answers.values()
    # as if the policy had called: what a client then sends back has another form
    call = {"name": "add", "arguments": '{"b": [1.0, "x"], "a": 2}'}
    message = {"role": "assistant", "content": "", "tool_calls": [{"function": call}]}
    names = names_of([SYSTEM, {"role": "user", "content": "2+3?"}, message], [CALCULATOR])
    session.history._ends[names[-1]] = done
    again = {"name": "add", "arguments": {"a": 2.0, "b": [1, "x"]}}
    calls = [{"id": "q", "function": again}]
    text = {"role": "assistant", "content": None, "tool_calls": calls}
    result = {"role": "tool", "content": "5", "tool_call_id": "q", "name": "add"}
    await session.answer(asks(SYSTEM, "2+3?", text, result, tools=(CALCULATOR,)))
    assert session.counts["roots/first"] == 1 and len(session.contexts) == 1


async def test_reasoning_may_be_left_out_but_not_changed(session):
    (a,) = await session.answer(asks("2+3?"))
    (done,) = session.history.answers.values()
    done.reasoning = ("add them",)
    for thought in ("add them", None, "add them\n"):
        message = {**said(a), "reasoning_content": thought}
        await session.answer(asks("2+3?", message, f"and {thought!r}?"))
    assert len(session.contexts) == 1
    await session.answer(asks("2+3?", {**said(a), "reasoning_content": "guess"}, "and 4?"))
    assert session.counts["roots/rewritten history"] == 1


async def test_new_roots_have_reasons_and_share_their_first_tokens():
    gateway = tiny_gateway(sampling=Sampling(max_tokens=40))
    session = gateway.open(TASK)
    other = {"role": "system", "content": "You add colours."}

    (a,) = await session.answer(asks(SYSTEM, "2+3?"))
    (b,) = await session.answer(asks(other, "red+blue?"))
    (c,) = await session.answer(asks(SYSTEM, "2+3?", tools=(CALCULATOR,)))
    (d,) = await session.answer(asks(SYSTEM, "2+3?", {**said(a), "content": "6"}, "sure?"))
    (e,) = await session.answer(asks(SYSTEM, "9+9?"))
    (f,) = await session.answer(asks(SYSTEM, f"So far: {d.content}. Go on"))
    (g,) = await session.answer(replace(asks(SYSTEM, "2+3?"), agent="helper-1"))
    answers = [a, b, c, d, e, f, g]
    session.end()
    reasons = {name: n for name, n in session.counts.items() if name.startswith("roots/")}
    once = ("first", "other tools", "rewritten history", "new conversation", "compaction")
    assert reasons == {"roots/sub-agent": 2, **{f"roots/{reason}": 1 for reason in once}}
    episode = session.forest.episode()
    assert len(episode.leaves[0].tips) == 7
    roots = [span for span in episode.spans if span.parent is None]
    assert len(roots) == 1 and roots[0].text == "<|im_start|>system\nYou add "
    about = episode.leaves[0].info["contexts"]
    assert [one["role"] for one in about].count("sub-agent") == 2
    assert about[1]["after"] == answers[0].id
    check_exact(episode, gateway, [one.tokens for one in answers])


async def test_a_conversation_that_another_agent_takes_over_stays_the_main_one():
    gateway = tiny_gateway(sampling=Sampling(max_tokens=40))
    session = gateway.open(TASK)
    other = {"role": "system", "content": "You check sums."}

    (a,) = await session.answer(asks(SYSTEM, "2+3?"))
    await session.answer(asks(other, "2+3?", said(a), "check it"))
    await session.answer(asks(other, "4+4?"))
    assert [(one.reason, one.role) for one in session.contexts] == [
        ("first", "main"),
        ("other system prompt", "main"),
        ("new conversation", "main"),
    ]


async def test_a_new_root_names_the_first_thing_that_changed():
    gateway = tiny_gateway(sampling=Sampling(max_tokens=8))
    session = gateway.open(TASK)
    calls = {"tool_calls": [{"function": {"name": "add", "arguments": '{"a": 2}'}}]}

    (a,) = await session.answer(asks(SYSTEM, "2+3?"))
    (done,) = session.history.answers.values()
    said_a = said(a)
    await session.answer(asks({**SYSTEM, "content": "You add colours."}, "2+3?"))
    await session.answer(asks(SYSTEM, "2+3?", {"role": "assistant", **calls}, "sure?"))
    await session.answer(asks(SYSTEM, "2+3?", tools=(CALCULATOR,)))
    long = "x" * 300
    await session.answer(asks(SYSTEM, f"2+3?{long}1"))
    await session.answer(asks(SYSTEM, f"2+3?{long}2"))
    done.reasoning = ("add them",)
    await session.answer(asks(SYSTEM, "2+3?", {**said_a, "reasoning_content": "guess"}, "4?"))
    changes = [one.change for one in session.contexts]
    assert changes[0] is None
    assert changes[1] == PromptChange(
        "message 1", "system: You add numbers.", "system: You add colours."
    )
    assert changes[2] is not None and changes[2].place == "message 3"
    assert changes[2].after == 'assistant: add({"a": 2.0})'
    assert changes[3] == PromptChange("tools", "", "add")
    assert changes[4] is not None and changes[4].after.endswith("...")
    assert changes[5] == PromptChange("message 2", f"...{'x' * 24}1", f"...{'x' * 24}2")
    assert changes[6] == PromptChange("reasoning", "add them", "guess")
    assert session.end().info["contexts"][1]["change"]["after"] == "system: You add colours."


async def test_a_prompt_that_repeats_an_answer_runs_through_it_and_trains_it_once():
    gateway = tiny_gateway(sampling=Sampling(max_tokens=40))
    session = gateway.open(TASK)
    (a,) = await session.answer(asks(SYSTEM, "2+3?"))
    # an answer that the client begins: the history is rendered, and happens to be what was sampled
    (b,) = await session.answer(asks(SYSTEM, "2+3?", {**said(a), "reasoning_content": "x"}, "?"))
    answers = [a, b]
    session.end()
    episode = session.forest.episode()
    assert len(episode.leaves[0].tips) == 2 - (
        episode.leaves[0].tips[0] in episode.walk(episode.leaves[0].tips[-1])
    )
    check_exact(episode, gateway, [one.tokens for one in answers])


async def test_attempts_at_one_task_share_the_prompt_and_not_their_answers(gateway):
    forest = gateway.forest(TASK)
    sessions = [gateway.open(TASK, forest=forest, number=n) for n in range(4)]
    asked = await asyncio.gather(*(one.answer(asks(SYSTEM, "2+3?")) for one in sessions))
    answers = [one for (one,) in asked]
    for number, session in enumerate(reversed(sessions)):
        session.reward(number / 4)
        session.end()
    episode = forest.episode()
    assert [leaf.reward for leaf in episode.leaves] == [0.75, 0.5, 0.25, 0.0]
    assert [span.parent for span in episode.spans] == [None, 0, 0, 0, 0]
    assert len({one.tokens for one in answers}) > 1
    check_exact(episode, gateway, [one.tokens for one in answers])


async def test_a_retry_gets_the_same_answer_and_parallel_requests_are_siblings(gateway, session):
    (a,) = await session.answer(asks("2+3?"))
    (again,) = await session.answer(asks("2+3?"))
    assert again is a and session.counts["retries"] == 1
    (hot,) = await session.answer(asks("2+3?", seed=1))
    assert hot is not a
    more = await asyncio.gather(
        *(session.answer(asks("2+3?", said(a), "and 4?")) for _ in range(3))
    )
    many = await session.answer(asks("2+3?", said(a), "and 5?", n=2))
    answers = [a, hot, *(one for (one,) in more), *many]
    session.end()
    assert len({one.id for one in answers}) == 7
    episode = session.forest.episode()
    assert len(episode.leaves[0].tips) == 6  # every answer but the first, which they continue
    check_exact(episode, gateway, [one.tokens for one in answers])


async def test_a_client_that_leaves_ends_its_sample_which_is_kept_and_not_trained():
    gateway = tiny_gateway(sampling=Sampling(max_tokens=2000, min_tokens=2000))
    session = gateway.open(TASK)
    call = asyncio.ensure_future(session.answer(asks("2+3?")))
    while not any(len(live.context.tokens) > 60 for live in session._lives):
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gateway.policy.sampling = Sampling(max_tokens=8)
    answer = (await session.answer(asks("2+3?")))[0]
    leaf = session.end()
    assert leaf.metrics["agent/dropped"] == 1.0 and leaf.metrics["turns"] == 1.0
    episode = session.forest.episode()
    dropped = [s for s in episode.spans if s.author is Author.POLICY and not any(s.mask)]
    assert len(dropped) == 1 and len(dropped[0]) > 1
    assert dropped[0].info["finish"] == "abort"
    check_exact(episode, gateway, [answer.tokens])


async def test_limits_end_in_refusals_and_a_truncated_leaf():
    gateway = tiny_gateway(max_calls=2, max_context=100)
    session = gateway.open(TASK)
    with pytest.raises(RefusedRequest, match="a context may have 100") as refused:
        await session.answer(asks("2" * 200))
    assert refused.value.kind == "context_length"
    await session.answer(asks("2+3?"))
    await session.answer(asks("2+4?"))
    with pytest.raises(RefusedRequest, match="may make 2 calls of the policy"):
        await session.answer(asks("2+5?"))
    assert session.end().status is Status.TRUNCATED
    assert gateway.find(session.key) is None and gateway.get(session.id) is None
    with pytest.raises(RefusedRequest, match="has ended"):
        await session.answer(asks("2+3?"))


async def test_the_clients_temperature_is_overridden_or_honoured_and_then_not_trained():
    for honour in (False, True):
        gateway = tiny_gateway(honour_client=honour)
        session = gateway.open(TASK)
        (warm,) = await session.answer(asks("2+3?"))
        (cold,) = await session.answer(asks("2+3?", temperature=0.0))
        (same,) = await session.answer(asks("2+3?", temperature=1.0))
        session.end()
        trained = [warm.tokens, same.tokens] + ([] if honour else [cold.tokens])
        check_exact(session.forest.episode(), gateway, trained)
        assert session.counts["sampling_overridden"] == (0 if honour else 1)


async def test_roles_that_are_not_trained_are_recorded():
    gateway = tiny_gateway(trained_roles=("main",))
    session = gateway.open(TASK)
    (main,) = await session.answer(asks(SYSTEM, "2+3?"))
    await session.answer(asks({"role": "system", "content": "Help."}, "2+3?"))
    session.end()
    episode = session.forest.episode()
    assert len(episode.leaves[0].tips) == 2
    check_exact(episode, gateway, [main.tokens])


async def test_rewards_of_single_answers_add_up(session):
    (a,) = await session.answer(asks("2+3?"))
    await session.answer(asks("2+3?", said(a), "and?"))
    session.reward(0.25, a.id)
    session.reward(1.0)
    with pytest.raises(RefusedRequest, match="no answer of this session"):
        session.reward(1.0, "else")
    leaf = session.end()
    assert leaf.reward == 1.25
    episode = session.forest.episode()
    assert [s.reward for s in episode.spans if s.author is Author.POLICY] == [0.25, 1.0]
    with pytest.raises(RefusedRequest, match="final"):
        session.reward(1.0)


def test_a_session_without_a_call_is_a_failed_attempt():
    session = tiny_gateway().open(TASK)
    leaf = session.end()
    assert leaf.status is Status.ENV_ERROR and "without a call" in leaf.info["error"]
    assert session.forest.episode().leaves == [leaf]


async def test_the_draws_of_an_attempt_do_not_depend_on_what_runs_beside_it():
    async def answers(numbers: list[int]) -> dict[int, tuple[int, ...]]:
        gateway = tiny_gateway()
        forest = gateway.forest(TASK)
        sessions = [gateway.open(TASK, forest=forest, number=n, salt=7) for n in numbers]
        answers = await asyncio.gather(*(session.answer(asks("2+3?")) for session in sessions))
        return {n: one.tokens for n, (one,) in zip(numbers, answers, strict=True)}

    both, alone, other = [await answers(numbers) for numbers in ([0, 1, 2], [1], [2, 1])]
    assert both[1] == alone[1] == other[1]


async def test_an_engine_that_fails_or_is_late_is_a_status_of_the_attempt():
    gateway = tiny_gateway(deadline=0.05, sampling=Sampling(max_tokens=4000, min_tokens=4000))
    session = gateway.open(TASK)
    with pytest.raises(RefusedRequest, match="waited") as refused:
        await session.answer(asks("2+3?"))
    assert refused.value.kind == "overloaded" and session.end().status is Status.TIMEOUT
    session = gateway.open(TASK)
    with pytest.raises(RefusedRequest, match="waited"):
        await session.answer(asks("2+3?"))
    gateway.policy.deadline, gateway.policy.sampling = 60.0, Sampling(max_tokens=8)
    await session.answer(asks("2+3?"))  # the client has asked again
    assert session.end().status is Status.DONE
    gateway = tiny_gateway()
    gateway.policy.engine.close()
    session = gateway.open(TASK)
    with pytest.raises(RefusedRequest) as refused:
        await session.answer(asks("2+3?"))
    assert refused.value.kind == "internal" and session.end().status is Status.ENGINE_ERROR


async def test_a_fork_repeats_recorded_calls_and_then_samples_its_own():
    gateway = tiny_gateway()
    forest = gateway.forest(TASK)

    async def attempt(session: Any, results: list[str]) -> list[Any]:
        messages, answers = [SYSTEM, {"role": "user", "content": "2+3?"}], []
        for result in [*results, ""]:
            (answer,) = await session.answer(asks(*messages))
            messages += [said(answer), {"role": "user", "content": result}]
            answers.append(answer)
        return answers

    first = gateway.open(TASK, forest=forest, number=0)
    told = await attempt(first, ["five", "six"])
    fork = gateway.open(TASK, forest=forest, number=1, replay=first.record[:2])
    again = await attempt(fork, ["five", "six"])
    assert again[:2] == told[:2] and again[2].tokens != told[2].tokens
    lost = gateway.open(TASK, forest=forest, number=2, replay=first.record[:2])
    with pytest.raises(RefusedRequest, match="did not repeat"):
        await attempt(lost, ["seven", "six"])
    leaves = [one.end() for one in (first, fork, lost)]
    assert [leaf.status for leaf in leaves] == [Status.DONE, Status.DONE, Status.ABORTED]
    episode = forest.episode()
    a, b = (episode.walk(leaf.tips[0]) for leaf in episode.leaves[:2])
    assert a[:-1] == b[:-1] and a[-1] != b[-1]  # forked where the record ends
    assert fork.counts["replayed"] == 2.0
    rows = trajectories_of([episode])
    batch = to_batch(rows)
    assert len(rows) == 2 and batch.mask.sum(1).tolist() == [
        sum(len(one.tokens) for one in answers) for answers in (told, again)
    ]


QWEN3 = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% if loop.last and m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops the reasoning of earlier turns."""


def scripted(gateway: Any, *texts: str) -> None:
    """Let the engine answer with these texts: a grammar that permits one token at each place."""
    policy, chat = gateway.policy, gateway.policy.chat
    waiting = [[*chat.tokenizer.encode(text), *chat.end_ids] for text in texts]
    sample = type(policy.engine.open([1])).sample

    async def forced(self: Any, sampling: Any, grammar: Any = None) -> Any:
        tokens = waiting.pop(0)
        done = await sample(self, replace(sampling, max_tokens=len(tokens), min_tokens=len(tokens)))
        self.tokens[-len(done.tokens) :] = tokens
        return replace(done, tokens=tokens, actions=tokens, finish=Finish.STOP)

    policy.engine.open = lambda *a, _open=policy.engine.open, **k: _patched(_open(*a, **k), forced)


def _patched(context: Any, sample: Any) -> Any:
    fork = context.fork
    context.sample = sample.__get__(context)
    context.fork = lambda *a, **k: _patched(fork(*a, **k), sample)
    return context


@pytest.mark.parametrize("history", ["append", "template"])
async def test_a_template_that_drops_earlier_thoughts_is_followed_or_appended_to(history: str):
    gateway = tiny_gateway(template=QWEN3, history=history)
    scripted(gateway, "<think>\nadd\n</think>\n\n5", "<think>\nmore\n</think>\n\n9")
    session = gateway.open(TASK)
    (a,) = await session.answer(asks("2+3?"))
    assert (a.reasoning, a.content) == ("add", "5")
    (b,) = await session.answer(asks("2+3?", said(a), "and 4?"))
    session.end()
    episode = session.forest.episode()
    decode = gateway.policy.chat.tokenizer.decode
    rows = [decode(row.tokens) for row in episode.trajectories()]
    first = "<|im_start|>user\n2+3?<|im_end|>\n<|im_start|>assistant\n"
    thought = "<think>\nadd\n</think>\n\n5<|im_end|>"
    asked = "\n<|im_start|>user\nand 4?<|im_end|>\n<|im_start|>assistant\n"
    rest = f"{asked}<think>\nmore\n</think>\n\n9<|im_end|>"
    if history == "append":
        assert rows == [first + thought + rest]
    else:
        assert rows == [first + thought, first + "5<|im_end|>" + rest]
        assert session.counts["roots/template"] == 1
        (_, second) = session.contexts
        assert second.change is not None and second.change.before.startswith("<think>")
        assert second.change.after.startswith("5<|im_end|>")
        roots = [s for s in episode.spans if s.parent is None]
        assert len(roots) == 1 and roots[0].text == first  # all tokens up to the change are shared
    rows = to_batch(trajectories_of([episode]))
    assert int(rows.mask.sum()) == len(a.tokens) + len(b.tokens)


async def test_a_summary_quoted_in_part_is_a_compaction_and_keeps_its_turn():
    gateway = tiny_gateway(trained_roles=("main",))
    scripted(gateway, "4", "<summary>\nThe numbers were two and two.\n</summary>", "5")
    session = gateway.open(TASK)
    (a,) = await session.answer(asks(SYSTEM, "2+2?"))
    await session.answer(asks(SYSTEM, "2+2?", said(a), "Summarise."))
    quoted = "Continued. The numbers were two and two."
    (c,) = await session.answer(asks(SYSTEM, quoted, said(a), "Go on."))
    session.end()
    assert session.counts["roots/compaction"] == 1
    batch = to_batch(trajectories_of([session.forest.episode()]))
    assert int(batch.mask.sum()) == len(a.tokens) + len(c.tokens)  # the summary is not trained


async def test_an_answer_that_is_shown_again_is_no_summary():
    gateway = tiny_gateway(trained_roles=("main",))
    long = "\n".join(f"{n}. a line that is long enough to be found." for n in range(5))
    scripted(gateway, "The sum of the numbers is four.", "yes", long, "yes")
    session = gateway.open(TASK)
    (a,) = await session.answer(asks("2+2?"))  # a solver and a checker without system prompts
    await session.answer(asks(f"Is this right? {a.content}"))
    (c,) = await session.answer(asks("2+2?", said(a), "Explain."))
    await session.answer(asks(f"Is this line right? {c.content.splitlines()[0]}"))
    assert [one.reason for one in session.contexts] == ["first", *["new conversation"] * 2]
    assert all(one.role == "main" for one in session.history.answers.values())


async def test_a_context_begins_after_an_answer_of_its_own_agent_a_sub_agents_after_the_main_ones(
    session,
):
    one, two = ({"role": "system", "content": f"You search {name}."} for name in "ab")

    (a,) = await session.answer(asks(SYSTEM, "2+2?"))
    (b,) = await session.answer(asks(one, "look"))
    (c,) = await session.answer(asks(two, "look"))  # beside it, not below it
    (d,) = await session.answer(asks(SYSTEM, "2+2?", said(a), "more"))
    (e,) = await session.answer(asks(one, "look", said(b), "more"))
    await session.answer(asks(SYSTEM, "another question"))  # of the main agent
    await session.answer(asks(one, "look elsewhere"))
    await session.answer(replace(asks(SYSTEM, "2+2?"), agent="named"))
    a, _, _, d, e = [a, b, c, d, e]
    main = session.contexts[3].answers[0]
    assert [one.reason for one in session.contexts] == [
        "first", "sub-agent", "sub-agent", "new conversation", "new conversation", "sub-agent",
    ]  # fmt: skip
    assert [one.after for one in session.contexts] == ["", a.id, a.id, d.id, e.id, main]


async def test_system_messages_inside_a_conversation_become_the_users_where_a_template_refuses_them():
    refusing = (
        "{% for m in messages[1:] %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{% endfor %}"
    )
    for template, role in ((QWEN3, "system"), (refusing + QWEN3, "user")):
        gateway = tiny_gateway(template=template)
        session = gateway.open(TASK)
        (a,) = await session.answer(asks(SYSTEM, "2+2?"))
        await session.answer(asks(SYSTEM, "2+2?", said(a), {"role": "system", "content": "Note."}))
        session.end()
        (row,) = session.forest.episode().trajectories()
        assert f"<|im_start|>{role}\nNote.<|im_end|>" in gateway.policy.chat.tokenizer.decode(
            row.tokens
        )


async def test_tools_are_refused_where_the_policy_s_calls_could_not_be_read():
    odd = TEMPLATES["chatml"].replace(
        "function.arguments | tojson", "function.arguments.values() | join(' ')"
    )
    session = tiny_gateway(template=odd).open(TASK)
    for _ in range(2):  # a retry, too
        with pytest.raises(RefusedRequest, match=r"'\\n<tool_call>.*cannot be read") as refused:
            await session.answer(replace(asks("2+2?"), tools=(CALCULATOR,)))
        assert refused.value.param == "tools"
    assert len(await session.answer(asks("2+2?"))) == 1
