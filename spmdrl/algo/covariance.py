"""Tokens ranked by the covariance of log-probability and advantage, which is what changes the policy's entropy.

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
    """Priorities [N] of KL-Cov: covariance [N] itself."""
    return covariance


def random_priorities(
    covariance: Tensor, seeds: Tensor, positions: Tensor, *, cov_low: float, cov_high: float
) -> Tensor:
    """Priorities [N] of Clip-Cov: the token's own random number where cov_low < covariance [N] < cov_high, else -inf.

    seeds and positions are [N] int64: the seed of the token's sequence, and its place there.
    """
    random = uniform(seeds, positions).to(covariance.dtype)
    return torch.where((covariance > cov_low) & (covariance < cov_high), random, -torch.inf)


def num_chosen(num_tokens: int, fraction: float) -> int:
    """How many of a mini-batch's tokens are chosen: at least 1 where there are any."""
    return min(num_tokens, max(1, math.floor(num_tokens * fraction)))


def highest(priorities: Tensor, count: int) -> Tensor:
    """The `count` highest of priorities [N], or all. Those of a whole are among those of its parts."""
    return priorities.topk(min(count, len(priorities))).values


def chosen_tokens(priorities: Tensor, threshold: float) -> Tensor:
    """[N] bool, True where a priority is at least the threshold, which is the whole's count-th highest; never at -inf.

    Equal priorities are chosen together, so there may be more than count.
    """
    return (priorities >= threshold) & (priorities > -torch.inf)
