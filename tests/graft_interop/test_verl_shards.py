"""verl's FSDP shards: made by real processes here, joined to the bit, and never trusted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from graft.models.decoder import Decoder
from graft.models.io.load import load_model
from graft.models.io.save import save_model
from graft.models.io.tensor_names import hf_names
from graft.models.io.tensors import ModelFileError
from graft.models.shape import ModelShape, UnsupportedModel
from graft_interop.verl_shards import (
    ShardRecord,
    mesh_of,
    open_shards,
    plain_name,
    read_shard,
)
from tests.processes import free_port

SHAPE = ModelShape(
    family="qwen2",
    vocab_size=11,
    width=8,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=4,
    ff=10,
    tied=False,
    qk_norm=False,
    qkv_bias=True,
)
KINDS = ("flat", "hybrid", "columns", "rows", "four")
LORA = "model.layers.0.mlp.up_proj"

WORKER = '''
"""One of several processes that shard a model as FSDP2 does, and save as verl does."""
import os, sys
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

model, flat, hybrid, columns, rows, four = sys.argv[1:]
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo")
tensors = load_file(model + "/model.safetensors")

class Holder(nn.Module):  # parameters under Hugging Face's names, dots as modules
    pass

def holder(tensors):
    root = Holder()
    for name, tensor in tensors.items():
        at = root
        *path, last = name.split(".")
        for part in path:
            if part not in dict(at.named_children()):
                at.add_module(part, Holder())
            at = at.get_submodule(part)
        at.register_parameter(last, nn.Parameter(tensor.clone()))
    return root

def save(state, folder):
    os.makedirs(folder, exist_ok=True)
    torch.save(state, f"{folder}/model_world_size_{world}_rank_{rank}.pt")

whole = holder(tensors)
mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("fsdp",))
for layer in whole.get_submodule("model.layers").children():
    fully_shard(layer, mesh=mesh)
fully_shard(whole, mesh=mesh)
save(whole.state_dict(), flat)

# 2 copies of 1 shard each, and columns instead of rows
grid = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("ddp", "fsdp"))
placed = [Replicate(), Shard(0)]
save({n: distribute_tensor(t, grid, placed) for n, t in tensors.items()}, hybrid)
save({n: distribute_tensor(t, mesh, [Shard(t.ndim - 1)]) for n, t in tensors.items()}, columns)

# no DTensor: rows as torch.chunk cuts them, norms whole on every rank
def part(name, tensor):
    return tensor if "norm" in name else tensor.tensor_split(world)[rank].clone()
save({name: part(name, tensor) for name, tensor in tensors.items()}, rows)
dist.destroy_process_group()

# four ranks as 2 copies of 2 shards, cut by hand: a group that only pretends to communicate
import torch.testing._internal.distributed.fake_pg
world = 4
for rank in range(world) if rank == 0 else ():
    dist.init_process_group("fake", rank=rank, world_size=world, store=dist.HashStore())
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    cut = {n: t.tensor_split(2)[rank % 2].clone() for n, t in tensors.items()}
    whole = {n: dict(shape=t.shape, stride=t.stride()) for n, t in tensors.items()}
    save({n: DTensor.from_local(t, grid, placed, run_check=False, **whole[n])
          for n, t in cut.items()}, four)
    dist.destroy_process_group()
'''


def random_model(shape: ModelShape, folder: Path) -> Decoder:
    decoder = Decoder(shape)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(generator=generator)
    save_model(decoder, folder, special={"eos_token_id": 1})
    return decoder


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """base/, and by two processes: flat/ (FSDP2), hybrid/ (2 copies), columns/, rows/ (no DTensor),
    and four/ (2 copies of 2 shards)."""
    root = tmp_path_factory.mktemp("verl")
    random_model(SHAPE, root / "base")
    (root / "worker.py").write_text(WORKER)
    settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    folders = [str(root / name) for name in ("base", *KINDS)]
    workers = [
        subprocess.Popen(
            [sys.executable, str(root / "worker.py"), *folders],
            env={**os.environ, **settings, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    for worker in workers:
        _, output = worker.communicate(timeout=100)
        assert worker.returncode == 0, output
    return root


def tensors_of(folder: Path, base: Path | None) -> dict[str, Tensor]:
    with open_shards(folder, base) as stored:
        stored.check()
        return {name: stored.read(name).clone() for name in stored.sizes}


def assert_same(found: dict[str, Tensor], decoder: Decoder) -> None:
    wanted = hf_names(decoder)
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name].float(), tensor), name


@pytest.mark.parametrize("kind", KINDS)
def test_shards_of_two_real_processes_are_joined_to_the_bit(made: Path, kind: str) -> None:
    assert_same(tensors_of(made / kind, made / "base"), load_model(made / "base"))


def test_each_rank_truly_held_a_part(made: Path) -> None:
    first = read_shard(made / "flat" / "model_world_size_2_rank_0.pt")["lm_head.weight"]
    second = read_shard(made / "flat" / "model_world_size_2_rank_1.pt")["lm_head.weight"]
    assert first.shape == second.shape == (11, 8)
    assert (first._local_tensor.shape, second._local_tensor.shape) == ((6, 8), (5, 8))


def test_reading_shards_leaves_torch_as_strict_as_it_was(made: Path) -> None:
    before = set(torch.serialization.get_safe_globals())
    read_shard(made / "flat" / "model_world_size_2_rank_0.pt")
    assert set(torch.serialization.get_safe_globals()) == before


def test_the_folder_that_verl_writes_beside_the_shards_gives_the_config(
    made: Path, tmp_path: Path
) -> None:
    folder = copied(made / "flat", tmp_path / "actor")
    with pytest.raises(ModelFileError, match="pass --base, the Hugging Face folder"):
        tensors_of(folder, None)
    (folder / "huggingface").mkdir()
    text = (made / "base" / "config.json").read_text()
    (folder / "huggingface" / "config.json").write_text(text)
    assert_same(tensors_of(folder, None), load_model(made / "base"))


def copied(folder: Path, to: Path) -> Path:
    to.mkdir(parents=True)
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    return to


def saved(folder: Path, *ranks: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for rank, state in enumerate(ranks):
        torch.save(state, folder / f"model_world_size_{len(ranks)}_rank_{rank}.pt")
    return folder


def record(**state: Any) -> ShardRecord:
    made = ShardRecord()
    made.__setstate__(state)
    return made


def test_meshes_are_read_as_every_torch_has_stored_them() -> None:
    """4 ranks as 2 copies of 2: an array, one layout for all axes, a layout for each."""
    ranks = torch.tensor([0, 1, 2, 3])
    layout = record(shape=(2, 2), stride=(2, 1))
    layouts = record(axes=(record(shape=(2,), stride=(2,)), record(shape=(2,), stride=(1,))))
    for mesh in (
        record(mesh=ranks.view(2, 2)),
        record(_rank_map=ranks, _layout=layout),
        record(_rank_map=ranks, _layout=layouts),
    ):
        found = mesh_of(mesh)
        assert found is not None and found.tolist() == [[0, 1], [2, 3]]
    assert mesh_of(record(device_type="cuda")) is None and mesh_of(None) is None


# LoRA


def lora_state(decoder: Decoder, rank: int = 2) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """A state dict as PEFT names it, with adapters on one matrix; and their A and B."""
    generator = torch.Generator().manual_seed(9)
    down = torch.randn(rank, 8, generator=generator)
    up = torch.randn(10, rank, generator=generator)
    state = {
        f"base_model.model.{name.replace(LORA + '.', LORA + '.base_layer.')}": tensor
        for name, tensor in hf_names(decoder).items()
    }
    state[f"base_model.model.{LORA}.lora_A.default.weight"] = down
    state[f"base_model.model.{LORA}.lora_B.default.weight"] = up
    return state, down, up


def test_adapters_in_the_shards_are_merged_and_never_dropped(tmp_path: Path) -> None:
    decoder = random_model(SHAPE, tmp_path / "base")
    state, down, up = lora_state(decoder)
    folder = saved(tmp_path / "actor", state)
    with pytest.raises(ModelFileError, match=r"trained with LoRA \(2 adapter tensors\).*its alpha"):
        tensors_of(folder, tmp_path / "base")
    (folder / "lora_train_meta.json").write_text(json.dumps({"r": 2, "lora_alpha": 6}))
    found = tensors_of(folder, tmp_path / "base")
    wanted = hf_names(decoder)
    torch.testing.assert_close(
        found[f"{LORA}.weight"], wanted[f"{LORA}.weight"] + 3.0 * up @ down, atol=1e-5, rtol=1e-5
    )
    assert torch.equal(found["lm_head.weight"], wanted["lm_head.weight"])
    assert found.keys() == wanted.keys()
    (folder / "lora_train_meta.json").write_text(json.dumps({"r": 4, "lora_alpha": 6}))
    with pytest.raises(ModelFileError, match=r"lora_A.* is \[2, 8\], and the config says r=4"):
        tensors_of(folder, tmp_path / "base")


def test_wrappers_names_are_peeled_off() -> None:
    assert plain_name("_fsdp_wrapped_module.model.norm.weight") == "model.norm.weight"
    assert plain_name("_orig_mod.lm_head.weight") == "lm_head.weight"


# what is refused


class Malicious:
    """Reading it would make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.path}",)


def test_a_malicious_pickle_is_refused_and_does_nothing(tmp_path: Path) -> None:
    random_model(SHAPE, tmp_path / "base")
    folder = saved(tmp_path / "actor", {"lm_head.weight": Malicious(tmp_path / "owned")})
    with pytest.raises(
        ModelFileError, match=r"is refused: .*posix\.system.* Nothing of it was run"
    ):
        tensors_of(folder, tmp_path / "base")
    assert not (tmp_path / "owned").exists()


def test_code_behind_the_name_of_torch_distributed_is_not_run_either(tmp_path: Path) -> None:
    """A name there becomes a record: it is called with what the pickle gives, and only keeps it."""
    random_model(SHAPE, tmp_path / "base")
    folder = saved(tmp_path / "actor", {"lm_head.weight": Launcher()})
    with pytest.raises(ModelFileError, match=r"lm_head\.weight is a elastic_launch, not a tensor"):
        tensors_of(folder, tmp_path / "base")


class Launcher:
    def __reduce__(self) -> tuple[Any, ...]:
        from torch.distributed.launcher.api import elastic_launch

        return elastic_launch, ("config", "/bin/true")


def test_missing_cut_and_mixed_shards_are_named(made: Path, tmp_path: Path) -> None:
    base = made / "base"
    folder = copied(made / "flat", tmp_path / "actor")
    second = folder / "model_world_size_2_rank_1.pt"
    whole = second.read_bytes()
    second.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelFileError, match=r"rank_1\.pt' \(\d+ bytes\) is not a whole shard"):
        tensors_of(folder, base)
    second.unlink()
    with pytest.raises(
        ModelFileError, match=r"lacks 1 of its 2 shards \(model_world_size_2_rank_1"
    ):
        tensors_of(folder, base)
    second.write_bytes(whole)
    (folder / "model_world_size_4_rank_0.pt").write_bytes(whole)
    with pytest.raises(ModelFileError, match="shards of 2 and 4 processes"):
        tensors_of(folder, base)
    with pytest.raises(
        ModelFileError, match=r"no model_world_size_N_rank_R\.pt.*did you mean '.*actor'"
    ):
        tensors_of(tmp_path, base)
    with pytest.raises(ModelFileError, match="there is no such folder"):
        tensors_of(tmp_path / "nowhere", base)


def test_shards_that_are_not_the_bases_are_named(tmp_path: Path) -> None:
    decoder = random_model(SHAPE, tmp_path / "base")
    random_model(replace(SHAPE, layers=3), tmp_path / "deeper")
    state = dict(hf_names(decoder))
    folder = saved(tmp_path / "actor", state)
    with pytest.raises(ModelFileError, match=r"missing: model\.layers\.2\."):
        tensors_of(folder, tmp_path / "deeper")
    saved(folder, {**state, "model.norm.weight": torch.ones(9)})
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight \[9\], config says \[8\]"):
        tensors_of(folder, tmp_path / "base")
    critic = {name: tensor for name, tensor in state.items() if name != "lm_head.weight"}
    saved(folder, {**critic, "score.weight": torch.ones(1, 8)})
    with pytest.raises(UnsupportedModel, match="holds a critic"):
        tensors_of(folder, tmp_path / "base")
    halves = [dict(state), {name: t for name, t in state.items() if "norm" not in name}]
    with pytest.raises(ModelFileError, match=r"shards .* hold different tensors"):
        tensors_of(saved(tmp_path / "mixed", *halves), tmp_path / "base")
    other = {**state, "model.norm.weight": state["model.norm.weight"] + 1}
    with pytest.raises(
        ModelFileError, match=r"model\.norm\.weight.* whole in every shard, but not"
    ):
        tensors_of(saved(tmp_path / "drifted", state, other), tmp_path / "base")


def test_a_tied_head_that_was_saved_twice_is_read_once(tmp_path: Path) -> None:
    decoder = random_model(replace(SHAPE, tied=True), tmp_path / "base")
    state = dict(hf_names(decoder))
    folder = saved(
        tmp_path / "actor", {**state, "lm_head.weight": state["model.embed_tokens.weight"]}
    )
    assert_same(tensors_of(folder, tmp_path / "base"), decoder)
    saved(folder, {**state, "lm_head.weight": torch.zeros(11, 8)})
    with pytest.raises(ModelFileError, match=r"lm_head.weight differs from model"):
        tensors_of(folder, tmp_path / "base")
