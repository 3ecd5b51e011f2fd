"""An agent of a recipe on trial: it attempts one task twice with the recipe's policy.

The first attempt shows what the agent's client does with its history, the tokens and the settings. The
second gets the first one's answers: where it makes the same requests, attempts can fork by replay.

    pass  agent           8 calls at task qa:0, ended done
    warn  agent contexts  2 contexts: first 1, rewritten history 1
                          rewritten history at message 3
                            before  assistant: The sum is 5.
                            after   assistant: The sum is five.
    pass  agent main      task.reward reads conversation 2 of 2: it has tools
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from difflib import SequenceMatcher
from typing import Any

from graft.doctor.agent_speakers import LONGEST_LINE, check_main, check_models, check_refused
from graft.gateway.attempts import AgentAttempts, AgentGroup
from graft.gateway.canonical import names_of, normalised
from graft.gateway.changes import PromptChange, token_change
from graft.gateway.gateway import Gateway
from graft.gateway.request import AgentRequest, PolicyAnswer, RefusedRequest
from graft.gateway.roots import REASONS
from graft.gateway.session import AgentSession
from graft.gateway.speakers.contexts import ContextRecord
from graft.rollout.episode_builder import EpisodeBuilder
from graft.rollout.event_loop import run
from graft.rollout.setup import RolloutSetup
from graft.train.monitor.check import FAIL, PASS, WARN, Check
from graft.train.monitor.printable import visible
from graft.train.monitor.run_check import count
from graft.train.step_metrics import is_failed
from graft.types import Task

MAX_CHANGES = 3
"""Changes that are shown."""
MAX_LINES = 4
"""Of the output of an agent that failed."""
OTHER_PROMPT = ("sub-agent", "other system prompt", "new conversation")
"""Reasons of contexts whose prompt is another from its first messages on."""
SLIGHT = 0.9
"""Share of the characters of two messages, around their difference, that are the same in a slight one."""
SETTINGS = ("temperature", "top_p", "top_k", "max_tokens", "seed", "stop", "n", "tool_choice")
"""Of a request, besides messages and tools."""


@dataclass(slots=True)
class WatchedCall:
    request: AgentRequest
    answers: list[PolicyAnswer] = field(default_factory=list[PolicyAnswer])
    """Empty: it was refused, or its client left."""
    refusal: str = ""


class WatchedSession(AgentSession):
    """A session that keeps the requests beside their answers."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.watched: list[WatchedCall] = []

    @property
    def dropped_tools(self) -> list[str]:
        return [kind for call in self.watched for kind in call.request.dropped_tools]

    async def answer(self, request: AgentRequest) -> list[PolicyAnswer]:
        call = WatchedCall(replace(request, messages=normalised(request.messages)))
        self.watched.append(call)
        try:
            call.answers = await super().answer(request)
        except RefusedRequest as error:
            call.refusal = str(error)
            raise
        return call.answers


class WatchedGateway(Gateway):
    session_type = WatchedSession


def agent_checks(setup: RolloutSetup, task: Task, wants_forks: bool = False) -> Iterator[Check]:
    """Checks of the agent of a setup at one task. wants_forks: the recipe's branch repeats attempts."""
    first, second = run(lambda: _attempts(setup, task))
    yield _outcome(first)
    if not first.history.answers:
        yield from check_refused(first, first.dropped_tools)
        return
    yield _contexts(first)
    yield from check_main(first)
    yield from check_models(first)
    yield from check_refused(first, first.dropped_tools)
    yield _tokens(first)
    yield from _settings(first)
    yield from _tools(first)
    if second is not None:
        yield _forks(first, second, wants_forks)


async def _attempts(
    setup: RolloutSetup, task: Task
) -> tuple[WatchedSession, WatchedSession | None]:
    """An attempt, and where it ended well another that is answered with its record."""
    agents = setup.agent
    assert isinstance(agents, AgentAttempts)
    async with EpisodeBuilder(task, setup) as builder:
        await builder.open()
        group = AgentGroup(
            agents,
            builder.episode.task,
            builder.setup,
            builder.fresh_env,
            WatchedGateway,
            has_machine=builder.has_machine,
        )
        try:
            first = await _attempt(group, 0)
            assert first.leaf is not None
            if is_failed(first.leaf.status):
                return first, None
            return first, await _attempt(group, 1, first)
        finally:
            group.close()


async def _attempt(
    group: AgentGroup, number: int, repeated: AgentSession | None = None
) -> WatchedSession:
    attempt = group.attempt(number, repeated.record if repeated is not None else ())
    await attempt.finish()
    assert isinstance(attempt.session, WatchedSession)
    return attempt.session


def _outcome(session: WatchedSession) -> Check:
    counts, leaf = session.counts, session.leaf
    assert leaf is not None
    parts = [
        count(int(counts["calls"]), "call"),
        *[f"{counts[name]:.0f} {words}" for name, words in COUNTED.items() if counts[name]],
    ]
    seen = f"{', '.join(parts)} at task {session.task.id}, ended {leaf.status}"
    refusals = [call.refusal for call in session.watched if call.refusal]
    if refusals:
        seen += f"\n{len(refusals)} refused: {visible(refusals[0])}"
    if is_failed(leaf.status):
        remedy = "repair what the agent reports; it must call the address that it is given"
        return Check("agent", FAIL, "\n".join([seen, *_report(session)]), remedy)
    if refusals:
        return Check("agent", WARN, seen, "change what the refusal names")
    if counts["retries"] or counts["dropped"]:
        remedy = (
            "raise the timeout of the agent's client if it does not wait; for several answers to the same "
            "request ask for n, or with another seed"
        )
        return Check("agent", WARN, seen, remedy)
    return Check("agent", PASS, seen)


def _report(session: WatchedSession) -> list[str]:
    """Why an attempt failed, and the end of what its program wrote."""
    tips, leaf = next((t, leaf) for _, t, leaf in session.forest.leaves if leaf is session.leaf)
    written = str(tips[-1].span.info.get("traceback", "")).strip().splitlines()
    lines = [str(leaf.info.get("error", "")), *written[-MAX_LINES:]]
    return [visible(line)[:LONGEST_LINE] for line in lines if line.strip()]


COUNTED = {
    "retries": "retried",
    "dropped": "dropped by the client",
}
"""Counts of a session in words."""


def _contexts(session: WatchedSession) -> Check:
    """How many contexts there are, why each began, and what broke the prefixes."""
    reasons = Counter(one.reason for one in session.contexts)
    listed = ", ".join(f"{reason} {number}" for reason, number in reasons.items())
    lines = [f"{count(len(session.contexts), 'context')}: {listed}"]
    changed = [one for one in session.contexts if one.change is not None]
    for one in changed[:MAX_CHANGES]:
        assert one.change is not None
        lines += [
            f"{one.reason} at {one.change.place} ({REASONS[one.reason]})",
            *_describe_change(one.change),
        ]
    if len(changed) > MAX_CHANGES:
        lines.append(f"and {len(changed) - MAX_CHANGES} more")
    remedies = [
        "set model.history=append, which keeps what was said as it was" * bool(reasons["template"]),
        "let the agent send back what it was answered, and the same tools with every request"
        * any(reasons[one] for one in ("rewritten history", "other tools")),
        "a part of the prompt changes from request to request; leave it out, or let it follow the "
        "conversation" * any(map(_is_slight, changed)),
    ]
    remedy = "; ".join(filter(None, remedies))
    data = {
        "contexts": [
            {
                "reason": one.reason,
                "role": one.role,
                "agent": one.agent,
                "calls": len(one.answers),
                "change": None if one.change is None else asdict(one.change),
            }
            for one in session.contexts
        ]
    }
    return Check("agent contexts", WARN if remedy else PASS, "\n".join(lines), remedy, data)


def _is_slight(context: ContextRecord) -> bool:
    """Whether what looks like another conversation differs in few characters only, as in a time or an id."""
    change = context.change
    if change is None or context.reason not in OTHER_PROMPT:
        return False
    alike = SequenceMatcher(None, change.before, change.after, autojunk=False)
    return change.place.startswith("message") and alike.ratio() > SLIGHT


def _tokens(session: WatchedSession) -> Check:
    """The record has the tokens that were sent and sampled; what a second rendering would change."""
    done = session.history.answers.values()
    for one in done:
        recorded = [token for node in one.nodes[-1].path() for token in node.span.tokens]
        if recorded != one.tokens:
            at = token_change(one.tokens, recorded, session.policy.chat.tokenizer.decode)
            seen = f"answer {one.answer.id}: the record differs from what was sent at {at.place}"
            return Check(
                "agent tokens", FAIL, "\n".join([seen, *_describe_change(at)]), "report this"
            )
    prompts = sum(one.answer.prompt_tokens for one in done)
    cached = sum(one.answer.cached_tokens for one in done)
    continued = [
        (call, session.history.answers[answer.id])
        for call in _sampled(session)
        for answer in call.answers[:1]
        if session.contexts[session.history.answers[answer.id].context].answers[0] != answer.id
    ]
    changes: list[PromptChange] = []
    for call, one in continued:
        sent = one.tokens[: one.answer.prompt_tokens]
        rendered = session.history.render(call.request)
        if rendered != sent:
            changes.append(token_change(sent, rendered, session.policy.chat.tokenizer.decode))
    lines = [
        f"exact: {count(len(done), 'answer')} recorded as sampled; prompts of {prompts:,} tokens, of "
        f"which {cached:,} ({cached / max(prompts, 1):.0%}) were there already"
    ]
    if changes:
        lines.append(
            f"rendered again, {len(changes)} of {count(len(continued), 'continued prompt')} would have "
            f"other tokens than were sampled, the first from {changes[0].place} on"
        )
        lines += _describe_change(changes[0], ("sent", "rendered"))
    data = {"prompt_tokens": prompts, "shared_tokens": cached, "rendered_otherwise": len(changes)}
    return Check("agent tokens", PASS, "\n".join(lines), "", data)


def _sampled(session: WatchedSession) -> list[WatchedCall]:
    """The answered calls, without retries."""
    found: dict[str, WatchedCall] = {}
    for call in session.watched:
        if call.answers:
            found.setdefault(call.answers[0].id, call)
    return [*found.values()]


def _settings(session: WatchedSession) -> Iterator[Check]:
    """Sampling that the client asks for and does not get."""
    policy = session.policy
    asked = Counter(
        f"{name}={value}"
        for call in _sampled(session)
        for name, value in policy.wanted(call.request).items()
    )
    if not asked:
        return
    listed = ", ".join(f"{setting} in {count(many, 'call')}" for setting, many in asked.items())
    if policy.honour_client:
        seen = f"the client asks for {listed} and gets it; these answers are not trained"
        remedy = "let the client leave them out, or set agent.client_sampling=false"
    else:
        seen = (
            f"the client asks for {listed}; it gets what the recipe says, which is what is trained"
        )
        remedy = "let the client leave them out; agent.client_sampling=true honours and does not train them"
    yield Check("agent sampling", WARN, seen, remedy)


def _tools(session: WatchedSession) -> Iterator[Check]:
    """Calls of the policy, and those that tool_choice begins."""
    calls = [call for call in _sampled(session) if call.request.tools]
    if not calls:
        return
    answers = [answer for call in calls for answer in call.answers]
    syntax = session.policy.syntax
    unmet = Counter(
        call.request.tool_choice
        for call in calls
        for answer in call.answers
        if not _follows(call.request.tool_choice, answer)
    )
    if unmet:
        listed = ", ".join(f"{choice} in {count(n, 'answer')}" for choice, n in unmet.items())
        seen = f"tool_choice begins a call, and the policy did not complete it: {listed}"
        remedy = "let the agent handle an answer without that call, or reward it"
        yield Check("agent choice", WARN, seen, remedy)
    made = sum(len(answer.calls) for answer in answers)
    malformed = sum(answer.info.get("malformed_calls", 0) for answer in answers)
    seen = (
        f"{count(made, 'tool call')} in {count(len(answers), 'answer')} with tools ({syntax.name})"
    )
    if not malformed:
        yield Check("agent tools", PASS, seen)
        return
    text = next(a.content for a in answers if a.info.get("malformed_calls"))
    seen += f"; {malformed} cannot be read and reach the agent as text\n{visible(text)[:200]!r}"
    remedy = "warm up with demonstrations in the template's call syntax (sft.data)"
    yield Check("agent tools", WARN, seen, remedy)


def _follows(choice: str, answer: PolicyAnswer) -> bool:
    if choice in ("auto", "none"):
        return True
    return any(choice in ("required", call.name) for call in answer.calls)


def _forks(first: WatchedSession, second: WatchedSession, wants_forks: bool) -> Check:
    """Whether the second attempt made the first one's requests."""
    bad = WARN if wants_forks else PASS
    remedy = (
        "let the agent's requests depend on the task and the answers only" if wants_forks else ""
    )
    wanted = len({call.asked for call in first.record})
    repeated = int(second.counts["replayed"])
    if second.fault is not None and second.watched and not second.watched[-1].answers:
        lines = _unrepeated(first, second.watched[-1].request)
        seen = f"a second attempt repeats {repeated} of {count(wanted, 'request')}, so it cannot fork later"
        return Check("agent forks", bad, "\n".join([seen, *lines]), remedy)
    if repeated < wanted:
        seen = f"a second attempt ended after {repeated} of {count(wanted, 'request')}"
        return Check("agent forks", bad, seen, remedy)
    seen = f"a second attempt repeats {count(wanted, 'request')}: attempts can fork by replay"
    return Check("agent forks", PASS, seen)


def _unrepeated(first: WatchedSession, request: AgentRequest) -> list[str]:
    """The difference between a request and the nearest one of the first attempt."""
    names = names_of(request.messages, request.tools)
    for call in first.watched:
        if names_of(call.request.messages, call.request.tools)[-1] == names[-1]:
            pairs = [(n, getattr(call.request, n), getattr(request, n)) for n in SETTINGS]
            return [f"  {name}: {was!r}, then {now!r}" for name, was, now in pairs if was != now]
    change = first.history.change_of(request, names)
    return [] if change is None else [f"it differs at {change.place}", *_describe_change(change)]


def _describe_change(
    change: PromptChange, titles: Sequence[str] = ("before", "after")
) -> list[str]:
    texts = (visible(text).replace("\n", "⏎") for text in (change.before, change.after))
    return [f"  {title:<8}  {text}" for title, text in zip(titles, texts, strict=True)]
