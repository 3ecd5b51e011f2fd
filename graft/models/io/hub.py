"""Models of the Hugging Face hub by name, in the hub's own cache.

    Qwen/Qwen3-0.6B         the newest commit of its main branch
    Qwen/Qwen3-0.6B@v1.0    a branch, tag or commit

A folder or file of that name on this machine wins. Only files that a model is read from are downloaded,
into HF_HOME. With HF_HUB_OFFLINE=1, or if the hub cannot be reached, a complete copy there is used.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from graft.data.hub import cache_folder, endpoint
from graft.models.io.hub_names import split_name
from graft.models.io.load import INDEX, WEIGHTS, read_json
from graft.models.io.tensors import first_line

READ = re.compile(
    r"[^/]+\.(json|jinja|model|tiktoken)|(merges|vocab)\.txt|README\.md"
    r"|(actions|adapter_model)\.safetensors|additional_chat_templates/[^/]+\.jinja"
)
"""Files of a repository that are read beside the weights."""
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")


class HubError(RuntimeError):
    """A download or upload failed; the message says why and what to do."""


def find_model(path: str, weights: bool = True) -> Path:
    """The folder or file at `path`; for a name on the hub its cached copy, downloaded if necessary.

    weights   False: only configs and tokenizer
    """
    named = None if Path(path).exists() else split_name(path)
    return Path(path) if named is None else _copy_of(*named, weights)


def origin_of(folder: Path) -> tuple[str, str] | None:
    """(name, commit) of a model in the hub's cache, None of any other folder.

    >>> origin_of(Path("/x/hub/models--Qwen--Qwen3-0.6B/snapshots/c1899de2"))
    ('Qwen/Qwen3-0.6B', 'c1899de2')
    """
    parts = folder.absolute().parts
    if len(parts) < 3 or parts[-2] != "snapshots" or not parts[-3].startswith("models--"):
        return None
    owner, _, name = parts[-3].removeprefix("models--").partition("--")
    return f"{owner}/{name}", parts[-1]


@lru_cache(maxsize=64)  # the same commit throughout a run
def _copy_of(name: str, revision: str, weights: bool) -> Path:
    unreachable: Exception | None = None
    if not _is_offline():
        try:
            return _download(name, revision, weights)
        except HubError:
            raise
        except Exception as error:
            if not _is_unreachable(error):
                raise _explained(error, name, revision) from error
            unreachable = error
    folder = cached_copy(name, revision)
    missing = ["it"] if folder is None else _missing(folder, weights)
    if folder is None or missing:
        raise HubError(_not_here(name, revision, missing, unreachable)) from unreachable
    if unreachable is not None:
        seen = f"the hub at {endpoint()} cannot be reached"
        print(
            f"{seen}; using the copy of {name} in the cache, commit {folder.name}", file=sys.stderr
        )
    return folder


def _download(name: str, revision: str, weights: bool) -> Path:
    """What the cache lacks of a model; progress is shown by the library."""
    from huggingface_hub import HfApi, snapshot_download

    info = HfApi(endpoint=endpoint()).model_info(name, revision=revision, timeout=20)
    wanted = _wanted([file.rfilename for file in info.siblings or ()], name, weights)
    cached = _snapshots(name) / str(info.sha)
    if missing := sum(not (cached / file).exists() for file in wanted):
        what = f"{missing} files of {name} ({revision}, commit {info.sha})"
        print(f"downloading {what} to {cached}", file=sys.stderr)
    # by the name of the branch, which the cache then knows when there is no network
    found = snapshot_download(
        name,
        revision=revision,
        allow_patterns=wanted,
        cache_dir=cache_folder(),
        endpoint=endpoint(),
    )
    return Path(found)


def _wanted(files: Sequence[str], name: str, weights: bool) -> list[str]:
    """Those that a model is read from, of all files of a repository."""
    found = [file for file in files if READ.fullmatch(file)]
    if "config.json" not in files and "adapter_config.json" not in files:
        hint = ""
        if gguf := next((file for file in files if file.endswith(".gguf")), ""):
            hint = f"; for a GGUF file: hf download {name} {gguf} --local-dir models, then models/{gguf}"
        raise HubError(f"'{name}' has no config.json, so it is no model that can be read{hint}")
    if not weights:
        return found
    stored = [WEIGHTS] if WEIGHTS in files else [file for file in files if SHARD.fullmatch(file)]
    if not stored and "adapter_model.safetensors" not in files:
        raise HubError(
            f"'{name}' has no model.safetensors: pickles (pytorch_model.bin) may run code when they are "
            "read, and other formats are not read. Take a model with safetensors, or convert it once "
            "with transformers, if you trust it"
        )
    return [*found, *stored]


def cached_copy(name: str, revision: str) -> Path | None:
    """The snapshot of a branch, tag or commit in the cache."""
    ref = _snapshots(name).parent / "refs" / revision
    commit = ref.read_text().strip() if ref.is_file() else revision
    folder = _snapshots(name) / commit
    return folder if folder.is_dir() else None


def _snapshots(name: str) -> Path:
    return cache_folder() / f"models--{name.replace('/', '--')}" / "snapshots"


def _missing(folder: Path, weights: bool) -> list[str]:
    """Files without which a snapshot is not a whole model, as after an interrupted download."""
    needed = [] if (folder / "adapter_config.json").exists() else ["config.json"]
    if weights and (folder / INDEX).exists() and not (folder / WEIGHTS).exists():
        needed += sorted(set(read_json(folder / INDEX).get("weight_map", {}).values()))
    elif weights and not (folder / "adapter_model.safetensors").exists():
        needed.append(WEIGHTS)
    return [file for file in needed if not (folder / file).exists()]


LOGIN = "hf auth login (or HF_TOKEN=...)"
CHECK_NETWORK = "check the network, its proxy and HF_ENDPOINT"


def check_push(name: str) -> None:
    """Refuse what cannot be uploaded, before anything is written for it."""
    from huggingface_hub import get_token

    if split_name(name) is None or "@" in name:
        raise HubError(f"--push {name!r}: a name on the hub is OWNER/NAME, such as me/my-model")
    if get_token() is None:
        raise HubError(f"--push {name} needs a login with the right to write: {LOGIN}")


def push_folder(folder: Path, name: str, *, public: bool) -> str:
    """Upload a folder to a repository of the hub, created if necessary; returns its address."""
    from huggingface_hub import HfApi

    check_push(name)
    api = HfApi(endpoint=endpoint())
    try:
        api.create_repo(name, private=not public, exist_ok=True)
        if not public and not api.model_info(name).private:
            raise HubError(
                f"'{name}' is a public repository on the hub already; give --public to upload "
                "to it, or another name"
            )
        api.upload_folder(
            repo_id=name, folder_path=folder, commit_message="Upload a model with graft export"
        )
    except HubError:
        raise
    except Exception as error:
        raise _explained(error, name, is_push=True) from error
    return f"{endpoint()}/{name}"


def _explained(
    error: Exception, name: str, revision: str = "main", *, is_push: bool = False
) -> Exception:
    """What is missing: the name, a login, a permission or a network; other errors stay as they are."""
    from huggingface_hub import errors, get_token

    status = _status(error)
    if isinstance(error, errors.GatedRepoError):
        text = (
            f"'{name}' is gated: accept its terms at {endpoint()}/{name}, then log in as the same user: "
            f"{LOGIN}"
        )
    elif status == 403 or (is_push and status in (401, 404)):
        text = (
            f"your login may not do this with '{name}' ({first_line(error)}); use a token that has the "
            f"right to: {LOGIN}"
        )
    elif isinstance(error, errors.RevisionNotFoundError):
        text = (
            f"'{name}' has no revision {revision!r}; its branches, tags and commits are listed at "
            f"{endpoint()}/{name}/tree/main"
        )
    elif isinstance(error, errors.RepositoryNotFoundError) or status in (401, 404):
        # without a login the hub gives the same answer for private and missing repositories
        seen = (
            "no model of this name that your login may see: check the spelling, or ask its owner for "
            "access; a token may have expired"
            if get_token()
            else "no public model of this name: check the spelling. A private one needs a login"
        )
        text = f"'{name}' is no folder or file here, and the hub has {seen}: {LOGIN}"
    elif _is_unreachable(error) or isinstance(error, OSError) or status:
        text = (
            f"the hub at {endpoint()} did not answer for '{name}' ({type(error).__name__}: "
            f"{first_line(error)}); {CHECK_NETWORK}, and run the command again: what has been "
            "transferred is kept"
        )
    else:
        return error
    return HubError(text)


def _status(error: Exception) -> int:
    return getattr(getattr(error, "response", None), "status_code", 0)


def _is_unreachable(error: Exception) -> bool:
    """Whether the hub did not answer, or answered with a server error."""
    library = type(error).__module__.partition(".")[0]
    is_network = isinstance(error, ConnectionError) or library.startswith("http")
    return is_network or _status(error) >= 500


def _not_here(
    name: str, revision: str, missing: Sequence[str], unreachable: Exception | None
) -> str:
    reason, todo = "HF_HUB_OFFLINE is set", "unset it to download the model"
    if unreachable is not None:
        seen = f"{type(unreachable).__name__}: {first_line(unreachable)}"
        reason, todo = f"the hub at {endpoint()} cannot be reached ({seen})", CHECK_NETWORK
    return (
        f"'{name}' is no folder or file here, {reason}, and the cache in {cache_folder()} lacks "
        f"{', '.join(missing)} (revision {revision}); {todo}, or download it where there is a network (hf "
        f"download {name} --local-dir FOLDER) and give that folder"
    )


def _is_offline() -> bool:
    named = (os.environ.get("HF_HUB_OFFLINE"), os.environ.get("TRANSFORMERS_OFFLINE"))
    return any((value or "").upper() in ("1", "ON", "YES", "TRUE") for value in named)
