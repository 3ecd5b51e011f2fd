"""A recipe from the settings of TRL or verl, and a line about every setting that has no place in it.

translate_text("trl grpo --learning_rate 1e-6 --num_generations 16 ...", "", graft.config.keys())
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from graft.recipe.peer_keys import PEER_KEYS, meant, translated
from graft_interop.recipes.peer_text import PeerSettings, read_settings
from graft_interop.recipes.peer_values import RULES, TRL_DEFAULTS, VERL_DEFAULTS, CannotTranslate

OF_VERL = ("actor_rollout_ref.", "algorithm.", "data.", "trainer.", "critic.", "reward_model.")
REFERENCE = "actor_rollout_ref.ref."


@dataclass
class Translation:
    """`recipe` by sections; `left` says of each setting that is not in it, why."""

    library: str
    recipe: dict[str, dict[str, Any]] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)


def translate_text(text: str, ending: str, known: Mapping[str, Any]) -> Translation | None:
    """The settings in a text; None if there are none. `ending` is that of its file, such as ".py"."""
    settings = read_settings(text, ending)
    return translate(settings, known) if settings.values or settings.unread else None


def translate(settings: PeerSettings, known: Mapping[str, Any]) -> Translation:
    """`known` are graft's keys. Their defaults are written out, if graft's differ."""
    is_verl = any(key.startswith(OF_VERL) for key in (*settings.values, *settings.unread))
    made = Translation("verl" if is_verl else "TRL", left=dict(settings.unread))
    defaults = VERL_DEFAULTS if is_verl else TRL_DEFAULTS
    given = {**defaults, **settings.values}
    given = {key: value for key, value in given.items() if key not in settings.unread}
    names = {key: _name(key, known) for key in given}
    values = {names[key]: value for key, value in given.items() if not key.startswith(REFERENCE)}
    keys: dict[str, Any] = {}
    for key, value in given.items():
        try:
            keys |= _convert(key, names[key], value, values, known)
        except CannotTranslate as why:
            made.left[key] = str(why)
        except (TypeError, ValueError, KeyError, ZeroDivisionError, AttributeError):
            made.left[key] = f"its value {value!r} is not what {made.library} takes there"
    if keys.get("rollout.max_tokens", 0) >= keys.get("rollout.max_context", 4096):
        # TRL bounds the answer only
        keys["rollout.max_context"] = 2 * keys["rollout.max_tokens"]
    for key, value in keys.items():
        section, _, name = key.partition(".")
        made.recipe.setdefault(section, {})[name] = value
    return made


def _name(key: str, known: Mapping[str, Any]) -> str:
    """The end of their key that the table has: "optim.lr" of actor_rollout_ref.actor.optim.lr."""
    parts = key.split(".")
    ends = [".".join(parts[start:]) for start in range(len(parts))]
    return next((end for end in ends if end in RULES or end in PEER_KEYS or end in known), key)


def _convert(
    key: str, name: str, value: Any, given: Mapping[str, Any], known: Mapping[str, Any]
) -> dict[str, Any]:
    if key.startswith(REFERENCE):
        raise CannotTranslate("the reference of the KL is computed with the policy's settings")
    if name in RULES:
        return RULES[name](value, given)
    entry = translated(key, known)
    ours, _, remark = entry.partition(" ")
    if ours == "-":
        if not value:
            return {}
        raise CannotTranslate(remark)
    if ours and not remark:
        return {ours: value} if value is not None else {}
    if value is None:
        return {}
    raise CannotTranslate(f"{ours}: {remark}" if ours else meant(key, known))
