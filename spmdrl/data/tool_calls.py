"""From the tokens of a response to what it does: text, and calls of tools.

`parse` reads one format without help: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, which Hermes, Qwen
2.5 and Qwen 3 write. `engine/sglang/tool_calls.py` has SGLang's parsers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.config.strict import MAX_DEPTH, depth
from spmdrl.conversation import Action, ToolCall
from spmdrl.data.tokenizer import decode

Parser = Callable[[str], Action]

_BEGIN, _END = "<tool_call>", "</tool_call>"
_CALL = re.compile(f"{_BEGIN}(.*?)({_END}|$)", re.DOTALL)


def parse(text: str) -> Action:
    """Read the calls in a response; the text around them is kept.

    With a call that is not closed, or is not such JSON, nothing is called, and `text` is all of it.
    """
    calls = []
    for content, end in _CALL.findall(text):
        if not end:
            return Action(text=text, malformed=f"{_BEGIN} is not closed by {_END}")
        try:
            calls.append(call_of(json.loads(content)))
        except (ValueError, RecursionError) as error:
            return Action(text=text, malformed=f"{_BEGIN} does not hold a call: {error}")
    return Action(text=_CALL.sub("", text).strip() if calls else text, tool_calls=tuple(calls))


def call_of(value: Any) -> ToolCall:
    """Return a decoded JSON value as a call. Raises ValueError with the reason when it is none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        raise ValueError('it must be an object with a "name", a string')
    arguments = value.get("arguments", {})
    if not isinstance(arguments, dict):
        raise ValueError(f'its "arguments" must be an object, not {type(arguments).__name__}')
    if depth(arguments) > MAX_DEPTH:  # what reads them again is recursive
        raise ValueError(f'its "arguments" are nested more than {MAX_DEPTH} deep')
    return ToolCall(name=value["name"], arguments=arguments)


def action_of(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], parser: Parser, *, stop_token_ids: frozenset[int]
) -> Action:
    """Return a response as an action.

    The parser reads the text with special tokens, because formats of calls are made of them, and without the stop token
    at the end; the action's text is without any.
    """
    ended = bool(token_ids) and token_ids[-1] in stop_token_ids
    kept = list(token_ids[:-1] if ended else token_ids)
    read = tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    action = parser(read)
    if action.text == read:
        text = decode(tokenizer, kept)
    else:
        special = sorted((t.content for t in tokenizer.added_tokens_decoder.values() if t.special), key=len)
        text = re.sub("|".join(map(re.escape, reversed(special))) or "(?!)", "", action.text)
    return Action(text=text, tool_calls=action.tool_calls, malformed=action.malformed)
