"""The head scores the loss tokens as if it scored all of them, and prompts and filling never reach it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spmdrl.model.kernels import Kernel
from spmdrl.model.policy import Policy
from spmdrl.step.batch import lay_end_to_end
from spmdrl.types import MicroBatch
from tests.helpers.policies import policy_of
from tests.helpers.sequences import random_sequences

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}


def policy(kernel: Kernel) -> Policy:
    return policy_of("none", kernel=kernel, num_hidden_layers=2, **SIZES)


def scored(policy: Policy, micro_batch: MicroBatch, wanted: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """(logprobs and entropy [T] of the wanted tokens, 0 elsewhere; the gradients of a loss of them)."""
    scores = policy(micro_batch)
    seen = [torch.where(wanted, values, 0.0) for values in (scores.logprobs, scores.entropy)]
    loss = (torch.linspace(-1, 1, len(wanted)) * (seen[0] + 0.3 * seen[1])).sum()
    return [values.detach() for values in seen], list(torch.autograd.grad(loss, list(policy.parameters())))


@pytest.mark.parametrize("kernel", ["sdpa", "invariant"])
def test_rows_of_loss_tokens_give_what_all_rows_give(kernel: Kernel) -> None:
    micro_batch = lay_end_to_end(random_sequences(6), {}, multiple=7)
    inside_a_response = torch.arange(len(micro_batch.token_ids)) % 5 == 3  # what a tool wrote is not trained on
    wanted = micro_batch.loss_mask & ~inside_a_response
    some, every = (replace(micro_batch, loss_mask=mask) for mask in (wanted, torch.ones_like(wanted)))
    (values, gradients), (all_values, all_gradients) = (scored(policy(kernel), m, wanted) for m in (some, every))
    for one, other in zip(values, all_values, strict=True):
        if kernel == "invariant":
            assert torch.equal(one, other)
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for one, other in zip(gradients, all_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    scores = policy(kernel)(some)
    assert torch.equal(scores.logprobs == 0, ~wanted) and torch.equal(scores.entropy == 0, ~wanted)


def test_only_rows_of_loss_tokens_reach_the_head() -> None:
    micro_batch, model, seen = lay_end_to_end(random_sequences(6), {}), policy("sdpa"), []
    head = model.next_token_logprobs

    def watched(hidden: Tensor, *others: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        seen.append(len(hidden))
        return head(hidden, *others, **options)

    model.next_token_logprobs = watched
    model(micro_batch)
    assert seen == [int(micro_batch.loss_mask.sum())]


def test_filling_alone_has_gradients_of_zero_for_every_weight() -> None:
    filling = lay_end_to_end([], {}, multiple=4)
    values, gradients = scored(policy("sdpa"), filling, filling.loss_mask)
    assert all(torch.equal(x, torch.zeros_like(x)) for x in values + gradients)
