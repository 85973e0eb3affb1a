"""Tables about the algorithm, of a run or of a data source: advantages, the policy loss, and corrections."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, ValidationError

from spmdrl.algo.formula import ESTIMATORS, POLICY_LOSSES, UNKNOWN_ESTIMATOR, Estimator, LossKind
from spmdrl.config.base import (
    Count,
    Fraction,
    MissingSetting,
    NonNegative,
    Positive,
    Section,
    SectionT,
    fields_only,
    is_set,
    rule,
    unused_settings,
    with_defaults,
)
from spmdrl.config.errors import field_mistakes

# Settings that only some estimators, or only some losses, have.
OF_ESTIMATORS = {"params"} | {name for one in ESTIMATORS.values() for name in one.settings}
OF_LOSSES = {"params"} | {name for one in POLICY_LOSSES.values() for name in (*one.settings, *one.cov_selection)}


def _known(name: str, names: Iterable[str]) -> str:
    """Return a name that is built in or names code of the user's. Raises ValueError for others."""
    if name not in names and ":" not in name:
        known = ", ".join(f'"{name}"' for name in names)
        raise ValueError(f'is not known; use one of {known}, "package.module:function" or "path/file.py:function"')
    return name


class AdvantageConfig(Section):
    estimator: Annotated[str, AfterValidator(partial(_known, names=ESTIMATORS))] = "grpo"
    """`grpo`, `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `gae`, `max_rl` (rewards of 0 or more),
    `gdpo` (of several terms), `opo`, `remax` (which samples one more response for each prompt, greedily), `pass_at_k`,
    `gigpo`, `grpo_by_role` and `hierarchical_grpo` (of episodes) or `none` (rewards are measured, and not trained on),
    see `docs/algorithms.md`; or a function of yours, `package.module:function` or `path/file.py:function`, see
    `docs/extending.md`."""
    divide_by_std: bool | None = None
    """`grpo`, `gigpo`, `grpo_by_role` and `hierarchical_grpo` only: divide by the group's standard deviation. Unset:
    true; `false` is Dr.GRPO."""
    discount: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """Discount of a later reward: `reinforce_plus_plus` and `gae` for each token before it, unset 1; `gigpo` for each
    turn before it, unset 0.95."""
    step_weight: NonNegative | None = None
    """`gigpo` only: weight of the comparison of turns that began in the same state. Unset: 1."""
    gae_lambda: Fraction | None = None
    """`gae` only: 1 relies on the rewards, 0 on the critic's value one token later. Unset: 0.95."""
    k: Count | None = None
    """`pass_at_k` only: rollouts that may try, fewer than `rollout.group_size`. Unset: 4."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for a function of yours."""
    whiten: bool | None = None
    """Make advantages (A - mean) / (std + 1e-6), with the mean and the population's standard deviation of the whole
    step, in which each response token counts once. Unset: true for `gae`, `gdpo` and the two `reinforce_plus_plus`, as
    in their sources."""

    @property
    def is_custom(self) -> bool:
        """True when the estimator is a function of the user's."""
        return ":" in self.estimator

    @property
    def formula(self) -> Estimator:
        """The estimator; for a function of the user's only what is known before it is loaded."""
        return ESTIMATORS.get(self.estimator, UNKNOWN_ESTIMATOR)

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments of the estimator's function."""
        return dict(self.params) if self.is_custom else with_defaults(self, self.formula.settings)

    @property
    def compares_with_greedy(self) -> bool:
        """True when each prompt group has one more response, sampled greedily and not trained on."""
        return "greedy_rewards" in self.formula.needs

    @property
    def compares_roles(self) -> bool:
        """True when the turns of a role are compared with those of the same role."""
        return "turn_roles" in self.formula.needs

    @property
    def whitens(self) -> bool:
        """True when advantages are whitened over the global batch."""
        return self.formula.whiten if self.whiten is None else self.whiten


@rule(AdvantageConfig)
def settings_belong_to_the_estimator(advantage: AdvantageConfig) -> Iterator[str]:
    used = ["params"] if advantage.is_custom else advantage.formula.settings
    yield from unused_settings(advantage, sorted(OF_ESTIMATORS - set(used)), f'estimator = "{advantage.estimator}"')


class LossConfig(Section):
    kind: Annotated[str, AfterValidator(partial(_known, names=POLICY_LOSSES))] = "ppo"
    """`ppo`, `gspo`, `cispo`, `gmpo`, `sapo`, `clip_cov`, `kl_cov`, `dppo_tv` or `dppo_kl`, see `docs/algorithms.md`;
    or a function of yours, `package.module:function` or `path/file.py:function`, see `docs/extending.md`."""
    clip_low: NonNegative | None = None
    """Lower bound of the ratio: 1 - clip_low, or exp(-clip_low) under `gmpo`. Unset: the default of `kind`, as
    for all settings that only some kinds have."""
    clip_high: NonNegative | None = None
    """Upper bound of the ratio: 1 + clip_high, or exp(clip_high) under `gmpo`."""
    dual_clip: Annotated[float, Field(gt=1.0, allow_inf_nan=False)] | None = None
    """`ppo` only: for negative advantages the loss is bounded by this times -advantage."""
    tau_positive: Positive | None = None
    """`sapo` only: steepness of the gate for positive advantages."""
    tau_negative: Positive | None = None
    """`sapo` only: steepness of the gate for the other advantages."""
    divergence_threshold: Positive | None = None
    """`dppo_tv` and `dppo_kl` only: the distance from the engine's policy, at a token, beyond which no update pushes
    it; a difference of probabilities, or nats. Unset: 0.15 and 0.05."""
    cov_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """`clip_cov` and `kl_cov` only: share of the mini-batch's tokens that are chosen, at least one."""
    cov_low: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """`clip_cov` only: the covariance above which tokens may be left out."""
    cov_high: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """`clip_cov` only: the covariance below which tokens may be left out."""
    cov_kl_coef: Positive | None = None
    """`kl_cov` only: weight of the divergence from the policy that sampled, at the chosen tokens."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments for a function of yours."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = "token_mean"
    """Divisor of the per-token losses, always counted over the global batch: see `docs/losses.md`."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence to the reference model in the loss; above 0 the reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence. k1 has no expected gradient on-policy and also needs `allow_k1_loss`."""
    allow_k1_loss: bool = False
    """Use k1 as a loss although its expected on-policy gradient is zero."""
    kl_importance_ratio: bool = False
    """Multiply the divergence of the loss by exp(n - b), with its gradient, so that it stays unbiased for tokens that
    other weights sampled, or another program; k1 or k3 only."""
    log_ratio_coef: NonNegative = 0.0
    """Weight of (n - b)^2, which pulls each token's log-probability n to b, that of the policy that sampled it."""
    expert_balance_coef: NonNegative = 0.0
    """Weight of a loss for the balance of a mixture's experts: of each token the sum over experts of the share that its
    router gives them, by their load in the token's sequence over the mean load (DeepSeek-V3, arXiv:2412.19437: 0.0001).
    See `docs/agreement.md`."""
    entropy_coef: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Weight of the entropy bonus; above 0 favours entropy."""
    entropy_target_nats: Positive | None = None
    """After a step whose mean entropy was below this, raise `entropy_coef`; after other steps, lower it, down to 0.
    Unset: `entropy_coef` is fixed."""
    entropy_coef_change: Positive | None = None
    """`entropy_target_nats` only: the change of `entropy_coef` after a step. Unset: 0.005."""
    environment_coef: NonNegative = 0.0
    """Weight of the cross entropy of what the environment says after each turn but a trajectory's last, averaged over
    those tokens (ECHO, arXiv:2605.24517). 0: the policy does not learn to predict its environment."""
    updates_per_step: Count = 1
    """Optimizer steps on each step's rollouts, each on its own share of the prompts."""
    stop_kl_nats: Positive | None = None
    """`updates_per_step` above 1 only: skip the rest of a step's updates once the mean k3 estimate of KL(policy that
    sampled || policy) over a mini-batch is above this. Unset: none is skipped."""

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments of the loss function."""
        return dict(self.params) if self.formula is None else with_defaults(self, self.formula.settings)

    @property
    def weighting(self) -> dict[str, Any]:
        """Settings that say what a token counts in the loss of its mini-batch."""
        return {"aggregation": self.aggregation, "environment_coef": self.environment_coef}

    @property
    def cov_selection(self) -> dict[str, Any]:
        """Settings that select tokens over the whole mini-batch; empty when the loss selects none."""
        return {} if self.formula is None else with_defaults(self, self.formula.cov_selection)

    @property
    def is_custom(self) -> bool:
        """True when the loss is a function of the user's."""
        return ":" in self.kind

    @property
    def compares_with_engine(self) -> bool:
        """True when the ratio is to the policy that sampled, as the engine reported it, and not to the trainer's."""
        return self.formula is not None and "rollout_logprobs" in self.formula.needs

    @property
    def formula(self) -> LossKind | None:
        """The loss in the table of losses; None when it is the user's."""
        return None if self.is_custom else POLICY_LOSSES[self.kind]


@rule(LossConfig)
def settings_belong_to_the_loss(loss: LossConfig) -> Iterator[str]:
    used = ["params"] if loss.formula is None else [*loss.formula.settings, *loss.formula.cov_selection]
    yield from unused_settings(loss, sorted(OF_LOSSES - set(used)), f'kind = "{loss.kind}"')


_NO_DRIFT = "the policy has not moved before a step's only update"


@rule(LossConfig)
def stop_kl_needs_several_updates(loss: LossConfig) -> Iterator[str]:
    if loss.stop_kl_nats is not None and loss.updates_per_step == 1:
        yield f"stop_kl_nats has no meaning with updates_per_step = 1: {_NO_DRIFT}; remove it"


@rule(LossConfig)
def off_policy_losses_need_several_updates(loss: LossConfig) -> Iterator[str]:
    if loss.formula is not None and loss.formula.off_policy_only and loss.updates_per_step == 1:
        yield (
            f'kind = "{loss.kind}" has nothing to hold back with updates_per_step = 1: {_NO_DRIFT}; raise '
            "updates_per_step or use another kind"
        )


@rule(LossConfig)
def entropy_coef_change_needs_a_target(loss: LossConfig) -> Iterator[str]:
    if loss.entropy_coef_change is not None and loss.entropy_target_nats is None:
        yield "entropy_coef_change has no meaning without entropy_target_nats; set both or remove it"


@rule(LossConfig)
def entropy_target_needs_a_bonus(loss: LossConfig) -> Iterator[str]:
    if loss.entropy_target_nats is not None and loss.entropy_coef < 0:
        yield (
            f"entropy_coef = {loss.entropy_coef} lowers the entropy and entropy_target_nats raises it; set "
            "entropy_coef to 0 or more, where the coefficient starts"
        )


@rule(LossConfig)
def cov_low_is_below_cov_high(loss: LossConfig) -> Iterator[str]:
    if loss.kind == "clip_cov" and loss.cov_selection["cov_low"] >= loss.cov_selection["cov_high"]:
        yield (
            f"cov_low = {loss.cov_selection['cov_low']:g} leaves no covariance below cov_high = "
            f"{loss.cov_selection['cov_high']:g}; set it lower"
        )


@rule(LossConfig)
def k1_loss_is_allowed_by_name(loss: LossConfig) -> Iterator[str]:
    if loss.kl_coef > 0 and loss.kl_estimator == "k1" and not (loss.allow_k1_loss or loss.kl_importance_ratio):
        yield (
            'kl_estimator = "k1" has zero expected gradient on-policy, so as a loss it only adds noise; '
            'set kl_estimator = "k3" (or "k2"), or allow_k1_loss = true if that is what you want'
        )


@rule(LossConfig)
def importance_ratio_needs_an_unbiased_divergence(loss: LossConfig) -> Iterator[str]:
    if loss.kl_importance_ratio and loss.kl_coef == 0:
        yield "kl_importance_ratio = true has no meaning with kl_coef = 0; set kl_coef above 0, or remove it"
    elif loss.kl_importance_ratio and loss.kl_estimator == "k2":
        yield (
            'kl_importance_ratio = true weighs an unbiased estimate, which kl_estimator = "k2" is not; set that to '
            '"k3", or remove kl_importance_ratio'
        )


@rule(LossConfig)
def dual_clip_is_beyond_the_clip(loss: LossConfig) -> Iterator[str]:
    # Kinds that have no dual_clip refuse it by another rule.
    if loss.kind == "ppo" and loss.dual_clip is not None and loss.dual_clip <= 1 + loss.settings["clip_high"]:
        yield (
            f"dual_clip = {loss.dual_clip} is not above 1 + clip_high = {1 + loss.settings['clip_high']:g}, so it "
            "would undo the clip; set it higher (3 is usual)"
        )


# Tables about the mismatch between trainer and engine: how it is corrected, and its limits.


class CorrectionConfig(Section):
    kind: Literal["none", "tis", "icepop", "mis"] = "none"
    """Weigh the policy loss by exp(o - b), bounded, where trainer and engine disagree: `tis` truncates the weight,
    `icepop` drops tokens whose weight is out of bounds, `mis` does what `mode` says. See `docs/agreement.md`."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """The weight of the token, of the whole response, or the geometric mean over its tokens. `gspo` and `gmpo` need one
    of the last two."""
    mode: Literal["truncate", "clip", "mask"] | None = None
    """`mis` only, and required there: weights beyond the bounds become the upper bound (`truncate`), the nearer bound
    (`clip`), or 0 (`mask`)."""
    low: Positive | None = None
    """Lower bound of the weight, where there is one. Unset: 0.5."""
    high: Positive | None = None
    """Upper bound of the weight. Unset: 2, and 5 for `icepop`."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the global batch; takes a pass for the old log-probabilities."""
    reject: Literal["none", "token", "sequence", "geometric"] = "none"
    """Leave out tokens or responses whose weight at that level is beyond `reject_low` or `reject_high`, as if they had
    not been sampled; takes a pass for the old log-probabilities. Not `token` with `gspo` or `gmpo`."""
    reject_low: Positive | None = None
    """Lower bound of `reject`. Unset: 0.5."""
    reject_high: Positive | None = None
    """Upper bound of `reject`. Unset: 2."""
    veto_below: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Leave out a rollout when the trainer gives one of its tokens less than this times the engine's probability (1e-4
    is usual); takes a pass for the old log-probabilities."""
    opsm_delta_nats: NonNegative | None = None
    """Off-policy sequence masking: drop rollouts of negative advantage whose mean b - n is above this."""
    router_replay: Literal["none", "R2", "R3"] = "none"
    """The experts that tokens go to in a step's updates: `none`, those that the policy's routers choose then; `R2`,
    those that they chose in the pass before the first update; `R3`, those that the engine chose while sampling. Routers
    weigh them by their own scores, and learn. See `docs/agreement.md`."""
    old: Literal["trainer", "rollout"] = "trainer"
    """Source of the ratio's old log-probabilities. `rollout` takes the engine's, which saves the pass that computes
    them; for engines that agree with the trainer."""


@rule(CorrectionConfig)
def weights_need_a_kind(correction: CorrectionConfig) -> Iterator[str]:
    if correction.kind == "none":
        names = ("level", "mode", "low", "high", "batch_normalize")
        yield from unused_settings(correction, names, 'kind = "none", which weighs nothing')


@rule(CorrectionConfig)
def mode_belongs_to_mis(correction: CorrectionConfig) -> Iterator[str]:
    if correction.kind == "mis" and correction.mode is None:
        yield 'kind = "mis" needs a mode; set it to "truncate", "clip" or "mask"'
    if correction.kind in ("tis", "icepop"):
        yield from unused_settings(correction, ("mode",), f'kind = "{correction.kind}", which has one of its own')


@rule(CorrectionConfig)
def icepop_weighs_tokens(correction: CorrectionConfig) -> Iterator[str]:
    if correction.kind == "icepop":
        instead = 'kind = "icepop", which weighs tokens: set kind = "mis" with mode = "mask" instead'
        yield from unused_settings(correction, ("level",), instead)


@rule(CorrectionConfig)
def truncation_has_no_lower_bound(correction: CorrectionConfig) -> Iterator[str]:
    if correction.kind == "tis" or (correction.kind == "mis" and correction.mode == "truncate"):
        yield from unused_settings(correction, ("low",), "weights that are truncated, which have no lower bound")


@rule(CorrectionConfig)
def reject_bounds_need_reject(correction: CorrectionConfig) -> Iterator[str]:
    if correction.reject == "none":
        yield from unused_settings(correction, ("reject_low", "reject_high"), 'reject = "none"')


@rule(CorrectionConfig)
def bounds_enclose_one(correction: CorrectionConfig) -> Iterator[str]:
    for name in ("low", "high", "reject_low", "reject_high"):
        if not is_set(correction, name):
            continue
        bound, is_lower = getattr(correction, name), name.endswith("low")
        if bound > 1 if is_lower else bound < 1:
            yield (
                f"{name} = {bound:g} is beyond 1, the weight where engine and trainer agree, so it would bind "
                f"everywhere; set it to {'1 or less' if is_lower else '1 or more'}"
            )


@rule(CorrectionConfig)
def corrections_need_a_mismatch(correction: CorrectionConfig) -> Iterator[str]:
    for name in ("kind", "reject", "veto_below"):
        if correction.old == "rollout" and is_set(correction, name):
            yield (
                f'old = "rollout" takes what the engine says for what the trainer says, so there is no mismatch left '
                f'for {name} to correct; remove {name}, or set old = "trainer"'
            )


class MismatchLimits(Section):
    mean_abs_nats: Positive | None = None
    """Highest mean of |o - b| over the loss tokens."""
    max_abs_nats: Positive | None = None
    """Highest |o - b| of any token."""
    k3_nats: Positive | None = None
    """Highest estimate of KL(engine || trainer)."""
    beyond_fraction: Fraction | None = None
    """Highest share of tokens with |o - b| above `mismatch.threshold_nats`."""
    effective_fraction: Fraction | None = None
    """Lowest effective sample size, as a share of the tokens."""


class MismatchConfig(Section):
    threshold_nats: Positive = 0.1
    """Tokens with |o - b| above this are counted in `mismatch/beyond_fraction`."""
    warn: MismatchLimits = MismatchLimits()
    """Print a line when a step is beyond one of these."""
    stop: MismatchLimits = MismatchLimits()
    """End the run, before weights change, when an update is beyond one of these."""


# The algorithm of a data source: its own advantage, loss and correction, where they are other than the run's.


OTHER_SOURCES = "others"  # in metrics, the sources that have the run's algorithm


class SourceAlgorithm(Section):
    weight: Positive = 1.0
    """Weight of this source's loss: the step's is the sum of those of all algorithms, each with its own denominator."""
    advantage: dict[str, Any] = Field(default_factory=dict)
    """Settings of `[advantage]` that are others for this source."""
    loss: dict[str, Any] = Field(default_factory=dict)
    """Settings of `[loss]` that are others for this source. With another `kind`, what only some kinds have begins with
    that kind's defaults, and so it is with `advantage.estimator`, `correction.kind` and `correction.reject`."""
    correction: dict[str, Any] = Field(default_factory=dict)
    """Settings of `[correction]` that are others for this source."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How the rollouts of some data sources are trained on; these are compared, whitened and counted by themselves."""

    advantage: AdvantageConfig
    loss: LossConfig
    correction: CorrectionConfig
    name: str | None = None  # in metrics: the task of its source, or OTHER_SOURCES; None where it is that of no source
    weight: float = 1.0

    def changed_by(self, source: SourceAlgorithm, name: str) -> Algorithm:
        """Return the algorithm of a source. Raises MissingSetting where a setting of its own is wrong."""
        return Algorithm(
            _changed(self.advantage, source.advantage),
            _changed(self.loss, source.loss),
            _changed(self.correction, source.correction),
            name,
            source.weight,
        )


# The settings that only some values of another have.
_BELONG_TO: dict[tuple[type[Section], str], set[str]] = {
    (AdvantageConfig, "estimator"): OF_ESTIMATORS,
    (LossConfig, "kind"): OF_LOSSES,
    (CorrectionConfig, "kind"): {"level", "mode", "low", "high", "batch_normalize"},
    (CorrectionConfig, "reject"): {"reject_low", "reject_high"},
}
# The settings that a whole run has, each with a reason.
_ONE_UPDATE = "an update is one of all sources"
_ENTROPY = "the coefficient follows the entropy of all sources"
_SHARED: dict[tuple[type[Section], str], str] = {
    (LossConfig, "updates_per_step"): _ONE_UPDATE,
    (LossConfig, "stop_kl_nats"): _ONE_UPDATE,
    (LossConfig, "entropy_target_nats"): _ENTROPY,
    (LossConfig, "entropy_coef_change"): _ENTROPY,
    (CorrectionConfig, "router_replay"): "one pass records the routes of all sources",
    (CorrectionConfig, "old"): "one pass computes the log-probabilities of all sources",
}


def _changed(section: SectionT, changes: Mapping[str, Any]) -> SectionT:
    """Return the table with these settings; those that belonged to a choice which they change are as by default."""
    kind = type(section)
    chosen = [(names, choice) for (table, choice), names in _BELONG_TO.items() if table is kind and choice in changes]
    dropped = {name for names, choice in chosen if changes[choice] != getattr(section, choice) for name in names}
    values = {name: getattr(section, name) for name in kind.model_fields.keys() - dropped}
    try:
        with fields_only():
            return kind.model_validate(values | dict(changes))
    except ValidationError as error:
        raise MissingSetting("data.sources") from error


def override_problems(source: SourceAlgorithm, run: Algorithm) -> Iterator[str]:
    """Yield a sentence for each setting of a source's own that cannot be, named from its table on."""
    tables = ((run.advantage, "advantage"), (run.loss, "loss"), (run.correction, "correction"))
    for section, table in tables:
        kind, changes = type(section), getattr(source, table)
        for name in changes:
            if reason := _SHARED.get((kind, name)):
                yield f"{table}.{name} cannot differ between sources: {reason}; set it in [{table}]"
        try:
            with fields_only():
                kind.model_validate(changes)
        except ValidationError as error:
            yield from (f"{table}.{mistake.sentence}" for mistake in field_mistakes(kind, changes, error))
