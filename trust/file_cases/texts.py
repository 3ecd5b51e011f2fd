"""Tokenizers and chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from trust.file_cases.case import MODULE, Command, case, evil, lookers, run_copy, some
from trust.file_cases.models import model_copy, model_openers


def tokenizer_texts(rng: Random, whole: dict[str, Any]) -> list[Callable[[], str]]:
    slow = {
        "type": "Split",
        "pattern": {"Regex": r"(a+)+$"},
        "behavior": "Isolated",
        "invert": False,
    }
    worse = {**slow, "pattern": {"Regex": r"(\w+\s?)*\w+#"}}
    words = {f"w{n}": n for n in range(1_500_000)}
    added = [
        {"id": n, "content": f"<{n}>", "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False}
        for n in range(200_000)
    ]  # fmt: skip

    def changed(part: str, value: Any) -> Callable[[], str]:
        return lambda: json.dumps(whole | {part: value})

    doubled = {"type": "Replace", "pattern": {"String": "1"}, "content": "11"}
    empty = {"type": "Replace", "pattern": {"String": ""}, "content": "aa"}
    again = {"Sequence": {"id": "A", "type_id": 0}}
    end = {"SpecialToken": {"id": "<eos>", "type_id": 0}}
    bytes_again = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}

    def processor(single: list[Any], ids: int = 1) -> dict[str, Any]:
        token = {"id": "<eos>", "ids": [1] * ids, "tokens": ["<eos>"] * ids}
        return {
            "type": "TemplateProcessing",
            "single": single,
            "pair": [again, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<eos>": token},
        }

    padding = {"strategy": {"Fixed": 10**12}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    return [
        changed("pre_tokenizer", rng.choice([slow, worse])),
        changed("pre_tokenizer", {"type": "Sequence", "pretokenizers": [slow] * 20}),
        changed("normalizer", empty),
        changed(
            "normalizer", {"type": "Sequence", "normalizers": [doubled] * rng.randrange(30, 60)}
        ),
        changed("model", {"type": "WordLevel", "vocab": words, "unk_token": "w0"}),
        changed("added_tokens", added),
        changed("model", {"type": "BPE", "vocab": {"a": 0}, "merges": [["a", "b"]] * 1000}),
        changed("model", {"type": "Unigram", "vocab": [["a", float("nan")]], "unk_id": 9}),
        changed("model", {"type": "WordLevel", "vocab": {"a": 4_000_000_000}, "unk_token": "a"}),
        changed("truncation", {"max_length": -1}),
        changed("padding", padding),
        lambda: json.dumps(whole)[:-1] + ', "x": "' + "a" * 300_000_000 + '"}',
        lambda: "[" * rng.randrange(1000, 500_000),
        lambda: '{"version":' * rng.randrange(1000, 500_000),
        lambda: "{}",
        lambda: "null",
        lambda: "",
        changed("post_processor", processor([again] * rng.choice([2, 40_000, 1_500_000]))),
        changed("post_processor", processor([again, *[end] * 1000], ids=100_000)),
        lambda: json.dumps(whole | {"post_processor": processor([again, end], ids=4_000_000)}),
        lambda: json.dumps(whole)[:-1] + ', "post_processor": [' + "0," * 25_000_000 + "0]}",
        changed("normalizer", {"type": "Sequence", "normalizers": [{"type": "ByteLevel"}] * 30}),
        changed(
            "pre_tokenizer",
            {"type": "Sequence", "pretokenizers": [{**bytes_again, "use_regex": False}] * 30},
        ),
        changed(
            "decoder",
            {"type": "Sequence", "decoders": [{"type": "BPEDecoder", "suffix": ""}] * 30},
        ),
    ]


@case("tokenizers", range(24))
def tokenizer(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    place = model_copy(folder, base)
    file = place / "tokenizer.json"
    file.write_text(tokenizer_texts(rng, json.loads(file.read_text()))[variant]())
    prompt = rng.choice(["1+1=", "a" * 40 + "!", "1" * 50])
    return [["generate", "model", "--prompt", prompt, "--max-tokens", "2", "--raw"]]


@case("tokenizers", range(4))
def tokenizer_with_code(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    place = model_copy(folder, base)
    if rng.random() < 0.7:
        (place / "tokenizer.json").unlink()
    evil(folder)
    (place / "tokenizer.py").write_text(MODULE)
    (place / "evil.py").write_text(MODULE)
    classes = {"AutoTokenizer": ["tokenizer.Evil", "tokenizer.Evil"]}
    config = {
        "tokenizer_class": rng.choice(["Evil", "evil.Evil", "LlamaTokenizer"]),
        "auto_map": classes,
    }
    (place / "tokenizer_config.json").write_text(json.dumps(config))
    (place / "tokenizer.model").write_bytes(rng.choice([b"", rng.randbytes(1000), b"\x0a" * 1000]))
    return [rng.choice(model_openers("model"))]


TEMPLATES: list[str] = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}",
    "{{ 'a' * 10000000000 }}",
    "{{ 'a'.ljust(10000000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '{:>10000000000}'.format('a') }}",
    "{{ 'a' | center(10000000000) }}",
    "{{ 'a\\na' | indent(1000000000) }}",
    "{{ ('a' * 100000) | replace('a', 'b' * 100000) }}",
    "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
    "{{ ('b' * 100000).join(['a'] * 100000) }}",
    "{% set ns = namespace(s='a') %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set n = namespace(s='a') %}{% for i in range(64) %}{% set n.s = n.s ~ n.s %}{% endfor %}{{ n.s }}",
    "{% set ns = namespace(s=[1]) %}{% for i in range(64) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set n = namespace(s=[1]) %}{% for i in range(40) %}{% set n.s = [n.s, n.s] %}{% endfor %}{{ n.s }}",
    "{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ 9 ** 9 ** 9 }}",
    "{{ 2 ** 1000000000 }}",
    "{{ (10 ** 100000) ** 100000 }}",
    "{{ ([0] * 1000000000) | length }}",
    "{{ range(99999) | list | permutations }}",
    "{{ (range(99999) | batch(1, 0)) | list | length }}",
    "{{ [0] | batch(10000000000, 0) | list }}",
    "{{ [0] | slice(1000000000) | list }}",
    "{{ lipsum(n=1000000) }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.system('touch canary') }}",
    "{{ self._TemplateReference__context.namespace.__init__.__globals__ }}",
    "{{ ('%s' | attr('__mod__')) }}",
    "{{ '{0.__class__.__init__.__globals__}'.format(cycler) }}",
    "{{ messages.append(messages) }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.system('touch canary') }}",
    "{{ strftime_now('%Y' * 100000000) }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{% for m in messages recursive %}{{ loop(messages) }}{% endfor %}",
    "{{ '" + "(" * 100_000 + "' }}",
    "{{ " + "(" * 5_000 + "1" + ")" * 5_000 + " }}",
    "{{ " + "1 + " * 20_000 + "1 }}",
    "{% if a %}" * 2_000,
    "{{ raise_exception('x' * 100000000) }}",
    "{{ 'a' | urlize(10000000000) }}",
    "{{ ('a ' * 1000000) | wordwrap(1) | wordcount }}",
    "{{ ('a' * 200000) | replace('', 'b' * 200000) }}",
    "{{ (('a' * 100000) | list | join('c' * 100000)) | length }}",
    "{{ 'x' | format('a' * 10) }}",
    "{% set x = 'a' * 5000000 %}{% for i in range(99999) %}{% set y = x | upper %}{% endfor %}",
    "{% set x = 'a' * 5000000 %}{% for i in range(99999) %}{% if x in x + 'b' %}{% endif %}{% endfor %}",
    "{{ [messages] * 90000000 }}",
]


@case("templates", TEMPLATES)
def chat_template(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    place = model_copy(folder, base)
    text = variant
    if rng.random() < 0.5:
        (place / "chat_template.jinja").write_text(text)
    else:
        file = place / "tokenizer_config.json"
        config = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps(config | {"chat_template": text}))
    return [["generate", "model", "--prompt", "1+1=", "--max-tokens", "2"]]


@case("templates", TEMPLATES[::3])
def chat_template_of_a_run(folder: Path, rng: Random, base: Path, variant: Any) -> list[Command]:
    run_copy(folder, base, {"model.chat_template": variant, "model.template_args": {}})
    return some(rng, lookers("theirs")[:4], 1)
