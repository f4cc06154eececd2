"""Content that a text model cannot read, such as images and PDF files, as the short text that stands for it.

An agent's tools return such content because the policy asked for it (a coding agent opens a PNG file), so a request
with it is served. The model reads the placeholder. What it says depends on the content alone, so a history has the same
prompt each time. Nothing is fetched: an image behind a URL has a placeholder without a size.
"""

import base64
import binascii
import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from adapter.dialects.base import object_at

MediaPolicy = Literal["placeholder", "refuse"]

_HEADER_CHARS = 1 << 18
"""Characters of base64 that are decoded to find an image's size; behind them there are only pixels."""
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
"""The formats that the vendors accept. Others are not tried: their readers do more than read a header."""


@dataclass(frozen=True, slots=True)
class Omitted:
    """A part of a message that the model does not see, and the text that it sees instead."""

    text: str


class Content(NamedTuple):
    """A message's text, and how many of its parts are represented by a placeholder."""

    text: str
    num_omitted: int = 0


def content_of(
    content: str | list[Any], where: str, joint: str, read: Callable[[dict[str, Any], str], str | Omitted]
) -> Content:
    """Join the parts of a message, each as `read` returns it. Raises what `read` raises."""
    if isinstance(content, str):
        return Content(content)
    names = [f"{where}[{at}]" for at in range(len(content))] if len(content) > 1 else [where]
    parts = [read(object_at(part, name), name) for part, name in zip(content, names, strict=False)]
    texts = [part.text if isinstance(part, Omitted) else part for part in parts]
    return Content(joint.join(texts), sum(isinstance(part, Omitted) for part in parts))


def omitted_image(data: Any) -> Omitted:
    """Return the placeholder of an image. `data`: its base64 text, a data URL, or anything else without a size."""
    size = _size_of(data) if isinstance(data, str) else None
    return Omitted(f"[image, {size[0]}x{size[1]}, omitted]" if size else "[image, omitted]")


def omitted_file(kind: str, name: Any = None) -> Omitted:
    """Return the placeholder of a document, a sound or another file. `name`: its name or media type, if known."""
    label = name if isinstance(name, str) and name else None
    return Omitted(f"[{kind}, {label}, omitted]" if label else f"[{kind}, omitted]")


def _size_of(data: str) -> tuple[int, int] | None:
    """Return width and height in pixels, None if the data is not an image that can be read."""
    from PIL import Image

    if data.startswith("data:"):
        data = data.partition(",")[2]
    try:
        header = base64.b64decode(data[:_HEADER_CHARS])
        with Image.open(io.BytesIO(header), formats=_FORMATS) as image:
            return image.size
    except (binascii.Error, ValueError, OSError, SyntaxError, Image.DecompressionBombError):
        return None
