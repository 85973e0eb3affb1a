"""Parity allows rounding: of the terms of a loss, which do not cancel as the sum does; of what one bit changes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from spmdrl.config import LossConfig
from spmdrl.learn.objective import PolicyObjective
from spmdrl.model.policy import TokenLogprobs
from spmdrl.tools.parity_cases import CaseResult, Sized, deviation, move_to_neighbours
from tests.helpers.corrections import CUTS, batch, random_columns


def test_the_size_of_a_loss_is_that_of_its_terms_whose_slopes_stay_the_same() -> None:
    sized, total, size = Sized(PolicyObjective(LossConfig())), 0.0, 0.0
    for micro_batch, now in batch(random_columns(seed=0), CUTS[0], "token_mean"):
        slopes, losses = [], []
        for objective in (PolicyObjective(LossConfig()), sized):
            logprobs = now.clone().requires_grad_()
            loss = objective(TokenLogprobs(logprobs, torch.zeros_like(now)), micro_batch).loss_sum
            losses.append(float(loss.detach()))
            slopes.append(torch.autograd.grad(loss, logprobs)[0])
        assert losses[0] == losses[1] and torch.equal(slopes[0], slopes[1])
        total += losses[0]
        for place in micro_batch.loss_mask.nonzero().flatten().tolist():  # each token's term alone
            only = torch.zeros_like(micro_batch.loss_weights)
            only[place] = micro_batch.loss_weights[place]
            alone = micro_batch.with_columns({"loss_weights": only})
            size += abs(float(PolicyObjective(LossConfig())(TokenLogprobs(now, torch.zeros_like(now)), alone).loss_sum))
    assert sized.size == pytest.approx(size, rel=1e-5) and size > 1.5 * abs(total)


def test_rounding_of_a_loss_whose_terms_cancel_is_no_difference() -> None:
    weights = {"weight": torch.ones(2)}
    one = CaseResult(loss=1e-3, loss_size=1.0, gradients=weights, after_sgd=weights, after_adamw=weights)
    assert deviation(replace(one, loss=1e-3 + 1e-6), one).is_within
    assert not deviation(replace(one, loss=1e-3 + 1e-4), one).is_within


def test_a_gradient_may_differ_by_four_times_what_one_bit_changes() -> None:
    weights = {"usual": torch.ones(4), "ill-conditioned": torch.ones(4)}
    one = CaseResult(loss=1.0, loss_size=1.0, gradients=weights, after_sgd=weights, after_adamw=weights)

    def with_gradients(**apart: float) -> CaseResult:
        return replace(one, gradients={name: x * (1 + apart.get(name[:3], 0.0)) for name, x in weights.items()})

    one_bit = with_gradients(usu=1e-6, ill=2e-5)
    for apart, is_within in (
        ({"ill": 7e-5}, True),
        ({"ill": 9e-5}, False),
        ({"usu": 9e-6}, True),
        ({"usu": 1.1e-5}, False),
        ({"ill": 7e-5, "usu": 1.1e-5}, False),
        ({"ill": math.nan}, False),
    ):
        assert deviation(with_gradients(**apart), one, one_bit).is_within is is_within
    assert not deviation(with_gradients(ill=7e-5), one).is_within
    assert not deviation(with_gradients(ill=2e-3), one, with_gradients(ill=1e-3)).is_within  # at most 1e-3
    assert deviation(with_gradients(ill=7e-5, usu=9.9e-6), one, one_bit).worst == "usual"


def test_weights_move_to_one_of_their_neighbours() -> None:
    weights = torch.randn(1000)
    moved, in_bits, halves = weights.clone(), torch.arange(4, dtype=torch.uint8), torch.ones(4, dtype=torch.bfloat16)
    move_to_neighbours([in_bits, halves, moved])
    assert in_bits.tolist() == [0, 1, 2, 3] and halves.eq(1).all()
    neighbours = [weights.nextafter(torch.full((), side)) for side in (-math.inf, math.inf)]
    is_up = moved == neighbours[1]
    assert (is_up | (moved == neighbours[0])).all() and 400 < is_up.sum() < 600
