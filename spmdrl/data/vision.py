"""Images among tokens: the model's own processor makes pixels of them, once, and placeholders take their places."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

# The name at the top asks for torchvision before 5.19, which the class does not need.
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from spmdrl.config import DataConfig
from spmdrl.config.strict import shown
from spmdrl.data.families import VisionFamily
from spmdrl.data.image_store import ImageStore
from spmdrl.data.images import ImageFile, decode, size_of
from spmdrl.data.tokenizer import Placeholder
from spmdrl.types import Grid, ImageSpan, Prompt, UserError

_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class PromptImages(Protocol):
    """Turns images of prompts into spans of placeholders, or refuses them."""

    @property
    def placeholder(self) -> Placeholder:
        """The place of each image. Raises UserError where there can be no images."""
        ...

    def num_tokens(self, image: ImageFile) -> int:
        """Count the placeholders of an image by its size, without decoding it. Raises UserError."""
        ...

    def span(self, image: ImageFile, start: int) -> ImageSpan:
        """Keep the pixels of an image whose first placeholder is token `start`. Raises UserError."""
        ...

    def has(self, prompt: Prompt) -> bool:
        """Return True where the pixels of all images of a prompt are at hand, which are then kept longest."""
        ...


@dataclass(frozen=True, slots=True)
class NoImages:
    """Refuses images, for a reason."""

    reason: str

    @property
    def placeholder(self) -> Placeholder:
        raise UserError(self.reason)

    def num_tokens(self, image: ImageFile) -> int:
        raise UserError(self.reason)

    def span(self, image: ImageFile, start: int) -> ImageSpan:
        raise UserError(self.reason)

    def has(self, prompt: Prompt) -> bool:
        return not prompt.images


class ImageCounter:
    """Counts the tokens of images for a vision model, with the processor in its directory."""

    def __init__(
        self, family: VisionFamily, model_dir: str, cfg: DataConfig, *, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        self._family, self._model_dir, self._cfg, self._tokenizer = family, model_dir, cfg, tokenizer

    @cached_property
    def placeholder(self) -> Placeholder:
        """The place of each image. Raises UserError for a tokenizer of another model."""
        token_id = self._family.image_token_id
        text = self._spelt(token_id)
        if self._family.frame is None:
            return Placeholder(written=text, text=text, token_id=token_id)
        begin, end = map(self._spelt, self._family.frame)
        return Placeholder(written=begin, text=f"\n\n{begin}{text}{end}\n\n", token_id=token_id)

    def num_tokens(self, image: ImageFile) -> int:
        """Count the placeholders of an image by its size, without decoding it. Raises UserError."""
        height, width = size_of(image, max_pixels=self._cfg.max_image_pixels)
        if self._family.tokens_per_image is not None:
            return self._family.tokens_per_image
        processor = self._processor
        try:
            num_patches = processor.get_number_of_image_patches(height, width)
        except ValueError as error:
            raise UserError(f"{image.name} of {width} x {height} pixels does not suit the model: {error}") from error
        return self._family.num_tokens((1, 1, num_patches))

    @cached_property
    def _processor(self) -> Any:
        processor = load_processor(self._model_dir, self._cfg)
        if (merge := getattr(processor, "merge_size", self._family.merge)) != self._family.merge:
            raise self._of_another_model(f"merges {merge} x {merge} patches, and the model {self._family.merge}")
        return processor

    def _of_another_model(self, difference: str) -> UserError:
        return UserError(
            f"model.path = {shown(self._model_dir)}: its processor {difference}; it belongs to another model; copy the "
            "right one's files"
        )

    def _spelt(self, token_id: int) -> str:
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None or token_id not in self._tokenizer.added_tokens_decoder:
            raise UserError(
                f"the model has the token {token_id} in the places of images, which is no control token of its "
                "tokenizer; the tokenizer belongs to another model"
            )
        return str(token)


class ImageReader(ImageCounter):
    """Reads images for a vision model: keeps what the processor makes of them."""

    def __init__(
        self,
        family: VisionFamily,
        model_dir: str,
        cfg: DataConfig,
        *,
        tokenizer: PreTrainedTokenizerBase,
        store: ImageStore,
    ) -> None:
        super().__init__(family, model_dir, cfg, tokenizer=tokenizer)
        self.store = store

    def span(self, image: ImageFile, start: int) -> ImageSpan:
        pixels, grid = self._processed(image)
        num_tokens = self._family.num_tokens(grid)
        return ImageSpan(digest=self.store.put(pixels, grid), start=start, num_tokens=num_tokens, grid=grid)

    def has(self, prompt: Prompt) -> bool:
        return all([image.digest in self.store for image in prompt.images])

    def _processed(self, image: ImageFile) -> tuple[Tensor, Grid]:
        """Return pixels [P, C] or [1, 3, H, W] float32, and the grid of patches."""
        picture, processor = decode(image, max_pixels=self._cfg.max_image_pixels), self._processor
        try:
            made = processor(images=[picture], return_tensors="np")
        except ValueError as error:
            raise UserError(
                f"{image.name} of {picture.width} x {picture.height} pixels does not suit the model: {error}"
            ) from error
        pixels = torch.from_numpy(made["pixel_values"]).to(torch.float32)
        if pixels.shape[1:] != self._family.pixels:
            raise self._of_another_model(f"makes {tuple(pixels.shape[1:])}, and the model takes {self._family.pixels}")
        if "image_grid_thw" in made:
            frames, rows, columns = made["image_grid_thw"][0].tolist()
            return pixels, (frames, rows, columns)
        assert self._family.tokens_per_image is not None, "its images have a grid"
        side = self._family.merge * math.isqrt(self._family.tokens_per_image)
        return pixels, (1, side, side)


def load_processor(model_dir: str, cfg: DataConfig) -> Any:
    """Load the processor of a model directory, with the limits of the settings. Raises UserError."""
    if not any(Path(model_dir, name).is_file() for name in _PROCESSOR_FILES):
        raise UserError(
            f"model.path = {shown(model_dir)} has no {_PROCESSOR_FILES[0]}, by which images become pixels; copy the "
            "processor's files of the model into it"
        )
    try:
        # The same on machines with torchvision and without it.
        processor = AutoImageProcessor.from_pretrained(model_dir, backend="pil", local_files_only=True)
    except Exception as error:  # transformers raises many types for bad files
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"model.path = {shown(model_dir)}: its processor cannot be loaded: {reason}") from error
    if getattr(processor, "do_pan_and_scan", None):
        raise UserError(
            f"model.path = {shown(model_dir)}: its processor cuts images in pieces (do_pan_and_scan), which is not "
            "supported; set it to false in preprocessor_config.json"
        )
    limits = {"shortest_edge": cfg.min_pixels, "longest_edge": cfg.max_pixels}
    given = {name: limit for name, limit in limits.items() if limit is not None}
    if given and not hasattr(processor, "get_number_of_image_patches"):
        raise UserError(
            "data.min_pixels and data.max_pixels have no meaning: the model's processor makes all images equally large;"
            " remove them"
        )
    size = {name: processor.size[name] for name in limits} | given if given else processor.size
    if given and size["shortest_edge"] > size["longest_edge"]:
        raise UserError(
            f"images would have at least {size['shortest_edge']} and at most {size['longest_edge']} pixels; set "
            "data.min_pixels and data.max_pixels such that the first is smaller"
        )
    processor.size = size
    return processor


def expanded(
    token_ids: Sequence[int], images: Sequence[ImageFile], reader: PromptImages
) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    """Return a prompt's tokens with as many placeholders as each image needs in the place of its one, and where they
    are."""
    if not images:
        return tuple(token_ids), ()
    token_id, made, spans = reader.placeholder.token_id, list[int](), list[ImageSpan]()
    pending = iter(images)
    for token in token_ids:
        if token == token_id:
            spans.append(reader.span(next(pending), len(made)))
            made += [token] * spans[-1].num_tokens
        else:
            made.append(token)
    return tuple(made), tuple(spans)
