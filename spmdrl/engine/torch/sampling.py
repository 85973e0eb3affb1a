"""Sample one token per row. A row's noise depends only on its request's seed and the token's place."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algo.seeds import uniform
from spmdrl.model.logprobs import Head, logprobs_of_logits
from spmdrl.types import Request

SampleTokens = Callable[[Tensor, "RowSampling", int], tuple[Tensor, Tensor]]  # as `sample_tokens`

NOISE_PLACES = 64  # places of noise that are made at once: one number at a time would cost as much


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling settings of n rows, as columns, with the noise for the next tokens of their responses."""

    seeds: Tensor  # [n] int64
    temperature: Tensor  # [n] float32, 0 is greedy
    top_p: Tensor  # [n] float32
    any_greedy: bool
    any_top_p: bool
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
            any_top_p=any(r.top_p < 1 for r in requests),
            noise=_noise(seeds, places),
        )

    def take(self, rows: Tensor) -> RowSampling:
        """Select rows, in the given order."""
        return dataclasses.replace(
            self,
            seeds=self.seeds[rows],
            temperature=self.temperature[rows],
            top_p=self.top_p[rows],
            noise=self.noise[rows],
        )

    def at(self, places: Sequence[int]) -> RowSampling:
        """Replace the noise by that from other places on."""
        return dataclasses.replace(self, noise=_noise(self.seeds, places))


def _noise(seeds: Tensor, places: Sequence[int]) -> Tensor:
    first = torch.tensor(places, dtype=torch.int64, device=seeds.device)
    grid = first[:, None] + torch.arange(NOISE_PLACES, device=seeds.device)
    return uniform(seeds[:, None].expand_as(grid).flatten(), grid.flatten()).view_as(grid)


def sample_tokens(logits: Tensor, sampling: RowSampling, ahead: int) -> tuple[Tensor, Tensor]:
    """Return (token_ids [n] int64, logprobs [n] float32) for logits [n, V], with the noise `ahead` places on.

    Sampling inverts the cumulative distribution at one uniform number per row. Log-probabilities are those of the
    temperature-scaled distribution before top-p, and of the unscaled one for greedy rows.
    """
    log_p = _scaled(logits, sampling).log_softmax(-1)
    p = log_p.exp()
    cumulative = _cumulative(_nucleus(p, sampling.top_p) if sampling.any_top_p else p)
    total = cumulative[:, -1:]
    # Strictly below the total even where the product rounds up to it.
    threshold = torch.minimum(sampling.noise[:, ahead, None] * total, torch.nextafter(total, -total))
    # The first token whose cumulative probability exceeds the threshold; one of probability 0 never does so first.
    tokens = (cumulative <= threshold).sum(-1)
    if sampling.any_greedy:
        tokens = torch.where(sampling.temperature == 0, logits.argmax(-1), tokens)
    return tokens, log_p.gather(-1, tokens[:, None])[:, 0]


def sample_with_head_logprobs(head: Head, logits: Tensor, sampling: RowSampling, ahead: int) -> tuple[Tensor, Tensor]:
    """Sample as `sample_tokens` does; the log-probabilities have the bits that a policy with this head computes."""
    tokens, _ = sample_tokens(logits, sampling, ahead)
    return tokens, logprobs_of_logits(_scaled(logits, sampling), tokens, head)


def _scaled(logits: Tensor, sampling: RowSampling) -> Tensor:
    return logits.float() / torch.where(sampling.temperature == 0, 1.0, sampling.temperature)[:, None]


def _nucleus(p: Tensor, top_p: Tensor) -> Tensor:
    """p with everything outside the smallest set of total probability top_p set to 0."""
    ordered, order = p.sort(-1, descending=True)
    before = _cumulative(ordered) - ordered
    nucleus = torch.where(before < top_p[:, None], ordered, 0.0)
    return torch.zeros_like(p).scatter(-1, order, nucleus)


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
