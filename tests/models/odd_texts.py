"""Texts on which tokenizers differ: accents in pieces, scripts, emoji, digits, blanks, line ends."""

from __future__ import annotations

import random
import unicodedata

WORDS = [
    "café naïve Ångström",
    "Übermäßig größer",
    "résumé.txt",
    "한국어 파일 이름",
    "が ぱ ヴ ﾊﾟ",
    "Tiếng Việt rất khó",
    "שָׁלוֹם עולם",
    "السَّلامُ عليكم ١٢٣",
    "हिन्दी में क्षत्रिय १२३",
    "ไทยภาษา น้ำ",
    "Ελληνικά ά έ ΰ",
    "ё й Ї",
    "中文字符，标点。日本語テスト",
    "Ⅷ ½ ² ﬁ ﬀ Å Ω K",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇩🇪",
    "1 12 123 1234 12345 3.14159 1,000,000",
    "x=1;y+=22;z**333",
    "I'm you'LL we'Ve it'S don’t",
    "HTTPServer camelCase snake_case SHOUT iPhone",
    "def f(x):\n    return x\n\n\n\tif y:\r\n\t\tpass\r\n",
    "a  b   c    d     e",
    "\t\t tab \t",
    "line\r\nline\rline\n\n",
    "nul\x00 bell\x07 esc\x1b[0m del\x7f",
    "\u00a0nbsp\u2003em\u200bzero\u2028sep\ufeffbom",
    "\u202eright\u202c \u2066left\u2069",
    "https://example.org/a/b?c=d&e=%20#f",
    "<|im_start|> </s> [INST] <0x0A> <unk>",
    "z̷a̶l̸g̴o̵ ȩ̛̊",
    "\u1100\u1161\u11a8 \u1112\u1161\u11ab\u1100\u1173\u11af",
    "e\u0301 E\u0301 a\u030a o\u0308\u0304 s\u0323\u0307",
    "…—–‘’“”«»„",
    "€ £ ¥ ₿ ∑ ∫ √ ≠ → ⇒",
    "𝕳𝖊𝖑𝖑𝖔 𠮷 𐍈 \U000e0041",
    "///path\\to\\file ~~~ === ___ !!!???",
]


def odd_texts(count: int = 300) -> list[str]:
    """The words as they are, taken apart (as macOS names files) and put together, then mixtures of all."""
    forms = [unicodedata.normalize(form, word) for form in ("NFC", "NFD", "NFKD") for word in WORDS]
    texts = list(dict.fromkeys([*WORDS, *forms, " ", "  ", "\n", ""]))
    rng = random.Random(7)
    while len(texts) < count:
        pieces = rng.sample(WORDS + forms, 3)
        blanks = rng.choice(["", " ", "  ", "\n", "\r\n", "\t", " \n "])
        text = blanks.join(pieces)
        start = rng.randrange(len(text))
        texts.append(text[start : start + rng.randrange(3, 60)])
    return texts
