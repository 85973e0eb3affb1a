"""Coefficients that a run adapts after each step, by name; their metrics are `update/<name>`.

They are alike on every rank, because they follow from metrics that all ranks have. The `Learner` holds them and takes
them into checkpoints. A coefficient without a target is not among them: it stays as configured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from spmdrl.algo.schedules import next_entropy_coef, next_kl_coef
from spmdrl.config import Config

ENTROPY, KL_IN_REWARD = "entropy_coef", "kl_in_reward_coef"
_HORIZON, _ENTROPY_CHANGE = 10_000, 0.005  # where the settings leave them open


def starting_coefficients(cfg: Config) -> dict[str, float]:
    """Make the coefficients with a target, as they are before the first step."""
    coefficients: dict[str, float] = {}
    if cfg.loss.entropy_target_nats is not None:
        coefficients[ENTROPY] = cfg.loss.entropy_coef
    if cfg.reward.kl_target_nats is not None:
        coefficients[KL_IN_REWARD] = cfg.reward.kl_coef
    return coefficients


def adapt_coefficients(
    coefficients: dict[str, float], values: Mapping[str, float], cfg: Config, *, rollouts: int
) -> None:
    """Change the coefficients that have a target, in place, after a step with this number of rollouts.

    `values` are the step's metrics over all ranks.

    A step without any prompt group changes nothing.
    """
    coefficients.update(_adapted(coefficients, values, cfg, rollouts))


def _adapted(
    coefficients: Mapping[str, float], values: Mapping[str, float], cfg: Config, rollouts: int
) -> Iterator[tuple[str, float]]:
    divergence = f"reward/{cfg.reward.kl_estimator}_ref_nats"
    if cfg.loss.entropy_target_nats is not None and "update/entropy_nats" in values:
        yield (
            ENTROPY,
            next_entropy_coef(
                coefficients[ENTROPY],
                values["update/entropy_nats"],
                target_nats=cfg.loss.entropy_target_nats,
                change=cfg.loss.entropy_coef_change or _ENTROPY_CHANGE,
            ),
        )
    if cfg.reward.kl_target_nats is not None and divergence in values:
        yield (
            KL_IN_REWARD,
            next_kl_coef(
                coefficients[KL_IN_REWARD],
                values[divergence],
                target_nats=cfg.reward.kl_target_nats,
                rollouts=rollouts,
                horizon=cfg.reward.kl_horizon or _HORIZON,
            ),
        )
