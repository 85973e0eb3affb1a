"""The process that serves an environment of verifiers: one for each rank, in another virtual environment."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from spmdrl.config.environment import VerifiersEnvironment
from spmdrl.faults.text import lines
from spmdrl.types import UserError
from spmdrl.workers.folders import LockedFolder
from spmdrl.workers.process import GuardedProcess

_HERE = Path(__file__).parent
_NOT_HANDED_ON = ("PYTHONHOME", "VIRTUAL_ENV")  # they belong to the rank's own packages, as its PYTHONPATH does
LOAD_S = 600.0
_POLL_S = 0.05
_MAX_SHOWN_LINES = 20  # of what a process that has failed printed


class VerifiersProcess:
    """The process, which listens on a socket that only this user can reach. All of it belongs to one asyncio loop."""

    def __init__(self, source: VerifiersEnvironment, variables: Mapping[str, str]) -> None:
        """Raise UserError when there is no such interpreter."""
        self._command = [_interpreter(source), "-P", str(_HERE / "verifiers_host.py"), "serve", _written(source)]
        self._python = source.python
        self._variables = _variables(self._command[0], variables)
        self._folder = LockedFolder()
        self._socket = Path(self._folder.path, "episodes")
        self._process: GuardedProcess | None = None

    @property
    def episode_command(self) -> tuple[str, ...]:
        """The command of an agent that is one episode."""
        return sys.executable, "-I", "-S", str(_HERE / "verifiers_call.py"), str(self._socket)

    async def start(self) -> None:
        """Start it, and wait until it has loaded the environment. Raises UserError with what it printed."""
        self._process = await GuardedProcess.start([*self._command, str(self._socket)], self._variables, self._folder)
        try:
            async with asyncio.timeout(LOAD_S):
                while not self._socket.exists() and not self._process.ended.done():
                    await asyncio.sleep(_POLL_S)
        except TimeoutError:
            problem = f"it is not loaded after {LOAD_S:g} seconds"
        else:
            if not self._process.ended.done():
                return
            problem = f"it ended with exit code {self._process.ended.result()}"
        await self.close()
        raise _failure(self._python, problem, self._process.printed())

    async def close(self) -> None:
        """Kill it with all its episodes."""
        if self._process is not None:
            await self._process.close()
        self._folder.remove()


def read_rows(source: VerifiersEnvironment, *, limit: int) -> str:
    """Return the environment's first tasks as the lines of a JSON-lines file. Raises UserError if that fails."""
    python = _interpreter(source)
    command = [python, "-P", str(_HERE / "verifiers_host.py"), "rows", _written(source), str(limit)]
    done = subprocess.run(command, env=_variables(python, os.environ), capture_output=True, text=True)
    if done.returncode:
        raise _failure(source.python, f"it ended with exit code {done.returncode}", done.stderr)
    return done.stdout


def _interpreter(source: VerifiersEnvironment) -> str:
    """Return the absolute path, whose link is not resolved because it is what tells Python its virtual environment."""
    if not os.path.isfile(source.python):
        raise UserError(
            f"environment.source.python = {source.python} does not exist; `make setup-verifiers` makes "
            ".venv-verifiers/bin/python, or give the path of another interpreter that has verifiers"
        )
    return os.path.abspath(source.python)


def _variables(python: str, variables: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a process in that virtual environment, whose programs, such as uv, come first.

    Tool servers of verifiers, which are processes of their own, find modules in the working directory by the same path.
    """
    passed = {name: value for name, value in variables.items() if name not in _NOT_HANDED_ON}
    path = os.pathsep.join([os.path.dirname(python), passed.get("PATH", os.defpath)])
    return passed | {"PATH": path, "PYTHONPATH": os.getcwd()}


def _written(source: VerifiersEnvironment) -> str:
    return json.dumps({"env": source.env, "args": source.args})


def _failure(python: str, problem: str, printed: str) -> UserError:
    shown = [line for line in lines(printed.strip()).splitlines() if line.strip()][-_MAX_SHOWN_LINES:] or [problem]
    before = "".join(f"\n    {line}" for line in shown[:-1])  # indented, as what belongs to a sentence
    return UserError(f"environment.source cannot be loaded by {python}: {shown[-1]}{before}")
