"""Secrets are masked in every text that leaves graft: files, terminal, pages, exports, trackers.

    remember("tok-91f3a77c2b", "${oc.env:MCP_TOKEN}")
    mask("401: tok-91f3a77c2b is no key")       "401: ${oc.env:MCP_TOKEN} is no key"
    mask("Authorization: Bearer 0123456789")    "Authorization: Bearer ***"
    masked({"token": "abc", "lr": 0.1})         {"token": "***", "lr": 0.1}

Four things are a secret: a remembered value, the value of an environment variable such as HF_TOKEN, a
text in the form of a known kind of key (`SHAPES`), and what stands under a name such as `api_key`.

    mask_values   remembered values and variables: for data (episodes, rows), which stays as it is otherwise
    mask_shapes   known forms too: for terminal and pages
    mask          "name: value" too: for messages
    masked        settings, by their names
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import sys
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

MASK = "***"
SHORTEST = 6
"""Characters of a remembered value; a shorter one is part of too many words to be replaced."""
SHORTEST_VARIABLE = 8

SECRET_WORDS = {
    "token", "secret", "password", "passwd", "passphrase", "credential", "credentials", "auth",
    "authorization", "cookie", "bearer", "apikey",
}  # fmt: skip
"""A name that ends with one of them, as in `access_token`, has a secret."""
KEY_KINDS = {
    "api", "access", "secret", "private", "auth", "account", "subscription", "service", "signing",
    "encryption", "license", "ssh", "admin", "master",
}  # fmt: skip
"""Words before `key` in the name of a secret; a `prompt_key` is the name of a column."""
VOCABULARY = {
    "bos", "eos", "pad", "unk", "sep", "cls", "mask", "stop", "special", "image", "start", "end", "per",
    "next", "last", "first", "new", "each",
}  # fmt: skip
"""Words before `token` in the name of a token of a model."""
VARIABLE = re.compile(r"(?:KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|PAT|AUTH)$")
"""Environment variables that hold secrets."""
PLAIN_HEADERS = {"accept", "accept-language", "content-type", "user-agent"}

SHAPES = re.compile(
    r"\b(?:sk|pk|rk)-(?=[\w-]*\d)[\w-]{16,}"  # OpenAI and others
    r"|\bhf_[A-Za-z0-9]{16,}"
    r"|\bgh[pousr]_[A-Za-z0-9]{16,}|\bgithub_pat_\w{16,}|\bglpat-[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[0-9A-Z]{16}\b"
    r"|\bAIza[\w-]{30,}"
    r"|\bxox[abeoprs]-[\w-]{10,}"
    r"|\btvly-[\w-]{10,}"
    r"|\beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}"  # a signed token (JWT)
    r"|(?i:(?<=\bbearer )|(?<=\bbasic ))(?=[^\s\"']*\d)[\w.~+/=-]{8,}"
    r"|(?<=://)[^/\s:@\"'${}<>]*:[^/\s@\"'${}<>]+(?=@)"  # user:password@ in an address
    r"|(?i:(?<=http://)|(?<=https://))[^/\s:@\"'${}<>]{8,}(?=@)"  # a token alone, as git and Sentry have it
    r"|(?i:(?<=[?&]key=)|(?<=[?&]sig=)|(?<=[?&]signature=)|(?<=[?&]code=))[^\s&#\"'${}<>]{8,}"
    r"|(?<=PRIVATE KEY-----)(?:[^\"-]|-(?!----))+"
)
_NAMED = re.compile(
    rf"([\w-]*(?i:key|{'|'.join(sorted(SECRET_WORDS))}))([\"']?(=|:\s*)[\"']?)([^\s\"',;&(){{}}<>$]{{4,}})"
)

_known: dict[str, str] = {}


def remember(value: str, shown: str = MASK) -> None:
    """Replace this text by `shown` in every text from now on."""
    value = value.strip()
    if len(value) >= SHORTEST and value != shown:
        _known[value] = shown


def known() -> dict[str, str]:
    """What is remembered, for another process of the run (`remember` there)."""
    return dict(_known)


@functools.cache
def is_secret_name(name: str) -> bool:
    """
    >>> [is_secret_name(n) for n in ("token", "hf_token", "eos_token", "max_tokens", "X-Api-Key")]
    [True, True, False, False, True]
    """
    split = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()
    words = ["", *re.split(r"[^a-z0-9]+", split)]
    before, last = words[-2:]
    if last == "key":
        return before in KEY_KINDS
    return last in SECRET_WORDS and not (last == "token" and before in VOCABULARY)


def mask_values(text: str) -> str:
    for value, shown in _values(tuple(_known.items()), _from_environment()):
        if value in text:
            text = text.replace(value, shown)
    return text


def mask_shapes(text: str) -> str:
    return SHAPES.sub(MASK, mask_values(text))


def mask(text: str) -> str:
    return _NAMED.sub(_mask_named, mask_shapes(text))


def masked(value: Any, name: str = "", found: Callable[[str], None] | None = None) -> Any:
    """Settings in which secrets are replaced; references (${...}) stay. `found` is told of each secret.

    All headers of a request and variables of a command count as secrets, except short and plain ones.
    Variables have names in capitals: `task.env: {env: calculator}` is an environment of the recipe.
    """
    if isinstance(value, Mapping):
        inner: Mapping[Any, Any] = value
        is_variables = name == "env" and all(str(key).isupper() for key in inner)
        if (name == "headers" or is_variables) and all(
            isinstance(one, str) for one in inner.values()
        ):
            return {key: _masked_header(str(key), one, found) for key, one in inner.items()}
        return {key: masked(one, str(key), found) for key, one in inner.items()}
    if isinstance(value, list | tuple):
        listed: Sequence[Any] = value
        return [masked(one, name, found) for one in listed]
    if not isinstance(value, str) or not value:
        return value
    if is_secret_name(name) and "${" not in value:
        return _told(value, found)
    if found is not None:
        for match in (*SHAPES.finditer(value), *_NAMED.finditer(value)):
            if match.re is SHAPES:
                found(match[0].partition(":")[2] or match[0])
            elif _mask_named(match) != match[0]:
                found(match[4])
    return mask(value)


def remember_all(settings: Any) -> None:
    """Remember every secret that stands in settings in clear."""
    masked(settings, found=remember)


def looks_secret(name: str, value: str) -> bool:
    """Whether the value of an environment variable is to be replaced in all texts.

    A secret's name, or a long word with letters and digits: not a path, a number or a plain word.
    """
    if VARIABLE.search(name.upper()):
        return len(value) >= SHORTEST
    is_word = len(value) >= 12 and not re.search(r"[\s/]", value)
    return is_word and bool(re.search(r"\d", value) and re.search(r"[A-Za-z]", value))


class MaskingStream:
    """A text stream that masks what is written to it."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        self.stream.write(mask_shapes(text))
        return len(text)

    def writelines(self, lines: Any) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def mask_terminal() -> None:
    """Mask what this process prints from now on."""
    for name in ("stdout", "stderr"):
        if not isinstance(getattr(sys, name), MaskingStream):
            setattr(sys, name, MaskingStream(getattr(sys, name)))


def _told(value: str, found: Callable[[str], None] | None) -> str:
    if found is not None and value != MASK:
        found(value)
    return MASK


def _masked_header(name: str, value: str, found: Callable[[str], None] | None) -> str:
    is_plain = (
        len(value) < SHORTEST or value.startswith(("/", ".")) or name.lower() in PLAIN_HEADERS
    )
    if "${" in value or (is_plain and not is_secret_name(name)):
        return value
    if found is not None:  # of "Bearer abcdef" the key is the second word
        found(value.partition(" ")[2] or value)
    return _told(value, found)


def _mask_named(match: re.Match[str]) -> str:
    """ "token=abcd" -> "token=***"; after a colon the value has to look like no word of a sentence."""
    name, between, sign, value = match.groups()
    is_word = sign != "=" and not re.search(r"\d|['\"]$", between[-1] + value)
    return match[0] if is_word or not is_secret_name(name) else f"{name}{between}{MASK}"


@functools.cache
def _is_variable(name: str) -> bool:
    return bool(VARIABLE.search(name.upper()))


def _from_environment() -> tuple[str, ...]:
    return tuple(
        value for name, value in os.environ.items() if _is_variable(name) and _is_distinct(value)
    )


@functools.lru_cache(maxsize=256)
def _is_distinct(value: str) -> bool:
    """Whether it is no path, and no number or word that a tool may answer with: "12345678", "disabled"."""
    least = 2 * SHORTEST_VARIABLE if value.isdecimal() or value.isalpha() else SHORTEST_VARIABLE
    return len(value) >= least and value[0] not in "/~."


@functools.lru_cache(maxsize=8)
def _values(known: tuple[tuple[str, str], ...], named: tuple[str, ...]) -> list[tuple[str, str]]:
    """Values in every form in which a text may have them, longest first."""
    forms: dict[str, str] = {}
    for value, shown in [*((one.strip(), MASK) for one in named), *known]:
        for form in (value, json.dumps(value, ensure_ascii=False)[1:-1], json.dumps(value)[1:-1]):
            forms[form] = shown
        forms[urllib.parse.quote(value, safe="")] = forms[urllib.parse.quote_plus(value)] = shown
    return sorted(forms.items(), key=lambda pair: -len(pair[0]))


def _mask_record(record: logging.LogRecord) -> bool:
    record.msg, record.args = mask(record.getMessage()), ()
    return True


logging.getLogger("graft").addFilter(_mask_record)
