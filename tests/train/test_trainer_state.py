"""The state of a trainer on the disk: names independent of the layout, and files that are cut."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from graft.models.io.tensor_names import hf_rows
from graft.text.tokenizer import FastTokenizer
from graft.train.distributed.process_group import ALONE
from graft.train.distributed.process_group import ProcessGroup as Run
from graft.train.learner import Learner
from graft.train.run_dir.checkpoint import TRAINER_FOLDER, checkpoints
from graft.train.run_dir.checkpoint_writer import CheckpointWriter
from graft.train.run_dir.folder import RunStopped, out_of_disk
from graft.train.run_dir.optimizer_state import load_tensors, save_tensors, tensors_of
from tests.processes import Processes, free_port
from tests.train.test_torchrun import (
    LAYOUTS,
    Case,
    Learnt,
    assert_same,
    learner_for,
    learnt_alone,
    numbers_of,
    processes_at,
    update,
)

PPO = Case("ppo", tied=False, has_reference=True, updates=3)
ACTIONS = Case(actions=True, updates=3)
EXPERTS = Case(tied=False, experts=True, updates=3)
TOKENIZER = FastTokenizer.characters("0123456789")


def saver_in(folder: Path, processes: Run = ALONE, later: bool = False) -> CheckpointWriter:
    return CheckpointWriter(folder, TOKENIZER, keep_last=9, processes=processes, later=later)


def cloned(learner: Learner) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in tensors_of(learner).items()}


# one process


def test_names_are_those_of_a_hugging_face_model_and_sizes_are_whole():
    learner = learner_for(ALONE, None, PPO)
    found = tensors_of(learner)
    names = set(hf_rows(learner.policy.shape))
    for kind in ("exp_avg", "exp_avg_sq"):
        assert {n.removeprefix(f"policy/{kind}/") for n in found if f"policy/{kind}/" in n} == names
    q = found["policy/exp_avg/model.layers.0.self_attn.q_proj.weight"]
    k = found["policy/exp_avg/model.layers.1.self_attn.k_proj.weight"]
    assert (tuple(q.shape), tuple(k.shape)) == ((64, 32), (32, 32))  # of one matrix [128, 32]
    assert tuple(found["critic/weight/value.weight"].shape) == (1, 32)
    assert "critic/weight/lm_head.weight" not in found
    assert not [name for name in found if "/master/" in name]  # fp32 is its own


def test_to_write_into_them_is_to_resume():
    learner = learner_for(ALONE, None, Case())
    q = tensors_of(learner)["policy/exp_avg/model.layers.0.self_attn.q_proj.weight"]
    q.fill_(0.5)
    moments = learner.optimizer.moments()["blocks.0.attention.qkv.weight"]["exp_avg"]
    assert float(moments[:64].min()) == 0.5 and not moments[64:].any()


@pytest.mark.parametrize(
    "case", [Case(updates=3), PPO, ACTIONS, EXPERTS], ids=["grpo", "ppo", "actions", "experts"]
)
@pytest.mark.parametrize("later", [False, True])
def test_what_is_saved_comes_back_to_the_bit(tmp_path, case: Case, later: bool):
    learner = learner_for(ALONE, None, case)
    update(learner, case, 2)
    saver = saver_in(tmp_path, later=later)
    saver.save("rl", 2, learner, {"cursor": 7})
    before = cloned(learner)
    rest = update(learner, case, 1)  # while it is being written
    saver.finish()
    (saved,) = checkpoints(tmp_path)
    assert saved.state() == {"phase": "rl", "step": 2, "cursor": 7}
    again = learner_for(ALONE, None, case, saved)
    restored = tensors_of(again)
    assert restored.keys() == before.keys()
    for name, tensor in before.items():
        assert torch.equal(restored[name], tensor), name
    assert again.optimizer.steps == 2 * case.epochs
    assert update(again, case, 1) == rest
    ours, theirs = numbers_of(learner), numbers_of(again)
    assert all(torch.equal(theirs[name], tensor) for name, tensor in ours.items())


def test_a_bf16_models_fp32_masters_are_part_of_it(tmp_path):
    learner = learner_for(ALONE, None, Case())
    learner.policy.to(torch.bfloat16)
    from graft.train.optimizer import Optimizer

    learner.optimizer = Optimizer([learner.policy], lr=1e-4, schedule=lambda step: 1.0)
    update(learner, Case(), 2)
    found = cloned(learner)
    master = found["policy/master/model.layers.0.mlp.up_proj.weight"]
    assert master.dtype == torch.float32
    assert not torch.equal(master, master.bfloat16().float())  # more digits than the weights hold
    save_tensors(found, tmp_path / "trainer", rank=0)
    wiped = {name: torch.zeros_like(tensor) for name, tensor in found.items()}
    load_tensors(wiped, tmp_path / "trainer")
    assert all(torch.equal(wiped[name], tensor) for name, tensor in found.items())


def test_random_states_come_back(tmp_path):
    learner = learner_for(ALONE, None, Case())
    saver_in(tmp_path).save("sft", 1, learner, {})
    drawn = random.random(), float(np.random.rand()), float(torch.rand(()))
    checkpoints(tmp_path)[0].restore(learner)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == drawn


def test_a_checkpoint_of_another_algorithm_is_refused(tmp_path):
    saver_in(tmp_path).save("rl", 1, learner_for(ALONE, None, Case(tied=False)), {})
    with pytest.raises(RunStopped, match=r"lacks critic/.* another model or algorithm"):
        checkpoints(tmp_path)[0].restore(learner_for(ALONE, None, PPO))


def test_a_checkpoint_without_the_state_of_a_trainer_is_refused(tmp_path):
    learner = learner_for(ALONE, None, Case())
    saver_in(tmp_path).save("rl", 1, learner, {})
    (saved,) = checkpoints(tmp_path)
    shutil.rmtree(saved.path / TRAINER_FOLDER)
    with pytest.raises(RunStopped, match=TRAINER_FOLDER):
        saved.restore(learner)


def test_the_same_step_is_not_written_twice(tmp_path):
    learner, saver = learner_for(ALONE, None, Case()), saver_in(tmp_path, later=True)
    saver.save("rl", 1, learner, {"which": "first"})
    saver.save("rl", 1, learner, {"which": "second"})  # Ctrl-C while it is being written
    saver.finish()
    assert checkpoints(tmp_path)[0].state()["which"] == "first"


@pytest.mark.parametrize("later", [False, True])
def test_a_write_that_fails_is_a_stop_that_names_the_disk(tmp_path, monkeypatch, later: bool):
    learner, saver = learner_for(ALONE, None, Case()), saver_in(tmp_path, later=later)
    saver.save("rl", 1, learner, {})
    saver.finish()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("graft.train.run_dir.optimizer_state.new_file", full)
    with pytest.raises(RunStopped, match=r"cannot write to .*No space left"):
        saver.save("rl", 2, learner, {})
        saver.finish()
    assert [path.name for path in tmp_path.iterdir()] == ["rl-000001"]


@pytest.mark.parametrize(
    ("number", "way_out"),
    [
        (28, "MB are free there: free some space"),
        (13, "set run.dir to a folder"),
        (17, "set run.dir to"),
    ],
)
def test_a_folder_that_may_not_be_written_is_not_called_full(tmp_path, number: int, way_out: str):
    with pytest.raises(RunStopped, match=way_out), out_of_disk(tmp_path):
        raise OSError(number, "refused")


# several processes


def save_in_a_child(port: int, layout: str, case: Case, folder: str, later: bool) -> None:
    """Two updates, a checkpoint, and a third one while it may still be written."""
    processes = processes_at(port)
    learner = learner_for(processes, LAYOUTS[layout], case)
    update(learner, case, case.updates - 1)
    saver = saver_in(Path(folder), processes, later)
    saver.save("rl", case.updates - 1, learner, {"cursor": 7})
    update(learner, case, 1)
    saver.finish()


def resume_in_a_child(port: int, layout: str, case: Case, folder: str) -> Learnt:
    (saved,) = checkpoints(Path(folder))
    learner = learner_for(processes_at(port), LAYOUTS[layout], case, saved)
    return update(learner, case, 1), numbers_of(learner)


def last_update_of(learnt: Learnt) -> Learnt:
    return learnt[0][-1:], learnt[1]


def assert_resumed_by_one(folder: Path, case: Case) -> None:
    (saved,) = checkpoints(folder)
    learner = learner_for(ALONE, None, case, saved)
    found = update(learner, case, 1), numbers_of(learner)
    assert_same(last_update_of(learnt_alone(case)), found, "one process")


@pytest.mark.slow
@pytest.mark.parametrize("case", [PPO, ACTIONS, EXPERTS], ids=["ppo", "actions", "experts"])
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("fsdp", "tp"),
        pytest.param("tp", "fsdp", marks=pytest.mark.slow),
        pytest.param("replicas", "tp", marks=pytest.mark.slow),
    ],
)
def test_a_checkpoint_of_two_processes_fits_one_and_two(pair, tmp_path, before, after, case):
    children, port = pair
    children.run(save_in_a_child, port, before, case, str(tmp_path), before == "tp")
    assert_resumed_by_one(tmp_path, case)
    for rank, found in enumerate(children.run(resume_in_a_child, port, after, case, str(tmp_path))):
        assert_same(last_update_of(learnt_alone(case)), found, f"rank {rank}")


@pytest.mark.parametrize("layout", [pytest.param("fsdp", marks=pytest.mark.slow), "replicas"])
def test_later_writes_what_would_have_been_written_at_once(pair, tmp_path, layout: str):
    children, port = pair
    for later in (False, True):
        folder = tmp_path / str(later)
        children.run(save_in_a_child, port, layout, PPO, str(folder), later)
    (now,), (then,) = checkpoints(tmp_path / "False"), checkpoints(tmp_path / "True")
    assert now.state() == then.state()
    names = sorted(p.name for p in now.path.iterdir())
    assert sorted(p.name for p in then.path.iterdir()) == names
    weights = "model.safetensors"
    assert (now.path / weights).read_bytes() == (then.path / weights).read_bytes()
    restored = [learner_for(ALONE, None, PPO, one) for one in (now, then)]
    first, second = (tensors_of(learner) for learner in restored)
    assert all(torch.equal(second[name], tensor) for name, tensor in first.items())


def save_and_hang(port: int, folder: str) -> None:
    """The first checkpoint whole, of the second all but the trainer's part."""
    processes = processes_at(port)
    learner = learner_for(processes, 1, Case())
    saver = saver_in(Path(folder), processes, later=True)
    saver.save("rl", 1, learner, {})
    saver.finish()
    import time

    from graft.train.run_dir import checkpoint_writer as module

    module.save_tensors = lambda *_, **__: time.sleep(600)  # type: ignore[assignment]
    saver.save("rl", 2, learner, {})
    partial = Path(folder) / ".rl-000002.partial"
    while processes.is_first and not (partial / "state.json").exists():
        time.sleep(0.01)
    processes.barrier("the model to be written")


def test_kill_9_while_it_is_being_written_leaves_the_one_before(tmp_path):
    with Processes(2, deadline=100.0) as children:
        children.run(save_and_hang, free_port(), str(tmp_path))
    (saved,) = checkpoints(tmp_path)  # all are dead now
    assert saved.step == 1
    assert (tmp_path / ".rl-000002.partial" / "model.safetensors").exists()
    update(learner_for(ALONE, None, Case(), saved), Case(), 1)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("case", [PPO, ACTIONS], ids=["ppo", "actions"])
@pytest.mark.parametrize("before", ["2x2", "replicas", "one"])
def test_a_checkpoint_of_four_or_one_fits_one_and_four(four, tmp_path, before, case):
    children, port = four
    if before == "one":
        learner = learner_for(ALONE, None, case)
        update(learner, case, case.updates - 1)
        saver_in(tmp_path).save("rl", case.updates - 1, learner, {})
    else:
        children.run(save_in_a_child, port, before, case, str(tmp_path), True)
        assert_resumed_by_one(tmp_path, case)
    for layout in ("2x2", "fsdp"):
        for rank, found in enumerate(
            children.run(resume_in_a_child, port, layout, case, str(tmp_path))
        ):
            assert_same(last_update_of(learnt_alone(case)), found, f"{layout}, rank {rank}")
