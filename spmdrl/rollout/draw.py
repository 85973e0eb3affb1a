"""Draw one token per row. The noise of a row depends on its request's seed and the token's place, on nothing else."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algo.seeds import uniform


@dataclass(frozen=True, slots=True)
class RowSampling:
    """The sampling settings of n rows, as columns."""

    seeds: Tensor  # [n] int64
    temperature: Tensor  # [n] float32, 0 is greedy
    top_p: Tensor  # [n] float32
    any_greedy: bool
    any_top_p: bool

    def take(self, rows: Tensor) -> RowSampling:
        """The settings of some rows, in the given order."""
        return RowSampling(self.seeds[rows], self.temperature[rows], self.top_p[rows], self.any_greedy, self.any_top_p)


def draw_tokens(logits: Tensor, sampling: RowSampling, places: Tensor) -> tuple[Tensor, Tensor]:
    """Return (token_ids [n] int64, logprobs [n] float32) for logits [n, V]; places [n] int64 counts response tokens.

    Sampling inverts the cumulative distribution at one uniform number per row. Log-probabilities are those of the
    temperature-scaled distribution before top-p, and of the unscaled one for greedy rows.
    """
    greedy = sampling.temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, sampling.temperature)[:, None]
    log_p = scaled.log_softmax(-1)
    p = log_p.exp()
    cumulative = (_nucleus(p, sampling.top_p) if sampling.any_top_p else p).cumsum(-1)
    total = cumulative[:, -1:]
    # Strictly below the total even where the product rounds up to it.
    threshold = torch.minimum(uniform(sampling.seeds, places)[:, None] * total, torch.nextafter(total, -total))
    # The first token whose cumulative probability exceeds the threshold; one of probability 0 never does so first.
    tokens = (cumulative <= threshold).sum(-1)
    if sampling.any_greedy:
        tokens = torch.where(greedy, logits.argmax(-1), tokens)
    return tokens, log_p.gather(-1, tokens[:, None])[:, 0]


def _nucleus(p: Tensor, top_p: Tensor) -> Tensor:
    """p with everything outside the smallest set of total probability top_p set to 0."""
    ordered, order = p.sort(-1, descending=True)
    before = ordered.cumsum(-1) - ordered
    kept = torch.where(before < top_p[:, None], ordered, 0.0)
    return torch.zeros_like(p).scatter(-1, order, kept)
