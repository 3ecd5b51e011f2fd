"""Recorded rows as episodes: the author of each token decides whether it is trained.

A row is a prompt with the spans after it, or a chat, where one assistant text may hold a whole attempt.
Either becomes the episode that a rollout would have been:

    {"messages": [{"role": "user", "content": "2+3="}],
     "spans": [{"author": "policy", "text": "[2+3]"}, {"author": "env", "text": "5;"},
               {"author": "policy", "text": "5"}]}                     trained  [2+3]  5<eos>

    {"messages": [{"role": "user", "content": "Who?"},
                  {"role": "assistant", "content": "<search>x</search><result>A</result>A"}]}
                                  with the marks <result> and </result>         <search>x</search>  A<eos>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, cast

from graft.data.readers import ChatRow
from graft.rollout.action_spelling import ActionSpeller, Marks
from graft.rollout.demonstration import INLINE, DemonstratedTurn, attempt, decided, plain_decisions
from graft.text.chat import Chat, Piece
from graft.text.marks import between, inside
from graft.text.template import Tools
from graft.text.transcript import contexts
from graft.types import Author, CallText, Episode, Leaf, Message, Span, Task

ROLES = (INLINE, "user", "tool")


def example(
    task: Task,
    row: ChatRow,
    chat: Chat,
    marks: Marks | None = None,
    speller: ActionSpeller | None = None,
    prefill: str = "",
    start_tool: str = "",
) -> Episode:
    """The episode of a row. `marks` enclose results in an assistant's text; `speller` finds calls."""
    if row.spans is None:
        if start_tool:
            raise ValueError(
                f"actions.start={start_tool} begins every attempt with a call, and a recorded chat "
                "begins as it was recorded; give rows with spans, or leave actions.start out"
            )
        return conversation(task, row.messages, chat, row.tools, marks, speller)
    entries = read_entries(row.spans, speller)
    actions = None if speller is None else speller.actions
    how = actions, prefill, row.tools, start_tool
    return attempt(replace(task, prompt=tuple(row.messages)), entries, chat, *how)


def read_entries(spans: Any, speller: ActionSpeller | None = None) -> list[DemonstratedTurn]:
    """The entries of a row's `spans`: author and text of everything after the prompt.

        {"author": "policy", "text": "[2+3]"}                  text of the model, trained
        {"author": "env", "text": "5;"}                        inside the policy's turn, or
        {"author": "env", "text": "Wrong.", "role": "user"}    as a message of its own
        {"author": "policy", "call": {"tool": "compare", "arguments": ["A", "B"]}}

    A turn is over where a message or nothing follows, and continues before more text of the policy or
    an answer inside it; "end" (true or false) overrides that, as for an attempt that was cut. A call may
    have its "text" beside it, for runs without actions; its answer is written without the text that the
    actions put around it. With a `speller` calls are also found in the policy's text.
    """
    if not isinstance(spans, Sequence) or isinstance(spans, str) or not spans:
        raise ValueError(f"`spans` holds {spans!r:.60}, not a list of {{author, text}}")
    if not any(isinstance(s, Mapping) and s.get("author") == Author.POLICY for s in spans):
        raise ValueError("no span of author 'policy', so there is nothing to learn")
    entries: list[DemonstratedTurn] = []
    for number, span in enumerate(spans):
        following = spans[number + 1 : number + 2]
        read = _entry(span, following, number + 1, speller is not None)
        if speller is None or read.author is not Author.POLICY or isinstance(read.text, CallText):
            entries.append(read)
        else:
            entries += _split_calls(read, following, speller)
    return entries


def _entry(span: Any, following: Sequence[Any], number: int, has_actions: bool) -> DemonstratedTurn:
    where = f"span {number}"
    if not isinstance(span, Mapping):
        raise ValueError(f"{where} is {span!r:.60}; a span is {{author, text}}")
    author, call = span.get("author"), span.get("call")
    text, role = span.get("text"), span.get("role") or INLINE
    if author not in (Author.POLICY, Author.ENV):
        raise ValueError(f"{where}: author {author!r} is neither 'policy' nor 'env'")
    if role not in ROLES:
        raise ValueError(f"{where}: role {role!r} is none of {', '.join(ROLES)}")
    if call is not None and has_actions:
        text = _called(call, text, where)
    elif call is not None and text is None:
        raise ValueError(
            f"{where} is a call made by actions, and the run has none; give actions.file, or the "
            "text of the call as `text`"
        )
    if not isinstance(text, str):
        raise ValueError(f"{where}: `text` holds {text!r:.60}, not text")
    ends = span.get("end")
    if ends is None:
        ends = not any(_goes_on(other) for other in following)
    return DemonstratedTurn(Author(author), text, role, bool(ends))


def _goes_on(following: Any) -> bool:
    """Whether a turn is not over before this span."""
    if not isinstance(following, Mapping):
        return False
    return following.get("author") == Author.POLICY or (following.get("role") or INLINE) == INLINE


def _called(call: Any, text: Any, where: str) -> CallText:
    tool = call.get("tool") if isinstance(call, Mapping) else None
    arguments = call.get("arguments") if isinstance(call, Mapping) else None
    is_list = isinstance(arguments, Sequence) and not isinstance(arguments, str)
    if not isinstance(tool, str) or not is_list:
        raise ValueError(
            f"{where}: `call` holds {call!r:.80}; a call is {{tool, arguments: [text, ...]}}"
        )
    texts = [str(argument) for argument in cast(Sequence[Any], arguments)]
    return CallText(text if isinstance(text, str) else "", tool, texts)


def _split_calls(
    entry: DemonstratedTurn, following: Sequence[Any], speller: ActionSpeller
) -> list[DemonstratedTurn]:
    """Plain text and calls of one text; its last part ends as the whole does."""
    parts = speller.parts(entry.text, is_answered=any(_goes_on(other) for other in following))
    if not parts:
        return [entry]
    found = [
        DemonstratedTurn(Author.ENV, part.text)
        if part.is_answer
        else DemonstratedTurn(Author.POLICY, part.text, ends=False, call=part.call)
        for part in parts
    ]
    if not entry.ends:
        return found
    if found[-1].call is None and found[-1].author is Author.POLICY:
        return [*found[:-1], found[-1]._replace(ends=True)]
    return [*found, DemonstratedTurn(Author.POLICY, "", ends=True)]


def conversation(
    task: Task,
    messages: Sequence[Message],
    chat: Chat,
    tools: Tools | None = None,
    marks: Marks | None = None,
    speller: ActionSpeller | None = None,
) -> Episode:
    """The episode of a recorded chat: assistant tokens are trained, everything else is context.

    Text between `marks` in an assistant's text is the environment's; the text is encoded as a whole and
    cut between tokens. With a `speller` its calls become decisions.
    """
    episode = Episode(replace(task, prompt=tuple(messages)))
    tips: list[int] = []
    for pieces in contexts(chat, list(messages), tools):
        chat.check_tokens(pieces)
        tip: int | None = None
        last: int | None = None  # the token before the next text
        for piece in pieces:
            if not piece.tokens:
                continue
            if tip is None or not piece.is_trained:
                author = Author.TASK if tip is None else Author.ENV
                spans = [Span(tip, author, piece.tokens, text=piece.text)]
            elif speller is not None:
                spans = _spans_with_calls(piece.text, chat, speller, last)
            else:
                spans = _spans_without_results(piece, chat, marks, last)
            for span in spans:
                span.parent = tip
                tip = episode.append(span)
            last = episode.spans[-1].tokens[-1]
        tips += [] if tip is None else [tip]
    if tips:
        episode.leaves.append(Leaf(tuple(tips), reward=1.0))
    return episode


def _spans_without_results(
    piece: Piece, chat: Chat, marks: Marks | None, last: int | None
) -> list[Span]:
    """An assistant's turn, cut where a result begins or ends; its tokens are not changed."""
    intervals = [] if marks is None else between(piece.text, *marks)
    if not intervals:
        return [decided(-1, plain_decisions(piece.tokens), piece.text)]
    tokens, offsets = chat.tokenizer.encode_after_with_offsets(piece.text, last)
    spans: list[Span] = []
    for is_result, some in groupby(
        zip(tokens, inside(offsets, intervals), strict=True), key=lambda pair: pair[1]
    ):
        ids = [token for token, _ in some]
        text, last = chat.tokenizer.decode_after(ids, last), ids[-1]
        spans.append(
            Span(-1, Author.ENV, ids, text=text)
            if is_result
            else decided(-1, plain_decisions(ids), text)
        )
    return spans


def _spans_with_calls(
    text: str, chat: Chat, speller: ActionSpeller, last: int | None
) -> list[Span]:
    """An assistant's turn as plain text, calls and their answers, each encoded as in a rollout."""
    spans: list[Span] = []
    for part in speller.parts(text):
        if part.is_answer:
            ids = chat.tokenizer.encode_plain(part.text, last)
            spans.append(Span(-1, Author.ENV, ids, text=part.text))
        else:
            ids = chat.tokenizer.encode_after(part.text, last)
            spans.append(decided(-1, part.call or plain_decisions(ids, speller.actions), part.text))
        last = spans[-1].tokens[-1] if spans[-1].tokens else last
    return spans


def shortened(episode: Episode, limit: int) -> Episode:
    """An example of one attempt, with the first `limit` tokens of each of its contexts.

    Contexts without a trained token are left out, unless there is no other.
    """
    kept: list[list[Span]] = []
    for spans in contexts_of(episode):
        some: list[Span] = []
        for span in spans:
            room = limit - sum(map(len, some))
            if room <= 0:
                break
            lists = {name: getattr(span, name)[:room] for name in Span.PER_TOKEN}
            some.append(span if len(span) <= room else replace(span, **lists))
        kept.append(some)
    trained = [some for some in kept if any(any(span.mask) for span in some)] or kept[:1]
    cut = Episode(episode.task)
    tips: list[int] = []
    for some in trained:
        tip: int | None = None
        for span in some:
            tip = cut.append(replace(span, parent=tip))
        tips += [] if tip is None else [tip]
    cut.leaves = [replace(episode.leaves[0], tips=tuple(tips))]
    return cut


def contexts_of(episode: Episode) -> list[list[Span]]:
    """The spans of an example of one attempt, context by context."""
    tips = episode.leaves[0].tips if episode.leaves else ()
    return [[episode.spans[i] for i in episode.walk(tip)] for tip in tips]
