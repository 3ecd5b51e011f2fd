"""Problems with pictures: the observation is a chat message with text and image parts."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from typing import Any

from graft.data.errors import DataError
from graft.envs.dataset.maths import MathEnv
from graft.protocols import Observation
from graft.types import Message

KINDS = {b"\x89PNG": "png", b"\xff\xd8\xff": "jpeg", b"GIF8": "gif", b"RIFF": "webp"}


class GeometryEnv(MathEnv):
    """A MathEnv whose question comes with images, in OpenAI's message form.

    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;..."}},
                                  {"type": "text", "text": "Find x. ..."}]}]

    Pictures in the file become data URIs, paths and addresses stay as they are: all of it is text, so
    tasks are JSON. graft's models only read text, so the env is refused without `pictures=True`, which is
    for your own loop or an endpoint whose model sees pictures. Wrappers that join observations as text
    do not work with it.
    """

    def __init__(
        self, *, image_key: str = "images", pictures: bool = False, **settings: Any
    ) -> None:
        if not pictures:
            raise ValueError(
                f"{self.env_id or 'math:Geometry3K'} asks about pictures (column {image_key!r}), and graft's "
                "models only read text: they would be trained or graded without seeing the picture. "
                "Use text problems, such as math:Math12K; for your own model that sees pictures, or an "
                "endpoint that takes messages, pass pictures=True"
            )
        self.image_key = image_key
        super().__init__(**settings)

    def needed_columns(self) -> tuple[str, ...]:
        return (self.answer_key, self.image_key)

    def refuse_pictures(self) -> None:
        """Nothing: pictures are expected here."""

    def ask(self, row: Mapping[str, Any]) -> Observation:
        images = row.get(self.image_key) or []
        several = images if isinstance(images, list) else [images]
        parts: list[dict[str, Any]] = []
        for image in several:
            url = image_url(image)
            if url is None:
                raise DataError(
                    f"{self.where}: {self.image_key!r} holds a "
                    f"{type(image).__name__}; an image is a path, bytes, or {{bytes, path}}"
                )
            parts.append({"type": "image_url", "image_url": {"url": url}})
        parts.append({"type": "text", "text": super().ask(row)})
        message: Message = {"role": "user", "content": parts}
        return [message]


def image_url(image: Any) -> str | None:
    """A picture as text: bytes -> "data:image/png;base64,...", a path -> itself."""
    if isinstance(image, str):
        return image
    if isinstance(image, dict):  # as parquet files of the hub keep them
        return image_url(image.get("bytes") or image.get("path"))
    if hasattr(image, "save"):  # a PIL image, in rows given from memory
        buffer = io.BytesIO()
        image.save(buffer, format="PNG")
        image = buffer.getvalue()
    if isinstance(image, bytes):
        kind = next((kind for start, kind in KINDS.items() if image.startswith(start)), "png")
        return f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
    return None
