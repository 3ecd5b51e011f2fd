"""Datasets of the Hugging Face hub: a copy on this machine if there is one, else the library.

The order of the search: `$GRAFT_DATA/owner/name`, the hub's own download folder, then the `datasets`
library.
"""

from __future__ import annotations

import os
import socket
import urllib.parse
import urllib.request
from functools import lru_cache
from pathlib import Path
from typing import Any

from graft.data.errors import DataError
from graft.data.tables import RowTable, choose_split, data_files, read_table
from graft.files import user_folder


def locate(hub_id: str) -> Path | None:
    """The folder with a local copy of a dataset, or None.

    locate("axon-rl/GSM-8k") -> $GRAFT_DATA/axon-rl/GSM-8k
    """
    root = os.environ.get("GRAFT_DATA")
    folders = [Path(root).expanduser() / hub_id] if root else []
    folders += _snapshots(hub_id)
    return next((f for f in folders if f.is_dir() and data_files(f)), None)


def read_hub(hub_id: str, split: str | None = None) -> RowTable:
    """The rows of one split of a dataset; the DataError says how to get them."""
    folder = locate(hub_id)
    return read_table(folder, split) if folder else _download(hub_id, split)


def splits_of(hub_id: str) -> list[str]:
    """The splits of a dataset, as `read_hub` would find them."""
    folder = locate(hub_id)
    return list(data_files(folder)) if folder else list(_open(hub_id))


def how_to_get(hub_id: str, why: str) -> str:
    """The two ways to get a dataset that is not on this machine."""
    folder = f"data/{hub_id.split('/')[-1]}"
    return (
        f"the dataset {hub_id} is not on this machine ({why}). Either download it and name the folder:\n"
        f"    hf download --repo-type dataset {hub_id} --local-dir {folder}\n"
        f'    data="{folder}"      # of the environment; in graft eval: --args LABEL.data={folder}\n'
        f"    (LABEL as in --on; under $GRAFT_DATA/{hub_id} it is found without data=)\n"
        "or let the hub library fetch it, with a network:\n"
        '    pip install "graft-rl[hub]"'
    )


def _snapshots(hub_id: str) -> list[Path]:
    """The copies that the hub's own tools downloaded, newest first."""
    folder = cache_folder() / f"datasets--{hub_id.replace('/', '--')}" / "snapshots"
    if not folder.is_dir():
        return []
    return sorted(folder.iterdir(), key=lambda path: path.stat().st_mtime, reverse=True)


def cache_folder() -> Path:
    """The download folder of the hub's own tools."""
    return Path(os.environ.get("HF_HUB_CACHE") or _home() / "hub").expanduser()


def endpoint() -> str:
    """The hub's address."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _home() -> Path:
    return user_folder("HF_HOME", "~/.cache/huggingface")


def _download(hub_id: str, split: str | None) -> RowTable:
    splits = _open(hub_id)
    rows = splits[choose_split(splits, split, f"the dataset {hub_id}")]
    # in Arrow's format: the library would otherwise decode every image
    return RowTable(rows.with_format("arrow")[:], hub_id)


@lru_cache(maxsize=8)
def _open(hub_id: str) -> Any:
    try:
        import datasets
    except ImportError as error:
        raise DataError(how_to_get(hub_id, "and the datasets library is not installed")) from error
    if not _is_worth_trying(hub_id):
        raise DataError(how_to_get(hub_id, "and the hub cannot be reached"))
    try:
        return datasets.load_dataset(hub_id)
    except (OSError, ValueError, RuntimeError) as error:  # no network, no such dataset, ...
        reason = f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
        raise DataError(how_to_get(hub_id, reason)) from error


def _is_worth_trying(hub_id: str) -> bool:
    """False without a network and without the library's own copy: the library would retry for 30 s."""
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or _home() / "datasets").expanduser()
    if urllib.request.getproxies() or (cache / hub_id.replace("/", "___")).is_dir():
        return True
    try:
        socket.getaddrinfo(urllib.parse.urlparse(endpoint()).hostname, 443)
    except OSError:
        return False
    return True
