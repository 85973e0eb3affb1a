"""Policy losses on a CUDA device are those on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.helpers.policy_losses import CASES, random_micro_batch, with_gradient


@pytest.mark.claim("Training on one device", "Policy losses and their gradients are those of the host.")
@pytest.mark.parametrize("case", CASES, ids=str)
def test_equal_to_the_host(case: dict[str, Any]) -> None:
    logprobs, micro_batch = random_micro_batch()
    device = torch.device("cuda")
    expected, slope = with_gradient(case, logprobs, micro_batch)
    loss, gradient = with_gradient(case, logprobs.to(device), micro_batch.to(device))
    torch.testing.assert_close(loss.per_token.cpu(), expected.per_token, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradient.cpu(), slope, rtol=1e-12, atol=1e-12)
    assert torch.equal(loss.clipped.cpu(), expected.clipped)
