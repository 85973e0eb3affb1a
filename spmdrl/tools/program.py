"""How every tool reads its options and ends: what the user must change is one sentence and exit code 2, never a
traceback.
"""

from __future__ import annotations

import functools
import os
import signal
import sys
from argparse import ArgumentTypeError
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tomlkit
from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from spmdrl.config.strict import shown, utf8_problem
from spmdrl.conversation import UserError
from spmdrl.faults.text import OUTPUT, say, silence
from spmdrl.faults.verdict import EXIT_INTERRUPTED, EXIT_USER_ERROR, list_problems, make_stdio_lenient

Main = Callable[[Sequence[str] | None], int | None]
Program = Callable[..., int]


class ToolConsole(Console):
    """rich's console for a tool's page; a reader that has gone raises BrokenPipeError, as in `say`."""

    def on_broken_pipe(self) -> None:
        raise  # rich calls this where it has caught the error, and would end the process itself

    @classmethod
    def of_width(cls, width: int) -> ToolConsole:
        """Make one that fills a terminal, and has this width elsewhere."""
        return cls(highlight=False, width=None if sys.stdout.isatty() else width)


def program(what: str) -> Callable[[Main], Program]:
    """Make a function of the arguments the main function of a tool, which returns the exit code.

    A UserError, and an error of the disk, is printed after `what`, such as "cannot export", by the first rank.
    """

    def decorate(main: Main) -> Program:
        @functools.wraps(main)
        def ended(argv: Sequence[str] | None = None) -> int:
            make_stdio_lenient()
            try:
                code = main(argv) or 0
                sys.stdout.flush()
                return code
            except BrokenPipeError:  # who read what was printed has seen enough
                silence(sys.stdout)
                return 0
            except KeyboardInterrupt:
                return EXIT_INTERRUPTED
            except UserError as error:
                problem = str(error)
            except OSError as error:
                if not error.filename:
                    silence(sys.stdout)  # perhaps it was that
                problem = f"{shown(error.filename or OUTPUT)}: {error.strerror or error}"
            if os.environ.get("RANK", "0") == "0":
                say(list_problems(what, problem), sys.stderr)
            return EXIT_USER_ERROR

        return ended

    return decorate


@contextmanager
def ignored_interrupts() -> Iterator[None]:
    """Start processes in this block that Ctrl-C does not reach: it ends this program, and they end with it."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def option(kind: Any) -> Callable[[str], Any]:
    """Return what argparse reads an option by, as a value of a setting's type."""
    adapter: TypeAdapter[Any] = TypeAdapter(kind)

    def read(text: str) -> Any:
        if problem := utf8_problem(text):
            raise ArgumentTypeError(f"{shown(text)} {problem}")
        try:
            return adapter.validate_python(text)
        except ValidationError as error:
            problem = error.errors()[0]["msg"].removeprefix("Value error, ")
            raise ArgumentTypeError(f'"{shown(text)}": {problem[0].lower()}{problem[1:]}') from error

    return read


@contextmanager
def writing(output: Path, named_by: str = "--output") -> Iterator[None]:
    """Turn an error of the disk in this block into a UserError about the file that an option names."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"{shown(output)} cannot be written ({error.strerror}); name a file in a folder that is there: {named_by}"
        ) from error


# Values of TOML on one line, as a setting on a command line or in a sentence has them.


def inline(value: Any) -> str:
    """Write a value of TOML on one line; tables and lists in it too."""
    if isinstance(value, dict):
        return (
            "{ " + ", ".join(f"{tomlkit.key(key).as_string()} = {inline(inner)}" for key, inner in value.items()) + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(inline, value)) + "]"
    return tomlkit.item(value).as_string()
