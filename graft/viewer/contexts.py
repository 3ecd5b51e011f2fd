"""The contexts of an agent's attempt as the page shows them: titles, reasons, which began after whose answer.

A session (`graft.gateway.session`) writes one entry per tip into `leaf.info["contexts"]`:

    {"reason": "first", "role": "main", "agent": "", "after": "", "answers": ["a1", "a2"], "change": None}
    {"reason": "sub-agent", "role": "sub-agent", "agent": "search", "after": "a1", ...}

The second is the column "sub-agent search", under the first, behind the span of the answer a1.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from graft.gateway.roots import REASONS, SUB_AGENT

NAME = 60
"""Characters of a title."""
CHANGE = 400
"""Characters of one side of a change."""
INNER = ("sub-agent", "parallel")
"""Reasons of contexts that belong to the one in which they began; others go on from there."""
PARALLEL = (
    "another answer in the same context: requests were made at once, or asked for several answers"
)


def contexts(leaf: Mapping[str, Any], spans: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """An entry per tip, sub-agents behind what they began under; empty if no agent made the attempt.

    context      the tip's number
    title        main, sub-agent NAME; from the second of a name on with a number
    reason       one of graft.gateway.roots.REASONS, and `words` for it
    under        the tip whose walk has the last answer before this context began, and
    after        the span of that answer; None for both: there was none
    change       what differs from what was said: the place, and both texts from there on; None: nothing does
    is_dropped   the client dropped the connection before the answer was complete
    """
    about = (leaf.get("info") or {}).get("contexts")
    tips = leaf["tips"]
    if not isinstance(about, list) or len(about) != len(tips) or not about:
        return []
    if not all(isinstance(one, dict) for one in about):
        return []
    paths = [_path(spans, tip) for tip in tips]
    answers = {
        str(_info(span)["answer"]): i for i, span in enumerate(spans) if "answer" in _info(span)
    }
    firsts: dict[str, int] = {}  # the tip that stands for a context; others have parallel answers
    for number, one in enumerate(about):
        record = repr(one)
        if record not in firsts or _is_dropped(spans, tips[firsts[record]]):
            firsts[record] = number
    made: list[dict[str, Any]] = []
    for number, one in enumerate(about):
        first = firsts[repr(one)]
        reason, after = str(one.get("reason", "")), answers.get(str(one.get("after", "")))
        holders = [i for i, path in enumerate(paths) if after in path and i != number]
        agent = str(one.get("agent") or "") if one.get("role") == SUB_AGENT else ""
        made.append(
            {
                "context": number,
                "title": f"{one.get('role', '')} {agent}".strip()[:NAME],
                "reason": reason[:NAME] if first == number else INNER[1],
                "words": REASONS.get(reason, "") if first == number else PARALLEL,
                "under": first if first != number else holders[0] if holders else None,
                "after": after if holders and first == number else None,
                "change": _change(one.get("change")) if first == number else None,
                "is_dropped": _is_dropped(spans, tips[number]),
            }
        )
    titles: Counter[str] = Counter()
    ordered = _nested(made)
    for one in ordered:
        titles[title := one["title"]] += 1
        one["title"] = title if titles[title] == 1 else f"{title} ({titles[title]})"
    return ordered


def _nested(made: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put after each entry its parallel answers and sub-agents, then what goes on after it."""
    is_inner = [one["under"] is not None and one["reason"] in INNER for one in made]
    parents = [one["under"] for one in made]
    for number, inner in enumerate(is_inner):
        climbed = 0  # what goes on after a sub-agent's answer is no part of the sub-agent
        while not inner and (at := parents[number]) is not None and is_inner[at]:
            parents[number] = made[at]["under"] if (climbed := climbed + 1) < len(made) else None
    found: list[dict[str, Any]] = []
    waiting = [one for one in made if parents[one["context"]] is None][::-1]
    seen: set[int] = set()
    while waiting or len(seen) < len(made):
        # entries of a file by hand may stand under each other in a circle
        one = waiting.pop() if waiting else next(m for m in made if m["context"] not in seen)
        if one["context"] in seen:
            continue
        seen.add(one["context"])
        found.append(one)
        below = [m for m in made if parents[m["context"]] == one["context"]]
        waiting += sorted(below, key=lambda m: not is_inner[m["context"]])[::-1]
    return found


def _path(spans: Sequence[Mapping[str, Any]], tip: Any) -> set[int]:
    """The spans from a tip to its root; an index that leads to none ends it."""
    path: set[int] = set()
    at = tip
    while isinstance(at, int) and 0 <= at < len(spans) and at not in path:
        path.add(at)
        at = spans[at]["parent"]
    return path


def _change(told: Any) -> dict[str, str] | None:
    if not isinstance(told, Mapping):
        return None
    return {name: str(told.get(name, ""))[:CHANGE] for name in ("place", "before", "after")}


def _is_dropped(spans: Sequence[Mapping[str, Any]], tip: Any) -> bool:
    info = _info(spans[tip]) if isinstance(tip, int) and 0 <= tip < len(spans) else {}
    return info.get("finish") == "abort" and "answer" not in info


def _info(span: Mapping[str, Any]) -> Mapping[str, Any]:
    info = span.get("info")
    return info if isinstance(info, Mapping) else {}
