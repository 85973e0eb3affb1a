"""Generate docs/algorithms.md, every algorithm a setting can select: `python -m docs.gen.algorithms_reference`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spmdrl.algo.advantage import ESTIMATORS
from spmdrl.algo.formula import Formula, LossKind
from spmdrl.algo.kl import KL_ESTIMATORS
from spmdrl.algo.losses import AGGREGATIONS, POLICY_LOSSES, VALUE_LOSS
from spmdrl.faults.text import say

_INTRODUCTION = """\
# Algorithms

<!-- Generated from the tables in spmdrl/algo/ by `make docs`; a test compares the two. -->

Every algorithm by the name that a setting gives it: its formula, where it comes from, its settings with their defaults,
and when to use it. [losses.md](losses.md) says how they are put together, [configuration.md](configuration.md) what the
settings mean, and [extending.md](extending.md) how to write your own. A setting that the chosen algorithm does not use
is refused.

Notation: R is the reward of a rollout in a prompt group of G; A the advantage of a token; d = logprob - old_logprob
and ratio = exp(d); D = logprob - ref_logprob; cov = (old_logprob - mean) (A - mean) over the loss tokens of the
mini-batch on all ranks; n the number of loss tokens of a rollout; V the critic's value before a token is sampled, that
is the return it expects, and V_old the same value before the step's updates.
"""

_ADVANTAGES = """\
One number per rollout, except for `reinforce_plus_plus` and `gae`, which have one per token, and `gigpo`, which has one
per turn of an episode. `advantage.whiten` whitens any of them over the whole step: (A - mean) / (std + 1e-6), with the
population's standard deviation over all response tokens of all ranks. An estimator marked "whitened" does so unless the
setting is false. In an episode r_j also holds the environment's reward of a turn, at the turn's last token, and R what
is left of the reward ([losses.md](losses.md#episodes))."""

_LOSSES = """\
Per token, before the divergence and the entropy are added. `gspo` and `gmpo` need one advantage per response: they are
refused together with `reinforce_plus_plus`, `gae` and `gigpo`. `kl_cov` needs `updates_per_step` above 1."""

_CRITIC = """\
Per token, where a token's return R is V_old plus its generalized advantage (with `critic.gae_lambda`), not whitened."""

_DIVERGENCES = """\
The divergence of the policy from the reference, in the loss (`loss.kl_coef`) or in the reward (`reward.kl_coef`), not
in both. Nothing is clamped."""

_AGGREGATIONS = """\
The factor of each token's loss. N is the number of loss tokens behind the optimizer step and S the number of rollouts
that have any, over all ranks and micro-batches; L is `rollout.max_response_tokens`."""


def reference() -> str:
    """Return the whole page."""
    parts = [
        _INTRODUCTION,
        *_section("Advantages: `advantage.estimator`", _ADVANTAGES, ESTIMATORS),
        *_section("Policy losses: `loss.kind`", _LOSSES, POLICY_LOSSES),
        *_section("The critic's loss: `[critic]`", _CRITIC, {"critic": VALUE_LOSS}),
        *_section("Divergence: `loss.kl_estimator`, `reward.kl_estimator`", _DIVERGENCES, KL_ESTIMATORS),
        *_section("Aggregation: `loss.aggregation`", _AGGREGATIONS, AGGREGATIONS),
    ]
    return "\n".join(parts)


def _section(title: str, text: str, formulas: Mapping[str, Formula]) -> Iterator[str]:
    yield f"## {title}\n\n{text}\n"
    yield "| name | formula | settings | source | when to use it |"
    yield "|---|---|---|---|---|"
    for name, formula in formulas.items():
        settings = {**formula.settings, **(formula.choice if isinstance(formula, LossKind) else {})}
        written = ", ".join(
            f"`{key} = {_toml(value)}`" if value is not None else f"`{key}`" for key, value in settings.items()
        )
        yield f"| `{name}` | {formula.text} | {written} | {formula.source} | {formula.when} |"
    yield ""


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


if __name__ == "__main__":
    say(reference().removesuffix("\n"))
