"""Features of images in the torch engine, from its model's tower."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from spmdrl.algo.packing import neighbours_within
from spmdrl.data.image_store import ImageStore
from spmdrl.memory.images import KEPT_TOKENS
from spmdrl.model.policy import placeholder_rows
from spmdrl.model.trunk import PlacedFeatures, Trunk
from spmdrl.types import ImageSpan, UserError


class ImageFeatures:
    """Features by digest: an image is looked at when a prefill first needs it, and again only where there was no room
    to keep what it gave."""

    def __init__(self, trunk: Trunk, store: ImageStore | None, *, max_patches: int) -> None:
        """`max_patches` is the most in one pass of the tower, unless one image has more."""
        self._trunk, self._store, self._max_patches = trunk, store, max_patches
        self._pixels: dict[str, Tensor] = {}  # of images that wait for a prefill
        self._kept: dict[str, Tensor] = {}  # [num_tokens, L, D] each; the last that were needed are the last

    def take(self, images: Sequence[ImageSpan]) -> None:
        """Take hold of the pixels of images that a prefill will need: the store may remove them before it comes."""
        for image in images:
            if image.digest not in self._kept and image.digest not in self._pixels:
                self._pixels[image.digest] = pixels_of(image, self._store)

    def placed(self, images: Sequence[ImageSpan]) -> PlacedFeatures | None:
        """Return the features of images among packed tokens, in order; None when there are none."""
        if not images:
            return None
        needed = {image.digest: image for image in images}
        new = [image for digest, image in needed.items() if digest not in self._kept]
        for part in _parts(new, max_patches=self._max_patches):
            self.take(part)
            pixels = [self._pixels.pop(image.digest) for image in part]
            features = self._trunk.encode(pixels, [image.grid for image in part])
            self._kept |= zip((image.digest for image in part), features, strict=True)
        values = torch.cat([self._kept[image.digest] for image in images])
        self._forget_others(needed)
        return PlacedFeatures(rows=placeholder_rows(images).to(values.device), values=values)

    def clear(self) -> None:
        """Forget all features and pixels."""
        self._kept.clear()
        self._pixels.clear()

    def _forget_others(self, needed: Collection[str]) -> None:
        """Keep the features of these images and, as far as there is room, those that were needed most recently."""
        for digest in needed:
            self._kept[digest] = self._kept.pop(digest)
        num_tokens = sum(map(len, self._kept.values()))
        for digest in list(self._kept)[: -len(needed)]:
            if num_tokens <= KEPT_TOKENS:
                return
            num_tokens -= len(self._kept.pop(digest))


def pixels_of(image: ImageSpan, store: ImageStore | None) -> Tensor:
    """Return the pixels of a request's image. Raises UserError when they are no longer there."""
    assert store is not None, "a model of text was asked about an image"
    pixels = store.get(image.digest)
    if pixels is None:
        raise UserError(
            f"the pixels of the image {image.digest} were removed before the engine looked at it: there is no room "
            "for the images of the requests that run together; raise data.image_store_gib"
        )
    return pixels


def _parts(images: Sequence[ImageSpan], *, max_patches: int) -> Iterator[Sequence[ImageSpan]]:
    """Split images, in order, into parts of at most `max_patches` patches; one that has more is alone."""
    patches = [math.prod(image.grid) for image in images]
    return (images[run] for run in neighbours_within(patches, max_patches))
