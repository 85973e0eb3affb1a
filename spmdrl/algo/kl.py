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
