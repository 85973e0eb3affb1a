"""Per-token estimators of KL(policy || reference) from log-probabilities of the sampled tokens.

J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.algo.formula import Formula


def k1(difference: Tensor) -> Tensor:
    """Return D itself: unbiased, of either sign."""
    return difference


def k2(difference: Tensor) -> Tensor:
    """Return D^2 / 2: biased, never negative."""
    return difference.square() / 2


def k3(difference: Tensor) -> Tensor:
    """Return exp(-D) - 1 + D: unbiased, never negative; expm1 keeps the digits of small differences.

    Nothing is clamped: where the policy has made a token much rarer than the reference, -D of 20 nats gives 5e8, and
    one of 89 more than float32 holds.
    """
    return torch.expm1(-difference) + difference


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, *, estimator: str) -> Tensor:
    """Estimate the divergence of each token, [T] nats, from D = logprobs - ref_logprobs, both [T]; exactly 0 where the
    two agree."""
    if estimator not in KL_ESTIMATORS:
        raise ValueError(f'unknown KL estimator "{estimator}"')
    return KL_ESTIMATORS[estimator].function(logprobs - ref_logprobs)


def kl_at_loss_tokens(logprobs: Tensor, ref_logprobs: Tensor, loss_mask: Tensor, *, estimator: str) -> Tensor:
    """Apply `kl_estimate` where loss_mask; 0 elsewhere. All inputs are [T].

    The mask comes before the estimator: exp of a prompt token's difference means nothing and may overflow.
    """
    here, there = (torch.where(loss_mask, values, 0.0) for values in (logprobs, ref_logprobs))
    return kl_estimate(here, there, estimator=estimator)


_SCHULMAN = "http://joschu.net/blog/kl-approx.html"
KL_ESTIMATORS: dict[str, Formula] = {
    "k1": Formula(
        function=k1,
        text="D",
        source=_SCHULMAN,
        when="In the reward: unbiased. As a loss its expected on-policy gradient is zero, so it must be allowed by "
        "name.",
    ),
    "k2": Formula(
        function=k2,
        text="D^2 / 2",
        source=_SCHULMAN,
        when="In the loss: a biased value, but on-policy the gradient of the divergence.",
    ),
    "k3": Formula(
        function=k3,
        text="exp(-D) - 1 + D",
        source=_SCHULMAN,
        when="In the loss, as GRPO has it: unbiased and never negative.",
    ),
}
