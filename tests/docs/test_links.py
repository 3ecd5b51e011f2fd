"""Every relative link leads to a file, and every anchor to a heading, on GitHub and on the site."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from tests.docs.pages import PAGES, ROOT, inline, prose

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """The headings' anchors that GitHub and mkdocs both make.

    "## Loops, `graft eval` and more" -> loops-graft-eval-and-more
    """
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.M):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\s-]", "", text).strip()
        found |= {re.sub(r"[-\s]+", "-", slug)} & {slug.replace(" ", "-")}
    return found


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "CHANGELOG.md", *(ROOT / "benchmarks").glob("*.md")],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_links_lead_somewhere(page: Path):
    wrong = []
    for link in LINK.findall(prose(page)):
        if "://" in link:
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
        # mkdocs reads only what lies below docs/
        if page.parent == ROOT / "docs" and (ROOT / "docs") not in target.resolve().parents:
            wrong.append(f"{link} leaves docs/: write the path in backticks")
    assert wrong == []


def test_the_menu_of_the_site_is_the_list_of_the_index():
    """Every page once, in the same sections and order."""
    _, menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").split("\nnav:\n")
    (front, *sections) = yaml.safe_load(menu)
    assert front == {"Overview": "index.md"}
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8").partition("\n## Pages\n")[2]
    listed: dict[str, list[str]] = {}
    for section, page in re.findall(r"^\| (?:\*\*(.+)\*\*|\[[^\]]*\]\(([^)]*)\)) \|", index, re.M):
        if section:
            listed[section] = []
        else:
            listed[list(listed)[-1]].append(page)
    assert [{section: pages} for section, pages in listed.items()] == sections
    names = {page.name for page in PAGES if page.parent == ROOT / "docs"}
    assert sorted(sum(listed.values(), ["index.md"])) == sorted(names)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path):
    """`graft/types.py`, `train/rl.py` and `tests/algos/test_kl.py`, whatever folder they are named from."""
    names = [
        span
        for span in inline(page)
        if re.fullmatch(
            r"(?:graft|graft_\w+|tests|benchmarks|scripts|recipes|docs|examples)/[\w./-]+", span
        )
        or re.fullmatch(r"[a-z_]+(?:/\w+)+\.py", span)
    ]
    roots = [ROOT, ROOT / "graft", ROOT / "tests", ROOT / "graft" / "engine" / "native"]
    assert [name for name in names if not any((root / name).exists() for root in roots)] == []
