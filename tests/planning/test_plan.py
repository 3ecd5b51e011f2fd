import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graft.config import Config, ConfigError, check, load_config
from graft.engine.native.engine import NativeEngine
from graft.engine.native.kv.pages import kv_bytes, pool_tokens
from graft.models.decoder import Decoder
from graft.models.shape import ModelShape
from graft.models.tree.forest import Forest
from graft.planning.forecast import corrected, forecast, lengths_of
from graft.planning.probe import MeasuredRates, probe, random_rows, training_peak, training_work
from graft.planning.report import show_forecast
from graft.planning.step_time import (
    Rates,
    decode_seconds,
    decode_step_bytes,
    estimate_step_time,
    known_rates,
    optimizer_bytes,
    sft_steps_of,
    train_flops,
)
from graft.rollout.batching import to_batch
from graft.train.memory import footprint
from graft.train.memory.device_memory import DeviceMemory, available_ram, device_memory_of
from graft.train.memory.footprint import (
    activation_bytes,
    gigabytes,
    head_bytes,
    most_head_bytes,
    num_parameters,
)
from graft.train.memory.plan import (
    MicroBatchSize,
    check_fits,
    choose_micro,
    kv_tokens_for,
    plan_memory,
)
from graft.train.memory.workload import Workload, page_size, smallest_pool, wanted_pool, workload_of
from graft.train.model import recipe_shape, refuse_what_cannot_fit
from tests.test_cli import TINY, graft

BF16, FP32 = torch.bfloat16, torch.float32
GPU = torch.device("cuda")
H200 = DeviceMemory(GPU, 150_000_000_000, fused=True, name="NVIDIA H200")
KNOWN = DeviceMemory(torch.device("cpu"), 10**11, name="a CPU as quick as an H200")
TOY = ModelShape(vocab_size=10, width=4, layers=1, heads=2, kv_heads=1, head_dim=2, ff=6)


def qwen3(width: int, layers: int, heads: int, ff: int) -> ModelShape:
    return ModelShape(
        vocab_size=151936, width=width, layers=layers, heads=heads, kv_heads=8, head_dim=128, ff=ff
    )


SMALL, MIDDLE = qwen3(1024, 28, 16, 3072), qwen3(2048, 28, 16, 6144)
LARGE = qwen3(2560, 36, 32, 9728)


def recipe(**sections) -> Config:
    """64 tasks x 8 samples of 256 + 512 tokens."""
    values = {
        "model": {"path": "somewhere"},
        "task": {"env": "calculator"},
        "rollout": {
            "tasks": 64, "samples": 8, "max_tokens": 512, "max_turns": 1, "max_context": 768,
        },
        "train": {"steps": 100},
    }  # fmt: skip
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return check(values)


def items(memory) -> dict[str, int]:
    return {item.name: item.bytes for item in memory.items}


def test_a_toy_by_hand():
    # embedding 40; q|k|v 4x8, q and k norms 2+2, out 4x4, gate|up 4x12, down 6x4, three norms of 4
    assert num_parameters(TOY) == 40 + 32 + 4 + 16 + 48 + 24 + 12 == 176
    found = items(plan_memory(recipe(), TOY, FP32, DeviceMemory(torch.device("cpu"), 1 << 40)))
    assert (found["weights"], found["gradients"], found["AdamW moments"]) == (704, 704, 1408)
    assert "fp32 masters" not in found and "reference" not in found
    found = items(plan_memory(recipe(), TOY, BF16, H200))
    assert (found["weights"], found["fp32 masters"], found["AdamW moments"]) == (352, 704, 1408)
    assert found["gradients"] == 176 * 4  # sums in fp32 alone, where kernels add to them
    found = items(plan_memory(recipe(), TOY, BF16, replace(H200, fused=False)))
    assert found["gradients"] == 176 * (2 + 4)
    assert kv_bytes(TOY, BF16) == 1 * 2 * 2 * 2


@pytest.mark.parametrize(
    "shape",
    [
        TOY,
        replace(TOY, family="qwen2", tied=False, qk_norm=False, qkv_bias=True),
        replace(TOY, family="llama", layers=3, qk_norm=False, out_bias=True, mlp_bias=True),
    ],
)
def test_parameters_are_those_of_the_decoder(shape: ModelShape):
    assert num_parameters(shape) == sum(p.numel() for p in Decoder(shape).parameters())


def test_the_published_sizes_of_qwen3():
    assert [round(num_parameters(s) / 1e6) for s in (SMALL, MIDDLE, LARGE)] == [596, 1721, 4022]
    found = items(plan_memory(recipe(), SMALL, BF16, H200))
    assert gigabytes(found["weights"]) == "1.19 GB"
    assert gigabytes(found["fp32 masters"] + found["AdamW moments"]) == "7.15 GB"
    assert [kv_bytes(s, BF16) for s in (SMALL, MIDDLE, LARGE)] == [114_688, 114_688, 147_456]
    work = Workload(64, 8, 256, 512)
    per_token = activation_bytes(SMALL, BF16, 1024, work, fused=True) / 1024
    # 28 layers of 14,336 numbers in bf16 and 42 in fp32; at the ends 3,200; 16,384 of working memory
    assert per_token == 28 * (2 * 14_336 + 4 * 42) + 2 * (3_200 + 16_384)


@pytest.mark.parametrize("work", [Workload(4, 4, 32, 32), Workload(2, 8, 16, 80)])
def test_activations_are_what_the_forward_pass_keeps(work: Workload):
    shape = ModelShape(vocab_size=64, width=64, layers=3, heads=4, kv_heads=2, head_dim=16, ff=128)
    policy = Decoder(shape).initialise(0)
    rows = random_rows(work, shape.vocab_size)
    forest = Forest(rows, to_batch(rows).mask, policy.device)
    weights = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in weights:
            kept[address] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        forest.logprobs(policy)
    measured = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    counted = activation_bytes(shape, FP32, len(forest.tokens), work, fused=False)
    assert 0.65 * counted < measured < counted  # what is missing is working space of the backward


def test_recomputing_keeps_the_stream_only():
    work = Workload(1, 8, 256, 512)
    kept = activation_bytes(LARGE, BF16, 4096, work, fused=True)
    again = activation_bytes(LARGE, BF16, 4096, work, fused=True, recompute=True)
    assert again < kept / 3


def test_the_size_of_a_chunk_is_the_kernels_own():
    pytest.importorskip("triton")
    from graft.models.kernels.head import CHUNK_BYTES, KEPT_SHARE

    assert (footprint.FUSED_CHUNK_BYTES, footprint.FUSED_KEPT_SHARE) == (CHUNK_BYTES, KEPT_SHARE)


def test_logits_are_kept_where_they_take_a_small_share_of_the_device():
    # 0.08 of 150 GB holds 39,490 rows of 151,936 in bf16
    assert head_bytes(SMALL, BF16, 39_490, H200) == 39_490 * 151_936 * 2
    assert head_bytes(SMALL, BF16, 39_491, H200) == footprint.FUSED_CHUNK_BYTES
    # of a larger micro-batch only 39,490 rows may be trained
    assert most_head_bytes(SMALL, BF16, 65_536, H200) == 39_490 * 151_936 * 2
    # the share is of the whole device, whatever is free of it
    shared = replace(H200, available=40 * 10**9, total=150 * 10**9)
    assert head_bytes(SMALL, BF16, 32_768, shared) == 32_768 * 151_936 * 2
    # a model in fp32 has no sums to add to: the head's gradient is made, and added
    extra = head_bytes(SMALL, FP32, 39_491, H200) - footprint.FUSED_CHUNK_BYTES
    assert extra == 151_936 * 1024 * 8


def test_training_memory_is_what_an_h200_measured():
    # Qwen3-0.6B in bf16, three, five and seven groups of 256 + 8 x 512
    for groups, measured in ((3, 25.8e9), (5, 35.5e9), (7, 45.1e9)):
        work = Workload(groups, 8, 256, 512)
        assert work.unique == groups * 4_352
        peak = training_peak(recipe(), SMALL, BF16, work, H200, False)
        assert peak == pytest.approx(measured, rel=0.02)
        adapters = recipe(model={"path": "m"}, lora={"rank": 16})
        assert training_peak(adapters, SMALL, BF16, work, H200, False) < peak - 7e9


def test_a_reference_and_a_critic_are_counted():
    plain = plan_memory(recipe(), SMALL, BF16, H200)
    referred = plan_memory(recipe(algo={"kl_coef": 0.04}), SMALL, BF16, H200)
    assert referred.during("always") - plain.during("always") == 2 * num_parameters(SMALL)
    critical = items(plan_memory(recipe(algo={"name": "ppo"}), SMALL, BF16, H200))
    assert critical["critic"] == 14 * num_parameters(SMALL)
    assert critical["critic's gradients"] == 4 * num_parameters(SMALL)
    assert critical["activations"] == 2 * items(plain)["activations"]


def test_a_frozen_opponent_has_weights_and_a_pool_of_its_own(tmp_path: Path):
    frozen = recipe(rollout={"frozen": {"O": "reference"}})
    found = plan_memory(frozen, SMALL, BF16, H200)
    of_pool = found.kv_tokens * 114_688  # bytes of a token in the pool
    assert items(found)["frozen O"] == 2 * num_parameters(SMALL) + of_pool
    assert items(found)["KV pool"] == of_pool
    # two pools share what is left
    tight = replace(H200, available=30 * 10**9)
    alone, both = (plan_memory(one, SMALL, BF16, tight) for one in (recipe(), frozen))
    assert both.fits and both.kv_tokens < alone.kv_tokens
    # an opponent of another size: 40 embedded, 2 layers of 32 + 16 + 72 + 8, a norm of 4; a token in its
    # pool has 2 layers of keys and values of 2 numbers
    sizes = {"hidden_size": 4, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 2}
    sizes |= {"num_key_value_heads": 1, "intermediate_size": 6, "vocab_size": 10}
    llama = {"model_type": "llama", "tie_word_embeddings": True, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(llama))
    other = plan_memory(recipe(rollout={"frozen": {"O": str(tmp_path)}}), SMALL, BF16, H200)
    assert items(other)["frozen O"] == 2 * 300 + other.kv_tokens * 2 * 2 * 2 * 2
    # on a cluster the workers hold it
    ray = recipe(rollout={"frozen": {"O": "reference"}}, cluster={"address": "auto"})
    assert "frozen O" not in items(plan_memory(ray, SMALL, BF16, H200))


def test_micro_batches_are_as_large_as_fits_and_blocks_are_kept_while_they_fit():
    assert choose_micro(recipe(), SMALL, BF16, H200) == MicroBatchSize(16384, False)
    # two processes gather the weights for each micro-batch
    assert choose_micro(recipe(), SMALL, BF16, replace(H200, ways=2)).tokens == 32768
    assert choose_micro(recipe(), SMALL, BF16, replace(H200, available=30 * 10**9)).tokens == 8192
    for gigabytes_left in (21, 19, 17):
        tight = replace(H200, available=gigabytes_left * 10**9)
        assert choose_micro(recipe(), SMALL, BF16, tight) == MicroBatchSize(2048, False)
    long = recipe(rollout={"max_context": 32768})
    assert choose_micro(long, SMALL, BF16, H200) == MicroBatchSize(16384, False)
    assert choose_micro(long, LARGE, BF16, H200) == MicroBatchSize(16384, True)
    cpu = DeviceMemory(torch.device("cpu"), 1 << 34)
    assert choose_micro(recipe(), TOY, FP32, cpu) == MicroBatchSize(2048, False)


def test_explicit_sizes_of_the_recipe_are_used():
    fixed = recipe(train={"tokens_per_micro": 32768, "recompute": True})
    assert choose_micro(fixed, SMALL, BF16, H200) == MicroBatchSize(32768, True)
    assert kv_tokens_for(recipe(engine={"kv_tokens": 4096}), SMALL, BF16, H200) == 4096
    stubborn = recipe(rollout={"max_context": 32768}, train={"recompute": False})
    assert not choose_micro(stubborn, LARGE, BF16, H200).recompute


def test_the_pool_holds_a_step_and_leaves_the_trainer_its_memory():
    config = recipe()
    # 64 prompts of 256, and 512 answers of 512 with a page to spare
    assert wanted_pool(config, 64) == 64 * 256 + 512 * (512 + 64)
    assert kv_tokens_for(config, SMALL, BF16, H200) == wanted_pool(config, 64)
    tight = replace(H200, available=40 * 10**9)
    memory = plan_memory(config, SMALL, BF16, tight)
    assert memory.fits and smallest_pool(config, 64) < memory.kv_tokens < wanted_pool(config, 64)
    # four tenths of the device is the most it takes
    long = recipe(rollout={"max_context": 8192})
    assert kv_tokens_for(long, SMALL, BF16, H200) == int(0.4 * 150e9) // 114_688


def test_on_a_cpu_pool_and_pages_are_the_engines_own():
    cpu = DeviceMemory(torch.device("cpu"), 16 << 30)
    for shape in (TOY, SMALL):
        wanted = pool_tokens(shape, cpu.device, FP32)
        assert kv_tokens_for(recipe(), shape, FP32, cpu) == wanted
    engine = NativeEngine(Decoder(TOY).initialise(0), kv_tokens=256)
    assert page_size(recipe(), cpu) == engine._tree.pages.size == 16
    assert page_size(recipe(), H200) == 64
    assert page_size(recipe(engine={"page_size": 32}), H200) == 32


@pytest.mark.parametrize(
    ("changes", "available", "advice"),
    [
        ({"engine": {"kv_tokens": 10**6}}, 60, "engine.kv_tokens=1000000 to 0"),
        ({"train": {"tokens_per_micro": 262144}}, 40, "train.tokens_per_micro=262144 to 0"),
        (
            {"rollout": {"max_context": 32768}, "train": {"recompute": False}},
            40,
            "train.recompute=false to true",
        ),
        ({"rollout": {"max_context": 131072}}, 32, "rollout.max_context=131072 to 32768"),
        (
            {"rollout": {"max_context": 32768}, "engine": {"kv_tokens": 10**6}},
            60,
            "engine.kv_tokens=1000000 to 0",
        ),
        (
            {"rollout": {"max_context": 131072}, "engine": {"kv_tokens": 10**6}},
            32,
            "Change engine.kv_tokens=1000000 to 0, rollout.max_context=131072 to 32768.",
        ),
        ({}, 1, "smaller model"),
    ],
)
def test_a_recipe_that_cannot_fit_gets_the_key_to_change(changes, available, advice):
    device_memory = replace(H200, available=available * 10**9)
    with pytest.raises(ConfigError, match="this recipe needs") as error:
        check_fits(recipe(**changes), SMALL, BF16, device_memory)
    assert advice in str(error.value)
    assert gigabytes(device_memory.usable) in str(error.value)


def test_a_recipe_that_fits_is_accepted():
    check_fits(recipe(), SMALL, BF16, H200)
    refuse_what_cannot_fit(load_config("quickstart"))


def test_processes_that_split_a_model_hold_parts_of_its_state():
    params = num_parameters(SMALL)
    found = items(plan_memory(recipe(), SMALL, BF16, replace(H200, ways=4)))
    assert found["weights, a part"] == found["gradients, a part"] == params  # 4 bytes, 4 ways
    assert found["AdamW moments"] == 2 * params
    assert found["engine's weights"] == 2 * params  # it samples from a whole copy
    offloaded = recipe(parallel={"offload": True})
    assert "AdamW moments" not in items(plan_memory(offloaded, SMALL, BF16, replace(H200, ways=4)))


def test_an_engine_that_runs_ahead_has_weights_of_its_own():
    stale = items(plan_memory(recipe(rollout={"staleness": 1}), SMALL, BF16, H200))
    assert stale["engine's weights"] == 2 * num_parameters(SMALL)
    assert "engine's weights" not in items(plan_memory(recipe(), SMALL, BF16, H200))


def test_train_refuses_before_it_allocates(tmp_path, monkeypatch):
    from tests.training import train_recipe

    monkeypatch.setattr(
        "graft.train.model.device_memory_of",
        lambda device: DeviceMemory(device, 10**8, name="a small CPU"),
    )
    with pytest.raises(ConfigError, match="a small CPU has 95 MB"):
        train_recipe("quickstart", f"run.dir={tmp_path}", "model.device=cpu")


def test_a_workload_fills_the_context():
    assert workload_of(recipe()) == Workload(64, 8, 256, 512)
    assert workload_of(recipe()).unique == 278_528
    turns = recipe(rollout={"max_turns": 6, "max_tokens": 24, "max_context": 96})
    assert workload_of(turns) == Workload(64, 8, 24, 72)


def test_time_follows_from_bytes_and_products():
    work = Workload(64, 8, 256, 512)
    # 1.2 GB of weights, keys and values of 64 prompts and 512 half answers, logits twice
    moved = decode_step_bytes(SMALL, BF16, 512, 512 * 256 + 64 * 256)
    by_hand = 2 * 596_049_920 + 114_688 * (512 * 256 + 64 * 256) + 4 * 512 * 151_936
    assert moved == pytest.approx(by_hand, rel=1e-3)
    # the body six times, the head eight times, attention on top
    flops = train_flops(SMALL, work, recompute=False)
    floor = 6 * 440e6 * 278_528 + 8 * 155.6e6 * 262_144
    assert floor < flops < 1.15 * floor
    assert train_flops(SMALL, work, recompute=True) > 1.2 * flops - 8 * 155.6e6 * 262_144
    assert optimizer_bytes(SMALL, BF16) == 34 * num_parameters(SMALL)
    memory = plan_memory(recipe(), SMALL, BF16, H200)
    rates = Rates(decode=4.55e12, prefill=763e12, train=763e12, optimizer=4.55e12)
    bound = estimate_step_time(recipe(), SMALL, BF16, memory, rates)
    assert bound.decode == pytest.approx(2.06, rel=0.1)  # every roof at 100%
    assert bound.learn == pytest.approx(1.54, rel=0.05)
    assert bound.optimizer == pytest.approx(0.0044, rel=0.1)
    known = known_rates("NVIDIA H200")
    assert known is not None
    assert estimate_step_time(recipe(), SMALL, BF16, memory, known).step > 1.5 * bound.step
    assert known_rates("GeForce") is None


@pytest.mark.parametrize(
    ("tasks", "samples", "prompt", "answer", "measured"),
    [
        (64, 8, 256, 512, 70_400),
        (16, 16, 4096, 1024, 27_700),
        (32, 16, 1024, 1024, 39_500),
        (8, 8, 256, 512, 30_700),
        (1, 1, 256, 512, 870),
    ],
)
def test_expected_times_are_near_what_an_h200_measured(tasks, samples, prompt, answer, measured):
    sizes = {"tasks": tasks, "samples": samples, "max_tokens": answer}
    config = recipe(rollout={**sizes, "max_context": prompt + answer})
    memory, rates = plan_memory(config, SMALL, BF16, H200), known_rates("NVIDIA H200")
    assert rates is not None
    found = estimate_step_time(config, SMALL, BF16, memory, rates)
    assert tasks * samples * answer / found.rollout == pytest.approx(measured, rel=0.1)
    assert found.optimizer == pytest.approx(0.010, rel=0.1)
    if tasks == 64:
        assert found.learn == pytest.approx(2.47, rel=0.02)
        assert found.prefill == pytest.approx(0.030, rel=0.1)  # 8,192 tokens in 15 ms


def test_a_run_is_its_steps_evaluations_and_warm_up():
    config = recipe(run={"eval_every": 25}, sft={"steps": 10})
    memory = plan_memory(config, SMALL, BF16, H200)
    rates = known_rates("NVIDIA H200")
    assert rates is not None
    found = estimate_step_time(config, SMALL, BF16, memory, rates)
    assert (found.steps, found.evaluations) == (100, 6)
    assert found.run == pytest.approx(found.sft + 100 * found.step + 6 * found.evaluation)


def test_lengths_are_those_of_the_examples():
    found = lengths_of(load_config("quickstart"))
    assert found is not None and found.rows is None
    # 12*34= and the like; those that call: [12*34] 408; 408 and an end; the others guess
    assert found.attempt == (10, 22, 11) and found.example == (10, 10, 3)


def test_without_a_warm_up_lengths_are_unknown():
    overrides = ["sft.steps=0", "sft.stop_at=0", "sft.demo_args={}", "model.device=cpu"]
    found = forecast(load_config("quickstart", overrides), probing=False, device_memory=KNOWN)
    assert found.examples is None and found.likely is None and found.notes == []
    assert found.step_time is not None and found.step_time.sft == 0


def test_a_warm_up_of_epochs_has_the_steps_of_its_rows(tmp_path: Path):
    rows = tmp_path / "rows.jsonl"
    row = {"question": "1+1=", "answer": "2"}
    rows.write_text("".join(json.dumps(row) + "\n" for _ in range(100)))
    overrides = ["sft.steps=0", "sft.epochs=3", "sft.batch=8", f"sft.data={rows}", "sft.stop_at=0"]
    config = load_config("quickstart", [*overrides, "sft.demo_args={}", "model.device=cpu"])
    found = forecast(config, probing=False, device_memory=KNOWN)
    assert found.examples is not None and found.examples.rows == 100
    assert sum(found.examples.example) == len("1+1=2") + 1
    assert sft_steps_of(config, found.examples) == 38  # 300 rows, 8 at a time
    assert found.likely is not None and found.step_time is not None
    assert found.likely.sft == found.step_time.sft > 0  # rows are as long as they are


def test_a_forecast_is_about_likely_lengths_and_about_the_longest():
    """The quickstart took 4:40 on two ARM cores, and was forecast at 28:38: lengths of budgets."""
    config = load_config("quickstart", ["model.device=cpu"])
    found = forecast(config, probing=False, device_memory=KNOWN)
    likely, most = found.likely, found.step_time
    assert likely is not None and most is not None
    sft, work = Workload(64, 1, 10, 10, 3), Workload(16, 8, 10, 22, 11)
    rates = known_rates(KNOWN.name)
    assert rates is not None
    assert likely.learn == pytest.approx(train_flops(found.shape, work, False) / rates.train)
    assert likely.learn < 0.5 * most.learn and likely.decode < 0.7 * most.decode
    step = train_flops(found.shape, sft, False) / rates.train
    assert 400 * step < likely.sft < most.sft  # and 16 looks, at attempts of either length
    budgets = estimate_step_time(config, found.shape, found.dtype, found.memory, rates)
    longer = train_flops(found.shape, Workload(64, 1, 24, 72), False) / rates.train
    assert longer > 4 * step  # examples that fill their budget
    assert budgets.sft - most.sft == pytest.approx(400 * (longer - step))


def test_rows_that_end_one_after_the_other_take_more_steps():
    config, rates, work = recipe(), Rates(1e12, 1.0, 1.0, 1.0), Workload(64, 8, 256, 512)
    alike = decode_seconds(config, SMALL, BF16, work, 10**9, rates)
    mixed = decode_seconds(config, SMALL, BF16, work, 10**9, rates, longest=2048)
    moved = decode_step_bytes(
        SMALL, BF16, 256, 256 * 256 + 32 * 256
    )  # half of 512 rows and their groups
    assert mixed == pytest.approx(2 * 512 * moved / 1e12)
    weights = decode_step_bytes(SMALL, BF16, 0, 0)
    assert mixed - alike == pytest.approx(512 * weights / 1e12)  # which are read twice as often


def test_rows_that_fill_their_budget_take_no_more_steps_than_it_has():
    config, rates, work = recipe(), Rates(1e12, 1.0, 1.0, 1.0), Workload(64, 8, 256, 512)
    alike = decode_seconds(config, SMALL, BF16, work, 10**9, rates)
    assert decode_seconds(config, SMALL, BF16, work, 10**9, rates, longest=512) == alike
    shorter = Workload(64, 8, 256, 384)
    likely = decode_seconds(config, SMALL, BF16, shorter, 10**9, rates, longest=512)
    assert 0.5 * alike < likely < alike


@pytest.mark.parametrize("context", [40, 48, 64, 96])
def test_likely_never_takes_longer_than_at_most(context):
    """Examples have 10 + 22 tokens and 11 of results: more results than a budget counts, or nearly all."""
    changes = ["model.device=cpu", f"rollout.max_context={context}", "rollout.max_tokens=8"]
    config = load_config("quickstart", [*changes, "rollout.max_turns=4"])
    found = forecast(config, probing=False, device_memory=KNOWN)
    likely, most = found.likely, found.step_time
    assert likely is not None and most is not None
    for phase in ("prefill", "decode", "learn", "optimizer", "evaluation", "sft", "step", "run"):
        assert getattr(likely, phase) <= getattr(most, phase), phase


def test_a_warm_up_that_may_stop_early_gives_both_ends():
    config = load_config("quickstart", ["model.device=cpu"])
    found = forecast(config, probing=False, device_memory=KNOWN).likely
    assert found is not None
    assert found.shortest_sft == pytest.approx(
        found.sft / 16
    )  # one look of 16, after 25 of 400 steps
    assert found.shortest_run == pytest.approx(found.run - found.sft + found.shortest_sft)
    config = load_config("quickstart", ["model.device=cpu", "sft.stop_at=0"])
    whole = forecast(config, probing=False, device_memory=KNOWN).likely
    assert whole is not None and whole.shortest_run == whole.run < found.run


def test_a_forecast_works_without_examples():
    config = load_config("quickstart", ["model.device=cpu", "sft.demo_args={no_such: 1}"])
    found = forecast(config, probing=False, device_memory=KNOWN)
    assert found.likely is None and found.step_time is not None
    assert "lengths of attempts are not known: ValueError" in found.notes[0]


def test_the_memory_is_what_this_machine_has():
    assert 10**8 < available_ram() < 10**14
    assert device_memory_of(torch.device("cpu")).usable < available_ram() * 1.2


@pytest.mark.parametrize("name", ["grpo", "ppo", "gspo", "dapo"])
def test_the_probe_measures_every_rate(name: str):
    tiny = "model.shape={width: 16, layers: 1, heads: 2, kv_heads: 1, ff: 16, max_positions: 128}"
    config = load_config(
        "quickstart", [f"algo.name={name}", "rollout.tasks=2", "model.device=cpu", tiny]
    )
    shape, device_memory = recipe_shape(config), device_memory_of(torch.device("cpu"))
    memory = plan_memory(config, shape, FP32, device_memory)
    measured = probe(config, shape, FP32, device_memory, memory)
    assert min(measured.rates.decode, measured.rates.prefill, measured.rates.train) > 0
    assert (
        measured.batch == 16
        and measured.tokens
        == training_work(
            config, shape, device_memory, memory.tokens_per_micro, workload_of(config)
        ).unique
    )


def test_predicted_training_memory_is_near_the_measured_peak():
    """In a process of its own: one that ran other tests has memory to spare, and its peak hides ours."""
    shape = {"width": 256, "layers": 3, "heads": 8, "kv_heads": 4, "head_dim": 32, "ff": 1024}
    overrides = [f"model.shape={json.dumps(shape)}", "model.device=cpu", "rollout.tasks=4"]
    planned = graft("plan", "quickstart", "--json", *overrides)
    assert planned.returncode == 0, planned.stderr
    measured = json.loads(planned.stdout)["probe"]
    if measured["peak"] is None:
        pytest.skip("this system does not measure a process's peak")
    assert 0.5 < measured["peak"] / measured["predicted_peak"] < 1.5


def test_what_the_probe_found_is_added():
    memory = plan_memory(recipe(), SMALL, BF16, H200)
    rates = Rates(1.0, 1.0, 1.0, 1.0)
    seen = MeasuredRates(rates, 16384, 1.0, 1.0, 8, 1.0, peak=30 * 10**9, predicted_peak=28 * 10**9)
    assert corrected(memory, seen).total - memory.total == 2 * 10**9
    assert corrected(memory, replace(seen, peak=10**9)) == memory


def test_a_forecast_for_too_little_memory_has_advice():
    small = DeviceMemory(torch.device("cpu"), 10**8, name="a small CPU")
    found = forecast(load_config("quickstart", ["model.device=cpu"]), device_memory=small)
    assert not found.memory.fits and found.measured is None and "smaller model" in found.advice


def test_a_table_names_the_lengths_it_assumes(capsys: pytest.CaptureFixture[str]):
    show_forecast(
        forecast(
            load_config("quickstart", ["model.device=cpu"]), probing=False, device_memory=KNOWN
        )
    )
    printed = capsys.readouterr().out
    assert "likely" in printed and "at most" in printed and "with the shortest warm-up" in printed
    assert "like the examples that call tools, 10 + 22 tokens and 11 of results" in printed
    assert "sft.stop_at may end the warm-up from step 25 on" in printed


def test_plan_prints_tables_and_json(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY.format(folder=tmp_path, trackers="", steps=4))
    counted = graft("plan", str(tmp_path / "tiny.yaml"), "--no-probe", "model.device=cpu")
    assert counted.returncode == 0, counted.stderr
    assert "time: unknown without the probe" in counted.stdout
    assert counted.stdout.strip().splitlines()[-1].startswith("fits: ")
    assert "\x1b" not in counted.stdout
    probed = graft("plan", str(tmp_path / "tiny.yaml"), "--json", "model.device=cpu")
    values = json.loads(probed.stdout)
    assert values["fits"] and values["seconds"]["step"] > 0 and values["probe"]["batch"] == 8
    assert not (tmp_path / "run").exists()


def test_plan_exits_with_1_where_a_recipe_does_not_fit():
    huge = '{"width": 65536, "layers": 200, "heads": 64, "kv_heads": 64, "ff": 262144}'
    done = graft("plan", "quickstart", f"model.shape={huge}", "model.device=cpu")
    assert done.returncode == 1, done.stderr
    assert "does not fit: " in done.stdout and "smaller model" in done.stdout
