"""Tools that the policy can call, and the answers to its calls."""

from __future__ import annotations

import asyncio
import inspect
import json
import typing
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Any, NotRequired

from docstring_parser import Docstring, ParseError, parse
from pydantic import ConfigDict, Field, PydanticUserError, TypeAdapter, ValidationError, with_config
from pydantic.json_schema import GenerateJsonSchema
from typing_extensions import TypedDict  # pydantic takes no other before Python 3.12

from spmdrl.conversation import Action, Message, Observation, ToolCall
from spmdrl.data.image_forms import Content
from spmdrl.envs.observations import has_images
from spmdrl.envs.protocol import run
from spmdrl.faults.text import of_error

# From a function's signature and docstring to the schema of a tool, and to a check of a call's arguments.
#
# transformers has such a function too, but calling it imports torch, which an environment's process starts without.


Schema = dict[str, Any]


class WrongArguments(ValueError):
    """A call whose arguments do not fit."""


class Signature:
    """The parameters of a function that is a tool."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Read a function. Raises ValueError, with a sentence that names it, when it has no schema."""
        self._name: str = getattr(function, "__name__", type(function).__name__)
        docstring = _docstring(function, self._name)
        described = {param.arg_name: param.description or "" for param in docstring.params}
        fields = _fields(function, self._name, described)
        try:
            # Of a TypedDict, not of a model: no name is taken, and what a call leaves out stays out.
            kind = with_config(ConfigDict(extra="forbid"))(TypedDict(self._name, fields))  # type: ignore[operator]
            self._arguments: TypeAdapter[dict[str, Any]] = TypeAdapter(kind)
            parameters = self._arguments.json_schema(schema_generator=_WithoutTitles)
        except PydanticUserError as error:
            raise ValueError(f"the tool {self._name} has no schema: {str(error).splitlines()[0]}") from error
        # pydantic's title and additionalProperties are of the whole, which the tool describes itself.
        plain = {key: value for key, value in parameters.items() if key not in ("title", "additionalProperties")}
        self.schema: Schema = tool_schema(self._name, (docstring.description or "").strip(), plain)

    def checked(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return a call's arguments in the parameters' types. Raises WrongArguments with what is wrong."""
        try:
            return self._arguments.validate_python(arguments)
        except ValidationError as error:
            raise WrongArguments("; ".join(_sentence(one) for one in error.errors(include_url=False))) from error


def tool_schema(name: str, description: str, parameters: dict[str, Any]) -> Schema:
    """Return the schema of a tool as chat templates take it."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


class _WithoutTitles(GenerateJsonSchema):
    """JSON schemas without titles, which repeat the names in other letters."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


def _docstring(function: Callable[..., Any], name: str) -> Docstring:
    text = inspect.getdoc(function)
    if not text:
        raise ValueError(f"the tool {name} has no docstring, from which the policy learns what it does; write one")
    try:
        return parse(text)
    except ParseError as error:
        raise ValueError(f"the docstring of the tool {name} cannot be read: {error}") from error


def _fields(function: Callable[..., Any], name: str, described: dict[str, str]) -> dict[str, Any]:
    """The type, description and necessity of each parameter, as a TypedDict takes them."""
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ValueError(f"the annotations of the tool {name} cannot be read: {error}") from error
    fields: dict[str, Any] = {}
    for key, parameter in inspect.signature(function).parameters.items():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            how = " by position only" if parameter.kind is parameter.POSITIONAL_ONLY else ""
            raise ValueError(
                f"the tool {name} takes {parameter}{how}, which no schema describes; have parameters that are called "
                "by name"
            )
        if key not in hints and not described.get(key):
            raise ValueError(
                f"the parameter {key} of the tool {name} has neither an annotation nor a line in the docstring, so "
                f"that the policy could not know what to give it; annotate it, as in {key}: str"
            )
        kind: Any = hints.get(key, Any)
        if described.get(key):
            kind = Annotated[kind, Field(description=described[key])]
        fields[key] = kind if parameter.default is parameter.empty else NotRequired[kind]
    return fields


def _sentence(error: Any) -> str:
    where = ".".join(map(str, error["loc"]))
    match error["type"]:
        case "missing":
            return f"{where} is missing"
        case "extra_forbidden":
            return f"there is no argument {where}"
        case _:
            return f"{where}: {error['msg'][0].lower()}{error['msg'][1:]}"


class ToolError(Exception):
    """A call that failed; its message is what the policy reads."""


class ToolGone(Exception):
    """A call that did not reach its tool, so that nothing answers the policy: the episode cannot continue."""


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
