"""One run of an agent's command, with its folder and the end of what it printed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from spmdrl.conversation import EpisodeStart
from spmdrl.faults import guard
from spmdrl.workers.folders import HeldFolder

_GUARD = Path(str(guard.__file__))
_MAX_KEPT_BYTES = 8192  # of each of its streams
_DRAIN_S = 1.0  # for the end of the streams of a command that has ended


class AgentProcess:
    """A command that is running, with its guard. Start it in a thread that outlives it."""

    def __init__(self, process: asyncio.subprocess.Process, folder: HeldFolder) -> None:
        assert process.stdout is not None and process.stderr is not None
        self._process, self._folder = process, folder
        self._streams = [_Tail(process.stderr), _Tail(process.stdout)]
        self.ended: asyncio.Task[int] = asyncio.ensure_future(self._end())  # its exit code, as a shell gives it

    @classmethod
    async def start(
        cls, command: Sequence[str], variables: Mapping[str, str], start: EpisodeStart, *, gives_answer: bool
    ) -> AgentProcess:
        """Start the command in a folder of its own, where the episode's file is. Raises OSError or ValueError."""
        folder = HeldFolder()
        file = Path(folder.path, "episode.json")
        try:
            file.write_text(_written(start, gives_answer), encoding="utf-8")
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(_GUARD), str(os.getpid())),
                *(argument.replace("{prompt}", start.prompt) for argument in command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=folder.path,
                env={
                    **variables,
                    "TMPDIR": folder.path,
                    "SPMDRL_EPISODE": str(file),
                    "SPMDRL_SEED": str(start.seed),
                },
                start_new_session=True,  # keeps a terminal's Ctrl-C away
            )
        except BaseException:
            folder.remove()
            raise
        return cls(process, folder)

    def last_lines(self) -> str:
        """Return the end of its standard error or, if that is empty, of its standard output."""
        texts = (stream.text() for stream in self._streams)
        return next(filter(None, texts), "")

    async def close(self) -> None:
        """Kill the command with all that it has started, if it has not ended, and remove its folder."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)  # the guard's signal to end it all
        await self.ended
        await asyncio.to_thread(self._folder.remove)

    async def _end(self) -> int:
        code = await self._process.wait()
        await asyncio.wait([stream.read for stream in self._streams], timeout=_DRAIN_S)
        for stream in self._streams:
            stream.read.cancel()
        return code if code >= 0 else 128 - code


class _Tail:
    """Reads a stream to its end and keeps the last bytes."""

    def __init__(self, stream: asyncio.StreamReader) -> None:
        self._kept = b""
        self.read = asyncio.ensure_future(self._read(stream))

    async def _read(self, stream: asyncio.StreamReader) -> None:
        while read := await stream.read(_MAX_KEPT_BYTES):
            self._kept = (self._kept + read)[-_MAX_KEPT_BYTES:]

    def text(self) -> str:
        return self._kept.decode(errors="replace").strip()


def _written(start: EpisodeStart, gives_answer: bool) -> str:
    content = {"prompt": start.prompt, "task": start.task, "metadata": start.metadata, "seed": start.seed}
    return json.dumps(content | ({"answer": start.answer} if gives_answer else {}), default=str)
