"""What is learned of a chat, token by token, in each template: the assistant's text and its ends."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from graft.actions.actions import load_actions
from graft.data.readers import ChatRow
from graft.rollout.action_spelling import ActionSpeller
from graft.rollout.batching import to_batch, trajectories_of
from graft.rollout.demonstration import demonstration
from graft.rollout.examples import contexts_of, conversation, example, shortened
from graft.rollout.recorded import spans_of_attempt
from graft.text.chat import Chat
from graft.text.gem_templates import BOXED, CODE, FENCED, GAME
from graft.text.template import TEMPLATES
from graft.text.tokenizer import FastTokenizer
from graft.types import Author, Task
from tests.rollout.scripted import LETTERS, SORTING
from tests.rollout.test_rollout_actions import TASK as SWAPPING
from tests.rollout.test_rollout_actions import Taught
from tests.text.text_families import KINDS, sentencepiece
from tests.text.text_families import TEMPLATES as FAMILIES
from tests.text.text_templates import (
    INSTRUCT,
    LLAMA,
    SEARCH,
    THINKING,
    calling,
    small_bpe,
)
from tests.train.sft_kit import learned, message, trained

TASK = Task("row:0", "")
BEGUN = [
    message("user", "Who is the user?"),
    message("assistant", "I think. "),
    message("user", "And?"),
]
TALK = [*BEGUN, message("assistant", "the answer is 5")]
USED = [
    message("user", "Who?"),
    calling("<think>\nhm\n</think>\n\nLet me see.", '{"query": "x"}'),
    message("tool", "the number"),
    message("assistant", "the answer"),
]
CALL = '\n<tool_call>\n{"name": "search", "arguments": {"query": "x"}}\n</tool_call>'
MARKS = ("<result>", "</result>")


def head(role: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n"


def marked(asked: str) -> list[tuple[str, bool]]:
    """TALK in ChatML's marks, with the text `asked` around every question."""
    begin, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    return [
        (begin + asked.replace("{}", "Who is the user?", 1) + end, False),
        ("I think. <|im_end|>", True),
        ("\n" + begin + asked.replace("{}", "And?", 1) + end, False),
        ("the answer is 5<|im_end|>", True),
        ("\n", False),
    ]


PLAIN = [
    ("Who is the user?", False),
    ("I think. <|endoftext|>", True),
    ("And?", False),
    ("the answer is 5<|endoftext|>", True),
]
WANTED = {
    "chatml": ("chatml", TALK, marked("{}")),
    "plain": ("plain", TALK, PLAIN),
    "qwen3_general": ("qwen3_general", TALK, marked("Question: {}" + BOXED)),
    "qwen3_game": ("qwen3_game", TALK, marked(GAME + "{}" + BOXED)),
    "code": (
        "code",
        TALK,
        [
            (f"{CODE}Who is the user?{FENCED}", False),
            ("I think. <|endoftext|>", True),
            (f"{CODE}And?{FENCED}", False),
            ("the answer is 5<|endoftext|>", True),
        ],
    ),
    "no": ("no", TALK, PLAIN),
    "llama": (
        LLAMA,
        TALK,
        [
            (None, False),  # bos, a date, the question
            ("I think.<|eot_id|>", True),  # it trims
            (f"{head('user')}And?<|eot_id|>{head('assistant')}", False),
            ("the answer is 5<|eot_id|>", True),
        ],
    ),
    "instruct": (
        INSTRUCT,
        TALK,
        [
            ("<|begin|>[INST] Who is the user? [/INST]", False),
            (" I think. <|endoftext|>", True),
            ("[INST] And? [/INST]", False),
            (" the answer is 5<|endoftext|>", True),
        ],
    ),
    "thinking": (  # the block that opens an answer is not in the prompt: the policy has to write it
        THINKING,
        [message("user", "Who?"), message("assistant", "the answer")],
        [
            ("<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n", False),
            ("<think>\n\n</think>\n\nthe answer<|im_end|>", True),
            ("\n", False),
        ],
    ),
}


@pytest.mark.parametrize("name", WANTED)
def test_only_the_assistants_text_and_ends_are_learned(name):
    template, messages, wanted = WANTED[name]
    chat = Chat(small_bpe(), template)
    found = learned(conversation(TASK, messages, chat), chat.tokenizer)
    assert [flag for _, flag in found] == [flag for _, flag in wanted]
    for (text, _), (want, _) in zip(found, wanted, strict=True):
        assert want is None or text == want
    assert "".join(text for text, _ in found) == chat.render(messages)


def test_every_bundled_template_is_among_them():
    assert set(TEMPLATES) <= set(WANTED)


@pytest.mark.parametrize("template", ["chatml", THINKING])
def test_calls_are_learned_and_tools_and_their_results_are_not(template):
    chat = Chat(small_bpe(), template)
    found = learned(conversation(TASK, USED, chat, [SEARCH]), chat.tokenizer)
    learned_texts = [text for text, is_trained in found if is_trained]
    other_texts = [text for text, is_trained in found if not is_trained]
    assert learned_texts[0] == f"<think>\nhm\n</think>\n\nLet me see.{CALL}<|im_end|>"
    assert learned_texts[1].endswith("the answer<|im_end|>")
    assert "Find <b>things</b>" in other_texts[0] and "the number" in other_texts[1]
    assert "".join(text for text, _ in found) == chat.render(USED, [SEARCH])


THOUGHT = [*BEGUN[:1], message("assistant", "<think>\nhm\n</think>\n\n5"), *TALK[2:]]


@pytest.mark.parametrize(
    ("template", "messages", "tools"),
    [
        (THINKING, TALK, None),  # an empty thought before the last answer only
        (THINKING, THOUGHT, None),
        (INSTRUCT, TALK, [SEARCH]),  # the tools wander to the last question
    ],
)
def test_of_a_template_that_rewrites_turns_are_learned_as_they_are_sampled(
    template, messages, tools
):
    """append: one row, turn by turn. template: the rows of a rollout, the last what the template gives."""
    chat = Chat(small_bpe(), template)
    (row,) = conversation(TASK, messages, chat, tools).trajectories()
    assert chat.tokenizer.decode(row.tokens) != chat.render(messages, tools)
    assert [s.text for s in row.spans if s.mask] == [
        text for text, is_trained in learned_pieces(chat, messages, tools) if is_trained
    ]
    letter = Chat(small_bpe(), template, history="template")
    episode = conversation(TASK, messages, letter, tools)
    first, last = episode.trajectories()
    assert letter.tokenizer.decode(last.tokens) == letter.render(messages, tools)
    assert last.tokens == letter.tokenizer.encode(letter.render(messages, tools))
    assert first.tokens == letter.tokenizer.encode(letter.render(messages[:2], tools).rstrip("\n"))
    taught = [[s.text for s in one.spans if any(s.mask)] for one in (first, last)]
    assert [len(one) for one in taught] == [1, 1]
    assert sum(map(sum, to_batch([first, last]).mask.tolist())) == sum(
        len(letter.tokenizer.encode(text)) for one in taught for text in one
    )


def learned_pieces(chat, messages, tools):
    return [(piece.text, piece.is_trained) for piece in chat.pieces(messages, tools)]


def test_each_context_of_an_example_has_room_of_its_own():
    letter = Chat(small_bpe(), THINKING, history="template")
    episode = conversation(TASK, THOUGHT, letter)
    lengths = [sum(map(len, spans)) for spans in contexts_of(episode)]
    assert len(lengths) == 2 and len(contexts_of(shortened(episode, max(lengths)))) == 2
    assert [row.tokens for row in shortened(episode, max(lengths)).trajectories()] == [
        row.tokens for row in episode.trajectories()
    ]
    prompt = len(list(episode.trajectories())[1].spans[0])
    (row,) = shortened(episode, prompt).trajectories()  # nothing of the second answer fits
    assert row.tokens == next(episode.trajectories()).tokens[:prompt]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("template", ["chatml", "llama 2", "mistral", "zephyr"])
def test_sentencepiece_chats_are_learned_in_the_tokens_of_the_template(kind, template):
    chat = Chat(sentencepiece(kind), FAMILIES[template])
    for number in range(10):
        first = [
            message("user", f"the user {number}"),
            message("assistant", f"the answer is {number}"),
        ]
        talk = [*first, message("user", "number 12?"), message("assistant", "345 is the number.")]
        for messages in (first, talk):
            (row,) = conversation(TASK, messages, chat).trajectories()
            assert row.tokens == chat.tokenizer.encode(chat.render(messages))


def test_results_inside_a_text_of_sentencepiece_are_masked_without_encoding_it_otherwise():
    tokenizer = sentencepiece("legacy")
    chat = Chat(tokenizer, "chatml")
    messages = [message("user", "q"), message("assistant", ARPO)]
    (row,) = conversation(TASK, messages, chat, marks=MARKS).trajectories()
    (plain,) = conversation(TASK, messages, chat).trajectories()
    assert row.tokens == plain.tokens == tokenizer.encode(chat.render(messages))
    observed = "".join(span.text for span in row.spans if span.author is Author.ENV)
    assert "the number of é" in observed and "<answer>" not in observed


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_spans_and_demonstrations_have_the_tokens_of_their_place(kind):
    """Inline results, text behind a prefill, and what `graft data` writes down of an attempt."""
    tokenizer = sentencepiece(kind)
    chat = Chat(tokenizer, FAMILIES["zephyr"])
    spans = [
        {"author": "policy", "text": " the answer["},
        {"author": "env", "text": "the number;"},
        {"author": "policy", "text": "the user"},
        {"author": "env", "text": "and the", "role": "user"},
        {"author": "policy", "text": "5"},
    ]
    row = ChatRow([message("user", "the")], None, spans)
    episode = example(TASK, row, chat, prefill="the")
    (attempt,) = episode.trajectories()
    wanted = (
        "<|user|>\nthe</s>\n<|assistant|>\nthe the answer[the number;the user</s>"
        "\n<|user|>\nand the</s>\n<|assistant|>\n5</s>"
    )
    assert attempt.tokens == tokenizer.encode(wanted)
    assert spans_of_attempt(attempt, chat) == spans


def test_actions_are_written_as_they_stand_in_a_text():
    tokenizer = sentencepiece("legacy")
    actions = load_actions("sorting", tokenizer)
    call = actions.spell("compare", ("A", "B")).tokens
    assert tokenizer.decode_after(call) == " compare A and B"
    assert tokenizer.encode_after("so compare A and B") == tokenizer.encode_after("so") + call
    speller = ActionSpeller(actions, tokenizer)
    parts = speller.parts("so compare A and B: A > B\n!")
    assert [part.text for part in parts] == ["so", " compare A and B", ": A > B\n", "!"]


ARPO = (
    "<think>who?</think><search>the user</search> <result>\nthe number of é\n</result>\n\n"
    "<python>1</python><result>5</result><answer>5</answer>"
)


@pytest.mark.parametrize("tokenizer", [FastTokenizer.bytes(), small_bpe()], ids=["bytes", "bpe"])
def test_results_inside_an_assistant_s_text_are_masked_without_encoding_it_otherwise(tokenizer):
    chat = Chat(tokenizer, "chatml")
    messages = [message("system", "s"), message("user", "q"), message("assistant", ARPO)]
    plain = conversation(TASK, messages, chat)
    masked = conversation(TASK, messages, chat, marks=MARKS)
    (row,), (other,) = masked.trajectories(), plain.trajectories()
    assert row.tokens == other.tokens
    assert trained(plain, tokenizer) == [ARPO + "<|im_end|>"]
    found = [text for text, _ in learned(masked, tokenizer)]
    assert found[1:] == [
        "<think>who?</think><search>the user</search> ",
        "<result>\nthe number of é\n</result>",
        "\n\n<python>1</python>",
        "<result>5</result>",
        "<answer>5</answer><|im_end|>",
        "\n",
    ]
    assert "é" not in "".join(trained(masked, tokenizer))


GENERATION = """\
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content + '<|im_end|>' }}{% endgeneration %}
    {%- else %}{{ message.content + '<|im_end|>' }}{% endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


@pytest.mark.peer
def test_a_template_with_generation_marks_learns_the_same_tokens_as_in_transformers():
    transformers = pytest.importorskip("transformers")
    tokenizer = small_bpe(GENERATION)
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer._backend)
    wanted = theirs.apply_chat_template(
        TALK,
        chat_template=GENERATION,
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    (row,) = conversation(TASK, TALK, Chat(tokenizer)).trajectories()
    assert row.tokens == wanted["input_ids"]
    mask = [flag for span in row.spans for flag in span.mask or [False] * len(span)]
    assert mask == [bool(flag) for flag in wanted["assistant_masks"]]


ROW = ChatRow(
    [message("user", "S?")],
    spans=[
        {"author": "policy", "text": "So"},
        {"author": "policy", "call": {"tool": "compare", "arguments": ["A", "B"]}},
        {"author": "env", "text": "A > B"},
        {"author": "policy", "call": {"tool": "swap", "arguments": ["A", "B"]}, "text": "swap!"},
        {"author": "env", "text": "B, A"},
        {"author": "policy", "text": "Done."},
    ],
)
AS_TEXT = "So compare A and B: A > B\n swap A and B => B, A\nDone."


def same(one, other) -> None:
    (first,), (second,) = one.trajectories(), other.trajectories()
    assert first.tokens == second.tokens
    got, want = to_batch(trajectories_of([one])), to_batch(trajectories_of([other]))
    for name in ("actions", "modes", "mask", "turns"):
        assert getattr(got, name).tolist() == getattr(want, name).tolist(), name


@pytest.mark.parametrize("prefill", ["", "So:\n"])
def test_spans_are_the_same_episode_as_the_demonstration(prefill):
    chat = Chat(LETTERS)
    shown = demonstration(SWAPPING, Taught(), chat, 0, actions=SORTING, prefill=prefill)
    speller = ActionSpeller(SORTING, LETTERS)
    same(example(TASK, ROW, chat, speller=speller, prefill=prefill), shown)


def test_calls_as_text_are_the_same_decisions():
    """A whole attempt in one assistant text, and span by span with calls as text."""
    chat, speller = Chat(LETTERS), ActionSpeller(SORTING, LETTERS)
    shown = demonstration(SWAPPING, Taught(), chat, 0, actions=SORTING)
    row = ChatRow([message("user", "S?"), message("assistant", AS_TEXT)])
    same(example(TASK, row, chat, speller=speller), shown)
    spans = [
        {"author": "policy", "text": "So compare A and B"},
        {"author": "env", "text": ": A > B\n"},
        {"author": "policy", "text": " swap A and B"},
        {"author": "env", "text": " => B, A\n"},
        {"author": "policy", "text": "Done."},
    ]
    same(example(TASK, ChatRow([message("user", "S?")], spans=spans), chat, speller=speller), shown)


def test_text_that_only_mentions_a_call_is_text():
    speller = ActionSpeller(SORTING, LETTERS)
    for text in ("So compare A and B.", " compare A", " swap A and A => A\n", " compare A and B"):
        assert [(part.text, part.call) for part in speller.parts(text)] == [(text, None)]
    found = speller.parts(" compare A and B", is_answered=True)
    assert [(part.text, part.call is None) for part in found] == [(" compare A and B", False)]


TAGGED = "So <compare> A, B </compare> <result> A > B </result> and<swap> A, B </swap>Done."


def tagging() -> FastTokenizer:
    """A byte-level BPE in which each item is one token, as in a large model's."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    backend.train_from_iterator([" A, B C D E <compare> </compare> <swap> </swap>"] * 9, trainer)
    return FastTokenizer(backend, {"eos_token": "<eos>"}, {"default": TEMPLATES["plain"]})


def test_calls_in_tags_are_decisions_and_their_results_are_not():
    tokenizer = tagging()
    chat, tags = Chat(tokenizer), load_actions("sorting-tags", tokenizer)
    row = ChatRow([message("user", "S?"), message("assistant", TAGGED)])
    made = example(TASK, row, chat, MARKS, ActionSpeller(tags, tokenizer, MARKS))
    (walk,) = made.trajectories()
    assert tokenizer.decode(walk.tokens) == f"S?{TAGGED}<eos>"
    assert [(str(span.author), span.text) for span in walk.spans[1:]] == [
        ("policy", "So"),
        ("policy", " <compare> A, B </compare>"),
        ("env", " <result> A > B </result>"),
        ("policy", " and"),
        ("policy", "<swap> A, B </swap>"),
        ("policy", "Done.<eos>"),
    ]
    for span, tool in ((walk.spans[2], "compare"), (walk.spans[5], "swap")):
        want = tags.spell(tool, ("A", "B"))
        inner = [
            t for t, m in zip(want.tokens, want.modes, strict=True) if not tags.space.row(m).all()
        ]
        assert (
            span.tokens[-len(inner) :] == inner
            and span.actions[-len(inner) :] == want.actions[-len(inner) :]
        )
    assert trained(made, tokenizer) == [  # " </" stands for the whole tag, "," is not chosen
        "So <compare> A",
        " B </",
        " and<swap> A",
        " B </",
        "Done.<eos>",
    ]
    with pytest.raises(ValueError, match="contains a call, or part of one"):
        half = ChatRow([message("user", "S?"), message("assistant", "So <compare> A")])
        example(TASK, half, chat, MARKS, ActionSpeller(tags, tokenizer, MARKS))


@pytest.mark.parametrize(
    ("spans", "complaint"),
    [
        ([], "not a list of"),
        ("text", "not a list of"),
        ([{"author": "env", "text": "x"}], "nothing to learn"),
        ([{"author": "policy", "text": "x"}, 3], "span 2 is 3"),
        ([{"author": "policy", "text": "x"}, {"author": "tool", "text": ""}], "author 'tool'"),
        ([{"author": "policy", "text": None}], "`text` holds None"),
        (
            [{"author": "policy", "text": "x"}, {"author": "env", "text": "", "role": "system"}],
            "role 'system'",
        ),
        ([{"author": "policy", "call": {"tool": "swap"}}], "actions.file"),
    ],
)
def test_spans_that_cannot_be_read_are_errors_that_name_the_span(spans, complaint):
    with pytest.raises(ValueError, match=complaint):
        example(TASK, ChatRow([message("user", "S?")], spans=spans), Chat(LETTERS))


@pytest.mark.parametrize("call", [{"tool": "swap", "arguments": ["A", "A"]}, ["swap", "A"]])
def test_a_call_that_the_tools_do_not_allow_is_refused(call):
    row = ChatRow([message("user", "S?")], spans=[{"author": "policy", "call": call}])
    with pytest.raises(ValueError, match="swap"):
        example(TASK, row, Chat(LETTERS), speller=ActionSpeller(SORTING, LETTERS))


def test_turns_end_where_a_message_or_nothing_follows():
    chat = Chat(small_bpe(), "chatml")
    spans = [
        {"author": "policy", "text": "a"},
        {"author": "env", "text": "no", "role": "user"},
        {"author": "policy", "text": "[b]"},
        {"author": "env", "text": "5;"},
        {"author": "policy", "text": "c"},
    ]
    made = example(TASK, ChatRow([message("user", "q")], spans=spans), chat)
    assert learned(made, chat.tokenizer)[1:] == [
        ("a<|im_end|>", True),
        ("\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n", False),
        ("[b]", True),
        ("5;", False),
        ("c<|im_end|>", True),
    ]
    cut = [*spans[:-1], {**spans[-1], "end": False}]
    made = example(TASK, ChatRow([message("user", "q")], spans=cut), chat)
    assert learned(made, chat.tokenizer)[-1] == ("c", True)
    assert made.spans[0].author is Author.TASK
