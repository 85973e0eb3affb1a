"""The objective of an update: the pure losses of `algo`, put together as the configuration says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch
from torch import Tensor

from spmdrl.algo.kl import kl_at_loss_tokens, log_ratio_penalty
from spmdrl.algo.losses import PolicyLoss, clipped_value_loss, mismatch, sft_loss, weighted_sum
from spmdrl.config import Config, CorrectionConfig, DistillConfig, LossConfig, MismatchConfig
from spmdrl.learn.coefficients import ENTROPY
from spmdrl.learn.correction import depths_of, importance_weights, mismatch_by_depth, mismatch_means
from spmdrl.model.policy import TokenLogprobs
from spmdrl.types import MicroBatch, TurnSpan, UserError
from spmdrl.user_code import argument_problems, call, load, with_metrics

# The policy loss that `loss.kind` names, one of `algo.formula.POLICY_LOSSES` or a function of the user's: that of
# logprobs [T] and entropy [T], both with grad, and the other columns of their micro-batch.
PolicyLossFunction = Callable[[Tensor, Tensor, MicroBatch], PolicyLoss]

# The columns that a function of the user's can ask for; ref_logprobs where a reference model is loaded.
COLUMNS = (
    "logprobs",
    "entropy",
    "old_logprobs",
    "rollout_logprobs",
    "ref_logprobs",
    "advantages",
    "rewards",
    "loss_mask",
    "cu_seqlens",
    "positions",
    "token_ids",
)


def policy_loss_function(cfg: LossConfig) -> PolicyLossFunction:
    """The loss with its settings. Raises ValueError when it cannot be loaded."""
    if cfg.formula is None:
        return partial(_users_loss, load(cfg.kind), cfg)
    return partial(_known_loss, cfg.formula.function, cfg.settings)


def _known_loss(
    function: Callable[..., PolicyLoss],
    settings: dict[str, Any],
    logprobs: Tensor,
    entropy: Tensor,
    micro_batch: MicroBatch,
) -> PolicyLoss:
    # Without old_logprobs the policy is the one that sampled, and the function makes every ratio exactly 1.
    columns = {"logprobs": logprobs, "old_logprobs": None, **micro_batch.columns}
    return call(function, columns, settings)


def _users_loss(
    function: Callable[..., Any], cfg: LossConfig, logprobs: Tensor, entropy: Tensor, micro_batch: MicroBatch
) -> PolicyLoss:
    """Call a function of the user's, which sees 0 outside loss_mask and whose values there are not used."""
    mask = micro_batch.loss_mask
    whole = {"old_logprobs": logprobs.detach(), **micro_batch.columns, "logprobs": logprobs, "entropy": entropy}
    columns = {
        name: torch.where(mask, whole[name], 0.0) if whole[name].is_floating_point() else whole[name]
        for name in COLUMNS
        if name in whole
    }
    per_token, means = with_metrics(call(function, columns, cfg.params))
    for name, values in {"the loss": per_token, **means}.items():
        if not isinstance(values, Tensor) or values.shape != mask.shape:
            found = list(values.shape) if isinstance(values, Tensor) else type(values).__name__
            raise UserError(
                f'loss.kind = "{cfg.kind}" returned {found} for {name}; return a number for each token, '
                f"{list(mask.shape)}"
            )
    ratio = (columns["logprobs"] - columns["old_logprobs"]).detach().exp()
    means = {name: values.detach().float() for name, values in means.items()}
    return PolicyLoss(torch.where(mask, per_token, 0.0), torch.zeros_like(mask), ratio, means)


def policy_loss_problems(cfg: Config) -> Iterator[str]:
    """Try a loss of the user's on five tokens, and yield a sentence for what is wrong with it."""
    if not cfg.loss.is_custom:
        return
    setting = f'loss.kind = "{cfg.loss.kind}"'
    try:
        function = load(cfg.loss.kind)
    except ValueError as error:
        yield f"{setting}: {error}"
        return
    columns = [name for name in COLUMNS if name != "ref_logprobs" or cfg.has_reference]
    if sentences := list(argument_problems(function, columns, cfg.loss.params)):
        yield from (f"{setting}: {sentence}" for sentence in sentences)
        return
    logprobs, entropy = torch.full((2, 5), -1.0, requires_grad=True)
    try:
        loss = _users_loss(function, cfg.loss, logprobs, -entropy, example_micro_batch(cfg)).per_token
        (gradient,) = torch.autograd.grad(loss.sum(), logprobs)
    except UserError as error:
        yield str(error)
    except Exception as error:  # the function is the user's: calling it can raise anything
        yield f"{setting} does not work: {type(error).__name__}: {error}"
    else:
        if not (loss.isfinite().all() and gradient.isfinite().all()):
            yield f"{setting} gives a loss or a gradient that is not finite on an easy example"


def example_micro_batch(cfg: Config) -> MicroBatch:
    """Five tokens of two sequences, to try functions of the user's on."""
    values = torch.linspace(-1.0, 1.0, 5)
    return MicroBatch(
        token_ids=torch.arange(5),
        positions=torch.tensor([0, 1, 0, 1, 2]),
        cu_seqlens=torch.tensor([0, 2, 5], dtype=torch.int32),
        loss_mask=torch.tensor([False, True, False, True, True]),
        loss_weights=torch.ones(5),
        rollout_logprobs=values - 2.0,
        rewards=values.double(),
        baseline_rewards=values.double(),
        advantages=values,
        old_logprobs=values - 2.0,
        ref_logprobs=values - 2.0 if cfg.has_reference else None,
        sequence_index=(0, 1),
        sequence_segment=(0, 0),
        turns=((TurnSpan(number=0, start=1, end=2),), (TurnSpan(number=0, start=1, end=3),)),
        prior_turn_rewards=(0.0, 0.0),
    )


DRIFT = "update/k3_old_nats"  # KL(policy that sampled || policy): how far the step's updates have moved it so far
NO_CORRECTION, USUAL_MISMATCH = CorrectionConfig(), MismatchConfig()


@dataclass(frozen=True, slots=True)
class Objective:
    """The loss of one micro-batch, with per-token values to report."""

    loss_sum: Tensor  # [] float32, with grad; summed over micro-batches and ranks it is the loss
    means: dict[str, Tensor] = field(default_factory=dict)  # per-token values [T], to be averaged over loss tokens
    peaks: dict[str, Tensor] = field(default_factory=dict)  # per-token values [T] >= 0, to be maximised
    worst: dict[str, Tensor] = field(default_factory=dict)  # per-token values [T]; the greatest in size are reported
    # [T] >= 0, whose effective sample size is reported, over the tokens where the second is True, [T].
    weights: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    # Per-token values [T], to be averaged over other tokens than the loss tokens: those where the second is True, [T].
    elsewhere: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    expert_loads: Tensor | None = None  # [L, E], tokens of each expert
    per_token: Tensor | None = None  # [T], no grad; the loss of the loss tokens, before it is weighed


class ObjectiveFunction(Protocol):
    """Any loss that `update` can minimise."""

    def __call__(self, outputs: Any, micro_batch: MicroBatch, /) -> Objective:
        """Compute the objective from what the model's forward returned for the micro-batch."""
        ...


class PolicyObjective:
    """Corrected policy loss + kl_coef KL(policy || reference) - entropy_coef entropy, per loss token; and the cross
    entropy of what environments returned, and the divergence from teachers, where those have weights."""

    def __init__(
        self,
        loss: LossConfig,
        coefficients: Mapping[str, float] = MappingProxyType({}),
        correction: CorrectionConfig = NO_CORRECTION,
        mismatch: MismatchConfig = USUAL_MISMATCH,
        distill: DistillConfig | None = None,
        function: Callable[..., Any] | None = None,
        longest_tokens: int = 0,
    ) -> None:
        """`coefficients` are those of `coefficients.py`, which may change from step to step. `function` is a policy
        loss in the place of the one that `loss` names. Sequences have up to `longest_tokens`."""
        self._loss, self._coefficients, self._correction, self._mismatch = loss, coefficients, correction, mismatch
        self._distill, self._depths = distill, depths_of(longest_tokens)
        self._policy_loss = policy_loss_function(loss) if function is None else partial(_users_loss, function, loss)

    def __call__(self, outputs: TokenLogprobs, micro_batch: MicroBatch) -> Objective:
        mask, logprobs = micro_batch.loss_mask, outputs.logprobs
        policy = self._policy_loss(logprobs, outputs.entropy, micro_batch)
        now = logprobs.detach()
        old = now if micro_batch.old_logprobs is None else micro_batch.old_logprobs
        # What the ratio calls old may be the engine's; the mismatch is always between trainer and engine.
        trainers = now if self._correction.old == "rollout" else old
        drift = mismatch(trainers, micro_batch.rollout_logprobs, mask)
        weighed = importance_weights(drift.mismatch, now, micro_batch, self._correction)
        per_token = policy.per_token * weighed.weights
        means = {
            "update/clip_fraction": policy.clipped.float(),
            "update/entropy_nats": outputs.entropy.detach(),
            "update/ratio": policy.ratio.detach(),
            "update/k1_old_nats": old - now,
            DRIFT: kl_at_loss_tokens(old, now, mask, estimator="k3"),
            **mismatch_means(drift, threshold_nats=self._mismatch.threshold_nats),
            **weighed.means,
            **{f"loss/{name}": values for name, values in policy.means.items()},
        }
        elsewhere = mismatch_by_depth(drift, micro_batch, self._depths)
        if (after := micro_batch.after_refit) is not None:
            elsewhere["mismatch/mean_abs_nats_after_refit"] = drift.mismatch.abs(), mask & after
        if (disagreement := outputs.router_disagreement) is not None:
            has_route = mask & (disagreement >= 0)
            whose = "mismatch" if self._correction.router_replay == "R3" else "update"
            elsewhere[f"{whose}/router_disagree_fraction"] = disagreement, has_route
            means[f"{whose}/router_replayed_fraction"] = has_route.float()
        if micro_batch.ref_logprobs is not None:
            kl = kl_at_loss_tokens(
                logprobs,
                micro_batch.ref_logprobs,
                mask,
                estimator=self._loss.kl_estimator,
                rollout_logprobs=micro_batch.rollout_logprobs if self._loss.kl_importance_ratio else None,
            )
            if self._loss.kl_coef:  # else the reference is the reward's
                per_token = per_token + self._loss.kl_coef * kl
            means[f"update/{self._loss.kl_estimator}_ref_nats"] = kl.detach()
        if self._loss.log_ratio_coef:
            penalty = log_ratio_penalty(logprobs, micro_batch.rollout_logprobs, mask)
            per_token = per_token + self._loss.log_ratio_coef * penalty
            means["update/log_ratio_squared"] = penalty.detach()
        if entropy_coef := self._coefficients.get(ENTROPY, self._loss.entropy_coef):
            per_token = per_token - entropy_coef * outputs.entropy
        if (imbalance := outputs.expert_imbalance) is not None:
            per_token = per_token + self._loss.expert_balance_coef * imbalance
            means["experts/imbalance"] = imbalance.detach()
        loss_sum = weighted_sum(per_token, micro_batch.loss_weights)
        if (weights := micro_batch.environment_weights) is not None:
            said = weights != 0
            cross_entropy = sft_loss(logprobs, said)
            loss_sum = loss_sum + weighted_sum(cross_entropy, weights)
            elsewhere["loss/environment_nats"] = cross_entropy.detach(), said
        if self._distill is not None and outputs.divergence is not None:
            loss_sum = loss_sum + distilled(outputs.divergence, micro_batch)
            elsewhere |= distill_values(outputs.divergence, micro_batch, self._distill)
        return Objective(
            loss_sum=loss_sum,
            means=means,
            elsewhere=elsewhere,
            peaks={"update/ratio_max_deviation": (policy.ratio.detach() - 1).abs()},
            worst={"mismatch/max_abs_nats": drift.mismatch},
            expert_loads=outputs.expert_loads,
            per_token=per_token.detach(),
            weights={
                "mismatch/effective_fraction": (drift.mismatch.double().exp(), mask),
                **({"correction/effective_fraction": (weighed.weights, mask)} if weighed.means else {}),
            },
        )


def distilled(divergence: Tensor, micro_batch: MicroBatch) -> Tensor:
    """[] float32: the divergences [T] of the distilled tokens, by their weights."""
    assert micro_batch.distill_weights is not None
    return weighted_sum(divergence, micro_batch.distill_weights)


def distill_values(
    divergence: Tensor, micro_batch: MicroBatch, distill: DistillConfig
) -> dict[str, tuple[Tensor, Tensor]]:
    """Divergences [T] to report, and where [T] they are averaged: over all tokens with one of that kind, and by teacher
    where there are several."""
    values, found = divergence.detach(), dict[str, tuple[Tensor, Tensor]]()
    for place, (one, kind) in enumerate(zip(distill.by_place, distill.divergences, strict=True)):
        where = micro_batch.taught_by(place).to(values.device)
        for whose in ("", f"_{one.model}") if distill.teachers else ("",):
            before = found.get(name := f"distill/{kind}_nats{whose}")
            found[name] = values, where if before is None else where | before[1]
    return found


@dataclass(frozen=True, slots=True)
class SftObjective:
    """Cross-entropy of the responses, by its coefficient, and the divergence from teachers, where there are some."""

    coef: float = 1.0
    distill: DistillConfig | None = None

    def __call__(self, outputs: TokenLogprobs, micro_batch: MicroBatch) -> Objective:
        per_token = sft_loss(outputs.logprobs, micro_batch.loss_mask)
        loss_sum = self.coef * weighted_sum(per_token, micro_batch.loss_weights)
        means, elsewhere = {"update/entropy_nats": outputs.entropy.detach()}, {}
        if self.distill is not None and outputs.divergence is not None:
            loss_sum = loss_sum + distilled(outputs.divergence, micro_batch)
            means["update/cross_entropy_nats"] = per_token.detach()
            elsewhere = distill_values(outputs.divergence, micro_batch, self.distill)
        return Objective(loss_sum=loss_sum, means=means, elsewhere=elsewhere)


@dataclass(frozen=True, slots=True)
class ValueObjective:
    """Half the squared error of a critic's values, clipped."""

    clip_value: float  # in units of the reward

    def __call__(self, values: Tensor, micro_batch: MicroBatch) -> Objective:
        old, returns = micro_batch.values, micro_batch.returns
        assert old is not None and returns is not None, "the batch has not been through add_advantages"
        loss = clipped_value_loss(values, old, returns, micro_batch.loss_mask, clip_value=self.clip_value)
        return Objective(
            loss_sum=weighted_sum(loss.per_token, micro_batch.loss_weights),
            means={"critic/clip_fraction": loss.clipped.float()},
        )
