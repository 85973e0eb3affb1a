"""A token at a time, recurrent operators compute what they compute of whole sequences."""

from __future__ import annotations

import pytest
import torch

from spmdrl.model.gated_delta import gated_delta_rule
from spmdrl.model.mixer import causal_conv

LENGTH, SEQUENCES = 45, 3  # more than one chunk


def test_the_rule_of_one_token() -> None:
    torch.manual_seed(0)
    query, key = torch.randn(2, SEQUENCES, LENGTH, 2, 8)
    value, decay = torch.randn(SEQUENCES, LENGTH, 4, 6), -torch.rand(SEQUENCES, LENGTH, 4)
    inputs = (query, key, value, decay, torch.rand(SEQUENCES, LENGTH, 4))
    whole, final = gated_delta_rule(*(x.flatten(0, 1) for x in inputs), [LENGTH] * SEQUENCES)
    state, steps = None, []
    for position in range(LENGTH):
        out, state = gated_delta_rule(*(x[:, position] for x in inputs), [1] * SEQUENCES, state)
        steps.append(out)
    torch.testing.assert_close(torch.stack(steps, dim=1).flatten(0, 1), whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state, final, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_convolution_of_one_token(dtype: torch.dtype, has_bias: bool) -> None:
    """In bfloat16 too the sums are those of float32, so that few are rounded otherwise."""
    torch.manual_seed(0)
    x, weight = torch.randn(SEQUENCES, LENGTH, 64).to(dtype), torch.randn(64, 4).to(dtype)
    bias = torch.randn(64).to(dtype) if has_bias else None
    whole, left = causal_conv(x.flatten(0, 1), weight, bias, [LENGTH] * SEQUENCES)
    before, steps = None, []
    for position in range(LENGTH):
        out, before = causal_conv(x[:, position], weight, bias, [1] * SEQUENCES, before)
        steps.append(out)
    found = torch.stack(steps, dim=1).flatten(0, 1)
    assert torch.equal(before, left)
    torch.testing.assert_close(found, whole)
    assert dtype == torch.float32 or (found != whole).float().mean() < 0.01
