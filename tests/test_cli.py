import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from graft.commands.errors import complain
from graft.config import ConfigError
from tests.command_line import graft

TINY = """
run: {{dir: "{folder}", name: run, save_every: 2, eval_tasks: 8, trackers: [{trackers}]}}
model:
  shape: {{width: 32, layers: 1, heads: 2, kv_heads: 1, head_dim: 16, ff: 32, max_positions: 96}}
task: {{env: calculator, eval_args: {{split: test}}}}
rollout: {{tasks: 2, samples: 4, max_tokens: 10, max_turns: 4, max_context: 64}}
train: {{steps: {steps}, lr: 1.0e-3}}
sft: {{steps: 4, batch: 8}}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A finished tiny run."""
    folder = tmp_path_factory.mktemp("cli")
    (folder / "tiny.yaml").write_text(TINY.format(folder=folder, trackers="tensorboard", steps=4))
    done = graft("train", str(folder / "tiny.yaml"), "--json")
    assert done.returncode == 0, done.stderr
    (folder / "last_line.json").write_text(done.stdout.strip().splitlines()[-1])
    return folder


def test_a_run_folder_holds_what_it_promises(trained):
    run = trained / "run"
    assert {"config.yaml", "metrics.jsonl", "summary.json"} <= {p.name for p in run.iterdir()}
    assert len(list((run / "episodes").glob("*.jsonl"))) == 4
    assert list((run / "tensorboard").rglob("events*"))
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["rl-000002", "rl-000004"]
    summary = json.loads((run / "summary.json").read_text())
    assert set(summary["before"]) == set(summary["after"]) == {"sampled", "greedy", "tool_rate"}
    assert summary == json.loads((trained / "last_line.json").read_text())
    lines = (run / "metrics.jsonl").read_text().splitlines()
    last = json.loads(lines[-1])
    assert last["sampling/sampling_logp_difference/max"] < 1e-4
    assert {"reward", "frac_reward_zero_std", "entropy", "grad_norm", "time/rollout"} <= set(last)


def test_a_finished_run_has_nothing_left_to_do(trained):
    again = graft("train", str(trained / "tiny.yaml"), "--json")
    assert again.returncode == 0
    first = json.loads((trained / "last_line.json").read_text())
    assert json.loads(again.stdout.strip().splitlines()[-1])["after"] == first["after"]
    assert len((trained / "run" / "metrics.jsonl").read_text().splitlines()) == 8


def test_generate_answers_in_json_from_a_run_folder(trained):
    done = graft(
        "generate", str(trained / "run"), "-p", "12+34=", "-p", "5*6=", "--n", "2", "--json"
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)["answers"]
    assert [len(answer["completions"]) for answer in answers] == [2, 2]
    first = answers[0]["completions"][0]
    assert len(first["tokens"]) == len(first["logprobs"]) == len(first["entropies"])
    greedy = [
        graft(
            "generate", str(trained / "run"), "-p", "12+34=", "--greedy", "--seed", seed, "--json"
        )
        for seed in ("0", "1")
    ]
    assert greedy[0].stdout == greedy[1].stdout


def test_a_checkpoint_loads_in_transformers_with_the_same_greedy_text(trained):
    pytest.importorskip("transformers")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = trained / "run" / "checkpoints" / "rl-000004"
    model, tokenizer = (
        kind.from_pretrained(path) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    ids = tokenizer("12+34=", return_tensors="pt").input_ids
    theirs = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8, do_sample=False
    )[0, ids.shape[1] :].tolist()
    ours = graft("generate", str(path), "-p", "12+34=", "--greedy", "--max-tokens", "8", "--json")
    assert json.loads(ours.stdout)["answers"][0]["completions"][0]["tokens"] == theirs


@pytest.mark.parametrize(
    ("arguments", "code", "fragment"),
    [
        (["train", "no_such_recipe"], 2, "no recipe 'no_such_recipe'"),
        (["train", "quickstart", "train.lrr=1"], 2, "did you mean 'train.lr'"),
        (["train", "quickstart", "algo.name=grop"], 2, "did you mean 'grpo'"),
        (
            ["train", "quickstart", "task.env=calculater", "run.name=x"],
            2,
            "did you mean 'calculator'",
        ),
        (["train", "quickstart", "algo.loss={clip: {hihg: 1}}", "run.name=x"], 2, "clip(low"),
        (["sft", "quickstart", "sft.steps=0"], 2, "no supervised steps"),
        (["generate", "/no/such/model", "-p", "x"], 1, "/no/such/model"),
        (["generate", "x"], 2, "--prompt"),
        (["config"], 2, "--keys"),
        (["nonsense"], 2, "nonsense"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path, arguments, code, fragment):
    if "quickstart" in arguments:
        arguments = [*arguments, f"run.dir={tmp_path}"]
    done = graft(*arguments)
    assert done.returncode == code, done.stderr
    assert fragment in done.stderr
    assert "Traceback" not in done.stderr


def test_config_prints_a_recipe_that_loads_back(tmp_path):
    shown = graft("config", "quickstart", "train.steps=5")
    (tmp_path / "again.yaml").write_text(shown.stdout)
    again = graft("config", str(tmp_path / "again.yaml"), "--json")
    assert json.loads(again.stdout)["train"]["steps"] == 5
    assert "train.lr" in graft("config", "--keys").stdout


def test_another_recipe_in_the_same_folder_is_refused(trained):
    done = graft("train", str(trained / "tiny.yaml"), "train.weight_decay=0.5")
    assert done.returncode == 1
    assert "train.weight_decay: 0.0 -> 0.5" in done.stderr and "run.name" in done.stderr


def test_resume_false_refuses_a_folder_with_checkpoints(trained):
    done = graft("train", str(trained / "tiny.yaml"), "run.resume=false")
    assert done.returncode == 1 and "run.resume is false" in done.stderr


def test_a_disk_that_takes_no_more_stops_with_the_reason_and_keeps_the_last_checkpoint(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY.format(folder=tmp_path, trackers="", steps=2))
    assert graft("train", str(tmp_path / "tiny.yaml")).returncode == 0
    before = sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir())
    full = graft("train", str(tmp_path / "tiny.yaml"), "train.steps=6", largest_file=30_000)
    assert full.returncode == 1
    assert "cannot write" in full.stderr and "Complete checkpoints are intact" in full.stderr
    assert "Traceback" not in full.stderr
    assert sorted(p.name for p in (tmp_path / "run" / "checkpoints").iterdir()) == before
    assert graft("train", str(tmp_path / "tiny.yaml"), "train.steps=4").returncode == 0


def test_a_dead_environment_stops_the_run_with_the_reason(tmp_path):
    (tmp_path / "dead_env.py").write_text(
        "from graft.envs.base import BaseEnv\n"
        "class Dead(BaseEnv):\n"
        "    alphabet = '0123456789'\n"
        "    def __init__(self, split='train'):\n"
        "        super().__init__()\n"
        "    def pose(self):\n"
        "        return '1'\n"
        "    def respond(self, action):\n"
        "        raise ConnectionError('the server is gone')\n"
    )
    (tmp_path / "tiny.yaml").write_text(TINY.format(folder=tmp_path, trackers="", steps=2))
    done = graft(
        "train",
        str(tmp_path / "tiny.yaml"),
        "task.env=dead_env:Dead",
        "sft.steps=0",
        PYTHONPATH=f"{tmp_path}:{Path.cwd()}",
    )
    assert done.returncode == 1
    assert "the server is gone" in done.stderr and "Traceback" not in done.stderr


def test_a_loss_that_is_not_a_number_leaves_the_batch_behind(tmp_path):
    (tmp_path / "nan_loss.py").write_text(
        "def broken():\n"
        "    def loss(logp, entropy, batch):\n"
        "        return logp * float('nan'), {}\n"
        "    return loss\n"
    )
    (tmp_path / "tiny.yaml").write_text(TINY.format(folder=tmp_path, trackers="", steps=2))
    done = graft(
        "train",
        str(tmp_path / "tiny.yaml"),
        "algo.loss=nan_loss:broken",
        PYTHONPATH=f"{tmp_path}:{Path.cwd()}",
    )
    assert done.returncode == 1
    assert "loss is not a finite number" in done.stderr and "Traceback" not in done.stderr
    assert (tmp_path / "run" / "failed" / "step_000001.jsonl").stat().st_size > 100
    assert (tmp_path / "run" / "checkpoints" / "rl-000000").is_dir()


def test_help_is_light():
    """Neither torch nor transformers may be loaded to print a help text."""
    code = (
        "import sys, graft.cli; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_sft_on_recorded_chats_needs_no_environment(tmp_path):
    chats = [("hi", "hello"), ("bye", "goodbye")]
    (tmp_path / "chats.jsonl").write_text(
        "".join(
            json.dumps(
                {"messages": [{"role": "user", "content": a}, {"role": "assistant", "content": b}]}
            )
            + "\n"
            for a, b in chats
        )
    )
    (tmp_path / "sft.yaml").write_text(
        f"run: {{dir: '{tmp_path}', eval_tasks: 0, trackers: []}}\n"
        "model: {shape: {width: 32, layers: 1, heads: 2, kv_heads: 2, head_dim: 16, ff: 64},"
        " alphabet: bytes}\n"
        f"sft: {{steps: 60, data: '{tmp_path}/chats.jsonl', batch: 4, lr: 0.01, warmup: 5}}\n"
    )
    assert graft("sft", str(tmp_path / "sft.yaml")).returncode == 0
    for prompt, answer in chats:
        shown = graft("generate", str(tmp_path / "sft"), "-p", prompt, "--greedy")
        assert shown.stdout == answer + "\n"
    (tmp_path / "bad.jsonl").write_text('{"messages": 3}\n')
    bad = graft("sft", str(tmp_path / "sft.yaml"), f"sft.data={tmp_path}/bad.jsonl", "run.name=x")
    assert bad.returncode == 1 and "row 1: no list `messages`" in bad.stderr


def test_an_error_shows_control_characters_and_does_not_send_them(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(
        sys.stderr, "isatty", lambda: True, raising=False
    )  # else typer drops colours
    assert complain(ConfigError("env 'a\x1b[2J\x1b]0;owned\x07\u202eb': no such file\nnext")) == 2
    seen = capsys.readouterr().err
    assert seen == "graft: env 'a\\x1b[2J\\x1b]0;owned\\x07\\u202eb': no such file\nnext\n"


def test_a_full_device_is_an_error_without_traceback(capsys: pytest.CaptureFixture[str]):
    error = torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 46.00 MiB. If reserved but unallocated memory is large"
    )
    assert complain(error) == 1
    stderr = capsys.readouterr().err
    assert "Tried to allocate 46.00 MiB." in stderr and "train.tokens_per_micro" in stderr
    assert "Traceback" not in stderr and "If reserved" not in stderr


def test_a_traceback_shows_control_characters_and_no_secrets(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.delenv("GRAFT_DEBUG", raising=False)
    assert complain(RuntimeError("\x1b[2J sk-proj-abcdefghijklmnopqrstuvwxyz0123456789")) == 1
    shown = capsys.readouterr().err
    assert "\\x1b[2J" in shown and "\x1b" not in shown and "abcdefghij" not in shown
