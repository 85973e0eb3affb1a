"""What parity compares losses with: the magnitudes of their terms, which do not cancel as the terms do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from spmdrl.config import LossConfig
from spmdrl.learn.objective import PolicyObjective
from spmdrl.model.policy import TokenLogprobs
from spmdrl.tools.parity_cases import CaseResult, Sized, deviation
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
