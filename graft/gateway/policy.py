"""The policy that is served: its engine and chat template, how it is sampled, and the limits of a session."""

from __future__ import annotations

import asyncio
import json
import logging
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from hashlib import blake2b
from typing import Any

from graft.engine.checks import check_structure
from graft.engine.errors import EngineError
from graft.gateway.drawing import TurnForm
from graft.gateway.request import AgentRequest, RefusedRequest
from graft.gateway.roots import ROLES, TRAINED_ROLES
from graft.gateway.speakers.main_choice import MainPattern
from graft.gateway.speakers.routes import ModelRoutes
from graft.protocols import Engine
from graft.rollout.setup import limited_sampling
from graft.rollout.user_calls import in_thread
from graft.structure import Structure, StructureError
from graft.text.call_opening import NAME, CallPieces, call_opening, call_pieces
from graft.text.chat import Chat
from graft.text.syntax_probe import syntax_of
from graft.text.turn_grammar import ANY, call_rules, call_structure, may_think, turn_structure
from graft.types import Message, Sampling

MAX_NOTED = 32
"""Types of tools that are named in the log: clients choose them."""
log = logging.getLogger("graft")
MAX_PROMPTS = 1024
"""Prompts whose tokens are kept."""
ASKED = {
    "json": "Answer with JSON that is valid under this schema, and with nothing else:",
    "regex": "Answer with a text that this regular expression matches, and with nothing else:",
    "lark": "Answer with a text of this grammar, and with nothing else:",
}
"""How a prompt asks for a format that is not enforced."""
LONG_PROMPT = 8_192
"""Tokens of a prompt from which on it is not kept."""
MAX_SECONDS = 20
"""To compile a structure."""
MAX_COMPILED = 32
"""Structures known to be compiled: half of those that an engine keeps."""
ANY_OBJECT = {"type": "object"}


class ServedPolicy:
    """
    sampling        how answers are drawn; its temperature, top-p and top-k are the learner's
    max_context     tokens of one context, the answer included
    max_calls       calls of one session
    deadline        seconds that one answer may take
    honour_client   draw with the client's temperature, top-p and top-k; answers that are not drawn as
                    `sampling` says are then recorded and not trained
    trained_roles   of main, sub-agent, summary, user: whose answers are trained
    main            what the main agent's conversation has; see `speakers.main_choice`
    formats         enforce: answers have the format that a client asks for; strict: calls of strict tools
                    too; prompt: the prompt asks for it
    provider_tools  drop: tools that a provider would run are not shown; refuse: such requests are refused
    routes          which model answers which name; None: the policy answers all
    frozen          engines of the frozen models among them, by path
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
        trained_roles: Sequence[str] = TRAINED_ROLES,
        main: MainPattern = MainPattern(),
        provider_tools: str = "drop",
        formats: str = "enforce",
        routes: ModelRoutes | None = None,
        frozen: Mapping[str, Engine] | None = None,
    ) -> None:
        self.engine, self.chat, self.sampling = engine, chat, sampling
        self.max_context, self.max_calls, self.deadline = max_context, max_calls, deadline
        self.honour_client, self.trained_roles = honour_client, tuple(trained_roles)
        self.main, self.routes = main, routes or ModelRoutes()
        self.provider_tools, self._noted_tools = provider_tools, set[str]()
        self.formats = formats
        self._frozen_engines, self._frozen = dict(frozen or {}), dict[str, ServedPolicy]()
        if unknown := [role for role in trained_roles if role not in ROLES]:
            raise ValueError(f"no role {', '.join(unknown)}; an answer is of {', '.join(ROLES)}")
        if share := getattr(engine, "share_loop", None):
            share()
        self.syntax = syntax_of(chat)
        self.no_calls = replace(self.syntax, name="")
        """How turns are read where no tool is offered."""
        self.may_think = may_think(chat, self.syntax)
        self.inner_system = _inner_system(chat)
        """The role of system messages inside a conversation."""
        self._prompts: dict[bytes, Sequence[int]] = {}
        self._openings: dict[str, str] = {}
        self._compiled: dict[Structure, None] = {}
        self._compiling: dict[Structure, asyncio.Future[None]] = {}

    def frozen(self, path: str) -> ServedPolicy:
        """The same limits and chat over a frozen model."""
        if path not in self._frozen:
            self._frozen[path] = ServedPolicy(
                self._frozen_engines[path],
                self.chat,
                sampling=self.sampling,
                max_context=self.max_context,
                max_calls=self.max_calls,
                deadline=self.deadline,
                honour_client=self.honour_client,
                provider_tools=self.provider_tools,
                formats=self.formats,
            )
        return self._frozen[path]

    def prompt(self, messages: Sequence[Message], tools: Sequence[Any] | None) -> list[int]:
        """The tokens of a prompt; all attempts at a task begin with the same one."""
        written = blake2b(json.dumps([messages, tools]).encode()).digest()
        tokens = self._prompts.get(written)
        if tokens is None:
            tokens = self.chat.prompt(messages, tools)
            if not tokens:
                raise RefusedRequest(
                    "the chat template writes no text for these messages, so there is nothing to continue; "
                    "send a message with a text, or use another model.chat_template",
                    param="messages",
                )
            if tools and not self.syntax.name:
                calls = repr(self.syntax.unknown[:120]) if self.syntax.unknown else "no calls"
                raise RefusedRequest(
                    f"the chat template shows tools and writes {calls}, so the policy's calls cannot be "
                    "read; use model.chat_template=chatml, or send no tools",
                    param="tools",
                )
            if len(tokens) < LONG_PROMPT:
                while len(self._prompts) >= MAX_PROMPTS:
                    self._prompts.pop(next(iter(self._prompts), written), None)
                self._prompts[written] = array("i", tokens)
        return [*tokens]

    def check_tools(self, request: AgentRequest) -> int:
        """Count the tools of a request that a provider would run; each type is named once in the log."""
        listed = ", ".join(dict.fromkeys(request.dropped_tools))
        if listed and self.provider_tools == "refuse":
            raise RefusedRequest(
                f"there is no provider here that runs the tools of type {listed}; leave them out, or set "
                "agent.provider_tools=drop",
                param="tools",
            )
        for kind in request.dropped_tools:
            if kind not in self._noted_tools and len(self._noted_tools) < MAX_NOTED:
                self._noted_tools.add(kind)
                log.warning(
                    "tools of type %r run at a provider, which is not here: the policy is not shown them",
                    kind,
                )
        return len(request.dropped_tools)

    def with_format(self, request: AgentRequest) -> AgentRequest:
        """The request whose prompt asks for the format, where formats are not enforced."""
        if request.format is None or request.is_plain or self.formats != "prompt":
            return request
        asked = f"{ASKED[request.format.kind]}\n{request.format.source}"
        first, *others = request.messages
        if first["role"] not in ("system", "user"):
            messages = ({"role": "user", "content": asked}, *request.messages)
        else:
            messages = ({**first, "content": f"{first['content']}\n\n{asked}"}, *others)
        return replace(request, messages=messages, format=None)

    def opening(self, request: AgentRequest) -> str:
        """The start of the answer that `tool_choice` demands: of a call of that tool, or of any; "" else.

        The policy goes on from there. What is given to it is no sample of its distribution and is not
        trained; what it samples behind that is.
        """
        choice = request.tool_choice
        if choice in ("auto", "none"):
            return ""
        if request.messages[-1]["role"] == "assistant":
            raise RefusedRequest(
                "tool_choice demands a call, and the last message already begins the answer; leave one of "
                "them out",
                param="tool_choice",
            )
        names = [tool["function"]["name"] for tool in request.tools]
        tool = names[0] if len(names) == 1 else "" if choice == "required" else choice
        if tool not in self._openings:
            self._openings[tool] = call_opening(self.chat, tool)
        if not self._openings[tool]:
            raise RefusedRequest(
                f"tool_choice {choice!r} is not supported with this chat template and tool: the start of "
                "such a call is not known; use tool_choice auto, or model.chat_template=chatml",
                param="tool_choice",
            )
        return self._openings[tool]

    def sampling_for(
        self, request: AgentRequest, length: int, structure: Structure | None = None
    ) -> tuple[Sampling, bool]:
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
        if structure is not None:
            base = replace(base, structure=structure)
        stop = (*request.stop, *end, *self._ends_of_call(request))
        drawn = limited_sampling(base, limit, stop, tuple(chat.end_ids), 0)
        return drawn, not wanted

    async def form_of(self, request: AgentRequest) -> TurnForm:
        """What the answer must look like; RefusedRequest if no answer could."""
        form, param = TurnForm(), "tools"
        try:
            held = self._held_calls(request)
            if request.format is not None and request.tool_choice in ("auto", "none"):
                param = "response_format"
                form = TurnForm(turn=self._structure(request, request.format, held))
            elif held:
                form = TurnForm(call=call_structure(held, self.syntax, self.chat.tokenizer))
            for structure in filter(None, form):
                await self._compile(structure)
        except (StructureError, EngineError) as error:
            raise await self._refused_form(request, param, error) from error
        return form

    async def _refused_form(
        self, request: AgentRequest, param: str, error: Exception
    ) -> RefusedRequest:
        """The refusal of a turn that cannot be enforced; it quotes the part to blame, if one is."""
        if isinstance(error.__cause__, TimeoutError):
            return RefusedRequest(str(error), param=param)
        parts: dict[str, Structure | None] = {"": request.format}
        for function in (tool["function"] for tool in request.tools):
            if param == "tools" and function["name"] in request.strict_tools:
                parts[function["name"]] = Structure.json(function["parameters"])
        for name, part in parts.items():
            try:
                if part is not None:
                    await self._compile(part)
            except (StructureError, EngineError) as why:
                whose = f"the parameters of the strict tool {name!r}: " if name else ""
                return RefusedRequest(f"{whose}{why}", param=param)
        return RefusedRequest(str(error), param=param)

    async def _compile(self, structure: Structure) -> None:
        """Compile a structure on a thread, while other sessions go on; once for all who wait for it."""
        if structure in self._compiled:
            return
        compiling = self._compiling.get(structure)
        if compiling is None or compiling.get_loop() is not asyncio.get_running_loop():
            compiling = asyncio.ensure_future(in_thread(check_structure, self.engine, structure))
            compiling.add_done_callback(partial(self._end_compiling, structure))
            self._compiling[structure] = compiling
        done, _ = await asyncio.wait([compiling], timeout=MAX_SECONDS)
        if not done:  # it goes on: a later request may find it compiled
            raise StructureError(
                f"the schema takes more than {MAX_SECONDS} s to compile; make it smaller"
            ) from TimeoutError()
        compiling.result()
        while len(self._compiled) >= MAX_COMPILED:
            self._compiled.pop(next(iter(self._compiled)))
        self._compiled[structure] = None

    def _end_compiling(self, structure: Structure, done: asyncio.Future[None]) -> None:
        self._compiling.pop(structure, None)
        if not done.cancelled():
            done.exception()  # those who wait raise it; where nobody does, nothing is logged

    def _held_calls(self, request: AgentRequest) -> list[str]:
        """The rules of calls, where strict tools are offered and their arguments can be enforced."""
        may_call = request.tool_choice != "none" and self.formats == "strict"
        functions = [tool["function"] for tool in request.tools]
        allowed = [f for f in functions if not request.allowed or f["name"] in request.allowed]
        if not may_call or not any(f["name"] in request.strict_tools for f in allowed):
            return []
        pieces = self._call_pieces
        if pieces is None or not all(NAME.fullmatch(f["name"]) for f in allowed):
            return []
        schemas = {
            f["name"]: ANY_OBJECT | (f["parameters"] if f["name"] in request.strict_tools else {})
            for f in allowed
        }
        return call_rules(pieces, self.syntax, self.chat.tokenizer, schemas)

    @cached_property
    def _call_pieces(self) -> CallPieces | None:
        """What stands around the arguments of calls; None where they cannot be enforced."""
        pieces = call_pieces(self.chat, self.syntax)
        try:
            check_structure(self.engine, Structure.lark(f"{ANY}\nstart: REST"))
            why = "" if pieces else "the chat template writes calls that are not JSON behind a mark"
        except EngineError:
            pieces, why = None, "the engine has no structures"
        if why:
            log.warning("the arguments of strict tools are not enforced, because %s", why)
        return pieces

    def _structure(
        self, request: AgentRequest, text: Structure, held: Sequence[str] = ()
    ) -> Structure:
        """The structure of an answer: of its text, after a thought, or calls in place of it."""
        if request.messages[-1]["role"] == "assistant":
            raise RefusedRequest(
                "a format is asked for, and the last message already begins the answer; leave one of them "
                "out",
                param="response_format",
            )
        may_call = bool(request.tools) and request.tool_choice != "none"
        if request.is_plain:
            return text
        return turn_structure(
            text,
            self.syntax,
            self.chat.tokenizer,
            may_think=self.may_think,
            may_call=may_call,
            held=held,
        )

    def _ends_of_call(self, request: AgentRequest) -> tuple[str, ...]:
        """What ends an answer that may have one call: the end of a call, where each has its own."""
        syntax = self.syntax
        is_shared = syntax.is_list or syntax.name in ("python", "channels")
        is_one = request.tools and request.tool_choice != "none" and not request.parallel_calls
        return (syntax.close,) if is_one and syntax.close and not is_shared else ()

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
