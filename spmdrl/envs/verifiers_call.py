"""One episode of verifiers, as the program of an agent: it asks the process that has the environment to run it.

    python verifiers_call.py SOCKET     its exit code and what it prints are the episode's; killed, it ends the episode

It runs as a program of its own, so it imports nothing beyond Python.
"""

from __future__ import annotations

import json
import os
import socket
import sys

_STREAMS = [1, 2]  # the episode prints where this program would
_VARIABLES = ("OPENAI_BASE_URL", "OPENAI_API_KEY", "SPMDRL_EPISODE", "SPMDRL_SEED", "TMPDIR")


def main(address: str) -> int | str:
    """Ask for an episode and wait for its end; returns its exit code, or why there is none."""
    request = {"folder": os.getcwd(), "variables": {name: os.environ[name] for name in _VARIABLES}}
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(address)
            socket.send_fds(connection, [json.dumps(request).encode()], _STREAMS)
            code = connection.recv(1)
        except OSError:
            code = b""
    return code[0] if code else "the process that holds the environment has ended"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
