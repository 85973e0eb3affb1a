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
) -> tuple[tuple[int, ...], str]:
    """Return a prompt's token ids and their text, such that the response follows directly.

    Only a chat template adds special tokens; a raw prompt gets none.
    """
    reason = "the tokenizer has no chat template" if chat_template == "auto" else 'data.chat_template = "never"'
    if chat_template == "auto" and tokenizer.chat_template:
        text = _apply_template(tokenizer, _messages(prompt, system_prompt))
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


def _messages(prompt: str | Messages, system_prompt: str | None) -> Messages:
    if not isinstance(prompt, str):
        return prompt
    system = [{"role": "system", "content": system_prompt}] if system_prompt is not None else []
    return [*system, {"role": "user", "content": prompt}]


def _apply_template(tokenizer: PreTrainedTokenizerBase, messages: Messages) -> str:
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
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
