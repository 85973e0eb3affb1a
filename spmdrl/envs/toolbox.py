"""Tools that the policy can call, and the answers to its calls."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any

from spmdrl.conversation import Action, Message, Observation, ToolCall
from spmdrl.data.image_forms import Content
from spmdrl.envs.calls import run
from spmdrl.envs.pictures import has_images
from spmdrl.envs.schema import Schema, Signature, WrongArguments
from spmdrl.faults.text import of_error


class ToolError(Exception):
    """A call that failed; its message is what the policy reads."""


class ToolGone(Exception):
    """A call that did not reach its tool, so that nothing answers the policy: the episode cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool that the policy can call."""

    schema: Schema
    call: Callable[[dict[str, Any]], Awaitable[Any]]  # with the arguments as the policy wrote them

    @property
    def name(self) -> str:
        """The name that the policy calls it by."""
        return str(self.schema["function"]["name"])


def tool_of(function: Callable[..., Any]) -> Tool:
    """Make a tool of a function, sync or async. Raises ValueError when it has no schema."""
    signature = Signature(function)

    async def call(arguments: dict[str, Any]) -> Any:
        return await run(function, **signature.checked(arguments))

    return Tool(schema=signature.schema, call=call)


class Toolbox:
    """The tools of an episode, by name."""

    def __init__(self, tools: Iterable[Tool], *, in_order: bool = False) -> None:
        """Take the tools; calls of one action run at the same time or, for tools that share a state, `in_order`.

        Raises ValueError when two have one name.
        """
        self._in_order = in_order
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            if tool.name in self._tools:
                raise ValueError(f"two tools are called {tool.name}, and a call could mean either; rename one")
            self._tools[tool.name] = tool
        self.schemas: list[Schema] = [tool.schema for tool in self._tools.values()]

    async def answer(self, action: Action) -> Observation:
        """Run an action's calls and answer them in their order; an action without calls ends the episode."""
        if self._in_order:
            answers = [await self._answer(call) for call in action.tool_calls]
        else:
            answers = await asyncio.gather(*(self._answer(call) for call in action.tool_calls))
        messages = [message for message, _ in answers]
        if action.malformed is not None:
            # Templates take a tool's message only after a call.
            role = "tool" if messages else "user"
            messages.append({"role": role, "content": f"error: this is no tool call: {action.malformed}"})
        errors = sum(failed for _, failed in answers) + (action.malformed is not None)
        return Observation(messages=tuple(messages), done=not messages, tool_errors=errors)

    async def _answer(self, call: ToolCall) -> tuple[Message, bool]:
        """The message that answers a call, and True where the call failed."""
        content, failed = await self._content(call)
        return {"role": "tool", "name": call.name, "content": content}, failed

    async def _content(self, call: ToolCall) -> tuple[Content, bool]:
        tool = self._tools.get(call.name)
        if tool is None:
            return f"error: there is no tool {call.name}; there are {', '.join(self._tools)}", True
        try:
            return _as_content(await tool.call(call.arguments)), False
        except WrongArguments as error:
            return f"error: wrong arguments of {call.name}: {error}", True
        except ToolError as error:
            return str(error), True
        except ToolGone:
            raise
        except Exception as error:  # a tool's failure is an answer, from which the policy can learn
            return f"error: {of_error(error)}", True


def _as_content(result: Any) -> Content:
    """The result of a call as the policy reads it: text and parts with images as they are, the rest as JSON. Raises
    ToolError for what is none of these."""
    if isinstance(result, str) or has_images(result):
        return result
    try:
        return json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        kind = type(result).__name__
        raise ToolError(f"error: the tool returned {kind}, which is neither text nor JSON: {error}") from error
