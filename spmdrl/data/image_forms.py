"""The forms in which others write images into messages: parts of a content, and what the image of a part is.

Environment processes read them too, without torch. So this module imports nothing beyond Python, and what is wrong is a
ValueError.
"""

from __future__ import annotations

import base64
import re
from typing import Any

ContentParts = list[dict[str, Any]]
Content = str | ContentParts

MAX_IMAGE_BYTES = 64 * 2**20  # as a file
_OTHER_MEDIA = ("video", "audio")
_SOURCES = ("image", "image_url", "url", "path")  # keys that hold the image of a part
_NETWORK = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_BASE64 = re.compile(r"data:image/[\w.+-]+;base64,", re.IGNORECASE)


def text_of(part: Any) -> str | None:
    """Return the text of a part, None for an image. Raises ValueError for anything else."""
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    if is_image(part):
        return None
    if isinstance(kind, str) and any(medium in kind for medium in _OTHER_MEDIA):
        raise ValueError(f"a message has a part of the type {kind!r}: of media, only images are read")
    raise ValueError(
        'the parts of a message must be {"type": "text", "text": ...} or {"type": "image", ...}, but one is '
        f"{str(part)[:80]}"
    )


def is_image(part: Any) -> bool:
    """Return True for a part that is an image, with or without saying which."""
    return isinstance(part, dict) and part.get("type") in ("image", "image_url")


def source_of(part: dict[str, Any]) -> Any:
    """Return the reference to the image of a part; None where the part says nothing."""
    source = next((part[key] for key in _SOURCES if part.get(key) is not None), None)
    if isinstance(source, dict) and isinstance(source.get("url"), str):  # as OpenAI writes it
        return source["url"]
    return source


def file_or_path(value: Any) -> bytes | str:
    """Return the file that an image is written as, or the path of one.

    An image is a path, base64 with `data:image/...;base64,` before it, bytes, or {"bytes": ..., "path": ...}. Raises
    ValueError for anything else, as for an address on a network.
    """
    if isinstance(value, dict) and (value.get("bytes") is not None or value.get("path") is not None):
        value = value["bytes"] if value.get("bytes") is not None else value["path"]
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str) or not value:
        raise ValueError(
            'an image must be a path, base64 as "data:image/png;base64,...", bytes or {"bytes": ..., "path": ...}, but '
            f"it is {type(value).__name__}: {str(value)[:80]!r}"
        )
    if found := _BASE64.match(value):
        try:
            return base64.b64decode(value[found.end() :], validate=True)
        except ValueError as error:
            raise ValueError(f"an image is not valid base64: {error}") from error
    if value.startswith("data:"):
        raise ValueError(f'an image as text begins with "data:image/...;base64,", but one does with {value[:40]!r}')
    if _NETWORK.match(value):
        raise ValueError(
            f"the image {value[:100]!r} is not a path: nothing is fetched over a network; save the image as a "
            "file, and give its path"
        )
    return value
