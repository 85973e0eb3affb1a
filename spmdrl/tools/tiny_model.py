"""`python -m spmdrl.tools.tiny_model DIR`: makes a small random Qwen3 with a character tokenizer.

It needs no download, learns simple text tasks in minutes on a CPU, and runs through the same code as any other model.
With `--vision` it is a Qwen3-VL, which takes images of up to 48 x 48 pixels as one token for each 16 x 16.
"""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.utils import logging as transformers_logging

from spmdrl.faults.text import Parser, say
from spmdrl.model.weight_files import open_to_readers
from spmdrl.tools.program import program
from spmdrl.types import UserError

ALPHABET = string.printable.strip() + " \n"
PAD, EOS = "<pad>", "<eos>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
CALL_TOKENS = ("<tool_call>", "</tool_call>")  # not special: parsers read them
CALL_WORDS = ('{"name": "', '", "arguments": {"', '": "', '"}}')  # what every call with one text argument is made of
# Tools are shown as `name(parameter, ...)`: a whole schema is longer than anything else the model reads.
CHAT_TEMPLATE = (
    "{% if tools %}<|system|>{% for tool in tools %}"
    "{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})"
    "{% endfor %}<eos>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    '<tool_call>{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>'
    "{% endfor %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Around an image, in its place, and in the place of a video, which no prompt has.
IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_TEMPLATE = CHAT_TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}",
)
PATCH, MERGE, MAX_SIDE = 8, 2, 48  # pixels, patches along the side of a token, pixels
_TOWER_SIZE = 64

_HEAD_DIM = 32
_LIMITS = {  # "tiny" ends somewhere; seeds have 64 bits
    "hidden_size": (_HEAD_DIM, 8192),
    "num_layers": (1, 256),
    "max_tokens": (1, 2**20),
    "spare_tokens": (0, 2**20),
    "seed": (0, 2**63 - 1),
}


def character_tokenizer(
    *, words: Sequence[str] = (), chat: bool = False, vision: bool = False
) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per printable ASCII character; any other character becomes <unk>.

    Words have a token of their own too. With `chat` there are tokens of roles and tool calls, and a chat template; with
    `vision` the same, and tokens for the places of images.
    """
    chat = chat or vision
    words = [*words, *CALL_WORDS] if chat else words
    tokens = dict.fromkeys([PAD, EOS, "<unk>", *ALPHABET, *words])  # a word may be a character
    vocabulary = {token: number for number, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    longest_first = [re.escape(word) for word in sorted(words, key=len, reverse=True)]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*longest_first, r"[\s\S]"])), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token="<unk>")
    if chat:
        fast.add_tokens(list(ROLES), special_tokens=True)
        fast.add_tokens(list(CALL_TOKENS))
        fast.chat_template = CHAT_TEMPLATE
    if vision:
        fast.add_tokens(list(IMAGE_TOKENS), special_tokens=True)
        fast.chat_template = VISION_TEMPLATE
    return fast


def save_tiny_model(
    path: Path,
    *,
    hidden_size: int = 128,
    num_layers: int = 4,
    head_dim: int = _HEAD_DIM,
    max_tokens: int = 256,
    spare_tokens: int = 0,
    words: Sequence[str] = (),
    chat: bool = False,
    vision: bool = False,
    seed: int = 0,
) -> int:
    """Write the model and its tokenizer, and return the number of parameters.

    The vocabulary has 99 tokens, besides words and those of a chat and of images; unused spare tokens can make it
    divisible by a number of ranks.
    """
    tokenizer = character_tokenizer(words=words, chat=chat, vision=vision)
    tokenizer.add_tokens([f"<spare {number}>" for number in range(spare_tokens)])
    decoder = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": 3 * hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": hidden_size // head_dim,
        "num_key_value_heads": max(1, hidden_size // (2 * head_dim)),
        "head_dim": head_dim,
        "max_position_embeddings": max_tokens,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    torch.manual_seed(seed)
    model: PreTrainedModel
    if vision:
        model = _with_tower(decoder, tokenizer)
        _image_processor().save_pretrained(path)
    else:
        model = Qwen3ForCausalLM(Qwen3Config(**decoder, rope_theta=10_000.0))
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    open_to_readers(path)
    return model.num_parameters()


def _with_tower(decoder: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """Make a Qwen3-VL: the tower has one layer, which also gives what the first layer of the decoder adds."""
    half = decoder["head_dim"] // 2
    sections = [half - 2 * (half // 3), half // 3, half // 3]  # of frame, row and column
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": sections, "mrope_interleaved": True}
    begin, end, image, video = tokenizer.convert_tokens_to_ids(list(IMAGE_TOKENS))
    # The usual start is made for wide models: with it, one so narrow begins to see only after hundreds of steps.
    model = Qwen3VLForConditionalGeneration(
        Qwen3VLConfig(
            text_config=decoder | {"rope_parameters": rope, "initializer_range": 0.1},
            vision_config={
                "depth": 1,
                "hidden_size": _TOWER_SIZE,
                "intermediate_size": 2 * _TOWER_SIZE,
                "num_heads": 2,
                "patch_size": PATCH,
                "spatial_merge_size": MERGE,
                "temporal_patch_size": 2,
                "out_hidden_size": decoder["hidden_size"],
                "num_position_embeddings": (MAX_SIDE // PATCH) ** 2,
                "deepstack_visual_indexes": [0],
                "initializer_range": 0.05,
            },
            image_token_id=image,
            video_token_id=video,
            vision_start_token_id=begin,
            vision_end_token_id=end,
            tie_word_embeddings=True,
        )
    )
    torch.nn.init.normal_(model.model.visual.pos_embed.weight)
    return model


def _image_processor() -> Qwen2VLImageProcessorPil:
    """Make what turns images into patches, and images of another size into such of 16 x 16 to 48 x 48 pixels or so."""
    limits = {"shortest_edge": (PATCH * MERGE) ** 2, "longest_edge": MAX_SIDE**2}  # pixels of the whole image
    return Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=MERGE, temporal_patch_size=2, size=limits)


@program("cannot make a model")
def main(argv: Sequence[str] | None = None) -> None:
    """Make the model; returns the exit code."""
    parser = Parser(description=__doc__)
    parser.add_argument("dir", type=Path)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--spare-tokens", type=int, default=0, help="5 of them let four ranks split the vocabulary")
    parser.add_argument("--words", nargs="+", default=[], metavar="WORD", help="texts that are one token each")
    parser.add_argument("--chat", action="store_true", help="a chat template with tools, and its tokens")
    parser.add_argument("--vision", action="store_true", help="the same, and a tower for images")
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args(argv))
    path: Path = options.pop("dir")
    transformers_logging.disable_progress_bar()
    for name, (least, most) in _LIMITS.items():
        if not least <= options[name] <= most:
            parser.error(f"--{name.replace('_', '-')} {options[name]}: set it to {least} to {most}")
    if options["hidden_size"] % _HEAD_DIM:
        parser.error(f"--hidden-size {options['hidden_size']}: set it to a multiple of {_HEAD_DIM}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} exists and is not an empty directory; name a new one")
    say(f"{path}: {save_tiny_model(path, **options):,} parameters")


if __name__ == "__main__":
    sys.exit(main())
