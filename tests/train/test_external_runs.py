"""Whole runs whose tokens come from engines of others: vLLM, SGLang, and what they are refused for.

SGLang is a stand-in with its API (`tests.engine.fake_sglang`), and in one test a real server, which `make
test-slow` installs. The tests with a real vLLM need
the interpreter that has it: `.venv/vllm/bin/python -m pytest -m vllm tests/train/test_external_runs.py`.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from graft.config import ConfigError, check
from graft.engine.errors import EngineError
from graft.engine.remote import endpoint
from graft.models.decoder import Decoder
from graft.models.io.load import load_model
from graft.models.io.save import save_model
from graft.train.errors import RunStopped
from graft.train.model import load_tokenizer, new_shape
from graft.train.run_dir.checkpoint import checkpoints
from graft.types import Task, Trajectory
from tests.engine.fake_sglang import FakeSGLang, load_other, serving_sglang
from tests.engine.real_sglang import PYTHON, RealSGLang
from tests.model_calls import evaluate_model, sample_model
from tests.processes import free_port
from tests.training import metrics_of, train_recipe

SIZES = {
    "width": 64, "layers": 2, "heads": 2, "kv_heads": 1, "head_dim": 32, "ff": 64, "tied": False,
    "max_positions": 256,
}  # fmt: skip
GAP = "sampling/sampling_logp_difference/mean"
OTHERS: dict[str, dict[str, Any]] = {
    "gemma2": {"sliding_window": 16, "query_pre_attn_scalar": 32},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": [],
    },
}  # fmt: skip
"""What is special in the configs of families; of these, only the last has a decoder of ours."""

FORKS: dict[str, Any] = {
    "task": {"prefill": "["},  # so that random weights call the calculator
    "algo": {"name": "arpo"},
    "rollout": {
        "staleness": 1, "max_tokens": 20, "samples": 6,
        "branch": {"arpo": {"initial_rollouts": 3, "tokens": 3, "branch_probability": 1.0}},
    },
}  # fmt: skip
"""Attempts that fork by entropy where a tool has answered, a step ahead of the learner."""


def low_tokens(task: Task, row: Trajectory) -> float:
    """Something that random weights earn now and then."""
    return float(sum(token < 9 for token in row.tokens) / len(row.tokens))


def recipe(folder: Path, **sections: dict[str, Any]) -> Any:
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder), "name": "run", "save_every": 1, "eval_tasks": 3, "keep_last": 2,
                "trackers": [], "seed": 3},
        "model": {"shape": SIZES, "dtype": "float32", "device": "cpu"},
        "task": {"env": "calculator", "reward": "tests.train.test_external_runs:low_tokens"},
        "rollout": {"tasks": 3, "samples": 4, "max_tokens": 8, "max_turns": 2, "max_context": 64,
                    "deadline": 60},
        "train": {"steps": 3, "lr": 1e-2},
    }  # fmt: skip
    if "path" in sections.get("model", {}):
        del values["model"]["shape"]
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return check(values)


def run(folder: Path, **sections: dict[str, Any]) -> tuple[list[dict[str, Any]], str]:
    """Metrics of the RL steps of a run, and what stood on the screen."""
    screen = io.StringIO()
    train_recipe(recipe(folder, **sections), quiet=False, stream=screen)
    return metrics_of(folder / "run", "rl"), screen.getvalue()


def tokens_of() -> Any:
    return load_tokenizer(recipe(Path()), None)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of ours, in a folder."""
    folder = tmp_path_factory.mktemp("models") / "base"
    config = recipe(folder)
    save_model(Decoder(new_shape(config, tokens_of())).initialise(2), folder)
    tokens_of().save(folder)
    return folder


def store(folder: Path, family: str) -> Path:
    """A small random model of a family, as transformers saves it, with our tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    tokens = tokens_of()
    config = AutoConfig.for_model(
        family,
        vocab_size=tokens.vocab_size,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        intermediate_size=64,
        max_position_embeddings=256,
        eos_token_id=tokens.eos_id,
        pad_token_id=tokens.pad_id,
        bos_token_id=None,
        initializer_range=0.2,
        **OTHERS[family],
    )
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokens.save(folder)
    return folder


def opens(folder: Path) -> list[Any]:
    """The weights of the newest checkpoint, as transformers reads them."""
    checkpoint = checkpoints(folder / "run" / "checkpoints")[-1].path
    return [weight.detach().clone() for weight in load_other(str(checkpoint)).parameters()]


# SGLang's stand-in


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Faults are soon given up on."""
    monkeypatch.setattr("graft.http.FIRST_PAUSE", 0.01)
    monkeypatch.setattr(endpoint, "RETRIES", 2)


@pytest.fixture
def fake(base: Path, hasty: None) -> Iterator[FakeSGLang]:
    with serving_sglang(load_model(base), tokens_of()) as served:
        yield served


def sglang(base: Path, *urls: str) -> dict[str, Any]:
    return {
        "model": {"path": str(base)},
        "engine": {"name": "sglang", "url": list(urls)},
    }


@pytest.mark.slow
def test_a_run_with_sglang_learns_from_its_tokens_and_goes_on_where_it_was(base, fake, tmp_path):
    sections = sglang(base, fake.url)
    found, screen = run(tmp_path, **sections, train={"steps": 1})
    found, again = run(tmp_path, **sections, train={"steps": 3})
    assert "resuming" in again and [line["step"] for line in found] == [1, 2, 3]
    assert all(line[GAP] < 1e-3 for line in found)
    assert all(line["staleness/max"] == 0 for line in found)
    # 15 characters, <pad>, <eos> and <unk>: the server returns all of them, so no entropy is a bound
    assert {line["sampling/entropy_top_k"] for line in found} == {float(known(base))}
    assert "sglang: log-probs agree with the learner's" in screen
    # weights went out by file, one version after the other, and only the last was kept
    loaded = fake.paths("/update_weights_from_disk")
    versions = [int(content["weight_version"].rpartition("-v")[2]) for content in loaded]
    assert sorted(set(versions)) == [0, 1, 2, 3] and versions[-1] == 3
    assert [p.name for p in (tmp_path / "run" / "exchange").iterdir()] == []
    checkpoint = checkpoints(tmp_path / "run" / "checkpoints")[-1].path
    trained = load_model(checkpoint)
    for mine, served in zip(trained.parameters(), fake.decoder.parameters(), strict=True):
        assert torch.equal(mine, served)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_real_sglang_trains_by_file_and_through_memory_and_may_be_killed(base, hasty, tmp_path):
    if not PYTHON.exists():
        pytest.skip("no SGLang: make .venv/sglang/.ready installs it")
    server = RealSGLang(base, 256)
    by_file = sglang(base, server.url)
    through_memory = {**by_file, "engine": {**by_file["engine"], "sync": "memory"}}
    server.start()
    try:
        found, screen = run(tmp_path / "file", **by_file)
        assert "sglang: log-probs agree with the learner's" in screen
        assert len(found) == 3 and all(line[GAP] < 1e-4 for line in found)
        forks = FORKS | {"rollout": {**FORKS["rollout"], "staleness": 0}}
        found, _ = run(tmp_path / "memory", **through_memory, **forks)
        assert len(found) == 3 and all(line[GAP] < 1e-4 for line in found)
        assert any(line.get("branch/forks", 0) > 0 for line in found)
        assert not list((tmp_path / "memory" / "run" / "exchange").glob("*-*"))
    finally:
        server.kill()
    with pytest.raises(EngineError, match=f"{server.url}.* cannot be reached"):
        run(tmp_path / "file", **by_file, train={"steps": 5})
    server.start()
    try:
        found, screen = run(tmp_path / "file", **by_file, train={"steps": 5})
        assert "after rl step 3" in screen and [line["step"] for line in found] == [1, 2, 3, 4, 5]
        assert all(line[GAP] < 1e-4 for line in found)
    finally:
        server.kill()


@pytest.mark.slow
def test_scores_and_data_of_such_a_run_leave_its_servers_alone(base, fake, tmp_path):
    """They may be training with other weights."""
    run(tmp_path, **sglang(base, fake.url), train={"steps": 2}, rollout={"staleness": 1})
    before = len(fake.requests)
    source = str(tmp_path / "run")
    table, _, _ = evaluate_model(source, tasks=2, every_checkpoint=True, say=print)
    assert len(table.rows) == 2 and not table.problems  # run.keep_last
    out = str(tmp_path / "rows.jsonl")
    sampled = sample_model(source, "calculator", out, tasks=2, samples=2, keep="turns>0", say=print)
    assert sampled.failed == 0 and sampled.rows
    assert len(fake.requests) == before


def known(base: Path) -> int:
    size = json.loads((base / "config.json").read_text())["vocab_size"]
    return 20 if size > 20 else 0


@pytest.mark.slow
def test_the_adapter_that_is_served_is_the_trained_one(base, fake, tmp_path):
    found, screen = run(tmp_path, **sglang(base, fake.url), lora={"rank": 2})
    assert "log-probs with adapters agree with the learner's" in screen
    assert all(line[GAP] < 1e-3 for line in found)
    trained = load_model(checkpoints(tmp_path / "run" / "checkpoints")[-1].path)
    for mine, served in zip(trained.parameters(), fake.decoder.parameters(), strict=True):
        assert torch.equal(mine, served)


def test_a_server_that_does_not_take_the_weights_stops_the_run_before_it_begins(
    base, fake, tmp_path
):
    fake.load = lambda folder: Decoder(fake.decoder.shape).initialise(9)
    with pytest.raises(RunStopped, match=r"does not serve the weights .* with the same weights"):
        run(tmp_path, **sglang(base, fake.url))


@pytest.mark.slow
def test_tokens_of_a_step_ahead_come_from_a_server_too(base, fake, tmp_path):
    found, _ = run(tmp_path, **sglang(base, fake.url), **FORKS)
    assert max(line["staleness/max"] for line in found) == 1
    assert all(0 <= line["staleness/mean"] <= 1 for line in found)
    assert any(line.get("branch/forks", 0) > 0 for line in found)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma2", "mixtral"])
def test_a_family_that_is_not_ours_trains_as_transformers_computes_it(family, hasty, tmp_path):
    folder = store(tmp_path / "model", family)
    before = [weight.detach().clone() for weight in load_other(str(folder)).parameters()]
    # random weights of some families always sample the same: warm enough that attempts differ
    warm = {"temperature": 4.0}
    with serving_sglang(load_other(str(folder)), tokens_of(), load_other) as served:
        found, screen = run(tmp_path, **sglang(folder, served.url), rollout=warm)
    assert all(line[GAP] < 1e-3 for line in found)
    after = opens(tmp_path)
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))
    for mine, theirs in zip(after, served.decoder.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    assert family in screen


@pytest.mark.slow
def test_a_server_that_dies_is_named_and_the_run_goes_on_when_it_is_back(base, hasty, tmp_path):
    port = free_port()

    def die_after(served: FakeSGLang, loads: int) -> Callable[[str], Any]:
        def load(folder: str) -> Any:
            served.is_dead = len(served.paths("/update_weights_from_disk")) >= loads
            return load_model(folder)

        return load

    with serving_sglang(load_model(base), tokens_of(), port=port) as served:
        served.load = die_after(served, 5)
        with pytest.raises((RunStopped, EngineError)) as stopped:
            run(tmp_path, **sglang(base, served.url), train={"steps": 9})
        assert served.url in str(stopped.value) and "\n" not in str(stopped.value)
    done = checkpoints(tmp_path / "run" / "checkpoints")[-1].step
    assert 0 < done < 9
    with pytest.raises(EngineError, match=f"{served.url}.* cannot be reached"):
        run(tmp_path, **sglang(base, served.url), train={"steps": 9})
    with serving_sglang(load_model(base), tokens_of(), port=port) as served:
        found, screen = run(tmp_path, **sglang(base, served.url), train={"steps": 9})
    assert f"after rl step {done}" in screen
    assert [line["step"] for line in found] == list(range(1, 10))
    assert all(line[GAP] < 1e-3 for line in found)


def test_scores_of_a_server_that_is_gone_are_no_zeros(base, fake, tmp_path):
    """The last weights went out; the evaluation after them finds no server."""
    alive = fake.generate

    def generate(content: dict[str, Any]) -> dict[str, Any]:
        fake.is_dead = fake.version.endswith("-v1")
        return alive(content)

    fake.generate = generate
    with pytest.raises(RunStopped, match=f"none of 3 held-out episodes.*{fake.url}"):
        run(tmp_path, **sglang(base, fake.url), train={"steps": 1})


# what cannot work is refused before anything is loaded


@pytest.mark.parametrize(
    ("sections", "fragment"),
    [
        ({"engine": {"name": "vllm"}, "actions": {"file": "compact"}}, "has no actions"),
        ({"engine": {"name": "vllm"}, "algo": {"name": "cpo"}}, "'counterfactual' .*algo.name=cpo"),
        ({"engine": {"name": "vllm"}, "rollout": {"branch": "counterfactual"}}, "'counterfactual'"),
        ({"engine": {"name": "vllm"}, "rollout": {"frozen": {"O": "reference"}}}, "frozen seat"),
        ({"engine": {"name": "sglang"}}, "launch_server"),
        ({"engine": {"url": ["http://a:1"]}}, "add engine.name=vllm"),
        ({"engine": {"name": "vllm", "sync": "file"}}, "through memory"),
        (
            {
                "engine": {
                    "name": "vllm",
                    "url": ["http://a:1"],
                    "args": {"pipeline_parallel_size": 2},
                }
            },
            "--pipeline-parallel-size 2",
        ),
    ],
)
def test_what_engines_of_others_cannot_do_is_refused(sections, fragment, tmp_path):
    with pytest.raises(ConfigError, match=fragment) as refused:
        run(tmp_path, **sections)
    assert "\n" not in str(refused.value)


def test_vllm_in_the_processes_of_a_run_refuses_a_pipeline_and_names_the_servers_that_have_one():
    from graft.engine.remote.vllm_library import engine_arguments

    with pytest.raises(EngineError, match=r"pipeline_parallel_size=2.*engine\.tp.*engine\.url"):
        engine_arguments({"pipeline_parallel_size": 2}, Path("model"), has_weights=True)
    made = engine_arguments({"pipeline_parallel_size": 1}, Path("model"), has_weights=True)
    assert made["pipeline_parallel_size"] == 1


def test_a_family_without_a_decoder_of_ours_is_refused_with_the_engine_that_trains_it(tmp_path):
    folder = store(tmp_path / "model", "gemma2")
    with pytest.raises(ConfigError, match=r"is a gemma2 model.*engine\.name=vllm"):
        run(tmp_path, model={"path": str(folder)})


def test_a_server_that_is_not_there_is_named_before_anything_is_trained(base, hasty, tmp_path):
    with pytest.raises(EngineError, match=r"http://127\.0\.0\.1:9.*cannot be reached") as refused:
        run(tmp_path, **sglang(base, "http://127.0.0.1:9"))
    assert "\n" not in str(refused.value)
    assert not checkpoints(tmp_path / "run" / "checkpoints")


# the real vLLM

VLLM = [
    pytest.mark.vllm,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.timeout(600),
]
IN_PROCESS = {"name": "vllm", "args": {"kv_cache_memory_bytes": 2**24}}


def with_vllm(test: Callable[..., None]) -> Any:
    for mark in VLLM:
        test = mark(test)
    return test


@pytest.fixture
def vllm() -> None:
    pytest.importorskip("vllm")


@with_vllm
def test_vllm_in_this_process_samples_for_a_run_and_a_step_ahead(vllm, base, tmp_path, capfd):
    sections = {"engine": IN_PROCESS, "sft": {"steps": 2, "batch": 4, "lr": 1e-2}}
    found, screen = run(tmp_path / "new", **sections)
    assert all(line[GAP] < 1e-3 for line in found)
    assert {line["sampling/entropy_top_k"] for line in found} == {float(known(base))}
    assert "vllm: log-probs agree with the learner's" in screen
    # ARPO forks by entropies of the likeliest tokens, and samples while it learns
    found, _ = run(tmp_path / "ahead", engine=IN_PROCESS, model={"path": str(base)}, **FORKS)
    assert max(line["staleness/max"] for line in found) == 1
    assert any(line.get("branch/forks", 0) > 0 for line in found)
    printed = capfd.readouterr()
    lines = [line for line in (printed.out + printed.err).splitlines() if "utils.cpp" not in line]
    assert lines == []  # vLLM prints nothing; `graft` itself silences the lines of C++


@with_vllm
def test_vllm_serves_the_adapter_that_is_trained(vllm, base, tmp_path):
    model = {"path": str(base)}
    found, screen = run(tmp_path, engine=IN_PROCESS, model=model, lora={"rank": 2})
    assert "log-probs with adapters agree with the learner's" in screen
    assert all(line[GAP] < 1e-3 for line in found)


@with_vllm
@pytest.mark.parametrize("family", ["gemma2", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_vllm_samples_for_families_that_are_not_ours(vllm, family, tmp_path):
    folder = store(tmp_path / "model", family)
    found, screen = run(tmp_path, engine=IN_PROCESS, model={"path": str(folder)})
    assert all(line[GAP] < 1e-3 for line in found)
    assert (family in screen) == (family != "qwen3_moe")  # our own decoder trains it
    before = [weight.detach() for weight in load_other(str(folder)).parameters()]
    assert any(not torch.equal(old, new) for old, new in zip(before, opens(tmp_path), strict=True))
    table, _, _ = evaluate_model(str(tmp_path / "run"), tasks=2, every_checkpoint=True)
    assert len(table.rows) == 2 and not table.problems


TWO_STEPS: dict[str, Any] = {
    "algo": {"name": "reinforce"},  # equal attempts of a task still differ from other tasks'
    "run": {"save_every": 0},
    "train": {"steps": 2, "lr": 1e-4},
    "rollout": {"tasks": 4, "samples": 2, "temperature": 0.01},
}
"""Draws that do not depend on random numbers, in effect: engines with numbers of their own draw the same."""


def store_scaled(folder: Path, scale: float) -> Path:
    """A model of ours with two KV heads, which two processes can split."""
    config = recipe(folder, model={"shape": {**SIZES, "heads": 4, "kv_heads": 2}})
    decoder = Decoder(new_shape(config, tokens_of())).initialise(2)
    with torch.no_grad():
        for weight in decoder.parameters():
            if weight.ndim == 2:
                weight.mul_(scale)
    save_model(decoder, folder)
    tokens_of().save(folder)
    return folder


@pytest.fixture(scope="module")
def base_of_two_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return store_scaled(tmp_path_factory.mktemp("models") / "base", 1.0)


@pytest.fixture(scope="module")
def sure(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large weights, so that the likeliest token is far ahead."""
    return store_scaled(tmp_path_factory.mktemp("models") / "sure", 2.5)


def drawn_tokens(folder: Path) -> list[list[list[int]]]:
    """Of every span, of every episode of both steps."""
    files = sorted((folder / "run" / "episodes").glob("*.jsonl"))
    episodes = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [[span["tokens"] for span in episode["spans"]] for episode in episodes]


def under_torchrun(folder: Path, config: Any, *overrides: str) -> tuple[list[dict[str, Any]], str]:
    """`run` in two processes."""
    file = folder.with_suffix(".yaml")
    file.write_text(json.dumps(config.model_dump(mode="json")))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "2", "-m", "graft", "train", str(file), *overrides),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path.cwd())},
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "vllm: log-probs agree with the learner's" in done.stdout
    return metrics_of(folder / "run", "rl"), done.stdout


@with_vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "overrides",
    [["parallel.shard=false"], ["engine.tp=2"]],
    ids=["an engine each", "an engine together, FSDP2"],
)
def test_two_processes_with_vllm_draw_what_the_native_engine_draws(vllm, sure, tmp_path, overrides):
    sections = {**TWO_STEPS, "model": {"path": str(sure)}}
    want, _ = run(tmp_path / "native", **sections)
    config = recipe(tmp_path / "vllm", **sections, engine={"name": "vllm"})
    found, _ = under_torchrun(tmp_path / "vllm", config, *overrides)
    assert drawn_tokens(tmp_path / "vllm") == drawn_tokens(tmp_path / "native")
    rewards = [line["reward"] for line in found]
    assert rewards == pytest.approx([line["reward"] for line in want], abs=1e-6)


@with_vllm
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "overrides",
    [["engine.tp=2"], ["engine.args={tensor_parallel_size: 2}", "parallel.tp=2"]],
    ids=["FSDP2", "tensor parallel"],
)
def test_vllm_that_two_processes_hold_serves_the_weights_of_each_step(
    vllm, base_of_two_heads, tmp_path, overrides
):
    sections = {**TWO_STEPS, "train": {"steps": 3, "lr": 1e-2}, "rollout": {"temperature": 1.0}}
    config = recipe(
        tmp_path / "vllm",
        **sections,
        engine={"name": "vllm"},
        model={"path": str(base_of_two_heads)},
    )
    found, _ = under_torchrun(tmp_path / "vllm", config, *overrides)
    # the weights of the step before would be 0.1 and more away
    assert len(found) == 3 and all(line[GAP] < 1e-4 for line in found)
    assert abs(found[0]["entropy"] - found[2]["entropy"]) > 0.05


class Served:
    """`vllm serve` on a port that stays the same."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        options = f"--host 127.0.0.1 --port {self.port} --dtype float32 --max-model-len 128"
        options += " --enforce-eager --kv-cache-memory-bytes 16777216 --uvicorn-log-level warning"
        options += " --logprobs-mode processed_logprobs"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        self.log = (self.folder / "log").open("wb")
        self.process = subprocess.Popen(
            [*command, "--model", str(self.folder), *options.split()],
            stdout=self.log,
            stderr=self.log,
            start_new_session=True,
            env=os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"},
        )
        for _ in range(600):
            if self.process.poll() is not None:
                pytest.fail((self.folder / "log").read_text()[-3000:])
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
                return
            except OSError:
                time.sleep(0.5)

    def kill(self) -> None:
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(60)
        self.log.close()


@with_vllm
@pytest.mark.slow
def test_a_vllm_server_that_is_killed_is_named_and_the_run_goes_on_when_it_is_back(
    vllm, base, hasty, tmp_path
):
    served = Served(base)
    sections = {"model": {"path": str(base)}, "engine": {"name": "vllm", "url": [served.url]}}
    served.start()
    try:
        found, screen = run(tmp_path, **sections)
        assert all(line[GAP] < 1e-3 for line in found)
        assert "vllm: log-probs agree with the learner's" in screen
    finally:
        served.kill()
    with pytest.raises(EngineError, match=f"{served.url}.* cannot be reached"):
        run(tmp_path, **sections, train={"steps": 6})
    served.start()
    try:
        found, screen = run(tmp_path, **sections, train={"steps": 6})
        assert "after rl step 3" in screen
        assert [line["step"] for line in found] == [1, 2, 3, 4, 5, 6]
        assert all(line[GAP] < 1e-3 for line in found)
    finally:
        served.kill()
