"""Which tokens a structure allows next, and which it forces: answers are matched as they are written.

    {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"], ...}

    written          allowed next                  forced
                     the tokens of '{"age": '      {"age":     nothing is drawn for them
    {"age":          "-", digits                   -
    {"age": 4        digits, "}"                   -
    {"age": 42}      the end of the turn           the end, where there is one token for it

llguidance walks the vocabulary; what is graft's is the row that is recorded with each draw, and the ends of
turns, which are the engine's. Forced text is spelled as the tokenizer spells it.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from hashlib import blake2b
from threading import Lock
from typing import Any, NamedTuple

import numpy as np

from graft.structure import FIRST_ROW_ID, SPACING, Structure, StructureError
from graft.text.enforced_schema import enforced_schema
from graft.text.token_bytes import reads_bytes, token_bytes
from graft.text.tokenizer import FastTokenizer

MAX_COMPILED = 64
"""Structures that are kept compiled."""

MAX_LEXER_STATES = 50_000
"""Of one structure, half a kilobyte each. All answers to it share them; when they are used up it is compiled
again."""

MAX_RENEWALS = 2
"""Of an answer's lexer in one step: by one that others have used since, and by a new one."""
WORN = "too many states"
"""The words of llguidance's error, which has no code of its own."""

MAX_ROWS = 4096
"""Rows that are kept; a field of bounded length has one for every length that is left."""

MIN_PARALLEL = 4
"""Matchers from which on their rows are found on several threads."""

NAMES = {"json": "JSON schema", "regex": "expression", "lark": "grammar"}


class StructureCompiler:
    """Makes matchers for one vocabulary."""

    def __init__(self, tokenizer: FastTokenizer, vocab_size: int) -> None:
        """`vocab_size` is the number of tokens that the model can write."""
        self._tokenizer = tokenizer
        self._rows = MaskRows(-(-tokenizer.vocab_size // 32))
        known = min(vocab_size, tokenizer.vocab_size)
        self._ends = frozenset(token for token in tokenizer.eos_ids if token < known)
        self._vocabulary: Any = None
        self._states, self._lock = dict[Structure, Any](), Lock()
        self.check = lru_cache(maxsize=MAX_COMPILED)(self._check)
        """Raises StructureError if a structure cannot be compiled, or if this vocabulary cannot begin an
        answer."""

    def _check(self, structure: Structure) -> None:
        rows = MaskRows(self._rows.num_words)  # its own: this may run on a thread beside the engine
        matcher = StructureMatcher(self, structure, rows, frozenset(), self._ends)
        matcher.force()
        if not matcher.is_over:
            matcher.draw()

    def matcher(self, structure: Structure, stop_tokens: frozenset[int]) -> StructureMatcher:
        """A matcher at the beginning of an answer, which one of `stop_tokens` ends."""
        return StructureMatcher(self, structure, self._rows, stop_tokens, self._ends)

    def state(self, structure: Structure, worn: Any = None) -> Any:
        """The state before an answer, to be copied; another one than `worn`."""
        with self._lock:
            state = self._states.pop(structure, None)
        if state is None or state is worn:
            state = self._compiled(structure)
        with self._lock:
            self._states[structure] = state  # the last one used
            if len(self._states) > MAX_COMPILED:
                del self._states[next(iter(self._states))]
        return state

    def _compiled(self, structure: Structure) -> Any:
        library = _llguidance().LLMatcher
        if self._vocabulary is None:
            self._vocabulary = self._read_vocabulary()
        try:
            if structure.kind == "json":
                schema = json.dumps(
                    enforced_schema(json.loads(structure.source)), ensure_ascii=False
                )
                grammar = library.grammar_from_json_schema(schema, overrides=SPACING)
            elif structure.kind == "regex":
                grammar = library.grammar_from_regex(structure.source)
            else:
                grammar = library.grammar_from_lark(structure.source)
            limits = _llguidance().LLParserLimits(
                max_lexer_states=MAX_LEXER_STATES, verbose_errors=False
            )
            state = library(self._vocabulary, grammar, log_level=0, limits=limits)
            error = _error_of(state)
        except StructureError:
            raise
        except (ValueError, RecursionError) as why:  # nested too deeply
            state, error = None, str(why)
        if error:
            raise StructureError(
                f"the {NAMES[structure.kind]} {structure.source[:200]!r} cannot be enforced: "
                f"{_with_advice(error)}"
            )
        return state

    def _read_vocabulary(self) -> Any:
        tokenizer = self._tokenizer
        # llguidance wants an end; where the tokenizer has none, a token is named that never counts as one
        ends = sorted(self._ends) or [tokenizer.pad_id or 0]
        source: Any = tokenizer.backend_json()
        if not reads_bytes(tokenizer):
            source = _llguidance().TokenizerWrapper(Alphabet(tokenizer, ends[0]))
        try:
            return _llguidance().LLTokenizer(source, n_vocab=tokenizer.vocab_size, eos_token=ends)
        except ValueError as error:
            raise StructureError(
                "a structure allows bytes, and those of this tokenizer's tokens are not known "
                f"({error}); use a model with a byte-level vocabulary, or one with bytes as a fallback"
            ) from error


class StructureMatcher:
    """The state of one answer under a structure."""

    def __init__(
        self,
        compiler: StructureCompiler,
        structure: Structure,
        rows: MaskRows,
        stop_tokens: frozenset[int],
        ends: frozenset[int],
    ) -> None:
        self.stop_tokens = stop_tokens
        self._compiler, self._structure, self._rows, self._ends = compiler, structure, rows, ends
        self._source = compiler.state(structure)
        self.state = self._source.deep_copy()
        self._written: list[int] = []
        self._row: MaskRow | None = None
        self._last: MaskRow | None = None
        self.used: dict[int, str] = {}
        """The rows under which something was drawn, by their numbers: what an episode keeps."""

    @property
    def num_words(self) -> int:
        """Words of 32 bits that hold a bit for each token of the vocabulary."""
        return self._rows.num_words

    @property
    def is_over(self) -> bool:
        """Whether nothing but an end may follow."""
        return self.state.is_stopped()

    def draw(self) -> MaskRow:
        """What may be drawn now; the row is kept for the episode."""
        if self._row is None:
            self.find_row()
        assert self._row is not None
        self.used[self._row.id] = self._row.text
        return self._row

    def write(self, tokens: Sequence[int]) -> None:
        """Go on after tokens of the answer; StructureError if they do not belong to one."""
        tokens = [token for token in tokens if token not in self.stop_tokens]
        if tokens:
            self._row = None
            is_next = self._asked(lambda state: state.consume_tokens(tokens))
            self._written += tokens
            if not is_next:
                raise StructureError(
                    f"the tokens {tokens[:8]} do not go on with an answer of this structure: "
                    f"{_error_of(self.state)}"
                )

    def force(self) -> list[int]:
        """Write the tokens that must follow; an end only if one token alone is one."""
        forced: list[int] = list(self._asked(lambda state: state.compute_ff_tokens()))
        self.write(forced)
        if self.is_over and len(self.stop_tokens) == 1:
            forced += self.stop_tokens
        return forced

    def find_row(self, bits: bytearray | None = None) -> None:
        """Find what may be drawn, from the bits of `find_bits`; StructureError if nothing may."""
        if bits is None or self.state.is_error():
            bits = bytearray(self._asked(lambda state: state.compute_bitmask()))
        if (error := _error_of(self.state)) and "NoExtensionBias" not in error:
            raise StructureError(f"the structure cannot be followed further: {error}")
        # a model may have ends beyond the tokens of its tokenizer
        bits.extend(bytes(max(max(self.stop_tokens, default=0) // 8 + 1 - len(bits), 0)))
        # the ends of texts that llguidance knows are not the ends of turns
        for token in self._ends:
            bits[token >> 3] &= ~(1 << (token & 7))
        if self.state.is_accepting():
            for token in self.stop_tokens:
                bits[token >> 3] |= 1 << (token & 7)
        # mostly the row of the draw before, and comparing takes a tenth of hashing
        row = self._last
        if row is None or row.bits != bits:  # pyright: ignore[reportUnnecessaryComparison]
            row = self._last = self._rows.row(bytes(bits))
        forced = self.state.compute_ff_bytes()
        # where no token writes bytes that must follow, the mask of llguidance is of other tokens
        if row.lowest < 0 or (forced and not self.state.validate_tokens([row.lowest])):
            raise StructureError(
                f"no token of this vocabulary goes on with the answer: it must go on with {forced!r}"
                if forced
                else "no token of this vocabulary goes on with the answer"
            )
        self._row = row

    def _asked(self, ask: Callable[[Any], Any]) -> Any:
        """What the state answers; where other answers have used up its lexer, that of a new one."""
        answer = ask(self.state)
        for _ in range(MAX_RENEWALS):
            if WORN not in _error_of(self.state):
                break
            self._source = self._compiler.state(self._structure, worn=self._source)
            self.state = self._source.deep_copy()
            self.state.consume_tokens(self._written)
            answer = ask(self.state)
        return answer


def find_bits(matchers: Sequence[StructureMatcher]) -> list[bytearray | None]:
    """What llguidance allows several answers next, found side by side; None where that does not pay."""
    if len(matchers) < MIN_PARALLEL:
        return [None] * len(matchers)
    num_words = matchers[0].num_words
    masks = np.zeros((len(matchers), num_words), dtype=np.int32)
    places = [(matcher.state, number) for number, matcher in enumerate(matchers)]
    _threads().unsafe_compute_mask_ptr(places, masks.ctypes.data, 4 * num_words, len(matchers))
    return [bytearray(mask) for mask in masks]


class MaskRow(NamedTuple):
    """One row: the actions allowed at a place of an answer."""

    id: int
    text: str
    """Its bits, compressed, as an episode keeps them."""
    bits: bytes
    """One bit an action, the lowest first; actions beyond them are not allowed."""
    lowest: int
    """The first action that it allows; -1 where there is none."""


class MaskRows:
    """The rows met so far by their bits, the latest used ones."""

    def __init__(self, num_words: int) -> None:
        self.num_words = num_words
        self._rows: OrderedDict[bytes, MaskRow] = OrderedDict()

    def row(self, bits: bytes) -> MaskRow:
        """The row with these bits."""
        row = self._rows.get(bits)
        if row is None:
            flags = int.from_bytes(bits, "little")
            lowest = (flags & -flags).bit_length() - 1
            row = self._rows[bits] = MaskRow(row_id(bits), write_row(bits), bits, lowest)
            if len(self._rows) > MAX_ROWS:
                self._rows.popitem(last=False)
        else:
            self._rows.move_to_end(bits)
        return row


def row_id(bits: bytes) -> int:
    """The mode that stands for these bits."""
    digest = blake2b(bits.rstrip(b"\0"), digest_size=8).digest()
    return FIRST_ROW_ID + (int.from_bytes(digest, "little") & (FIRST_ROW_ID - 1))


def write_row(bits: bytes) -> str:
    return base64.b85encode(zlib.compress(bits.rstrip(b"\0"), 1)).decode()


@lru_cache(maxsize=MAX_ROWS)
def only(action: int) -> bytes:
    """The bits of a row that allows one action."""
    return (1 << action).to_bytes(action // 8 + 1, "little")


class Alphabet:
    """A vocabulary of characters, as llguidance asks for one."""

    bos_token_id = None

    def __init__(self, tokenizer: FastTokenizer, eos_token_id: int) -> None:
        self.eos_token_id = eos_token_id
        self.tokens = token_bytes(tokenizer)
        self.special_token_ids = sorted(tokenizer.special_ids)
        self._letters = {content: token for token, content in enumerate(self.tokens)}

    def __call__(self, text: str | bytes) -> list[int]:
        characters = text.decode(errors="replace") if isinstance(text, bytes) else text
        spelled = (self._letters.get(character.encode()) for character in characters)
        return [token for token in spelled if token is not None]


def _with_advice(error: str) -> str:
    """An error of llguidance without its own options, and with what to do."""
    if "coerce_one_of" in error:
        return "several of its oneOf could fit the same value; write anyOf"
    if "Unimplemented keys" in error:
        return f"{error}; no mask can say these: leave them out, and check the answer instead"
    return error


def _error_of(state: Any) -> str:
    """What a matcher says of its failure, on one line; empty if it has none."""
    return (
        " ".join(state.get_error().replace("<non-verbose/>", "").split())[:300]
        if state.is_error()
        else ""
    )


@cache
def _threads() -> Any:
    return _llguidance().LLExecutor()


def _llguidance() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise StructureError(
            "structured answers need the llguidance package: pip install llguidance"
        ) from error
    return llguidance
