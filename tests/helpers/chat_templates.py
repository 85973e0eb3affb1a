"""Tokenizers of model families, built on the spot: the family's chat template and control tokens over a small BPE."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parents[1] / "data/chat_templates"
# Enough for merges that span what a template and a content write side by side, such as a line feed and a word.
CORPUS = [
    "\n\nThe result of the tool is 42 degrees.\n The user asks a question, the answer follows.\n",
    '{"name": "lookup", "arguments": {"city": "Paris", "argument": "value"}}\n\n{"content": "rain"}, "id": "call"',
    "im_start im_end tool_call tool_response user assistant system functions start end message channel",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A model family: its template, and the tokens that its tokenizer adds."""

    template: str  # name of the file in tests/data/chat_templates
    stops: tuple[str, ...]  # what ends a response; the first is the EOS token
    special: tuple[str, ...] = ()
    other: tuple[str, ...] = ()  # added tokens that are not special: they are decoded
    bos: str | None = None
    strips: bool = False  # special tokens take the white space around them


_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>")
_QWEN_OTHER = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
_LLAMA_SPECIAL = ("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>")
_HARMONY = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
_GLM_SPECIAL = ("[gMASK]", "<sop>", "<|system|>", "<|assistant|>")
_GLM_OTHER = (*_QWEN_OTHER, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "/nothink")


def _deepseek(name: str) -> str:
    """A control token of DeepSeek's, whose bars and blanks are not ASCII's."""
    return "<\uff5c" + name.replace(" ", "\u2581") + "\uff5c>"


_DEEPSEEK = Family(
    template="deepseek-r1",
    stops=(_deepseek("end of sentence"),),
    special=(
        *(
            _deepseek(f"tool {part} {end}")
            for part in ("calls", "call", "output", "outputs")
            for end in ("begin", "end")
        ),
        *(_deepseek(name) for name in ("User", "Assistant", "tool sep")),
    ),
    other=("<think>", "</think>"),
    bos=_deepseek("begin of sentence"),
)
_MISTRAL = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]")

FAMILIES = {
    "Qwen2.5": Family(
        template="qwen2.5", stops=("<|im_end|>", "<|endoftext|>"), special=_QWEN_SPECIAL, other=_QWEN_OTHER[2:4]
    ),
    "Qwen3": Family(template="qwen3", stops=("<|im_end|>", "<|endoftext|>"), special=_QWEN_SPECIAL, other=_QWEN_OTHER),
    "Qwen3.5": Family(
        template="qwen3.5",
        stops=("<|im_end|>", "<|endoftext|>"),
        special=(*_QWEN_SPECIAL, "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"),
        other=_QWEN_OTHER,
    ),
    "Llama 3.1": Family(
        template="llama3.1",
        stops=("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        special=_LLAMA_SPECIAL,
        bos="<|begin_of_text|>",
    ),
    "Mistral Nemo": Family(
        template="mistral-nemo", stops=("</s>",), special=(*_MISTRAL, "[/AVAILABLE_TOOLS]"), bos="<s>"
    ),
    "Gemma 3": Family(
        template="gemma3",
        stops=("<end_of_turn>", "<eos>"),
        special=("<start_of_turn>", "<start_of_image>", "<image_soft_token>", "<end_of_image>"),
        other=("\n\n", "\n\n\n", "<table>", "<b>"),
        bos="<bos>",
    ),
    "gpt-oss": Family(template="gpt-oss", stops=("<|return|>", "<|call|>", "<|endoftext|>"), special=_HARMONY),
    "GLM 4.5": Family(
        template="glm4.5",
        stops=("<|endoftext|>", "<|user|>", "<|observation|>"),
        special=_GLM_SPECIAL,
        other=_GLM_OTHER,
    ),
    "DeepSeek R1": _DEEPSEEK,
    "DeepSeek V3.1": dataclasses.replace(_DEEPSEEK, template="deepseek-v3.1"),
    "SmolLM 3": Family(
        template="smollm3", stops=("<|im_end|>", "<|end_of_text|>"), special=("<|im_start|>",), other=_QWEN_OTHER
    ),
    "Phi 4": Family(
        template="phi4",
        stops=("<|im_end|>", "<|endoftext|>"),
        special=("<|im_start|>", "<|im_sep|>"),
        strips=True,
    ),
    "OLMo 3": Family(template="olmo3", stops=("<|endoftext|>", "<|im_end|>"), special=("<|im_start|>",)),
}


@functools.cache
def small_bpe() -> str:
    """A byte-level BPE with a few hundred merges, as JSON."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=500, min_frequency=1, initial_alphabet=alphabet, show_progress=False)
    )
    return tokenizer.to_str()


@functools.cache
def family_tokenizer(name: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family; its `name_or_path` is the family's name."""
    family = FAMILIES[name]
    backend = Tokenizer.from_str(small_bpe())
    special = [*family.stops, *family.special, *([family.bos] if family.bos else [])]
    strips = {"lstrip": family.strips, "rstrip": family.strips}
    backend.add_special_tokens([AddedToken(text, special=True, **strips) for text in special])
    backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in family.other])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=family.bos and AddedToken(family.bos, special=True, **strips),
        eos_token=AddedToken(family.stops[0], special=True, **strips),
    )
    tokenizer.chat_template = (TEMPLATES / f"{family.template}.jinja").read_text(encoding="utf-8")
    tokenizer.name_or_path = name
    return tokenizer


def stops_of(name: str) -> frozenset[int]:
    """The tokens that end a response of the family."""
    return frozenset(family_tokenizer(name).convert_tokens_to_ids(list(FAMILIES[name].stops)))
