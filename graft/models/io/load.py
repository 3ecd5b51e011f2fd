"""Models from local files: a Hugging Face folder of safetensors, or one GGUF file.

models/qwen/config.json                              the shape
models/qwen/model.safetensors                        the weights, or
models/qwen/model.safetensors.index.json + shards    tensor name -> file
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graft.models.decoder import Decoder
from graft.models.families.table import read_shape
from graft.models.io.gguf_blocks import as_dtype
from graft.models.io.mxfp4 import BLOCKS, SCALES, unpack_mxfp4, unpacked_sizes
from graft.models.io.stored_names import describe_others, find_parts
from graft.models.io.stream import StoredTensor, stream
from graft.models.io.tensor_names import EMBEDDING, HEAD, own_name
from graft.models.io.tensors import ModelFileError, NotAModel, build_decoder, check_sizes
from graft.models.shape import ModelShape, UnsupportedModel
from graft.trust.bounds import parse_json, read_bytes
from graft.trust.links import check_links

log = logging.getLogger(__name__)

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
READABLE = {
    "F64": torch.float32,  # nothing here computes in fp64
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Supported dtypes by safetensors' names, and the dtype a copy is stored in."""
DTYPES = {**READABLE, "F64": torch.float64}
"""What their bytes are."""


@dataclass(frozen=True, slots=True)
class StoredModel:
    """A model on disk: its sizes are known, each tensor is read when it is used."""

    shape: ModelShape
    sizes: Mapping[str, tuple[int, ...]]
    """Hugging Face's tensor names, without the second copy of a tied head."""
    read: Callable[[str], Tensor]
    dtype: torch.dtype
    """The dtype of its embedding."""
    origin: str
    """Its path, for messages."""
    places: Mapping[str, StoredTensor] = field(default_factory=dict)
    """Tensors that `read` gives as they are in a file."""

    def load(self, dtype: torch.dtype, device: torch.device | str) -> Decoder:
        return build_decoder(
            self.shape, self.sizes, self._fill, origin=self.origin, dtype=dtype, device=device
        )

    def _fill(self, views: Mapping[str, Tensor]) -> None:
        """Stream the tensors that have a place, and read the others."""
        places = {name: self.places[name] for name in views if name in self.places}
        device = next(iter(views.values())).device
        try:
            for name, raw in stream(places, device, self.origin):
                view = views[name]
                view.copy_(as_dtype(raw, DTYPES[places[name].kind]).view(view.shape))
        except OSError as error:
            raise ModelFileError(
                f"{self.origin} cannot be read ({error}); download or save it again"
            ) from error
        for name in views.keys() - places:
            views[name].copy_(self.read(name))

    def check(self) -> None:
        """Raise unless names and sizes are those of the config; reads no tensor."""
        check_sizes(self.shape, self.sizes, self.origin)


def load_model(
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """The decoder stored at `path`, converted to `dtype`."""
    path = Path(path)
    if path.suffix == ".gguf" and path.is_file():
        from graft.models.io.gguf_read import load_gguf

        return load_gguf(path, dtype=dtype, device=device)
    with open_model(path) as stored:
        return stored.load(dtype, device)


@contextmanager
def open_model(path: Path) -> Iterator[StoredModel]:
    """The Hugging Face folder at `path`, its files are open inside the context."""
    shape = shape_of(read_config(path), path / "config.json")
    with ExitStack() as stack:
        files = _open_weights(path, stack)
        stored = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}
        parts, others = find_parts(shape, stored, f"'{path}'")
        if others:
            _say_once(describe_others(others, f"'{path}'"))
        sizes = unpacked_sizes({name: part.size for name, part in parts.items()})
        embedded = own_name(shape.family, EMBEDDING)
        embedding = parts[embedded].name if embedded in parts else ""
        kind = files[embedding].get_slice(embedding).get_dtype() if embedding else ""

        def read(name: str) -> Tensor:
            if name in parts:
                part = parts[name]
                return read_tensor(files[part.name], part.name, path, part.inside)
            packed = (read_packed(files[each], each) for each in (name + BLOCKS, name + SCALES))
            return unpack_mxfp4(*packed).transpose(1, 2)

        if shape.tied:
            drop_tied_head(sizes, read, embedded, f"'{path}'")
        dtype, whole = READABLE.get(kind, torch.float32), find_places(path)
        places = {
            name: part.place(whole[part.name]) for name, part in parts.items() if part.name in whole
        }
        yield StoredModel(shape, sizes, read, dtype, f"'{path}'", places)


@cache
def _say_once(text: str) -> None:
    """Warn of what a folder holds, however often it is opened."""
    log.warning(text)


HUB_PAGE = re.compile(r"https?:/+(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+).*")


def hub_hint(given: str) -> str:
    """How a model of the hub is written, for what is no path here.

    >>> hub_hint("https://huggingface.co/Qwen/Qwen3-0.6B/tree/main")
    "a model of the Hugging Face hub goes by its name: 'Qwen/Qwen3-0.6B'"
    """
    if page := HUB_PAGE.fullmatch(given):
        return f"a model of the Hugging Face hub goes by its name: '{page[1]}'"
    name = "OWNER/NAME" if "/" in given else f"OWNER/{given}"
    return f"a model of the Hugging Face hub goes by its owner and name, {name}"


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's parsed config.json."""
    if not folder.exists():
        raise NotAModel(
            f"no model at '{folder}': there is no such folder or file; {hub_hint(str(folder))}, in "
            "Python: graft.models.io.hub.find_model(NAME)"
        )
    if not folder.is_dir():
        raise NotAModel(
            f"'{folder}' is a file; pass a .gguf file, or the folder that holds config.json and "
            f"{WEIGHTS}"
        )
    check_links(folder)
    file = folder / "config.json"
    if not file.exists():
        if (folder / "adapter_config.json").exists():
            raise NotAModel(
                f"'{folder}' has no config.json: it holds adapters only; graft export {folder} --out "
                f"FOLDER merges them with their base into a model, or give the base model"
            )
        if (folder / "config.yaml").exists():
            raise ModelFileError(
                f"'{folder}' is a run without a complete checkpoint yet; try again after its first"
            )
        ggufs = sorted(found.name for found in folder.glob("*.gguf"))
        hint = f"; to load a GGUF file pass its path: {folder / ggufs[0]}" if ggufs else ""
        raise NotAModel(
            f"'{folder}' has no config.json, so it is not a model folder; give one that "
            f"save_pretrained or graft wrote, a run, or a name on the hub (OWNER/NAME){hint}"
        )
    return read_json(file)


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = parse_json(read_bytes(file))
    except (ValueError, OSError) as error:  # not UTF-8, not JSON, or a device
        raise ModelFileError(f"'{file}' is not valid JSON ({error}); download it again") from error
    if not isinstance(content, dict):
        raise ModelFileError(f"'{file}' holds a {type(content).__name__}, not a JSON object")
    return content


def shape_of(config: dict[str, Any], file: Path) -> ModelShape:
    """The ModelShape of a parsed config.json; what the decoder cannot compute is refused."""
    try:
        shape = read_shape(config)
    except KeyError as error:
        raise ModelFileError(
            f"'{file}' lacks the entry {error}; is it a complete config?"
        ) from error
    except UnsupportedModel as error:
        raise UnsupportedModel(f"'{file}': {error}") from error
    return shape


def _open_weights(folder: Path, stack: ExitStack) -> dict[str, Any]:
    """Tensor name -> the open file that holds it, without buffers that the decoder computes."""
    if (folder / WEIGHTS).exists():
        file = stack.enter_context(open_tensors(folder / WEIGHTS))
        found = dict.fromkeys(file.keys(), file)
    elif (folder / INDEX).exists():
        weight_map = read_index(folder)
        open_files = {
            shard: stack.enter_context(open_tensors(folder / shard))
            for shard in sorted(set(weight_map.values()))
        }
        names = {shard: set(file.keys()) for shard, file in open_files.items()}
        for name, shard in weight_map.items():
            if name not in names[shard]:
                raise ModelFileError(
                    f"'{folder / shard}' lacks {name}, which {INDEX} lists for it; "
                    f"the shards are of different downloads or saves"
                )
        found = {name: open_files[shard] for name, shard in weight_map.items()}
    else:
        raise ModelFileError(_no_weights(folder))
    return {name: file for name, file in found.items() if not name.endswith("rotary_emb.inv_freq")}


def read_index(folder: Path) -> dict[str, str]:
    """Tensor name -> the file beside the index that holds it."""
    found: Any = read_json(folder / INDEX).get("weight_map")
    if not isinstance(found, dict) or not found:
        raise ModelFileError(f"'{folder / INDEX}' has no weight_map of tensors to files")
    for name, shard in found.items():
        is_name = isinstance(shard, str) and Path(shard).name == shard and 0 < len(shard) < 256
        if not is_name or "\0" in shard:
            raise ModelFileError(
                f"'{folder / INDEX}' says that {name} is in {str(shard)[:80]!r}, not a file beside it"
            )
    return found


def _no_weights(folder: Path) -> str:
    if any(folder.glob("pytorch_model*.bin")):
        return (
            f"'{folder}' holds only pytorch_model.bin, a pickle that may run code when it is read. "
            f'Convert it once, if you trust it: python -c "from transformers import '
            f"AutoModelForCausalLM as M; M.from_pretrained('{folder}')"
            f".save_pretrained('{folder}-safetensors')\""
        )
    present = ", ".join(sorted(file.name for file in folder.iterdir()))
    return f"'{folder}' has neither {WEIGHTS} nor {INDEX}; it holds {present}"


def open_tensors(file: Path) -> Any:
    """A safetensors file, to be read tensor by tensor."""
    if not file.is_file():
        raise ModelFileError(
            f"'{file}' is listed in {INDEX} but is not a file here; finish the download"
        )
    with file.open("rb") as raw:
        if raw.read(19) == b"version https://git":
            raise ModelFileError(
                f"'{file}' is a git-lfs pointer, not the weights; run: git lfs pull"
            )
    try:
        return safe_open(file, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise ModelFileError(
            f"'{file}' ({file.stat().st_size} bytes) is not a whole safetensors file ({error}); "
            f"download or save it again"
        ) from error


def find_places(folder: Path) -> dict[str, StoredTensor]:
    """Find each tensor of a supported dtype in its file; the files are known to be whole."""
    if (folder / WEIGHTS).exists():
        return _places_in(folder / WEIGHTS)
    weight_map = read_index(folder)
    by_shard = {shard: _places_in(folder / shard) for shard in set(weight_map.values())}
    return {
        name: by_shard[shard][name] for name, shard in weight_map.items() if name in by_shard[shard]
    }


def _places_in(file: Path) -> dict[str, StoredTensor]:
    """A safetensors file: the length of its head, 8 bytes, the head as JSON, and the data."""
    with file.open("rb") as raw:
        length = int.from_bytes(raw.read(8), "little")
        head = parse_json(raw.read(length), f"'{file}'")
    places: dict[str, StoredTensor] = {}
    for name, facts in head.items():
        if name != "__metadata__" and facts["dtype"] in DTYPES:
            start, stop = (8 + length + offset for offset in facts["data_offsets"])
            places[name] = StoredTensor(file, start, stop, facts["dtype"], tuple(facts["shape"]))
    return places


def read_tensor(
    file: Any, name: str, folder: Path, index: tuple[int, slice] | None = None
) -> Tensor:
    """A tensor of a supported dtype, or a part of it."""
    kind = file.get_slice(name).get_dtype()
    if kind not in READABLE:
        raise UnsupportedModel(
            f"{name} in '{folder}' is stored as {kind}; readable are {', '.join(READABLE)}"
        )
    return file.get_tensor(name) if index is None else file.get_slice(name)[index]


def read_packed(file: Any, name: str) -> Tensor:
    """A tensor of bytes."""
    kind = file.get_slice(name).get_dtype()
    if kind != "U8":
        raise UnsupportedModel(f"{name} is stored as {kind}; mxfp4 is bytes (U8)")
    return file.get_tensor(name)


def drop_tied_head(
    sizes: dict[str, tuple[int, ...]], read: Callable[[str], Tensor], embedding: str, origin: str
) -> None:
    """Some tools store a tied head too: it must equal the embedding, and is removed from `sizes`."""
    is_stored = HEAD in sizes and embedding in sizes
    if is_stored and not torch.equal(read(HEAD), read(embedding)):
        raise ModelFileError(
            f"{origin}: config.json has tie_word_embeddings=true, but {HEAD} differs from {embedding}; "
            f"set tie_word_embeddings to false if the head is a matrix of its own, or delete {HEAD}"
        )
    sizes.pop(HEAD, None)
