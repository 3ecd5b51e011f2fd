"""Loads a Hugging Face folder of any family with transformers' classes, and writes one.

transformers stores some models in another form than it computes them: a folder has a matrix per expert,
the module one tensor of all experts of a layer. Exported weights have the folder's names and sizes,
because engines read those.

    module   layers.0.mlp.experts.down_proj [8, D, F]
    folder   layers.0.mlp.experts.0.down_proj.weight [D, F] ... layers.0.mlp.experts.7.down_proj.weight

Python code in a model's folder is never run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graft.files import sync, write_json
from graft.models.families.entries import refuse_looking_ahead, refuse_quantised
from graft.models.io.load import ModelFileError, read_config, read_json
from graft.models.io.save import NOT_CARRIED, SHARD_BYTES, write_shards
from graft.models.io.tensors import first_line, some
from graft.models.shape import UnsupportedModel

GENERATION = "generation_config.json"


@dataclass(slots=True)
class PretrainedModule:
    """A transformers module and the configs of its folder."""

    module: Any
    configs: dict[str, dict[str, Any]]
    """config.json and generation_config.json as read, to be written again."""
    notes: list[str] = field(default_factory=list[str])


def load_pretrained(
    folder: str | os.PathLike[str], dtype: torch.dtype, device: torch.device | str
) -> PretrainedModule:
    """The causal language model in `folder`, in evaluation mode, with dropout and jitter off."""
    from transformers import AutoModelForCausalLM

    folder = Path(folder)
    if not folder.is_dir():
        raise ModelFileError(
            f"no model at '{folder}': transformers reads a folder with config.json and safetensors"
        )
    configs = read_configs(folder)
    config = _config_of(folder, configs["config.json"])
    attention, notes = _attention_of(config)
    disable_noise(config)
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
                f"transformers cannot load '{folder}': {first_line(error)}"
            ) from error
    module, report = loaded
    notes += _check_report(folder, report)
    return PretrainedModule(module.eval().to(device), configs, notes)


def read_configs(folder: Path) -> dict[str, dict[str, Any]]:
    """config.json and, if there is one, generation_config.json."""
    configs = {"config.json": read_config(folder)}
    if (folder / GENERATION).exists():
        configs[GENERATION] = read_json(folder / GENERATION)
    return configs


def _config_of(folder: Path, raw: Mapping[str, Any]) -> Any:
    """transformers' config object; a model that cannot be trained is refused."""
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
            " comes with Python code (auto_map), which graft never runs, and"
            if raw.get("auto_map")
            else ""
        )
        raise UnsupportedModel(
            f"'{file}': the model{own} has model_type={family!r}, which transformers "
            f"{transformers.__version__} does not support; a newer version may"
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # each family raises its own exceptions
        raise ModelFileError(f"'{file}' is not accepted: {first_line(error)}") from error
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
    """The attention implementation to load the model with, and notes for the user."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    family = config.model_type
    if getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None:
        why = "caps its attention scores, which torch's fused attention does not do"
    elif not getattr(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_sdpa", False):
        why = "does not support torch's fused attention"
    else:
        return "sdpa", []
    # no note for a family without attention
    if not getattr(config.get_text_config(), "num_attention_heads", None):
        return "eager", []
    return "eager", [
        f"{family} {why}: each layer holds the scores of all pairs of tokens, so memory grows "
        "with the square of the tokens of a micro-batch (train.tokens_per_micro)"
    ]


def disable_noise(config: Any) -> None:
    """Set every dropout and every jitter of a config, and of configs inside it, to 0.

    Log-probs are compared with those of the sampler, so noise in them is noise in the ratio.
    """
    for name, value in vars(config).items():
        if hasattr(value, "to_dict"):
            disable_noise(value)
        elif isinstance(value, float) and ("drop" in name or "jitter" in name):
            setattr(config, name, 0.0)
        elif name in ("use_cache", "output_router_logits") and value:
            setattr(config, name, False)


def _check_report(folder: Path, report: Mapping[str, Any]) -> list[str]:
    """Refuse missing weights, which transformers draws at random; return a note on unused ones."""
    bad = sorted(report["missing_keys"]) + sorted(str(key[0]) for key in report["mismatched_keys"])
    if bad:
        raise ModelFileError(
            f"'{folder}' lacks weights of its config, or has them in other sizes: {some(bad)}. Use "
            "config and weights of the same model"
        )
    unused = sorted(report["unexpected_keys"])
    if not unused:
        return []
    return [
        f"{len(unused)} tensors of '{folder}' are not used by the model and are not saved "
        f"again: {some(unused)}"
    ]


def folder_names(module: Any, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A state dict of the module with the tensor names and sizes of its folder.

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
    keep_dtype: set[str],
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Configs, and weights in `dtype` except those in `keep_dtype`; each file is whole or absent."""
    folder.mkdir(parents=True, exist_ok=True)

    def kind(name: str) -> torch.dtype:
        is_kept = name in keep_dtype or not tensors[name].is_floating_point()
        return tensors[name].dtype if is_kept else dtype

    sizes = {name: tensor.numel() * kind(name).itemsize for name, tensor in tensors.items()}
    write_shards(sizes, lambda name: tensors[name].to("cpu", kind(name)), folder, shard_bytes)
    for name, content in configs.items():
        write_json(folder / name, content)
    sync(folder)


def config_to_write(
    config: Mapping[str, Any], architecture: str, dtype: torch.dtype
) -> dict[str, Any]:
    """The source's config.json with the architecture and dtype of the new weights."""
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
