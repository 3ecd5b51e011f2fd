"""Wrappers by name: what the policy sees of the history, tools with GEM's rewards, tracking."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.config import load_config
from graft.envs import make
from graft.envs.base import BaseEnv, Wrapper
from graft.envs.tool_env import ToolEnv
from graft.envs.wrappers import WRAPPERS, get_wrapper_fns, listed_wrappers, wrap
from graft.envs.wrappers.history import GONE, History
from graft.protocols import Env
from graft.registry import UnknownName
from graft.text.chat import Chat
from graft.text.template import CHATML, render
from graft.text.tokenizer import FastTokenizer
from graft.tools import TOOLS
from graft.types import Turn


class Walk(BaseEnv):
    """Four steps; the board at the end of each observation holds only then."""

    max_turns = 4
    saved = (*BaseEnv.saved, "where")

    def __init__(self, prefix: str = "", options: Any = None) -> None:
        super().__init__()
        self.where = 0
        self.prefix = prefix
        self.got: dict[str, Any] = {}

    def reset(self, seed: int | None = None, **options: Any) -> Any:
        self.got = options
        return super().reset(seed)

    def pose(self) -> str:
        self.where = 0
        return f"{self.lead()}Rules.\n[at 0]"

    def lead(self) -> str:
        return f"{self.prefix}{self.where}: " if self.prefix else ""

    def margins(self) -> dict[str, Any]:
        lead = {"prefix": self.lead()} if self.prefix else {}
        return {"suffix": f"[at {self.where}]", **lead}

    def respond(self, action: str) -> Turn:
        self.where += 1
        text = f"{self.lead()}Step {self.where}.\n[at {self.where}]"
        return Turn(text, 0.25, info=self.margins())


class Echo:
    name = "echo"

    def __call__(self, content: str) -> str:
        return content


class Templated:
    """Stands for a transformers tokenizer."""

    def apply_chat_template(self, messages: Any, **how: Any) -> str:
        assert how.pop("tokenize") is False
        return render(CHATML, messages, **how)


def played(env: Any, *actions: str) -> list[str]:
    """The prompts of an episode."""
    prompts = [env.reset(0)[0]]
    return prompts + [env.step(action).observation for action in actions]


def test_concat_shows_every_observation_and_only_the_last_board():
    assert played(wrap(Walk(), "concat"), "a", "b") == [
        "Rules.\n[at 0]",
        "Rules.\nStep 1.\n[at 1]",
        "Rules.\nStep 1.\nStep 2.\n[at 2]",
    ]


def test_concat_with_action_shows_the_actions_between():
    assert played(wrap(Walk(), "concat_with_action"), "a", "b\n")[-1] == (
        "Rules.\na\nStep 1.\nb\nStep 2.\n[at 2]"
    )


def test_a_prefix_stands_once_at_the_front():
    prompts = played(wrap(Walk(prefix="t="), "concat"), "a")
    assert prompts == ["t=0: Rules.\n[at 0]", "t=1: Rules.\nStep 1.\n[at 1]"]


def test_the_observation_is_a_whole_prompt_with_its_kind():
    env = wrap(Walk(), "concat")
    assert isinstance(env, Env)
    assert env.observe_as == "prompt"
    _, info = env.reset(0)
    assert "suffix" not in info and info["seed"] == 0
    assert env.step("a").info == {}
    chat = wrap(Walk(), "concat_chat", Templated())
    assert chat.observe_as == "raw"


CHATTED = (
    "<|im_start|>user\nRules.<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
    "<|im_start|>user\nStep 1.\n[at 1]<|im_end|>\n<|im_start|>assistant\n"
)


def test_concat_chat_keeps_the_board_inside_the_template():
    for tokenizer in (Templated(), Chat(FastTokenizer.characters("ab"), CHATML)):
        prompts = played(wrap(Walk(), "concat_chat", tokenizer), "a")
        assert prompts[0] == ("<|im_start|>user\nRules.\n[at 0]<|im_end|>\n<|im_start|>assistant\n")
        assert prompts[1] == CHATTED


def test_grafts_own_tokenizer_brings_its_template():
    tokenizer = FastTokenizer.characters("ab")  # the plain one: contents and the end of turns
    assert played(wrap(Walk(), "concat_chat", tokenizer), "a")[1] == "Rules.a<eos>Step 1.\n[at 1]"


def test_concat_chat_on_reset_renders_the_first_message_only():
    assert played(wrap(Walk(), "concat_chat_on_reset", Templated()), "a", "b")[-1] == (
        "<|im_start|>user\nRules.<|im_end|>\n<|im_start|>assistant\na\nStep 1.\nb\nStep 2.\n[at 2]"
    )


def test_chats_need_something_that_renders():
    with pytest.raises(ValueError, match="needs the model's tokenizer"):
        wrap(Walk(), "concat_chat")
    with pytest.raises(ValueError, match="object has no apply_chat_template"):
        wrap(Walk(), "concat_chat_on_reset", object())


def test_max_history_never_drops_the_instructions():
    env = wrap(Walk(), [{"max_history": {"turns": 1}}])
    assert played(env, "a", "b", "c")[1:] == [
        "Rules.\na\nStep 1.\n[at 1]",
        "Rules.\nb\nStep 2.\n[at 2]",
        "Rules.\nc\nStep 3.\n[at 3]",
    ]
    none = wrap(Walk(), [{"max_history": {"turns": 0}}])
    assert played(none, "a", "b")[-1] == "Rules.\n[at 2]"  # the board is not history


def test_max_history_limits_the_wrapper_inside_it():
    env = wrap(Walk(), ["concat", {"max_history": {"turns": 1}}])
    assert isinstance(env, History) and isinstance(env.env, Walk)
    assert played(env, "a", "b")[-1] == "Rules.\nStep 2.\n[at 2]"
    chat = wrap(Walk(), ["concat_chat", {"max_history": {"turns": 1}}], Templated())
    assert played(chat, "x", "y", "a")[-1].count("<|im_start|>assistant") == 2
    with pytest.raises(ValueError, match="turns=-1"):
        wrap(Walk(), [{"concat": {"turns": -1}}])


def test_a_tools_turn_leaves_the_board_where_it_was_last_true():
    env = wrap(ToolEnv(Walk(), [Echo()], format="gem"), "concat_with_action")
    prompts = played(env, "go", "so <echo>hm</echo> and more", "on")
    assert prompts[2] == "Rules.\ngo\nStep 1.\n[at 1]\nso <echo>hm</echo>\nhm"
    assert prompts[3] == "Rules.\ngo\nStep 1.\nso <echo>hm</echo>\nhm\non\nStep 2.\n[at 2]"
    short = wrap(ToolEnv(Walk(), [Echo()]), [{"max_history": {"turns": 1}}])
    last = played(short, "go", "<echo>1</echo>", "<echo>2</echo>")[-1]
    assert last == "Rules.\n[at 1]\n<echo>2</echo>\n<result>2</result>"  # not lost with its turn


def test_a_tools_result_has_a_role_of_its_own_and_its_schemas_are_rendered():
    env = wrap(ToolEnv(Walk(), [Echo()], format="hermes"), "concat_chat", Templated())
    first, info = env.reset(0)
    assert '"name": "echo"' in first and "tools" not in info
    call = '<tool_call>{"name": "echo", "arguments": {"content": "hm"}}</tool_call>'
    turn = env.step(call)
    assert turn.observation.startswith(first) and "observe_as" not in turn.info
    assert turn.observation[len(first) :] == (
        f"{call}<|im_end|>\n<|im_start|>user\n<tool_response>\nhm\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


class Shown(Walk):
    """Says nothing but the board."""

    def pose(self) -> str:
        self.where = 0
        return "[at 0]"

    def respond(self, action: str) -> Turn:
        self.where += 1
        return Turn(f"[at {self.where}]", info=self.margins())


def test_a_message_that_was_all_board_leaves_a_mark_in_a_chat_and_none_in_a_text():
    assert played(wrap(Shown(), "concat"), "a", "b")[-1] == "[at 2]"
    assert played(wrap(Shown(), "concat_chat", Templated()), "a", "b")[-1].count(GONE) == 2


class System(Walk):
    def pose(self) -> Any:
        self.where = 0
        return [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "R.\n[at 0]"},
        ]


def test_prompts_of_several_messages_stay_so_in_a_chat():
    assert played(wrap(System(), "concat"), "a")[-1] == "Be brief.\nR.\nStep 1.\n[at 1]"
    chat = played(wrap(System(), "concat_chat", Templated()), "a")[-1]
    assert chat.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nR.<|im_end")


def test_episode_tracking_counts_and_keeps_the_last_episode():
    env = wrap(Walk(), "episode_tracking")
    assert env.reset(3)[1] == {
        "seed": 3,
        "answer": None,
        "suffix": "[at 0]",
        "step_counter": 0,
        "cumulative_rewards": 0.0,
        "prev_ep_step_counter": 0,
        "prev_ep_cumulative_rewards": 0.0,
    }
    env.step("a")
    info = env.step("b").info
    assert (info["step_counter"], info["cumulative_rewards"]) == (2, 0.5)
    again = env.reset(4)[1]
    assert (again["step_counter"], again["prev_ep_step_counter"]) == (0, 2)
    assert again["prev_ep_cumulative_rewards"] == 0.5


@pytest.mark.parametrize("names", ["concat", "episode_tracking", "max_history"])
def test_options_of_reset_reach_the_env(names: str):
    env = wrap(Walk(), names)
    env.reset(0, idx=7)
    assert env.got == {"idx": 7}
    tooled = wrap(ToolEnv(Walk(), [Echo()]), names)
    tooled.reset(0, idx=8)
    assert tooled.got == {"idx": 8}


EVERY = ["concat", "concat_with_action", "concat_chat", "concat_chat_on_reset"]
EVERY += ["max_history", "episode_tracking", "concat,episode_tracking"]


@pytest.mark.parametrize("names", EVERY)
def test_wrappers_fork_save_and_delegate(names: str):
    env = wrap(Walk(), names, Templated())
    env.reset(5)
    env.step("a")
    assert (env.where, env.turns, env.unwrapped.where) == (1, 1, 1)  # read now, not when wrapped
    twin = env.fork()
    state = json.loads(json.dumps(env.get_state()))
    other = wrap(Walk(), names, Templated())
    other.set_state(state)
    turns = [one.step("b") for one in (twin, env, other)]
    assert turns[0] == turns[1] == turns[2]
    twin.step("c")
    assert env.step("d").observation == other.step("d").observation
    env.close()


def test_names_come_as_text_list_or_mapping_and_as_ones_own():
    env = wrap(Walk(), ["concat, episode_tracking", {f"{__name__}:Loud": {"by": 2}}])
    assert isinstance(env, Loud) and env.by == 2
    assert isinstance(env.env.env, History)
    assert env.reset(0)[0] == "RULES.\n[AT 0]"
    assert [type(build(Walk())) for build in get_wrapper_fns("concat")] == [History]
    assert get_wrapper_fns("") == []
    assert wrap(Walk(), {"max_history": {"turns": 2}}).keep == 2


class Loud(Wrapper):
    def __init__(self, env: Any, by: int = 1) -> None:
        super().__init__(env)
        self.by = by

    def reset(self, seed: int | None = None) -> Any:
        observation, info = self.env.reset(seed)
        return observation.upper(), info


def test_mistakes_in_names_are_refused():
    wrong: list[tuple[Any, str]] = [
        ("concat_caht", "'concat_chat'"),
        ([{"concat": {"turn": 3}}], "'turn'.*'turns'"),
        *((no_name, "must be a name") for no_name in (3, [3], None, [None])),
        ([{"max_history": 3}], "'max_history'"),
        ("tools", "'tools' needs use="),
        ([{"tools": {"use": "calculator", "max_use": 3}}], "'max_use'.*'max_uses'"),
        ([{"python_tool": {"timout": 3}}], "'timout'.*'timeout'"),
    ]
    for names, said in wrong:
        with pytest.raises(UnknownName if names == "concat_caht" else ValueError, match=said):
            wrap(Walk(), names)


@pytest.mark.parametrize("history", ["concat", "concat_with_action", "max_history"])
def test_an_order_that_would_hide_what_happened_is_refused(history: str):
    with pytest.raises(ValueError, match="name them before it"):
        wrap(Walk(), [history, {"tools": {"use": "calculator"}}])
    with pytest.raises(ValueError, match="two wrappers rewrite the history"):
        wrap(Walk(), [history, "episode_tracking", "max_history"])


class FakePython:
    name = "python"
    description = "Runs Python."
    blocking = True

    def __init__(self, timeout: float = 1.0, **more: Any) -> None:
        self.timeout, self.more = timeout, more

    def __call__(self, content: str) -> str:
        return "Error: no" if "bad" in content else f"ran {content}"


@pytest.fixture
def fake_python(monkeypatch: pytest.MonkeyPatch) -> None:
    from graft.envs.wrappers import tools

    monkeypatch.setitem(TOOLS, "python", FakePython)
    tools._built.cache_clear()


def test_python_tool_pays_like_gem_and_takes_tags_and_fences(fake_python: None):
    env = wrap(Walk(), "python_tool")
    observation, info = env.reset(0)
    assert observation.startswith("You may use tools")
    assert observation.endswith("\n\nRules.\n[at 0]")
    assert info["tool_use_counter"] == 0
    good = env.step("```python\n1\n``` done")
    assert (good.observation, good.reward) == ("Code execution result: ran 1", 0.05 + 0.25)
    assert good.info["parsed_action"] == "```python\n1\n```"
    bad = env.step("<python>bad</python>")
    assert (bad.observation, bad.reward) == ("Code execution result: Error: no", 0.05)
    assert (bad.info["tool_use_counter"], bad.info["tool_success_counter"]) == (2, 1)
    assert (env.max_uses, env.tools["python"].timeout) == (5, 5.0)
    assert env.step("left").reward == 0.25  # the inner env's own


def test_idle_calls_never_earn_as_much_as_a_right_answer(
    fake_python: None, caplog: pytest.LogCaptureFixture
):
    for wrapper in ("python_tool", {"search_tool": {"corpus": "small"}}):
        env = wrap(Walk(), [wrapper])
        env.reset(0)
        calls = ["<python>1</python>" if wrapper == "python_tool" else "<search>x</search>"] * 5
        assert sum(env.step(call).reward for call in calls) == env.rewards.most_of(5) == 0.5
        assert "the calls of one attempt" not in caplog.text
        env.reset(1)
        assert env.step(calls[0]).reward == pytest.approx(0.3)  # each episode has its own
        fork = env.fork()
        assert fork.step(calls[0]).reward == env.step(calls[0]).reward == pytest.approx(0.2)
    wrap(Walk(), [{"python_tool": {"max_tool_reward": None}}])
    assert "the calls of one attempt may earn 1.5" in caplog.text
    wrap(Walk(), [{"tools": {"use": "calculator", "max_uses": None, "tool_reward": 0.1}}])
    assert "any amount" not in caplog.text  # the limit holds there as well


def test_the_variants_of_python_tool(fake_python: None):
    plain = wrap(Walk(), "python_tool_no_int_reward")
    plain.reset(0)
    assert plain.step("<python>1</python>").reward == 0.0
    last = wrap(Walk(), "python_tool_no_int_reward_last_line_error")
    assert last.tools["python"].more == {"keep_error_last_line": True}
    own = wrap(Walk(), [{"python_tool": {"timeout": 2, "max_uses": 1, "tool_reward": 0.5}}])
    own.reset(0)
    assert own.step("<python>bad</python>").reward == 0.5
    assert own.step("<python>1</python>").observation == "No calls are left. Give the final answer."
    assert own.tools["python"].timeout == 2


@pytest.mark.parametrize("recipe", ["gem/math12k-python", "gem/hotpotqa-search"])
def test_gems_recipes_keep_its_order_task_then_tools(fake_python: None, recipe: str):
    [item] = load_config(recipe).task.envs
    [(name, options), _] = listed_wrappers(item.wrappers or ())
    more = {"corpus": "small"} if "search" in name else {}
    rows = [{"problem": "1+1?", "question": "1+1?", "answer": "2"}]
    [task, gems, plain] = (
        make(item.env, rows=rows, wrappers=wrappers)
        for wrappers in ([], [{name: {**options, **more}}], [{name: more}])
    )
    question, _ = task.reset(0)
    assert gems.reset(0)[0] == f"{question}\n{gems.instructions}"
    assert plain.reset(0)[0] == f"{plain.instructions}\n\n{question}"


def test_envs_with_the_same_tool_share_it(fake_python: None):
    first, second = (wrap(Walk(), "python_tool") for _ in range(2))
    assert first.tools["python"] is second.tools["python"]
    assert wrap(Walk(), [{"python_tool": {"timeout": 1}}]).tools["python"].timeout == 1


def test_search_tool_pays_every_call_and_shows_documents():
    env = wrap(Walk(), [{"search_tool": {"corpus": "small"}}])
    env.reset(0)
    turn = env.step("<search>capital of Peru</search>")
    assert turn.observation.startswith("<information>Doc 1(Title: ") and turn.reward == 0.3
    failed = env.step("<search></search>")
    assert (failed.info["tool_ok"], failed.reward) == (False, pytest.approx(0.2))  # 0.5 in all
    gem = wrap(Walk(), [{"search_tool": {"corpus": "small", "max_tool_reward": None}}])
    gem.reset(0)
    assert [gem.step("<search></search>").reward for _ in range(5)] == [0.3] * 5
    free = wrap(Walk(), [{"search_tool_no_int_reward": {"corpus": "small"}}])
    free.reset(0)
    assert free.step("<search>Peru</search>").reward == 0.0


def test_any_tools_in_any_format_by_recipe():
    env = wrap(Walk(), [{"tools": {"use": ["calculator"], "format": "hermes", "max_uses": 2}}])
    _, info = env.reset(0)
    assert info["tools"][0]["function"]["name"] == "calculator"
    assert (env.max_uses, info["tool_use_counter"]) == (2, 0)


class Counted:
    """A tool that costs something to build."""

    name, made = "counted", 0

    def __init__(self, size: int = 1) -> None:
        Counted.made += 1

    def __call__(self, content: str) -> str:
        return content


def test_a_recipes_tools_are_built_once_for_all_its_envs():
    listed = [{"tools": {"use": ["calculator", {f"{__name__}:Counted": {"size": 2}}]}}]
    envs = [wrap(Walk(), listed) for _ in range(3)]
    assert Counted.made == 1
    assert all(env.tools["counted"] is envs[0].tools["counted"] for env in envs)
    assert list(envs[0].tools) == ["calculator", "counted"]
    assert wrap(Walk(), [{"tools": {"use": [Counted()]}}]).tools["counted"] is not None


def test_every_name_of_the_table_can_be_found():
    needs: dict[str, Any] = {"tools": {"use": "calculator"}}
    names = [{name: needs.get(name)} for name in WRAPPERS]
    assert len(get_wrapper_fns(names)) == len(WRAPPERS) == 12


@settings(deadline=None, max_examples=15)
@given(st.lists(st.text(max_size=8) | st.just("x" * 1_000_000), min_size=1, max_size=4))
def test_no_action_makes_a_history_raise(actions: list[str]):
    for names in EVERY[:4]:
        env = wrap(Walk(), [names, {"max_history": {"turns": 2}}], Templated())
        for prompt in played(env, *actions):
            assert prompt.count("[at ") - sum(a.count("[at ") for a in actions) == 1


class FromGem(BaseEnv):
    """GEM's game in graft's manners: the observation is complete, board included."""

    max_turns = None

    def __init__(self, env: Any) -> None:
        super().__init__()
        self.gem = env

    def reset(self, seed: int | None = None) -> Any:
        observation, info = self.gem.reset(seed=seed)
        return self.complete(observation, info), info

    def step(self, action: str) -> Turn:
        observation, reward, terminated, truncated, info = self.gem.step(action)
        return Turn(self.complete(observation, info), reward, terminated, truncated, info)

    def complete(self, observation: str, info: dict[str, Any]) -> str:
        lined = observation if observation.endswith("\n") else f"{observation}\n"
        return lined + info["suffix"]


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "names", ["concat", "concat_with_action", "concat_with_action,episode_tracking"]
)
def test_prompts_and_counters_are_gems(names: str):
    """Exactly equal: what differs is what a missing board or a chat would show."""
    gem = pytest.importorskip("gem")
    factory = pytest.importorskip("gem.wrappers.wrapper_factory")
    for seed in range(2):
        actions = [f"I try \\boxed{{{n}}}" for n in random.Random(seed).sample(range(1, 11), 4)]
        theirs = gem.make("game:GuessTheNumber-v0-easy")
        for build in factory.get_wrapper_fns(names):
            theirs = build(theirs)
        expected: list[Any] = [theirs.reset(seed=seed)]
        for action in actions:
            expected.append(theirs.step(action))
            if expected[-1][2]:
                break
        expected.append(theirs.reset(seed=seed))
        ours = wrap(FromGem(gem.make("game:GuessTheNumber-v0-easy")), names)
        found: list[Any] = [ours.reset(seed)]
        found += [ours.step(action) for action in actions[: len(expected) - 2]]
        found.append(ours.reset(seed))
        for mine, their in zip(found, expected, strict=True):
            assert mine[0] == their[0]
            assert mine[1:-1] == their[1:-1]
            counted = {key: value for key, value in their[-1].items() if key != "suffix"}
            assert mine[-1] == counted
