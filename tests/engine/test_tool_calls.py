"""SGLang's parsers of tool calls: each family's own spelling of one call, and what is none."""

from __future__ import annotations

from typing import Any

import pytest

from spmdrl.conversation import Action, ToolCall
from spmdrl.data.turns import parse
from spmdrl.engine.sglang.tool_calls import parser_named, parser_problems

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Look a city up.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        },
    }
]
JSON = '{"name": "lookup", "arguments": {"city": "Paris"}}'
PARIS = ToolCall(name="lookup", arguments={"city": "Paris"})
HARMONY_CALL = '<|channel|>commentary to=functions.lookup <|constrain|>json<|message|>{"city": "Paris"}'
HARMONY_THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"


def deepseek(text: str) -> str:
    """Control tokens between { and }, in DeepSeek's spelling."""
    return text.replace("{", "<\uff5c").replace("}", "\uff5c>").replace("_", "\u2581")


ARGUMENTS = '{"city": "Paris"}'
SPELLINGS = [
    ("hermes", f"<tool_call>{JSON}</tool_call>"),
    ("qwen25", f"<tool_call>\n{JSON}\n</tool_call>"),
    ("qwen3_coder", "<tool_call>\n<function=lookup>\n<parameter=city>\nParis\n</parameter>\n</function>\n</tool_call>"),
    ("llama3", '{"name": "lookup", "parameters": {"city": "Paris"}}'),
    ("llama3", '<|python_tag|>{"name": "lookup", "parameters": {"city": "Paris"}}'),
    ("mistral", f"[TOOL_CALLS][{JSON}]"),
    ("mistral", f"[TOOL_CALLS] [{JSON}]"),
    ("glm45", "<tool_call>lookup\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>"),
    (
        "deepseekv3",
        deepseek("{tool_calls_begin}{tool_call_begin}function{tool_sep}lookup")
        + f"\n```json\n{ARGUMENTS}\n```"
        + deepseek("{tool_call_end}{tool_calls_end}"),
    ),
    (
        "deepseekv31",
        deepseek("{tool_calls_begin}{tool_call_begin}lookup{tool_sep}")
        + ARGUMENTS
        + deepseek("{tool_call_end}{tool_calls_end}"),
    ),
    ("gpt-oss", HARMONY_CALL),
    ("gpt-oss", HARMONY_THOUGHT + HARMONY_CALL),
]


@pytest.mark.parametrize(("name", "text"), SPELLINGS)
def test_each_family_calls_in_its_own_spelling(name: str, text: str) -> None:
    assert parser_named(name, TOOLS)(text) == Action(text="", tool_calls=(PARIS,))


@pytest.mark.parametrize("name", ["hermes", "qwen25"])
def test_the_fallback_agrees(name: str) -> None:
    parser, call, broken = (
        parser_named(name, TOOLS),
        f"<tool_call>\n{JSON}\n</tool_call>",
        "<tool_call>\n{\n</tool_call>",
    )
    unknown = call.replace("lookup", "absent")
    for text in ("It rains.", call, f"So:\n{call}", f"{call}\n{call}", unknown):
        assert parser(text) == parse(text)
    for text in (broken, call.replace('{"city": "Paris"}', "[]")):
        one, other = parser(text), parse(text)
        assert one.malformed and other.malformed and one.text == other.text == text


def test_what_gpt_oss_says_is_its_final_channel() -> None:
    parser = parser_named("gpt-oss", TOOLS)
    said = parser(f"{HARMONY_THOUGHT}<|channel|>final<|message|>It rains.")
    assert said == Action(text="It rains.")
    cut_off = parser(HARMONY_CALL[:-3])
    assert cut_off.tool_calls == () and cut_off.malformed


def test_an_unknown_parser_is_refused_with_the_names_that_there_are() -> None:
    assert list(parser_problems("hermes")) == []
    (problem,) = parser_problems("hermse")
    assert "did you mean hermes?" in problem and "qwen25" in problem and "response_template" not in problem
