"""docs/originals.md: every line has a test, and what is a fact about recipes and pages is checked here."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch

from graft.actions.actions import load_actions
from graft.algos.masked import segment_std
from graft.algos.presets import PRESETS
from graft.config import bundled_recipes, load_config
from graft.envs import ENVS, make
from graft.text.tokenizer import FastTokenizer
from tests.docs.pages import ROOT

MARKER = re.compile(r"<!--/?n[^>]*-->")  # of scripts/numbers.py
WHOLE = MARKER.sub("", (ROOT / "docs" / "originals.md").read_text(encoding="utf-8"))
PAGE, _, DETAILS = WHOLE.partition("\n## GEM's scripts\n")
"""What the page claims; settings, differences and measurements of single originals follow on it."""

CLAIMS = {
    "`graft recipes` lists": "test_the_list_names_what_is_missing_here",
    "Models and datasets have": "test_recipes_name_models_of_the_hub",
    # EARL
    "`bash examples/earl_trainer": "test_a_recipe_starts_with_the_rows_of_the_original",
    "`exps/train/*.sh`": "test_the_recipes_of_earl_are_those_of_the_table",
    "`data.train_files=X.parquet`": "test_a_recipe_runs_with_the_files_of_the_original",
    "`algorithm.adv_estimator": "test_published_settings",
    "`earl.training.tools=[swap]`": "test_tools_that_cpo_forces_are_not_the_tools_of_the_head",
    "`earl.training.loss": "test_the_sft_stage_of_earl_has_its_kl",
    "`examples/earl_dataset": "test_made_tasks_are_rows_of_the_original_and_are_read_back",
    "`trainer.val_only": "test_the_rows_of_the_run_stay_its_own",
    "the analysis of countdown": "test_files_of_earls_validation",
    "Equal: rewards by `data_source`": "test_rows_of_earl_earn_what_earl_pays",
    "Equal: tool files": "test_keys_without_meaning_in_earls_files_are_left_out_with_a_note",
    "Equal: in a group that failed":
        "test_the_forced_decision_is_trained_with_what_the_policy_thought_of_it",
    "Different: a forked attempt": "test_a_twin_computes_nothing_again_that_it_shares",
    "Different: actions need": "test_what_engines_of_others_cannot_do_is_refused",
    # GEM
    '`gem.make("game': "test_every_id_of_the_specification_is_there",
    "`gem.print_envs()`": "test_the_list_names_every_env_once_with_what_it_needs",
    "`get_wrapper_fns": "test_prompts_and_counters_are_gems",
    "`train_oat.py": "test_the_recipe_of_guess_the_number_has_the_flags_of_the_script",
    "its other flags": "test_the_table_of_flags_names_keys_of_a_recipe",
    "`--prompt_template": "test_a_prompt_is_gems",
    "`train_oat_mt.py`": "test_a_toy_run_learns",
    "the retrieval server": "test_a_prebuilt_index_is_served_to_gems_and_search_r1s_clients",
    "two environments": "test_a_run_of_a_mix_reports_each_environment_and_resumes_exactly",
    "Equal: the questions of the": "test_questions_are_gems_to_the_character",
    "Equal: the questions of reasoning": "test_reasoning_gyms_questions_are_gems_to_the_character",
    "Equal: a response that is cut off": "test_a_cut_response_costs_what_gems_environments_say",
    "Equal: rewards of the question sets": "test_questions_pay_what_gem_pays",
    "Equal: rewards of mathematics": "test_mathematics_pays_what_gem_pays",
    "Equal: rewards of programs": "test_programs_pay_what_gem_pays test_the_graded_program_is_gems",
    "Equal: the history": "test_prompts_and_counters_are_gems",
    "Equal: return batch": "test_rebn_counts_every_turn_once_whatever_its_length",
    "Different: the sentences": "test_games_and_tools_have_sentences_of_their_own",
    "Different: a step": "test_the_recipe_of_guess_the_number_has_the_flags_of_the_script",
    # EasyRL
    "the start script": "test_a_recipe_starts_with_the_rows_of_the_original",
    "columns `prompt`": "test_what_is_not_used_of_a_row_goes_to_the_meta",
    "validation with its own": "test_held_out_attempts_have_the_settings_of_the_section",
    "`{source}/pass@{k}`": "test_scores_by_source_with_pass_at_k",
    "vLLM on the GPUs": "test_vllm_that_two_processes_hold_serves_the_weights_of_each_step",
    "Equal: advantages have the group's": "test_grpo_by_hand",
    "Different: log-probs": "test_engine_and_learner_agree_in_a_run",
    "Different: learning rates": "test_easyrls_recipe_has_the_rate_of_its_config",
    # RL-GRPO
    "`torchrun --standalone": "test_a_recipe_starts_with_the_rows_of_the_original",
    "change `__getitem__`": "test_a_template_of_columns_and_a_system_message_replace_those_of_the_row",
    "change `reward_fn`": "test_keywords_reach_functions_and_classes",
    "tensor parallel": "test_four_processes_take_the_step_of_one",
    "SGLang in the trainer": "test_a_run_with_sglang_learns_from_its_tokens_and_goes_on_where_it_was",
    "Equal: the rewards 0.01": "test_the_recipe_of_rl_grpo_pays_what_rl_grpo_pays",
    "Equal: advantages have the sample's": "test_rl_grpos_recipe_divides_by_the_sample_deviation",
    "Different: a number": "test_the_recipe_of_rl_grpo_pays_what_rl_grpo_pays",
    # ARPO and AEPO
    "the SFT stage": "test_a_recipe_starts_with_the_rows_of_the_original",
    "`bash scripts/ARPO": "test_a_recipe_starts_with_the_rows_of_the_original",
    "`bash scripts/AEPO": "test_a_recipe_starts_with_the_rows_of_the_original",
    "`rl_datasets/train_10k": "test_one_bad_row_among_many_is_left_out_with_a_warning",
    "`search_cache.json`": "test_the_command_imports_and_exports_a_cache",
    "`infer.sh`": "test_arpos_benchmarks_from_file_to_score_with_tools_in_its_tags",
    "`evaluate_passk.sh`": "test_pass_at_k_is_the_share_of_subsets_with_a_right_one",
    "Equal: `deep_research`": "test_deep_research_pays_what_arpo_pays",
    "Equal: the published rules": (
        "test_the_published_arpo_forks_by_a_coin_whose_sense_is_kept "
        "test_the_published_aepo_forks_less_often_the_longer_the_row "
        "test_there_are_always_exactly_n_leaves"
    ),
    "Equal: AEPO's clip": (
        "test_balanced_clip_against_the_formula_as_published "
        "test_aepo_weighs_the_advantage_and_lets_a_clipped_token_live"
    ),
    "Equal: prompts of the released":
        "test_prompts_have_the_published_wording_and_bring_the_tools_they_name",
    "Different: by default a fork": (
        "test_a_fork_inherits_its_sources_baseline "
        "test_entropy_is_a_mean_over_the_tokens_there_are_in_units_of_the_vocabulary"
    ),
    # learning
    **dict.fromkeys(
        ("EARL", "GEM", "EasyRL", "RL-GRPO", "ARPO"), "test_the_table_of_learning_repeats_the_measurements"
    ),
}  # fmt: skip
"""How a line begins -> the names of its tests."""

CLAIMS_OF_DETAILS = {
    "The scripts that GEM publishes": (
        "test_a_recipe_starts_with_the_rows_of_the_original test_questions_are_gems_to_the_character "
        "test_games_and_tools_have_sentences_of_their_own"
    ),
    "Not run here: the recipes": "test_a_recipe_starts_with_the_rows_of_the_original",
    "A row of `constant`": (
        "test_constant_divides_by_rows_and_length "
        "test_a_history_wrapper_by_name_gives_one_context_per_turn"
    ),
    "Different by intention":
        "test_the_recipe_of_guess_the_number_has_the_flags_of_the_script",
    "The paper trains 24": "test_the_recipes_of_gem_have_the_settings_of_the_paper",
    "The names of the 24": "test_one_command_trains_each_of_24_environments_with_its_turn_limit",
    "`rollout.max_turns` is": (
        "test_one_command_trains_each_of_24_environments_with_its_turn_limit "
        "test_geometry_is_refused_unless_pictures_are_enabled"
    ),
    "Two small trainers": "test_a_recipe_starts_with_the_rows_of_the_original",
    "The recipe has EasyRL's paths": "test_easyrls_recipe_has_its_paths_and_its_loss",
    "The loss is theirs": "test_easyrls_recipe_has_its_paths_and_its_loss test_grpo_by_hand",
    "Log-probs belong": "test_engine_and_learner_agree_in_a_run",
    "No row, attempt": "test_each_row_is_in_exactly_one_share",
    "The reward `math_answer`": "test_mathematical_answers_are_compared_by_meaning",
    "Advantages are divided": "test_rl_grpos_recipe_divides_by_the_sample_deviation",
    "An expression must use": "test_the_recipe_of_rl_grpo_pays_what_rl_grpo_pays",
    "Gradients are means": "test_gradients_are_summed_over_dp_not_averaged",
    "From Python the reward": "test_python_runs_and_prints_what_the_page_shows",
}  # fmt: skip

NO_CLAIMS = (
    "Published numbers of the originals were not",
    "What you type there",
    "On a CPU, one recipe",
    "More: ",
)
"""What was not done, and sentences that only lead to lines or pages."""

MEASURED = (
    "`gem/guess-the-number-toy` plays", "One run, seed 0", "Three seeds", "![held-out",
    "In guess the number ReBN", "`graft train easyrl/toy`", "`graft train rl-grpo/toy`",
    "Its published `train.py` stops",
)  # fmt: skip
"""What was run once, and what was read in the code of an original."""


def lines(text: str = PAGE) -> Iterator[str]:
    """Rows of tables, items of lists and paragraphs, each in one line."""
    for part in re.split(r"\n(?=\n|- |\|)", text):
        line = " ".join(part.split()).removeprefix("- ").removeprefix("| ")
        if line and not line.startswith(("#", "|---", "the original |", "original |")):
            yield line


def test_every_line_has_a_test_that_exists():
    """Keys, commands and figures of the tables below are tested as on every page."""
    details = re.sub(r"^```.*?^```|^\|.*?$", "", DETAILS, flags=re.DOTALL | re.MULTILINE)
    for found, claims in (
        ([line for line in lines() if not line.startswith(NO_CLAIMS)], CLAIMS),
        ([line for line in lines(details) if not line.startswith(MEASURED)], CLAIMS_OF_DETAILS),
    ):
        starts = {start: [line for line in found if line.startswith(start)] for start in claims}
        assert {start for start, begun in starts.items() if not begun} == set()
        assert [line for line in found if not line.startswith(tuple(claims))] == []
    texts = "".join(
        file.read_text(encoding="utf-8") for file in (ROOT / "tests").rglob("test_*.py")
    )
    defined = set(re.findall(r"^(?:async )?def (test_\w+)\(", texts, re.M))
    assert {
        test for tests in (CLAIMS | CLAIMS_OF_DETAILS).values() for test in tests.split()
    } - defined == set()


def test_a_line_makes_one_claim():
    items = [line for line in lines() if line.startswith(("Equal:", "Different:"))]
    assert len(items) > 20
    assert [line for line in items if re.search(r"\. [A-Z]", line)] == []


def test_every_recipe_and_environment_on_the_page_is_there():
    recipes = re.findall(r"graft (?:train|sft|recipes) ([\w/.-]+)", PAGE)
    assert len(recipes) > 12 and set(recipes) <= set(bundled_recipes())
    envs = re.findall(r"\b(?:earl|game):[\w-]+", PAGE)
    assert envs and set(envs) <= set(ENVS)


def test_recipes_name_models_of_the_hub():
    for name in ("gem/math12k", "easyrl/math", "rl-grpo/countdown", "arpo/reasoning-7b"):
        assert re.fullmatch(r"[\w.-]+/[\w.-]+", load_config(name).model.path)
    changed = load_config("gem/math12k", ["model.path=mine", "task.args.data=rows.parquet"])
    assert (changed.model.path, changed.task.args["data"]) == ("mine", "rows.parquet")


def test_the_recipes_of_earl_are_those_of_the_table():
    ways = ("earl", "prompt-cpo", "prompt-grpo", "sft-grpo")
    counts = {"arithmetic": 4, "countdown": 4, "calc": 4, "order": 3, "sort": 2}
    expected = {f"expa/{task}-{way}" for task, count in counts.items() for way in ways[:count]}
    bundled = {name for name in bundled_recipes() if name.startswith("expa/")}
    assert {name for name in bundled if not name.startswith("expa/toy")} == {
        *expected,
        "expa/lang2",
    }


def test_tools_that_cpo_forces_are_not_the_tools_of_the_head():
    config = load_config("expa/order-earl")
    assert config.rollout.branch == {"counterfactual": {"tools": ["swap"]}}
    assert config.actions.tools == []
    tokenizer = FastTokenizer.bytes()
    head = load_actions(config.actions.file, tokenizer)
    assert set(head.tools) == {"compare", "swap"}
    fewer = load_actions(config.actions.file, tokenizer, ["swap"])  # as actions.tools=[swap] would
    assert set(fewer.tools) == {"swap"}


def test_the_sft_stage_of_earl_has_its_kl():
    for task in ("arithmetic", "countdown", "calc"):
        stage = load_config(f"expa/{task}-sft-grpo").sft
        assert stage.steps > 0 and stage.kl_coef == 1e-3


def test_the_recipe_of_guess_the_number_has_the_flags_of_the_script():
    config = load_config("gem/guess-the-number")
    assert (config.task.env, config.task.wrappers) == ("game:GuessTheNumber-v0", ["concat"])
    assert config.model.chat_template == "qwen3_game"
    assert config.algo.credit[0] == {"discounted": {"gamma": 0.9}}
    assert (config.rollout.tasks, config.rollout.samples) == (32, 1)  # games, not 128 turns


def test_the_table_of_flags_names_keys_of_a_recipe():
    table = WHOLE.partition("## Flags")[2].partition("\n## ")[0]
    keys = set(re.findall(r"`((?:task|model|algo|rollout|train|parallel|run)\.\w+)", table))
    known = load_config("gem/guess-the-number").model_dump()
    assert len(keys) > 15
    assert [key for key in keys if key.partition(".")[2] not in known[key.partition(".")[0]]] == []


def test_easyrls_recipe_has_the_rate_of_its_config():
    assert load_config("easyrl/math").train.lr == 1e-6  # its start script has 1e-5


def test_rl_grpos_recipe_divides_by_the_sample_deviation():
    assert load_config("rl-grpo/countdown").algo.credit == [{"grpo": {"unbiased": True}}]
    rewards = torch.tensor([0.01, 1.01, 0.02, 0.01])
    (deviation,) = segment_std(rewards, torch.zeros(4, dtype=torch.long), 1, unbiased=True)
    assert float(deviation) == pytest.approx(float(rewards.std()), rel=1e-6)  # divided by n - 1


GEMS = [
    "arc-1d", "guess-the-number", "hotpotqa-search", "letter-counting", "math12k", "math12k-python",
    "primeintellect-code",
]  # fmt: skip


@pytest.mark.parametrize("name", GEMS)
def test_the_recipes_of_gem_have_the_settings_of_the_paper(name: str):
    config = load_config(f"gem/{name}")
    train, rollout = config.train, config.rollout
    assert (train.lr, train.schedule, train.weight_decay, train.max_grad_norm) == (
        1e-6,
        "constant",
        0.0,
        1.0,
    )
    assert (tuple(train.betas), train.epochs, rollout.temperature) == ((0.9, 0.95), 2, 1.0)
    assert rollout.max_tokens == (500 if "qa" in name else 4096)
    assert train.steps == 65_000 // 128 + 1
    assert rollout.cut_turns == "step"
    assert not config.algo.kl_coef and not PRESETS[config.algo.name].kl_coef


def test_one_command_trains_each_of_24_environments_with_its_turn_limit():
    commands = re.findall(r"-m graft train (gem/\S+)(.*)", DETAILS.partition("### Baselines")[2])
    trained: list[tuple[str, ...]] = []
    for recipe, overrides in commands:
        config = load_config(recipe, overrides.split())
        names = [item.env for item in config.task.envs]
        trained.append((*sorted(names), *map(str, config.task.wrappers)))
        if names[0].startswith("game:"):
            assert config.rollout.max_turns == make(names[0]).max_turns, overrides
    assert len(trained) == len({*trained}) == 24
    assert {names[0].partition(":")[0] for names in trained} == {"game", "rg", "math", "code", "qa"}


def test_easyrls_recipe_has_its_paths_and_its_loss():
    config = load_config("easyrl/math")
    assert config.task.args["data"] == "data/rl_train_with_sys_prompt.parquet"
    assert config.task.eval_args == {"data": "data/rl_valid_with_sys_prompt.parquet"}
    assert config.algo.reduction == "sequence" and config.algo.name == "grpo"


@pytest.mark.parametrize(
    "link, page",
    [
        ("expa.md", "expa"),
        ("branching.md", "branching"),
        ("#gems-scripts", "originals"),
        ("#easyrl-and-rl-grpo", "originals"),
    ],
)
def test_the_table_of_learning_repeats_the_measurements(link: str, page: str):
    rows = [line for line in lines() if f"({link})" in line and "`graft train" in line]
    text = MARKER.sub("", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"))
    text = text.removeprefix(PAGE)
    for row in rows:
        command, before, after = re.findall(r"`(graft train [^`]*)`.*?(0\.\d+) to (0\.\d+)", row)[0]
        assert all(part in text for part in (command, before, after)), row
    assert rows
