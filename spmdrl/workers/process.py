"""Child processes, seen from the rank that starts and kills them: one in a sandbox, or a command under a guard."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from spmdrl.config import SandboxConfig
from spmdrl.faults import guard
from spmdrl.workers.folders import LockedFolder
from spmdrl.workers.sandbox import Sandbox

_END_S = 2.0  # for a process to end by itself
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
_PASSED_VARIABLES = ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL")  # the only environment variables in a sandbox


class WorkerProcess:
    """One process in a sandbox of its own, which runs a program of `channel.program` and has one socket to the rank.

    Start it from a thread that outlives it: Linux's parent-death signal arrives when that thread ends.
    """

    def __init__(self, program: str, table: str, cfg: SandboxConfig, variables: Mapping[str, str]) -> None:
        """`table` is the configuration's that `cfg` is in."""
        self._folder = None if cfg.mode == "off" else LockedFolder()
        self.sandbox = None if self._folder is None else _limits(table, cfg, self._folder.path)
        folders = {} if self._folder is None else {"HOME": self._folder.path, "TMPDIR": self._folder.path}
        output = None if self._folder is None else subprocess.DEVNULL
        self.socket, theirs = socket.socketpair()
        self.socket.setblocking(False)
        self._input = select.poll()
        self._input.register(self.socket, select.POLLIN)
        # Absolute paths do not depend on the process's directory.
        import_path = [os.path.abspath(folder) for folder in sys.path]
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-c", program, str(os.getpid()), str(theirs.fileno()), *import_path],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                env={**variables, **folders},
                start_new_session=True,  # keeps a terminal's Ctrl-C away, and lets us kill it with its children
            )

    def has_input(self) -> bool:
        """True when the process has sent something, or has ended."""
        return bool(self._input.poll(0))

    def end(self) -> str:
        """Close the line to the process, give it a moment to end by itself, then kill it; returns how it ended."""
        with contextlib.suppress(OSError):  # it has ended
            self.socket.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + _END_S
        while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            if time.monotonic() > deadline:
                break
            time.sleep(_END_S / 1000)
        return self.kill()

    def kill(self) -> str:
        """Kill the process and those it started; returns how it ended."""
        # Its id cannot belong to another process before `wait` has collected it.
        if self._process.returncode is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.terminate()  # the guard's signal to end it all: see sandbox.py
                self._process.wait(_END_S)
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS: when it is already gone
                os.killpg(self._process.pid, signal.SIGKILL)
        code = self._process.wait()
        self.socket.close()
        if self._folder is not None:
            self._folder.remove()
        number = -code if code < 0 else code - 128  # the sandbox reports a signal as a shell does
        if number in set(signal.Signals):
            return f"was killed by {signal.Signals(number).name}"
        return f"exited with code {code}"


def process_variables(cfg: SandboxConfig) -> dict[str, str]:
    """Return the environment variables of the processes to start.

    Take them once: while another thread restarts an engine, os.environ holds variables that are meant for the engine.
    """
    if cfg.mode == "off":
        return {**os.environ, **_ONE_THREAD}
    return {name: os.environ[name] for name in _PASSED_VARIABLES if name in os.environ} | _ONE_THREAD


def sandbox_hint(table: str, cfg: SandboxConfig) -> str:
    """Say what the user's code may miss in a sandbox; empty without one."""
    if cfg.mode == "off":
        return ""
    return f" (in a sandbox, without network, environment variables and files to write: see {table}.sandbox)"


def _limits(table: str, cfg: SandboxConfig, folder: str) -> Sandbox:
    return Sandbox(
        setting=f"{table}.sandbox",
        folder=folder,
        is_strict=cfg.mode == "strict",
        max_memory_bytes=round(cfg.max_memory_gib * 2**30),
        max_processes=cfg.max_processes,
        max_file_bytes=round(cfg.max_file_gib * 2**30),
        max_open_files=cfg.max_open_files,
    )


# Commands of the user's, without a sandbox. They belong to an asyncio loop.


_MAX_TAIL_BYTES = 8192  # of each of a command's streams
_DRAIN_S = 1.0  # for the end of the streams of a command that has ended


class GuardedProcess:
    """A command that is running under a guard, which ends all that it has started, also when the rank dies.

    Start it in a thread that outlives it.
    """

    def __init__(self, process: asyncio.subprocess.Process, folder: LockedFolder) -> None:
        assert process.stdout is not None and process.stderr is not None
        self._process, self._folder = process, folder
        self._streams = [_Tail(process.stderr), _Tail(process.stdout)]
        self.ended: asyncio.Task[int] = asyncio.ensure_future(self._end())  # its exit code, as a shell gives it

    @classmethod
    async def start(
        cls, command: Sequence[str], variables: Mapping[str, str], folder: LockedFolder, *, cwd: str | None = None
    ) -> GuardedProcess:
        """Start a command, in this process's directory without a `cwd`. Raises OSError or ValueError.

        Its folder is removed when it is closed, or cannot be started.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(guard.__file__), str(os.getpid()), *command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=cwd,
                env=variables,
                start_new_session=True,  # keeps a terminal's Ctrl-C away
            )
        except BaseException:
            folder.remove()
            raise
        return cls(process, folder)

    def printed(self) -> str:
        """Return the end of its standard error or, if that is empty, of its standard output."""
        texts = (stream.tail.decode(errors="replace").strip() for stream in self._streams)
        return next(filter(None, texts), "")

    async def close(self) -> None:
        """Kill the command with all that it has started, if it has not ended, and remove its folder."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()  # the guard's signal to end it all
        await self.ended
        await asyncio.to_thread(self._folder.remove)

    async def _end(self) -> int:
        code = await self._process.wait()
        await asyncio.wait([stream.read for stream in self._streams], timeout=_DRAIN_S)
        for stream in self._streams:
            stream.read.cancel()
        return code if code >= 0 else 128 - code


class _Tail:
    """Reads a stream to its end and stores the last bytes."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self.tail = b""
        self.read = asyncio.ensure_future(self._read(stream))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while part := await stream.read(_MAX_TAIL_BYTES):
            self.tail = (self.tail + part)[-_MAX_TAIL_BYTES:]
