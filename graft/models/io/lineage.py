"""What a model was made from, for its card: the base's name on the hub, and its license.

    runs/rl      model.path: runs/warm         the base of the run that it names, and so on
    runs/warm    model.path: Qwen/Qwen3-0.6B   a name on the hub; its card in the cache has the license

A card is published, so it contains no paths of this machine: a folder without a name on the hub is
called by its last path component.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graft.files import read_object
from graft.models.io.hub import cached_copy, origin_of
from graft.models.io.hub_names import split_name
from graft.models.lora.files import named_base
from graft.trust.bounds import MAX_YAML, check_yaml, read_text
from graft.trust.links import check_links

LICENSE = ("license", "license_name", "license_link")
DEEPEST = 16
"""Longest chain of runs that started from each other."""
PATHS = re.compile(r"(?<![\w.:/<*~-])(?:~|[A-Za-z]:\\|/)(?:[^\s'\"`,;<>()\[\]{}|/\\]*[/\\])+")
"""The folders of an absolute path, up to its last part; addresses (https://...) are none."""


@dataclass(frozen=True, slots=True)
class Lineage:
    """The origin of weights."""

    name: str = ""
    """The base's name on the hub; empty where it is not known."""
    label: str = ""
    """What to call the base; empty: there is none, weights were random."""
    license: Mapping[str, str] = field(default_factory=dict)
    """{"license": "apache-2.0"}, and license_name and license_link where the base's card has them."""


def lineage_of(path: str, run: Path | None = None, depth: int = 0) -> Lineage:
    """The lineage of the model at `path`, as a recipe names it; `run` is the folder of that recipe's run."""
    known = read_object(run / "model.json") if run is not None else {}
    if path and known.get("path") == path:
        return _on_the_hub(str(known.get("name")), str(known.get("commit")))
    here = Path(path)
    if not path or depth > DEEPEST:
        return Lineage()
    if not here.exists() and (named := split_name(path)) is not None:
        return _on_the_hub(*named)
    if (named := origin_of(here)) is not None:
        return _on_the_hub(*named)
    adapters = here / "adapter_config.json"
    if adapters.is_file() and not (here / "config.json").is_file():
        return lineage_of(named_base(read_object(adapters)), None, depth + 1)
    started = _run_of(here)
    if started is not None:  # a run or checkpoint: what that one started from
        return lineage_of(_model_path(started), started, depth + 1)
    return Lineage("", here.stem if here.suffix == ".gguf" else here.name, _license(here, ""))


def without_paths(text: str) -> str:
    """The text without folders of this machine.

    >>> without_paths("path: /home/me/models/qwen, see https://a.b/c/d and runs/x or <a>/<b>")
    'path: .../qwen, see https://a.b/c/d and runs/x or <a>/<b>'
    """
    return PATHS.sub(".../", text)


def _on_the_hub(name: str, revision: str) -> Lineage:
    copy = cached_copy(name, revision)
    return Lineage(name, name, {} if copy is None else _license(copy, name))


def _license(folder: Path, name: str) -> dict[str, str]:
    """Read the license from the header of the folder's model card."""
    import yaml

    check_links(folder)
    try:
        text = read_text(folder / "README.md", MAX_YAML)
        header = text.split("---")[1] if text.startswith("---") else ""
        check_yaml(header, "README.md")
        header = yaml.safe_load(header)
    except (OSError, ValueError, IndexError, yaml.YAMLError):
        return {}
    if not isinstance(header, dict) or not isinstance(header.get("license"), str):
        return {}
    found = {key: header[key] for key in LICENSE if isinstance(header.get(key), str)}
    link = found.get("license_link", "")
    if link and "://" not in link:  # a file beside the base's card
        found.pop("license_link")
        if name:
            found["license_link"] = f"https://huggingface.co/{name}/blob/main/{link}"
    return found


def _run_of(path: Path) -> Path | None:
    """The run that a folder is, or that it is a checkpoint of."""
    if (path / "config.yaml").is_file():
        return path
    above = path.absolute().parent
    is_checkpoint = above.name == "checkpoints" and (above.parent / "config.yaml").is_file()
    return above.parent if is_checkpoint else None


def _model_path(run: Path) -> str:
    check_links(run)
    try:
        section = section_of(read_text(run / "config.yaml", MAX_YAML), "model")
    except (OSError, ValueError):
        return ""
    return str(section.get("path") or "")


def section_of(recipe: str, name: str) -> Mapping[str, Any]:
    """A section of a recipe's text; empty where it cannot be read."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    try:
        check_yaml(recipe, "the recipe")
        content = OmegaConf.to_container(OmegaConf.create(recipe))
    except (OmegaConfBaseException, YAMLError, ValueError):  # then a card shows it as it is
        return {}
    section = content.get(name) if isinstance(content, dict) else None
    return section if isinstance(section, dict) else {}
