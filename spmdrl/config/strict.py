"""Files that a run reads, from any writer: ordinary, of a bounded size, in strict UTF-8 and JSON, of known types.

What is not so is one sentence that names the file and the place in it.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from spmdrl.conversation import UserError

MAX_BYTES = 256 * 2**20  # of a file that is read as a whole; the index of a model of 10^6 tensors has 100 MB
MAX_DEPTH = 100  # lists and objects inside each other; Python's own limit, 1,000 calls, ends programs that walk them

T = TypeVar("T")


class Malformed(ValueError):
    """Content that is not what it must be; the message is a clause that follows the name of its place."""


class FileModel(BaseModel):
    """The form of an object in a file: its keys with their types, none missing, none unknown, none converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def open_file(path: str | Path) -> BinaryIO:
    """Open an ordinary file to read its bytes. Raises UserError, at once for a pipe or device that would be waited for.

    Every rank reads its files, some of them twice, which only an ordinary file allows.
    """
    try:
        kind = os.stat(path).st_mode
        if stat.S_ISDIR(kind):
            raise UserError(f"cannot read {shown(path)}: Is a directory")
        if not stat.S_ISREG(kind):
            raise UserError(f"cannot read {shown(path)}: it is a pipe or a device; write what it gives into a file")
        return Path(path).open("rb")
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {shown(path)}: {error.strerror}") from error
    except ValueError as error:  # a path that no file can have
        raise UserError(f"cannot read {shown(path)}: {error}") from error


def read_bytes(path: str | Path, *, max_bytes: int = MAX_BYTES) -> bytes:
    """Read an ordinary file of at most `max_bytes`. Raises UserError."""
    with open_file(path) as file:
        try:
            content = file.read() if os.fstat(file.fileno()).st_size <= max_bytes else None
        except OSError as error:
            raise UserError(f"cannot read {shown(path)}: {error.strerror}") from error
    if content is None or len(content) > max_bytes:
        raise UserError(f"cannot read {shown(path)}: it has more than {max_bytes / 2**20:g} MiB")
    return content


def read_json(path: str | Path, kind: type[T], *, max_bytes: int = MAX_BYTES) -> T:
    """Read a JSON file as a value of this type. Raises UserError with the file, the place in it, and what is wrong."""
    with about(path):
        return conform(parse_own_json(read_bytes(path, max_bytes=max_bytes)), kind)


@contextmanager
def about(name: str | Path) -> Iterator[None]:
    """Turn what is malformed in this block into a UserError about the place with this name."""
    try:
        yield
    except Malformed as error:
        raise UserError(f"{shown(name)} {error}") from error


@contextmanager
def as_written(path: str | Path, by: str) -> Iterator[None]:
    """Turn the errors of taking a file's content apart into a UserError: it is not what `by` writes there."""
    try:
        yield
    except UserError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, RuntimeError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise UserError(
            f"{shown(path)} does not hold what {by} writes ({reason}); it is damaged, or of another version of spmdrl"
        ) from error


def parse_json(content: bytes) -> Any:
    """Parse one JSON value that others wrote. Raises Malformed, also for half a character and for a key given twice."""
    value = _parsed(content, MAX_DEPTH)
    try:
        if b"\\u" in content:
            json.dumps(value, ensure_ascii=False).encode()  # raises for an escape that is half a surrogate pair
    except ValueError as error:
        raise Malformed(f"is not valid JSON: {error}") from error
    return value


def parse_own_json(content: bytes | str) -> Any:
    """Parse one JSON value that a run wrote. Raises Malformed.

    It may be deeper than what it was made from, and hold half a character that a response or an environment returned.
    """
    return _parsed(content, 2 * MAX_DEPTH)


def _parsed(content: bytes | str, max_depth: int) -> Any:
    try:
        text = content.decode("utf-8") if isinstance(content, bytes) else content
        value = json.loads(text, object_pairs_hook=_object)
    except Malformed:
        raise
    except RecursionError as error:
        raise Malformed(_too_deep(max_depth)) from error
    except ValueError as error:
        raise Malformed(f"is not valid JSON: {error}") from error
    if text.count("[") + text.count("{") > max_depth and depth(value) > max_depth:
        raise Malformed(_too_deep(max_depth))
    return value


def _too_deep(max_depth: int) -> str:
    return f"is not valid JSON: it has more than {max_depth} lists or objects inside each other"


def depth(value: Any) -> int:
    """Count the lists and objects inside each other."""
    deepest, pending = 0, [(value, 1)]
    while pending:
        inner, level = pending.pop()
        if isinstance(inner, dict | list):
            deepest = max(deepest, level)
            pending += [(part, level + 1) for part in (inner.values() if isinstance(inner, dict) else inner)]
    return deepest


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise Malformed(f"is not valid JSON: an object has the key {json.dumps(twice)} twice")
    return found


def flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the settings of nested tables by their dotted names; a list of tables, or an empty one, counts as one."""
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def conform(value: Any, kind: type[T]) -> T:
    """Return a value of JSON as one of this type, with nothing converted. Raises Malformed."""
    try:
        return _adapter(cast(Hashable, kind)).validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        at = ".".join(map(str, first["loc"]))
        problem = first["msg"][0].lower() + first["msg"][1:]
        raise Malformed(f"is of another form: {f'{at}: ' if at else ''}{problem}") from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    is_form = isinstance(kind, type) and issubclass(kind, BaseModel)
    return TypeAdapter(kind) if is_form else TypeAdapter(kind, config=ConfigDict(strict=True))


def utf8_problem(text: str) -> str | None:
    """Return a clause for text that no file in UTF-8 can hold, None for any other."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return "is not valid Unicode: it holds bytes that are not UTF-8, or half a character"
    return None


def shown(path: str | Path) -> str:
    """Write a path such that any terminal and any log can show it, on one line."""
    text = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(path))
    return text if len(text) <= 300 else f"{text[:140]}...{text[-140:]}"
