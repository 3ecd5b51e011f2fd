"""graft's environments in TRL's GRPOTrainer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from graft_interop.trl import OVER, environment_factory, score_answer, task_rows

GUESS = "game:GuessTheNumber-v0"


def test_a_row_poses_the_task_its_seed_names():
    factory = environment_factory(GUESS, min_number=1, max_number=8)
    one, other = factory(), factory()
    assert one.reset(seed=3, prompt=[]) == other.reset(**task_rows(1, seed=3)[0])
    assert "between 1 and 8" in one.reset(seed=3)
    with pytest.raises(ValueError, match="seed"):
        one.reset(prompt=[])


def test_acting_is_playing_and_the_reward_is_the_sum():
    env = environment_factory(GUESS)()
    env.reset(seed=1)
    hidden = env._env.answer
    assert "higher" in env.act(f"\\boxed{{{hidden - 1}}}")
    assert env.get_reward() == 0.0
    assert "That is the hidden number" in env.act(f"\\boxed{{{hidden}}}")
    assert env.get_reward() == 1.0
    assert env.act("\\boxed{1}") == OVER
    assert env.get_reward() == 1.0
    env.reset(seed=1)
    assert env.get_reward() == 0.0


def test_a_last_text_counts_as_an_action_where_the_caller_sets_that():
    factory = environment_factory(GUESS)
    envs = [factory(), factory(), factory()]
    for env in envs:
        env.reset(seed=0)
    right = [{"role": "assistant", "content": f"\\boxed{{{envs[0]._env.answer}}}"}]
    wrong = [{"role": "assistant", "content": "x"}]
    envs[2].act(right[0]["content"])
    assert score_answer([right, wrong, right], envs) == [1.0, -0.1, 0.0]
    assert [env.get_reward() for env in envs] == [0.0, 0.0, 1.0]


def test_only_the_move_is_offered_as_a_tool():
    cls = environment_factory(GUESS)
    public = {name for name in vars(cls) if not name.startswith("_")}
    assert public == {"reset", "act", "get_reward"}
    assert cls.__name__ == "game_GuessTheNumber_v0"


@pytest.fixture
def tiny_model(tmp_path: Path) -> Any:
    """A two-layer random Qwen3 with a byte tokenizer and Qwen3's chat template."""
    import torch
    import trl
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    letters = pre_tokenizers.ByteLevel.alphabet()
    raw = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(sorted(letters))}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    template = Path(trl.__file__).parent / "chat_templates" / "qwen3.jinja"
    tokenizer.chat_template = template.read_text()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen3ForCausalLM(config), tokenizer


def settings(folder: Path, **changes: Any) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(folder),
        per_device_train_batch_size=4,
        num_generations=4,
        max_steps=2,
        learning_rate=1e-2,
        beta=0.0,
        report_to=[],
        logging_steps=1,
        save_strategy="no",
        use_cpu=True,
        bf16=False,
        **changes,
    )


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trl_trains_two_steps_on_a_graft_env(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Everything is TRL's own but the text of the policy: a random model calls no tools."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from trl import GRPOTrainer

    model, tokenizer = tiny_model
    played: list[Any] = []

    class Scripted(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            completions: list[str] = []
            for index, ids in enumerate(prompt_ids):
                text = tokenizer.decode(ids)
                if "<tool_response>" in text:
                    completions.append("done")
                    continue
                # every second rollout of a group has the number, the others guess nonsense
                hidden = self.environments[index]._env.answer
                guess = hidden if index % 2 == 0 else "?"
                call = {"name": "act", "arguments": {"action": f"\\boxed{{{guess}}}"}}
                completions.append(f"<tool_call>\n{json.dumps(call)}\n</tool_call>")
                played.append(self.environments[index]._env.seed)
            ended = [[*tokenizer.encode(one), tokenizer.eos_token_id] for one in completions]
            return ended, None

    trainer = Scripted(
        model,
        args=settings(tmp_path, max_completion_length=400),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(task_rows(8)),
        environment_factory=environment_factory(GUESS),
        reward_funcs=[],
    )
    before = model.lm_head.weight.detach().clone()
    trainer.train()
    assert trainer.state.global_step == 2
    assert len(played) == 8
    for step in range(2):  # a group is four rollouts of one task
        assert len(set(played[4 * step : 4 * step + 4])) == 1
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    rewards = [entry["rewards/game_GuessTheNumber_v0/mean"] for entry in logs]
    assert rewards == pytest.approx([0.45, 0.45])  # (1 - 0.1 + 1 - 0.1) / 4
    assert not (model.lm_head.weight.detach() == before).all()


@pytest.mark.peer
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trl_trains_two_steps_on_what_a_random_model_writes(
    tiny_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    from datasets import Dataset
    from trl import GRPOTrainer

    model, tokenizer = tiny_model
    trainer = GRPOTrainer(
        model,
        args=settings(tmp_path, max_completion_length=8),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(task_rows(8)),
        environment_factory=environment_factory(GUESS),
        reward_funcs=[score_answer],
    )
    trainer.train()
    logs = [entry for entry in trainer.state.log_history if "reward" in entry]
    # eight random bytes hold no box: a format error each time, and nothing from tool calls
    assert [entry["rewards/score_answer/mean"] for entry in logs] == pytest.approx([-0.1, -0.1])
    assert [entry["rewards/game_GuessTheNumber_v0/mean"] for entry in logs] == [0.0, 0.0]
    assert trainer.state.global_step == 2
