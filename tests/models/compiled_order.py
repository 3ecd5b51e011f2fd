"""Compiles kernels for a Hopper GPU, which needs none, and prints how each multiplies and adds.

Run by `test_compiled_order` without Triton's interpreter: {kernel: [instructions, layouts of sums, copies]}.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from graft.engine.native.cuda.kernels import segments
from graft.models.kernels import chunks, head_kernels, path_attention, rope
from graft.models.recurrence import CHUNK

POINTERS = {"tiles": "*i32", "table": "*i32", "items": "*i32", "lse": "*fp32"}
POINTERS |= dict.fromkeys(("partial", "stats", "logp_ptr", "entropy_ptr", "norm_ptr"), "*fp32")
POINTERS |= dict.fromkeys(("scales_ptr", "floors_ptr", "vocab_logp_ptr"), "*fp32")
POINTERS |= dict.fromkeys(("lengths", "tails", "actions_ptr", "modes_ptr"), "*i64")
POINTERS |= dict.fromkeys(("q", "k_pool", "v_pool", "out", "logits_ptr"), "*bf16")
POINTERS |= dict.fromkeys(("cos_ptr", "sin_ptr", "rstd_ptr"), "*fp32")
POINTERS |= dict.fromkeys(("rows_ptr", "positions_ptr", "lengths_ptr"), "*i64")
POINTERS |= dict.fromkeys(("qkv_ptr", "q_weight_ptr", "k_weight_ptr"), "*bf16")
POINTERS |= dict.fromkeys(("q_ptr", "k_ptr", "v_ptr"), "*bf16")
POINTERS |= {"allowed_ptr": "*u8", "table_ptr": "*i32"}


def assembled(
    kernel: Any,
    constants: dict[str, Any],
    aligned: Iterable[str] = (),
    pointers: dict[str, str] | None = None,
) -> Any:
    """What the compiler makes of a kernel, by stage."""
    options = {name: constants.pop(name) for name in ("num_warps", "num_stages")}
    names = kernel.arg_names
    types = {"scale": "fp32", "eps": "fp32", **POINTERS, **(pointers or {})}
    types |= dict.fromkeys(constants, "constexpr")
    if "W" in constants:  # blocks of keys and values that the copy engine fetches
        types |= dict.fromkeys(("k", "v"), f"tensordesc<bf16[64,{constants['W']}]>")
    signature = {name: types.get(name, "i32") for name in names}
    aligned = {*aligned, *(name for name in names if signature[name].startswith("*"))}
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm


def compiled(kernel: Any, constants: dict[str, Any], aligned: Iterable[str] = ()) -> list[Any]:
    """The product instructions, in order, the layouts of all that is reduced, and the number of copies that
    are started ahead of their use."""
    made = assembled(kernel, constants, aligned)
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", made["ttgir"], re.MULTILINE))
    reduced = re.findall(r"\}\) : \(tensor<(\w+), (#\w+)>\)", made["ttgir"])
    copies = made["ptx"].count("cp.async.cg.")
    return [products(made), [[shape, layouts[name]] for shape, name in reduced], copies]


def products(made: Any) -> list[str]:
    """The instructions of tensor cores."""
    return re.findall(r"wgmma\.mma_async\.[\w.]+|mma\.sync[\w.]+", made["ptx"])


def chains(made: Any) -> list[int]:
    """The lengths of chains of multiplications that each add to the result of the one before."""
    steps = re.findall(r"fma\.rn\.f32\s+(%\w+), %\w+, %\w+, (%\w+);", made["ptx"])
    before, added = dict(steps), {addend for _, addend in steps}
    found: set[int] = set()
    for last in before.keys() - added:
        length, at = 1, before[last]
        while at in before:
            length, at = length + 1, before[at]
        found.add(length)
    return sorted(found)


def recurrence() -> dict[str, list[Any]]:
    """Of Qwen3-Next and of Nemotron-H: a token alone, tokens of a prompt, and those of the learner; products,
    the number of reductions, chains."""
    pointers = {**dict.fromkeys(chunks._advance.arg_names, "*fp32"), "parts": "*i64"}
    forms: dict[str, tuple[int, dict[str, None]]] = {
        "decoding": (1, {}),
        "prompts": (CHUNK, {}),
        "learner": (CHUNK, dict.fromkeys(("k_slots", "u_slots", "log_slots"))),
    }
    found: dict[str, list[Any]] = {}
    for kind, heads, key_heads, size in (("delta", 32, 16, 128), ("mamba", 128, 8, 64)):
        sizes = {"H": heads, "K": key_heads, "DK": 128, "DV": size}
        tiles = {"BLOCK_K": chunks.BLOCK_KEY, "BLOCK_V": chunks.BLOCK_VALUE, "num_stages": 3}
        absent = {"beta": None} if kind == "mamba" else {}
        for form, (rows, no_slots) in forms.items():
            which = {"ROWS": rows, "num_warps": chunks.WARPS[rows], **absent, **no_slots}
            made = assembled(chunks._advance, {**sizes, **tiles, **which}, (), pointers)
            reductions = len(re.findall(r'"tt\.reduce"', made["ttgir"]))
            found[f"{kind}: {form}"] = [products(made), reductions, chains(made)]
    return found


def main() -> dict[str, list[Any]]:
    import torch

    found: dict[str, list[Any]] = {}
    no_codes = {"k_scales": None, "v_scales": None}
    for size in (64, 128):
        shared = {**path_attention.sizes(torch.empty(1, 16, size), kv_heads=8), "WINDOW": 0}
        walk = {
            **shared,
            "HEADS": 16,
            "QUERIES": 64,
            "sinks": None,
            **no_codes,
            "num_warps": 4,
            "num_stages": 3,
        }
        learner = {**walk, "BLOCK_ROWS": 64, "HEAD_ROWS": 0, "HEAD_COLUMNS": size}
        prompts = {**walk, "BLOCK_ROWS": 512, "HEAD_ROWS": 64, "HEAD_COLUMNS": 0, "lse": None}
        strides = ("q_stride", "q_head")
        found[f"learner {size}"] = compiled(path_attention._walk, learner, strides)
        found[f"prompts {size}"] = compiled(path_attention._walk, prompts, strides)
        decode = {**shared, "HEADS": 8, "ROWS": 16, "NUM_STAGES": 3, "CHAINED": True, **no_codes}
        decode |= {"num_warps": 4, "num_stages": 3}
        found[f"decoding {size}"] = compiled(segments._attend, decode)
        heads, pairs, warps = rope._tile(32, size // 2)
        rotation = {
            "H": 16,
            "K": 8,
            "HALF": size // 2,
            "TURNED": size // 2,
            "OFFSET": False,
            "QUERY_SCALE": 1.0,
            "HEADS": heads,
            "PAIRS": pairs,
            "CHAINED": True,
            "ROUNDS": False,
            "k_scales_ptr": None,
            "v_scales_ptr": None,
        }
        rotation |= {"num_warps": warps, "num_stages": 3}
        slots = dict.fromkeys(("table_ptr", "rows_ptr", "positions_ptr", "lengths_ptr"))
        engine = {**rotation, "PAGE": 64, "rstd_ptr": None}
        found[f"rotation of the engine {size}"] = compiled(rope._forward, engine, ["qkv_stride"])
        learner = {**rotation, "PAGE": 1, **slots}
        found[f"rotation of the learner {size}"] = compiled(rope._forward, learner, ["qkv_stride"])
    numbers = ("num_actions", "vocab_size", "row_length")
    fixed = {"STEPS": 38, "BLOCK": head_kernels.BLOCK, "STAGES": head_kernels.FORWARD_STAGES}
    fixed |= {"num_warps": head_kernels.FORWARD_WARPS, "num_stages": 3, "vocab_logp_ptr": None}
    fixed |= {"floors_ptr": None}
    for name, masks in (("", {"allowed_ptr": None, "modes_ptr": None}), (" masked", {})):
        found[f"head of the engine{name}"] = compiled(
            head_kernels.forward, {**fixed, **masks}, numbers
        )
        learner = {**fixed, **masks, "scales_ptr": None}
        found[f"head of the learner{name}"] = compiled(head_kernels.forward, learner, numbers)
    return {**found, **recurrence()}


if __name__ == "__main__":
    print(json.dumps(main()))
