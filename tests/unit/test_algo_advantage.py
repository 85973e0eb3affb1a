"""Advantages equal their definitions; whitening over pieces equals whitening over the whole."""

from __future__ import annotations

import inspect
import itertools
import math
import random
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.algo import advantage
from spmdrl.algo.advantage import EPS, gae, moments, pass_at_k, remax, returns, whiten, with_final_rewards
from spmdrl.algo.formula import ESTIMATORS
from spmdrl.config import AdvantageConfig
from spmdrl.types import UserError
from spmdrl.user_code import call
from tests.helpers import oracle

CASES: list[dict[str, Any]] = [
    {"estimator": "grpo"},
    {"estimator": "grpo", "divide_by_std": False},
    {"estimator": "rloo"},
    {"estimator": "reinforce_plus_plus_baseline"},
    {"estimator": "opo"},
    {"estimator": "pass_at_k", "k": 1},
    {"estimator": "pass_at_k", "k": 2},
    {"estimator": "pass_at_k"},
]
GROUP_COLUMNS = {"rewards", "num_tokens", "greedy_rewards"}
TURN_COLUMNS = {"turn_rewards", "turn_rollouts", "turn_states", "turn_roles", "turn_teams"}
REMAX = {"estimator": "remax"}  # the only one whose baseline is none of the group
MAX_RL = {"estimator": "max_rl"}  # the only one that refuses rewards below 0


def some_rewards(num_prompts: int, group_size: int) -> Tensor:
    draw = torch.Generator().manual_seed(num_prompts * 100 + group_size)
    graded = torch.randn(num_prompts, group_size, generator=draw, dtype=torch.float64)
    passed = torch.randint(0, 2, (num_prompts, group_size), generator=draw).double()
    return torch.cat([graded, passed])


def some_lengths(rewards: Tensor) -> Tensor:
    """Loss tokens: single ones, and none at all for some rollouts of a group."""
    lengths = torch.randint(0, 5, rewards.shape, generator=torch.Generator().manual_seed(1))
    lengths[:, 0] += 1
    return lengths


def greedy_of(rewards: Tensor) -> Tensor:
    """A reward for each group's greedy response; where all rewards are equal, the same."""
    return rewards.amax(dim=1)


def estimated(rewards: Tensor, lengths: Tensor, case: dict[str, Any]) -> Tensor:
    cfg = AdvantageConfig(**case)
    columns = {"rewards": rewards, "num_tokens": lengths, "greedy_rewards": greedy_of(rewards)}
    return call(cfg.formula.function, columns, cfg.settings)


@pytest.mark.parametrize(
    ("case", "group_size"),
    [
        (case, size)
        for case in (*CASES, REMAX)
        for size in (1, 2, 3, 8)
        if size >= ESTIMATORS[case["estimator"]].smallest_group and size >= AdvantageConfig(**case).settings.get("k", 0)
    ],
    ids=str,
)
def test_equal_to_the_oracle(case: dict[str, Any], group_size: int) -> None:
    cfg = AdvantageConfig(**case)
    rewards = some_rewards(5, group_size)
    lengths = some_lengths(rewards)
    slow = [
        oracle.group_advantages(row, cfg.estimator, lengths=n, greedy=greedy, **cfg.settings)
        for row, n, greedy in zip(rewards.tolist(), lengths.tolist(), greedy_of(rewards).tolist(), strict=True)
    ]
    expected = torch.tensor(slow, dtype=torch.float64)
    torch.testing.assert_close(estimated(rewards, lengths, case), expected, rtol=1e-9, atol=1e-9)


def test_max_rl_divides_by_the_share_of_right_answers() -> None:
    rewards = some_rewards(5, 4).abs()
    rewards = torch.cat([rewards, torch.zeros(1, 4, dtype=torch.float64), torch.full((1, 4), 0.1, dtype=torch.float64)])
    slow = [oracle.group_advantages(row, "max_rl", lengths=[1] * 4) for row in rewards.tolist()]
    found = estimated(rewards, some_lengths(rewards), MAX_RL)
    torch.testing.assert_close(found, torch.tensor(slow, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert (found[-2:] == 0).all(), "equal rewards teach nothing"
    with pytest.raises(UserError, match="a reward is -1"):
        estimated(torch.tensor([[1.0, -1.0]]), torch.ones(1, 2), MAX_RL)


@pytest.mark.parametrize("case", [*CASES, REMAX], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group_size", [5, 6, 7, 8])
def test_a_group_of_equal_rewards_teaches_nothing(case: dict[str, Any], dtype: torch.dtype, group_size: int) -> None:
    # The float32 mean of seven times 0.1 is not 0.1; over a deviation of 1e-6 that error would be an advantage.
    rewards = torch.tensor([[0.1], [0.7], [-1e6 / 3]], dtype=dtype).expand(3, group_size)
    assert torch.equal(estimated(rewards, some_lengths(rewards), case), torch.zeros(3, group_size, dtype=dtype))


@pytest.mark.parametrize("case", [*CASES, REMAX], ids=str)
def test_groups_do_not_see_each_other(case: dict[str, Any]) -> None:
    rewards = some_rewards(4, 5)
    lengths = some_lengths(rewards)
    rows = [estimated(row[None], n[None], case) for row, n in zip(rewards, lengths, strict=True)]
    assert torch.equal(torch.cat(rows), estimated(rewards, lengths, case))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_advantages_of_a_group_add_up_to_zero(case: dict[str, Any]) -> None:
    rewards = some_rewards(4, 5)
    lengths = some_lengths(rewards)
    # The optimal baseline is a mean over tokens, so that is where its advantages cancel.
    weights = lengths if case["estimator"] == "opo" else torch.ones_like(lengths)
    total = (weights * estimated(rewards, lengths, case)).sum(1)
    torch.testing.assert_close(total, torch.zeros(8, dtype=torch.float64), rtol=0, atol=1e-9)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_one_rollout_is_no_group(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="prompt group of 1"):
        estimated(torch.ones(3, 1), torch.ones(3, 1), {**case, **({"k": 1} if "pass" in case["estimator"] else {})})


@pytest.mark.parametrize(("num_right", "num_wrong", "k"), [(1, 7, 4), (3, 5, 2), (5, 3, 2), (4, 4, 4), (7, 1, 2)])
def test_pass_at_k_of_right_and_wrong_is_the_closed_form(num_right: int, num_wrong: int, k: int) -> None:
    rewards = torch.tensor([[0.0] * num_wrong + [1.0] * num_right], dtype=torch.float64)
    right, wrong = oracle.binary_pass_at_k(num_right, num_wrong, k)
    expected = torch.tensor([[wrong] * num_wrong + [right] * num_right], dtype=torch.float64)
    torch.testing.assert_close(pass_at_k(rewards, k=k), expected, rtol=1e-9, atol=1e-9)


def test_pass_at_k_of_a_large_group_is_the_closed_form() -> None:
    group_size, num_right, k = 128, 5, 16  # C(127, 15) is beyond 64 bits
    rewards = torch.tensor([[0.0] * (group_size - num_right) + [1.0] * num_right], dtype=torch.float64)
    right, wrong = oracle.binary_pass_at_k(num_right, group_size - num_right, k)
    expected = torch.tensor([[wrong] * (group_size - num_right) + [right] * num_right], dtype=torch.float64)
    torch.testing.assert_close(pass_at_k(rewards, k=k), expected, rtol=1e-9, atol=1e-9)


def test_no_subsets_of_more_than_there_are() -> None:
    with pytest.raises(ValueError, match="subsets of 5 in a prompt group of 4"):
        pass_at_k(torch.ones(1, 4), k=5)


def test_opo_of_rollouts_without_tokens_compares_with_the_first() -> None:
    rewards = torch.tensor([[1.0, 3.0]])
    assert advantage.opo(rewards, num_tokens=torch.zeros(1, 2)).tolist() == [[0.0, 2.0]]


def test_remax_compares_with_the_greedy_response() -> None:
    advantages = remax(torch.tensor([[1.0, 0.0], [0.5, 0.0]]), greedy_rewards=torch.tensor([1.0, 0.0]))
    assert advantages.tolist() == [[0.0, -1.0], [0.5, 0.0]]


LENGTHS = [1, 6, 3, 20, 1, 9, 2]
MASKED = (2, 4)  # sequences without any loss token


def packed(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(loss_mask [T], cu_seqlens, random values [3, T])."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.rand(sum(LENGTHS), generator=draw) < 0.6
    cu_seqlens = torch.tensor([0, *itertools.accumulate(LENGTHS)], dtype=torch.int32)
    mask[0] = True  # the sequence of one token has a loss token
    for sequence in MASKED:
        mask[cu_seqlens[sequence] : cu_seqlens[sequence + 1]] = False
    return mask, cu_seqlens, torch.randn(3, sum(LENGTHS), generator=draw, dtype=torch.float64)


def by_sequence(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> list[list[float]]:
    """The loss tokens' values of each sequence."""
    return [values[a:b][mask[a:b]].tolist() for a, b in itertools.pairwise(cu_seqlens.tolist())]


def laid_out(slow: list[list[float]], mask: Tensor) -> Tensor:
    whole = torch.zeros(len(mask), dtype=torch.float64)
    whole[mask] = torch.tensor([value for sequence in slow for value in sequence], dtype=torch.float64)
    return whole


@pytest.mark.parametrize("discount", [1.0, 0.9])
def test_returns_equal_the_oracle_whatever_lies_outside_the_mask(discount: float) -> None:
    mask, cu_seqlens, (rewards, *_) = packed()
    slow = [oracle.returns(sequence, discount) for sequence in by_sequence(rewards, mask, cu_seqlens)]
    for garbage in (0.0, math.inf, math.nan):
        fast = returns(torch.where(mask, rewards, garbage), mask, cu_seqlens, discount=discount)
        torch.testing.assert_close(fast, laid_out(slow, mask), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("discount", "gae_lambda"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_gae_equals_the_oracle_whatever_lies_outside_the_mask(discount: float, gae_lambda: float) -> None:
    mask, cu_seqlens, (rewards, values, _) = packed()
    columns = (by_sequence(column, mask, cu_seqlens) for column in (rewards, values))
    slow = laid_out([oracle.gae(r, v, discount, gae_lambda) for r, v in zip(*columns, strict=True)], mask)
    for garbage in (0.0, math.inf, math.nan):
        dirty, guesses = (torch.where(mask, column, garbage) for column in (rewards, values))
        fast = gae(dirty, mask, cu_seqlens, values=guesses, discount=discount, gae_lambda=gae_lambda)
        torch.testing.assert_close(fast, slow, rtol=1e-10, atol=1e-10)


def test_a_critic_that_is_trusted_in_nothing_learns_what_was_rewarded() -> None:
    mask, cu_seqlens, (rewards, values, _) = packed()
    advantages = gae(rewards, mask, cu_seqlens, values=values, discount=0.9, gae_lambda=1.0)
    rewarded = returns(rewards, mask, cu_seqlens, discount=0.9)
    torch.testing.assert_close(torch.where(mask, advantages + values, 0.0), rewarded, rtol=1e-10, atol=1e-10)


def test_a_sequence_is_credited_alike_in_any_company() -> None:
    mask, cu_seqlens, (rewards, values, _) = packed()
    settings = {"discount": 0.99, "gae_lambda": 0.95}
    whole = gae(rewards, mask, cu_seqlens, values=values, **settings)
    for a, b in itertools.pairwise(cu_seqlens.tolist()):
        alone = torch.tensor([0, b - a], dtype=torch.int32)
        part = gae(rewards[a:b], mask[a:b], alone, values=values[a:b], **settings)
        torch.testing.assert_close(part, whole[a:b], rtol=1e-12, atol=1e-12)


def test_the_reward_comes_with_the_last_loss_token() -> None:
    mask, cu_seqlens, (penalties, *_) = packed()
    reward = torch.arange(1.0, len(LENGTHS) + 1, dtype=torch.float64)
    token_rewards = with_final_rewards(penalties, reward.repeat_interleave(cu_seqlens.diff()), mask, cu_seqlens)
    slow = by_sequence(penalties, mask, cu_seqlens)
    for sequence, total in zip(slow, reward.tolist(), strict=True):
        if sequence:
            sequence[-1] += total
    assert torch.equal(token_rewards, laid_out(slow, mask))


def whiten_in_parts(advantages: Tensor, loss_tokens: Tensor, cuts: list[int]) -> Tensor:
    """What ranks holding advantages[:cut], ... do: add up their moments, then each whitens its own."""
    places = list(itertools.pairwise([0, *cuts, len(advantages)]))
    sums = torch.stack([moments(advantages[a:b], loss_tokens[a:b]) for a, b in places]).sum(0)
    return torch.cat([whiten(advantages[a:b], sums) for a, b in places])


@pytest.mark.parametrize("cuts", [[], [3], [0, 1, 11, 12]])
def test_whitening_is_over_the_loss_tokens_of_all_ranks(cuts: list[int]) -> None:
    advantages = some_rewards(3, 4).flatten()
    loss_tokens = torch.randint(0, 9, advantages.shape, generator=torch.Generator().manual_seed(0))
    slow = oracle.whiten(advantages.tolist(), loss_tokens.tolist(), EPS)
    fast = whiten_in_parts(advantages, loss_tokens, cuts)
    torch.testing.assert_close(fast, torch.tensor(slow, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    whole = fast.repeat_interleave(loss_tokens)
    assert abs(float(whole.mean())) < 1e-12
    assert abs(float(whole.std(correction=0)) - 1) < 1e-5


@pytest.mark.parametrize("name", ESTIMATORS)
def test_the_table_knows_each_function(name: str) -> None:
    estimator = ESTIMATORS[name]
    known = {"token_rewards", "loss_mask", "cu_seqlens", "values"} if estimator.per_token else GROUP_COLUMNS
    known = known | TURN_COLUMNS if estimator.per_turn else known
    assert estimator.per_turn is (name in ("gigpo", "grpo_by_role", "hierarchical_grpo"))
    assert {*estimator.needs, *estimator.settings} == set(inspect.signature(estimator.function).parameters)
    assert set(estimator.needs) <= known and estimator.per_token is (name in ("gae", "reinforce_plus_plus"))
    assert AdvantageConfig(estimator=name).estimator == name


@pytest.mark.parametrize("settings", [{}, {"divide_by_std": False}, {"discount": 1.0, "step_weight": 0.3}])
def test_gigpo_is_its_slow_twin(settings: dict[str, Any]) -> None:
    draw = random.Random(0)
    rewards = [[draw.choice([0.0, 1.0]) for _ in range(4)] for _ in range(6)]
    turns = [
        [[(draw.randrange(3), draw.choice([0.0, 0.25])) for _ in range(draw.randrange(5))] for _ in row]
        for row in rewards
    ]
    cfg = AdvantageConfig(estimator="gigpo", **settings)

    def of_groups(groups: list[int]) -> Tensor:
        rollouts = [rollout for group in groups for rollout in turns[group]]
        flat = [(place, *turn) for place, rollout in enumerate(rollouts) for turn in rollout]
        places, states, earned = (torch.tensor(column) for column in zip(*flat, strict=True))
        columns = {
            "rewards": torch.tensor([rewards[group] for group in groups], dtype=torch.float64),
            "turn_rewards": earned.double(),
            "turn_rollouts": places,
            "turn_states": states,
        }
        return call(cfg.formula.function, columns, cfg.settings)

    slow = [oracle.gigpo(row, of_group, **cfg.settings) for row, of_group in zip(rewards, turns, strict=True)]
    expected = [advantage for group in slow for rollout in group for advantage in rollout]
    torch.testing.assert_close(
        of_groups(list(range(6))), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9
    )
    # A group's advantages do not depend on the other groups, to the last bit.
    parts = torch.cat([of_groups([group]) for group in range(6) if any(turns[group])])
    assert torch.equal(of_groups(list(range(6))), parts)


def test_roles_are_compared_with_their_own_by_hand() -> None:
    """Two players whose rewards sum to 1 with what both get: player 5 acts in all rollouts, 6 in three, 7 in one."""
    cfg = AdvantageConfig(estimator="grpo_by_role", divide_by_std=False)
    columns = {
        "rewards": torch.tensor([[1.5, 0.0, 0.5, 2.0]], dtype=torch.float64),
        "turn_rollouts": torch.tensor([0, 0, 0, 1, 1, 2, 2, 3, 3]),
        "turn_roles": torch.tensor([5, 6, 5, 5, 6, 5, 6, 5, 7]),
        "turn_rewards": torch.tensor([0.25, -1.0, 0.75, -1.0, 1.0, 0.5, 0.0, 1.0, 4.0], dtype=torch.float64),
    }
    # The rest of the rewards is 1.5, 0, 0 and -3, so that player 5 has 2.5, -1, 0.5 and -2, and player 6 0.5, 1 and 0.
    five, six = [2.5, -1.0, 0.5, -2.0], [0.0, 0.5, -0.5]
    expected = [five[0], six[0], five[0], five[1], six[1], five[2], six[2], five[3], 0.0]
    assert call(cfg.formula.function, columns, cfg.settings).tolist() == pytest.approx(expected)
    std = [statistics.stdev(player) + EPS for player in (five, six)]
    expected = [five[0] / std[0], six[0] / std[1], five[0] / std[0], five[1] / std[0], six[1] / std[1]]
    divided = call(cfg.formula.function, columns, {"divide_by_std": True}).tolist()
    assert divided[:5] == pytest.approx(expected)
    alone = columns | {"turn_roles": torch.full((9,), 3)}  # one role is the whole rollout
    found = call(cfg.formula.function, alone, {"divide_by_std": True})
    whole = ESTIMATORS["grpo"].function(columns["rewards"], divide_by_std=True)
    torch.testing.assert_close(found, whole.flatten()[columns["turn_rollouts"]])


@pytest.mark.parametrize("divide_by_std", [True, False])
@pytest.mark.parametrize("name", ["grpo_by_role", "hierarchical_grpo"])
def test_roles_and_teams_are_their_slow_twin(name: str, divide_by_std: bool) -> None:
    draw = random.Random(0)
    names = ["lead", "critic", "solver/1", "solver/2", "solver/3", "solver/3/a", "solver/3/b", "judge/1"]
    rewards = [[draw.choice([0.0, 1.0]) for _ in range(4)] for _ in range(6)]
    turns = [
        [[(draw.choice(names), draw.choice([-0.5, 0.0, 0.25])) for _ in range(draw.randrange(9))] for _ in row]
        for row in rewards
    ]
    cfg = AdvantageConfig(estimator=name, divide_by_std=divide_by_std)

    def of_groups(groups: list[int]) -> Tensor:
        rollouts = [rollout for group in groups for rollout in turns[group]]
        spans = [(place, *turn) for place, rollout in enumerate(rollouts) for turn in rollout]
        places, roles, earned = (list(column) for column in zip(*spans, strict=True))
        teams = [role.rpartition("/")[0] for role in roles]
        columns = {
            "rewards": torch.tensor([rewards[group] for group in groups], dtype=torch.float64),
            "turn_rewards": torch.tensor(earned, dtype=torch.float64),
            "turn_rollouts": torch.tensor(places),
            "turn_roles": torch.tensor([1 + names.index(role) for role in roles]),
            "turn_teams": torch.tensor([len(team) for team in teams]),
        }
        return call(cfg.formula.function, columns, cfg.settings)

    in_teams = name == "hierarchical_grpo"
    slow = [
        oracle.by_role(row, of_group, in_teams=in_teams, divide_by_std=divide_by_std)
        for row, of_group in zip(rewards, turns, strict=True)
    ]
    expected = [advantage for group in slow for rollout in group for advantage in rollout]
    found = of_groups(list(range(6)))
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-9)
    assert torch.equal(found, torch.cat([of_groups([group]) for group in range(6)]))


def test_gigpo_gives_equal_returns_from_one_state_exactly_nothing() -> None:
    cfg = AdvantageConfig(estimator="gigpo")
    columns = {
        "rewards": torch.full((1, 3), 0.1, dtype=torch.float64),
        "turn_rewards": torch.zeros(6, dtype=torch.float64),
        "turn_rollouts": torch.tensor([0, 0, 1, 1, 2, 2]),
        "turn_states": torch.tensor([7, 8, 7, 8, 7, 9]),
    }
    assert (call(cfg.formula.function, columns, cfg.settings) == 0).all()
