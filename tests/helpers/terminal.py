"""A terminal for tests: a program runs in it, and what it would show is read as lines of text."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Sequence
from types import TracebackType

import pyte


class Terminal:
    """A program on a screen of its own, which ends with the `with` statement."""

    def __init__(self, module: str, arguments: Sequence[str], *, columns: int = 120, lines: int = 50) -> None:
        self.written = b""  # all that the program wrote
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        environment = {
            name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES", "NO_COLOR")
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"},
            start_new_session=True,
        )
        os.close(theirs)

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._ours)

    @property
    def text(self) -> str:
        """The lines of the screen."""
        return "\n".join(line.rstrip() for line in self.screen.display)

    def wait_for(self, condition: Callable[[str], bool], *, timeout_s: float = 60.0) -> str:
        """Wait until the condition holds of what the screen shows, and return that."""
        until = time.monotonic() + timeout_s
        while not condition(self.text):
            assert time.monotonic() < until, f"the screen did not come to it:\n{self.text}"
            self._read(0.1)
        return self.text

    def interrupt(self) -> int:
        """Press Ctrl-C and wait for the program's end; returns its exit code."""
        os.killpg(self._process.pid, signal.SIGINT)
        until = time.monotonic() + 30.0
        while self._process.poll() is None:
            assert time.monotonic() < until, f"the program did not end:\n{self.text}"
            self._read(0.1)
        self._read(0.1)
        return self._process.returncode

    def _read(self, seconds: float) -> None:
        if select.select([self._ours], [], [], seconds)[0]:
            try:
                read = os.read(self._ours, 1 << 16)
            except OSError:  # the program has ended
                return time.sleep(seconds)
            self.written += read
            self._stream.feed(read)
