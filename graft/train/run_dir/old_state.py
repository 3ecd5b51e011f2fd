"""The state of a trainer as older versions of graft wrote it: pickles, which can run code.

`check_pickle` refuses them unless the user says --trust; the next checkpoint has no pickle.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from graft.train.run_dir.optimizer_state import refuse_missing

OLD_METADATA = ".metadata"
"""Of torch's distributed checkpoints."""


def load_old_tensors(tensors: Mapping[str, Tensor], folder: Path, alone: bool) -> None:
    """Fill them from torch's distributed checkpoint."""
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    stored = FileSystemReader(folder).read_metadata().state_dict_metadata
    refuse_missing(tensors, stored, folder)
    wanted = {name: tensor for name, tensor in tensors.items() if name in stored}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(wanted, checkpoint_id=folder, no_dist=alone)


def load_old_small(folder: Path) -> dict[str, Any]:
    """Counts, random states and anchor of `trainer.pt`."""
    import torch

    return torch.load(folder / "trainer.pt", map_location="cpu", weights_only=False)
