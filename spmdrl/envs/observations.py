"""Observations as they travel from a process to its rank: checked on both sides, cut, valid text, files of images."""

from __future__ import annotations

import base64
import io
import json
import numbers
import os
import reprlib
import stat
from collections.abc import Mapping
from typing import Any

from spmdrl.conversation import Message, Observation, num_images
from spmdrl.data.image_forms import MAX_IMAGE_BYTES, Content, file_or_path, is_image, source_of, text_of
from spmdrl.workers.channel import bounded

# Images that an environment puts into messages: taken out of their parts, as files that travel to the rank.
#
# An image is what data may have (`data/image_forms.py`), a picture of PIL's, or an array of red, green and blue.


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


_KEYS = {"messages", "images", "reward", "done", "metrics", "tool_errors", "state", "role", "role_rewards"}
MAX_IMAGES_BYTES = 16 * 2**20  # of the files of one observation's images
MAX_METRICS = 100  # of one step
_MAX_NAME_CHARACTERS = 100
_AROUND_BYTES = 2**10  # of an answer besides its observation
_MAX_TOOL_ERRORS = 2**31  # of one step: what is larger is a mistake, and might fit no float


def max_answer_bytes(max_characters: int) -> int:
    """Return the longest line that an environment's process sends: its texts, as JSON escapes them, its images in
    base64, and the rest."""
    return _max_text_bytes(max_characters) + MAX_IMAGES_BYTES * 4 // 3 + _AROUND_BYTES


def to_json(observation: Any, max_characters: int) -> dict[str, Any]:
    """Check what an environment has returned and write it as JSON holds it, with long texts cut.

    Raises ValueError, naming what is wrong; TypeError for what JSON cannot hold; OSError for an image that is no file.
    """
    if not isinstance(observation, Observation):
        raise ValueError(f"the environment returned {shown(observation)} and not an Observation")
    if observation.images:
        raise ValueError('the images of an Observation stand in its messages: {"type": "image", "image": ...}')
    left, images = max_characters, list[bytes]()
    messages = []
    for message in observation.messages:
        _require_message(message)
        placed, own = without_images(message["content"])
        content, left = _cut(placed, left)
        messages.append(_valid_text({**message, "content": content}))
        images += own
    written = {
        "messages": messages,
        "images": [base64.b64encode(image).decode() for image in images],
        "reward": _number("the reward", observation.reward),
        "done": bool(observation.done) if observation.done in (True, False) else observation.done,  # numpy's too
        "metrics": numbers_of(observation.metrics),
        "tool_errors": observation.tool_errors,
        "state": None if observation.state is None else _valid_text(observation.state),
        "role": observation.role,
        "role_rewards": numbers_of(observation.role_rewards, "role"),
    }
    from_json(written, max_characters)
    return written


def from_json(content: Any, max_characters: int) -> Observation:
    """Read an observation, which a process may have made up. Raises ValueError if it is none, or too large."""
    if not isinstance(content, dict) or content.keys() != _KEYS:
        raise ValueError("the observation has not the form of one")
    messages, metrics, role_rewards = content["messages"], content["metrics"], content["role_rewards"]
    if not isinstance(messages, list) or not isinstance(metrics, dict) or not isinstance(role_rewards, dict):
        raise ValueError("messages must be a list, and metrics and role_rewards mappings")
    for message in messages:
        _require_message(message)
        _require_places(message)
    images = _images(content["images"], num_places=sum(map(num_images, messages)))
    for name, kinds in (("done", bool), ("state", str | None), ("role", str | None), ("tool_errors", int)):
        if not isinstance(content[name], kinds):
            raise ValueError(f"{name} is {shown(content[name])}")
    if not 0 <= content["tool_errors"] <= _MAX_TOOL_ERRORS:
        raise ValueError(f"tool_errors is {reprlib.repr(content['tool_errors'])}")
    if content["role"] is not None:
        numbers_of({content["role"]: 0.0}, "role")
    _require_text({name: value for name, value in content.items() if name != "images"}, max_characters)
    return Observation(
        messages=tuple(messages),
        images=images,
        reward=_number("the reward", content["reward"]),
        done=content["done"],
        metrics=numbers_of(metrics),
        tool_errors=int(content["tool_errors"]),
        state=content["state"],
        role=content["role"],
        role_rewards=numbers_of(role_rewards, "role"),
    )


def _require_message(message: Any) -> None:
    if not isinstance(message, Mapping):
        raise ValueError(f"a message is {shown(message)} and not a mapping with role and content")
    for name, kinds in (("role", str), ("content", str | list)):
        if not isinstance(message.get(name), kinds):
            raise ValueError(f"a message's {name} is {shown(message.get(name))} and not a text")
    if message["role"] == "assistant" and not isinstance(message["content"], str):
        raise ValueError("an assistant's message is in parts, and models write text only")
    calls = message.get("tool_calls")
    if calls is not None and not (isinstance(calls, list | tuple) and all(map(_is_call, calls))):
        raise ValueError(
            f'a message\'s tool_calls are {shown(calls)} and not a list of {{"function": {{"name": TEXT, "arguments": '
            "MAPPING}}"
        )


def _require_places(message: Message) -> None:
    """Raise ValueError unless what is left of a content in parts are texts and places for images."""
    for part in message["content"] if isinstance(message["content"], list) else ():
        match part:
            case {"type": "text", "text": str(), **others} | {"type": "image", **others} if not others:
                continue
        raise ValueError(f"a part of a message is {shown(part)} and neither a text nor a place for an image")


def _images(written: Any, *, num_places: int) -> tuple[bytes, ...]:
    """Read the files of images, which no one has opened yet. Raises ValueError."""
    if not isinstance(written, list) or not all(isinstance(image, str) for image in written):
        raise ValueError(f"images are {shown(written)} and not a list of files in base64")
    if len(written) != num_places:
        raise ValueError(f"there are {len(written)} images for {num_places} places in the messages")
    files = tuple(base64.b64decode(image, validate=True) for image in written)
    if (num_bytes := sum(map(len, files))) > MAX_IMAGES_BYTES:
        raise ValueError(
            f"the images of an observation have {num_bytes / 2**20:.1f} MiB as files, and at most "
            f"{MAX_IMAGES_BYTES >> 20} MiB are read; make them smaller"
        )
    return files


def _is_call(call: Any) -> bool:
    match call:
        case {"function": {"name": str(), "arguments": Mapping()}}:
            return True
    return False


def _number(what: str, value: Any) -> float:
    if not isinstance(value, numbers.Real):
        raise ValueError(f"{what} is {shown(value)} and not a number")
    return bounded(what, value)


def numbers_of(metrics: Mapping[Any, Any], what: str = "metric") -> dict[str, float]:
    """Check metrics, which get a place among the run's own, or what else has names. Raises ValueError, naming what is
    wrong."""
    if len(metrics) > MAX_METRICS:
        raise ValueError(f"there are {len(metrics)} {what}s, more than {MAX_METRICS}")
    for name in metrics:
        if not isinstance(name, str) or not name.isprintable() or not 1 <= len(name) <= _MAX_NAME_CHARACTERS:
            raise ValueError(
                f"a {what}'s name is {shown(name)} and not printable text of at most {_MAX_NAME_CHARACTERS} characters"
            )
    return {name: _number(f"the {what} {name}", value) for name, value in metrics.items()}


def _cut(content: Content, max_characters: int) -> tuple[Content, int]:
    """Cut the texts of a content, with a note; returns it and how many characters the texts after it may have."""
    if isinstance(content, str):
        return _cut_text(content, max_characters)
    parts, left = list[dict[str, Any]](), max_characters
    for part in content:
        if part["type"] == "text":
            text, left = _cut_text(part["text"], left)
            part = part | {"text": text}
        parts.append(part)
    return parts, left


def _cut_text(text: str, max_characters: int) -> tuple[str, int]:
    missing = len(text) - max_characters
    if missing <= 0:
        return text, -missing
    return f"{text[:max_characters]}\n[{missing} more characters are left out]", 0


def _valid_text(value: Any) -> Any:
    """Replace halves of surrogate pairs, which no tokenizer takes, in all texts of a JSON value."""
    match value:
        case str():
            return value.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
        case Mapping():
            return {_valid_text(name): _valid_text(inner) for name, inner in value.items()}
        case list() | tuple():
            return [_valid_text(inner) for inner in value]
    return value


def _require_text(content: dict[str, Any], max_characters: int) -> None:
    """Raise ValueError unless all but the images is valid text, and no more than its messages may have."""
    try:
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("the observation's text has half of a surrogate pair") from error
    if (num_bytes := len(json.dumps(content))) > _max_text_bytes(max_characters):
        raise ValueError(f"the observation has {num_bytes} bytes, most of them not in its messages' content")


def _max_text_bytes(max_characters: int) -> int:
    return 2**20 + 12 * max_characters


def shown(value: Any) -> str:
    """Name a value in a message: its type, and its beginning."""
    beginning = repr(value[:60]) if isinstance(value, str | bytes) else reprlib.repr(value)
    return f"{type(value).__name__} {beginning}"
