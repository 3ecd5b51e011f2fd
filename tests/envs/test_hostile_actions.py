"""No text of a policy makes an env raise, pays more than its range or fills the context."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.envs import ENVS
from tests.envs.env_kit import build, floor_of, play

SCRIPTS = [*("[9**9**9]", "9**9**9", "9" * 200_000, "#### 9e999", "```python\n", "é\x00", "٣", "ſ")]
EMPTY = [*("", " ", "]", "[", "[]", "[" * 9, "<answer></answer>", "\\boxed{", "\\boxed{}")]
BOXES = [
    "\\boxed{{}}",
    "\\boxed{\\boxed{1}}",
    "}\\boxed{",
    "\\boxed{9**9**9}",
    "\\boxed{9^{9^{9^9}}}",
]
HUGE = [
    *("[", "(", "<", "{", "0", "é\x00", " ", "\\", "\n", "-"),
    *("\\boxed{", "\\boxed{1 ", "\\boxed{A", "<answer>", "####", "#### ", "1 ", "lamp "),
    *("<calculator>", "<compare>", "</compare>", "compare A and B ", "\\boxed{click["),
]
FORMS = [
    *("<answer>{}</answer>", "\\boxed{{{}}}", "\\boxed{{{}", "#### {}", "=({} M)", "[{}]"),
    *("<calculator>{}</calculator>", "<compare>{}</compare>", "<swap> A, {} </swap>"),
    *(
        "compare {} and B",
        "\\boxed{{click[{}]}}",
        "\\boxed{{search[{}]}}",
        "\\boxed{{reveal {} 2}}",
    ),
]
"""How the envs' own actions are written; what stands inside is drawn."""

INSIDE = st.one_of(
    st.text(max_size=20),
    st.text(alphabet="0123456789 ,.abcxyzABCX\t\n-+*/()", max_size=30),
    st.sampled_from(
        ["0 0 0 0", "1 1 A", "flag 1 1", "up", "<PREV_PAGE>", "buy now", "{0}", "A, B"]
    ),
    st.sampled_from(
        ["9" * 900_000, " " * 900_000, "1 " * 500_000, "A" * 1_000_000, "1" + " " * 999_999]
    ),
)
HOSTILE = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="[]()<>+-*/=.;?0123456789 #/answerclto,\n\\boxed{}", max_size=60),
    st.sampled_from([*SCRIPTS, *EMPTY, *BOXES]),
    st.sampled_from(HUGE).map(lambda text: text * (1_000_000 // len(text))),
    st.builds(lambda form, text: form.format(text), st.sampled_from(FORMS), INSIDE),
)
LONGEST = {
    **dict.fromkeys(["game:Crosswords", "game:WordSearch", "game:WikiGame", "webshop:"], 8000),
    "game:": 1500,
    "earl:": 1000,
}
"""Start of an id -> characters that its observations stay below; elsewhere 20,000."""

ONE_PER_CLASS = {str(entry.build): name for name, entry in ENVS.items()}
CASES = [
    *((env_id, "") for env_id in sorted(ONE_PER_CLASS.values()) if env_id != "rg:zebra_puzzles"),
    ("rg:countdown", ""),  # scored by a worker; an item of zebra_puzzles takes a second
    *((f"earl:{name}", "") for name in ("arithmetic-lang1", "countdown-1", "calc-countdown")),
    *(("earl:sort", syntax) for syntax in ("tags", "words", "actions")),
]
"""One id of each class, and the parts of EARL's mixture."""


@pytest.mark.parametrize(("env_id", "syntax"), CASES)
@settings(deadline=None, max_examples=20)
@given(actions=st.lists(HOSTILE, min_size=1, max_size=6), seed=st.integers(0, 9))
def test_no_action_makes_an_env_raise(env_id: str, syntax: str, actions: list[str], seed: int):
    env = build(env_id, **({"syntax": syntax} if syntax else {}))
    env.reset(seed)
    limit = next((n for start, n in LONGEST.items() if env_id.startswith(start)), 20_000)
    for turn in play(env, actions):
        assert floor_of(env_id) <= turn.reward <= 1.0
        assert len(turn.observation) < limit
        json.dumps(turn.info, allow_nan=False).encode()
