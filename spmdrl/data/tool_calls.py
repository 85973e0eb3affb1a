"""Tool calls in text (stand-in until the real module is merged)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from spmdrl.conversation import Action


def parse(text: str) -> Action:
    raise NotImplementedError


def action_of(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int], parser: Callable[[str], Action]) -> Action:
    raise NotImplementedError
