"""Exports: whole or absent, opened by transformers, described correctly by their card; adapters."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from graft import cli
from graft.commands.export import size_in_bytes
from graft.files import write_json
from graft.models.decoder import Decoder
from graft.models.extra_actions import ACTIONS, extend
from graft.models.io.export import ExportError, atomic_folder, open_source
from graft.models.io.gguf_tokenizer import QWEN_2
from graft.models.io.load import ModelFileError, load_model
from graft.models.io.model_card import read_origin
from graft.models.io.save import save_model
from graft.models.io.tensor_names import hf_names
from graft.models.shape import ModelShape
from graft.text.tokenizer import FastTokenizer
from tests.command_line import graft

QWEN3 = ModelShape(
    family="qwen3", width=32, layers=2, heads=4, kv_heads=2, head_dim=8, ff=64, max_positions=128
)
QWEN2 = replace(QWEN3, family="qwen2", qk_norm=False, qkv_bias=True, tied=False)
LLAMA = replace(QWEN3, family="llama", qk_norm=False, tied=False, norm_eps=1e-5)
QUICKSTART = replace(
    QWEN3,
    width=192,
    layers=3,
    heads=6,
    kv_heads=6,
    head_dim=32,
    ff=384,
    tied=False,
    rope_theta=100.0,
)
RECIPE = "run: {name: quick}\nmodel: {path: '', chat_template: ''}\ntrain: {lr: 2.0e-4}\n"


def random_decoder(shape: ModelShape, seed: int = 0, scale: float = 0.5) -> Decoder:
    decoder = Decoder(shape)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.normal_(0.0, scale, generator=generator)
    return decoder


def digits() -> FastTokenizer:
    return FastTokenizer.characters("0123456789+-*=[] ")


def checkpoint(
    root: Path,
    shape: ModelShape = QWEN3,
    tokenizer: FastTokenizer | None = None,
    name: str = "rl-000004",
    recipe: str = RECIPE,
) -> Path:
    """A run with one checkpoint, as training leaves it."""
    tokenizer = tokenizer or digits()
    folder = root / "quick" / "checkpoints" / name
    decoder = random_decoder(replace(shape, vocab_size=tokenizer.vocab_size))
    ids = {"eos_token_id": tokenizer.eos_id, "pad_token_id": tokenizer.pad_id}
    save_model(decoder, folder, special={k: v for k, v in ids.items() if v is not None})
    tokenizer.save(folder)
    write_json(folder / "state.json", {"phase": "rl", "step": int(name[-6:])})
    (root / "quick" / "config.yaml").write_text(recipe)
    return folder


def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: object
) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `graft export ...`."""
    monkeypatch.setattr(sys, "argv", ["graft", "export", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    printed = capsys.readouterr()
    return int(ended.value.code or 0), printed.out, printed.err


@pytest.fixture
def export(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    return lambda *arguments: run(monkeypatch, capsys, *arguments)


def done(export: Any, *arguments: object) -> dict[str, Any]:
    code, output, complained = export(*arguments, "--json")
    assert code == 0, complained
    return json.loads(output.splitlines()[-1])


def assert_same(one: Decoder, other: Decoder) -> None:
    for name, tensor in hf_names(one).items():
        assert torch.equal(hf_names(other)[name], tensor), name


# the folder


def test_a_run_becomes_a_folder_with_all_its_parts(tmp_path: Path, export: Any) -> None:
    source = checkpoint(tmp_path)
    out = tmp_path / "out"
    result = done(export, tmp_path / "quick", "--out", out, "--shard-size", "20KB")
    names = {file.name for file in out.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors.index.json"} <= names
    assert {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "README.md"} <= names
    assert not names & {"trainer", "state.json", "model.safetensors"}
    shards = sorted(out.glob("model-*.safetensors"))
    assert len(shards) > 1
    total = sum(t.numel() * 4 for shard in shards for t in load_file(shard).values())
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == total
    assert sorted(result["files"]) == sorted(names) and result["dtype"] == "float32"
    assert_same(load_model(out), load_model(source))
    assert len({file.stat().st_mode for file in out.iterdir()}) == 1  # all as readable as the card


def test_half_precision_is_a_rounding_and_nothing_else(tmp_path: Path, export: Any) -> None:
    source = checkpoint(tmp_path)
    done(export, source, "--out", tmp_path / "half", "--dtype", "bfloat16")
    stored = load_file(tmp_path / "half" / "model.safetensors")
    for name, tensor in hf_names(load_model(source)).items():
        assert torch.equal(stored[name], tensor.bfloat16())
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    assert done(export, tmp_path / "half", "--out", tmp_path / "again")["dtype"] == "bfloat16"


def chatml_tokenizer() -> FastTokenizer:
    """Bytes, with ChatML's tokens; the eos is not what ends a turn."""
    characters = pre_tokenizers.ByteLevel.alphabet()
    vocab = {character: index for index, character in enumerate(sorted(characters))}
    merges = [("1", "2"), ("12", "3")]
    vocab |= {"12": 256, "123": 257}
    backend = Backend(models.BPE(vocab, merges))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(QWEN_2), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])  # 258, 259, 260
    from graft.text.template import CHATML

    special = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"}
    return FastTokenizer(backend, special, {"default": CHATML})


def test_what_ends_a_turn_ends_generation_and_penalties_are_noted(
    tmp_path: Path, export: Any
) -> None:
    source = checkpoint(tmp_path, tokenizer=chatml_tokenizer())
    write_json(
        source / "generation_config.json",
        {"eos_token_id": [258, 7], "temperature": 0.7, "repetition_penalty": 1.05},
    )
    result = done(export, source, "--out", tmp_path / "out")
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [258, 7, 260]
    assert generation["temperature"] == 0.7 and generation["repetition_penalty"] == 1.05
    assert any("repetition_penalty=1.05" in note for note in result["notes"])
    assert "repetition_penalty=1.05" in (tmp_path / "out" / "README.md").read_text()


def test_the_template_the_run_was_trained_with_is_the_one_exported(
    tmp_path: Path, export: Any
) -> None:
    tokenizer = chatml_tokenizer()
    recipe = RECIPE.replace("chat_template: ''", "chat_template: plain")
    source = checkpoint(tmp_path, tokenizer=tokenizer, recipe=recipe)
    done(export, source, "--out", tmp_path / "out")
    from graft.text.template import CHATML, PLAIN

    assert (tmp_path / "out" / "chat_template.jinja").read_text() == PLAIN
    done(export, source, "--out", tmp_path / "other", "--template", "chatml")
    assert (tmp_path / "other" / "chat_template.jinja").read_text() == CHATML


def test_actions_come_along_and_the_card_names_what_ignores_them(
    tmp_path: Path, export: Any
) -> None:
    source = checkpoint(tmp_path)
    save_model(extend(load_model(source), [3, None]), source)
    write_json(source / "actions.json", {"actions": ["add", "sub"]})
    done(export, source, "--out", tmp_path / "out")
    ours, theirs = load_file(tmp_path / "out" / ACTIONS), load_file(source / ACTIONS)
    assert torch.equal(ours["rows"], theirs["rows"]) and ours["rows"].shape == (2, 32)
    assert json.loads((tmp_path / "out" / "actions.json").read_text())["actions"] == ["add", "sub"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert "2 actions beyond the vocabulary" in card and "transformers ignores them" in card
    save_file({"rows": torch.zeros(2, 31)}, source / ACTIONS)
    code, _, complained = export(source, "--out", tmp_path / "bad")
    assert code == 1 and "another model" in complained and not (tmp_path / "bad").exists()


# the card


def test_the_card_has_recipe_scores_versions_and_how_to_load(tmp_path: Path, export: Any) -> None:
    source = checkpoint(tmp_path)
    before, after = {"greedy": 0.25, "sampled": 0.125}, {"greedy": 0.875, "sampled": 0.75}
    versions = {"graft": "0.0.9", "torch": "2.11.0", "python": "3.12.1"}
    summary = {"before": before, "after": after, "checkpoint": str(source), "versions": versions}
    write_json(tmp_path / "quick" / "summary.json", summary)
    measured = {"pass@4": {"value": 0.5, "interval": [0.43, 0.57]}}
    scores = {"gsm": {"tasks": 200, "samples": 4, "measures": measured}}
    rows = [
        {"checkpoint": "rl-000004", "scores": scores},
        {"checkpoint": "rl-000002", "scores": {}},
    ]
    (tmp_path / "quick" / "evaluations").mkdir()
    table = {"rows": rows, "caption": "Four attempts each."}
    write_json(tmp_path / "quick" / "evaluations" / "table.json", table)
    done(export, tmp_path / "quick", "--out", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert "train: {lr: 2.0e-4}" in card and "checkpoint `rl-000004` of the run `quick`" in card
    assert "| before RL | 0.25 | 0.125 |" in card and "| this checkpoint | 0.875 | 0.75 |" in card
    assert "| table | gsm | 200 | 4 | 0.500 [0.430, 0.570] |" in card
    assert "Four attempts each." in card and "| trained with | 0.0.9 | 2.11.0 | 3.12.1 |" in card
    assert 'from_pretrained("out", dtype=torch.float32)' in card


def test_the_card_has_no_secret_of_an_older_run(tmp_path: Path) -> None:
    secret = "task: {args: {token: canary-1, url: 'https://me:canary-2@host/', lr_key: question}}\n"
    recipe = read_origin(checkpoint(tmp_path, recipe=RECIPE + secret)).recipe
    assert "canary" not in recipe and "token: '***'" in recipe and "lr_key: question" in recipe


def test_scores_of_the_last_checkpoint_are_not_given_to_an_earlier_one(tmp_path: Path) -> None:
    first, last = checkpoint(tmp_path, name="rl-000002"), checkpoint(tmp_path, name="rl-000004")
    summary = {"before": {"greedy": 0.1}, "after": {"greedy": 0.9}, "checkpoint": str(last)}
    write_json(tmp_path / "quick" / "summary.json", summary)
    assert read_origin(last).scores == {"before": {"greedy": 0.1}, "after": {"greedy": 0.9}}
    assert read_origin(first).scores == {"before": {"greedy": 0.1}}
    write_json(first / "state.json", {"score": 0.4})
    assert read_origin(first).scores["after"] == {"sampled": 0.4}
    (tmp_path / "quick" / "summary.json").write_text("{broken")
    assert read_origin(last).scores == {}


# whole or absent


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_an_existing_folder_is_kept_unless_forced(tmp_path: Path, export: Any) -> None:
    source = checkpoint(tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    done(export, source, "--out", out)  # an empty one is as good as none
    before = contents(out)
    code, _, complained = export(source, "--out", out, "--dtype", "bfloat16")
    assert code == 2 and "exists and is not empty" in complained and contents(out) == before
    done(export, source, "--out", out, "--dtype", "bfloat16", "--shard-size", "20KB", "--force")
    assert "model.safetensors" in before and "model.safetensors" not in contents(out)
    done(export, source, "--out", out, "--force")  # shards too are what an export writes
    assert contents(out) == before
    code, _, complained = export(source, "--out", source, "--force")
    assert code == 2 and "holds what is exported" in complained
    assert (source / "model.safetensors").exists()
    assert not list(tmp_path.glob(".*"))


def test_every_kind_of_export_is_replaced_by_force(tmp_path: Path, export: Any) -> None:
    source = checkpoint(tmp_path, tokenizer=chatml_tokenizer())
    adapters(source / "adapter", tmp_path / "base")
    save_model(extend(load_model(source), [3, None]), source)
    write_json(source / "actions.json", {"actions": ["add", "sub"]})
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "brief.jinja").write_text("{{ messages }}")
    for arguments in ([], ["--adapter"]):
        done(export, source, "--out", tmp_path / "out", "--force", *arguments)
        before = contents(tmp_path / "out")
        assert {"actions.json", "additional_chat_templates/brief.jinja"} <= {*before}
        done(export, source, "--out", tmp_path / "out", "--force", *arguments)
        assert contents(tmp_path / "out") == before


def test_force_spares_what_is_no_export_or_more_than_one(tmp_path: Path, export: Any) -> None:
    source = checkpoint(tmp_path / "one")
    other = checkpoint(tmp_path / "two")  # another run's checkpoint
    (other / "trainer.pt").write_bytes(b"moments")
    model = tmp_path / "model"  # a model with a card that graft did not write
    save_model(load_model(source), model)
    digits().save(model)
    (model / "README.md").write_text("# mine\n")
    mixed = tmp_path / "mixed"
    done(export, source, "--out", mixed)
    (mixed / "notes").mkdir()
    (mixed / "notes" / "mine.txt").write_text("x")
    (photos := tmp_path / "photos").mkdir()
    for number in range(6):
        (photos / f"{number}.png").touch()
    for folder, why in (
        (other, "holds state.json, trainer.pt, which no export writes"),
        (model, "and no README.md with the mark of an export"),
        (mixed, "holds notes, notes/mine.txt, which no export writes"),
        (photos, "holds 0.png, 1.png, 2.png, 3.png, 4.png and 1 more, which no export writes"),
    ):
        before = contents(folder)
        code, _, complained = export(source, "--out", folder, "--force")
        assert code == 2 and why in complained, complained
        assert "remove it yourself, or give another --out" in complained
        assert contents(folder) == before


def test_an_error_half_way_leaves_nothing_under_the_final_name(tmp_path: Path) -> None:
    full = pytest.raises(ExportError, match=r"cannot write .*out' \(.*No space left.*MB are free")
    with full, atomic_folder(tmp_path / "out", 10, force=False) as aside:
        (aside / "half").touch()
        raise OSError(28, "No space left on device")
    assert not list(tmp_path.iterdir())
    full = pytest.raises(ExportError, match=r"about 1,000,000,000,000 MB are needed")
    with full, atomic_folder(tmp_path / "out", 10**18, force=False):
        pytest.fail("there was no room")
    assert not list(tmp_path.iterdir())


def test_a_disk_that_takes_no_more_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    source = checkpoint(tmp_path)

    ended = graft("export", str(source), "--out", str(tmp_path / "out"), largest_file=30_000)
    assert ended.returncode == 1, ended.stderr
    assert "cannot write" in ended.stderr and "Traceback" not in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1, ended.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["quick"]


# what is refused


def test_wrong_usage_is_reported_in_one_line(tmp_path: Path, export: Any) -> None:
    source = checkpoint(tmp_path)
    out = tmp_path / "out"
    cases: list[tuple[list[object], int, str]] = [
        ([], 2, "give a checkpoint or run to export, or --from-verl"),
        ([source], 2, "give the folder to write: --out FOLDER"),
        ([source, "--out", out, "--shard-size", "many"], 2, "'many' is not a size"),
        ([source, "--out", out, "--dtype", "int4"], 2, "'int4' is not written"),
        ([source, "--out", out, "--adapter", "--merge"], 2, "--merge"),
        ([source, "--out", out, "--merge", "--adapter"], 2, "--merge"),
        ([source, "--out", out, "--adapter"], 1, "trained without adapters"),
        ([source, "--adapter", "there"], 2, "'there' was given to it"),
        ([source, "--adapter=there"], 2, "--adapter --out there"),
        ([source, "other", "--out", out], 2, "other"),
        (["--from-verl", source, "--out", out, "--adapter"], 2, "--from-verl needs --merge"),
        ([tmp_path / "nowhere", "--out", out], 2, "there is no such folder or file"),
        ([source, "--out", source / "config.json"], 2, "is a file; give --out"),
    ]
    for arguments, code, text in cases:
        ended, _, complained = export(*arguments)
        assert ended == code and text in complained, (arguments, complained)
        assert "Traceback" not in complained and not out.exists()


def test_broken_models_are_named_and_nothing_is_written(tmp_path: Path, export: Any) -> None:
    source = checkpoint(tmp_path)
    weights, config = source / "model.safetensors", source / "config.json"
    good, text = weights.read_bytes(), config.read_text()
    tensors = {name: tensor.clone() for name, tensor in load_file(weights).items()}  # not mapped

    def fails(with_text: str) -> None:
        code, _, complained = export(source, "--out", tmp_path / "out")
        assert code == 1 and with_text in complained and "Traceback" not in complained, complained
        assert not (tmp_path / "out").exists()

    weights.write_bytes(good[: len(good) // 2])
    fails("is not a whole safetensors file")
    save_file({**tensors, "model.norm.weight": torch.ones(31)}, weights)
    fails("model.norm.weight [31], config says [32]")
    save_file({k: v for k, v in tensors.items() if "layers.1" not in k}, weights)
    fails("missing: model.layers.1.")
    weights.write_bytes(good)
    config.write_text(json.dumps({**json.loads(text), "model_type": "mamba"}))
    fails("model_type 'mamba' has no native decoder")
    config.write_text(text)
    big = FastTokenizer.bytes()
    big.save(source)
    fails("the tokenizer has 258 tokens and the model only 20")
    weights.unlink()
    fails("has neither model.safetensors nor")


def test_sizes_of_shards_are_read_as_people_write_them() -> None:
    assert [size_in_bytes(text) for text in ("5GB", "1.5kib", "100", "2 MB")] == [
        5_000_000_000,
        1536,
        100,
        2_000_000,
    ]


# adapters


def adapters(folder: Path, base: Path, rank: int = 2, alpha: int = 6) -> tuple[Tensor, Tensor]:
    """A PEFT folder that changes one matrix of the base."""
    generator = torch.Generator().manual_seed(4)
    down, up = (torch.randn(size, generator=generator) for size in ((rank, 32), (64, rank)))
    folder.mkdir(exist_ok=True)
    prefix = "base_model.model.model.layers.1.mlp.up_proj.lora_"
    tensors = {f"{prefix}A.weight": down, f"{prefix}B.weight": up}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none"}
    config |= {"base_model_name_or_path": str(base), "target_modules": ["up_proj"]}
    write_json(folder / "adapter_config.json", config)
    return down, up


def test_bare_adapters_are_merged_with_their_base(tmp_path: Path, export: Any) -> None:
    base = checkpoint(tmp_path)
    down, up = adapters(tmp_path / "lora", base)
    done(export, tmp_path / "lora", "--out", tmp_path / "out", "--base", base)
    name = "model.layers.1.mlp.up_proj.weight"
    ours, before = hf_names(load_model(tmp_path / "out")), hf_names(load_model(base))
    torch.testing.assert_close(ours[name], before[name] + 3.0 * up @ down, atol=1e-5, rtol=1e-5)
    assert all(torch.equal(ours[other], before[other]) for other in before if other != name)


def test_adapters_that_cannot_be_merged_are_refused_with_the_reason(tmp_path: Path) -> None:
    base = checkpoint(tmp_path)
    folder = tmp_path / "lora"
    adapters(folder, base)
    config = json.loads((folder / "adapter_config.json").read_text())

    def refused(**changes: Any) -> str:
        write_json(folder / "adapter_config.json", {**config, **changes})
        with pytest.raises(ValueError) as error, open_source(folder) as stored:
            stored.check()
        return str(error.value)

    assert "use_dora=True is not merged" in refused(use_dora=True)
    assert "lora_alpha=None" in refused(lora_alpha=None)
    assert "the config says r=3" in refused(r=3)
    assert "is not here; pass --base" in refused(base_model_name_or_path="models/gone/model")
    write_json(folder / "adapter_config.json", config)
    stored = load_file(folder / "adapter_model.safetensors")
    tensors = {name: tensor.clone() for name, tensor in stored.items()}
    save_file(
        {k: v for k, v in tensors.items() if "lora_A" in k}, folder / "adapter_model.safetensors"
    )
    assert "only one of A and B" in refused()
    wide = {k: v if "lora_B" in k else torch.ones(2, 33) for k, v in tensors.items()}
    save_file(wide, folder / "adapter_model.safetensors")
    assert "[64, 2] x [2, 33], and the base's weight is [64, 32]" in refused()


def test_adapters_alone_are_a_folder_for_peft(tmp_path: Path, export: Any) -> None:
    source = checkpoint(tmp_path)  # merged weights, adapters below them, as training leaves them
    adapters(source / "adapter", tmp_path / "base")
    done(export, source, "--out", tmp_path / "out", "--adapter")
    names = {file.name for file in (tmp_path / "out").iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "README.md"} <= names
    assert not {"model.safetensors", "config.json"} & names
    assert "PeftModelForCausalLM.from_pretrained" in (tmp_path / "out" / "README.md").read_text()
    with pytest.raises(
        ModelFileError, match=r"adapters only; graft export .*out --out FOLDER merges"
    ):
        load_model(tmp_path / "out")
    done(export, source, "--out", tmp_path / "merged", "--merge")  # the weights hold them already
    assert not list((tmp_path / "merged").rglob("adapter*"))  # or PEFT would add them once more
    assert_same(load_model(tmp_path / "merged"), load_model(source))


# verl


def test_verl_shards_become_a_folder(tmp_path: Path, export: Any) -> None:
    base = checkpoint(tmp_path)
    shards = tmp_path / "global_step_10" / "actor"
    shards.mkdir(parents=True)
    tensors = hf_names(load_model(base))
    for rank in range(2):
        part = {name: t.tensor_split(2)[rank].clone() for name, t in tensors.items()}
        torch.save(part, shards / f"model_world_size_2_rank_{rank}.pt")
    out = tmp_path / "out"
    done(export, "--from-verl", shards, "--base", base, "--out", out, "--dtype", "float32")
    assert_same(load_model(out), load_model(base))
    assert "verl's FSDP shards" in (out / "README.md").read_text()
    code, _, complained = export(shards, "--out", tmp_path / "other")
    assert code == 2 and "--from-verl" in complained


# the same greedy tokens


def greedy_by_graft(folder: Path, prompts: Sequence[str], max_tokens: int) -> list[list[int]]:
    from graft.evaluate.generate import Generator
    from graft.rollout.options import RolloutOptions

    generator = Generator.open(folder, device="cpu", dtype="float32")
    options = RolloutOptions(temperature=0.0, max_tokens=max_tokens)
    drawn = asyncio.run(generator.complete(prompts, options))
    return [answers[0]["tokens"] for answers in drawn]


def greedy_by_transformers(
    folder: Path, prompts: Sequence[str], max_tokens: int
) -> list[list[int]]:
    """Prompts of one length at a time, so that nothing is padded."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ends = model.generation_config.eos_token_id
    ends = {ends} if isinstance(ends, int) else set(ends)
    by_length: dict[int, list[tuple[int, list[int]]]] = {}
    for number, prompt in enumerate(prompts):
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        by_length.setdefault(len(ids), []).append((number, ids))
    found: dict[int, list[int]] = {}
    for length, group in by_length.items():
        tokens = torch.tensor([ids for _, ids in group])
        with torch.no_grad():
            written = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                do_sample=False,
                max_new_tokens=max_tokens,
            )
        for (number, _), row in zip(group, written[:, length:].tolist(), strict=True):
            end = next((i + 1 for i, token in enumerate(row) if token in ends), len(row))
            found[number] = row[:end]
    return [found[number] for number in range(len(prompts))]


@pytest.mark.peer
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["quickstart", "qwen2", "qwen3", "llama"])
def test_the_export_writes_the_same_greedy_tokens_in_transformers(
    name: str, tmp_path: Path, export: Any
) -> None:
    shape = {"quickstart": QUICKSTART, "qwen2": QWEN2, "qwen3": QWEN3, "llama": LLAMA}[name]
    tokenizer = digits() if name == "quickstart" else chatml_tokenizer()
    source = checkpoint(tmp_path, shape, tokenizer)
    done(export, source, "--out", tmp_path / "out", "--shard-size", "500KB")
    prompts = [f"{a}+{b}=" for a in range(3, 23, 2) for b in range(7, 107, 10)]
    assert len(set(prompts)) == 100
    ours = greedy_by_graft(source, prompts, 16)
    theirs = greedy_by_transformers(tmp_path / "out", prompts, 16)
    assert ours == theirs
    assert greedy_by_graft(tmp_path / "out", prompts[:10], 16) == ours[:10]
    assert len({tuple(tokens) for tokens in ours}) > 20  # they are not all alike


@pytest.mark.parametrize("value, word", [(float("nan"), "NaN"), (float("inf"), "inf")])
def test_weights_that_are_no_numbers_are_not_published(
    tmp_path: Path, export: Any, value: float, word: str
) -> None:
    folder, name = checkpoint(tmp_path), "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name].view(-1)[-1] = value
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    code, _, complained = export(folder, "--out", tmp_path / "out")
    assert code != 0 and f"{name} holds {word}" in complained and str(folder) in complained
    assert not (tmp_path / "out").exists()
    with pytest.raises(ModelFileError, match=f"{name} holds {word}"):
        load_model(folder)


def test_adapters_that_are_no_numbers_are_not_merged(tmp_path: Path, export: Any) -> None:
    base = checkpoint(tmp_path)
    adapters(tmp_path / "alone", base)
    file = tmp_path / "alone" / "adapter_model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).fill_(float("nan"))
    save_file(tensors, file, {"format": "pt"})
    for more in ((), ("--adapter",)):
        code, _, complained = export(tmp_path / "alone", *more, "--out", tmp_path / "out")
        assert code != 0 and "holds NaN" in complained and str(file) in complained


def test_a_number_that_a_dtype_does_not_have_is_not_written(tmp_path: Path, export: Any) -> None:
    """7e4 is finite in float32 and bfloat16, and inf in float16."""
    folder, name = checkpoint(tmp_path), "model.layers.0.self_attn.q_proj.weight"
    tensors = load_file(folder / "model.safetensors")
    tensors[name][0, 0] = 7e4
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    done(export, folder, "--out", tmp_path / "fine", "--dtype", "bfloat16")
    code, _, complained = export(folder, "--out", tmp_path / "out", "--dtype", "float16")
    assert code != 0 and f"{name} holds inf" in complained and "bfloat16" in complained
    assert not (tmp_path / "out").exists()
