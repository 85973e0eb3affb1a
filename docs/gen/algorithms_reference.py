"""Generate docs/algorithms.md, every algorithm a setting can select: `python -m docs.gen.algorithms_reference`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spmdrl.algo.formula import ESTIMATORS, POLICY_LOSSES, Described, LossKind
from spmdrl.algo.kl import KL_ESTIMATORS, LOSS_TERMS
from spmdrl.algo.losses import AGGREGATIONS, VALUE_LOSS
from spmdrl.faults.text import say

_INTRODUCTION = """\
# Algorithms

<!-- Generated from the tables in spmdrl/algo/ by `make docs`; a test compares the two. -->

Every algorithm by the name that a setting gives it: its formula, where it comes from, its settings with their defaults,
and when to use it. [losses.md](losses.md) says how they are put together, [configuration.md](configuration.md) what the
settings mean, and [extending.md](extending.md) how to write your own. A setting that the chosen algorithm does not use
is refused. A data source can have its own ([distillation.md](distillation.md#mathematics-rewarded-style-distilled)).

Notation: R is the reward of a rollout in a prompt group of G; A the advantage of a token; d = logprob - old_logprob
and ratio = exp(d); s = logprob - rollout_logprob; D = logprob - ref_logprob; cov = (old_logprob - mean) (A - mean) over
the loss tokens of the mini-batch on all ranks; n the number of loss tokens of a rollout; V the critic's value before a
token is sampled, that is the return it expects, and V_old the same value before the step's updates.
"""

_ADVANTAGES = """\
One number per rollout, except for `reinforce_plus_plus` and `gae`, which have one per token, and `gigpo`,
`grpo_by_role` and `hierarchical_grpo`, which have one per turn of an episode. `advantage.whiten` whitens any of them
over the whole step: (A - mean) / (std + 1e-6), with the population's standard deviation over all response tokens of all
ranks. An estimator marked "whitened" does so unless the setting is false. In an episode r_j also holds the
environment's reward of a turn, at the turn's last token, and R what is left of the reward
([losses.md](losses.md#episodes))."""

_LOSSES = """\
Per token, before the divergence and the entropy are added. `gspo` and `gmpo` need one advantage per response: they
are refused together with `reinforce_plus_plus`, `gae`, `gigpo`, `grpo_by_role` and `hierarchical_grpo`. `kl_cov`
needs `updates_per_step` above 1. `dppo_tv` and `dppo_kl` compare with what the engine said, so that `correction.kind`,
which would weigh the mismatch once more, is refused."""

_TERMS = """\
Added to the loss of each token where they are set."""

_POLICIES = """\
Three policies have a say about a token, and no setting confuses them:"""

_POLICY_TABLE = (
    ("policy", "log-probability", "used by"),
    (
        "behaviour, which sampled: other weights where tokens are stale, and always the engine's arithmetic",
        "`rollout_logprobs`",
        "`[correction]`, `dppo_tv`, `dppo_kl`, `kl_importance_ratio`, `log_ratio_coef`",
    ),
    (
        "proximal, the trainer's before the step's first update",
        "`old_logprobs`",
        "the ratio of every other loss, `stop_kl_nats`, `clip_cov`, `kl_cov`",
    ),
    ("current, which is updated", "`logprobs`", "all"),
)

_NEEDS = """\
What a run needs depends on how far the first is from the second, and the second from the third:"""

_NEED_TABLE = (
    ("run", "needs", "why"),
    (
        "on-policy: `max_staleness` 0, one update a step",
        "nothing; any loss",
        "every ratio is 1; `opo` wants exactly this",
    ),
    (
        "several updates a step",
        'a loss with a bound: all but `kl_cov`, which has a pull instead; of mixtures `router_replay = "R2"`',
        "the ratio leaves 1 within the step",
    ),
    (
        "one step of staleness, or a bfloat16 engine",
        '`correction.kind = "tis"`, or `dppo_tv`; of mixtures `router_replay = "R3"`',
        "tokens of other weights, weighed by what the trainer finds of them",
    ),
    (
        "more staleness, `partial` rollouts",
        '`correction.kind = "icepop"` or `"mis"` with `mode = "mask"`, or `opsm_delta_nats`; or `dppo_tv`, `dppo_kl`, '
        "with `log_ratio_coef` where the mask lets too much through",
        "a truncated weight still trains on a token that has become unlikely; a mask does not",
    ),
    (
        "a divergence to the reference beside stale tokens",
        "`kl_importance_ratio = true`",
        "the estimators are unbiased for tokens of the current policy only",
    ),
)

_CONTRADICTIONS = "What does not go together:"

_CONTRADICTION_TABLE = (
    ("these", "because", "then"),
    ("`dppo_tv`, `dppo_kl` and `correction.kind`", "both weigh the mismatch of engine and trainer", "refused"),
    ("`gspo`, `gmpo` and what treats tokens apart", "one ratio for a whole response", "refused"),
    (
        '`correction.old = "rollout"` and stale tokens',
        "PPO's clip would bound the staleness, not the update",
        "refused",
    ),
    (
        "`max_staleness` above 1 and nothing in the loss that knows of it",
        "tokens of older weights would count as the policy's own",
        "refused; the table above says what knows of it",
    ),
    ("`kl_importance_ratio` and k2, or `kl_coef = 0`", "k2 is biased before it is weighed", "refused"),
    ("`max_rl` and rewards below 0, or what lowers them", "it divides by the mean reward", "refused"),
    (
        "`max_rl`, `grpo` with its deviation and `advantage.whiten`",
        "a second division undoes what the first was for",
        "accepted; whitening takes the step's scale",
    ),
    (
        "`rollout.top_k`, `rollout.top_p` and an engine that does not report which tokens they left (SGLang)",
        "log-probabilities would be those of a set of tokens that the trainer does not know",
        "refused",
    ),
    (
        "`rollout.top_k` and `[distill]`",
        "a teacher's distribution is over the whole vocabulary",
        "refused",
    ),
)

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
        *_section("Other terms of the loss", _TERMS, LOSS_TERMS),
        *_section("Aggregation: `loss.aggregation`", _AGGREGATIONS, AGGREGATIONS),
        "## Which for which staleness\n",
        f"{_POLICIES}\n",
        *_table(_POLICY_TABLE),
        f"{_NEEDS}\n",
        *_table(_NEED_TABLE),
        f"{_CONTRADICTIONS}\n",
        *_table(_CONTRADICTION_TABLE),
    ]
    return "\n".join(parts)


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    heading, *others = rows
    yield f"| {' | '.join(heading)} |"
    yield f"|{'---|' * len(heading)}"
    yield from (f"| {' | '.join(row)} |" for row in others)
    yield ""


def _section(title: str, text: str, formulas: Mapping[str, Described]) -> Iterator[str]:
    yield f"## {title}\n\n{text}\n"
    yield "| name | formula | settings | source | when to use it |"
    yield "|---|---|---|---|---|"
    for name, formula in formulas.items():
        settings = {**formula.settings, **(formula.cov_selection if isinstance(formula, LossKind) else {})}
        written = ", ".join(
            f"`{key} = {_toml(value)}`" if value is not None else f"`{key}`" for key, value in settings.items()
        )
        yield f"| `{name}` | {formula.text} | {written} | {formula.source} | {formula.when} |"
    yield ""


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"


if __name__ == "__main__":
    say(reference().removesuffix("\n"))
