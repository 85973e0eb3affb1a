"""The decoder of a model, and its tower for images where it has one, behind one call for trainer and engine."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from spmdrl.families import vision_family
from spmdrl.model.attention import IMPLEMENTATION, Block
from spmdrl.model.rotary import RotaryByLength
from spmdrl.types import Grid, ImageSpan

TOWER_ATTENTION = "sdpa"  # transformers' own: a tower's tokens see those that come after them, and it splits images


@dataclass(frozen=True, slots=True)
class PlacedFeatures:
    """Features that a tower made of images, and the places among the tokens where they belong."""

    rows: Tensor  # [N] int64, ascending: places of image placeholders among the tokens
    values: Tensor  # [N, L, D]: level 0 takes the place of the embedding, the others are added after the first layers


class Trunk:
    """The decoder of a model, with or without a tower for images: token ids and positions in, hidden states out."""

    def __init__(self, model: PreTrainedModel) -> None:
        """`model` may be sharded afterwards."""
        self.family = vision_family(model.config)
        self._model = model
        self._base: Any = model.base_model
        self._rotary = RotaryByLength(self.decoder)

    @property
    def decoder(self) -> nn.Module:
        """The language half: embedding, decoder layers and final norm."""
        decoder: nn.Module = self._base if self.family is None else self._base.language_model
        return decoder

    @property
    def towers(self) -> list[nn.Module]:
        """The modules that only images go through; none of a model of text."""
        return [] if self.family is None else [self._base.get_submodule(name) for name in self.family.tower]

    @property
    def tower_blocks(self) -> list[nn.Module]:
        """The blocks of the towers, which are alike."""
        modules = (module for tower in self.towers for module in tower.modules())
        return [module for module in modules if isinstance(module, GradientCheckpointingLayer)]

    def seen_whole(self, images: Sequence[ImageSpan]) -> list[Block]:
        """Return the images whose tokens see each other."""
        if self.family is None or not self.family.sees_whole_images:
            return []
        return [Block(image.start, image.end, self.family.sees_them_in_windows) for image in images]

    def __call__(
        self,
        token_ids: Tensor,
        positions: Tensor,
        *,
        lengths: Tensor,
        images: PlacedFeatures | None = None,
        **attention: Any,
    ) -> Tensor:
        """Run the decoder over T tokens.

        Takes token_ids [T] and positions [T] or [3, T], both int64, and lengths [T] int64 on the host, those of the
        tokens' whole sequences; returns hidden states [T, D]. `attention` is for the layers: `attend`, `seqlens`. A
        placeholder that is not among the rows of `images` is text.
        """
        inputs: dict[str, Any] = {"input_ids": token_ids.unsqueeze(0)}
        if images is not None:
            inputs = self._embedded(token_ids, images)
        with self._rotary.at(lengths):
            output = self.decoder(**inputs, position_ids=positions.unsqueeze(-2), use_cache=False, **attention)
        hidden: Tensor = output.last_hidden_state.squeeze(0)  # backward of [0] fills and copies
        return hidden

    def _embedded(self, token_ids: Tensor, images: PlacedFeatures) -> dict[str, Any]:
        """Return the arguments with which the decoder sees images: its first inputs, and what its layers add."""
        # A placeholder's own number may be beyond the vocabulary.
        embedded = self._model.get_input_embeddings()(token_ids.index_fill(0, images.rows, 0))
        levels = images.values.to(embedded.dtype).unbind(1)
        inputs: dict[str, Any] = {"inputs_embeds": embedded.index_copy(0, images.rows, levels[0]).unsqueeze(0)}
        if len(levels) > 1:
            mask = torch.zeros_like(token_ids, dtype=torch.bool).index_fill(0, images.rows, True)
            inputs |= {"visual_pos_masks": mask.unsqueeze(0), "deepstack_visual_embeds": list(levels[1:])}
        decoder: Any = self.decoder
        if getattr(decoder, "hidden_size_per_layer_input", 0):  # Gemma 4's layers, which take an image for padding
            by_layer = token_ids.index_fill(0, images.rows, self._model.config.get_text_config().pad_token_id)
            inputs["per_layer_inputs"] = decoder.get_per_layer_inputs(by_layer.unsqueeze(0), None)
        return inputs

    def encode(self, pixels: Sequence[Tensor], grids: Sequence[Grid]) -> list[Tensor]:
        """Look at images: returns [num_tokens, L, D] for each, in the dtype of the tower.

        pixels are as the model's processor left them: [P, C] for the P patches of a grid, or [1, 3, H, W].
        """
        assert self.family is not None, "a model of text has no tower"
        device = self._model.get_input_embeddings().weight.device  # FSDP may keep a tower's own weights elsewhere
        dtype = next(self.towers[0].parameters()).dtype
        inputs: dict[str, Any]
        if self.family.has_padded_tower:  # which scales pixels before it takes them into its dtype
            places = [torch.cartesian_prod(torch.arange(rows), torch.arange(columns)) for _, rows, columns in grids]
            inputs = {
                "pixel_values": pad_sequence([x.to(device) for x in pixels], batch_first=True),
                "image_position_ids": pad_sequence(
                    [place.flip(-1) for place in places], batch_first=True, padding_value=-1
                ).to(device),
            }
        else:
            inputs = {"pixel_values": torch.cat([x.to(device, dtype) for x in pixels])}
            if self.family.tokens_per_image is None:
                inputs["image_grid_thw"] = torch.tensor(grids, device=device)
        with warnings.catch_warnings():
            # FSDP warns of views that a sharded module returns, lest they are changed in place: here they are stacked.
            warnings.filterwarnings("ignore", "FSDP2-wrapped module", UserWarning)
            output = self._base.get_image_features(**inputs, return_dict=True)
        levels = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        features = torch.stack([_of_all_images(level) for level in levels], dim=1)
        return list(features.split([self.family.num_tokens(grid) for grid in grids]))

    def blank_image(self) -> tuple[Tensor, Grid]:
        """Return the pixels and the grid of the smallest image, all 0."""
        assert self.family is not None, "a model of text has no tower"
        vision, merge = self._model.config.vision_config, self.family.merge
        if self.family.tokens_per_image is not None:
            side = vision.image_size // vision.patch_size
            return torch.zeros(1, vision.num_channels, vision.image_size, vision.image_size), (1, side, side)
        return torch.zeros(merge**2, self.family.patch_values), (1, merge, merge)


def _of_all_images(level: Tensor | Sequence[Tensor]) -> Tensor:
    """Return [N, D] for the N tokens of all images: releases of transformers differ in whether they split them."""
    return level.flatten(0, -2) if isinstance(level, Tensor) else torch.cat(list(level))


def has_language_model(model_type: str) -> bool:
    """Return True where transformers has a causal language model of text of this type."""
    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or _is_listed_elsewhere(model_type)


def _is_listed_elsewhere(model_type: str) -> bool:
    """True for a causal language model that transformers lists among models of images alone (Mistral 4, in 5.19)."""
    own = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(model_type, "")
    return model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and str(own).endswith("ForCausalLM")


def model_class(config: Any) -> Any:
    """Return the class of transformers that builds a model from its config."""
    is_of_text = vision_family(config) is None and not _is_listed_elsewhere(config.model_type)
    return AutoModelForCausalLM if is_of_text else AutoModelForImageTextToText


def attention_of(config: Any) -> str | dict[str, str]:
    """Return transformers' `attn_implementation`: ours for the decoder; a tower keeps one of transformers' own."""
    if vision_family(config) is None:
        return IMPLEMENTATION
    return {"": IMPLEMENTATION, "text_config": IMPLEMENTATION, "vision_config": TOWER_ATTENTION}
