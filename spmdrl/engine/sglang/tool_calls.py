"""SGLang's parsers of tool calls, one for each family of models. They need no engine."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

from spmdrl.conversation import Action
from spmdrl.data.turns import TurnParser, call_of
from spmdrl.engine.sglang.process import import_sglang

_NOT_BY_NAME = "response_template"  # it comes with a tokenizer
_HARMONY = "gpt-oss"
_HARMONY_START = "<|start|>assistant"  # of the generation prompt


def parser_problems(name: str) -> Iterator[str]:
    """Yield a sentence when SGLang has no parser of this name."""
    names = sorted(_parsers())
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        yield f"environment.tool_parser = {name!r}: SGLang has no such parser; {hint}It has {', '.join(names)}"


def parser_named(name: str, tools: Sequence[dict[str, Any]]) -> TurnParser:
    """Return SGLang's parser of this name, for texts with special tokens. Calls of unknown tools are calls too."""
    _parsers()
    from sglang.srt.entrypoints.openai.protocol import Tool
    from sglang.srt.environ import envs
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    # The environment answers calls of unknown tools and malformed ones; a log line for each would hide all others.
    logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)
    schemas = [Tool(**tool) for tool in tools]

    def parse(text: str) -> Action:
        parser = FunctionCallParser(schemas, name)  # it keeps what it has read
        spelled = _as_read(name, text)
        try:
            with envs.SGLANG_FORWARD_UNKNOWN_TOOLS.override(True):
                rest, items = parser.parse_non_stream(spelled)
            calls = [call_of({"name": item.name, "arguments": json.loads(item.parameters)}) for item in items]
        except Exception as error:  # parsers raise many types for texts that they do not expect
            return Action(text=text, malformed=f"SGLang's parser {name} cannot read the call: {error}")
        if calls:
            return Action(text=rest.strip(), tool_calls=tuple(calls))
        begins = "to=functions." in text if name == _HARMONY else schemas and parser.has_tool_call(spelled)
        if begins:
            return Action(text=text, malformed=f"SGLang's parser {name} cannot read the call")
        return Action(text=_said(text) if name == _HARMONY else text)

    return parse


def _as_read(name: str, text: str) -> str:
    """Return a response as its parser wants it: some look for what precedes or ends it, or for a space."""
    if name == _HARMONY:
        return f"{_HARMONY_START}{text}<|call|>"
    if name == "mistral":
        return text.replace("[TOOL_CALLS][", "[TOOL_CALLS] [")
    return text


def _said(text: str) -> str:
    """Return what gpt-oss says to the user, without its other channels."""
    from sglang.srt.parser.harmony_parser import HarmonyParser

    parser = HarmonyParser()
    events = [*parser.parse(_HARMONY_START + text), *parser.parse("")]
    return "".join(event.content for event in events if event.event_type == "normal")


def _parsers() -> set[str]:
    """Return the names of SGLang's parsers."""
    import_sglang()
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    return set(FunctionCallParser.ToolCallParserEnum) - {_NOT_BY_NAME}
