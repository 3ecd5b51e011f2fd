"""A shallower model: evenly spaced layers of a larger one, the first and the last among them.

    python -m benchmarks.shallow SmolLM2.gguf runs/student --layers 15

It writes a Hugging Face folder. Layers that are left out are missed at first: such a student needs SFT.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch

import graft
from graft.models.decoder import Decoder


def kept_layers(of: int, layers: int) -> list[int]:
    """Indices of the layers that stay.

    >>> kept_layers(9, 3)
    [0, 4, 8]
    """
    if not 2 <= layers <= of:
        raise ValueError(f"{layers} of {of} layers: keep at least 2, and at most all")
    return [round(index * (of - 1) / (layers - 1)) for index in range(layers)]


@torch.no_grad()
def shallower(model: Decoder, layers: int) -> Decoder:
    """A copy without the other layers."""
    copy = Decoder(replace(model.shape, layers=layers))
    kept = kept_layers(model.shape.layers, layers)
    state = {name: value for name, value in model.state_dict().items() if "blocks." not in name}
    for target, source in enumerate(kept):
        block = model.blocks[source].state_dict()
        state |= {f"blocks.{target}.{name}": value for name, value in block.items()}
    copy.load_state_dict(state)
    return copy


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model", help="a folder, a run, a .gguf file or a name on the hub")
    parser.add_argument("out", help="the folder to write")
    parser.add_argument("--layers", type=int, default=15)
    options = parser.parse_args(arguments)
    policy = graft.load(options.model, device="cpu")
    policy.model = shallower(policy.model, options.layers)
    print(f"{policy.save(options.out)}: {policy.num_parameters:,} parameters")


if __name__ == "__main__":
    main()
