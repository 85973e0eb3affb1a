"""The images of a request, as SGLang takes what a model's processor has made."""

from __future__ import annotations

from typing import Any

import torch

from spmdrl.data.families import VisionFamily
from spmdrl.data.image_store import ImageStore
from spmdrl.engine.image_features import pixels_of
from spmdrl.model.positions import position_shift, token_positions
from spmdrl.types import Request


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
    if family.tokens_per_image is None:
        data["image_grid_thw"] = torch.tensor([image.grid for image in request.images])
    if family.has_grid_positions:
        num_tokens = len(request.prompt_ids) + len(request.response_ids)
        data["mrope_positions"] = token_positions(num_tokens, request.images, family=family)
        data["mrope_position_delta"] = torch.tensor([[position_shift(request.images, family=family)]])
    return data
