"""All use of the tokenizer: prompts to token ids, responses to text, and the tokens that end a response."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from jinja2 import TemplateError
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from spmdrl.types import UserError

Messages = list[dict[str, Any]]


def load_tokenizer(path: str, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model directory; nothing is downloaded."""
    if not Path(path).is_dir():
        raise UserError(f"model.path = {path}: no such directory")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except Exception as error:  # transformers raises many types for bad files
        reason = " ".join(str(error).split())
        raise UserError(f"model.path = {path}: its tokenizer cannot be loaded: {reason}") from error
    # Without tokenizer files transformers builds an empty tokenizer from the model type in config.json.
    if len(tokenizer) <= len(tokenizer.all_special_tokens):
        raise UserError(f"model.path = {path} has no tokenizer; copy the tokenizer files of the model into it")
    return tokenizer


def encode_prompt(
    tokenizer: PreTrainedTokenizerBase,
    prompt: str | Messages,
    *,
    system_prompt: str | None,
    chat_template: Literal["auto", "never"],
    tools: Sequence[dict[str, Any]] = (),
) -> tuple[tuple[int, ...], str]:
    """Return a prompt's token ids and their text, such that the response follows directly.

    Only a chat template adds special tokens, and shows the schemas of tools; a raw prompt gets neither.
    """
    reason = "the tokenizer has no chat template" if chat_template == "auto" else 'data.chat_template = "never"'
    if uses_template(tokenizer, chat_template):
        text = _prompt_text(tokenizer, chat_messages(prompt, system_prompt), tools)
    elif not isinstance(prompt, str):
        raise UserError(f"the prompt is a list of chat messages, but {reason}; use string prompts")
    elif system_prompt is not None:
        raise UserError(f"data.system_prompt is set, but {reason}; write it into the prompts")
    else:
        text = prompt
    token_ids = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
    if not token_ids:
        raise UserError("the prompt is empty after tokenization")
    return token_ids, text


def uses_template(tokenizer: PreTrainedTokenizerBase, chat_template: Literal["auto", "never"]) -> bool:
    """Return True when conversations go through the tokenizer's chat template."""
    return chat_template == "auto" and bool(tokenizer.chat_template)


def chat_messages(prompt: str | Messages, system_prompt: str | None) -> Messages:
    """Return a prompt as the messages that a chat template takes."""
    if not isinstance(prompt, str):
        return prompt
    system = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    return [*system, {"role": "user", "content": prompt}]


class TemplateRefusal(Exception):
    """A chat template cannot render a conversation; the message is the template's own."""


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Messages,
    *,
    tools: Sequence[dict[str, Any]] = (),
    generation_prompt: bool = True,
) -> str:
    """Render a conversation with the tokenizer's chat template. Raises TemplateRefusal.

    The generation prompt is what precedes the next response.
    """
    try:
        return tokenizer.apply_chat_template(
            messages, tools=list(tools) or None, add_generation_prompt=generation_prompt, tokenize=False
        )
    except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:  # templates are programs
        raise TemplateRefusal(" ".join(str(error).split())) from error


def _prompt_text(tokenizer: PreTrainedTokenizerBase, messages: Messages, tools: Sequence[dict[str, Any]]) -> str:
    try:
        return render(tokenizer, messages, tools=tools)
    except TemplateRefusal as error:
        raise UserError(f"the tokenizer's chat template refuses the prompt: {error}") from error


def decode(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """Decode tokens to text without special tokens, as rewards read it."""
    return tokenizer.decode(list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stop_token_ids(tokenizer: PreTrainedTokenizerBase, model_dir: str) -> frozenset[int]:
    """Return the tokens that end a response: the tokenizer's EOS token and those of generation_config.json."""
    stops = {tokenizer.eos_token_id}
    path = Path(model_dir) / "generation_config.json"
    if path.exists():
        try:
            listed = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
        except (ValueError, AttributeError) as error:
            raise UserError(f"{path} is not a JSON object: {error}") from error
        stops.update(listed if isinstance(listed, list) else [listed])
    stops.discard(None)
    if strange := [stop for stop in stops if not isinstance(stop, int)]:
        raise UserError(f"{path}: eos_token_id must be a token id or a list of them, not {strange[0]!r}")
    if not stops:
        raise UserError(
            f"neither the tokenizer nor generation_config.json in {model_dir} names an end-of-sequence token; "
            "set rollout.stop_token_ids"
        )
    return frozenset(stops)
