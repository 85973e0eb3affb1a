"""The images of a request, as SGLang takes what a model's processor has made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from spmdrl.config import Config
from spmdrl.data.families import VisionFamily, family_of
from spmdrl.data.image_store import ImageStore
from spmdrl.engine.image_features import pixels_of
from spmdrl.model.positions import position_shift, token_positions
from spmdrl.types import Request

_COMPARED = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
_QWEN2_5_NUMBERS = 1176  # of a patch; SGLang takes anything else for what a tower has made already


def image_problems(cfg: Config, model_config: Any) -> Iterator[str]:
    """Yield a sentence for each reason why SGLang could not look at images with this model."""
    family = family_of(model_config)
    if family is None:
        return
    if family.model_type not in _COMPARED:
        yield (
            f'rollout.engine = "sglang" with {family.model_type}: its layout in SGLang is not known here, '
            f'only that of {", ".join(_COMPARED)}; set rollout.engine = "torch"'
        )
    vision = model_config.vision_config
    if (
        family.model_type == "qwen2_5_vl"
        and (numbers := vision.in_channels * vision.temporal_patch_size * vision.patch_size**2) != _QWEN2_5_NUMBERS
    ):
        yield (
            f"SGLang's Qwen2.5-VL reads patches of {_QWEN2_5_NUMBERS} numbers, and this model's have {numbers}; set "
            'rollout.engine = "torch"'
        )
    if cfg.sends_adapters:
        yield (
            f"adapters of {family.model_type} were not tried with SGLang; set lora.merge = true, which sends merged "
            "weights"
        )


def image_data(request: Request, family: VisionFamily | None, store: ImageStore | None) -> dict[str, Any] | None:
    """Return the images of a request with their places and the positions of all tokens; None without images.

    SGLang would find the places by the number of the placeholder, and the policy may have sampled that as text. Raises
    UserError when the pixels are no longer there.
    """
    if not request.images:
        return None
    assert family is not None, "a model of text was asked about an image"
    data: dict[str, Any] = {
        "format": "processor_output",
        "modality": "IMAGE",
        "pixel_values": torch.cat([pixels_of(image, store) for image in request.images]),
        "offsets": [(image.start, image.end - 1) for image in request.images],
    }
    if len(request.images) == 1:
        # By itself SGLang tells images apart by their pixels, which a blank page shares with one on its side: it would
        # take the features and the cache of the other. It takes one number for all images of a request.
        data["hash"] = int(request.images[0].digest[:16], 16)
    if family.tokens_per_image is None:
        data["image_grid_thw"] = torch.tensor([image.grid for image in request.images])
    if family.has_grid_positions:
        num_tokens = len(request.prompt_ids) + len(request.response_ids)
        data["mrope_positions"] = token_positions(num_tokens, request.images, family=family)
        data["mrope_position_delta"] = torch.tensor([[position_shift(request.images, family=family)]])
    return data
