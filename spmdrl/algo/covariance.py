"""Tokens by the covariance of log-probability and advantage, which is what changes the policy's entropy.

J. Cui and others, "The Entropy Mechanism of Reinforcement Learning", arXiv:2505.22617. The source takes means and ranks
within a micro-batch; here both are of the whole mini-batch on all ranks, from the log-probabilities before its update,
so that the choice does not depend on how the mini-batch was cut.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spmdrl.algo.seeds import uniform


def covariances(old_logprobs: Tensor, advantages: Tensor, *, mean_logprob: float, mean_advantage: float) -> Tensor:
    """[N]: (old_logprobs - mean) (advantages - mean) of loss tokens [N]; the means are the mini-batch's."""
    return (old_logprobs - mean_logprob) * (advantages - mean_advantage)


def greatest_first(covariance: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """[N]: covariance [N] itself, as KL-Cov ranks tokens."""
    return covariance


def random_priorities(
    covariance: Tensor, seeds: Tensor, positions: Tensor, *, cov_low: float, cov_high: float
) -> Tensor:
    """[N]: a random number of the token's own where cov_low < covariance [N] < cov_high, elsewhere -inf; Clip-Cov.

    seeds and positions are [N] int64: of the token's sequence, and its place there.
    """
    drawn = uniform(seeds, positions).to(covariance.dtype)
    return torch.where((covariance > cov_low) & (covariance < cov_high), drawn, -torch.inf)


def num_chosen(num_tokens: int, fraction: float) -> int:
    """How many of a mini-batch's tokens are chosen: at least 1 where there are any."""
    return min(num_tokens, max(1, math.floor(num_tokens * fraction)))


def highest(priorities: Tensor, count: int) -> Tensor:
    """The `count` highest of priorities [N], or all; those of the parts of a whole hold the whole's."""
    return priorities.topk(min(count, len(priorities))).values


def chosen_tokens(priorities: Tensor, threshold: float) -> Tensor:
    """[N] bool: those with at least the threshold, the whole's count-th highest; never those of -inf.

    Equals are chosen together, so that there may be more than count.
    """
    return (priorities >= threshold) & (priorities > -torch.inf)
