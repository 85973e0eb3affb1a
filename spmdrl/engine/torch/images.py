"""Features of images in the torch engine: what its model's tower makes of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from spmdrl.algo.packing import neighbours_within
from spmdrl.data.image_store import ImageStore
from spmdrl.memory.images import CACHED_TOKENS
from spmdrl.model.policy import placeholder_rows
from spmdrl.model.trunk import PlacedFeatures, Trunk
from spmdrl.types import ImageSpan, UserError


class ImageFeatures:
    """A cache of features by digest: an image is encoded when a prefill first needs it, and again only where there was
    no room for its features."""

    def __init__(self, trunk: Trunk, store: ImageStore | None, *, max_patches: int) -> None:
        """`max_patches` is the most in one pass of the tower, unless one image has more."""
        self._trunk, self._store, self._max_patches = trunk, store, max_patches
        self._pixels: dict[str, Tensor] = {}  # of images that wait for a prefill
        self._cached: dict[str, Tensor] = {}  # [num_tokens, L, D] each; the last that were needed are the last

    def take(self, images: Sequence[ImageSpan]) -> None:
        """Get the pixels of images that a prefill will need: the store may remove them before it comes."""
        for image in images:
            if image.digest not in self._cached and image.digest not in self._pixels:
                self._pixels[image.digest] = pixels_of(image, self._store)

    def placed(self, images: Sequence[ImageSpan]) -> PlacedFeatures | None:
        """Return the features of images among packed tokens, in order; None when there are none."""
        if not images:
            return None
        needed = {image.digest: image for image in images}
        new = [image for digest, image in needed.items() if digest not in self._cached]
        for part in _passes(new, max_patches=self._max_patches):
            self.take(part)
            pixels = [self._pixels.pop(image.digest) for image in part]
            features = self._trunk.encode(pixels, [image.grid for image in part])
            self._cached |= zip((image.digest for image in part), features, strict=True)
        values = torch.cat([self._cached[image.digest] for image in images])
        self._evict_others(needed)
        return PlacedFeatures(rows=placeholder_rows(images).to(values.device), values=values)

    def clear(self) -> None:
        """Forget all features and pixels."""
        self._cached.clear()
        self._pixels.clear()

    def _evict_others(self, needed: Collection[str]) -> None:
        """Evict the features that were needed longest ago until the others fit; never those of these images."""
        for digest in needed:
            self._cached[digest] = self._cached.pop(digest)
        num_tokens = sum(map(len, self._cached.values()))
        for digest in list(self._cached)[: -len(needed)]:
            if num_tokens <= CACHED_TOKENS:
                return
            num_tokens -= len(self._cached.pop(digest))


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


def _passes(images: Sequence[ImageSpan], *, max_patches: int) -> Iterator[Sequence[ImageSpan]]:
    """Split images, in order, into passes of at most `max_patches` patches; one that has more is alone."""
    patches = [math.prod(image.grid) for image in images]
    return (images[run] for run in neighbours_within(patches, max_patches))
