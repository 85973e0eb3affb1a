"""Text from outside, made fit to be shown: what a worker, an environment, an agent or the model itself has written.

All that is shown or logged passes through here. What cannot be printed is written as Python escapes it: a text cannot
move the cursor, begin a line of its own, reverse the order of letters, or hold half of a surrogate pair, which no file
takes. Needs nothing but Python.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TextIO

OUTPUT = "the output"  # the name of what is printed on, in an OSError
MAX_LINE_CHARACTERS = 500
MAX_TEXT_CHARACTERS = 20_000
_CUT = " [...] "


def one_line(text: str) -> str:
    """Return a text as one printable line of at most `MAX_LINE_CHARACTERS`, the middle of a longer one left out."""
    return _shortened(escaped(_shortened(text)))


def lines(text: str) -> str:
    """Return the last `MAX_TEXT_CHARACTERS` of a text, with its line breaks and nothing else that is not printable."""
    return printable(text[-MAX_TEXT_CHARACTERS:])[-MAX_TEXT_CHARACTERS:]


def printable(text: str) -> str:
    """Return a text of any length with its line breaks, tabs as blanks, and nothing else that is not printable."""
    if text.isprintable():
        return text
    return "\n".join(map(escaped, text.expandtabs().split("\n")))


def escaped(text: str) -> str:
    """Return a text of any length as one printable line."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode("ascii") for one in text)


def in_ranges(numbers: Sequence[int]) -> str:
    """Write whole numbers in rising order with those that follow each other as a range: `0-2, 5`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def say(text: str = "", stream: TextIO | None = None) -> None:
    """Print a text, on standard output unless another stream is given, with nothing that is not printable.

    All that a program of the package prints passes through here. Raises OSError about `OUTPUT` where nothing takes it;
    more that is printed there is then thrown away. A lost standard error is not reported: there is no place for it.
    """
    stream = stream or sys.stdout
    try:
        print(printable(text), file=stream, flush=True)
    except OSError as error:
        silence(stream)
        if stream is sys.stderr:
            return
        error.filename = OUTPUT
        raise


def silence(stream: TextIO) -> None:
    """Throw away what is still to be printed on a stream, which Python would try once more when it ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def lost_output(error: OSError) -> int:
    """Say why nothing takes what is printed, unless who read it has seen enough; returns the program's exit code."""
    silence(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return 0
    say(f"cannot print: {error.strerror}", sys.stderr)
    return 2


def tolerates_lost_output(main: Callable[[Sequence[str] | None], int]) -> Callable[..., int]:
    """Let a program end as `lost_output` says where nothing takes what it prints."""

    @functools.wraps(main)
    def ended(argv: Sequence[str] | None = None) -> int:
        try:
            code = main(argv)
            sys.stdout.flush()
            return code
        except OSError as error:
            if error.filename != OUTPUT and not isinstance(error, BrokenPipeError):
                raise
            return lost_output(error)

    return ended


class Parser(argparse.ArgumentParser):
    """argparse, whose own words go through `say`: it repeats arguments, which may hold anything."""

    def error(self, message: str) -> NoReturn:
        super().error(escaped(message))

    def _print_message(self, message: str, file: Any = None) -> None:
        try:
            say(message.removesuffix("\n"), file or sys.stderr)
        except OSError as error:
            sys.exit(lost_output(error))


def of_error(error: BaseException) -> str:
    """Return an exception's type and what it says, or that it cannot say it: the text comes from the user's code."""
    try:
        said = str(error)
    except Exception as other:
        said = f"its text cannot be read: {type(other).__name__}"
    return f"{type(error).__name__}: {said}"


def sentence_of(error: BaseException, most: int = 200) -> str:
    """Return what an exception says, as one line of at most `most` characters."""
    return " ".join(str(error).split())[:most]


def _shortened(text: str) -> str:
    if len(text) <= MAX_LINE_CHARACTERS:
        return text
    room = MAX_LINE_CHARACTERS - len(_CUT)
    return text[: room - room // 3] + _CUT + text[len(text) - room // 3 :]
