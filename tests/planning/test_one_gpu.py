"""What a recipe needs on one GPU, counted on paper."""

from __future__ import annotations

from benchmarks.fleet.hardware import SHAPES
from graft.config import load_config
from graft.planning.one_gpu import fitting_gpus, least_memory, plan_on_one_gpu
from graft.train.memory.footprint import num_parameters

QWEN = SHAPES["1.5B"]


def test_a_bf16_model_needs_eighteen_bytes_a_parameter_and_a_little_more():
    config = load_config("coder/countdown-python")
    params = num_parameters(QWEN)
    least, smallest = least_memory(config, QWEN), plan_on_one_gpu(config, QWEN, 48)
    # weights 2, masters 4, moments 8, sums of gradients 4
    assert 18 * params < least < 18 * params + 4e9
    assert smallest.fits and smallest.total >= least
    assert fitting_gpus(config, QWEN) == [48, 80, 141]


def test_adapters_of_the_same_recipe_fit_the_smallest_gpu():
    for name in ("coder/countdown-python", "coder/programs"):
        assert fitting_gpus(load_config(name, ["lora.rank=32"]), QWEN) == [24, 48, 80, 141]


def test_a_recipe_for_several_processes_is_counted_on_one():
    alone = load_config("rl-grpo/countdown")
    split = alone.changed({"parallel.tp": 2, "engine.tp": 2})
    assert plan_on_one_gpu(split, SHAPES["3B"], 80) == plan_on_one_gpu(alone, SHAPES["3B"], 80)
