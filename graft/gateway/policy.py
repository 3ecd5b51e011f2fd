"""The policy that is served: its engine and chat template, how it is sampled, and the limits of a session."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graft.gateway.request import AgentRequest, RefusedRequest
from graft.gateway.roots import ROLES
from graft.protocols import Engine
from graft.rollout.setup import limited_sampling
from graft.text.chat import Chat
from graft.text.syntax_probe import syntax_of
from graft.types import Message, Sampling

MOST_PROMPTS = 1024
"""Prompts whose tokens are kept."""


class ServedPolicy:
    """
    sampling        how answers are drawn; its temperature, top-p and top-k are the learner's
    max_context     tokens of one context, the answer included
    max_calls       calls of one session
    deadline        seconds that one answer may take
    honour_client   draw with the client's temperature, top-p and top-k; answers that are not drawn as
                    `sampling` says are then recorded and not trained
    trained_roles   of main, sub-agent, summary: whose answers are trained
    """

    def __init__(
        self,
        engine: Engine,
        chat: Chat,
        *,
        sampling: Sampling,
        max_context: int = 4096,
        max_calls: int = 100,
        deadline: float = 600.0,
        honour_client: bool = False,
        trained_roles: Sequence[str] = ROLES,
    ) -> None:
        self.engine, self.chat, self.sampling = engine, chat, sampling
        self.max_context, self.max_calls, self.deadline = max_context, max_calls, deadline
        self.honour_client, self.trained_roles = honour_client, tuple(trained_roles)
        if unknown := [role for role in trained_roles if role not in ROLES]:
            raise ValueError(f"no role {', '.join(unknown)}; an answer is of {', '.join(ROLES)}")
        if share := getattr(engine, "share_loop", None):
            share()
        self.syntax = syntax_of(chat)
        self.no_calls = replace(self.syntax, name="")
        """How turns are read where no tool is offered."""
        self.inner_system = _inner_system(chat)
        """The role of system messages inside a conversation."""
        self._prompts: dict[str, list[int]] = {}

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[int]:
        """The tokens of a prompt; all attempts at a task begin with the same one."""
        written = json.dumps([messages, tools])
        if written not in self._prompts:
            if len(self._prompts) >= MOST_PROMPTS:
                del self._prompts[next(iter(self._prompts))]
            tokens = self.chat.prompt(messages, tools)
            if tools and not self.syntax.name:
                calls = repr(self.syntax.unknown[:120]) if self.syntax.unknown else "no calls"
                raise RefusedRequest(
                    f"the chat template shows tools and writes {calls}, so the policy's calls cannot be "
                    "read; use model.chat_template=chatml, or send no tools",
                    param="tools",
                )
            self._prompts[written] = tokens
        return [*self._prompts[written]]

    def sampling_for(self, request: AgentRequest, length: int) -> tuple[Sampling, bool]:
        """How to draw the answer to a prompt of `length` tokens, and whether the learner can use it."""
        base, chat = self.sampling, self.chat
        wanted = self.wanted(request) if self.honour_client else {}
        limit = min(base.max_tokens, request.max_tokens or base.max_tokens)
        limit = max(1, min(limit, self.max_context - length))
        end = () if chat.end_ids or not chat.end_text else (chat.end_text,)
        try:
            base = replace(base, **wanted) if wanted else base
        except ValueError as error:
            raise RefusedRequest(str(error)) from error
        drawn = limited_sampling(base, limit, (*request.stop, *end), tuple(chat.end_ids), 0)
        return drawn, not wanted

    def overrides(self, request: AgentRequest) -> bool:
        """Whether the client asks for another distribution than it gets."""
        return bool(self.wanted(request)) and not self.honour_client

    def wanted(self, request: AgentRequest) -> dict[str, Any]:
        """What the client asks for that differs from the recipe."""
        given = {name: getattr(request, name) for name in ("temperature", "top_p", "top_k")}
        return {
            name: value
            for name, value in given.items()
            if value is not None and value != getattr(self.sampling, name)
        }


def _inner_system(chat: Chat) -> str:
    """The role of system messages inside a conversation: templates that refuse them get a user's."""
    probe: Message = {"role": "system", "content": "graft.system"}
    try:
        chat.extend([probe, {"role": "user", "content": "graft.user"}], closed=False)
    except ValueError:
        return "user"
    return "system"
