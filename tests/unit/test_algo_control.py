"""Coefficients that follow a target, what length costs, and the scale of a float16 loss."""

from __future__ import annotations

import pytest
import torch

from spmdrl.algo.advantage import overlong_penalty
from spmdrl.algo.schedules import next_entropy_coef, next_kl_coef
from spmdrl.config import Config
from spmdrl.learn.coefficients import ENTROPY, KL_IN_REWARD, adapt_coefficients, starting_coefficients
from spmdrl.learn.learner import LossScale

TABLES = {
    "run": {"name": "x", "num_steps": 1},
    "model": {"path": "m"},
    "data": {"max_prompt_tokens": 8, "sources": ({"kind": "jsonl", "path": "a"},)},
    "rollout": {"prompts_per_step": 4, "group_size": 2, "max_response_tokens": 32},
    "reward": {"terms": ({"kind": "exact"},), "kl_coef": 0.2, "kl_target_nats": 0.1, "kl_horizon": 100},
    "loss": {"entropy_coef": 0.01, "entropy_target_nats": 0.5},
    "optim": {"lr": 1e-3},
    "pack": {"max_tokens_per_micro_batch": 64},
}


@pytest.mark.parametrize(
    ("kl_nats", "factor"),
    [(0.1, 1.0), (0.105, 1.01), (0.095, 0.99), (9.0, 1.04), (0.0, 0.96), (-1.0, 0.96)],  # 20 of 100 rollouts
)
def test_the_kl_coefficient_follows_its_target(kl_nats: float, factor: float) -> None:
    after = next_kl_coef(0.5, kl_nats, target_nats=0.1, rollouts=20, horizon=100)
    assert after == pytest.approx(0.5 * factor)


def test_the_kl_coefficient_finds_the_one_that_meets_its_target() -> None:
    coef = 0.01
    for _ in range(2000):
        coef = next_kl_coef(coef, 0.3 / (1 + 5 * coef), target_nats=0.1, rollouts=8, horizon=100)
    assert coef == pytest.approx(0.4)  # where 0.3 / (1 + 5 coef) is 0.1


@pytest.mark.parametrize(("entropy", "after"), [(0.4, 0.03), (0.6, 0.01), (0.5, 0.01)])
def test_the_entropy_coefficient_rises_below_its_target(entropy: float, after: float) -> None:
    assert next_entropy_coef(0.02, entropy, target_nats=0.5, change=0.01) == pytest.approx(after)


def test_the_entropy_coefficient_is_never_negative() -> None:
    assert next_entropy_coef(0.002, 9.0, target_nats=0.5, change=0.01) == 0.0


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0.0), (12, 0.0), (13, -0.125), (16, -0.5), (20, -1.0), (25, -1.0)])
def test_length_costs_in_the_last_tokens_before_the_limit(tokens: int, penalty: float) -> None:
    assert overlong_penalty(tokens, max_tokens=20, buffer_tokens=8) == penalty


def test_coefficients_with_a_target_are_adapted_and_no_others() -> None:
    cfg = Config.model_validate(TABLES)
    start = starting_coefficients(cfg)
    assert start == {ENTROPY: 0.01, KL_IN_REWARD: 0.2}
    values = {"update/entropy_nats": 0.4, "reward/k1_ref_nats": 0.11}
    after = dict(start)
    adapt_coefficients(after, values, cfg, rollouts=10)
    assert after == {ENTROPY: pytest.approx(0.015), KL_IN_REWARD: pytest.approx(0.2 * 1.01)}
    slowly = cfg.model_copy(update={"loss": cfg.loss.model_copy(update={"entropy_coef_change": 0.001})})
    adapt_coefficients(entropy := {ENTROPY: 0.01}, {"update/entropy_nats": 0.4}, slowly, rollouts=10)
    assert entropy == {ENTROPY: pytest.approx(0.011)}
    unchanged = dict(start)
    adapt_coefficients(unchanged, {}, cfg, rollouts=0)
    assert unchanged == start
    fixed = cfg.model_copy(update={"loss": cfg.loss.model_copy(update={"entropy_target_nats": None})})
    assert starting_coefficients(fixed) == {KL_IN_REWARD: 0.2}
    one = {KL_IN_REWARD: 0.2}
    adapt_coefficients(one, values, fixed, rollouts=10)
    assert one == {KL_IN_REWARD: pytest.approx(0.2 * 1.01)}


def test_the_scale_of_a_float16_loss_halves_with_an_overflow_and_doubles_after_200_updates_without() -> None:
    scale = LossScale.for_dtype(torch.float16)

    def after_updates(count: int) -> list[float]:
        found = []
        for _ in range(count):
            scale.succeeded()
            found.append(scale.scale)
        return found

    assert after_updates(199) == [2.0**16] * 199
    assert scale.overflowed()
    assert after_updates(400) == [2.0**15] * 199 + [2.0**16] * 200 + [2.0**17], "counted from the overflow"
    scale.scale = 1.0
    assert not scale.overflowed() and scale.scale == 1.0, "no scale is to blame"
    scale = LossScale.for_dtype(torch.bfloat16)
    assert set(after_updates(400)) == {1.0} and not scale.overflowed()
