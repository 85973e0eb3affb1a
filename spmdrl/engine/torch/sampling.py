"""Sample one token per row. A row's noise depends only on its request's seed and the token's place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algo.seeds import uniform
from spmdrl.model.logprobs import Head, logprobs_of_logits, over_candidates
from spmdrl.types import Request

SampleTokens = Callable[[Tensor, "RowSampling", int], tuple[Tensor, Tensor, Tensor | None]]  # as `sample_tokens`

NOISE_PLACES = 64  # places of noise that are made at once: one number at a time would cost as much


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling settings of n rows, as columns, with the noise for the next tokens of their responses."""

    seeds: Tensor  # [n] int64
    temperature: Tensor  # [n] float32, 0 is greedy
    top_p: Tensor  # [n] float32
    top_k: Tensor  # [n] int64, 0 without one
    any_greedy: bool
    any_top_p: bool  # without a top_k
    max_top_k: int
    noise: Tensor  # [n, NOISE_PLACES] float32 in [0, 1): uniform(seed, place)

    @classmethod
    def of(cls, requests: Sequence[Request], places: Sequence[int], device: torch.device) -> RowSampling:
        """Collect the settings of requests whose next response token has the given place, counted from 0."""
        seeds = torch.tensor([r.seed for r in requests], dtype=torch.int64, device=device)
        return cls(
            seeds=seeds,
            temperature=torch.tensor([r.temperature for r in requests], dtype=torch.float32, device=device),
            top_p=torch.tensor([r.top_p for r in requests], dtype=torch.float32, device=device),
            any_greedy=any(r.temperature == 0 for r in requests),
            top_k=torch.tensor([r.top_k or 0 for r in requests], dtype=torch.int64, device=device),
            any_top_p=any(r.top_p < 1 and r.top_k is None for r in requests),
            max_top_k=max((r.top_k or 0 for r in requests), default=0),
            noise=_noise(seeds, places),
        )

    def take(self, rows: Tensor) -> RowSampling:
        """Select rows, in the given order."""
        return dataclasses.replace(
            self,
            seeds=self.seeds[rows],
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            top_k=self.top_k[rows],
            noise=self.noise[rows],
        )

    def at(self, places: Sequence[int]) -> RowSampling:
        """Replace the noise by that from other places on."""
        return dataclasses.replace(self, noise=_noise(self.seeds, places))


def _noise(seeds: Tensor, places: Sequence[int]) -> Tensor:
    first = torch.tensor(places, dtype=torch.int64, device=seeds.device)
    grid = first[:, None] + torch.arange(NOISE_PLACES, device=seeds.device)
    return uniform(seeds[:, None].expand_as(grid).flatten(), grid.flatten()).view_as(grid)


def sample_tokens(logits: Tensor, sampling: RowSampling, ahead: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return (token_ids [n] int64, logprobs [n] float32, candidates [n, K]) for logits [n, V], with the noise `ahead`
    places on.

    Sampling inverts the cumulative distribution at one uniform number per row. Log-probabilities are those of the
    temperature-scaled distribution: over the candidates of a row with top-k, else before top-p, and of the unscaled one
    for greedy rows. Candidates are -1 where there are fewer, None without any top-k.
    """
    log_p = _scaled(logits, sampling).log_softmax(-1)
    tokens, candidates = _drawn(logits, log_p, sampling, ahead)
    logprobs = log_p.gather(-1, tokens[:, None])[:, 0]
    if candidates is not None:
        logprobs, _ = over_candidates(logprobs, logprobs, candidates, log_p.gather(-1, candidates.clamp_min(0)))
    return tokens, logprobs, candidates


def sample_with_head_logprobs(
    head: Head, logits: Tensor, sampling: RowSampling, ahead: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Sample as `sample_tokens` does; the log-probabilities have the bits that a policy with this head computes."""
    scaled = _scaled(logits, sampling)
    tokens, candidates = _drawn(logits, scaled.log_softmax(-1), sampling, ahead)
    logprobs, of_others = logprobs_of_logits(scaled, tokens, head, candidates)
    if candidates is not None and of_others is not None:
        logprobs, _ = over_candidates(logprobs, logprobs, candidates, of_others)
    return tokens, logprobs, candidates


def _drawn(logits: Tensor, log_p: Tensor, sampling: RowSampling, ahead: int) -> tuple[Tensor, Tensor | None]:
    """Return the sampled tokens [n] and their rows' candidates."""
    p, candidates = log_p.exp(), None
    if sampling.any_top_p or sampling.max_top_k:
        p, candidates = _nucleus(p, sampling)
    cumulative = _cumulative(p)
    total = cumulative[:, -1:]
    # Strictly below the total even where the product rounds up to it.
    threshold = torch.minimum(sampling.noise[:, ahead, None] * total, torch.nextafter(total, -total))
    # The first token whose cumulative probability exceeds the threshold; one of probability 0 never does so first.
    tokens = (cumulative <= threshold).sum(-1)
    if sampling.any_greedy:
        tokens = torch.where(sampling.temperature == 0, logits.argmax(-1), tokens)
    return tokens, candidates


def _scaled(logits: Tensor, sampling: RowSampling) -> Tensor:
    return logits.float() / torch.where(sampling.temperature == 0, 1.0, sampling.temperature)[:, None]


def _nucleus(p: Tensor, sampling: RowSampling) -> tuple[Tensor, Tensor | None]:
    """Set p [n, V] to 0 outside the smallest set of probability top_p, of a row with top-k out of its first ones.

    Returns it with the sets of these rows, [n, K] int64, -1 where they have fewer; None without such rows.
    """
    width = p.shape[-1] if sampling.any_top_p else min(sampling.max_top_k, p.shape[-1])
    ordered, order = p.sort(-1, descending=True) if sampling.any_top_p else p.topk(width)
    has_top_k = (sampling.top_k > 0)[:, None]
    beyond = has_top_k & (torch.arange(width, device=p.device) >= sampling.top_k[:, None])
    ordered = torch.where(beyond, 0.0, ordered)
    cumulative = _cumulative(ordered)
    share = sampling.top_p[:, None] * torch.where(has_top_k, cumulative[:, -1:], 1.0)
    stays = (cumulative - ordered < share) & ~beyond
    left = torch.zeros_like(p).scatter(-1, order, torch.where(stays, ordered, 0.0))
    left = torch.where(has_top_k | (sampling.top_p < 1)[:, None], left, p)
    if not sampling.max_top_k:
        return left, None
    return left, torch.where(stays & has_top_k, order, -1)[:, : sampling.max_top_k]


def _cumulative(p: Tensor) -> Tensor:
    """Sum p [n, V] cumulatively. On CUDA torch's own sum has no deterministic form, so a deterministic run multiplies
    by triangles of ones instead."""
    if p.device.type != "cuda" or not torch.are_deterministic_algorithms_enabled():
        return p.cumsum(-1)
    block = 256
    blocks = torch.nn.functional.pad(p, (0, -p.shape[-1] % block)).unflatten(-1, (-1, block))  # [n, B, block]
    within = blocks @ torch.ones(block, block, dtype=p.dtype, device=p.device).triu()
    totals = within[..., -1]
    ones = torch.ones(totals.shape[-1], totals.shape[-1], dtype=p.dtype, device=p.device)
    return (within + (totals @ ones.triu(1)).unsqueeze(-1)).flatten(-2)[..., : p.shape[-1]]
