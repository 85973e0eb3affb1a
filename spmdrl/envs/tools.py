"""Environments that are made of tools, by the `kind` of their source.

`tools`: functions, a Python interpreter, MCP servers. `trl`: classes as TRL's `environment_factory` takes them.
"""

from __future__ import annotations

import asyncio
import inspect
import numbers
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from spmdrl import user_code
from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.envs.protocol import Maker, run
from spmdrl.envs.toolbox import Tool, Toolbox, ToolError, tool_of
from spmdrl.workers.program import run_program

# kind = "tools": the policy calls them until a response has no call, which is its answer.


async def load_tools(tools: Sequence[dict[str, Any]]) -> Maker:
    """Make the tools of these sources, and start their servers.

    Raises ValueError when one cannot be made, has no schema, or has the name of another.
    """
    async with AsyncExitStack() as servers:
        found = [tool for source in tools for tool in await _tools_of(source, servers)]
        toolbox = Toolbox(found)
        return Maker(partial(ToolsEpisode, toolbox), toolbox.schemas, servers.pop_all().aclose)


class ToolsEpisode:
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


# kind = "trl": `reset` begins an episode, the other public methods of a class are tools.
#
# Two things differ from TRL. The text of `reset` is a message of its own, after the prompt's, and not the end of the
# prompt's last message. And rewards are read after each response, not once: see TrlEpisode.

_NO_TOOLS = ("reset", "get_reward")


def load_trl(name: str) -> Maker:
    """Make environments of a class, or of what a function makes, by its name.

    Raises ValueError when it cannot be made without arguments, has no `reset`, or a method that has no schema.
    """
    factory = user_code.load(name)
    try:
        probe = factory()
    except Exception as error:
        raise ValueError(f"{name} cannot be made without arguments: {type(error).__name__}: {error}") from error
    if not inspect.ismethod(getattr(probe, "reset", None)):
        raise ValueError(f"{name} has no method reset, which begins an episode")
    names = {name for _, method in inspect.getmembers(type(probe), inspect.isfunction) for name in _names_in(method)}
    gives_rewards = hasattr(probe, "reward") or hasattr(probe, "get_reward") or "reward" in names
    return Maker(partial(TrlEpisode, factory), _methods(probe).schemas, gives_rewards=gives_rewards)


def _names_in(method: Any) -> tuple[str, ...]:
    """Return the attributes that a method's code names; none where it is not Python's."""
    code = getattr(inspect.unwrap(method), "__code__", None)
    return () if code is None else code.co_names


def _methods(environment: Any) -> Toolbox:
    # Of the class: looking at an instance's attributes would run its properties.
    names = [name for name, _ in inspect.getmembers(type(environment), inspect.isfunction)]
    tools = (name for name in names if not name.startswith("_") and name not in _NO_TOOLS)
    return Toolbox((tool_of(getattr(environment, name)) for name in tools), in_order=True)


class TrlEpisode:
    """An episode of such a class.

    The class's reward is what its `get_reward()` returns, or else its attribute `reward`, which TRL's reward functions
    read; without either, rewards come from the terms of [reward] alone. A step's reward is the change since the step
    before, so that their sum is the last value also where a limit ends the episode.
    """

    def __init__(self, factory: Callable[[], Any]) -> None:
        self._factory = factory
        self._reward = 0.0

    async def reset(self, start: EpisodeStart) -> Observation:
        """Hand the prompt's columns to the class's `reset`: prompt, answer, task, seed, and those of the metadata."""
        self._inner = await run(self._factory)
        self._toolbox = _methods(self._inner)
        self._reward = 0.0
        data = {"prompt": start.prompt, "answer": start.answer, "task": start.task, "seed": start.seed}
        columns = {**data, **start.metadata}
        content = await run(user_code.call, function=self._inner.reset, columns=columns, settings={})
        if content is None:
            return Observation()
        if not isinstance(content, str | list):
            raise TypeError(f"reset returned {type(content).__name__}, and not text, a list of parts or None")
        return Observation(messages=({"role": "user", "content": content},))

    async def step(self, action: Action) -> Observation:
        """Run the calls; an action without one is the end."""
        answer = await self._toolbox.answer(action)
        before, self._reward = self._reward, await self._current_reward()
        return Observation(
            messages=answer.messages,
            reward=self._reward - before,
            done=answer.done,
            tool_errors=answer.tool_errors,
        )

    async def close(self) -> None:
        """Drop the instance; TRL's contract has no method for it."""
        del self._inner

    async def _current_reward(self) -> float:
        if hasattr(self._inner, "get_reward"):
            value = await run(self._inner.get_reward)
        else:
            value = getattr(self._inner, "reward", 0.0)
        if not isinstance(value, numbers.Real):
            raise TypeError(f"the reward is {type(value).__name__} and not a number")
        return float(value)
