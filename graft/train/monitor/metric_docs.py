"""What every metric of a run means, when it is healthy, and what to try when it is not.

    explain("frac_reward_zero_std").what      "Share of the groups (the attempts at one task) in which ..."
    explain("tools/search/calls").what        "Calls of search per attempt ..."
    explain("spread").name                    "reward_std": the display's name for it
    explain("pass@8").what                    "Probability that at least one of 8 attempts ..."

All texts are in docs/metrics.md, which `parse` reads; `graft explain`, the viewer's tooltips and the tests
take them from here. The second example is found under "tools/{tool}/calls": a name in braces stands for any
text without a slash.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from graft.registry import UnknownName

INSTALLED = Path(__file__).with_name("metrics.md")
CHECKOUT = Path(__file__).parents[3] / "docs" / "metrics.md"


@dataclass(frozen=True, slots=True)
class MetricDoc:
    """The text of one metric or word."""

    name: str
    what: str
    """The definition."""
    healthy: str = ""
    """What it does in a run that learns, and why; empty for a word that is not a metric."""
    cases: tuple[str, ...] = ()
    """What to look at or to change when it does something else, case by case; none for a mere count."""
    range: tuple[float | None, float | None] | None = None
    """Lowest and highest healthy value; None on one side: no bound there."""

    @property
    def remedy(self) -> str:
        return " ".join(self.cases)

    def case(self, opening: str) -> str:
        """The case that begins with these words."""
        return next(case for case in self.cases if case.startswith(opening))

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        del found["cases"]
        return {**found, "remedy": self.remedy}


@dataclass(frozen=True, slots=True)
class MetricPage:
    """The content of docs/metrics.md."""

    areas: dict[str, list[MetricDoc]] = field(default_factory=dict)
    """Heading -> its metrics, in the order of the page."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Short names of the display and names of alarms -> the metric."""
    words: dict[str, MetricDoc] = field(default_factory=dict)
    """Words that commands print and that are not metrics."""


def parse(text: str) -> MetricPage:
    """Read the page.

    >>> page = parse("# M\\n## Area\\n### `a/b`\\nWhat.\\n\\n**Healthy:** 0.\\n\\n**Range:** 0 to 1\\n")
    >>> page.areas["Area"][0]
    MetricDoc(name='a/b', what='What.', healthy='0.', cases=(), range=(0.0, 1.0))
    """
    page = MetricPage()
    for area in re.split(r"^## ", text, flags=re.M)[1:]:
        heading, _, body = area.partition("\n")
        _, *metrics = re.split(r"^### `(.+)`$", body, flags=re.M)
        if metrics:
            pairs = zip(metrics[::2], metrics[1::2], strict=True)
            page.areas[heading.strip()] = [_metric_doc(name, content) for name, content in pairs]
            continue
        for key, content in re.findall(r"^\| (.+?) \| (.+) \|$", body, flags=re.M):
            if metric := re.fullmatch(r"`(.+)`", content):
                page.aliases[key] = metric[1]
            elif key not in ("name", "word"):  # the head of a table
                page.words[key] = MetricDoc(key, content)
    return page


def _metric_doc(name: str, content: str) -> MetricDoc:
    what, *marked = re.split(r"^\*\*(Healthy|If not|Range):\*\*", content, flags=re.M)
    texts = dict(zip(marked[::2], map(str.strip, marked[1::2]), strict=True))
    cases = [line.removeprefix("- ") for line in texts.get("If not", "").splitlines() if line]
    limits = _range(texts.get("Range", ""))
    return MetricDoc(name, what.strip(), texts.get("Healthy", ""), tuple(cases), limits)


def _range(text: str) -> tuple[float | None, float | None] | None:
    if found := re.fullmatch(r"([\d.]+) to ([\d.]+)", text):
        return float(found[1]), float(found[2])
    if found := re.fullmatch(r"from ([\d.]+)", text):
        return float(found[1]), None
    return None


def _read_page() -> MetricPage:
    found = next((path for path in (INSTALLED, CHECKOUT) if path.is_file()), None)
    if found is None:
        raise FileNotFoundError(
            f"the texts of metrics are neither at {INSTALLED} nor at {CHECKOUT}: reinstall graft-rl"
        )
    return parse(found.read_text(encoding="utf-8"))


PAGE = _read_page()
METRICS: dict[str, MetricDoc] = {doc.name: doc for area in PAGE.areas.values() for doc in area}
"""Every metric that graft writes; a custom loss, credit or environment may add others."""


def explain(name: str) -> MetricDoc:
    """The text of one metric or word, with the names in its braces filled in.

    >>> explain("tools/search/calls").name, explain("tools/search/calls").what
    ('tools/search/calls', 'Calls of search per attempt that were carried out, failed ones included.')
    >>> explain("spread").name, explain("Held out").name
    ('reward_std', 'held out')
    """
    typed = " ".join(name.split())
    for spelling in dict.fromkeys((typed, typed.lower(), typed.lower().replace(" ", "_"))):
        if (found := _find(PAGE.aliases.get(spelling, spelling))) is not None:
            return found
    close = nearest_metrics(name)
    meant = f"nearest: {', '.join(close)}. " if close else ""
    raise UnknownName(f"unknown metric {name!r}; {meant}`graft explain` lists all of them")


def _find(name: str) -> MetricDoc | None:
    known = METRICS | PAGE.words
    if name in known:
        return known[name]
    for pattern, doc in known.items():
        if (values := _match(pattern, name)) is not None:
            return replace(
                doc,
                name=name,
                what=_fill(doc.what, values),
                healthy=_fill(doc.healthy, values),
                cases=tuple(_fill(case, values) for case in doc.cases),
            )
    return None


def nearest_metrics(name: str, most: int = 3) -> list[str]:
    """Known names and words with a similar spelling, or that contain the given name.

    >>> nearest_metrics("ess"), nearest_metrics("rewrad"), nearest_metrics("spred")
    (['sampling/importance_sampling_ratio/ess'], ['reward', 'reward_std'], ['spread'])
    """
    wanted = name.strip().lower()
    parts = {known: known.split("/") for known in METRICS}
    found = [known for known, words in parts.items() if wanted and wanted in words]
    found += get_close_matches(wanted, [*PAGE.aliases, *PAGE.words], n=most, cutoff=0.75)
    found += get_close_matches(wanted, list(METRICS), n=most, cutoff=0.6)
    if not found and len(wanted) >= 3:
        found = [known for known in METRICS if wanted in known]
    if not found:  # the last part alone: "actor/entropy" is another framework's name for "entropy"
        last = {words[-1]: known for known, words in parts.items()}
        close = get_close_matches(wanted.rpartition("/")[2], list(last), n=most, cutoff=0.7)
        found = [last[word] for word in close]
    return list(dict.fromkeys(found))[:most]


def _match(pattern: str, name: str) -> Mapping[str, str] | None:
    """{"tool": "search"} for "tools/{tool}/calls" and "tools/search/calls"; None if it does not match."""
    if "{" not in pattern:
        return None
    shape = re.sub(r"\\{(\w+)\\}", r"(?P<\1>[^/]+)", re.escape(pattern))
    found = re.fullmatch(shape, name)
    return None if found is None else found.groupdict()


def _fill(text: str, values: Mapping[str, str]) -> str:
    for word, value in values.items():
        text = text.replace(f"{{{word}}}", value)
    return text
