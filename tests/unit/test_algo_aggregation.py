"""Weights times per-token losses, added up over ranks, are the global loss."""

from __future__ import annotations

import random

import pytest
import torch

from spmdrl.algo.losses import token_weights
from tests.helpers import oracle

AGGREGATIONS = ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"]
MAX_RESPONSE_TOKENS = 16


def some_losses() -> list[list[float]]:
    """Losses of each sequence's loss tokens; some sequences have none."""
    draw = random.Random(0)
    return [[draw.gauss(0, 1) for _ in range(n)] for n in (3, 0, 16, 1, 7, 7, 0, 2, 11, 5)]


def local_loss(losses: list[list[float]], aggregation: str, everyone: list[list[float]]) -> float:
    """What a rank that holds `losses` adds."""
    weights = token_weights(
        [len(sequence) for sequence in losses],
        aggregation=aggregation,
        global_loss_tokens=sum(len(sequence) for sequence in everyone),
        global_rollouts=sum(len(sequence) > 0 for sequence in everyone),
        max_response_tokens=MAX_RESPONSE_TOKENS,
    )
    return sum(weight * loss for weight, sequence in zip(weights, losses, strict=True) for loss in sequence)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_equal_to_the_oracle_on_any_number_of_ranks(aggregation: str) -> None:
    everyone = some_losses()
    expected = oracle.global_loss(everyone, aggregation, MAX_RESPONSE_TOKENS)
    for num_ranks in (1, 2, 3, 7, 20):
        shares = [everyone[rank::num_ranks] for rank in range(num_ranks)]
        assert sum(local_loss(share, aggregation, everyone) for share in shares) == pytest.approx(expected, rel=1e-12)


def test_the_four_differ() -> None:
    assert len({round(oracle.global_loss(some_losses(), name, MAX_RESPONSE_TOKENS), 9) for name in AGGREGATIONS}) == 4


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_sequences_without_loss_tokens_weigh_nothing(aggregation: str) -> None:
    totals = {"global_loss_tokens": 4, "global_rollouts": 1, "max_response_tokens": 8}
    weights = token_weights([0, 4, 0], aggregation=aggregation, **totals)
    assert weights[0] == weights[2] == 0.0 < weights[1]
    nothing = {"global_loss_tokens": 0, "global_rollouts": 0, "max_response_tokens": 8}
    assert token_weights([0, 0], aggregation=aggregation, **nothing) == [0.0, 0.0]


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean_token_mean"])
def test_weights_of_a_mean_add_up_to_one(aggregation: str) -> None:
    ones = [[1.0] * len(sequence) for sequence in some_losses()]
    assert local_loss(ones, aggregation, ones) == pytest.approx(1.0)


def test_weights_survive_float32() -> None:
    """A million loss tokens: the float32 weights that a micro-batch carries still add up to one."""
    n = 1_000_003
    totals = {"global_loss_tokens": n, "global_rollouts": 1, "max_response_tokens": n}
    weight = token_weights([n], aggregation="token_mean", **totals)[0]
    total = torch.full((n,), weight, dtype=torch.float32).sum()
    assert float(total) == pytest.approx(1.0, rel=1e-6)


def test_unknown_aggregation() -> None:
    with pytest.raises(ValueError, match="median"):
        token_weights([1], aggregation="median", global_loss_tokens=1, global_rollouts=1, max_response_tokens=1)
