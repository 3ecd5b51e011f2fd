"""The viewer's page saved as one HTML file: `graft report`.

    save_page(open_runs(["runs/quickstart"]), Path("report.html"))

The file holds the page's own scripts and the answers that a server would give: all curves, the summary,
and of the first and the last step with episodes the best and the worst tasks. It loads nothing from
anywhere, and stays small whatever the run: curves are thinned, walks beyond a budget of tokens are left
out, and the page shows a note in their place.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from graft.files import write_text
from graft.trust.masking import mask_shapes
from graft.version import __version__
from graft.viewer import walks
from graft.viewer.answers import Answers
from graft.viewer.curves import metric_names
from graft.viewer.highlights import highlights
from graft.viewer.runs import NotThere, ViewedRun
from graft.viewer.server import static_files

MAX_POINTS = 400
"""Of one curve."""
OF_EACH = 2
"""Best and worst tasks of a step."""
MAX_TOKENS = 24_000
"""Of all walks together, about 2 MB."""
MAX_TEXT = 1_500_000
"""Characters of all trees and texts together."""
MAX_ALARMS = 200
"""Of one run, the last ones; each of at most 1000 characters."""
PATIENCE = 20.0
"""Seconds for reading the episodes of one step."""


@dataclass(slots=True)
class _Budget:
    """What may still be put into the page."""

    tokens: int = MAX_TOKENS
    text: int = MAX_TEXT


_IMPORT = re.compile(r'^import \{([^}]*)\} from "\./(\w+)\.js";$', re.M)
_EXPORT = re.compile(r"^export (?:async )?(?:function|class|const) (\w+)", re.M)


def save_page(runs: list[ViewedRun], path: Path) -> Path:
    """Write the page of these runs; the file appears when it is whole."""
    try:
        write_text(path, page(runs))
    except OSError as error:
        why = f"the report cannot be written to {path}: {error.strerror or error}"
        raise OSError(error.errno, why) from error
    return path


def page(runs: list[ViewedRun]) -> str:
    files = {name: content.decode("utf-8") for name, content in static_files().items()}
    script = bundle({name[:-3]: text for name, text in files.items() if name.endswith(".js")})
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    policy = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    head = (
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<style>{files['style.css']}</style>\n"
        f'<script type="application/json" id="saved">{_harmless(saved_answers(runs))}</script>\n'
        f'<script type="module">{script}</script>'
    )
    text = re.sub(r'<link rel="(?:icon|stylesheet)"[^>]*>\n', "", files["index.html"])
    text = re.sub(r'<script type="module"[^>]*></script>', lambda _: head, text)
    return text.replace("<title>graft view</title>", "<title>graft report</title>")


def bundle(modules: dict[str, str]) -> str:
    """ES modules as one script: each becomes a function that returns what it exports.

    a.js: export const one = 1;    b.js: import { one } from "./a.js";
    const $a = (() => { const one = 1; return { one }; })();
    const $b = (() => { const { one } = $a; return {  }; })();
    """
    done: dict[str, str] = {}

    def add(name: str) -> None:
        if name in done:
            return
        source = modules[name]
        for found in _IMPORT.finditer(source):
            add(found[2])
        exports = ", ".join(_EXPORT.findall(source))
        body = _IMPORT.sub(lambda found: f"const {{{found[1]}}} = ${found[2]};", source)
        body = re.sub(r"^export ", "", body, flags=re.M)
        done[name] = f"const ${name} = (() => {{\n{body}\nreturn {{ {exports} }};\n}})();\n"

    add("app")
    script = "".join(done.values())
    if "</script" in script or re.search(r"^(import|export)\b", script, re.M):
        raise ValueError("the viewer's scripts cannot be put into one page")
    return script


def saved_answers(runs: list[ViewedRun]) -> dict[str, Any]:
    """What `static/saved.js` answers from."""
    answers = Answers(runs)
    described = answers.about({})["runs"]
    budget = _Budget()
    steps = {str(run.number): _steps(run, budget) for run in runs}
    for about in described:
        about["alarms"] = [
            {**alarm, "text": alarm["text"][:1000]} for alarm in about["alarms"][-MAX_ALARMS:]
        ]
        about["episodes"] = list(steps[str(about["run"])])
        about["folder"] = about["name"]  # the file goes to other people: no paths of this machine
    groups = [numbers for numbers in answers.seed_groups() if len(numbers) > 1]
    return {
        "version": __version__,
        "written": datetime.fromtimestamp(time.time()).astimezone().strftime("%Y-%m-%d %H:%M %z"),
        "runs": described,
        "summary": [answers.summary({"run": str(run.number)}) for run in runs],
        "explain": answers.explain({}),
        "settings": answers.settings({}),
        "curves": {str(run.number): _curves(answers, run) for run in runs},
        "band": {",".join(map(str, group)): _bands(answers, group) for group in groups},
        "steps": steps,
    }


def _curves(answers: Answers, run: ViewedRun) -> dict[str, Any]:
    with run.lock:
        names = metric_names(run.record)
    query = {"run": str(run.number)}
    return {
        phase: answers.curves({**query, "phase": phase}, metrics, MAX_POINTS)
        for phase, metrics in names.items()
    }


def _bands(answers: Answers, group: list[int]) -> dict[str, Any]:
    runs = ",".join(map(str, group))
    names = metric_names(answers.runs[group[0]].record)
    return {
        phase: answers.band({"runs": runs, "phase": phase}, metrics, MAX_POINTS)
        for phase, metrics in names.items()
    }


def _steps(run: ViewedRun, budget: _Budget) -> dict[str, Any]:
    """Step -> table rows, trees, walks and texts of its best and worst tasks."""
    written = [step for step in run.files if not step.startswith("failed")]
    chosen = [*dict.fromkeys([*written[-1:], *written[:1]])]  # the budget is for the last one first
    first_page = highlights(run, PATIENCE)
    lines = {step: [one["line"] for one in first_page if one["step"] == step] for step in chosen}
    found = {step: _step(run, step, lines[step], budget) for step in chosen}
    return {step: found[step] for step in reversed(chosen)}


def _step(run: ViewedRun, step: str, first: list[int], budget: _Budget) -> dict[str, Any]:
    file = run.file(step)
    file.index(PATIENCE)
    with file.lock:
        best = file.order("best", True, "", "")[:OF_EACH]
        worst = file.order("reward", False, "", "")[:OF_EACH]
        rows = [file.glances[line].to_json() for line in dict.fromkeys([*first, *best, *worst])]
    found: dict[str, Any] = {"rows": [], "trees": {}, "walks": {}, "texts": {}}
    for row in rows:
        line = row["line"]
        try:
            tree = walks.tree(run, step, line)
        except (NotThere, OSError, KeyError, TypeError, ValueError):  # not an episode of graft's
            continue
        size = len(json.dumps(tree))
        if size > budget.text:
            continue
        budget.text -= size
        found["rows"].append(row)
        found["trees"][str(line)] = tree
        tips = [
            (leaf, tip)
            for leaf, one in enumerate(tree["leaves"])
            for tip in range(len(one["tips"]))
        ]
        for leaf, context in tips:
            walk = walks.tokens(run, step, line, leaf, context, 0, MAX_TOKENS)
            if walk["total"] > budget.tokens:
                continue
            budget.tokens -= walk["total"]
            found["walks"][f"{line}:{leaf}:{context}"] = walk
            for span, _ in walk["spans"]:
                text = walks.text(run, step, line, span, 0)["text"][: budget.text]
                budget.text -= len(text)
                found["texts"][f"{line}:{span}"] = text
    return found


def _harmless(value: Any) -> str:
    """JSON that cannot end its element, whatever texts it holds."""
    text = mask_shapes(json.dumps(value, allow_nan=False, separators=(",", ":")))
    return text.replace("<", "\\u003c")
