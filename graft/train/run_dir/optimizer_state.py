"""The state of AdamW in torch's distributed checkpoints, under names that do not depend on the layout.

One process holds q|k|v as one matrix, four processes hold quarters of q, k and v. In a checkpoint each
tensor has the name of its weight in a Hugging Face model, and its whole size.

    policy/exp_avg/model.layers.0.self_attn.q_proj.weight     [1024, 1024]

A resuming process reads the parts that it needs from the files that hold them: a run saved by four
processes can resume in one, and the other way round.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from graft.models.critic import Critic
from graft.models.decoder import Decoder
from graft.models.io.tensor_names import whole_views
from graft.models.parallel.shards import as_sharded, is_sharded
from graft.train.learner import Learner
from graft.train.optimizer import Optimizer
from graft.train.run_dir.folder import RunStopped


def tensors_of(learner: Learner) -> dict[str, Tensor]:
    """All tensors of a checkpoint beside the policy's weights; writing into them restores the learner."""
    module = learner.lora or learner.rows or learner.policy
    found = _moments("policy", learner.optimizer, module)
    if learner.critic is not None and learner.critic_optimizer is not None:
        found |= _moments("critic", learner.critic_optimizer, learner.critic)
        weights = {name: weight.detach() for name, weight in learner.critic.named_parameters()}
        named = layout_free(learner.critic, weights)
        found |= {f"critic/weight/{name}": tensor for name, tensor in named.items()}
    return found


def _moments(owner: str, optimizer: Optimizer, module: nn.Module) -> dict[str, Tensor]:
    parameters = dict(module.named_parameters())
    by_kind: dict[str, dict[str, Tensor]] = {}
    for name, kinds in optimizer.moments().items():
        parameter = parameters[name]
        for kind, tensor in kinds.items():
            whole = as_sharded(tensor, parameter) if is_sharded(parameter) else tensor
            by_kind.setdefault(kind, {})[name] = whole
    return {
        f"{owner}/{kind}/{name}": tensor
        for kind, tensors in by_kind.items()
        for name, tensor in layout_free(module, tensors).items()
    }


def layout_free(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by parameter name -> the same tensors or views of them, under names of any layout."""
    if hasattr(module, "hf_parameters"):  # split: each parameter is a tensor of a checkpoint
        names = {id(p): name for name, p in cast(Any, module).hf_parameters().items()}
        owners = dict(module.named_parameters())
        return {names[id(owners[name])]: tensor for name, tensor in tensors.items()}
    if isinstance(module, Critic):
        body = {n.removeprefix("body."): t for n, t in tensors.items() if n.startswith("body.")}
        rest = {name: tensor for name, tensor in tensors.items() if not name.startswith("body.")}
        return layout_free(module.body, body) | rest
    if isinstance(module, Decoder):
        bias = {name: tensor for name, tensor in tensors.items() if name == "action_bias"}
        return whole_views(module.shape, tensors) | bias
    return dict(tensors)


def save_tensors(
    tensors: Mapping[str, Tensor], folder: Path, *, alone: bool, group: Any = None
) -> None:
    """Write them; with several processes, each writes its part.

    A collective operation: on a thread it needs a group that nothing else uses.
    """
    from torch.distributed.checkpoint.state_dict_saver import save

    with _one_cause(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        save(dict(tensors), checkpoint_id=folder, process_group=group, no_dist=alone)


@contextmanager
def _one_cause() -> Iterator[None]:
    """Raise the first failure of any rank as an ordinary exception.

    torch's own CheckpointException is not caught by `except Exception`.
    """
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        text = f"rank {rank}: {cause or type(cause).__name__}"
        # how torch's writer reports a full disk
        is_disk = isinstance(cause, OSError) or "inline_container" in str(cause)
        raise (OSError if is_disk else RuntimeError)(text) from cause


def load_tensors(tensors: Mapping[str, Tensor], folder: Path, *, alone: bool) -> None:
    """Fill them from a checkpoint of any layout; fp32 masters that it does not have are left unchanged."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    wanted = {name: tensor for name, tensor in tensors.items() if name in stored}
    missing = [name for name in tensors if name not in stored and "/master/" not in name]
    if missing:
        raise RunStopped(
            f"{folder} lacks {missing[0]} and {len(missing) - 1} more of what the optimizer needs: it "
            "was written for another model or algorithm. Give this run another run.name, or remove "
            "the checkpoint"
        )
    with _one_cause(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(dict(wanted), checkpoint_id=folder, no_dist=alone)


def copied(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory, which are written while training continues."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}
