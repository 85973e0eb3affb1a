"""The policy losses, and the table of their names.

All take logprobs, old_logprobs, advantages and loss_mask, each [T], of which only logprobs carries grad; without
old_logprobs the policy is the one that sampled, and every ratio is exactly 1. Values outside loss_mask have no effect.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spmdrl.algo.covariance import greatest_first, random_priorities
from spmdrl.algo.formula import LossKind
from spmdrl.algo.loss import PolicyLoss, at_loss_tokens, clip_both_sides
from spmdrl.algo.segments import sequence_means


def ppo(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A), PPO arXiv:1707.06347.

    The two-sided clip is DAPO's arXiv:2503.14476. With `dual_clip` c, where A < 0 the loss is at most -c A,
    arXiv:1912.09729. All inputs are [T]; only logprobs carries grad. Without old_logprobs the policy is the one that
    sampled: every ratio is exactly 1 and the gradient is that of -A logprobs.

    A ratio that overflows at a loss token gives a gradient that is not finite, even where the loss is.
    """
    log_ratio, advantages = at_loss_tokens(logprobs, old_logprobs, advantages, loss_mask)
    ratio = log_ratio.exp()
    per_token, clipped = clip_both_sides(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    if dual_clip is not None:
        highest = torch.where(advantages < 0, -dual_clip * advantages, torch.inf)
        per_token, clipped = torch.minimum(per_token, highest), clipped | (per_token > highest)
    return PolicyLoss(per_token, clipped, ratio.detach())


def gspo(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    cu_seqlens: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's clip of s = exp(mean over the sequence of logprobs - old_logprobs), GSPO arXiv:2507.18071.

    All tokens of a sequence have the same advantage and the same s, are clipped together, and carry a gradient each.
    """
    log_ratio, advantages = at_loss_tokens(logprobs, old_logprobs, advantages, loss_mask)
    ratio = sequence_means(log_ratio, loss_mask, cu_seqlens).exp()
    per_token, clipped = clip_both_sides(ratio, advantages, clip_low=clip_low, clip_high=clip_high)
    return PolicyLoss(per_token, clipped, ratio.detach())


def cispo(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """-stop_grad(clip(ratio, 1 - clip_low, 1 + clip_high)) A logprobs, CISPO of MiniMax-M1 arXiv:2506.13585.

    The weight of a token is bounded, and no token loses its gradient.
    """
    log_ratio, advantages = at_loss_tokens(logprobs, old_logprobs, advantages, loss_mask)
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(-weight * advantages * torch.where(loss_mask, logprobs, 0.0), weight != ratio, ratio)


def gmpo(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    cu_seqlens: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """-A exp(mean over the sequence of the bounded logprobs - old_logprobs), GMPO arXiv:2507.20673.

    Each token's difference is bounded before the mean, in nats: to clip_high from above where A > 0, to -clip_low from
    below elsewhere. All tokens of a sequence have the same advantage.
    """
    log_ratio, advantages = at_loss_tokens(logprobs, old_logprobs, advantages, loss_mask)
    gains = advantages > 0
    bounded = torch.where(gains, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    ratio = sequence_means(bounded, loss_mask, cu_seqlens).exp()
    return PolicyLoss(-ratio * advantages, bounded != log_ratio, ratio.detach())


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    tau_positive: float,
    tau_negative: float,
) -> PolicyLoss:
    """-A sigmoid(tau (ratio - 1)) 4 / tau, SAPO arXiv:2511.20347; tau is tau_positive where A > 0, else tau_negative.

    At a ratio of 1 the gradient is that of -A ratio; away from it the gate closes smoothly, the sooner the larger tau.
    """
    log_ratio, advantages = at_loss_tokens(logprobs, old_logprobs, advantages, loss_mask)
    ratio = log_ratio.exp()
    tau = torch.full_like(advantages, tau_negative).masked_fill(advantages > 0, tau_positive)
    gate = torch.sigmoid(tau * (ratio - 1.0)) * (4.0 / tau)
    return PolicyLoss(-gate * advantages, torch.zeros_like(loss_mask), ratio.detach())


def clip_cov(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    chosen: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's loss, but 0 and without gradient at chosen [T] bool, Clip-Cov arXiv:2505.22617.

    `covariance.random_priorities` says which tokens are chosen.
    """
    loss = ppo(logprobs, old_logprobs, advantages, loss_mask, clip_low=clip_low, clip_high=clip_high)
    chosen = chosen & loss_mask
    return PolicyLoss(torch.where(chosen, 0.0, loss.per_token), loss.clipped | chosen, loss.ratio)


def kl_cov(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    chosen: Tensor,
    cov_kl_coef: float,
) -> PolicyLoss:
    """-ratio A, and at chosen [T] bool + cov_kl_coef |logprobs - old_logprobs|, KL-Cov arXiv:2505.22617.

    Nothing is clipped. The chosen tokens are those of the greatest covariance, see `covariance.covariances`.
    """
    log_ratio, advantages = at_loss_tokens(logprobs, old_logprobs, advantages, loss_mask)
    ratio = log_ratio.exp()
    per_token = -ratio * advantages + torch.where(chosen, cov_kl_coef * log_ratio.abs(), 0.0)
    return PolicyLoss(per_token, torch.zeros_like(loss_mask), ratio.detach())


POLICY_LOSSES: dict[str, LossKind] = {
    "ppo": LossKind(
        function=ppo,
        text="max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A); with dual_clip c, where A < 0, at most -c A",
        source="arXiv:1707.06347, arXiv:2503.14476 (two bounds), arXiv:1912.09729 (dual)",
        when="The default. A higher clip_high (0.28) leaves unlikely tokens room to grow.",
        settings={"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
    ),
    "gspo": LossKind(
        function=gspo,
        text="max(-s A, -clip(s, 1 - clip_low, 1 + clip_high) A), s = exp(mean over the sequence of d)",
        source="arXiv:2507.18071",
        when="Mixtures of experts, where single ratios are noise; long responses.",
        settings={"clip_low": 3e-4, "clip_high": 4e-4},
        per_sequence=True,
    ),
    "cispo": LossKind(
        function=cispo,
        text="-stop_grad(clip(ratio, 1 - clip_low, 1 + clip_high)) A logprob",
        source="arXiv:2506.13585; the bound of 5 is arXiv:2510.13786's",
        when="Several updates a step without losing rare tokens to the clip.",
        settings={"clip_low": 1.0, "clip_high": 4.0},
    ),
    "gmpo": LossKind(
        function=gmpo,
        text="-A exp(mean over the sequence of min(d, clip_high) where A > 0, of max(d, -clip_low) elsewhere)",
        source="arXiv:2507.20673",
        when="As `gspo`, with outliers bounded token by token; the bounds are in nats.",
        settings={"clip_low": 0.4, "clip_high": 0.4},
        per_sequence=True,
    ),
    "sapo": LossKind(
        function=sapo,
        text="-A sigmoid(tau (ratio - 1)) 4 / tau, tau = tau_positive where A > 0, else tau_negative",
        source="arXiv:2511.20347",
        when="A trust region without an edge.",
        settings={"tau_positive": 1.0, "tau_negative": 1.05},
    ),
    "clip_cov": LossKind(
        function=clip_cov,
        text="`ppo`; 0 at cov_fraction of the tokens, chosen at random among those with cov_low < cov < cov_high",
        source="arXiv:2505.22617",
        when="Entropy collapses: the tokens that lower it most are left out at random.",
        settings={"clip_low": 0.2, "clip_high": 0.2},
        prioritise=random_priorities,
        choice={"cov_fraction": 2e-4, "cov_low": 1.0, "cov_high": 5.0},
    ),
    "kl_cov": LossKind(
        function=kl_cov,
        text="-ratio A; + cov_kl_coef abs(d) at the cov_fraction of tokens with the greatest cov",
        source="arXiv:2505.22617",
        when="Entropy collapses: the tokens that lower it most are held back.",
        settings={"cov_kl_coef": 1.0},
        prioritise=greatest_first,
        choice={"cov_fraction": 2e-3},
        off_policy_only=True,
    ),
}
