"""2048, Sokoban, crosswords, word search and the wiki game, by id."""

from __future__ import annotations

from graft.envs.catalogue import Entry

TWENTY48 = "graft.envs.games.twenty48:Game2048"
SOKOBAN = "graft.envs.games.sokoban:Sokoban"
CROSSWORDS = "graft.envs.games.crosswords:Crosswords"
WORD_SEARCH = "graft.envs.games.wordsearch:WordSearch"
WIKI_GAME = "graft.envs.games.wikigame:WikiGame"


def entry(build: str, max_turns: int | None, **args: object) -> Entry:
    return Entry(build, {**args, "max_turns": max_turns}, turns=max_turns)


GAMES_B: dict[str, Entry] = {
    "game:Game2048-v0-easy": entry(TWENTY48, 50, target_tile=64),
    "game:Game2048-v0-hard": entry(TWENTY48, 50, target_tile=512),
    "game:Game2048-v0-extreme-hard": entry(TWENTY48, 100, target_tile=2048),
    "game:Game2048-v0-random": entry(TWENTY48, None, target_tile=None),
    "game:Sokoban-v0-easy": entry(SOKOBAN, 20, dim_room=(6, 6), num_boxes=2),
    "game:Sokoban-v0-hard": entry(SOKOBAN, 50, dim_room=(8, 8), num_boxes=4),
    "game:Sokoban-v0-random": entry(SOKOBAN, None, dim_room=None, num_boxes=None),
    "game:Crosswords-v0-easy": entry(CROSSWORDS, 30, hardcore=False, num_words=3),
    "game:Crosswords-v0-hard": entry(CROSSWORDS, 40, hardcore=True, num_words=3),
    "game:Crosswords-v0-random": entry(CROSSWORDS, 20, hardcore=None, num_words=3),
    "game:WordSearch-v0-easy": entry(WORD_SEARCH, 20, hardcore=False, num_words=5),
    "game:WordSearch-v0-hard": entry(WORD_SEARCH, 20, hardcore=True, num_words=5),
    "game:WordSearch-v0-random": entry(WORD_SEARCH, 20, hardcore=None, num_words=5),
    "game:WikiGame-v0-easy": entry(WIKI_GAME, 30),
    "game:WikiGame-v0-hard": entry(WIKI_GAME, 15),
}
for stem in ("Game2048", "Sokoban", "Crosswords", "WordSearch", "WikiGame"):
    GAMES_B[f"game:{stem}-v0"] = GAMES_B[f"game:{stem}-v0-easy"]
