"""The tiled head equals a plain log-softmax over whole sequences, forward and backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import spmdrl.model.logprobs
from spmdrl.config import ModelConfig
from spmdrl.model import logits_tile
from spmdrl.model.divergence import Divergence
from spmdrl.model.linear import adds_products
from spmdrl.model.logits_tile import Scale
from spmdrl.model.logprobs import Head, HeadOptions, next_token_logprobs, place_at, predicted_by, predicting_tokens
from spmdrl.model.policy import TokenLogprobs
from tests.helpers.logits_tiles import (
    PEAK_TILE_ELEMENTS,
    case,
    peak_over_prediction,
    predicted_bytes,
    products_added,
    require_near,
)

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
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    *,
    temperature: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """One sequence at a time, with all of [T, V] and autograd, in float64."""
    hidden, weight = hidden.double(), weight.double()
    bias = None if bias is None else bias.double()
    logprobs, entropies, start = [], [], 0
    for length in LENGTHS:
        rows = slice(start, start + length)
        logits = torch.nn.functional.linear(hidden[rows], weight, bias)
        if softcap is not None:
            logits = softcap * (logits / softcap).tanh()
        log_p = (logits / temperature).log_softmax(-1)[:-1]
        zero = torch.zeros(1, dtype=torch.float64)
        logprobs += [zero, log_p.gather(-1, token_ids[start + 1 : start + length, None])[:, 0]]
        entropies += [zero, -(log_p.exp() * log_p).sum(-1)]
        start += length
    return torch.cat(logprobs), torch.cat(entropies)


def tiled(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    token_ids: Tensor,
    positions: Tensor,
    options: HeadOptions,
) -> tuple[Tensor, Tensor]:
    """The same, as the policy does it."""
    rows = predicting_tokens(torch.ones(TOKENS, dtype=torch.bool), positions)
    targets = predicted_by(rows)
    scores = next_token_logprobs(hidden[rows], weight, bias, token_ids[targets], options)
    logprobs, entropy = (place_at(targets, score, TOKENS) for score in scores)
    return logprobs, entropy


@pytest.fixture(params=[1, 12, 2**20])
def tile_elements(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """From slabs of one token of the vocabulary to all of it at once."""
    monkeypatch.setitem(spmdrl.model.logprobs.TILE_ELEMENTS, "cpu", request.param)
    return request.param


@pytest.mark.usefixtures("tile_elements")
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 5, 1000])
@pytest.mark.parametrize("used", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("scale", [{"temperature": 0.7}, {"temperature": 0.7, "softcap": 2.5}], ids=["plain", "cap"])
def test_tiled_equals_whole(chunk: int, with_bias: bool, used: str, scale: dict[str, float]) -> None:
    per_token = torch.linspace(-1, 1, TOKENS)
    found = []
    for kind in ("fast", "slow"):
        hidden, weight, bias, token_ids, positions = inputs(with_bias)
        if kind == "fast":
            logprobs, entropy = tiled(hidden, weight, bias, token_ids, positions, HeadOptions(Scale(**scale), chunk))
        else:
            logprobs, entropy = plainly(hidden, weight, bias, token_ids, **scale)
        losses = {"logprobs": (per_token * logprobs).sum(), "entropy": 0.7 * (per_token.flip(0) * entropy).sum()}
        loss = sum(losses.values()) if used == "both" else losses[used]
        leaves = [leaf for leaf in (hidden, weight, bias) if leaf is not None]
        found.append((logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)))
    for fast, slow in zip(*found, strict=True):
        torch.testing.assert_close(fast, slow.float(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("chunk", [4, 16])
@pytest.mark.usefixtures("tile_elements")
def test_forbidden_tokens_count_as_if_they_were_not_there(chunk: int) -> None:
    hidden, weight, bias, token_ids, positions = inputs(with_bias=True)
    assert bias is not None
    allowed = torch.tensor([token not in (0, 3, 4, 10) for token in range(VOCABULARY)])
    token_ids = torch.nonzero(allowed).flatten()[token_ids % int(allowed.sum())]
    found = []
    for kind in ("forbidden", "left out"):
        if kind == "forbidden":
            head, shift, ids = weight, torch.where(allowed, bias, -torch.inf), token_ids
        else:
            head, shift, ids = weight[allowed], bias[allowed], (allowed.cumsum(0) - 1)[token_ids]
        logprobs, entropy = tiled(hidden, head, shift, ids, positions, HeadOptions(Scale(0.7), chunk))
        gradients = torch.autograd.grad((logprobs + 0.3 * entropy).sum(), (hidden, weight, bias))
        found.append((logprobs, entropy, *gradients))
    for with_forbidden, without in zip(*found, strict=True):
        torch.testing.assert_close(with_forbidden, without, rtol=1e-5, atol=1e-6)


def test_a_forbidden_target_is_impossible() -> None:
    bias = torch.tensor([0.0, -torch.inf, 0.0])
    logprobs, _ = next_token_logprobs(
        torch.zeros(2, 4), torch.zeros(3, 4), bias, torch.tensor([0, 1]), HeadOptions(Scale(), 2)
    )
    torch.testing.assert_close(logprobs, torch.tensor([0.5, 0.0]).log())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_scores_are_those_of_its_logits_in_float32(dtype: torch.dtype) -> None:
    hidden, weight, _, token_ids, _ = inputs(with_bias=False)
    hidden, weight = (leaf.detach().to(dtype).requires_grad_() for leaf in (hidden, weight))
    logprobs, entropy = next_token_logprobs(hidden, weight, None, token_ids, HeadOptions(Scale(0.7), 5))
    log_p = (torch.nn.functional.linear(hidden, weight).float() / 0.7).log_softmax(-1)
    expected = log_p.gather(-1, token_ids[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    torch.testing.assert_close((logprobs, entropy), expected, rtol=1e-5, atol=1e-6)
    fast, slow = (
        torch.autograd.grad((scores[0] + 0.3 * scores[1]).sum(), (hidden, weight))
        for scores in ((logprobs, entropy), expected)
    )
    assert [grad.dtype for grad in fast] == [dtype, dtype]
    torch.testing.assert_close(fast, slow, rtol=2e-2, atol=2e-2)


def test_nothing_to_predict_has_gradients_of_zero() -> None:
    hidden, weight, bias, token_ids, _ = inputs(with_bias=True)
    assert bias is not None
    logprobs, entropy = next_token_logprobs(hidden[:0], weight, bias, token_ids[:0], HeadOptions(Scale(), 4))
    gradients = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight, bias))
    assert all(torch.equal(gradient, torch.zeros_like(gradient)) for gradient in gradients)


def test_a_frozen_head_still_passes_gradients_on() -> None:
    hidden, weight, bias, token_ids, _ = inputs(with_bias=True)
    assert bias is not None

    def gradient(*head: Tensor) -> Tensor:
        logprobs, _ = next_token_logprobs(hidden, *head, token_ids, HeadOptions(Scale(), 4))
        return torch.autograd.grad(logprobs.sum(), hidden)[0]

    assert torch.equal(gradient(weight.detach(), bias.detach()), gradient(weight, bias))


@pytest.mark.parametrize("tokens", [0, 40])
def test_gradients_that_products_add_up_are_no_further_from_float64(tokens: int) -> None:
    draw = torch.Generator().manual_seed(0)
    leaves = [torch.randn(shape, generator=draw).bfloat16() for shape in ((tokens, 32), (97, 32), (97,))]

    def gradients(dtype: torch.dtype) -> list[Tensor]:
        hidden, weight, bias = (leaf.to(dtype).requires_grad_() for leaf in leaves)
        targets, slope = torch.arange(tokens) % 97, torch.linspace(-1, 1, tokens)
        head = Head(torch.nn.functional.linear, columns=30)
        logprobs, entropy = next_token_logprobs(hidden, weight, bias, targets, HeadOptions(Scale(0.7), 16), head=head)
        return [x.double() for x in torch.autograd.grad((slope * (logprobs + entropy)).sum(), (hidden, weight, bias))]

    exact, plain = gradients(torch.float32), gradients(torch.bfloat16)
    with products_added("cpu"):
        added = gradients(torch.bfloat16)
    assert adds_products("cpu", torch.bfloat16) is False  # again
    for ours, others, true in zip(added, plain, exact, strict=True):
        assert (ours - true).norm() <= (others - true).norm()
    assert tokens == 0 or not torch.equal(added[0], plain[0])


def test_no_tile_holds_more_logits_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def watched(rows: Tensor, head: Tensor, bias: Tensor | None) -> Tensor:
        seen.append((len(rows), len(head)))
        return torch.nn.functional.linear(rows, head, bias)

    monkeypatch.setitem(spmdrl.model.logprobs.TILE_ELEMENTS, "cpu", 12)
    hidden, weight, bias, token_ids, _ = inputs(with_bias=True)
    head = Head(watched)
    logprobs, _ = next_token_logprobs(hidden, weight, bias, token_ids, HeadOptions(Scale(), 4), head=head)
    logprobs.sum().backward()
    assert max(rows for rows, _ in seen) == 4
    assert max(rows * columns for rows, columns in seen) == 12
    assert sum(rows * columns for rows, columns in seen) == 2 * TOKENS * VOCABULARY


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("hidden_size", [8, 48, 512])
def test_the_memory_is_what_is_predicted(dtype: torch.dtype, hidden_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(spmdrl.model.logprobs.TILE_ELEMENTS, "cpu", PEAK_TILE_ELEMENTS)
    plain, capped = (
        peak_over_prediction(logits_tile, dtype, hidden_size, on_gpu=False, softcap=cap) for cap in (None, 3.0)
    )
    assert 0.75 < plain <= capped < 1.1  # the slope of a soft cap is one of the planned copies of a tile


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["reverse", "forward", "jsd"])
def test_a_teacher_needs_no_more_memory_than_is_predicted(kind: Divergence, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(spmdrl.model.logprobs.TILE_ELEMENTS, "cpu", PEAK_TILE_ELEMENTS)
    for dtype in (torch.float32, torch.bfloat16):
        assert 0.5 < peak_over_prediction(logits_tile, dtype, 8, on_gpu=False, kind=kind) < 1.1


def test_a_divergence_over_a_large_vocabulary_takes_no_more_than_40_mib() -> None:
    """At the sizes of Qwen3-0.6B, of which the hidden states' gradient has 16; a whole [T, V] would have 2,374."""
    sizes = {
        "hidden_size": 1024,
        "vocabulary": 151_936,
        "tokens": 4096,
        "chunk": ModelConfig(path=".").logits_chunk_tokens,
    }
    assert predicted_bytes("cpu", torch.float32, on_gpu=False, has_teacher=True, **sizes) <= 40 * 2**20


def test_tiles_on_cuda_begin_cache_lines_and_are_not_wide() -> None:
    for chunk in (1, 1371, 2047, 2048, 2**20):
        *whole, _ = Head(torch.nn.functional.linear).slabs(151_936, chunk, "cuda")
        assert all(slab.start % 64 == slab.stop % 64 == 0 for slab in whole)
        assert all(0 < slab.stop - slab.start <= 8192 for slab in whole)
        assert all(chunk * (slab.stop - slab.start) <= max(2**24, 64 * chunk) for slab in whole)


def test_on_a_device_gradients_may_be_rounded_in_two_ways_and_not_differ() -> None:
    """`require_near`, by which `tests/gpu` compares them, on a division and on a product with the inverse."""
    of, temperature = case(128, 8192, torch.float32), torch.tensor(0.7)
    (logits, _), inverse = of.tiles, temperature.reciprocal()

    def gradient(logits: Tensor, places: Tensor) -> Tensor:
        return logits_tile.gradient(logits, places, 0, Scale(), of.terms)

    ours, theirs = (gradient(z, of.targets) for z in (logits / temperature, logits * inverse))
    assert not torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    require_near(ours, theirs)
    with pytest.raises(AssertionError, match="apart"):
        require_near(ours, gradient(logits * inverse, of.targets + 1))
    with pytest.raises(AssertionError, match="apart"):
        require_near(ours, gradient(logits * inverse * (1 + 1e-5), of.targets))


def test_fsdp_finds_the_tensors_of_a_policys_result() -> None:
    """Up to torch 2.11 it waits for the gradients of these alone: a model in which it finds none is never updated."""
    columns = [torch.zeros(3, requires_grad=True), torch.zeros(3)]
    found = [leaf for leaf in tree_leaves(TokenLogprobs(*columns)) if leaf is not None]
    assert len(found) == 2 and all(one is other for one, other in zip(found, columns, strict=True))
