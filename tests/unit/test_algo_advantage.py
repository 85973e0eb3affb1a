"""Advantages equal their definitions; whitening over pieces equals whitening over the whole."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from spmdrl.algo.advantage import EPS, group_advantages, moments, whiten
from tests import oracle

ESTIMATORS = [("grpo", True), ("grpo", False), ("rloo", True), ("reinforce_plus_plus_baseline", True)]


def some_rewards(num_prompts: int, group_size: int) -> Tensor:
    draw = torch.Generator().manual_seed(num_prompts * 100 + group_size)
    graded = torch.randn(num_prompts, group_size, generator=draw, dtype=torch.float64)
    passed = torch.randint(0, 2, (num_prompts, group_size), generator=draw).double()
    return torch.cat([graded, passed])


@pytest.mark.parametrize(("estimator", "divide_by_std"), ESTIMATORS)
@pytest.mark.parametrize("group_size", [2, 3, 8])
def test_equal_to_the_oracle(estimator: str, divide_by_std: bool, group_size: int) -> None:
    rewards = some_rewards(5, group_size)
    fast = group_advantages(rewards, estimator=estimator, divide_by_std=divide_by_std)
    slow = torch.tensor(oracle.group_advantages(rewards.tolist(), estimator, divide_by_std), dtype=torch.float64)
    torch.testing.assert_close(fast, slow, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("estimator", "divide_by_std"), ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group_size", [2, 3, 6, 7, 8])
def test_a_group_of_equal_rewards_teaches_nothing(
    estimator: str, divide_by_std: bool, dtype: torch.dtype, group_size: int
) -> None:
    # The float32 mean of seven times 0.1 is not 0.1; over a deviation of 1e-6 that error would be an advantage.
    rewards = torch.tensor([[0.1], [0.7], [-1e6 / 3]], dtype=dtype).expand(3, group_size)
    advantages = group_advantages(rewards, estimator=estimator, divide_by_std=divide_by_std)
    assert torch.equal(advantages, torch.zeros(3, group_size, dtype=dtype))


@pytest.mark.parametrize(("estimator", "divide_by_std"), ESTIMATORS)
def test_groups_do_not_see_each_other(estimator: str, divide_by_std: bool) -> None:
    rewards = some_rewards(4, 5)
    whole = group_advantages(rewards, estimator=estimator, divide_by_std=divide_by_std)
    rows = [group_advantages(row[None], estimator=estimator, divide_by_std=divide_by_std) for row in rewards]
    assert torch.equal(torch.cat(rows), whole)


@pytest.mark.parametrize(("estimator", "divide_by_std"), ESTIMATORS)
def test_advantages_of_a_group_add_up_to_zero(estimator: str, divide_by_std: bool) -> None:
    advantages = group_advantages(some_rewards(4, 5), estimator=estimator, divide_by_std=divide_by_std)
    torch.testing.assert_close(advantages.sum(1), torch.zeros(8, dtype=torch.float64), rtol=0, atol=1e-12)


def test_one_rollout_is_no_group() -> None:
    with pytest.raises(ValueError, match="prompt group of 1"):
        group_advantages(torch.ones(3, 1), estimator="grpo", divide_by_std=True)


def test_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="gae"):
        group_advantages(torch.ones(3, 2), estimator="gae", divide_by_std=True)


def whiten_in_parts(advantages: Tensor, loss_tokens: Tensor, cuts: list[int]) -> Tensor:
    """What ranks holding advantages[:cut], ... do: add up their moments, then each whitens its own."""
    places = list(itertools.pairwise([0, *cuts, len(advantages)]))
    parts = [torch.stack(moments(advantages[a:b], loss_tokens[a:b])) for a, b in places]
    total, squares, count = torch.stack(parts).sum(0).tolist()
    mean = total / count
    std = math.sqrt(squares / count - mean * mean)
    return torch.cat([whiten(advantages[a:b], mean=mean, std=std) for a, b in places])


@pytest.mark.parametrize("cuts", [[], [3], [0, 1, 11, 12]])
def test_whitening_is_over_the_loss_tokens_of_all_ranks(cuts: list[int]) -> None:
    advantages = some_rewards(3, 4).flatten()
    loss_tokens = torch.randint(0, 9, advantages.shape, generator=torch.Generator().manual_seed(0))
    slow = oracle.whiten(advantages.tolist(), loss_tokens.tolist(), EPS)
    fast = whiten_in_parts(advantages, loss_tokens, cuts)
    torch.testing.assert_close(fast, torch.tensor(slow, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    laid_out = fast.repeat_interleave(loss_tokens)
    assert abs(float(laid_out.mean())) < 1e-12
    assert abs(float(laid_out.std(correction=0)) - 1) < 1e-5
