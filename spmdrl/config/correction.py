"""Tables about the mismatch between trainer and engine: how it is corrected, and its limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from spmdrl.config.base import Fraction, NonNegative, Positive, Section, idle_settings, is_set, rule


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
    old: Literal["trainer", "rollout"] = "trainer"
    """Source of the ratio's old log-probabilities. `rollout` takes the engine's, which saves the pass that computes
    them; for engines that agree with the trainer."""


@rule(CorrectionConfig)
def weights_need_a_kind(correction: CorrectionConfig) -> Iterator[str]:
    if correction.kind == "none":
        names = ("level", "mode", "low", "high", "batch_normalize")
        yield from idle_settings(correction, names, 'kind = "none", which weighs nothing')


@rule(CorrectionConfig)
def mode_belongs_to_mis(correction: CorrectionConfig) -> Iterator[str]:
    if correction.kind == "mis" and correction.mode is None:
        yield 'kind = "mis" needs a mode; set it to "truncate", "clip" or "mask"'
    if correction.kind in ("tis", "icepop"):
        yield from idle_settings(correction, ("mode",), f'kind = "{correction.kind}", which has one of its own')


@rule(CorrectionConfig)
def icepop_weighs_tokens(correction: CorrectionConfig) -> Iterator[str]:
    if correction.kind == "icepop":
        instead = 'kind = "icepop", which weighs tokens: set kind = "mis" with mode = "mask" instead'
        yield from idle_settings(correction, ("level",), instead)


@rule(CorrectionConfig)
def truncation_has_no_lower_bound(correction: CorrectionConfig) -> Iterator[str]:
    if correction.kind == "tis" or (correction.kind == "mis" and correction.mode == "truncate"):
        yield from idle_settings(correction, ("low",), "weights that are truncated, which have no lower bound")


@rule(CorrectionConfig)
def reject_bounds_need_reject(correction: CorrectionConfig) -> Iterator[str]:
    if correction.reject == "none":
        yield from idle_settings(correction, ("reject_low", "reject_high"), 'reject = "none"')


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
