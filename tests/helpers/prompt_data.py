"""Prompts in files, and a tokenizer of bytes that reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from spmdrl.config import DataConfig, FileData, ReasoningGymData


def byte_tokenizer(*, chat_template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a byte, after a beginning and an end of text, which it adds when it is allowed to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<s>": 0, "<|end|>": 1} | {letter: i for i, letter in enumerate(alphabet, start=2)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="<|end|>", add_bos_token=True)
    fast.chat_template = chat_template
    return fast


def jsonl(path: Path, records: list[Any], **changes: Any) -> FileData:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return FileData(**({"kind": "jsonl", "path": str(path)} | changes))


def data(*entries: FileData | ReasoningGymData, **changes: Any) -> DataConfig:
    return DataConfig(**({"sources": entries, "max_prompt_tokens": 200} | changes))
