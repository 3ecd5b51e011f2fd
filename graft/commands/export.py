"""`graft export`: a checkpoint as a Hugging Face folder."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from graft.commands.options import AsJson, Trust

if TYPE_CHECKING:
    import torch

    from graft.models.io.export import Exported
    from graft.models.io.load import StoredModel
    from graft.models.io.model_card import Origin
    from graft.text.tokenizer import FastTokenizer

DTYPES = ("float32", "bfloat16", "float16")


def export(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT_OR_RUN", help="Or a model folder, a .gguf file, a name on the hub."
        ),
    ] = "",
    out: Annotated[str, typer.Option(help="The Hugging Face folder to write.")] = "",
    dtype: Annotated[
        str, typer.Option(help="float32, bfloat16 or float16. Default: as it is stored.")
    ] = "auto",
    shard_size: Annotated[str, typer.Option(help="Largest weight file: 5GB, 500MB.")] = "5GB",
    adapter: Annotated[
        bool,
        typer.Option("--adapter", help="Write to --out only the adapters of a LoRA checkpoint."),
    ] = False,
    merge: Annotated[
        bool, typer.Option("--merge", help="The merged weights (the default).")
    ] = False,
    from_verl: Annotated[
        str, typer.Option(help="Instead of a checkpoint: verl's folder of FSDP shards.")
    ] = "",
    base: Annotated[
        str, typer.Option(help="The model that shards or bare adapters were trained from.")
    ] = "",
    template: Annotated[
        str, typer.Option(help="Chat template: a name, path or text. Default: the run's.")
    ] = "",
    name: Annotated[str, typer.Option(help="In the model card. Default: that of --out.")] = "",
    force: Annotated[bool, typer.Option("--force", help="Replace an older export.")] = False,
    push: Annotated[
        str, typer.Option(help="Then upload --out to the Hugging Face hub: OWNER/NAME, private.")
    ] = "",
    public: Annotated[
        bool, typer.Option("--public", help="With --push: make the model public.")
    ] = False,
    trust: Trust = False,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder."""
    from graft.config import ConfigError
    from graft.models.io.hub import check_push, push_folder

    refused = {
        "give a checkpoint or run to export, or --from-verl FOLDER: one of the two": (
            bool(source) == bool(from_verl)
        ),
        "give the folder to write: --out FOLDER": not out,
        f"--out {out!r} names a GGUF file, and a Hugging Face folder is written; give a folder, from which "
        "llama.cpp's convert_hf_to_gguf.py makes the file": out.endswith(".gguf"),
        "--adapter writes only the adapters, --merge the merged weights: give one of them": (
            adapter and merge
        ),
        "--adapter writes a folder of adapters; --from-verl needs --merge": adapter and from_verl,
        "--public needs --push: nothing is uploaded without it": public and not push,
    }
    for why, is_wrong in refused.items():
        if is_wrong:
            raise ConfigError(why)
    if push:
        check_push(push)
    shard_bytes, kind = size_in_bytes(shard_size), chosen_dtype(dtype)
    with _open(source, from_verl, base, template, trust) as subject:
        title = name or push or Path(out).stem
        written = _to_folder(subject, Path(out), title, adapter, kind, shard_bytes, force)
    done: dict[str, Any] = {
        "folder": out,
        "files": written.files,
        "bytes": written.num_bytes,
        "dtype": None if written.dtype is None else str(written.dtype).partition(".")[2],
    }
    if push:
        done |= {"pushed": push_folder(Path(out), push, public=public)}
    if as_json:
        typer.echo(json.dumps({**done, "notes": written.notes}))
        return
    for note in written.notes:
        typer.echo(f"note: {note}")
    typer.echo(f"{out}: {len(written.files)} files, {written.num_bytes / 1e6:,.1f} MB")
    if push:
        typer.echo(f"{done['pushed']}: {'public' if public else 'private'}")


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is exported."""

    model: Path
    """Its folder or file; of verl's shards the folder with their config and tokenizer."""
    stored: StoredModel
    tokenizer: FastTokenizer
    origin: Origin
    converted: str
    """A sentence for the card about weights that graft did not train."""


@contextmanager
def _open(source: str, from_verl: str, base: str, template: str, trust: bool) -> Iterator[_Subject]:
    from graft.config import ConfigError
    from graft.models.io.export import open_source
    from graft.models.io.gguf_read import open_tokenizer
    from graft.models.io.hub import find_model
    from graft.models.io.model_card import Origin, read_origin
    from graft.registry import load_service
    from graft.train.run_dir.checkpoint import latest_model

    base_path = find_model(base) if base else None
    if from_verl:
        shards = Path(from_verl)
        opened, model, origin = (
            load_service("open_verl_shards")(shards, base_path),
            shards,
            Origin(),
        )
        converted = f"Joined by graft from verl's FSDP shards (`{shards.name}`)."
    else:
        model = latest_model(source)
        if any(model.glob("model_world_size_*_rank_*.pt")):
            raise ConfigError(
                f"'{model}' holds verl's FSDP shards; export them with --from-verl {model}"
            )
        opened, origin, converted = open_source(model, base_path), read_origin(model), ""
    with opened as stored:
        if from_verl:
            model = load_service("find_verl_base")(model, base_path)
        # adapters may come without a tokenizer: then their base's is used
        has_own = model.suffix == ".gguf" or any(model.glob("tokenizer*"))
        tokenizer = open_tokenizer(model if has_own or base_path is None else base_path)
        if which := template or origin.chat_template:
            from graft.text.template import find_template
            from graft.trust.ownership import settings_from

            # the export keeps the chat template that the model was trained with
            with settings_from(None if template else model.parent.parent / "config.yaml", trust):
                tokenizer.chat_template = find_template(which, tokenizer.chat_templates)
        yield _Subject(model, stored, tokenizer, origin, converted)


def _to_folder(
    subject: _Subject,
    folder: Path,
    title: str,
    is_adapter: bool,
    dtype: torch.dtype | None,
    shard_bytes: int,
    force: bool,
) -> Exported:
    from graft.models.io.export import export_adapter, export_model
    from graft.models.io.model_card import model_card

    def card(kind: torch.dtype | None, notes: Sequence[str]) -> str:
        return model_card(
            title,
            subject.stored.shape,
            subject.origin,
            num_params=sum(map(math.prod, subject.stored.sizes.values())),
            dtype=kind,
            notes=notes,
            converted=subject.converted,
            is_chat=subject.tokenizer.chat_template is not None,
        )

    if is_adapter:
        return export_adapter(
            subject.model,
            subject.tokenizer,
            folder,
            card=lambda notes: card(None, notes),
            force=force,
        )
    return export_model(
        subject.stored,
        subject.tokenizer,
        folder,
        dtype=dtype,
        shard_bytes=shard_bytes,
        source=subject.model,
        card=card,
        force=force,
    )


def size_in_bytes(text: str) -> int:
    """
    >>> size_in_bytes("5GB"), size_in_bytes("1.5 KiB"), size_in_bytes("100")
    (5000000000, 1536, 100)
    """
    from pydantic import ByteSize, TypeAdapter, ValidationError

    from graft.config import ConfigError

    try:
        size = TypeAdapter(ByteSize).validate_python(text.strip())
    except ValidationError:
        size = 0
    if size < 1:
        raise ConfigError(f"--shard-size {text!r} is not a size; write 5GB, 500MB or 1GiB")
    return size


def chosen_dtype(text: str) -> torch.dtype | None:
    """None keeps the stored dtype."""
    from graft.config import ConfigError

    if text == "auto":
        return None
    if text not in DTYPES:
        raise ConfigError(f"--dtype {text!r} is not written; known: auto, {', '.join(DTYPES)}")
    import torch

    return getattr(torch, text)
