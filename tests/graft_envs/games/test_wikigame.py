"""The wiki game on local pages: rewards, variants, ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from graft.envs import make
from graft_envs.games.wiki.game import WikiGame
from graft_envs.games.wiki.pages import BUNDLED, LocalWiki, read_pages

PAGES = {
    "A": ["B", "C", "Trap"],
    "B": ["A", "C"],
    "C": ["D"],
    "D": ["A"],
    "Trap": [],
}
BACK = "<PREV_PAGE>"


def box(title: str) -> str:
    return f"\\boxed{{{title}}}"


@pytest.fixture
def wiki(tmp_path: Path) -> Path:
    path = tmp_path / "wiki.jsonl"
    rows = [
        {"title": title, "summary": f"{title} is a page. It is short.", "links": links}
        for title, links in PAGES.items()
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def from_a_to_d(wiki: Path, **settings: object) -> WikiGame:
    env = WikiGame(wiki=wiki, **settings)  # pyright: ignore
    for seed in range(200):
        env.reset(seed=seed)
        if (env.current["title"], env.target["title"]) == ("A", "D"):
            return env
    raise AssertionError("never drawn")


def test_the_bundled_pages_are_sound():
    pages = read_pages(str(BUNDLED))
    assert len(pages) >= 80
    for title, page in pages.items():
        assert page["summary"].count(". ") == 1 and page["summary"].endswith(".")
        assert title not in page["links"]
        assert len(set(page["links"])) == len(page["links"])
    assert sum(not page["links"] for page in pages.values()) == 2  # the dead ends


@pytest.mark.parametrize("variant", ["", "-easy", "-hard"])
def test_the_shortest_way_wins_and_costs_its_clicks(variant: str):
    env = make(f"game:WikiGame-v0{variant}")
    for seed in range(12):
        observation, info = env.reset(seed=seed)
        assert observation.endswith(info["suffix"])
        assert env.answer[0] == env.current["title"] != env.target["title"] == env.answer[-1]
        turns = [env.step(box(title)) for title in env.answer[1:]]
        assert [turn.reward for turn in turns] == [-0.05] * (len(turns) - 1) + [1.0]
        assert turns[-1][2:4] == (True, False)
        assert len(turns) <= env.max_turns


def test_a_target_is_within_the_turns():
    env = WikiGame(max_turns=2)
    for seed in range(30):
        env.reset(seed=seed)
        assert len(env.answer) - 1 <= 2


def test_ways_are_shortest(wiki: Path):
    before = LocalWiki(wiki).distances("A", 9)
    assert before == {"A": None, "B": "A", "C": "A", "Trap": "A", "D": "C"}
    assert from_a_to_d(wiki).answer == ["A", "C", "D"]


def test_wrong_titles_cost_and_near_ones_are_hinted(wiki: Path):
    env = from_a_to_d(wiki)
    turn = env.step(box("tra"))
    assert turn[1:4] == (-0.2, False, False)
    assert box("Trap") in turn.observation
    assert env.step(box("D")).reward == -0.2  # exists, but is no link of A
    assert env.current["title"] == "A"
    far = env.step(box("é" * 299)).observation
    assert "Did you mean" not in far


def test_a_format_error_costs_and_the_game_goes_on(wiki: Path):
    env = from_a_to_d(wiki, max_turns=3)
    for action in ("C", "\\boxed{}"):
        assert env.step(action)[1:4] == (-0.2, False, False)
    assert env.step("")[1:4] == (-0.2, False, True)  # the last turn: cut off, not over
    assert env.is_over


def test_a_click_on_the_last_turn_pays_nothing(wiki: Path):
    env = from_a_to_d(wiki, max_turns=2)
    env.step(box("B"))
    assert env.step(box("C"))[1:4] == (0.0, True, True)
    env = from_a_to_d(wiki, max_turns=2)
    env.step(box("C"))
    assert env.step(box("D"))[1:4] == (1.0, True, False)
    env = from_a_to_d(wiki, max_turns=2)
    env.step(box("nowhere"))
    assert env.step(box("nowhere"))[1:4] == (0.0, True, True)


def test_a_page_without_links_ends_the_game(wiki: Path):
    for variant in ("noregrets", "eidetic"):
        env = from_a_to_d(wiki, variant=variant)
        assert env.step(box("Trap"))[1:4] == (0.0, True, False)


def test_going_back_is_not_allowed_without_regrets(wiki: Path):
    for variant in ("noregrets", "eidetic"):
        env = from_a_to_d(wiki, variant=variant, max_turns=3)
        env.step(box("B"))
        assert env.step(box(BACK))[1:4] == (-0.2, False, False)
        assert env.step(box(BACK))[1:4] == (-0.2, False, True)


def test_eidetic_keeps_every_link(wiki: Path):
    env = from_a_to_d(wiki, variant="eidetic")
    turn = env.step(box("C"))
    assert all(box(title) in turn.info["suffix"] for title in ("B", "C", "Trap", "D"))
    env.step(box("B"))  # a link of A, not of C
    assert env.current["title"] == "B"
    assert env.step(box("D")).reward == 1.0


def test_oneback_goes_back_but_not_twice_in_a_row(wiki: Path):
    env = from_a_to_d(wiki, variant="oneback")
    assert env.step(box(BACK)).reward == -0.2  # nowhere to go
    env.step(box("B"))
    env.step(box("C"))
    assert env.step(box(BACK)).reward == -0.05
    assert env.current["title"] == "B"
    assert env.step(box(BACK)).reward == -0.2
    env.step(box("C"))
    assert env.step(box(BACK)).reward == -0.05


def test_freenav_goes_back_to_the_start(wiki: Path):
    env = from_a_to_d(wiki, variant="freenav", max_turns=5)
    env.step(box("B"))
    env.step(box("C"))
    assert [env.step(box(BACK)).reward for _ in range(2)] == [-0.05, -0.05]
    assert env.current["title"] == "A"
    assert env.step(box(BACK))[1:4] == (-0.2, False, True)


def test_a_dead_end_with_a_way_back_costs_two_turns(wiki: Path):
    env = from_a_to_d(wiki, variant="freenav", max_turns=3)
    turn = env.step(box("Trap"))
    assert turn[1:4] == (-0.1, False, False)
    assert (env.current["title"], env.turns) == ("A", 2)
    env = from_a_to_d(wiki, variant="oneback", max_turns=2)
    assert env.step(box("Trap"))[1:4] == (-0.1, False, True)


@pytest.mark.parametrize(
    "length, shown",
    [
        ((6, "characters"), "A is a..."),
        ((2, "words"), "A is..."),
        ((1, "sentences"), "A is a page..."),
    ],
)
def test_summaries_are_cut_by_characters_words_or_sentences(
    wiki: Path, length: tuple[int, str], shown: str
):
    env = from_a_to_d(wiki, page_summary_length=length)
    assert shown in env.board()


def test_a_saved_game_goes_on_with_its_pages(wiki: Path):
    env = from_a_to_d(wiki, variant="freenav")
    env.step(box("B"))
    other = WikiGame(wiki=wiki, variant="freenav")
    other.set_state(json.loads(json.dumps(env.get_state())))
    assert other.board() == env.board()
    assert other.step(box(BACK)) == env.fork().step(box(BACK))
    assert env.fork().wiki is env.wiki


def test_bad_settings_are_refused(tmp_path: Path, wiki: Path):
    with pytest.raises(ValueError, match="backend='local'"):
        WikiGame(backend="mw", wiki=wiki)
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"title": "A", "summary": "", "links": ["B"]}\n')
    with pytest.raises(ValueError, match="links to 'B', which has no row"):
        WikiGame(wiki=broken)
    broken = tmp_path / "columns.jsonl"
    broken.write_text('{"title": "A"}\n')
    with pytest.raises(ValueError, match="row 1: needs the columns"):
        WikiGame(wiki=broken)
