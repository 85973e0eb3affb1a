"""Files of a tiny vision model beside its weights: a tokenizer with tokens of images, and a processor."""

from __future__ import annotations

import io
import json
import random
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import PIL.Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.helpers.small_run import write_config
from tests.helpers.vision_models import END, IMAGE, START, VIDEO, VISION, VOCABULARY, save_qwen3_vl

PAD, EOS, UNKNOWN, USER, ASSISTANT, SYSTEM = "<pad>", "<eos>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>"
TOKENS = {START: "<|vision_start|>", END: "<|vision_end|>", IMAGE: "<|image_pad|>", VIDEO: "<|video_pad|>"}
PIXELS_PER_TOKEN = (VISION["patch_size"] * VISION["spatial_merge_size"]) ** 2
_PLACE = TOKENS[START] + TOKENS[IMAGE] + TOKENS[END]
_PLACES = {"gemma3": TOKENS[START], "gemma4": TOKENS[IMAGE]}  # whose templates leave the others out
_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}PLACE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def vision_tokenizer(place: str = _PLACE) -> PreTrainedTokenizerFast:
    """A tokenizer of characters for the models of `vision_models`, whose tokens of images it has, and a template that
    writes `place` for an image."""
    names = {0: PAD, 1: EOS, 2: UNKNOWN, 3: USER, 8: ASSISTANT, 9: SYSTEM} | TOKENS
    letters = iter(string.ascii_letters + string.digits + " \n" + string.punctuation)
    vocabulary = {names.get(number) or next(letters): number for number in range(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split("", behavior="isolated")
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(name, special=True) for name in names.values()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN)
    tokenizer.chat_template = _TEMPLATE.replace("PLACE", place)
    return tokenizer


def save_vision_files(path: Path | str, **changes: Any) -> None:
    """Write a tokenizer and a processor beside a model of `vision_models`; images have 1 to 9 tokens."""
    kind = json.loads(Path(path, "config.json").read_text())["model_type"]
    vision_tokenizer(place=_PLACES.get(kind, _PLACE)).save_pretrained(path)
    if kind == "gemma3":
        Gemma3ImageProcessorPil(size={"height": 16, "width": 16}, **changes).save_pretrained(path)
    elif kind == "gemma4":  # up to 70 tokens
        sizes = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
        Gemma4ImageProcessorPil(**sizes | changes).save_pretrained(path)
    else:
        save_processor(path, **changes)


def save_processor(path: Path | str, **changes: Any) -> None:
    """Write a processor that makes 1 to 9 tokens of an image, whatever its size, as Qwen's do."""
    patches = {name: VISION[name] for name in ("patch_size", "temporal_patch_size")}
    size = {"shortest_edge": PIXELS_PER_TOKEN, "longest_edge": 9 * PIXELS_PER_TOKEN}
    settings = {"size": size, "merge_size": VISION["spatial_merge_size"]} | patches | changes
    Qwen2VLImageProcessorPil(**settings).save_pretrained(path)


def photo(width: int, height: int, *, seed: int = 0, mode: str = "RGB") -> PIL.Image.Image:
    """A picture of random pixels."""
    bands = len(PIL.Image.new(mode, (1, 1)).getbands())
    return PIL.Image.frombytes(mode, (width, height), random.Random(seed).randbytes(width * height * bands))


def as_file(image: PIL.Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """A picture as the bytes of a file."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def write_picture_run(folder: Path, *, eval: dict[str, Any] | None, **tables: Any) -> None:
    """Write a tiny Qwen3-VL, questions of which some have a picture, and the configuration of a small run of episodes
    that show pictures; the environment itself is left to the command line, and `eval` needs no sources."""
    save_qwen3_vl(folder / "model", eos_token_id=1, pad_token_id=0)
    save_vision_files(folder / "model")
    held_out = eval and eval | {"sources": [_questions(folder, "held-out", range(12, 18))]}
    settings: dict[str, Any] = {
        "data": {"sources": [_questions(folder, "train", range(12))], "max_prompt_tokens": 64},
        # Most tokens end a response, so that a model that knows nothing gets to its later turns.
        "rollout": {
            "prompts_per_step": 6,
            "group_size": 2,
            "max_response_tokens": 160,
            "stop_token_ids": [1, *range(14, 62)],
        },
        "environment": {"max_turns": 4},
        "reward": {"terms": [{"kind": "environment"}]},
        "checkpoint": {"every": 1},
        "pack": {"max_tokens_per_micro_batch": 512},
        "eval": held_out,
    }
    write_config(folder, **settings | tables)


def write_questions(folder: Path, name: str, *, first: int, count: int) -> dict[str, Any]:
    """Write questions about random pictures of many sizes; return the table that reads them."""
    lines = []
    for number in range(first, first + count):
        rng = random.Random(number)
        images = []
        for place in range(number % 4):
            images.append(f"{name}-{number}-{place}.png")
            photo(rng.randint(8, 30), rng.randint(8, 30), seed=10 * number + place).save(folder / images[-1])
        lines.append({"prompt": "<image>and" * len(images) + f" {number}", "answer": "7", "images": images})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"sources": [{"kind": "jsonl", "path": f"{folder}/{name}.jsonl", "image_column": "images"}]}


def _questions(folder: Path, name: str, numbers: Iterable[int]) -> dict[str, Any]:
    """The source of a file of questions, of which every third has a picture."""
    lines = []
    for number in numbers:
        images = [f"{number}.png"] if number % 3 == 0 else []
        if images:
            rng = random.Random(number)
            photo(rng.randint(8, 30), rng.randint(8, 30), seed=number).save(folder / images[0])
        lines.append({"prompt": f"{'<image>' * len(images)} {number}", "answer": "7", "images": images})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {"kind": "jsonl", "path": f"{folder}/{name}.jsonl", "image_column": "images"}
