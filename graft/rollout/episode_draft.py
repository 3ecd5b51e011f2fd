"""What all trajectories of one episode share: its tree so far, the setup, and how prompts become tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graft.protocols import Context
from graft.rollout.failure import RolloutFailure
from graft.rollout.setup import RolloutSetup, draw_key
from graft.text.chat import TEMPLATE
from graft.text.transcript import Transcript
from graft.types import Author, Episode, Message, Span, Task


class EpisodeDraft:
    """An episode in progress. Trajectories write to it; it does not know them."""

    def __init__(self, task: Task, setup: RolloutSetup) -> None:
        self.setup = setup
        self.episode = Episode(task)
        self.tools: Any = None
        """Schemas that the chat template shows in every prompt of this task."""
        self.info: Mapping[str, Any] = {}
        """The info of the environment's reset, without the parts that the task holds."""
        self.transcript: Transcript | None = None
        """The prompt, where the chat template is followed to the letter."""
        self.prompts: dict[str, tuple[int, Context, Transcript | None]] = {}
        """The prompts of the seats of a game."""
        self.keep_open = False
        """True: contexts of ended trajectories stay open, for a branch that forks in the past."""
        self.on_failure: Callable[[RolloutFailure], None] = lambda failure: None
        """Called with the failure of each attempt; the attempt has its status already."""

    def key(self, number: int, purpose: str = "") -> int:
        """Seeds the draws of trajectory `number`; draws other than its tokens have a purpose."""
        return draw_key(self.setup.salt, self.episode.task.id + purpose, number)

    def open_prompt(self, text: str) -> tuple[int, Context, Transcript | None]:
        """The root span, context and transcript of a prompt, written once for all that begin with it."""
        if text not in self.prompts:
            tokens, transcript = self.prompt_tokens([{"role": "user", "content": text}])
            root = self.episode.append(Span(None, Author.TASK, tokens, text=text))
            self.prompts[text] = root, self.setup.engine.open(tokens), transcript
        return self.prompts[text]

    def close_prompts(self) -> None:
        for _, context, _ in self.prompts.values():
            context.close()

    def prompt_tokens(
        self, prompt: str | list[Message], tools: Any = None
    ) -> tuple[list[int], Transcript | None]:
        """The tokens of a prompt and of the prefill; a text is rendered already.

        `tools` belong to a prompt that brings its own; an empty list means none.
        """
        chat, prefill = self.setup.chat, self.setup.prefill
        if isinstance(prompt, str):
            return chat.prefilled(chat.encode(prompt, is_start=True), prefill), None
        offered = self.tools if tools is None else tools or None
        prefill = chat.due_prefill(prompt, prefill)
        tokens = chat.prefilled(chat.prompt(prompt, offered), prefill)
        if chat.history != TEMPLATE:
            return tokens, None
        return tokens, Transcript.of(chat, prompt, offered, tokens, prefill)
