"""Images among tokens: the model's own processor makes pixels of them, once, and placeholders take their places."""

from __future__ import annotations

import dataclasses
import math
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

# The name at the top asks for torchvision before 5.19, which the class does not need.
from transformers.models.auto.image_processing_auto import AutoImageProcessor
from transformers.models.gemma4.image_processing_pil_gemma4 import get_aspect_ratio_preserving_size

from spmdrl.config import PromptsConfig
from spmdrl.config.strict import shown
from spmdrl.data.image_store import ImageStore
from spmdrl.data.images import ImageFile, decode, size_of
from spmdrl.data.tokenizer import Placeholder
from spmdrl.families import VisionFamily
from spmdrl.types import Grid, ImageSpan, UserError

_MAX_READ = 4096
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


class ImageIntake(Protocol):
    """Turns images into pixels and spans of placeholders, or refuses them."""

    @property
    def store(self) -> ImageStore | None:
        """Where their pixels are, on this node; None where there can be no images."""
        ...

    @property
    def placeholder(self) -> Placeholder:
        """The place of each image. Raises UserError where there can be no images."""
        ...

    def num_tokens(self, image: ImageFile) -> int:
        """Count the placeholders of an image by its size, without decoding it. Raises UserError."""
        ...

    def span(self, image: ImageFile) -> ImageSpan:
        """Keep the pixels of an image, and return its placeholders, the first of which is token 0. Raises UserError."""
        ...

    def has(self, images: Sequence[ImageSpan]) -> bool:
        """Return True where the pixels of all these images are cached, and keep them longest."""
        ...


@dataclass(frozen=True, slots=True)
class NoImages:
    """Refuses images, for a reason."""

    reason: str
    store: ImageStore | None = None

    @property
    def placeholder(self) -> Placeholder:
        raise UserError(self.reason)

    def num_tokens(self, image: ImageFile) -> int:
        raise UserError(self.reason)

    def span(self, image: ImageFile) -> ImageSpan:
        raise UserError(self.reason)

    def has(self, images: Sequence[ImageSpan]) -> bool:
        return not images


NO_IMAGES = NoImages("there are images, and the model reads text only")


class ImageCounter:
    """Counts the tokens of images for a vision model, with the processor in its directory."""

    def __init__(
        self, family: VisionFamily, model_dir: str, cfg: PromptsConfig, *, tokenizer: PreTrainedTokenizerBase
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
        if self._family.writes_frame:
            return Placeholder(written=begin, text=f"\n\n{begin}{text}{end}\n\n", token_id=token_id)
        return Placeholder(written=text, text=f"{begin}{text}{end}", token_id=token_id)

    def num_tokens(self, image: ImageFile) -> int:
        """Count the placeholders of an image by its size, without decoding it. Raises UserError."""
        height, width = size_of(image, max_pixels=self._cfg.max_image_pixels)
        processor = self._processor  # which a check before the start reads for every family
        if self._family.tokens_per_image is not None:
            return self._family.tokens_per_image
        with self._suiting(image, width, height):
            if self._family.has_padded_tower:
                patch, kernel = processor.patch_size, processor.pooling_kernel_size
                most = processor.max_soft_tokens * kernel**2
                rows, columns = get_aspect_ratio_preserving_size(height, width, patch, most, kernel)
                num_patches = rows * columns // patch**2
            else:
                num_patches = processor.get_number_of_image_patches(height, width)
        return self._family.num_tokens((1, 1, num_patches))

    @cached_property
    def _processor(self) -> Any:
        processor = load_processor(self._model_dir, self._cfg)
        names = ("merge_size", "pooling_kernel_size")
        merge = next((found for name in names if (found := getattr(processor, name, None))), self._family.merge)
        if merge != self._family.merge:
            raise self._of_another_model(f"merges {merge} x {merge} patches, and the model {self._family.merge}")
        return processor

    @contextmanager
    def _suiting(self, image: ImageFile, width: int, height: int) -> Iterator[None]:
        """Turn what a processor raises about an image into a UserError."""
        try:
            with numpy.errstate(all="ignore"):  # what is not finite is refused
                yield
        except ValueError as error:
            raise UserError(f"{image.name} of {width} x {height} pixels does not suit the model: {error}") from error
        except Exception as error:  # of settings that it does not check when it is loaded
            raise self._broken(f"cannot take {image.name}: {' '.join(str(error).split())[:200]}") from error

    def _of_another_model(self, difference: str) -> UserError:
        return self._broken(f"{difference}; it belongs to another model")

    def _broken(self, difference: str) -> UserError:
        return UserError(
            f"model.path = {shown(self._model_dir)}: its processor {difference}; copy the right one's files"
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
        cfg: PromptsConfig,
        *,
        tokenizer: PreTrainedTokenizerBase,
        store: ImageStore,
    ) -> None:
        super().__init__(family, model_dir, cfg, tokenizer=tokenizer)
        self.store = store
        self._read: OrderedDict[str, ImageSpan] = OrderedDict()  # of files in memory, by what they are

    def span(self, image: ImageFile) -> ImageSpan:
        """Read an image into the store, unless it is there, and return the span of its tokens, counted from 0."""
        if isinstance(image.content, Path):  # whose content may change
            return self._cached(image)
        # All rollouts of a prompt begin in the same world, so that an environment shows the same images often.
        known = self._read.pop(image.identity, None)
        if known is None or not self.has([known]):
            known = self._cached(image)
        self._read[image.identity] = known
        if len(self._read) > _MAX_READ:
            self._read.popitem(last=False)
        return known

    def has(self, images: Sequence[ImageSpan]) -> bool:
        return all([image.digest in self.store for image in images])

    def _cached(self, image: ImageFile) -> ImageSpan:
        pixels, grid = self._processed(image)
        num_tokens = self._family.num_tokens(grid)
        return ImageSpan(digest=self.store.put(pixels, grid), start=0, num_tokens=num_tokens, grid=grid)

    def _processed(self, image: ImageFile) -> tuple[Tensor, Grid]:
        """Return pixels [P, C] or [1, 3, H, W] float32, and the grid of patches."""
        picture, processor = decode(image, max_pixels=self._cfg.max_image_pixels), self._processor
        with self._suiting(image, *picture.size):
            made = processor(images=[picture], return_tensors="np")
        pixels = torch.from_numpy(made["pixel_values"]).to(torch.float32)
        if self._family.has_padded_tower:
            columns, rows = (int(last) + 1 for last in made["image_position_ids"][0].max(axis=0))
            pixels = pixels[0, : rows * columns]
        if pixels.shape[1:] != self._family.pixels:
            raise self._of_another_model(f"makes {tuple(pixels.shape[1:])}, and the model takes {self._family.pixels}")
        if not pixels.isfinite().all():
            raise self._broken(f"makes numbers of {image.name} that are not finite")
        if "image_grid_thw" in made:
            frames, rows, columns = made["image_grid_thw"][0].tolist()
            return pixels, (frames, rows, columns)
        if self._family.has_padded_tower:
            return pixels, (1, rows, columns)
        assert self._family.tokens_per_image is not None, "its images have a grid"
        side = self._family.merge * math.isqrt(self._family.tokens_per_image)
        return pixels, (1, side, side)


def load_processor(model_dir: str, cfg: PromptsConfig) -> Any:
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
            "data.min_pixels and data.max_pixels have no meaning: the model's processor chooses the size of images by "
            "itself; remove them"
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
    token_ids: Sequence[int], images: Sequence[ImageSpan], reader: ImageIntake, *, start: int = 0
) -> tuple[tuple[int, ...], tuple[ImageSpan, ...]]:
    """Return tokens with as many placeholders as each image needs in the place of its one, and where these are.

    `start` is the place of the first token, from which on places are counted. Raises UserError when there are others.
    """
    if not images:
        return tuple(token_ids), ()
    token_id, made, spans = reader.placeholder.token_id, list[int](), list[ImageSpan]()
    if (found := token_ids.count(token_id)) != len(images):  # of an added token that is not special, a text becomes one
        raise UserError(
            f"there are {found} placeholders for {len(images)} images; mark the model's tokens of images as special in "
            "the tokenizer's files"
        )
    pending = iter(images)
    for token in token_ids:
        if token == token_id:
            image = next(pending)
            spans.append(dataclasses.replace(image, start=start + len(made)))
            made += [token] * image.num_tokens
        else:
            made.append(token)
    return tuple(made), tuple(spans)
