"""The positions of tokens in their sequences, as rotary embeddings count them.

Text counts tokens. Where a model has positions of frame, row and column (mRoPE), the placeholders of an image have
their patch's place in its grid, all counted from the position after the token before; text goes on after the greatest.
Which tokens are placeholders is known from `ImageSpan`, never from a token's number: a placeholder that the policy
sampled itself is text.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spmdrl.data.families import VisionFamily
from spmdrl.types import ImageSpan


def token_positions(num_tokens: int, images: Sequence[ImageSpan], *, family: VisionFamily | None) -> Tensor:
    """Return the positions of one sequence: [T] int64, or [3, T] for a family with grids (frame, row, column).

    `images` are in order, counted from the sequence's first token; all their placeholders are among its T tokens.
    """
    places = torch.arange(num_tokens)
    if family is None or not family.has_grid_positions:
        return places
    parts: list[Tensor] = []
    end = shift = 0  # the first token after the image before, and what its position has more than its place
    for image in images:
        parts.append((places[end : image.start] + shift).expand(3, -1))
        parts.append(_in_grid(image, family) + image.start + shift)
        end, shift = image.end, shift + _shift(image, family)
    return torch.cat([*parts, (places[end:] + shift).expand(3, -1)], dim=-1)


def position_shift(images: Sequence[ImageSpan], *, family: VisionFamily | None) -> int:
    """Return what the position of a token of text has more than its place, after these images of its sequence.

    An engine that decodes gives token t the position t + shift.
    """
    if family is None or not family.has_grid_positions:
        return 0
    return sum(_shift(image, family) for image in images)


def packed_positions(seqlens: Sequence[int], images: Sequence[ImageSpan], *, family: VisionFamily | None) -> Tensor:
    """Return `token_positions` of sequences that are laid end to end: [T] or [3, T].

    `images` are in order, counted from the first token of the first sequence.
    """
    parts, start, rest = [], 0, list(images)
    for length in seqlens:
        own = []
        while rest and rest[0].start < start + length:
            own.append(rest.pop(0).moved(-start))
        parts.append(token_positions(length, own, family=family))
        start += length
    return torch.cat(parts, dim=-1)


def placeholder_rows(images: Sequence[ImageSpan]) -> Tensor:
    """Return the places of the images' placeholders, [N] int64, in order."""
    return torch.cat([torch.arange(0), *(torch.arange(image.start, image.end) for image in images)])


def _grid(image: ImageSpan, family: VisionFamily) -> tuple[int, int, int]:
    """Return (frames, rows, columns) of the image's tokens."""
    frames, rows, columns = image.grid
    return frames, rows // family.merge, columns // family.merge


def _in_grid(image: ImageSpan, family: VisionFamily) -> Tensor:
    """Return [3, num_tokens] int64: the place of each token in the image."""
    frames, rows, columns = map(torch.arange, _grid(image, family))
    return torch.stack(torch.meshgrid(frames, rows, columns, indexing="ij")).flatten(1)


def _shift(image: ImageSpan, family: VisionFamily) -> int:
    """Return what positions after the image have more than before it: a grid's longest side, less its tokens."""
    _, rows, columns = _grid(image, family)
    return max(rows, columns) - image.num_tokens
