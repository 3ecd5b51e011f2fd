"""GEM's prompt templates write GEM's prompts, to the character."""

from __future__ import annotations

from typing import Any

import pytest
from text_templates import SEARCH, calling, message, small_bpe

from graft.config import load_config
from graft.envs import make
from graft.text.chat import Chat
from graft.text.template import TEMPLATES, TemplateError, render
from graft.train.build import env_factory
from graft.types import Task

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."
CODE = (
    "You are an expert Python programmer. You will be given a question (problem specification) and will"
    " generate a correct Python program that matches the specification and passes all tests.\nQuestion: Q"
    "\nPlease reason step by step, and write your code in markdown format, e.g., ```python\n"
    "# YOUR CODE HERE\n```."
)

PROMPTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "qwen3_general": (
        "qwen3_general",
        {},
        f"<|im_start|>user\nQuestion: Q{BOXED}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3_game": (
        "qwen3_game",
        {},
        "<|im_start|>user\nYou are playing language games. Make valid actions to win.\nObservation: "
        f"Q{BOXED}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "code": ("code", {}, CODE),
    "code, with the chat marks": (
        "code",
        {"apply_chat_template": True},
        f"<|im_start|>user\n{CODE}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "no": ("no", {}, "Q"),
}


@pytest.mark.parametrize("case", PROMPTS)
def test_a_prompt_is_gems(case: str):
    name, args, expected = PROMPTS[case]
    found = render(
        TEMPLATES[name], [message("user", "Q")], add_generation_prompt=True, eos_token="<e>", **args
    )
    assert found == expected


@pytest.mark.parametrize("case", PROMPTS)
def test_a_content_of_parts_is_its_text(case: str):
    name, args, _ = PROMPTS[case]
    parts = [{"type": "text", "text": "{{ 1 }} "}, {"type": "text", "text": "b\n"}]
    whole = render(TEMPLATES[name], [message("user", "{{ 1 }} b\n")], eos_token="<e>", **args)
    listed = [{"role": "user", "content": parts}]
    assert render(TEMPLATES[name], listed, eos_token="<e>", **args) == whole


TURNS = [message("user", "A"), message("assistant", "5"), message("user", "B")]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        (
            "qwen3_general",
            f"<|im_start|>user\nQuestion: A{BOXED}<|im_end|>\n<|im_start|>assistant\n5<|im_end|>\n"
            f"<|im_start|>user\nQuestion: B{BOXED}<|im_end|>\n",
        ),
        ("no", "A5<e>B"),
    ],
)
def test_later_observations_have_the_same_text_around_them(name: str, expected: str):
    assert render(TEMPLATES[name], TURNS, eos_token="<e>") == expected


@pytest.mark.parametrize("name", ["qwen3_general", "qwen3_game", "code", "no"])
def test_tools_and_calls_are_refused(name: str):
    with pytest.raises(TemplateError, match="cannot show tools"):
        render(TEMPLATES[name], TURNS, tools=[SEARCH])
    with pytest.raises(TemplateError, match="no form for tool_calls"):
        render(TEMPLATES[name], [calling("", {})])


@pytest.mark.parametrize("name", ["qwen3_general", "qwen3_game", "code", "no"])
def test_a_turn_has_an_end_and_a_conversation_grows(name: str):
    chat = Chat(small_bpe(), name)
    assert chat.end_text == (
        "<|im_end|>" if "qwen3" in name else chat.tokenizer.special_tokens["eos_token"]
    )
    after = chat.tokenizer.decode(chat.extend([message("user", "B")], closed=False))
    whole = chat.render(TURNS, add_generation_prompt=True)
    assert whole == chat.render(TURNS[:2], continue_final_message=True) + after


def test_with_concat_a_game_has_one_prompt_of_all_observations_in_each_turn():
    env = make("game:GuessTheNumber-v0", wrappers="concat")
    chat = Chat(small_bpe(), "qwen3_game")
    rules, _ = env.reset(1)
    env.unwrapped.answer = 13
    second = env.step("I halve: \\boxed{10}").observation
    expected = rules.removesuffix("Your next guess:") + (
        "Turn 1: 10. The hidden number is higher.\nYour next guess:"
    )
    assert second == expected
    assert chat.render([message("user", second)], add_generation_prompt=True) == (
        "<|im_start|>user\nYou are playing language games. Make valid actions to win.\nObservation: "
        f"{expected}{BOXED}<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_argument_that_a_template_does_not_read_is_refused():
    with pytest.raises(TemplateError, match="never reads apply_chat_template; it reads none"):
        Chat(small_bpe(), "qwen3_game", apply_chat_template=True)


def test_no_is_a_name_although_yaml_reads_a_boolean():
    recipe = {"model": {"shape": {"width": 8}}, "task": {"env": "calculator"}}
    assert load_config(recipe, ["model.chat_template=no"]).model.chat_template == "no"


def test_the_template_no_leaves_concat_chat_to_the_tokenizers_own():
    recipe = {
        "model": {"shape": {"width": 8}, "chat_template": "no"},
        "task": {"env": "game:GuessTheNumber-v0", "wrappers": ["concat_chat"]},
    }
    tokenizer = small_bpe(TEMPLATES["chatml"])
    prompts: dict[str, str] = {}
    for name in ("no", "qwen3_game"):
        config = load_config(recipe, [f"model.chat_template={name}"])
        env = env_factory(config, tokenizer)(Task("one", config.task.label))
        prompts[name] = env.reset(0)[0]  # pyright: ignore
    assert prompts["no"].startswith("<|im_start|>user\nFind a hidden whole number")
    assert prompts["qwen3_game"].startswith("<|im_start|>user\nYou are playing language games.")
