"""Contents of messages that are text and images, in parts: how data writes them, and how prompts have them.

Here a message's content is a string, or, where it has images, a list of `{"type": "text", "text": ...}` and
`{"type": "image"}`; the images themselves stand beside the prompt, in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spmdrl.conversation import IMAGE_PLACE, Message
from spmdrl.data.image_forms import Content, source_of, text_of
from spmdrl.data.images import ImageFile
from spmdrl.types import UserError


class PartReader:
    """Reads the contents of one row's messages, and gathers their images in order."""

    def __init__(self, column: Sequence[ImageFile] | None, read: Callable[[Any], ImageFile]) -> None:
        """`column` holds the images of the row's column, None where there is none; `read` those that parts name."""
        self.images: list[ImageFile] = []
        self._has_column = column is not None
        self._column = list(column or ())
        self._num_places = 0
        self._read = read

    def content(self, value: Content) -> Content:
        """Return a content with its images as places. Raises UserError."""
        parts = list(self._split(value))
        if None in parts:
            return [{"type": "image"} if text is None else {"type": "text", "text": text} for text in parts]
        return "".join(text for text in parts if text is not None)

    def message(self, message: Message) -> Message:
        """Return a message with its images as places."""
        content = self.content(message["content"])
        if message["role"] == "assistant" and not isinstance(content, str):
            raise UserError("an assistant's message has an image, and models write none")
        return message | {"content": content}

    def require_all_used(self) -> None:
        """Raise UserError unless the prompt has a place for each image of the column."""
        if self._num_places != len(self._column):
            raise UserError(
                f"the prompt has {self._num_places} places for images ({IMAGE_PLACE}, or parts of the type image), and "
                f"its column of images holds {len(self._column)}"
            )

    def _split(self, value: Content) -> Iterator[str | None]:
        """Yield texts, and None for each image, which is gathered."""
        if isinstance(value, str):
            first, *others = value.split(IMAGE_PLACE) if self._has_column else [value]
            yield from (first,) if first or not others else ()
            for text in others:
                self._take()
                yield None
                yield from (text,) if text else ()
            return
        for part in value:
            try:
                written = text_of(part)
            except ValueError as error:
                raise UserError(str(error)) from error
            if written is None:
                self._take(source_of(part))
            yield written

    def _take(self, source: Any = None) -> None:
        if source is not None:
            self.images.append(self._read(source))
            return
        self._num_places += 1
        if not self._has_column:
            raise UserError("a part of the type image has no image; set image_column to the column that has it")
        if self._num_places <= len(self._column):
            self.images.append(self._column[self._num_places - 1])
