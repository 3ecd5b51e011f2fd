"""Files made to fill the memory are errors with a name."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from graft.config import ConfigError, load_config
from graft.data.arrow_bounds import written_out
from graft.data.errors import DataError
from graft.data.tables import read_table
from graft.models.io.gguf_head import GgufHeadError, read_head
from graft.models.io.load import ModelFileError, read_index
from graft.models.shape import ModelShape, UnsupportedModel
from graft.replay.recorded_step import CannotReplay, RecordedStep
from graft.runs.json_lines import GrowingJsonl, lines_from_the_end
from graft.runs.record import RunRecord
from graft.text.template import CHATML, TemplateError, render
from graft.text.tokenizer import FastTokenizer
from graft.train.run_dir.metrics_log import read_metrics
from graft.trust.bounds import (
    MAX_VALUES,
    OutOfBounds,
    check_interpolations,
    check_yaml,
    parse_json,
    read_bytes,
)

HELLO = [{"role": "user", "content": "hello"}]

# recipes


def laughs(width: int, depth: int) -> str:
    levels = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * width)}]" for n in range(1, depth)]
    return "\n".join(["a0: &a0 [x]", *levels])


def test_aliases_are_counted_as_often_as_they_stand():
    # the last list has 10 ** 4 texts, the file 7 + 2 + 12 + ... nodes: 13,000 or so
    check_yaml(laughs(10, 5), "it")
    with pytest.raises(OutOfBounds, match=f"more than {MAX_VALUES:,} values"):
        check_yaml(laughs(10, 9), "it")
    with pytest.raises(OutOfBounds, match="values"):
        check_yaml("a: &a [*a]", "it")


@pytest.mark.parametrize("text", ["a: " + "[" * 200, "? " * 200, "a: " + "{b: " * 200])
def test_deep_yaml_is_refused_before_a_loader_crashes(text: str):
    with pytest.raises(OutOfBounds, match="nested more than 100"):
        check_yaml(text, "it")


@pytest.mark.parametrize("number", ["0x" + "f" * 5000, "1" * 5000, ":".join(["59"] * 2000)])
def test_numbers_of_thousands_of_digits_are_refused(number: str):
    with pytest.raises(OutOfBounds, match=r"a number of [\d,]+ characters"):
        check_yaml(f"train: {{lr: {number}}}", "a recipe")
    check_yaml(f"text: '{number}'\nlr: 1e-5", "a recipe")  # a text may be long


def test_tokenizers_have_some_thousand_special_tokens(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("graft.text.tokenizer.MAX_CONTROL_TOKENS", 1)
    with pytest.raises(ValueError, match=r"\d special tokens; .* at most 1 are possible"):
        FastTokenizer.bytes()


def test_a_pipe_under_the_name_of_a_record_is_not_opened(tmp_path: Path):
    (tmp_path / "episodes").mkdir()
    for name in ("episodes/step_000001.jsonl", "metrics.jsonl", "train.jsonl"):
        os.mkfifo(tmp_path / name)
    with pytest.raises(CannotReplay, match="step 1 are missing"):
        _ = RecordedStep(tmp_path, 1, {}).episodes
    with pytest.raises(OutOfBounds, match="a device or a pipe"):
        read_metrics(tmp_path / "metrics.jsonl")
    assert list(GrowingJsonl(tmp_path / "metrics.jsonl").new()) == []
    for file in (tmp_path / "metrics.jsonl", Path("/dev/zero")):
        assert list(lines_from_the_end(file)) == []
    (tmp_path / "test.jsonl").write_text('{"question": "1", "answer": "1"}\n')
    assert len(read_table(tmp_path)) == 1


def test_interpolations_are_counted_before_they_are_written():
    doubled = {"a0": "x" * 1000} | {f"a{n}": f"${{a{n - 1}}}${{a{n - 1}}}" for n in range(1, 8)}
    check_interpolations(doubled, "it")  # 2 ** 7 thousand
    more = doubled | {f"a{n}": f"${{.a{n - 1}}}${{a{n - 1}}}" for n in range(8, 40)}
    for values in (more, {"a": "${b}", "b": "${a}"}, {"a": ["${a}"]}, {"a": {"b": "${..a}"}}):
        with pytest.raises(OutOfBounds, match="interpolations"):
            check_interpolations(values, "it")


@pytest.mark.parametrize(
    "text",
    [
        laughs(10, 30),
        "a: " + "[" * 100_000,
        "a: &a [*a]",
        "model: !!python/name:os.system",
        "\0",
        "[" * 9,
    ],
)
def test_a_recipe_or_run_that_grows_is_one_line(tmp_path: Path, text: str):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"config.yaml is not a recipe"):
        load_config(str(tmp_path / "config.yaml"))
    assert RunRecord(tmp_path).config == {}


def test_devices_pipes_and_large_files_are_not_read(tmp_path: Path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "large").write_bytes(b"x" * 101)
    for file in (Path("/dev/zero"), tmp_path / "pipe"):
        with pytest.raises(OutOfBounds, match="a device or a pipe"):
            read_bytes(file)
    with pytest.raises(OutOfBounds, match="has 101 bytes; at most 100"):
        read_bytes(tmp_path / "large", 100)
    with pytest.raises(OutOfBounds, match="nested too deeply"):
        parse_json("[" * 100_000)


# chat templates


TEMPLATES = {
    "{{ 'a' * 10000000000 }}": "10,000,000,000",
    "{{ 'a'.ljust(10000000000) }}": "10,000,000,000",
    "{{ '%10000000000d' % 1 }}": "10,000,000,000",
    "{{ '%*d' % (10000000000, 1) }}": "10,000,000,000",
    "{{ '{:>10000000000}'.format(1) }}": "10,000,000,000",
    "{{ '{:>{w}}'.format(1, w=10000000000) }}": "20,000,000,000",
    "{{ (1).to_bytes(10000000000, 'big') }}": "10,000,000,000",
    "{{ 'a' | center(10000000000) }}": "10,000,000,000",
    "{{ ['a'] | map('center', 10000000000) | list }}": "10,000,000,000",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}": "10,000,000,000",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}": "10,000,000,000",
    "{{ (['a' * 100000] * 100000) | join }}": "10,000,000,000",
    "{{ ['a' * 100000] | slice(10000000000) | list }}": "10,000,000,000",
    "{% set n = namespace(s='a') %}{% for i in range(64) %}{% set n.s = n.s ~ n.s %}{% endfor %}": "33,5",
    "{% set n = namespace(s='a') %}{% for i in range(64) %}{% set n.s %}{{ n.s }}{{ n.s }}{% endset %}"
    "{% endfor %}": "33,5",
    "{% set n = namespace(s=[1]) %}{% for i in range(40) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
    "{{ n.s }}": "200,000 parts",
    "{% set n = namespace(s=[1]) %}{% for i in range(40) %}{% set n.s = [n.s, n.s] %}{% endfor %}"
    "{{ n.s | tojson }}": "200,000 parts",
    "{{ 2 ** 1000000 }}": "too many digits",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}": "nested too deeply",
    "{{ '' " + "~ 'a' " * 3000 + "}}": "",
    "{{ ''.__class__.__mro__ }}": "unsafe",
    "{{ cycler.__init__.__globals__ }}": "unsafe",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_grows_is_refused(template: str):
    if not TEMPLATES[template]:
        assert render(template, HELLO) == "a" * 3000
        return
    with pytest.raises(TemplateError, match=TEMPLATES[template]):
        render(template, HELLO)


def test_a_template_without_end_is_stopped(monkeypatch):
    monkeypatch.setattr("graft.text.template_limits.MAX_SECONDS", 0.05)
    loops = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    calls = "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(50) }}"
    for template in (loops, calls):
        with pytest.raises(TemplateError, match="runs for more than"):
            render(template, HELLO)
    assert render(CHATML, HELLO) == "<|im_start|>user\nhello<|im_end|>\n"  # the clock starts anew


def test_loops_know_their_length():
    text = "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% endfor %}"
    assert render(text, HELLO * 2) == "1/2False 2/2True "
    assert render(
        "{% for m in missing %}{% endfor %}{{ messages | map(attribute='role') | join }}", HELLO
    )


# rows


def test_parquet_that_stands_for_gigabytes_is_refused(tmp_path: Path):
    schema = pyarrow.schema([("question", pyarrow.string())])
    with pyarrow.parquet.ParquetWriter(
        tmp_path / "rows.parquet", schema, compression="zstd", use_dictionary=False
    ) as writer:
        batch = pyarrow.record_batch([pyarrow.array(["a" * 1_000_000] * 30)], schema)
        for _ in range(20):
            writer.write_batch(batch)  # 600 MB in 60 KB
    assert (tmp_path / "rows.parquet").stat().st_size < 1_000_000
    with pytest.raises(DataError, match=r"stands for 6\d\d,\d\d\d,\d\d\d, more than 200 times"):
        read_table(tmp_path / "rows.parquet")


def test_more_rows_than_bytes_are_refused(tmp_path: Path):
    table = pyarrow.table({"question": pyarrow.array([0] * 2_000_000).cast(pyarrow.string())})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"2,000,000 rows, more than one per byte"):
        read_table(tmp_path / "rows.parquet")


def test_repeated_texts_stay_in_their_dictionary(tmp_path: Path):
    """100 rows of 10 MB are a gigabyte, and the file has 20 KB."""
    text = "a" * 10_000_000
    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 100), pyarrow.array([text]))
    file = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"question": column}), file, compression="zstd")
    rows = read_table(file)
    assert rows.rows.nbytes < 20_000_000 and written_out(rows.rows) == 1_000_000_000
    assert rows[99] == {"question": text} and len(rows) == 100
    assert next(iter(rows))["question"] == text


def test_compressed_arrow_is_read_up_to_the_bound_whatever_its_size_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """2,000 letters and three offsets of 4 bytes, which are not compressed."""
    table = pyarrow.table({"question": ["ab" * 500, "cd" * 500]})
    for codec, name in (("lz4", "small.arrow"), (None, "plain.arrow")):
        options = pyarrow.ipc.IpcWriteOptions(compression=codec)
        with pyarrow.ipc.new_file(tmp_path / name, table.schema, options=options) as writer:
            writer.write_table(table)
    monkeypatch.setattr("graft.data.arrow_bounds.MAX_DECODED", 1_999)
    with pytest.raises(
        DataError, match=r"is compressed, and stands for 2,\d+ .*without compression"
    ):
        read_table(tmp_path / "small.arrow")
    assert len(read_table(tmp_path / "plain.arrow")) == 2
    monkeypatch.setattr("graft.data.arrow_bounds.MAX_DECODED", 2_500)
    assert len(read_table(tmp_path / "small.arrow")) == 2


def test_arrow_with_offsets_outside_of_its_data_is_damaged(tmp_path: Path):
    table = pyarrow.table({"question": ["abc", "defg"]})
    with pyarrow.ipc.new_file(tmp_path / "rows.arrow", table.schema) as writer:
        writer.write_table(table)
    whole = (tmp_path / "rows.arrow").read_bytes()
    offsets = struct.pack("<3i", 0, 3, 7)
    assert whole.count(offsets) == 1
    (tmp_path / "rows.arrow").write_bytes(whole.replace(offsets, struct.pack("<3i", 0, 1 << 30, 7)))
    with pytest.raises(DataError, match="damaged"):
        list(read_table(tmp_path / "rows.arrow"))


def test_compressed_arrow_is_measured_first(tmp_path: Path):
    table = pyarrow.table({"question": ["a" * 100_000_000]})
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    with pyarrow.ipc.new_file(tmp_path / "rows.arrow", table.schema, options=options) as writer:
        for _ in range(6):
            writer.write_table(table)
    with pytest.raises(DataError, match="stands for 600,"):
        read_table(tmp_path / "rows.arrow")


# models


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


def head(entries: bytes, num_entries: int = 1, tensors: bytes = b"", num_tensors: int = 0) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_entries) + entries + tensors


HEADS = {
    "entries": (head(b"", 1 << 62), "4,611,686,018,427,387,904 entries"),
    "tensors": (head(b"", 0, b"", 1 << 62), "tensors"),
    "name": (head(struct.pack("<Q", 1 << 62)), "bytes in a text"),
    "text": (head(text(b"a") + struct.pack("<IQ", 8, 1 << 20)), "bytes are missing"),
    "array": (head(text(b"a") + struct.pack("<IIQ", 9, 4, 1 << 60)), "values in arrays"),
    "nested": (head(text(b"a") + struct.pack("<IIQ", 9, 9, 1)), "values of kind 9"),
    "kind": (head(text(b"a") + struct.pack("<I", 77)), "kind 77"),
    "sizes": (head(b"", 0, text(b"a") + struct.pack("<I", 1000), 1), "1,000 sizes"),
    "tensor": (
        head(b"", 0, text(b"a") + struct.pack("<I2QIQ", 2, 1 << 40, 1 << 40, 0, 0), 1),
        "not in",
    ),
    "cut": (b"GGUF\3", "cut off"),
    "other": (b"PK", "does not begin"),
}


@pytest.mark.parametrize("name", HEADS)
def test_the_head_of_a_gguf_file_must_fit_it(tmp_path: Path, name: str):
    content, why = HEADS[name]
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(GgufHeadError, match=why):
        read_head(tmp_path / "a.gguf")


@pytest.mark.parametrize("shard", ["../a.safetensors", "/etc/passwd", "", ".", 7, None, "a\0"])
def test_shards_lie_beside_their_index(tmp_path: Path, shard: object):
    index = {"weight_map": {"a": shard}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match="not a file beside it"):
        read_index(tmp_path)


@pytest.mark.parametrize(
    "size", ["layers", "width", "vocab_size", "heads", "kv_heads", "head_dim", "ff"]
)
@pytest.mark.parametrize("value", [10**12, 0, -1, "3", 2.5])
def test_sizes_of_a_model_are_bounded(size: str, value: object):
    with pytest.raises(UnsupportedModel, match=f"{size}=.*: must be from 1 to"):
        ModelShape(**{size: value})  # type: ignore[arg-type]


def test_lines_and_records_without_end_are_not_joined(tmp_path: Path, monkeypatch):
    monkeypatch.setattr("graft.data.records.MAX_ROW", 1000)
    (tmp_path / "rows.csv").write_text('question,answer\n"' + "a\n" * 2000)
    with pytest.raises(DataError, match="no row can be read from here on: a row is longer than"):
        read_table(tmp_path / "rows.csv")
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1}\n' + b"a" * (9 << 20) + b"\n")  # above 8 MB
    assert list(lines_from_the_end(file)) == []
    assert [row["step"] for row in GrowingJsonl(file).new()] == [1]
