"""NaN, inf and negative second moments: not loaded, not saved, in one process and in parts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from graft.models.finite import find_unusable
from graft.models.parallel.shards import local
from graft.train.distributed.process_group import ALONE
from graft.train.errors import RunStopped
from graft.train.run_dir.checkpoint import TRAINER_FOLDER, checkpoints
from graft.train.run_dir.optimizer_state import tensors_of
from tests.train.test_torchrun import LAYOUTS, Case, learner_for, processes_at, update
from tests.train.test_trainer_state import ACTIONS, PPO, saver_in

NAN, INF = float("nan"), float("inf")


def spoil(file: Path, name: str, value: float) -> None:
    """Write `value` into the last number of a tensor of a safetensors file."""
    with safe_open(file, framework="pt") as stored:
        tensors, header = {n: stored.get_tensor(n) for n in stored.keys()}, stored.metadata()  # noqa: SIM118
    tensors[name].view(-1)[-1] = value
    save_file(tensors, file, header)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_number_is_found_wherever_it_is(dtype):
    fine = {"a": torch.ones(3, 3, dtype=dtype), "b": torch.empty(0, dtype=dtype)}
    assert find_unusable({}) == find_unusable(fine) == ""
    for value, word in ((NAN, "NaN"), (INF, "inf"), (-INF, "inf")):
        bad = torch.zeros(5, dtype=dtype)
        bad[3] = value
        assert find_unusable({**fine, "c": bad}) == f"c holds {word}"
    assert find_unusable({"exp_avg/x": -fine["a"]}) == ""
    assert "exp_avg_sq/x holds -1" in find_unusable({"exp_avg_sq/x": -fine["a"]})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("policy/exp_avg/model.layers.0.self_attn.q_proj.weight", NAN),
        ("policy/exp_avg_sq/model.norm.weight", -1e-9),
        ("policy/exp_avg_sq/model.layers.1.mlp.up_proj.weight", INF),
        ("critic/exp_avg_sq/value.weight", -1.0),
        ("critic/weight/model.norm.weight", NAN),
    ],
)
def test_a_state_that_would_spread_is_not_resumed(tmp_path, name, value):
    learner = learner_for(ALONE, None, PPO)
    update(learner, PPO, 1)
    saver_in(tmp_path).save("rl", 1, learner, {})
    (saved,) = checkpoints(tmp_path)
    spoil(saved.path / TRAINER_FOLDER / "part-00000.safetensors", name, value)
    with pytest.raises(RunStopped, match="checkpoint before") as stopped:
        saved.restore(learner_for(ALONE, None, PPO))
    assert name in str(stopped.value) and str(saved.path / TRAINER_FOLDER) in str(stopped.value)


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("part", ["policy", "critic", "moments"])
def test_a_state_that_cannot_be_resumed_is_not_saved(tmp_path, part, later):
    learner = learner_for(ALONE, None, PPO)
    update(learner, PPO, 1)
    saver = saver_in(tmp_path, later=later)
    saver.save("rl", 1, learner, {})
    saver.finish()
    with torch.no_grad():
        if part == "moments":
            tensors_of(learner)["policy/exp_avg_sq/model.norm.weight"][0] = -1.0
        else:
            next(getattr(learner, part).parameters()).view(-1)[0] = NAN
    with pytest.raises(RunStopped, match=r"rl-000002 was not written: .*rl-000001 is intact"):
        saver.save("rl", 2, learner, {})
    assert [one.path.name for one in checkpoints(tmp_path)] == ["rl-000001"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rl-000001"]


def test_weights_and_head_rows_of_a_checkpoint_are_looked_at(tmp_path):
    saver_in(tmp_path).save("rl", 1, learner_for(ALONE, None, ACTIONS), {})
    (saved,) = checkpoints(tmp_path)
    for file, name in (("actions.safetensors", "rows"), ("model.safetensors", "model.norm.weight")):
        spoil(saved.path / file, name, NAN)
        with pytest.raises(ValueError, match=f"{name} holds NaN") as refused:
            learner_for(ALONE, None, ACTIONS, saved)
        assert str(saved.path) in str(refused.value)


def save_a_spoiled_part(port: int, folder: str) -> str:
    """Rank 1 alone holds a negative second moment; what each process says to saving it."""
    processes = processes_at(port)
    learner = learner_for(processes, LAYOUTS["fsdp"], Case())
    if processes.rank == 1:
        moments = learner.optimizer.moments()[learner.optimizer.names[-1]]
        local(moments["exp_avg_sq"]).view(-1)[0] = -1.0
    with pytest.raises(RunStopped) as stopped:
        saver_in(Path(folder), processes).save("rl", 1, learner, {})
    return str(stopped.value)


def resume_a_spoiled_part(port: int, folder: str) -> str:
    (saved,) = checkpoints(Path(folder))
    with pytest.raises(RunStopped) as stopped:
        learner_for(processes_at(port), LAYOUTS["fsdp"], Case(), saved)
    return str(stopped.value)


@pytest.mark.slow
def test_all_processes_stop_when_the_part_of_one_is_spoiled(pair, tmp_path):
    """The last number of a matrix is in the part of rank 1."""
    children, port = pair
    first, second = children.run(save_a_spoiled_part, port, str(tmp_path))
    assert "another process" in first and "holds -1" in second and not checkpoints(tmp_path)
    saver_in(tmp_path).save("rl", 1, learner_for(ALONE, None, Case()), {})
    (saved,) = checkpoints(tmp_path)
    name = "policy/exp_avg/model.layers.0.mlp.up_proj.weight"
    spoil(saved.path / TRAINER_FOLDER / "part-00000.safetensors", name, NAN)
    first, second = children.run(resume_a_spoiled_part, port, str(tmp_path))
    assert "another process" in first and f"{name} holds NaN" in second
