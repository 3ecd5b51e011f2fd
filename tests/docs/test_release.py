"""What a release says of itself: one version, in every file that names it."""

from __future__ import annotations

import re
import tomllib

import yaml

from graft.version import __version__
from tests.docs.pages import ROOT


def test_the_version_has_a_section_and_a_citation():
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\S+) \((\d{4}-\d\d-\d\d)\)$", changelog, re.M)
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert newest is not None
    assert newest[1] == cited["version"] == __version__
    assert newest[2] == cited["date-released"]
    assert cited["license"] == project["license"]
    assert {"cff-version", "message", "title", "authors"} <= set(cited)


def test_the_changelog_is_a_page():
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) < 100
