"""What is wrong with a text of YAML, in one line: the parser's own words take five and use its terms."""

from __future__ import annotations

import re

INDENTED = (
    "a text cannot begin with this character; indent with blanks in place of a tab, and put a text that "
    "begins with @, ` or % into quotation marks"
)
REASONS = (
    ("',' or ']'", "a list is not closed with ], or lacks a comma"),
    ("',' or '}'", "a mapping is not closed with }, or lacks a comma"),
    ("mapping values are not allowed", "': ' is there twice, or a line is indented too far"),
    ("undefined alias", "* refers to a mark (&name) that is not there"),
    ("unexpected end of stream", "a quotation mark is not closed"),
    ("tab character", "a line is indented with a tab; YAML takes blanks"),
    ("cannot start any token", INDENTED),
    ("unknown directive", "a text cannot begin with %"),
    ("constructor for the tag", "! names a type, and a recipe has plain values only"),
    ("unknown escape character", "in double quotation marks a backslash is written twice"),
    ("expected ':'", "a line is neither 'key: value' nor an item of a list"),
    ("expected key", "a line is indented otherwise than those beside it, or a value has two parts"),
    ("expected node content", "a value is missing, or begins with a character of YAML's own"),
    ("<document start>", "something follows the end of the value"),
    ("control characters", "it has control characters; save it as UTF-8 text"),
    ("codec can't decode", "it is not UTF-8 text; save it as UTF-8"),
    ("no viable alternative", "${ is not closed with }; a plain ${ is written \\${"),
    ("token recognition error", "${...} is not the name of a key; a plain ${ is written \\${"),
    ("mismatched input", "${...} is not the name of a key; a plain ${ is written \\${"),
    ("special characters", "it has control characters; save it as UTF-8 text"),
)
"""Parts of the messages of libyaml and PyYAML, and what they mean; the first that fits is taken."""

INTERPOLATED = (
    "; ${...} stands for another key of the recipe, as ${run.name} does, or for an environment variable that "
    "is set, ${oc.env:NAME}"
)


def explain_yaml(error: Exception, *, with_place: bool = True) -> str:
    """An error of the parser or of an interpolation: the place and the reason.

    a: [1        ->  line 2, column 2: a list is not closed with ], or lacks a comma
    b: 2
    """
    whole = str(error)
    reason = next((why for words, why in REASONS if words in whole), "")
    mark = getattr(error, "problem_mark", None)
    if mark is None:  # of omegaconf, which adds lines on its own types; or of ours
        reason = reason or whole.split("\n    full_key")[0]
        reason += INTERPOLATED if "nterpolation" in reason else ""
        key = getattr(error, "full_key", None)
        return f"{key}: {reason}" if key and with_place else reason
    reason = reason or str(getattr(error, "problem", "") or whole.splitlines()[0])
    reason += "; keep one of them" if "duplicate key" in reason else ""
    return f"line {mark.line + 1}, column {mark.column + 1}: {reason}" if with_place else reason


def explain_override(override: str, error: Exception) -> str:
    """What to write instead of an override whose value is not YAML, or has a broken ${...}.

    train.lr=[1  ->  override 'train.lr=[1': the value cannot be read: a list is not closed with ], ...
    """
    key, _, value = override.partition("=")
    if value.startswith("{") and re.search(r":[^\s/]", value):
        spaced = re.sub(r":(?=[^\s/])", ": ", value)
        return f"override {override!r}: YAML needs a blank after the colon, as in '{key}={spaced}'"
    quoted = '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return (
        f"override {override!r}: the value cannot be read: {explain_yaml(error, with_place=False)}. "
        f"Correct it, or write a text in quotation marks of its own: '{key}={quoted}'"
    )
