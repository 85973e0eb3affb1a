"""The model families that look at images, as far as the data and the model have to know them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_WITH_GRIDS = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe")


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionFamily:
    """A family of models with a tower for images in front of a language model."""

    model_type: str
    tower: tuple[str, ...]  # the modules of `model.base_model` that only images go through
    image_token_id: int  # the placeholder, one for each token that the tower makes of an image
    merge: int  # patches along a side that become one token
    pixels: tuple[int, ...]  # sizes of what the tower takes: of a patch, laid out flat, or of a whole image
    patch_values: int  # numbers in a patch, over its frames and channels
    tokens_per_image: int | None = None  # where all images have the same; None: by the grid
    num_levels: int = 1  # tensors that the tower makes for each token: its embedding, and what later layers add
    has_grid_positions: bool = False  # mRoPE: positions of frame, row and column
    frame: tuple[int, int] | None = None  # tokens around an image, where chat templates write only the first of them
    sees_whole_images: bool = False  # an image's tokens attend to those that come after them in the same image

    def num_tokens(self, grid: tuple[int, int, int]) -> int:
        """Count the placeholders of an image of so many patches."""
        if self.tokens_per_image is not None:
            return self.tokens_per_image
        return math.prod(grid) // self.merge**2


def family_of(config: Any) -> VisionFamily | None:
    """Return the family of a model by transformers' config; None for a model of text, or one that is not known here."""
    if config.model_type in _WITH_GRIDS:
        deepstack = getattr(config.vision_config, "deepstack_visual_indexes", None) or ()
        return VisionFamily(
            model_type=config.model_type,
            tower=("visual",),
            image_token_id=config.image_token_id,
            merge=config.vision_config.spatial_merge_size,
            pixels=(_patch_values(config.vision_config),),
            patch_values=_patch_values(config.vision_config),
            num_levels=1 + len(deepstack),
            has_grid_positions=True,
        )
    if config.model_type == "gemma3":
        vision = config.vision_config
        side = math.isqrt(config.mm_tokens_per_image)
        return VisionFamily(
            model_type=config.model_type,
            tower=("vision_tower", "multi_modal_projector"),
            image_token_id=config.image_token_id,
            merge=vision.image_size // vision.patch_size // side,
            pixels=(vision.num_channels, vision.image_size, vision.image_size),
            patch_values=vision.num_channels * vision.patch_size**2,
            tokens_per_image=config.mm_tokens_per_image,
            frame=(config.boi_token_index, config.eoi_token_index),
            sees_whole_images=True,
        )
    return None


def _patch_values(vision: Any) -> int:
    """Count the numbers in a patch, over its frames and channels."""
    channels = getattr(vision, "in_channels", 3)
    return int(channels * vision.temporal_patch_size * vision.patch_size**2)
