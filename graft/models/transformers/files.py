"""A model of any family from a Hugging Face folder by transformers' own classes, and back into one.

transformers stores some models otherwise than it computes them: a folder has a matrix per expert, the
module one tensor of all experts of a layer. What leaves here has the folder's names and sizes again,
for that is what engines read.

    module   layers.0.mlp.experts.down_proj [8, D, F]
    folder   layers.0.mlp.experts.0.down_proj.weight [D, F] ... layers.0.mlp.experts.7.down_proj.weight

Code that lies in a model's folder is never run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from graft.files import new_file, sync, write_json
from graft.models.io.hf_config import refuse_looking_ahead, refuse_quantised
from graft.models.io.load import INDEX, WEIGHTS, ModelFileError, read_config, read_json
from graft.models.io.save import NOT_CARRIED, SHARD_BYTES, split_shards
from graft.models.shape import UnsupportedModel

GENERATION = "generation_config.json"


@dataclass(slots=True)
class OpenedModel:
    """A module of transformers and what its folder said."""

    module: Any
    configs: dict[str, dict[str, Any]]
    """config.json and generation_config.json as they were, to be written again."""
    notes: list[str] = field(default_factory=list[str])


def open_foreign(
    folder: str | os.PathLike[str], dtype: torch.dtype, device: torch.device | str
) -> OpenedModel:
    """The causal language model in `folder`, in evaluation mode, with every kind of noise off."""
    from transformers import AutoModelForCausalLM

    folder = Path(folder)
    if not folder.is_dir():
        raise ModelFileError(
            f"no model at '{folder}': transformers' own classes read a folder with config.json and "
            "safetensors"
        )
    configs = read_configs(folder)
    config = _config_of(folder, configs["config.json"])
    attention, notes = _attention_of(config)
    still(config)
    with _no_progress_bars():
        try:
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                folder,
                config=config,
                dtype=dtype,
                attn_implementation=attention,
                trust_remote_code=False,
                local_files_only=True,
                output_loading_info=True,
            )
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise ModelFileError(
                f"transformers cannot load '{folder}': {_first_line(error)}"
            ) from error
    module, report = loaded
    notes += _check_report(folder, report)
    return OpenedModel(module.eval().to(device), configs, notes)


def read_configs(folder: Path) -> dict[str, dict[str, Any]]:
    """What a folder says about its model: config.json and, if there is one, how to generate."""
    configs = {"config.json": read_config(folder)}
    if (folder / GENERATION).exists():
        configs[GENERATION] = read_json(folder / GENERATION)
    return configs


def _config_of(folder: Path, raw: Mapping[str, Any]) -> Any:
    """transformers' config object of a model that we can train."""
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    file, family = folder / "config.json", raw.get("model_type", "")
    try:
        refuse_quantised(raw)
        refuse_looking_ahead(raw)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"'{file}': {error}") from error
    if family not in transformers.CONFIG_MAPPING:
        own = (
            " brings code of its own (auto_map), which graft never runs, and"
            if raw.get("auto_map")
            else ""
        )
        raise UnsupportedModel(
            f"'{file}': the model{own} has model_type={family!r}, which transformers "
            f"{transformers.__version__} does not know; a newer transformers may"
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each family checks its entries by exceptions of its own
        raise ModelFileError(f"'{file}' is not accepted: {_first_line(error)}") from error
    if config.is_encoder_decoder:
        raise UnsupportedModel(
            f"'{file}': {family} has an encoder beside its decoder; only models that read and write "
            "one list of tokens can be trained"
        )
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(
            f"'{file}': transformers has no causal language model for {family}; give a model that "
            "AutoModelForCausalLM opens"
        )
    return config


def _attention_of(config: Any) -> tuple[str, list[str]]:
    """Which attention to load the model with, and what the user should know of it."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    family = config.model_type
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        why = "caps its attention scores, which torch's fused attention would leave out"
    elif not getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_sdpa", False):
        why = "does not take torch's fused attention"
    else:
        return "sdpa", []
    # a family without attention has nothing to tell of
    if not getattr(config.get_text_config(), "num_attention_heads", None):
        return "eager", []
    return "eager", [
        f"{family} {why}: each layer holds scores of every token with every other, so memory grows "
        "with the square of the tokens that are packed together (train.tokens_per_micro)"
    ]


def still(config: Any) -> None:
    """Set every dropout and every jitter of a config, and of configs inside it, to 0.

    Log-probs are compared with those a token was sampled with, and noise in them is noise in the ratio.
    """
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            still(value)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)
        elif name in ("use_cache", "output_router_logits") and value:
            setattr(config, name, False)


def _check_report(folder: Path, report: Mapping[str, Any]) -> list[str]:
    """Refuse what transformers would have filled with random numbers; name what it left out."""
    bad = sorted(report["missing_keys"]) + sorted(str(key[0]) for key in report["mismatched_keys"])
    if bad:
        raise ModelFileError(
            f"'{folder}' lacks weights of its config, or has them in other sizes: {_some(bad)}. Use "
            "the config and weights of one and the same model"
        )
    unused = sorted(report["unexpected_keys"])
    if not unused:
        return []
    return [
        f"{len(unused)} tensors of '{folder}' belong to no part that is computed and are not saved "
        f"again: {_some(unused)}"
    ]


def folder_names(module: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of the module under the names, and in the pieces, of its folder.

    The second name of a tied tensor is left out, as transformers does.
    """
    from transformers.core_model_loading import revert_weight_conversion

    tied = {name for name, kept in module.all_tied_weights_keys.items() if kept in state}
    dropped = tied | set(module._keys_to_ignore_on_save or ())
    own = {name: tensor.detach() for name, tensor in state.items() if name not in dropped}
    return dict(revert_weight_conversion(module, own))


def write_folder(
    tensors: Mapping[str, Tensor],
    configs: Mapping[str, Mapping[str, Any]],
    folder: Path,
    dtype: torch.dtype,
    as_they_are: set[str],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Weights in `dtype`, but for those `as_they_are`, and configs; each file is whole or absent."""
    folder.mkdir(parents=True, exist_ok=True)

    def kind(name: str) -> torch.dtype:
        is_kept = name in as_they_are or not tensors[name].is_floating_point()
        return tensors[name].dtype if is_kept else dtype

    sizes = {name: tensor.numel() * kind(name).itemsize for name, tensor in tensors.items()}
    shards = split_shards(sizes, shard_bytes)
    count = len(shards)
    files = {
        WEIGHTS if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors": names
        for number, names in enumerate(shards, start=1)
    }
    for file, names in files.items():
        shard = {name: tensors[name].to("cpu", kind(name)).contiguous() for name in names}
        with new_file(folder / file) as aside:
            save_file(shard, aside, {"format": "pt"})
    if count > 1:
        where = {name: file for file, names in files.items() for name in names}
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": where}
        write_json(folder / INDEX, index)
    written = {*files, INDEX} if count > 1 else set(files)
    for stale in [*folder.glob("model*.safetensors"), folder / INDEX]:
        if stale.name not in written:
            stale.unlink(missing_ok=True)
    for name, content in configs.items():
        write_json(folder / name, content)
    sync(folder)


def config_to_write(
    config: Mapping[str, Any], architecture: str, dtype: torch.dtype
) -> dict[str, Any]:
    """The source's config.json with what is true of the new weights."""
    kind = str(dtype).removeprefix("torch.")
    kept = {name: value for name, value in config.items() if name not in NOT_CARRIED}
    for name, part in kept.items():  # the text part of a larger model names its own dtype
        if isinstance(part, Mapping) and ("dtype" in part or "torch_dtype" in part):
            kept[name] = {**part, **dict.fromkeys({"dtype", "torch_dtype"} & set(part), kind)}
    return {**kept, "architectures": [architecture], "dtype": kind, "torch_dtype": kind}


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    was_on = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_on:
            logging.enable_progress_bar()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _some(names: list[str], most: int = 5) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
