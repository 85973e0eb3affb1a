"""KL estimators equal their definitions, and have the means and gradients that they promise."""

from __future__ import annotations

import itertools

import pytest
import torch

from spmdrl.algo.kl import kl_at_loss_tokens, kl_estimate
from tests.helpers import oracle


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_equal_to_the_oracle_with_its_gradient(estimator: str) -> None:
    pairs = list(itertools.product([0.0, -0.3, -1.0, -2.5, -7.0], repeat=2))
    now, reference = torch.tensor(pairs, dtype=torch.float64).T
    now = now.clone().requires_grad_()
    estimate = kl_estimate(now, reference, estimator=estimator)
    estimate.sum().backward()
    slow = [oracle.kl(n, r, estimator) for n, r in pairs]
    slopes = [oracle.slope(lambda x, r=r: oracle.kl(x, r, estimator), n) for n, r in pairs]
    torch.testing.assert_close(estimate.detach(), torch.tensor(slow, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(now.grad, torch.tensor(slopes, dtype=torch.float64), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_exactly_zero_where_policy_is_reference(estimator: str) -> None:
    logprobs = -torch.rand(1000, generator=torch.Generator().manual_seed(0)) * 20
    assert torch.equal(kl_estimate(logprobs, logprobs.clone(), estimator=estimator), torch.zeros(1000))


def test_expected_values_and_gradients_on_policy() -> None:
    """Under the policy: k1 and k3 are unbiased, k1 has no expected gradient, k2 has that of the divergence."""
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=draw, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, generator=draw, dtype=torch.float64).log_softmax(-1)
    logprobs = logits.log_softmax(-1)
    p = logprobs.exp().detach()
    divergence = (logprobs.exp() * (logprobs - reference)).sum()

    def slope(value: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad(value, logits, retain_graph=True)[0]

    expected = {name: (p * kl_estimate(logprobs, reference, estimator=name)).sum() for name in ("k1", "k2", "k3")}
    torch.testing.assert_close(expected["k1"], divergence)
    torch.testing.assert_close(expected["k3"], divergence)
    torch.testing.assert_close(slope(expected["k1"]), torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(slope(expected["k2"]), slope(divergence))


def test_with_the_ratio_value_and_gradient_are_unbiased_whatever_policy_sampled() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(6, generator=draw, dtype=torch.float64, requires_grad=True)
    reference, sampled = torch.randn(2, 6, generator=draw, dtype=torch.float64).log_softmax(-1)
    logprobs, everywhere = logits.log_softmax(-1), torch.ones(6, dtype=torch.bool)
    divergence = (logprobs.exp() * (logprobs - reference)).sum()
    (expected,) = torch.autograd.grad(divergence, logits, retain_graph=True)
    for estimator in ("k1", "k3"):
        estimate = kl_at_loss_tokens(logprobs, reference, everywhere, estimator=estimator, rollout_logprobs=sampled)
        mean = (sampled.exp() * estimate).sum()
        torch.testing.assert_close(mean, divergence)
        torch.testing.assert_close(torch.autograd.grad(mean, logits, retain_graph=True)[0], expected)


def test_k3_keeps_its_digits_for_small_differences() -> None:
    difference = torch.logspace(-4, 1, 200)
    for sign in (1, -1):
        k3 = kl_estimate(sign * difference, torch.zeros(200), estimator="k3")
        exact = torch.expm1(-sign * difference.double()) + sign * difference.double()
        assert (k3 >= 0).all()
        torch.testing.assert_close(k3.double(), exact, rtol=2e-3, atol=0)


def test_unknown_estimator() -> None:
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), estimator="k4")
