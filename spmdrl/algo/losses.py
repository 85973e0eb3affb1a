"""Losses: those of the policy and of the critic, and the weight of each token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from spmdrl.algo.formula import Formula
from spmdrl.algo.seeds import uniform
from spmdrl.algo.sequences import sequence_means

# From per-token losses to one loss: the weight of a token, with the global denominator already inside.


def token_weights(
    num_loss_tokens: Sequence[int],
    *,
    aggregation: str,
    global_loss_tokens: int,
    global_rollouts: int,
    max_response_tokens: int,
) -> list[float]:
    """Weights of the loss tokens of rollouts that have num_loss_tokens [n] each; 0 for those without any.

    The sum of weight times per-token loss over all ranks is the global loss. The two totals are over the mini-batch
    on all ranks; global_rollouts counts rollouts with at least one loss token.
    """
    if aggregation not in AGGREGATIONS:
        raise ValueError(f'unknown aggregation "{aggregation}"')
    divisor = AGGREGATIONS[aggregation].function
    totals = (global_loss_tokens, global_rollouts, max_response_tokens)
    return [1.0 / divisor(n, *totals) if n else 0.0 for n in num_loss_tokens]


# Each function: (n, global_loss_tokens N, global_rollouts S, max_response_tokens L) to what a token's loss is divided
# by, n being the loss tokens of its rollout.
AGGREGATIONS: dict[str, Formula] = {
    "token_mean": Formula(
        function=lambda n, tokens, rollouts, longest: tokens,
        text="1 / N",
        source="DAPO, arXiv:2503.14476",
        when="The default. Every token counts the same, and long responses more.",
    ),
    "sequence_mean_token_mean": Formula(
        function=lambda n, tokens, rollouts, longest: n * rollouts,
        text="1 / (n S)",
        source="GRPO, arXiv:2402.03300",
        when="Every rollout counts the same; a token of a long one less.",
    ),
    "sequence_mean_token_sum": Formula(
        function=lambda n, tokens, rollouts, longest: rollouts,
        text="1 / S",
        source="the policy gradient itself",
        when="Rollouts are summed over their tokens, then averaged.",
    ),
    "constant": Formula(
        function=lambda n, tokens, rollouts, longest: rollouts * longest,
        text="1 / (S L)",
        source="Dr.GRPO, arXiv:2503.20783",
        when="As before, with a scale that does not depend on the lengths sampled.",
    ),
}


# Per-token losses. They stay per token: `token_weights` says what each counts in the global loss.


@dataclass(frozen=True, slots=True)
class PolicyLoss:
    """The policy loss of each token."""

    per_token: Tensor  # [T] float32, with grad; 0 outside loss_mask
    clipped: Tensor  # [T] bool, True where a bound decides the loss
    ratio: Tensor  # [T] float32, no grad; that of the token or of its sequence, 1 outside loss_mask
    means: dict[str, Tensor] = field(default_factory=dict)  # [T] each, no grad; reported as means over loss tokens


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far trainer and engine disagree about the same weights."""

    mismatch: Tensor  # [T] nats, old_logprobs - rollout_logprobs; 0 outside loss_mask

    @property
    def k1(self) -> Tensor:
        """[T] nats, rollout_logprobs - old_logprobs: estimates KL(engine || trainer), may be negative."""
        return -self.mismatch

    @property
    def k3(self) -> Tensor:
        """[T] nats, exp(mismatch) - 1 - mismatch: estimates KL(engine || trainer), never negative."""
        return torch.expm1(self.mismatch) - self.mismatch


def at_loss_tokens(
    logprobs: Tensor, old_logprobs: Tensor | None, advantages: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Return (logprobs - old_logprobs [T] nats, advantages [T]), both 0 outside loss_mask, whatever was there.

    Mask before exp, not after: exp(inf) * 0 is nan in the backward pass. So is 0 * an advantage that is not finite.
    """
    old_logprobs = logprobs.detach() if old_logprobs is None else old_logprobs
    return torch.where(loss_mask, logprobs - old_logprobs, 0.0), torch.where(loss_mask, advantages, 0.0)


def clip_both_sides(ratio: Tensor, advantages: Tensor, *, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Return (max(-ratio A, -clip(ratio, 1 - clip_low, 1 + clip_high) A) [T], whether the clip decided it [T])."""
    free = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    return torch.maximum(free, bounded), bounded > free


def sft_loss(logprobs: Tensor, loss_mask: Tensor) -> Tensor:
    """Cross-entropy of each token, [T] nats: -logprobs where loss_mask, else 0. Both inputs are [T]."""
    return torch.where(loss_mask, -logprobs, 0.0)


def weighted_sum(per_token: Tensor, loss_weights: Tensor) -> Tensor:
    """Sum of per_token [T] times loss_weights [T], [] float32; over micro-batches and ranks it adds up to the loss."""
    return (per_token.float() * loss_weights.float()).sum()


def mismatch(old_logprobs: Tensor, rollout_logprobs: Tensor, loss_mask: Tensor) -> Mismatch:
    """Compare the trainer's log-probabilities of the sampled tokens with the engine's; all inputs are [T]."""
    return Mismatch(torch.where(loss_mask, old_logprobs - rollout_logprobs, 0.0))


# Tokens ranked by the covariance of log-probability and advantage, which is what changes the policy's entropy.
#
# J. Cui and others, "The Entropy Mechanism of Reinforcement Learning", arXiv:2505.22617. The source takes means and
# ranks within a micro-batch; here both are of the whole mini-batch on all ranks, from the log-probabilities before
# its update, so that the selection does not depend on how the mini-batch was cut.


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


def num_selected(num_tokens: int, fraction: float) -> int:
    """How many of a mini-batch's tokens are selected: at least 1 where there are any."""
    return min(num_tokens, max(1, math.floor(num_tokens * fraction)))


def highest(priorities: Tensor, count: int) -> Tensor:
    """The `count` highest of priorities [N], or all. Those of a whole are among those of its parts."""
    return priorities.topk(min(count, len(priorities))).values


def selected_tokens(priorities: Tensor, threshold: float) -> Tensor:
    """[N] bool, True where a priority is at least the threshold, which is the whole's count-th highest; never at -inf.

    Equal priorities are selected together, so there may be more than count.
    """
    return (priorities >= threshold) & (priorities > -torch.inf)


# The policy losses, and the table of their names.
#
# All take logprobs, old_logprobs, advantages and loss_mask, each [T], of which only logprobs carries grad; without
# old_logprobs the policy is the one that sampled, and every ratio is exactly 1. Those of DPPO take rollout_logprobs in
# their place, the engine's values. Values outside loss_mask have no effect.


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
    cov_selected: Tensor,
    clip_low: float,
    clip_high: float,
) -> PolicyLoss:
    """PPO's loss, but 0 and without gradient at cov_selected [T] bool, Clip-Cov arXiv:2505.22617.

    `random_priorities` says which tokens are selected.
    """
    loss = ppo(logprobs, old_logprobs, advantages, loss_mask, clip_low=clip_low, clip_high=clip_high)
    cov_selected = cov_selected & loss_mask
    return PolicyLoss(torch.where(cov_selected, 0.0, loss.per_token), loss.clipped | cov_selected, loss.ratio)


def kl_cov(
    logprobs: Tensor,
    old_logprobs: Tensor | None,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    cov_selected: Tensor,
    cov_kl_coef: float,
) -> PolicyLoss:
    """-ratio A, and at cov_selected [T] bool + cov_kl_coef |logprobs - old_logprobs|, KL-Cov arXiv:2505.22617.

    Nothing is clipped. The selected tokens are those of the greatest covariance, see `covariances`.
    """
    log_ratio, advantages = at_loss_tokens(logprobs, old_logprobs, advantages, loss_mask)
    ratio = log_ratio.exp()
    per_token = -ratio * advantages + torch.where(cov_selected, cov_kl_coef * log_ratio.abs(), 0.0)
    return PolicyLoss(per_token, torch.zeros_like(loss_mask), ratio.detach())


def dppo_tv(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    divergence_threshold: float,
) -> PolicyLoss:
    """-ratio A, but 0 and without gradient where the update would leave the trust region, DPPO arXiv:2602.04879.

    ratio = p / q, p being the policy's probability of the token and q that with which the engine sampled it. A token
    has left the region where |p - q|, the total variation between the distributions over this token and all others, is
    above divergence_threshold, and A pushes p further away from q.
    """
    log_ratio, _ = at_loss_tokens(logprobs, rollout_logprobs, advantages, loss_mask)
    sampled = torch.where(loss_mask, rollout_logprobs, 0.0).exp()
    variation = (sampled * log_ratio.detach().expm1()).abs()
    return _inside(logprobs, rollout_logprobs, advantages, loss_mask, variation > divergence_threshold)


def dppo_kl(
    logprobs: Tensor,
    rollout_logprobs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    *,
    divergence_threshold: float,
) -> PolicyLoss:
    """`dppo_tv` with another distance: q log(q / p) + (1 - q) log((1 - q) / (1 - p)), KL(engine || policy) over this
    token and all others, nats."""
    now, sampled = (torch.where(loss_mask, values, -1.0) for values in (logprobs.detach(), rollout_logprobs))
    # Rounding may leave a log-probability above 0.
    other_now, other_sampled = (-torch.expm1(values.clamp(max=0.0)) for values in (now, sampled))
    divergence = sampled.exp() * (sampled - now)
    divergence = divergence + torch.xlogy(other_sampled, other_sampled) - torch.xlogy(other_sampled, other_now)
    return _inside(logprobs, rollout_logprobs, advantages, loss_mask, divergence > divergence_threshold)


def _inside(
    logprobs: Tensor, rollout_logprobs: Tensor, advantages: Tensor, loss_mask: Tensor, is_far: Tensor
) -> PolicyLoss:
    """-ratio A of tokens that are not far from the engine's policy, [T] bool, or that the update brings nearer."""
    log_ratio, advantages = at_loss_tokens(logprobs, rollout_logprobs, advantages, loss_mask)
    left = loss_mask & is_far & (log_ratio.detach() * advantages > 0)
    ratio = torch.where(left, 0.0, log_ratio).exp()
    return PolicyLoss(torch.where(left, 0.0, -ratio * advantages), left, log_ratio.detach().exp())


# The critic's loss: how far its value of each token is from the return.


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The critic's loss of each token."""

    per_token: Tensor  # [T] float32, with grad; 0 outside loss_mask
    clipped: Tensor  # [T] bool, True where the bound decides the loss


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, *, clip_value: float
) -> ValueLoss:
    """max((V - R)^2, (clip(V, V_old - clip_value, V_old + clip_value) - R)^2) / 2.

    As in the first implementation of PPO (OpenAI baselines, ppo2; described in arXiv:2005.12729). All tensors are [T],
    in units of the reward; only values carries grad. Nothing is clipped with an infinite clip_value.
    """
    values, old_values, returns = (torch.where(loss_mask, column, 0.0) for column in (values, old_values, returns))
    free = (values - returns).square()
    near = torch.clamp(values, old_values - clip_value, old_values + clip_value)
    bounded = (near - returns).square()
    return ValueLoss(torch.maximum(free, bounded) / 2, bounded > free)


def fit_sums(returns: Tensor, values: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sums [] float64 over loss tokens of R, R^2, R - V, (R - V)^2 and 1, for returns R [T] and values V [T].

    Added up over all ranks they give the explained variance, 1 - var(R - V) / var(R).
    """
    returns, values = returns[loss_mask].double(), values[loss_mask].double()
    errors = returns - values
    count = returns.new_tensor(len(returns))
    return returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum(), count


VALUE_LOSS = Formula(
    function=clipped_value_loss,
    text="max((V - R)^2, (clip(V, V_old - clip_value, V_old + clip_value) - R)^2) / 2",
    source="OpenAI baselines (ppo2), arXiv:2005.12729",
    when='With `advantage.estimator = "gae"`.',
    settings={"clip_value": 0.2},
)
