"""Who speaks in a trial of an agent: its own conversation, the models it asks for, what is refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from graft.gateway.client import MODEL
from graft.gateway.session import AgentSession
from graft.gateway.speakers.main_choice import describe_thread, explain_no_main
from graft.gateway.speakers.routes import FrozenModel, describe_names
from graft.train.monitor.check import FAIL, PASS, WARN, Check
from graft.train.monitor.printable import visible
from graft.train.monitor.run_check import count

LONGEST_LINE = 400
"""Characters that are shown of a line that others wrote."""


def check_main(session: AgentSession) -> Iterator[Check]:
    """Which conversation is the agent's, where there are several."""
    main, count_of = session.main, len(session.main.threads)
    if count_of < 2:
        return
    listed = [
        f"  {place} {main.roles[thread.number]}: {describe_thread(thread)}"
        for place, thread in enumerate(main.threads, 1)
    ]
    data = {
        "main": main.thread,
        "why": main.why,
        "rivals": list(main.rivals),
        "roles": main.roles,
    }
    if main.thread is None:
        lines = [explain_no_main(main, session.policy.main), *listed]
        yield Check(
            "agent main", FAIL, visible_lines(lines), "change agent.main, or leave it out", data
        )
        return
    place = 1 + [thread.number for thread in main.threads].index(main.thread)
    lines = [f"task.reward reads conversation {place} of {count_of}: {main.why}", *listed]
    remedy = ""
    if main.rivals:
        lines[0] += f"; {count(len(main.rivals), 'other')} could be the agent's too"
        remedy = "name what the agent's own has: agent.main={tools: NAME}, {system: TEXT} or {model: NAME}"
    yield Check("agent main", WARN if remedy else PASS, visible_lines(lines), remedy, data)


def check_models(session: AgentSession) -> Iterator[Check]:
    """The names of models that the agent asks for, and who answers them."""
    routes = session.policy.routes
    if not routes.entries and not set(routes.names) - {MODEL}:
        return
    unnamed = routes.unnamed
    who = {
        name: "policy"
        if route is None
        else "frozen"
        if isinstance(route, FrozenModel)
        else "endpoint"
        for name, route in routes.names.items()
    }
    lines = [f"  {name!r}: {answers}" for name, answers in who.items()]
    several = len(unnamed) > 1
    told = describe_names(unnamed) if unnamed else "every model is named in agent.models"
    remedy = "name them: agent.models={NAME: policy, OTHER: frozen}" if several else ""
    data = {"models": who}
    yield Check(
        "agent models", WARN if several else PASS, visible_lines([told, *lines]), remedy, data
    )


def check_refused(session: AgentSession, dropped: Iterable[str]) -> Iterator[Check]:
    """The fields for which requests were refused, and the types of tools that the policy is not shown."""
    start = "refused_fields/"
    fields = {
        name.removeprefix(start): int(number)
        for name, number in session.counts.items()
        if name.startswith(start) and number
    }
    if fields:
        listed = ", ".join(f"{name} in {count(n, 'request')}" for name, n in fields.items())
        remedy = "let the agent leave them out"
        told = f"refused: {listed}"
        yield Check("agent fields", WARN, visible_lines([told]), remedy, {"refused": fields})
    if kinds := sorted(set(dropped)):
        told = f"tools of a provider are not shown to the policy: {', '.join(kinds)}"
        data = {"dropped_tools": kinds}
        yield Check("agent provider tools", PASS, visible_lines([told]), "", data)


def visible_lines(lines: Sequence[str]) -> str:
    return "\n".join(visible(line)[:LONGEST_LINE] for line in lines)
