"""Per-token estimators of KL(policy || reference) from log-probabilities of the sampled tokens.

J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

import torch
from torch import Tensor


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: str) -> Tensor:
    """[T] float32, nats, exactly 0 where the two agree. With D = logprobs - ref_logprobs, both [T]:

    - "k1": D. Unbiased; as a loss its expected on-policy gradient is zero.
    - "k2": D^2 / 2. Biased; its on-policy gradient is that of the divergence.
    - "k3": exp(-D) - 1 + D. Unbiased and never negative.
    """
    difference = logprobs - ref_logprobs
    match estimator:
        case "k1":
            return difference
        case "k2":
            return difference.square() / 2
        case "k3":
            return torch.expm1(-difference) + difference
    raise ValueError(f'unknown KL estimator "{estimator}"')


def kl_at_loss_tokens(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor, *, estimator: str) -> Tensor:
    """`kl_estimate` where loss_mask, elsewhere 0; all inputs are [T].

    Masked before the estimator: exp of a prompt token's difference means nothing and may overflow.
    """
    here, there = (torch.where(loss_mask, values, 0.0) for values in (logprobs, ref_logprobs))
    return kl_estimate(here, there, estimator=estimator)
