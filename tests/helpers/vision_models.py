"""Tiny random models that look at images, images of several sizes for them, and sequences with and without images."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma4Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5Config,
    Qwen3_5MoeConfig,
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
)

from spmdrl.data.image_store import ImageStore
from spmdrl.families import VisionFamily, vision_family
from spmdrl.types import ImageSpan, Sequence
from tests.helpers.models import EXPERTS, GATED_DELTA_NET, OTHERS, SIZES, SLIDING

START, END, IMAGE, VIDEO = 4, 5, 6, 7  # tokens before, after and of an image
VOCABULARY = 98  # two ranks divide it
MAX_SIDE = 3  # tokens
TEXT = SIZES | {"vocab_size": VOCABULARY, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
MROPE = {"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default", "mrope_section": [4, 2, 2]}}
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
VISION = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
    "initializer_range": 0.1,
}


def save_qwen2_5_vl(path: Path, *, patch_size: int = 4, **changes: Any) -> str:
    """A random Qwen2.5-VL: windows in its tower, mRoPE."""
    windows = {"patch_size": patch_size, "window_size": 4 * patch_size, "fullatt_block_indexes": [1]}
    rope = MROPE["rope_parameters"] | {"mrope_section": [2, 1, 1]}
    text = TEXT | {"rope_parameters": rope, "head_dim": TEXT["hidden_size"] // TEXT["num_attention_heads"]} | changes
    config = Qwen2_5_VLConfig(text_config=text, vision_config=VISION | windows, **TOKENS)
    return _save(path, config)


def save_qwen3_vl(path: Path, **changes: Any) -> str:
    """A random Qwen3-VL: what two blocks of its tower see is added after the first two layers."""
    deepstack = {"deepstack_visual_indexes": [0, 1]}
    mrope = {"rope_parameters": MROPE["rope_parameters"] | {"mrope_interleaved": True}}
    config = Qwen3VLConfig(
        text_config=TEXT | mrope | {"num_hidden_layers": 3} | changes, vision_config=VISION | deepstack, **TOKENS
    )
    return _save(path, config)


def save_qwen3_vl_moe(path: Path, **changes: Any) -> str:
    """A random Qwen3-VL with experts."""
    deepstack = {"deepstack_visual_indexes": [0]}
    mrope = {"rope_parameters": MROPE["rope_parameters"] | {"mrope_interleaved": True}}
    config = Qwen3VLMoeConfig(
        text_config=TEXT | mrope | EXPERTS | {"num_experts": 4} | changes, vision_config=VISION | deepstack, **TOKENS
    )
    file = Path(_save(path, config), "model.safetensors")
    # As its authors' files are, and transformers' own are not: experts' weights are [experts, inputs, outputs].
    weights = {
        name: weight.transpose(1, 2).contiguous() if ".experts." in name else weight
        for name, weight in load_file(file).items()
    }
    save_file(weights, file, {"format": "pt"})
    return str(path)


def save_qwen3_5_vl(path: Path, **changes: Any) -> str:
    """A random Qwen3.5 with its tower: a gated delta net and a gated attention, mRoPE on a part of each head."""
    rope = MROPE["rope_parameters"] | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    config = Qwen3_5Config(
        text_config=TEXT | GATED_DELTA_NET | {"rope_parameters": rope} | changes, vision_config=VISION, **TOKENS
    )
    return _save(path, config)


def save_qwen3_5_moe_vl(path: Path, **changes: Any) -> str:
    """A random Qwen3.5 with its tower and experts, as Qwen3.6-35B-A3B."""
    rope = MROPE["rope_parameters"] | {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
    experts = EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 24}
    text = TEXT | GATED_DELTA_NET | experts | {"rope_parameters": rope} | changes
    return _save(path, Qwen3_5MoeConfig(text_config=text, vision_config=VISION, **TOKENS))


def save_gemma3_vl(path: Path, **changes: Any) -> str:
    """A random Gemma 3 with its tower: every image is 4 tokens, which see each other; a sliding and a full layer."""
    text = SIZES | SLIDING | {"vocab_size": VOCABULARY, "query_pre_attn_scalar": 24} | changes
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 16,
        "patch_size": 4,
        "initializer_range": 0.1,
    }
    tokens = {"image_token_index": IMAGE, "boi_token_index": START, "eoi_token_index": END}
    return _save(path, Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **tokens))


def save_gemma4_vl(path: Path, *, audio_config: dict[str, Any] | None = None, **changes: Any) -> str:
    """A random Gemma 4 with its tower: the tokens of an image see each other in the sliding layers alone, and layers
    have embeddings of their own."""
    sizes = {"vocab_size": VOCABULARY, "vocab_size_per_layer_input": VOCABULARY, "pad_token_id": 0}
    text = SIZES | OTHERS["gemma4_text"] | sizes | {"use_bidirectional_attention": "vision"} | changes
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "position_embedding_size": 160,
        "standardize": True,
        "use_clipped_linears": True,
        "initializer_range": 0.1,
    }
    # To transformers' model every token with the number of a video's is padding, wherever it stands.
    tokens = {"image_token_id": IMAGE, "video_token_id": VOCABULARY, "boi_token_id": START, "eoi_token_id": END}
    tokens["audio_token_id"] = VOCABULARY + 1
    return _save(path, Gemma4Config(text_config=text, vision_config=vision, audio_config=audio_config, **tokens))


def save_gemma4_that_hears(path: Path, **changes: Any) -> str:
    """A random Gemma 4 as E2B: with a tower for sounds too, and no token sees one after it."""
    sounds = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 24}
    sounds |= {"subsampling_conv_channels": [8, 4], "initializer_range": 0.1}
    return save_gemma4_vl(path, audio_config=sounds, use_bidirectional_attention=None, **changes)


VISION_MODELS: list[Callable[..., str]] = [
    save_qwen2_5_vl,
    save_qwen3_vl,
    save_qwen3_vl_moe,
    save_qwen3_5_vl,
    save_qwen3_5_moe_vl,
    save_gemma3_vl,
    save_gemma4_vl,
]


def _save(path: Path, config: PreTrainedConfig, *, seed: int = 0) -> str:
    """A random model of that config in which no parameter is all zeros or ones."""
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and parameter.std() == 0:
                parameter += 0.1 * torch.randn_like(parameter)
    model.save_pretrained(path)
    return str(path)


@dataclass(frozen=True, slots=True)
class Picture:
    """An image as a processor leaves it."""

    digest: str
    grid: tuple[int, int, int]
    pixels: Tensor  # [P, C] or [1, 3, H, W]


def picture(path: str, number: int) -> Picture:
    """Image `number` for the model at `path`: random pixels; where the model allows, of a random size."""
    config = AutoConfig.from_pretrained(path)
    family, vision = _family(config), config.vision_config
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    if family.tokens_per_image is not None:
        side = vision.image_size // vision.patch_size
        grid = (1, side, side)
        pixels = torch.randn(1, 3, vision.image_size, vision.image_size, generator=generator)
    else:
        grid = (1, *(family.merge * rng.randint(1, MAX_SIDE) for _ in range(2)))
        pixels = torch.randn(grid[1] * grid[2], family.patch_values, generator=generator)
    return Picture(hashlib.sha256(f"{path}{number}".encode()).hexdigest()[:32], grid, pixels)


def sequence_with(path: str, *pictures: Picture, index: int = 0, response: int = 7) -> Sequence:
    """A sequence with these images between pieces of text, and a response of random tokens."""
    family, rng = _family_at(path), random.Random(index)
    token_ids, spans = [], []
    for shown in pictures:
        token_ids += [*(rng.randrange(8, VOCABULARY) for _ in range(rng.randint(0, 4))), START]
        number = family.num_tokens(shown.grid)
        spans.append(ImageSpan(digest=shown.digest, start=len(token_ids), num_tokens=number, grid=shown.grid))
        token_ids += [IMAGE] * number + [END]
    token_ids += [rng.randrange(8, VOCABULARY) for _ in range(rng.randint(1, 5))]
    prompt = len(token_ids)
    token_ids += [rng.randrange(8, VOCABULARY) for _ in range(response)]
    return Sequence(
        index=index,
        token_ids=tuple(token_ids),
        loss_mask=(False,) * prompt + (True,) * response,
        rollout_logprobs=(0.0,) * prompt + tuple(-3 - rng.random() for _ in range(response)),
        reward=1.0 - 0.3 * index,
        images=tuple(spans),
    )


def in_turns(path: str, *turns: Iterable[Picture], index: int = 0) -> Sequence:
    """A sequence that goes on: each turn shows some images, and ends with a response of random tokens."""
    parts = [sequence_with(path, *shown, index=100 * index + number) for number, shown in enumerate(turns)]
    starts = list(itertools.accumulate((len(part.token_ids) for part in parts), initial=0))
    return Sequence(
        index=index,
        token_ids=tuple(token for part in parts for token in part.token_ids),
        loss_mask=tuple(chosen for part in parts for chosen in part.loss_mask),
        rollout_logprobs=tuple(logprob for part in parts for logprob in part.rollout_logprobs),
        reward=1.0 - 0.3 * index,
        images=tuple(image.moved(start) for part, start in zip(parts, starts, strict=False) for image in part.images),
    )


def mixed_sequences(path: str) -> tuple[list[Sequence], dict[str, Picture]]:
    """Sequences with 1, 0, 3, 0, 2, 1 images of three sizes, and the images by digest."""
    shown = [picture(path, number) for number in range(4)]
    of_each: list[list[int]] = [[0], [], [1, 0, 2], [], [2, 3], [1]]
    sequences = [
        sequence_with(path, *(shown[number] for number in numbers), index=index, response=4 + index)
        for index, numbers in enumerate(of_each)
    ]
    return sequences, {one.digest: one for one in shown}


def stored(sequences: list[Sequence], pictures: dict[str, Picture], folder: Path) -> tuple[list[Sequence], ImageStore]:
    """The sequences with the digests of a store in `folder`, which has the images; changes those of `pictures` too."""
    store = ImageStore(folder, max_bytes=2**24)
    new = {digest: store.put(one.pixels, one.grid) for digest, one in pictures.items()}
    pictures |= {new[digest]: replace(one, digest=new[digest]) for digest, one in list(pictures.items())}
    renamed = [
        replace(one, images=tuple(replace(image, digest=new[image.digest]) for image in one.images))
        for one in sequences
    ]
    return renamed, store


def inputs_of(path: str, sequence: Sequence, pictures: dict[str, Picture]) -> dict[str, Tensor]:
    """The arguments with which transformers' own model takes the sequence by itself."""
    family = _family_at(path)
    ids = torch.tensor([sequence.token_ids])
    types = torch.zeros_like(ids)
    for image in sequence.images:
        types[0, image.start : image.end] = 1
    name = "token_type_ids" if family.tokens_per_image is not None else "mm_token_type_ids"
    inputs = {"input_ids": ids, name: types}
    if sequence.images:
        pixels = [pictures[image.digest].pixels for image in sequence.images]
        if family.has_padded_tower:
            grids = [image.grid for image in sequence.images]
            places = [torch.tensor([(x, y) for y in range(rows) for x in range(columns)]) for _, rows, columns in grids]
            inputs["image_position_ids"] = pad_sequence(places, batch_first=True, padding_value=-1)
            inputs["pixel_values"] = pad_sequence(pixels, batch_first=True)
            return inputs
        inputs["pixel_values"] = torch.cat(pixels)
        if family.tokens_per_image is None:
            inputs["image_grid_thw"] = torch.tensor([image.grid for image in sequence.images])
    return inputs


@cache
def _family_at(path: str) -> VisionFamily:
    return _family(AutoConfig.from_pretrained(path))  # slow: it validates every setting


def _family(config: PreTrainedConfig) -> VisionFamily:
    family = vision_family(config)
    assert family is not None, "a model of text"
    return family
