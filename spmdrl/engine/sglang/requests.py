"""The contents of requests to SGLang besides tokens: images, as a model's processor has made them; and the experts that
its answer reports for tokens, as routes (`model/routes.py`)."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from spmdrl.config import Config
from spmdrl.data.image_store import ImageStore, pixels_of
from spmdrl.families import FAMILIES, VisionFamily, family_of, vision_family
from spmdrl.model.load import model_without_memory
from spmdrl.model.policy import position_shift, token_positions
from spmdrl.model.routes import expert_layers
from spmdrl.types import Request, Response, Routes

_HASH_DIGITS = 16  # of a digest: SGLang's numbers have 64 bits


def image_problems(cfg: Config, model_config: Any) -> Iterator[str]:
    """Yield a sentence for each reason why SGLang could not look at images with this model."""
    family = vision_family(model_config)
    if family is None:
        return
    in_sglang = family_of(model_config).sglang
    if not in_sglang.images_compared:
        compared = ", ".join(name for name, row in FAMILIES.items() if row.sglang.images_compared)
        yield (
            f'rollout.engine = "sglang" with {family.model_type}: its layout in SGLang is not known here, '
            f'only that of {compared}; set rollout.engine = "torch"'
        )
    if in_sglang.patch_values not in (None, family.patch_values):  # it takes others for what a tower has made already
        yield (
            f"SGLang's {family.model_type} reads patches of {in_sglang.patch_values} numbers, and this model's have "
            f'{family.patch_values}; set rollout.engine = "torch"'
        )
    if cfg.sends_adapters:
        yield (
            f"adapters of {family.model_type} were not tried with SGLang; set lora.merge = true, which sends merged "
            "weights"
        )


def image_arguments(model_config: Any) -> dict[str, Any]:
    """Return SGLang's arguments for a vision model, on top of which the user's come; none for others.

    On a Hopper device SGLang 0.5.23 would take 1 to 3 GiB for Qwen3-VL's pixels, in the process that starts it, which
    is the trainer's, and never give them back. Ours come from host memory and would not even go there.
    """
    return {} if vision_family(model_config) is None else {"mm_feature_transport": "cpu"}


def image_fields(request: Request, family: VisionFamily | None, store: ImageStore | None) -> dict[str, Any]:
    """Return the fields of SGLang's request that are about images: their pixels and places, the positions of all
    tokens, and a number for each image; nothing without images.

    SGLang would find the places by the number of the placeholder, and the policy may have sampled that as text. It
    would number images by their pixels, which a blank page shares with one on its side, and would then take the
    features and the cache of the other. Raises UserError when the pixels are no longer there.
    """
    if not request.images:
        return {}
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
    return {"image_data": [data], "mm_hashes": [image.digest[:_HASH_DIGITS] for image in request.images]}


def take_numbers_from_requests(processor: Any) -> None:
    """Let SGLang's processor of images (None in a model of text) leave the tokens alone.

    By itself it puts numbers of its own in the place of placeholders, before those of the request are read
    (0.5.23). Where it has not, the scheduler does so afterwards.
    """
    if processor is None:
        return
    process = processor.process_mm_data_async

    async def without_numbers(*args: Any, **settings: Any) -> Any:
        output = await process(*args, **settings)
        output.padded_input_ids = None
        return output

    processor.process_mm_data_async = without_numbers


def route_problems(cfg: Config, model_config: Any) -> Iterator[str]:
    """Yield a sentence where SGLang's routes of a model were not tried."""
    if cfg.correction.router_replay != "R3":
        return
    instead = 'set router_replay to "R2", which needs several updates a step, or rollout.engine = "torch"'
    if vision_family(model_config) is not None:
        yield f'correction.router_replay = "R3" was not tried with images in SGLang; {instead}'
    elif not hasattr(model_config.get_text_config(), "num_experts_per_tok"):
        kind = model_config.model_type
        yield f'correction.router_replay = "R3": SGLang reports no routes of the type {kind}; {instead}'


@dataclass(frozen=True, slots=True)
class RouteReader:
    """The form in which SGLang reports experts: of all layers, also of those that have none."""

    num_layers: int
    expert_layers: tuple[int, ...]
    num_chosen: int

    @classmethod
    def of(cls, cfg: Config, model_config: Any) -> RouteReader | None:
        """Describe the answers about a model; None where the settings ask for no routes."""
        if cfg.correction.router_replay != "R3":
            return None
        text = model_config.get_text_config()
        layers = expert_layers(model_without_memory(model_config, cfg.model))
        return cls(text.num_hidden_layers, tuple(layers), text.num_experts_per_tok)

    def fields(self, request: Request) -> dict[str, Any]:
        """Return the fields by which SGLang's request asks for routes."""
        if request.routes_from is None:
            return {}
        return {"return_routed_experts": True, "routed_experts_start_len": request.routes_from}

    def read(self, about: Mapping[str, Any], request: Request, response: Response) -> Routes | None:
        """Return the routes in what SGLang says about a response; None where it was not asked or nothing was
        sampled."""
        if request.routes_from is None or not response.token_ids:
            return None
        experts = torch.frombuffer(bytearray(base64.b64decode(about["routed_experts"])), dtype=torch.int32)
        of_layers = experts.view(-1, self.num_layers, self.num_chosen)[:, list(self.expert_layers)]
        return Routes.of(request.routes_from, of_layers)
