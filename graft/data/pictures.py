"""Rows with images, videos or sounds are refused, since only text is read.

{"images": [{"bytes": ..., "path": "1.png"}], "problem": "Find x."}    refused: 'images' holds more than text
{"images": [], "problem": "What is 2 + 3?"}                            text alone
{"image": "python:3.11", "problem": "..."}                             a container, not a picture
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from graft.data.errors import BadField

COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
TEXT_ONLY = (
    "only text is read, so a model would be trained or graded on a question without what it asks "
    "about. Remove such rows, or describe in the text what there is to see"
)
_FILE = re.compile(
    r"data:|\S+\.(?:png|jpe?g|gif|webp|bmp|tiff?|svg|mp4|webm|mov|avi|mkv|mp3|wav|flac|ogg)(?:\?\S*)?$",
    re.IGNORECASE,
)
_BASE64 = re.compile(r"[A-Za-z0-9+/=\s]{200,}")


def refuse_pictures(row: Mapping[str, Any]) -> None:
    """BadField if a column of the row holds an image, a video or a sound."""
    for column in COLUMNS:
        if (value := row.get(column)) is not None and is_picture(value):
            raise BadField(column, f"{column!r} holds more than text: {TEXT_ONLY}")


def is_picture(value: Any) -> bool:
    """Bytes, a file name, {bytes, path}, a URL, base64, a PIL image; or a list with one of these."""
    if isinstance(value, str):
        text = value.strip()
        return bool(_FILE.match(text) or _BASE64.fullmatch(text))
    if isinstance(value, bytes | bytearray):
        return bool(value)
    if isinstance(value, Mapping):
        return any(value.get(key) is not None for key in ("bytes", "path", "url", "image", "array"))
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return any(is_picture(one) for one in value)
    return hasattr(value, "save")
