"""The chunked head equals a plain log-softmax over whole sequences, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import spmdrl.model.logprobs
from spmdrl.model.logprobs import next_token_scores, predicting_rows

LENGTHS = [1, 7, 3, 12]
TOKENS, HIDDEN, VOCABULARY = sum(LENGTHS), 6, 11


def inputs(with_bias: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).requires_grad_()

    bias = random(VOCABULARY) if with_bias else None
    token_ids = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    return random(TOKENS, HIDDEN), random(VOCABULARY, HIDDEN), bias, token_ids, positions


def plainly(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, token_ids: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """One sequence at a time, with all of [T, V] and autograd."""
    logprobs, entropies, start = [], [], 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        log_p = (torch.nn.functional.linear(hidden[rows], weight, bias) / temperature).log_softmax(-1)[:-1]
        zero = torch.zeros(1)
        logprobs += [zero, log_p.gather(-1, token_ids[start + 1 : start + length, None])[:, 0]]
        entropies += [zero, -(log_p.exp() * log_p).sum(-1)]
        start += length
    return torch.cat(logprobs), torch.cat(entropies)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.7])
def test_chunked_equals_whole(chunk: int, with_bias: bool, entropy_coef: float) -> None:
    per_token = torch.linspace(-1, 1, TOKENS)
    gradients = []
    for kind in ("fast", "slow"):
        hidden, weight, bias, token_ids, positions = inputs(with_bias)
        if kind == "fast":
            rows = predicting_rows(positions)
            scores = next_token_scores(hidden, weight, bias, token_ids, rows, temperature=0.7, chunk=chunk)
        else:
            scores = plainly(hidden, weight, bias, token_ids, 0.7)
        logprobs, entropy = scores
        loss = (per_token * logprobs).sum()
        if entropy_coef:
            loss = loss + entropy_coef * (per_token * entropy).sum()
        leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
        gradients.append((logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)))
    for fast, slow in zip(*gradients, strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-6)


def test_a_forbidden_token_has_no_part_in_the_entropy() -> None:
    hidden, weight, _, token_ids, positions = inputs(with_bias=False)
    bias = torch.zeros(VOCABULARY)
    bias[3] = -torch.inf
    rows = predicting_rows(positions)
    _, entropy = next_token_scores(hidden, weight, bias, token_ids, rows, temperature=1.0, chunk=4)
    assert torch.isfinite(entropy).all()


def test_no_chunk_holds_more_logits_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    logits_of = spmdrl.model.logprobs._logits

    def watched(rows: Tensor, *others: Any) -> Tensor:
        seen.append(rows.shape[0])
        return logits_of(rows, *others)

    monkeypatch.setattr(spmdrl.model.logprobs, "_logits", watched)
    hidden, weight, bias, token_ids, positions = inputs(with_bias=True)
    rows = predicting_rows(positions)
    logprobs, _ = next_token_scores(hidden, weight, bias, token_ids, rows, temperature=1.0, chunk=4)
    logprobs.sum().backward()
    assert max(seen) == 4
    assert sum(seen) == 2 * len(rows)
