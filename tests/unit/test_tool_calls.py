"""From the tokens of a response to an action, without SGLang."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmdrl.conversation import Action, ToolCall
from spmdrl.data.turns import action_of, parse
from tests.helpers.chat_templates import family_tokenizer, stops_of

LOOKUP = '<tool_call>\n{"name": "lookup", "arguments": {"city": "Paris"}}\n</tool_call>'
PARIS = ToolCall(name="lookup", arguments={"city": "Paris"})


def test_calls_are_taken_out_of_the_text_around_them() -> None:
    assert parse("It rains.") == Action(text="It rains.")
    assert parse(LOOKUP) == Action(text="", tool_calls=(PARIS,))
    assert parse(f"First\n{LOOKUP}\n{LOOKUP} last") == Action(text="First\n\n last", tool_calls=(PARIS, PARIS))
    without = parse('<tool_call>{"name": "now"}</tool_call>')
    assert without.tool_calls == (ToolCall(name="now", arguments={}),)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (LOOKUP.removesuffix("</tool_call>"), "is not closed by </tool_call>"),
        ("<tool_call>", "is not closed"),
        ("<tool_call>{</tool_call>", "does not hold a call: Expecting property name"),
        ("<tool_call>[1]</tool_call>", 'an object with a "name"'),
        ('<tool_call>{"name": 3}</tool_call>', 'an object with a "name"'),
        ('<tool_call>{"name": "now", "arguments": "x"}</tool_call>', '"arguments" must be an object, not str'),
        (f"<tool_call>{'[' * 100_000}</tool_call>", "does not hold a call"),
        (
            f'<tool_call>{{"name": "a", "arguments": {{"x": {"[" * 100}{"]" * 100}}}}}</tool_call>',
            "nested more than 100",
        ),
        (f"{LOOKUP} <tool_call>", "is not closed"),  # then the first is not called either
    ],
)
def test_what_begins_like_a_call_and_is_none_is_malformed(text: str, reason: str) -> None:
    action = parse(text)
    assert action.text == text and action.tool_calls == () and action.malformed and reason in action.malformed


@given(st.lists(st.one_of(st.text(), st.sampled_from(["<tool_call>", "</tool_call>", "{", "}", LOOKUP]))).map("".join))
def test_every_text_is_an_action(text: str) -> None:
    action = parse(text)
    assert action.text == text or action.tool_calls
    assert bool(action.malformed) <= ("<tool_call>" in text)


def test_actions_have_no_special_tokens_and_parsers_see_them() -> None:
    tokenizer, stops = family_tokenizer("Qwen3"), stops_of("Qwen3")
    seen = []

    def parser(text: str) -> Action:
        seen.append(text)
        return parse(text)

    def action(text: str) -> Action:
        return action_of(tokenizer, tokenizer(text)["input_ids"], parser, stop_token_ids=stops)

    assert action("<think>\n</think>It<|im_start|> rains.<|im_end|>") == Action(text="<think>\n</think>It rains.")
    assert action(f"So <|im_start|>{LOOKUP}<|im_end|>") == Action(text="So ", tool_calls=(PARIS,))
    assert action("cut off") == Action(text="cut off")
    assert seen == ["<think>\n</think>It<|im_start|> rains.", f"So <|im_start|>{LOOKUP}", "cut off"]
    assert action_of(tokenizer, (), parser, stop_token_ids=stops) == Action(text="")
