"""Answers under a structure: what is written, drawn and forced, and that kernels draw the same."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import fastjsonschema
import pytest
import torch
from burst_kit import engine_on, run_both
from engine_kit import gather, prompt, sample_one, tiny_decoder, tiny_engine

from graft.actions import matcher
from graft.actions.space import ActionSpace
from graft.engine.errors import EngineError
from graft.engine.native.engine import NativeEngine
from graft.engine.native.request import SampleRequest
from graft.structure import FIRST_ROW_ID, Structure, allowed_by, read_row
from graft.text.tokenizer import FastTokenizer
from graft.types import NO_ACTION, Completion, Finish, Sampling

LETTERS = FastTokenizer.characters('0123456789{}":, nam')
"""23 tokens: <pad>, <eos>, <unk>, then 0 is 3, and n, a, m are 19, 20, 21."""

NAMED: dict[str, Any] = {
    "type": "object",
    "properties": {"nam": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["nam"],
    "additionalProperties": False,
}


def letter_engine(**options: Any) -> NativeEngine:
    return tiny_engine(tokenizer=LETTERS, eos_ids=LETTERS.eos_ids, **options)


def ask(structure: Structure, engine: NativeEngine | None = None, **how: Any) -> Completion:
    context = (engine or letter_engine()).open(prompt(5))
    return sample_one(context, Sampling(structure=structure, **how))


def test_forced_text_is_written_and_not_drawn() -> None:
    done = ask(Structure.json(NAMED))
    text = LETTERS.decode(done.tokens)
    assert text.startswith('{"nam": ') and text.endswith("}<eos>") and done.finish is Finish.STOP
    start = done.tokens.index(LETTERS.encode(" ")[0]) + 1
    assert done.actions[:start] == [NO_ACTION] * start and done.logprobs[:start] == [0.0] * start
    first = done.tokens[start]
    assert done.actions[start] == first and done.modes[start] >= FIRST_ROW_ID
    row = allowed_by(read_row(done.masks[done.modes[start]]), 23)
    assert row.nonzero()[0].tolist() == [*range(3, 13)]  # the digits
    if done.actions[start + 1] != NO_ACTION:  # one digit: another, or the end
        row = allowed_by(read_row(done.masks[done.modes[start + 1]]), 23)
        assert LETTERS.encode("}")[0] in row.nonzero()[0]


def test_what_is_forced_from_the_first_to_the_last_token_computes_nothing() -> None:
    engine = letter_engine()
    done = ask(Structure.json({"const": 12}), engine)
    assert LETTERS.decode(done.tokens) == "12<eos>" and done.finish is Finish.STOP
    assert done.actions == [NO_ACTION] * 3 and engine.stats["steps"] == 0


def test_answers_go_on_when_earlier_ones_have_used_up_the_states_of_a_structure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The lexer has a state for every text before: one answer has up to 90 of the 300."""
    monkeypatch.setattr(matcher, "MAX_LEXER_STATES", 300)
    engine, compiled = letter_engine(), matcher.StructureCompiler._compiled
    count = 0

    def counted(compiler: matcher.StructureCompiler, structure: Structure) -> Any:
        nonlocal count
        count += 1
        return compiled(compiler, structure)

    monkeypatch.setattr(matcher.StructureCompiler, "_compiled", counted)
    structure = Structure.regex("[nam]*a[nam]{30}")
    contexts = [engine.open(prompt(5), key=n) for n in range(40)]
    done = gather(contexts, [Sampling(max_tokens=30, structure=structure)] * 40)
    assert count > 1 and all(len(one.tokens) == 30 for one in done)
    engine.close()


def test_an_answer_that_the_budget_cuts_says_so() -> None:
    for most in range(1, 9):  # inside the forced text, and at its end
        done = ask(Structure.json(NAMED), max_tokens=most)
        assert done.finish is Finish.LENGTH and len(done.tokens) == most
        assert '{"nam": '.startswith(LETTERS.decode(done.tokens))
    whole = ask(Structure.choice(["am"]), max_tokens=3)
    assert whole.finish is Finish.STOP and LETTERS.decode(whole.tokens) == "am<eos>"
    assert ask(Structure.choice(["am"]), max_tokens=2).finish is Finish.LENGTH


@pytest.mark.parametrize(
    ("stop", "text"),
    [('"n', '{"n'), ('m":', '{"nam":'), ("{", "{"), ("}", "}"), (', "a', ', "a'), ("zz", "}<eos>")],
)
def test_a_stop_string_ends_an_answer_inside_forced_text(stop: str, text: str) -> None:
    schema = {**NAMED, "properties": {**NAMED["properties"], "a": {"const": 1}}}
    schema["required"] = ["nam", "a"]
    done = ask(Structure.json(schema), stop=(stop,))
    assert LETTERS.decode(done.tokens).endswith(text) and done.finish is Finish.STOP
    assert LETTERS.decode(done.tokens).count(stop) == (stop != "zz")


def test_forced_text_that_follows_token_by_token_ends_at_a_stop_string_too() -> None:
    """As between the steps of a burst on a GPU."""
    engine = letter_engine()
    how = Sampling(structure=Structure.regex("[01]nam: [01]"), stop=("am",))
    context = engine.open(prompt(5))

    async def begin() -> SampleRequest:  # its future is of a running event loop
        return engine._request(context, how, None)

    request = asyncio.run(begin())
    assert request.force() is None and request.allowed
    finish = request.add_matched(3, -0.7, 0.7, stepwise=True)
    assert request.pending
    while finish is None:
        request.write_pending()
        finish = request.add_matched(request.pending[0], 0.0, 0.0, stepwise=True)
    assert LETTERS.decode(request.sequence.tokens[request.start :]) == "0nam"
    assert finish is Finish.STOP


def test_of_several_ends_of_a_turn_the_policy_draws_one() -> None:
    done = ask(Structure.choice(["a"]), stop_tokens=(2,))
    assert done.tokens[0] == done.tokens[0] and done.actions[0] == NO_ACTION
    assert done.tokens[1] in (1, 2) and done.actions[1] == done.tokens[1]
    assert done.logprobs[1] < 0


def test_an_end_may_lie_beyond_the_tokens_of_the_tokenizer() -> None:
    decoder = tiny_decoder(vocab_size=90)
    for end in (32, 89):
        engine = tiny_engine(decoder, tokenizer=LETTERS, eos_ids=(end,))
        done = ask(Structure.choice(["man", "nam"]), engine)
        assert done.tokens[-1] == end and done.finish is Finish.STOP
        both = ask(Structure.choice(["am"]), engine, stop_tokens=(1,))
        assert both.tokens[-1] in (1, end) and both.actions[-1] == both.tokens[-1]


def test_min_tokens_do_not_prolong_a_complete_answer() -> None:
    done = ask(Structure.choice(["man", "nam"]), min_tokens=50, stop_tokens=(2,))
    assert done.finish is Finish.STOP and len(done.tokens) == 4


def test_a_sample_goes_on_within_an_answer_that_was_begun() -> None:
    engine = letter_engine()
    begun = LETTERS.encode('{"nam": 1')
    context = engine.open([*prompt(3), *begun])
    done = sample_one(context, Sampling(structure=Structure.json(NAMED), num_begun=len(begun)))
    assert json.loads(LETTERS.decode(begun) + LETTERS.decode(done.tokens)[:-5])["nam"] in [
        1, *range(10, 20),
    ]  # fmt: skip
    context = engine.open(LETTERS.encode("man"))
    with pytest.raises(EngineError, match="go on"):
        sample_one(context, Sampling(structure=Structure.json(NAMED), num_begun=3))


def test_log_probs_are_those_of_the_allowed_tokens_alone() -> None:
    done = ask(Structure.choice(["0", "1"]), temperature=1.0)
    again = ask(Structure.choice(["1", "0", "0"]), temperature=1.0)
    assert done.tokens == again.tokens and done.masks == again.masks  # the row, not its source
    other = {"3": "4", "4": "3"}[str(done.tokens[0])]
    engine = letter_engine()
    free = engine.score([prompt(5)], [[5]], [[done.tokens[0]], [int(other)]])[0][0]
    chosen, rest = free[0][0], free[1][0]
    total = torch.logsumexp(torch.tensor([chosen, rest]), 0).item()
    assert done.logprobs[0] == pytest.approx(chosen - total, abs=1e-5)


def test_kernels_draw_the_same_beside_plain_rows(device: torch.device) -> None:
    two = {**NAMED, "properties": {**NAMED["properties"], "man": NAMED["properties"]["nam"]}}
    structures = [
        Structure.json(two | {"required": ["nam", "man"]}),  # forces nine tokens in its middle
        None,
        Structure.regex("[nam]{2,4}0[0-9]"),
        None,
    ]

    def scenario(engine: NativeEngine) -> list[Completion]:
        contexts = [engine.open(prompt(9 + n, n)) for n in range(4)]
        samplings = [Sampling(max_tokens=40, structure=s, temperature=0.8) for s in structures]
        short = [Sampling(max_tokens=16, structure=structures[0])]  # the budget ends in forced text
        return gather([*contexts, engine.open(prompt(5))], samplings + short)

    done = run_both(device, scenario, tokenizer=LETTERS, eos_ids=LETTERS.eos_ids)
    assert done[0].finish is Finish.STOP and done[0].masks and not done[1].masks
    assert json.loads(LETTERS.decode(done[0].tokens[:-1])).keys() == {"nam", "man"}
    assert done[4].finish is Finish.LENGTH and done[4].actions[-1] == NO_ACTION


def test_kernels_draw_on_under_masks_that_stay(device: torch.device) -> None:
    """Plain rows beside them are read every few steps, and some end between."""

    def scenario(engine: NativeEngine) -> list[Completion]:
        contexts = [engine.open(prompt(4, n)) for n in range(4)]
        digits = Sampling(max_tokens=12, structure=Structure.regex("[0-9]{20}"))
        plain = [Sampling(max_tokens=most, min_tokens=most) for most in (5, 8, 11)]
        return gather(contexts, [digits, *plain])

    done = run_both(device, scenario, tokenizer=LETTERS, eos_ids=LETTERS.eos_ids)
    assert len(set(done[0].modes)) < 3 and [len(d.tokens) for d in done] == [12, 5, 8, 11]


def test_kernels_take_more_structured_rows_than_there_is_room_for(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    from graft.engine.native.sampling import masks

    monkeypatch.setattr(masks, "MIN_SLOTS", 1)
    engine = engine_on(device, tokenizer=LETTERS, eos_ids=LETTERS.eos_ids)
    for count in (1, 3):
        contexts = [engine.open(prompt(4, n)) for n in range(count)]
        done = gather(contexts, [Sampling(structure=Structure.choice(["am", "an"]))] * count)
        assert {LETTERS.decode(d.tokens) for d in done} <= {"am<eos>", "an<eos>"}
    plain = sample_one(engine.open(prompt(4), key=5), Sampling(max_tokens=3))
    free = engine_on(device, tokenizer=LETTERS, eos_ids=LETTERS.eos_ids)
    assert plain.tokens == sample_one(free.open(prompt(4), key=5), Sampling(max_tokens=3)).tokens


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 7, "maximum": 23},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
        {"type": "string", "maxLength": 4},
        {"enum": ["a b", 1, None, {"a": [1]}]},
        {"anyOf": [{"type": "null"}, {"type": "number"}]},
        {"type": "string", "format": "path", "maxLength": 3},  # a note of pydantic's
        {"type": "array", "items": {"type": "null"}, "maxItems": 2, "uniqueItems": False},
        {
            "type": "object",
            "properties": {
                "kind": {"const": "x"},
                "more": {"$ref": "#/$defs/pair"},
                "note": {"type": "string", "pattern": "^[ab]+$", "maxLength": 5},
            },
            "required": ["kind", "more"],
            "additionalProperties": False,
            "$defs": {
                "pair": {
                    "type": "array",
                    "prefixItems": [{"type": "integer"}, {"type": "string", "maxLength": 3}],
                    "items": False,
                    "minItems": 2,
                }
            },
        },
    ],
)
def test_every_answer_is_valid_under_its_schema(schema: dict[str, Any]) -> None:
    letters = FastTokenizer.bytes()
    engine = NativeEngine(
        tiny_decoder(vocab_size=258), tokenizer=letters, eos_ids=letters.eos_ids, kv_tokens=4096
    )
    contexts = [engine.open([65 + n]) for n in range(8)]
    done = gather(contexts, [Sampling(max_tokens=400, structure=Structure.json(schema))] * 8)
    is_valid = fastjsonschema.compile(
        {**schema, "$schema": "http://json-schema.org/draft-07/schema"}
    )
    for one in done:
        assert one.finish is Finish.STOP
        value = json.loads(letters.decode(one.tokens[:-1]))
        if "more" not in str(schema):
            is_valid(value)
        else:
            assert value["kind"] == "x" and isinstance(value["more"][0], int)


@pytest.mark.parametrize(
    ("structure", "named"),
    [
        (Structure.json({"type": "integer", "minimum": 3, "maximum": 2}), "JSON schema"),
        (Structure.regex("[0-9"), "expression"),
        (Structure.lark("start: missing_rule"), "grammar"),
        (Structure.json({"const": "xyz"}), "x"),  # letters that the vocabulary lacks
        (Structure.json({"$ref": "#/$defs/none"}), "JSON schema"),
        (Structure.json({"enum": [1234567890123456789]}), "1234567890123456789"),
        (Structure.json(False), "false"),
        (Structure.regex("(?<=a)b"), "look-around"),
        (Structure("json", '{"items":' * 400 + "{}" + "}" * 400), "recursion"),
    ],
)
def test_a_structure_that_no_answer_can_follow_is_refused(structure: Structure, named: str) -> None:
    engine = letter_engine()
    with pytest.raises(EngineError, match=named):
        ask(structure, engine)
    assert engine.stats["running"] == 0


def test_a_structure_needs_a_tokenizer_and_no_grammar() -> None:
    with pytest.raises(EngineError, match="tokenizer"):
        ask(Structure.json(), tiny_engine())
    from graft.actions.grammar import Automaton

    engine = letter_engine(space=ActionSpace(23))
    context = engine.open(prompt(3))
    with pytest.raises(EngineError, match="actions"):
        sample_one(context, Sampling(structure=Structure.json()), Automaton(0, {}))
