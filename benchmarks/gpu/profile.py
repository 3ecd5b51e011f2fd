"""Where the device's time goes: the top kernels of a decode burst and of a training micro-batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.rollouts import Player
from benchmarks.gpu.training import Trainer, invented
from benchmarks.gpu.works import Work

TOP = 25
BURST = 32  # tokens


def profiles(bench: Bench, name: str, work: Work) -> None:
    _decoding(bench, name, work)
    bench.free()
    _training(bench, name, work)


def _decoding(bench: Bench, name: str, work: Work) -> None:
    player, burst = Player(bench, name, work), min(BURST, work.response)
    player.play(burst)
    title = f"{name}, {work.title}: prompts, then {burst} tokens each"
    _profile(bench, title, lambda: player.play(burst))
    player.close()


def _training(bench: Bench, name: str, work: Work) -> None:
    one = replace(work, prompts=max(bench.tokens_per_micro * work.prompts // work.unique, 1))
    trainer = Trainer(bench, name, one, kv_tokens=4096)
    episodes = invented(one, trainer.shape.vocab_size)
    trainer.learn(episodes)
    title = f"{name}, training on {one.unique:,} tokens and one optimizer step"
    _profile(bench, title, lambda: trainer.learn(episodes))
    trainer.close()


def _profile(bench: Bench, title: str, work: Callable[[], object]) -> None:
    is_gpu = bench.device.type == "cuda"
    watched = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]
    plain = bench.time(work)
    with profile(activities=watched) as seen:
        watched_seconds = bench.time(work)
    order = "self_device_time_total" if is_gpu else "self_cpu_time_total"
    print(f"\n{title}: {plain * 1e3:.1f} ms, {watched_seconds * 1e3:.1f} ms under the profiler")
    print(seen.key_averages().table(sort_by=order, row_limit=TOP, max_name_column_width=70))
