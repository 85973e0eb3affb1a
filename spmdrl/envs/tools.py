"""Environments of tools: the policy calls them until a response has no call, which is its answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

from spmdrl import user_code
from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.envs.toolbox import Tool, Toolbox, ToolError, tool_of
from spmdrl.workers.program import run_program


async def load(tools: Sequence[dict[str, Any]]) -> ToolsMaker:
    """Make the tools of these sources, and start their servers.

    Raises ValueError when one cannot be made, has no schema, or has the name of another.
    """
    async with AsyncExitStack() as servers:
        found = [tool for source in tools for tool in await _tools_of(source, servers)]
        return ToolsMaker(Toolbox(found), servers.pop_all())


class ToolsMaker:
    """The tools of one process; its episodes share them."""

    def __init__(self, toolbox: Toolbox, servers: AsyncExitStack) -> None:
        self.tools = toolbox.schemas
        self._toolbox = toolbox
        self._servers = servers

    def __call__(self) -> ToolsEnvironment:
        """Make the environment of one episode."""
        return ToolsEnvironment(self._toolbox)

    async def close(self) -> None:
        """End the servers."""
        await self._servers.aclose()


class ToolsEnvironment:
    """An episode with tools; rewards come from the terms of [reward]."""

    def __init__(self, toolbox: Toolbox) -> None:
        self._toolbox = toolbox

    async def reset(self, start: EpisodeStart) -> Observation:
        """Add nothing to the prompt."""
        return Observation()

    async def step(self, action: Action) -> Observation:
        """Answer the calls; an action without one is the end."""
        return await self._toolbox.answer(action)

    async def close(self) -> None:
        """Hold nothing: the tools belong to all episodes."""


async def _tools_of(source: dict[str, Any], servers: AsyncExitStack) -> list[Tool]:
    match source:
        case {"kind": "function", "function": name}:
            return [tool_of(user_code.load(name))]
        case {"kind": "python", "timeout_s": timeout_s}:
            return [_python_tool(timeout_s)]
        case {"kind": "mcp", "command": command}:
            try:
                from spmdrl.envs.mcp_server import McpServer
            except ImportError as error:
                raise ValueError(
                    f'tools of kind "mcp" need a package that cannot be imported: {error}; install it with '
                    'pip install "spmdrl[mcp]"'
                ) from error
            server = await McpServer.start(command)
            servers.push_async_callback(server.close)
            return server.tools
    raise ValueError(f"there are no tools of kind {source.get('kind')!r}")


def _python_tool(timeout_s: float) -> Tool:
    async def python(code: str) -> str:
        """Run a Python program and return what it prints. Each call starts anew: nothing is kept from earlier ones.

        Args:
            code: The program.
        """
        return await asyncio.to_thread(_run, code, timeout_s)

    return tool_of(python)


def _run(code: str, timeout_s: float) -> str:
    """Run a program and return its output. Raises ToolError, after the output, when it fails or is stopped."""
    end = run_program(code, "", time.monotonic() + timeout_s, with_errors=True)
    output = end.output + ("\n[the rest of the output is left out]" if end.is_cut else "")
    if end.exit_code == 0:
        return output
    reason = f"was stopped after {timeout_s:g} s" if end.exit_code is None else f"ended with exit code {end.exit_code}"
    raise ToolError("\n".join(filter(None, (output.rstrip("\n"), f"error: the program {reason}"))))
