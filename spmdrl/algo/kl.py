"""Per-token estimators of KL(policy || reference) from log-probabilities of the sampled tokens, and divergences of a
policy from a teacher over a part of the vocabulary.

J. Schulman, "Approximating KL Divergence", http://joschu.net/blog/kl-approx.html
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.algo.formula import Divergence, Formula
from spmdrl.algo.sequences import expert_imbalance

_SMALLEST_REST = 1e-7  # of a probability that is 1 less a float32 sum
_MAX_LOG_RATIO = 80.0  # what exceeds it changes nothing in float32; exp of it does not overflow


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


def kl_at_loss_tokens(
    logprobs: Tensor,
    ref_logprobs: Tensor,
    loss_mask: Tensor,
    *,
    estimator: str,
    rollout_logprobs: Tensor | None = None,
) -> Tensor:
    """Apply `kl_estimate` where loss_mask; 0 elsewhere. All inputs are [T].

    With `rollout_logprobs` the estimate is multiplied by exp(logprobs - rollout_logprobs), which carries gradient too,
    arXiv:2512.02556: of k1 and k3 both value and gradient are then unbiased, whatever policy sampled the tokens.

    The mask comes before the estimator: exp of a prompt token's difference means nothing and may overflow.
    """
    here, there = (torch.where(loss_mask, values, 0.0) for values in (logprobs, ref_logprobs))
    estimate = kl_estimate(here, there, estimator=estimator)
    if rollout_logprobs is None:
        return estimate
    return (here - torch.where(loss_mask, rollout_logprobs, 0.0)).exp() * estimate


def log_ratio_penalty(logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """(logprobs - rollout_logprobs)^2 where loss_mask, else 0: [T] nats^2, which pulls the policy to what sampled.

    Kimi K2.5, arXiv:2602.02276.
    """
    return torch.where(loss_mask, logprobs - rollout_logprobs, 0.0).square()


def merged_divergence(logprobs: Tensor, teacher_logprobs: Tensor, *, kind: Divergence, beta: float) -> Tensor:
    """Return the divergence [N] of distributions over K tokens and all others, which count as one.

    Both log-probabilities are [N, K], of the same tokens; the gradient reaches the first. Merging tokens never sets two
    distributions further apart, so this is at most the divergence over the whole vocabulary; where both are equal it is
    exactly 0, with its gradient.
    """
    with torch.no_grad():
        log_p, log_q = (_with_others(x) for x in (logprobs, teacher_logprobs))
        p, q, gap = log_p.exp(), log_q.exp(), log_p - log_q
        if kind == "forward":
            terms, p_slope = q * -gap, p - q
        elif kind == "reverse":
            terms = p_slope = torch.where(p > 0, p * gap, 0.0)
        else:
            ratio = gap.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
            p_slope = (beta - 1.0) * p * (beta * (-ratio).expm1()).log1p()
            terms = p_slope - beta * q * ((1.0 - beta) * ratio.expm1()).log1p()
        # What a token's probability gains, the others lose.
        slope = p_slope[:, :-1] - p[:, :-1] * (p_slope[:, -1:] / p[:, -1:])
    allowed = torch.where(p[:, :-1] > 0, logprobs, 0.0)
    return terms.sum(-1) + ((allowed - allowed.detach()) * slope).sum(-1)


def _with_others(logprobs: Tensor) -> Tensor:
    """Append the log-probability of all other tokens: [N, K] gives [N, K + 1]."""
    # The layout in memory decides how torch rounds exp, and in what order it adds.
    others = (1.0 - logprobs.contiguous().exp().sum(-1, keepdim=True)).clamp_min(_SMALLEST_REST)
    return torch.cat([logprobs, others.log()], -1)


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
# Settings of the loss that are on where they are set, not one of several kinds.
LOSS_TERMS: dict[str, Formula] = {
    "kl_importance_ratio": Formula(
        function=kl_at_loss_tokens,
        text="exp(s) times the divergence of `kl_estimator` (k1 or k3)",
        source="DeepSeek-V3.2, arXiv:2512.02556",
        when="With `kl_coef` and tokens that other weights sampled: value and gradient stay unbiased.",
    ),
    "expert_balance_coef": Formula(
        function=expert_imbalance,
        text="expert_balance_coef sum over the E experts e of E f_e P_e, f_e being the share of e in the sequence's "
        "choices and P_e what the token's router gives e, of all; the mean over layers",
        source="DeepSeek-V3, arXiv:2412.19437, eq. 17 to 20; Switch, arXiv:2101.03961, counts f over a batch",
        when="Mixtures whose loads drift apart (0.0001 is usual) and have no biases for `optim.expert_bias_rate`.",
    ),
    "log_ratio_coef": Formula(
        function=log_ratio_penalty,
        text="log_ratio_coef s^2",
        source="Kimi K2.5, arXiv:2602.02276",
        when="Stale tokens, beside a loss without a clip or with DPPO's mask: a pull back to the policy that sampled "
        "(0.001 is usual).",
    ),
}
