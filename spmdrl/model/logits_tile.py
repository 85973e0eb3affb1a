"""A tile of logits [N, W], N tokens by W entries of the vocabulary: reduced, or replaced by its gradient.

This is the implementation in torch; `logits_tile_triton` is the one for CUDA. z are the logits as `Scale` makes them, p
is the softmax over the whole vocabulary, and H its entropy.

A summary [4, N] float32 is the state of an online softmax (logsumexp) over a part of the vocabulary: for each token the
largest z; the sums of exp(z - largest) and of exp(z - largest) (z - largest); the target's z, or 0 when the target is
in another part. Of K other tokens than the target, `z_at` has the same, for [4 + K, N].
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

# Replaces -inf, the logit of a forbidden token. Its exp is 0 as well, but 0 times it is 0 instead of nan.
FORBIDDEN = -1e30


class Scale(NamedTuple):
    """The way from logits x to z: by a soft cap c to c tanh(x / c), and then divided by the temperature."""

    temperature: float = 1.0
    softcap: float | None = None

    def z(self, logits: Tensor) -> Tensor:
        """Return z in float32; overwrites float32 logits."""
        wide = logits.float()
        if self.softcap is not None:
            wide = wide.div_(self.softcap).tanh_().mul_(self.softcap)
        return wide if self.temperature == 1.0 else wide.div_(self.temperature)

    def slope(self, z: Tensor) -> Tensor | None:
        """Return the slope of the soft cap, 1 - tanh(x / c)^2; None without one."""
        if self.softcap is None:
            return None
        return z.mul(self.temperature / self.softcap).square_().neg_().add_(1.0)


class GradientTerms(NamedTuple):
    """Numbers of tokens that gradients depend on besides logits and targets, [N] float32 each."""

    log_normalizer: Tensor  # of each token's whole distribution, in nats, as the entropy
    entropy: Tensor
    by_logprob: Tensor  # the loss's derivative by the target's log-probability
    by_entropy: Tensor | None  # by the entropy; None where that is unused

    def of(self, rows: slice) -> GradientTerms:
        """Return those of some tokens."""
        return GradientTerms(*(None if x is None else x[rows] for x in self))  # type: ignore[arg-type]


class Tile(Protocol):
    """An implementation of both operations, which may overwrite the logits; a module with these functions is one."""

    def summary(
        self, logits: Tensor, targets: Tensor, start: int, scale: Scale, before: Tensor | None = None
    ) -> Tensor:
        """Summarise the tile's part of the vocabulary, and the parts before it."""

    def gradient(self, logits: Tensor, targets: Tensor, start: int, scale: Scale, terms: GradientTerms) -> Tensor:
        """Compute the temperature times the gradient of a loss by the logits."""


def merged(one: Tensor, other: Tensor) -> Tensor:
    """Merge the summaries [4, N] of two parts of the vocabulary into one, or [4 + K, N] with other tokens' z."""
    top = torch.maximum(one[0], other[0])
    total, weighted = torch.zeros_like(top), torch.zeros_like(top)
    for largest, part_total, part_weighted in (one[:3], other[:3]):
        below = largest - top
        scale = below.exp()
        total = total + scale * part_total
        weighted = weighted + scale * (part_weighted + below * part_total)
    return torch.cat([torch.stack([top, total, weighted]), one[3:] + other[3:]])


def summary(logits: Tensor, targets: Tensor, start: int, scale: Scale, before: Tensor | None = None) -> Tensor:
    """Return the summary [4, N] of a tile [N, W], merged with that of the parts `before` it.

    targets [N] are entries of the vocabulary, and may lie outside of the tile, whose first column is entry `start`.
    """
    z = scale.z(logits)
    is_inside, columns = _inside(targets - start, z.shape[1])
    target = z.gather(-1, columns[:, None])[:, 0].where(is_inside, 0.0)
    largest = z.clamp_min_(FORBIDDEN).amax(-1)
    exp = z.sub_(largest[:, None]).exp()
    total = exp.sum(-1)
    part = torch.stack([largest, total, exp.mul_(z).sum(-1), target])
    return part if before is None else merged(before, part)


def gradient(logits: Tensor, targets: Tensor, start: int, scale: Scale, terms: GradientTerms) -> Tensor:
    """Compute the temperature times the gradient of a loss by the logits, [N, W] in their dtype: that by z, without a
    soft cap. targets and start are as in `summary`.

    d logp_target / dz = onehot - p, and dH / dz = -p (log p + H).
    """
    log_normalizer, entropy, by_logprob, by_entropy = terms
    z = scale.z(logits)
    slope = scale.slope(z)
    log_p = z.sub_(log_normalizer[:, None])
    if by_entropy is None:
        grad = log_p.exp_().mul_(-by_logprob[:, None])
    else:
        p = log_p.clamp_min_(FORBIDDEN).exp()
        constant = -(by_logprob + by_entropy * entropy)
        grad = log_p.mul_(-by_entropy[:, None]).add_(constant[:, None]).mul_(p)
    is_inside, columns = _inside(targets - start, grad.shape[1])
    grad.scatter_add_(-1, columns[:, None], by_logprob.where(is_inside, 0.0)[:, None])
    return (grad if slope is None else grad.mul_(slope)).to(logits.dtype)


def z_at(logits: Tensor, places: Tensor, scale: Scale) -> Tensor:
    """Return z [K, N] at places [N, K] of a tile of logits, counted from its first column; 0 at those outside of it."""
    is_inside, columns = _inside(places, logits.shape[1])
    return scale.z(logits.gather(-1, columns)).where(is_inside, 0.0).T


def add_at(grad: Tensor, places: Tensor, values: Tensor) -> None:
    """Add values [N, K] to a tile of gradients at places [N, K], counted from its first column; none outside of it."""
    is_inside, columns = _inside(places, grad.shape[1])
    grad.scatter_add_(-1, columns, values.where(is_inside, 0.0).to(grad.dtype))


def _inside(places: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return (which places are columns of a tile [N, width], places clamped to valid columns), both like places."""
    return (places >= 0) & (places < width), places.clamp(0, width - 1)
