"""The messages of retrieval services, POST /retrieve, in two forms.

    Search-R1, JSON   {queries: [q], topk, return_scores} -> {result: [[{document, score}]]}
    GEM, msgpack      {query: q, topk, return_scores}     -> {result: [{document, score}]}

A document is {id, contents: "Title\\ntext"}. Without scores Search-R1 sends bare documents and GEM a
score of nil. The first byte of a message identifies the encoding, its key the form.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from graft.data.corpus import Document, as_document, without_surrogates
from graft_search.source import MAX_QUERY, MAX_TOPK, Hit

MAX_QUERIES = 1024
"""Of one request."""
TYPES = {"json": "application/json", "msgpack": "application/msgpack"}


class BadMessage(ValueError):
    """Bytes that are not a request or reply; the message says what was expected."""


class RetrievalRequest(NamedTuple):
    queries: list[str]
    topk: int | None
    """None: the default of the service."""
    return_scores: bool
    is_single: bool
    """One `query` instead of a list: the answer is one list of documents, not a list of lists."""
    wire: str


def pack(message: Any, wire: str) -> bytes:
    if wire == "json":
        return json.dumps(message).encode()
    return load_msgpack().packb(message)


def unpack(data: bytes) -> tuple[Any, str]:
    """The message and its wire. A msgpack map never begins like JSON text."""
    wire = "msgpack" if data[:1] >= b"\x80" else "json"
    try:
        return (json.loads(data) if wire == "json" else load_msgpack().unpackb(data)), wire
    except (ValueError, TypeError, RecursionError) as error:
        raise BadMessage(f"not {wire}: {str(error)[:200]}") from error


def read_request(data: bytes) -> RetrievalRequest:
    message, wire = unpack(data)
    if not isinstance(message, dict):
        raise BadMessage(f"expected an object with `queries` or `query`, got {_kind(message)}")
    is_single = "queries" not in message
    queries: Any = [message.get("query")] if is_single else message["queries"]
    if not isinstance(queries, list) or not all(isinstance(query, str) for query in queries):
        raise BadMessage("`queries` must be a list of texts, or `query` one text")
    if len(queries) > MAX_QUERIES:
        raise BadMessage(f"{len(queries)} queries; at most {MAX_QUERIES} in one request")
    topk = message.get("topk")
    if topk is not None and (type(topk) is not int or not 0 <= topk <= MAX_TOPK):
        raise BadMessage(f"`topk` must be a whole number up to {MAX_TOPK}, got {str(topk)[:40]!r}")
    scores = message.get("return_scores", False)
    if not isinstance(scores, bool):
        raise BadMessage(f"`return_scores` must be true or false, got {_kind(scores)}")
    # cut, not refused: one long query must not make the others in its request fail
    cut = [without_surrogates(query[:MAX_QUERY]) for query in queries]
    # a topk of 0 means the default, as in both original services
    return RetrievalRequest(cut, topk or None, scores, is_single, wire)


def write_reply(request: RetrievalRequest, answers: Sequence[Sequence[Hit]]) -> bytes:
    result: list[Any] = [[_sent(hit, request) for hit in hits] for hits in answers]
    return pack({"result": result[0] if request.is_single else result}, request.wire)


def _sent(hit: Hit, request: RetrievalRequest) -> dict[str, Any]:
    document = {"id": hit.id, "contents": Document(hit.id, hit.title, hit.text).contents}
    if request.return_scores:
        return {"document": document, "score": hit.score}
    return {"document": document, "score": None} if request.is_single else document


def write_request(queries: Sequence[str], topk: int, wire: str) -> bytes:
    """A request; it always asks for scores, since the original services fail without."""
    clean = [without_surrogates(query) for query in queries]
    content: dict[str, Any] = {"queries": clean}
    if wire == "msgpack":
        (query,) = clean
        content = {"query": query}
    return pack({**content, "topk": topk, "return_scores": True}, wire)


def read_reply(data: bytes, num_queries: int, *, is_single: bool) -> list[list[Hit]]:
    message, _ = unpack(data)
    result = message.get("result") if isinstance(message, dict) else None
    if not isinstance(result, list):
        raise BadMessage("the reply has no list `result`")
    answers = [result] if is_single else result
    if len(answers) != num_queries or not all(isinstance(hits, list) for hits in answers):
        raise BadMessage(f"expected {num_queries} lists of documents in `result`")
    return [[_received(item, number) for number, item in enumerate(hits)] for hits in answers]


def _received(item: Any, number: int) -> Hit:
    has_score = isinstance(item, dict) and "document" in item
    document = item["document"] if has_score else item
    score = item.get("score") if has_score else None
    if not isinstance(score, int | float) or not math.isfinite(score):
        score = None
    return Hit(*as_document(document, number, f"document {number + 1}"), score)


def _kind(value: Any) -> str:
    return "nothing" if value is None else type(value).__name__


def load_msgpack() -> Any:
    try:
        import msgpack
    except ImportError as error:
        raise ImportError(
            'the msgpack form of /retrieve needs the msgpack package: pip install "graft-rl[search]"'
        ) from error
    return msgpack
