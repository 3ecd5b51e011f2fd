"""The pages, and the fenced blocks on them.

A comment in front of a block sets what its test does with it:

    <!-- needs: a GPU -->      not run, only resolved (a model of the hub, minutes, a server, ...)
    <!-- slow -->              a Python block that runs in `make test-slow`
    <!-- run -->               commands that are run, not only resolved
    <!-- output -->            the same, and what they print is compared; a line "..." is any text
    <!-- refused -->           commands that graft must refuse
    <!-- file: echo.py -->     a file that other blocks use, on this page or another
    <!-- fragment -->          a piece of Python or YAML that does not stand alone

Without one, Python is run and what it prints is compared with the block that follows at once, as are lines
behind ">>> "; commands are resolved; YAML is read.
"""

from __future__ import annotations

import re
import shlex
import sys
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]
PAGES += sorted((ROOT / "docs").glob("*.md"))

_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.M | re.S
)
MARKS = ("needs", "slow", "run", "output", "refused", "file", "fragment")


@dataclass(frozen=True)
class Block:
    page: Path
    line: int
    language: str
    text: str
    mark: str
    """The word before the colon in its comment; empty without one."""
    about: str
    """What follows the colon."""
    output: str | None
    """The unmarked text block right behind it, if there is one."""

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found = list(_BLOCK.finditer(text))
    made: list[Block] = []
    for match, after in zip_longest(found, found[1:]):
        mark, _, about = (match["mark"] or "").partition(": ")
        follows = after is not None and not text[match.end() : after.start()].strip()
        is_output = follows and after is not None and not (after["mark"] or after["language"])
        line = text[: match.start("text")].count("\n")
        output = after["text"] if is_output and after is not None else None
        made.append(Block(page, line, match["language"], match["text"], mark, about, output))
    return made


BLOCKS = [block for page in PAGES for block in blocks(page)]
FILES = {block.about: block.text for block in BLOCKS if block.mark == "file"}


def write_files(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")


def unload_modules(folder: Path) -> None:
    """Modules of this folder are imported again when another test has files of the same names."""
    for name, module in list(sys.modules.items()):
        if str(folder) in str(getattr(module, "__file__", "")):
            del sys.modules[name]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return re.sub(r"^```\w*\n.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def inline(page: Path) -> list[str]:
    """What stands between backticks in its prose."""
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", prose(page))]


def commands(text: str, programs: tuple[str, ...]) -> list[list[str]]:
    r"""Lists of arguments of a block's commands: lines that begin with one of `programs`, after "$ " or not.

    "$ graft eval m \" and "    --k 1,8   # pass@k" are one: ["graft", "eval", "m", "--k", "1,8"]
    """
    joined = re.sub(r" *\\\n\s*", " ", text)
    lines = (line.strip().removeprefix("$ ") for line in joined.splitlines())
    starts = tuple(f"{program} " for program in programs)
    return [
        [word for word in shlex.split(part, comments=True) if not re.match(r"\d?>", word)]
        for line in lines
        if f"{line} ".startswith(starts)
        for part in line.split(" && ")
        if f"{part} ".startswith(starts)
    ]
