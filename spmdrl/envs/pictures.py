"""Images that an environment puts into messages: taken out of their parts, as files that travel to the rank.

An image is what data may have (`data/image_forms.py`), a picture of PIL's, or an array of red, green and blue.
"""

from __future__ import annotations

import io
import os
import stat
from typing import Any

from spmdrl.data.image_forms import MAX_IMAGE_BYTES, Content, file_or_path, is_image, source_of, text_of


def has_images(value: Any) -> bool:
    """Return True for a list of which at least one part holds an image, and not only a path or an address of one: a
    list of what was found, in which such parts stand, is no content."""
    return isinstance(value, list) and any(is_image(part) and _is_whole(source_of(part)) for part in value)


def _is_whole(image: Any) -> bool:
    match image:
        case None:
            return False
        case str():
            return image.startswith("data:image/")
        case dict():
            return image.get("bytes") is not None
    return True


def without_images(content: Content) -> tuple[Content, list[bytes]]:
    """Return a content with places for its images, and the files of these.

    Raises ValueError for what is no content, and OSError for a file that cannot be read or written.
    """
    if isinstance(content, str):
        return content, []
    texts = list(map(text_of, content))
    files = [_file(part) for part, text in zip(content, texts, strict=True) if text is None]
    if not files:
        return "".join(text for text in texts if text is not None), []
    return [{"type": "image"} if text is None else {"type": "text", "text": text} for text in texts], files


def _file(part: dict[str, Any]) -> bytes:
    image = source_of(part)
    if image is None:
        raise ValueError('a part of the type image has no image; write {"type": "image", "image": ...}')
    if hasattr(image, "__array_interface__") and not hasattr(image, "save"):
        return _as_png(_picture(image))
    if callable(getattr(image, "save", None)):
        return _as_png(image)
    found = file_or_path(bytes(image) if isinstance(image, bytearray) else image)
    if isinstance(found, bytes):
        return found
    if not stat.S_ISREG(os.stat(found).st_mode):  # all others of the process would wait for a pipe
        raise ValueError(f"the image {found!r} is a directory, a pipe or a device, and not a file")
    with open(found, "rb") as file:
        content = file.read(MAX_IMAGE_BYTES + 1)
    if len(content) > MAX_IMAGE_BYTES:
        raise ValueError(f"the image {found!r} has more than {MAX_IMAGE_BYTES >> 20} MiB")
    return content


def _picture(array: Any) -> Any:
    """Return a picture of an array [height, width, 3] of whole numbers from 0 to 255."""
    import PIL.Image  # which few environments need

    if array.dtype != "uint8" or array.ndim != 3 or array.shape[2] != 3:
        raise ValueError(
            f"an image is an array of {array.dtype}, {list(array.shape)}; it must be of uint8, [height, width, 3]"
        )
    return PIL.Image.fromarray(array)


def _as_png(picture: Any) -> bytes:
    file = io.BytesIO()
    picture.save(file, "PNG", compress_level=1)  # all others of the process wait
    return file.getvalue()
