"""Exports a checkpoint as a Hugging Face folder: sharded weights, configs, tokenizer, model card.

    runs/quick/checkpoints/rl-000040  ->  quick-hf/  config.json  generation_config.json
                                                     model.safetensors, or shards and their index
                                                     tokenizer.json  chat_template.jinja  README.md

One shard is in memory at a time. A LoRA checkpoint already holds the merged weights; a folder with
adapters alone is merged with its base.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from graft.files import free_megabytes, new_folder
from graft.models.extra_actions import ACTIONS, read_rows
from graft.models.io.gguf_read import load_gguf
from graft.models.io.hub import HubError, find_model
from graft.models.io.hub_names import split_name
from graft.models.io.load import (
    INDEX,
    WEIGHTS,
    ModelFileError,
    StoredModel,
    open_model,
    read_json,
)
from graft.models.io.save import (
    SHARD_BYTES,
    ids_of,
    save_configs,
    write_weights,
)
from graft.models.io.tensor_names import hf_names
from graft.models.io.tensors import check_finite, some
from graft.models.lora.files import ADAPTER, ADAPTER_CONFIG, named_base
from graft.models.lora.merging import read_adapter
from graft.models.shape import ModelShape
from graft.text.chat import Chat, TemplateRewrites
from graft.text.template import TemplateError
from graft.text.tokenizer import FastTokenizer
from graft.trust.links import check_links
from graft.trust.masking import mask_shapes

CARD = "README.md"
MARK = "<!-- written by graft export -->"
"""The last line of the card: --force may replace such a folder, because it can be exported again."""
WRITTEN = re.compile(
    r"(model|model-\d+-of-\d+|actions|adapter_model)\.safetensors|model\.safetensors\.index\.json"
    r"|(config|generation_config|tokenizer|tokenizer_config|actions|adapter_config)\.json"
    r"|chat_template\.jinja|additional_chat_templates(/.+\.jinja)?|README\.md"
)
"""Names that an export writes; a folder with any other name is not replaced."""
UNTRAINED = (
    "repetition_penalty",
    "encoder_repetition_penalty",
    "no_repeat_ngram_size",
    "bad_words_ids",
    "sequence_bias",
    "suppress_tokens",
    "begin_suppress_tokens",
    "forced_eos_token_id",
    "exponential_decay_length_penalty",
    "min_length",
    "min_new_tokens",
    "guidance_scale",
    "num_beams",
)
"""Entries of a generation config that change even greedy text: a policy was trained without them."""


class ExportError(RuntimeError):
    """Nothing was exported; the message says why and what to do."""


class TargetRefused(ExportError):
    """The folder to write has something in it."""

    is_usage = True


@contextmanager
def open_source(path: Path, base: Path | None = None) -> Iterator[StoredModel]:
    """A checkpoint, a Hugging Face folder, a .gguf file, or a folder of adapters and their base."""
    check_links(path)
    with _open_stored(path, base) as stored:

        def read(name: str) -> torch.Tensor:
            tensor = stored.read(name)
            check_finite({name: tensor}, stored.origin)
            return tensor

        yield replace(stored, read=read, places={})


@contextmanager
def _open_stored(path: Path, base: Path | None) -> Iterator[StoredModel]:
    if path.suffix == ".gguf" and path.is_file():
        decoder = load_gguf(path)
        tensors = hf_names(decoder)
        sizes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        yield StoredModel(decoder.shape, sizes, tensors.__getitem__, decoder.dtype, f"'{path}'")
    elif (path / ADAPTER_CONFIG).exists() and not has_weights(path):
        adapter = read_adapter(path)
        with open_model(base or _named_base(path)) as stored:
            yield replace(adapter.merge_into(stored), places={})  # read by name, and merged
    else:
        with open_model(path) as stored:
            yield stored


def has_weights(folder: Path) -> bool:
    return (folder / WEIGHTS).exists() or (folder / INDEX).exists()


def _named_base(folder: Path) -> Path:
    named = named_base(read_json(folder / ADAPTER_CONFIG))
    why: Exception | None = None
    try:
        base = find_model(named) if named else Path()
    except HubError as error:
        base, why = Path(), error
    if not named or why is not None or not base.is_dir():
        raise ModelFileError(
            f"'{folder}' holds adapters without weights, and the base they name, {named!r}, is not "
            f"here; pass --base, the model they were trained on{f'. {why}' if why else ''}"
        ) from why
    return base


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written."""

    folder: Path
    dtype: torch.dtype | None
    """None: adapters alone, as they were."""
    files: list[str]
    num_bytes: int
    notes: list[str]


def export_model(
    stored: StoredModel,
    tokenizer: FastTokenizer,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    source: Path | None = None,
    card: Callable[[torch.dtype, Sequence[str]], str],
    force: bool = False,
) -> Exported:
    """Write `folder`, which transformers and graft open.

    source   the folder the model came from: what its configs say beyond the shape is kept, and its
             actions beyond the vocabulary come along
    card     the model card's text, from the dtype and the notes
    """
    stored.check()
    check_fits(stored.shape, tokenizer)
    dtype = dtype or stored.dtype
    rows = None if source is None else read_rows(source, stored.shape.width)
    notes: list[str] = []
    base = source if source is not None and (source / "config.json").exists() else None
    special = ids_of(tokenizer, _turn_ends(tokenizer, notes))
    if base is not None:
        notes += _untrained_entries(base / "generation_config.json")
    num_bytes = sum(map(math.prod, stored.sizes.values())) * dtype.itemsize
    with atomic_folder(folder, num_bytes, force=force, keep=source) as aside:
        write_weights(stored.sizes, stored.read, aside, dtype=dtype, shard_bytes=shard_bytes)
        save_configs(stored.shape, aside, dtype, special, base)
        tokenizer.save(aside)
        if source is not None and rows is not None:
            for file in (source / ACTIONS, source / "actions.json"):
                if file.exists():
                    shutil.copyfile(file, aside / file.name)
            notes.append(
                f"This model was trained with {len(rows)} actions beyond the vocabulary (`{ACTIONS}`). "
                f"transformers ignores them and finds the plain language model, which calls no tool by "
                f"them; graft reads them with the recipe's `actions.file`."
            )
        _write_card(aside, card(dtype, notes))
    return _exported(folder, dtype, notes)


def export_adapter(
    source: Path,
    tokenizer: FastTokenizer,
    folder: Path,
    *,
    card: Callable[[Sequence[str]], str],
    force: bool = False,
) -> Exported:
    """Write the adapters of a LoRA checkpoint alone, as PEFT reads them."""
    folders = [source, *(file.parent for file in source.glob(f"*/{ADAPTER_CONFIG}"))]
    adapter = next((path for path in folders if (path / ADAPTER_CONFIG).exists()), None)
    if adapter is None:
        raise ModelFileError(
            f"'{source}' has no {ADAPTER_CONFIG}: it was trained without adapters (lora.rank=0); "
            f"leave --adapter out to export its weights"
        )
    read_adapter(adapter)  # raises if it is incomplete
    files = {name: adapter / name for name in (ADAPTER_CONFIG, ADAPTER)}
    notes: list[str] = []
    if (source / ACTIONS).exists():
        own = adapter / ACTIONS  # trained in full and stored in fp32 with the adapters
        files[ACTIONS] = own if own.exists() else source / ACTIONS
        files["actions.json"] = source / "actions.json"
        notes.append(
            f"`{ACTIONS}` holds head rows of actions beyond the vocabulary; PEFT and transformers "
            f"ignore it."
        )
    base = named_base(read_json(adapter / ADAPTER_CONFIG))
    if not base or split_name(base) is None or Path(base).exists():
        notes.append(
            f"`{ADAPTER_CONFIG}` names the base by a path of the machine it was trained on: write the "
            f"base's name on the hub into base_model_name_or_path before you publish the adapters."
        )
    num_bytes = files[ADAPTER].stat().st_size
    with atomic_folder(folder, num_bytes, force=force, keep=source) as aside:
        for name, file in files.items():
            if file.exists():
                shutil.copyfile(file, aside / name)
        tokenizer.save(aside)
        _write_card(aside, card(notes))
    return _exported(folder, None, notes)


def _write_card(folder: Path, text: str) -> None:
    card = folder / CARD
    card.write_text(f"{mask_shapes(text).rstrip()}\n\n{MARK}\n", encoding="utf-8")
    for file in folder.glob("*.safetensors"):  # written with mode 0600; an export is to be shared
        file.chmod(card.stat().st_mode)


def _exported(folder: Path, dtype: torch.dtype | None, notes: list[str]) -> Exported:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    total = sum(file.stat().st_size for file in files)
    return Exported(folder, dtype, [str(f.relative_to(folder)) for f in files], total, notes)


def check_fits(shape: ModelShape, tokenizer: FastTokenizer) -> None:
    if tokenizer.vocab_size > shape.vocab_size:
        raise ModelFileError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the model only "
            f"{shape.vocab_size}: they do not belong together"
        )


def _untrained_entries(file: Path) -> list[str]:
    """A note on entries of the base's generation config that the policy was trained without."""
    given = read_json(file) if file.exists() else {}
    others = {name: given[name] for name in UNTRAINED if given.get(name) not in (None, 0, 1, [])}
    if not others:
        return []
    entries = ", ".join(f"{name}={value}" for name, value in others.items())
    return [
        f"The base's generation config has {entries}, which the policy was trained without: it "
        f"changes even greedy text. Give generate() neutral values to sample as in training."
    ]


def _turn_ends(tokenizer: FastTokenizer, notes: list[str]) -> Sequence[int]:
    if tokenizer.chat_template is None:
        return ()
    try:
        chat = Chat(tokenizer)
    except (TemplateError, TemplateRewrites) as error:
        notes.append(f"The chat template's end of a turn could not be found: {error}")
        return ()
    if chat.end_text and not chat.end_ids:
        notes.append(
            f"A turn ends with the text {chat.end_text!r}, for which the tokenizer has no token: "
            f"pass it to generate() as stop_strings."
        )
    return sorted(chat.end_ids)


@contextmanager
def atomic_folder(
    folder: Path, num_bytes: int, *, force: bool, keep: Path | None = None
) -> Iterator[Path]:
    """A temporary folder to write into; renamed to `folder` at the end, removed on failure.

    num_bytes   estimate of what will be written; refused at once if the disk has less space
    keep        a path that must not be inside a folder that is replaced
    """
    folder = folder.resolve()
    _refuse_to_overwrite(folder, force, keep)
    try:
        if num_bytes > free_megabytes(folder) * 1e6:
            raise OSError("no space left for it")
        with new_folder(folder) as aside:
            yield aside
    except OSError as error:
        raise ExportError(
            f"cannot write '{folder}' ({error}); {free_megabytes(folder):,.0f} MB are free there, "
            f"about {num_bytes / 1e6:,.0f} MB are needed. No partial folder is left: free disk space, or "
            f"give another --out"
        ) from error


def _refuse_to_overwrite(folder: Path, force: bool, keep: Path | None) -> None:
    if folder.exists() and not folder.is_dir():
        raise TargetRefused(f"'{folder}' is a file; give --out the name of a new folder")
    if not folder.exists() or not any(folder.iterdir()):
        return
    if not force:
        raise TargetRefused(
            f"'{folder}' exists and is not empty; give another --out, or --force to replace it"
        )
    if keep is not None and keep.resolve().is_relative_to(folder):
        raise TargetRefused(f"'{folder}' holds what is exported; give another --out")
    if reason := _not_ours(folder):
        raise TargetRefused(
            f"'{folder}' {reason}, so --force does not replace it; remove it yourself, or give "
            f"another --out"
        )


def _not_ours(folder: Path) -> str:
    """Why a folder is not just an export; empty if it is one."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))
    if others := [name for name in names if not WRITTEN.fullmatch(name)]:
        return f"holds {some(others)}, which no export writes"
    card = folder / CARD
    if not card.is_file() or MARK not in card.read_text(encoding="utf-8", errors="replace"):
        return f"holds {some(names)}, and no {CARD} with the mark of an export ({MARK})"
    return ""
