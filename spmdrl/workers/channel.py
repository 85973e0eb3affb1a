"""The process's end of the line to its rank: pickles come in, lines of JSON go out.

Only the rank pickles: code that runs in the process may have been written by the model, and must not decide what the
rank unpickles.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any, BinaryIO, SupportsFloat

from spmdrl.faults.guard import signal_at_parents_end

# Numbers from outside: rewards and metrics that a verifier, an environment or an agent gave.


# Sums of the squares of 10^14 such numbers are finite in float32, in which advantages and losses are computed.
MAX_SIZE = 1e12


def bounded(what: str, value: SupportsFloat) -> float:
    """Return a number as a float. Raises ValueError, naming `what` it is, if it is not finite or beyond `MAX_SIZE`."""
    try:
        number = float(value)
    except OverflowError:  # an int that no float holds
        number = math.inf
    if not abs(number) <= MAX_SIZE:
        limit = f", which is beyond +-{MAX_SIZE:g}" if math.isfinite(number) else ""
        raise ValueError(f"{what} is {number:g}{limit}")
    return number


SIZE = struct.Struct("<Q")  # comes before each pickled message to a process
PING = 0  # a message that asks a process to say that it reads, by the answer {"number": 0}; requests have numbers above


def program(module: str) -> str:
    """Return the program of a process that runs the module's `main`.

    Its arguments are the rank's process id, the socket's descriptor, and the rank's sys.path. It is started as a
    program, not through multiprocessing, which would import the rank's main module, and with it torch and the model
    code, into every process.
    """
    return f"import sys; sys.path[:] = sys.argv[3:]; from {module} import main; main()"


def connect() -> socket.socket:
    """Tie this process's life to its rank's, and return the socket to the rank."""
    signal_at_parents_end(signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):  # the rank died before this process asked to die with it
        os._exit(1)
    # Only the rank ends its processes (with SIGKILL): a signal to the whole job must not fail the last answers.
    # Empty handlers instead of SIG_IGN, which programs started from here would inherit.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    return socket.socket(fileno=int(sys.argv[2]))


def receive(messages: BinaryIO) -> bytes:
    """Read the next message; empty when the rank has closed the socket."""
    size = messages.read(SIZE.size)
    return messages.read(SIZE.unpack(size)[0]) if size else b""


def line(answer: dict[str, Any]) -> bytes:
    """Write an answer as the rank reads it."""
    return json.dumps(answer).encode() + b"\n"


@contextlib.contextmanager
def needs_package(kind: str) -> Iterator[None]:
    """Import here the packages of a `kind` of the configuration. Raises ValueError when one cannot be imported."""
    try:
        yield
    except ImportError as error:
        raise ValueError(
            f'kind = "{kind}" needs a package that cannot be imported: {error}; install it, or choose another kind'
        ) from error
