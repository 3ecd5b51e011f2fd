r"""A shop to search and click through: \boxed{search[desk lamp]}, \boxed{click[buy now]}."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from graft.envs.base import BaseEnv
from graft.envs.splits import check_split
from graft.types import Turn
from graft_envs.games.base import BOX, echo, last_box
from graft_envs.webshop.pages import (
    BUY,
    DETAILS,
    NEXT,
    PREVIOUS,
    RENDERINGS,
    SEARCH,
    Page,
    clickable,
    detail_page,
    item_page,
    results_page,
    search_page,
)
from graft_envs.webshop.reward import score
from graft_envs.webshop.shop import BUNDLED, Goal, Product, open_shop

INVALID = -0.1

_ACTION = re.compile(r"\\boxed\{\s{0,9}(search|click)\s{0,9}\[([^{}]{1,1000})\]\s{0,9}\}")


class WebShop(BaseEnv):
    """Buy what the instruction asks for; the purchase ends the episode and pays up to 1.0.

        env     You are shopping ... Task: I am looking for a desk lamp ...
        policy  \\boxed{search[desk lamp eye protection]}
        env     ... results, ten to a page
        policy  \\boxed{click[gs00104729]}, then \\boxed{click[white]}, then \\boxed{click[buy now]}

    An action that cannot be parsed or is not offered costs 0.1 and changes nothing; one more than
    `error_tolerance` of them ends the episode. `observation_mode` is "html", "text" or "text_rich".
    `data` is a folder with WebShop's files; without it a bundled shop of 40 products is used.
    """

    box = BOX
    shared = ("shop",)
    saved = (
        *(*BaseEnv.saved, "goal_number", "view", "query", "hits", "page_number"),
        *("asin", "detail", "chosen", "visited", "errors"),
    )

    def __init__(
        self,
        *,
        split: str = "train",
        observation_mode: str = "text",
        max_turns: int = 15,
        error_tolerance: int = 15,
        format_error_reward: float = INVALID,
        show_attrs: bool = False,
        data: str | Path | None = None,
    ) -> None:
        super().__init__()
        self.split = check_split(split)
        if observation_mode not in RENDERINGS:
            raise ValueError(
                f"observation_mode={observation_mode!r}: must be one of {', '.join(RENDERINGS)}"
            )
        if max_turns < 1:
            raise ValueError(f"max_turns={max_turns}: must be 1 or more")
        self.mode, self.max_turns = observation_mode, max_turns
        self.error_tolerance, self.error_reward = error_tolerance, format_error_reward
        self.show_attrs = show_attrs
        self.shop = open_shop(str(BUNDLED if data is None else data))
        if not self.shop.goals[split]:
            raise ValueError(f"{data}: no instruction belongs to split={split!r}; add some")
        self.goal_number = self.errors = 0
        self.visited: list[str] = []
        self.leave()

    @property
    def goal(self) -> Goal:
        return self.shop.goals[self.split][self.goal_number]

    @property
    def product(self) -> Product:
        return self.shop.products[self.asin]

    def pose(self) -> str:
        self.goal_number = self.rng.randrange(len(self.shop.goals[self.split]))
        self.answer = {"asin": self.goal.asin, "options": list(self.goal.options)}
        self.visited, self.errors = [], 0
        self.leave()
        return self.render_page()

    def leave(self) -> None:
        """Back to the search page; forget query, hits, product and options."""
        self.view = "search"  # or "results", "item", "detail"
        self.query, self.page_number, self.asin, self.detail = "", 1, "", ""
        self.hits: list[str] = []
        self.chosen: dict[str, str] = {}

    def page(self) -> Page:
        if self.view == "search":
            return search_page()
        if self.view == "results":
            hits = [self.shop.products[asin] for asin in self.hits]
            return results_page(hits, self.query, self.page_number, self.visited)
        if self.view == "item":
            return item_page(self.product, self.chosen, show_attributes=self.show_attrs)
        return detail_page(self.product, self.detail)

    def prefix(self) -> str:
        return (
            "You are shopping in a web shop, one action per turn. Buying something ends it.\n"
            f"Task: {self.goal.instruction}\n"
            f"Steps taken so far: {self.turns} of {self.max_turns}."
        )

    def suffix(self) -> str:
        actions = ["search[words]", *(f"click[{label}]" for label in clickable(self.page()))]
        return (
            f"Allowed actions: {', '.join(actions)}\n"
            "Think first, then write one of them as \\boxed{action}, for example "
            "\\boxed{search[green tea]} or \\boxed{click[buy now]}."
        )

    def state_key(self) -> str:
        """The page and what was chosen on it."""
        return self.saved_beyond((*BaseEnv.saved, "visited", "errors"))

    def margins(self) -> dict[str, Any]:
        return {"prefix": self.prefix(), "suffix": self.suffix()}

    def render_page(self) -> str:
        return f"{self.prefix()}\n{RENDERINGS[self.mode](self.page())}\n{self.suffix()}"

    def step(self, action: str) -> Turn:
        if self.is_over:
            raise RuntimeError(f"env {self.env_id!r}: no episode is running; call reset() first")
        self.turns += 1
        found = last_box(_ACTION, action)
        if found is None:
            return self.refuse("no action in the required form was found.")
        name, argument = found[1], found[2].strip()
        if name == "search":
            return self.search(argument)
        part = clickable(self.page()).get(argument.lower())
        if part is None:
            return self.refuse(f"{echo(argument)!r} is not offered here.")
        if part.kind == "button" and part.text == BUY:
            return self.buy()
        self.click(part.kind, part.text, part.name)
        return self.go_on(0.0)

    def search(self, query: str) -> Turn:
        if not query:
            return self.refuse("the search is empty.")
        self.leave()
        self.view, self.query, self.hits = "results", query, self.shop.search(query)
        return self.go_on(0.0)

    def click(self, kind: str, label: str, name: str) -> None:
        if kind == "product":
            self.view, self.asin, self.chosen = "item", label, {}
            if label not in self.visited:
                self.visited.append(label)
        elif kind == "option":
            self.chosen[name] = label
        elif label == SEARCH:
            self.leave()
        elif label == NEXT:
            self.page_number += 1
        elif label in (*DETAILS, "Attributes"):
            self.view, self.detail = "detail", label
        elif label == PREVIOUS and self.view == "results":
            self.page_number -= 1
        elif label == PREVIOUS:
            self.view = "results" if self.view == "item" else "item"

    def buy(self) -> Turn:
        wanted = self.shop.products[self.goal.asin]
        result = score(self.product, self.chosen, wanted, self.goal)
        self.is_over = True
        text = f"Turn {self.turns}: you bought {self.product.title!r}. Score: {result.reward:.2f}."
        return Turn(text, result.reward, True, False, {"score": result._asdict()})

    def refuse(self, why: str) -> Turn:
        self.errors += 1
        is_over = self.errors > self.error_tolerance
        return self.go_on(self.error_reward, f"Turn {self.turns}: {why} Nothing happened.", is_over)

    def go_on(self, reward: float, note: str = "", is_over: bool = False) -> Turn:
        """The next page. The turn limit is a rule of the game, so it sets both flags."""
        is_last = self.turns == self.max_turns
        self.is_over = is_over or is_last
        if self.is_over:
            end = "All turns are used up" if is_last else "Too many actions were not possible"
            text = f"{note or f'Turn {self.turns}:'} {end}; nothing was bought."
            return Turn(text, reward, True, is_last)
        lines = [self.prefix(), *([note] if note else []), RENDERINGS[self.mode](self.page())]
        suffix = self.suffix()
        info = {"prefix": lines[0], "suffix": suffix}
        return Turn("\n".join([*lines, suffix]), reward, False, False, info)

    def sample_random_action(self) -> str:
        rng = self.action_rng()
        labels = list(clickable(self.page()))
        number = rng.randrange(len(labels) + 1)
        if number < len(labels):
            return f"\\boxed{{click[{labels[number]}]}}"
        product = self.shop.products[rng.choice(self.shop.asins)]
        return f"\\boxed{{search[{product.query}]}}"
