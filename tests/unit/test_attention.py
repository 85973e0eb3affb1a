"""Attention by every kernel equals a softmax that is written out, forward and backward, with and without sinks."""

from __future__ import annotations

import functools
import random
import sys
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.cpu import kernels_c
from spmdrl.cpu.kernels_c import batches_of_similar_length
from spmdrl.engine.torch.cache import attend_to_cache
from spmdrl.model import plain_attention
from spmdrl.model.attention import choose_kernel, fastest_varlen, packed_attention
from spmdrl.model.attention_layer import AttentionLayer, SeenKeys
from spmdrl.model.kernels import Kernel, SequenceLayout, causal_attention
from spmdrl.types import UserError
from tests.helpers import flash_on_cpu
from tests.helpers.rounding import assert_within, causal_attention_bounds

SCALE = 0.3
SEQLENS = [3, 3, 3, 1, 9, 14, 14]
CU_SEQLENS = torch.tensor([0, *SEQLENS]).cumsum(0).int()
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8
FLASH_ATTN: dict[Kernel, str] = {"flash_attn_2": "flash_attn", "flash_attn_3": "flash_attn_interface"}


@pytest.fixture(autouse=True)
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in FLASH_ATTN.values():
        monkeypatch.setitem(sys.modules, module, flash_on_cpu)


def inputs(earlier: int = 0) -> tuple[Tensor, ...]:
    """q, k, v and sinks for the sequences end to end, and `earlier` more keys."""
    torch.manual_seed(0)
    tokens = sum(SEQLENS)
    shapes = [(tokens, HEADS), (earlier + tokens, KV_HEADS), (earlier + tokens, KV_HEADS)]
    return *(torch.randn(*shape, HEAD_DIM) for shape in shapes), torch.randn(HEADS)


def layer(window: int | None = None, sinks: Tensor | None = None, softcap: float | None = None) -> AttentionLayer:
    return AttentionLayer(index=0, scale=SCALE, window=window, sinks=sinks, softcap=softcap)


def written_out(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    *,
    earlier: int,
    window: int | None,
    has_sinks: bool = False,
    softcap: float | None = None,
) -> Tensor:
    """[T, H, D], each sequence by itself: scores, the sink as one more, softmax, and the sink dropped."""
    outputs, groups = [], HEADS // KV_HEADS
    k, v = (x.repeat_interleave(groups, dim=1).split([earlier + SEQLENS[0], *SEQLENS[1:]]) for x in (k, v))
    for rows in zip(q.split(SEQLENS), k, v, strict=True):
        q_rows, k_rows, v_rows = (x.transpose(0, 1) for x in rows)
        token = torch.arange(k_rows.shape[1])
        distance = token[-q_rows.shape[1] :, None] - token
        hidden = (distance < 0) | (distance >= (window or len(token)))
        scores = q_rows @ k_rows.mT * SCALE
        scores = scores if softcap is None else (scores / softcap).tanh() * softcap
        scores = scores.masked_fill(hidden, -torch.inf)
        column = sinks[:, None, None].expand(-1, q_rows.shape[1], int(has_sinks))
        weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., : len(token)]
        outputs.append((weights @ v_rows).transpose(0, 1))
    return torch.cat(outputs)


def output_and_gradients(attend: Callable[..., Tensor], leaves: tuple[Tensor, ...]) -> list[Tensor]:
    leaves = tuple(leaf.clone().requires_grad_() for leaf in leaves)
    out = attend(*leaves)
    slope = torch.linspace(-1, 1, out.numel()).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * slope).sum(), leaves, materialize_grads=True)]


def assert_all_close(found: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


CASES = [*product(("sdpa", "varlen", "varlen of torch 2.11"), (False, True)), *product(FLASH_ATTN, (False,))]


@pytest.mark.parametrize("window", [None, 1, 4, 12])
@pytest.mark.parametrize("earlier", [0, 5])
@pytest.mark.parametrize(("kernel", "has_sinks"), CASES)
def test_kernels_equal_the_written_out_softmax(
    kernel: str, has_sinks: bool, earlier: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, _, is_older = kernel.partition(" of ")  # it has no grouped heads
    if is_older:
        monkeypatch.setattr("spmdrl.model.kernels.varlen_takes_groups", lambda: False)
    causal = causal_attention(SequenceLayout(SEQLENS, CU_SEQLENS, (earlier,)), kernel)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return causal(q, k, v, layer(window, sinks if has_sinks else None))

    expected = functools.partial(written_out, earlier=earlier, window=window, has_sinks=has_sinks)
    leaves = inputs(earlier)
    assert_all_close(output_and_gradients(attend, leaves), output_and_gradients(expected, leaves))


@pytest.mark.parametrize("window", [None, 1, 4, 12])
@pytest.mark.parametrize("earlier", [0, 5])
@pytest.mark.parametrize("kernel", ["sdpa", "varlen", *FLASH_ATTN])
def test_scores_are_capped(monkeypatch: pytest.MonkeyPatch, kernel: Kernel, earlier: int, window: int | None) -> None:
    """Also where queries come in several blocks, of 3 or so."""
    monkeypatch.setattr(plain_attention, "_BLOCK_BYTES", 4 * HEADS * 20 * 3)
    causal = causal_attention(SequenceLayout(SEQLENS, CU_SEQLENS, (earlier,)), kernel)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return causal(q, k, v, layer(window, softcap=0.7))

    expected = functools.partial(written_out, earlier=earlier, window=window, softcap=0.7)
    leaves = inputs(earlier)
    assert_all_close(output_and_gradients(attend, leaves), output_and_gradients(expected, leaves))


@pytest.mark.parametrize("kernel", ["sdpa", "varlen"])
def test_packed_attention_is_that_of_as_many_keys_as_queries(kernel: Kernel) -> None:
    q, k, v, sinks = inputs()
    as_in_models = [x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)]
    attend = packed_attention(CU_SEQLENS, SEQLENS, kernel)
    found = attend(*as_in_models, layer(4, sinks))
    expected = written_out(q, k, v, sinks, earlier=0, window=4, has_sinks=True)
    torch.testing.assert_close(found, expected.unsqueeze(0), rtol=0, atol=1e-5)


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("seqlens", [[9] * 4, [1], [12, 11, 11, 10, 4, 4, 3, 1, 1], [130, 130, 129, 128, 120, 7, 9]])
def test_short_sequences_together_are_as_each_alone(seqlens: list[int], groups: int) -> None:
    torch.manual_seed(0)
    leaves = [torch.randn(sum(seqlens), heads, 8) for heads in (2 * groups, 2, 2)]
    layout = SequenceLayout(seqlens, torch.tensor([0, *seqlens]).cumsum(0).int())

    def together(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_attention(layout, "sdpa")(q, k, v, layer())

    slope = torch.linspace(-1, 1, leaves[0].numel()).view(leaves[0].shape)
    alone = causal_attention_bounds(*leaves, slope, seqlens, SCALE)
    for one, (exact, bound) in zip(output_and_gradients(together, leaves), alone, strict=True):
        assert_within(one, exact, bound)


def test_sequences_of_similar_length_are_one_batch() -> None:
    assert [*batches_of_similar_length([9, 9, 8, 1, 1], 128, num_heads=4)] == [[9, 9, 8], [1, 1]]
    assert [*batches_of_similar_length([9, 9, 8, 1, 1], 8, num_heads=4)] == [[9, 9], [8], [1, 1]]
    assert [len(batch) for batch in batches_of_similar_length([128] * 20, 128, num_heads=32)] == [8, 8, 4]
    assert [len(batch) for batch in batches_of_similar_length([129] * 20, 128, num_heads=32)] == [20]
    assert [*batches_of_similar_length([], 8, num_heads=4)] == []
    rng = random.Random(0)
    for _ in range(100):
        lengths = sorted((rng.randint(1, 200) for _ in range(rng.randint(1, 60))), reverse=True)
        batches = [*batches_of_similar_length(lengths, 128, num_heads=4)]
        assert [length for batch in batches for length in batch] == lengths
        assert all(max(batch) * len(batch) <= 1.25 * sum(batch) for batch in batches)
        assert all(len(set(batch)) == 1 for batch in batches if max(batch) > 128)


def test_a_run_of_equal_lengths_is_one_causal_call_without_a_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask would double the time of long sequences."""
    monkeypatch.setattr(kernels_c, "MAX_TOKENS", 0)
    calls, sdpa = [], F.scaled_dot_product_attention

    def recorded(q: Tensor, k: Tensor, v: Tensor, *, attn_mask: Tensor | None, is_causal: bool, **options: Any) -> Any:
        calls.append((q.shape[0], attn_mask is None and is_causal))
        return sdpa(q, k, v, attn_mask=attn_mask, is_causal=is_causal, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    q, k, v, sinks = inputs(earlier=5)
    for given, window in ((None, None), (sinks, 14)):
        causal_attention(SequenceLayout(SEQLENS, CU_SEQLENS), "sdpa")(q, k[5:], v[5:], layer(window, given))
        assert calls == [(3, True), (1, True), (1, True), (2, True)]
        calls.clear()
    # The first of three equal lengths sees more.
    causal_attention(SequenceLayout(SEQLENS, CU_SEQLENS, (5,)), "sdpa")(q, k, v, layer())
    assert calls == [(1, False), (2, True), (1, True), (1, True), (2, True)]


@pytest.mark.parametrize("kernel", ["varlen", *FLASH_ATTN])
@pytest.mark.parametrize("head_dim", [12, 264])
def test_heads_of_sizes_that_flash_attention_lacks_are_computed_by_sdpa(kernel: Kernel, head_dim: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(sum(SEQLENS), heads, head_dim) for heads in (HEADS, KV_HEADS, KV_HEADS))
    layout = SequenceLayout(SEQLENS, CU_SEQLENS)
    of_sdpa, found = (causal_attention(layout, name)(q, k, v, layer(5)) for name in ("sdpa", kernel))
    assert torch.equal(found, of_sdpa)


@pytest.mark.parametrize("kernel", FLASH_ATTN)
def test_flash_attn_is_asked_to_be_deterministic_and_refuses_sinks(kernel: Kernel) -> None:
    causal = causal_attention(SequenceLayout(SEQLENS, CU_SEQLENS), kernel)
    q, k, v, sinks = inputs()
    usual = causal(q, k, v, layer())
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(causal(q, k, v, layer()), usual)
    finally:
        torch.use_deterministic_algorithms(False)
    with pytest.raises(UserError, match=f'model.attention = "{kernel}" has no attention sinks'):
        causal(q, k, v, layer(None, sinks))


def test_older_flash_attn_3_returns_log_sums_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    *qkv, _ = inputs()
    layout, newer = SequenceLayout(SEQLENS, CU_SEQLENS), flash_on_cpu.flash_attn_varlen_func
    usual = causal_attention(layout, "flash_attn_3")(*qkv, layer())
    monkeypatch.setattr(flash_on_cpu, "flash_attn_varlen_func", lambda *args, **kwargs: (newer(*args, **kwargs), None))
    assert torch.equal(causal_attention(layout, "flash_attn_3")(*qkv, layer()), usual)


@pytest.mark.parametrize(
    ("capability", "has", "installed", "expected"),
    [
        ((9, 0), None, True, "flash_attn_3"),
        ((9, 0), None, False, "varlen"),
        ((9, 0), "sinks", True, "varlen"),
        ((8, 0), None, True, "varlen"),
        ((10, 0), None, True, "varlen"),
        ((9, 0), "attn_logit_softcapping", True, "flash_attn_3"),
        ((9, 0), "attn_logit_softcapping", False, "flash_attn_2"),
        ((8, 0), "attn_logit_softcapping", True, "flash_attn_2"),
    ],
)
def test_flash_attention_is_chosen_where_it_runs(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has: str | None, installed: bool, expected: Kernel
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    if not installed:
        monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    module = torch.nn.Linear(1, 1)
    if has is not None:
        setattr(module, has, torch.nn.Parameter(torch.zeros(2)))
    assert fastest_varlen(torch.nn.Sequential(module)) == expected


def test_flash_attention_3_is_refused_where_it_has_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("flash_attn_3", "cuda", torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert choose_kernel(*asked) == "flash_attn_3"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (10, 3))
    with pytest.raises(UserError, match=r'no kernels for devices of compute capability 10.3, .* set it to "auto"'):
        choose_kernel(*asked)


@pytest.mark.parametrize("kernel", FLASH_ATTN)
def test_a_package_that_is_missing_is_named(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, FLASH_ATTN[kernel], None)
    with pytest.raises(UserError, match=f'"{kernel}" needs a package that is not installed .*{FLASH_ATTN[kernel]}'):
        causal_attention(SequenceLayout(SEQLENS, CU_SEQLENS), kernel)


def test_decoding_in_bfloat16_counts_the_sinks() -> None:
    q, k, v, sinks = inputs()
    rows = len(SEQLENS)
    keys, values = (x[:20].transpose(0, 1).expand(rows, -1, -1, -1) for x in (k, v))
    seen = SeenKeys(lengths=torch.tensor(SEQLENS).clamp(max=20), shortest=min(SEQLENS), longest=20)
    arguments = (q[:rows].transpose(0, 1).unsqueeze(0), keys, values)
    exact = attend_to_cache(*arguments, seen=seen, layer=layer(sinks=sinks))
    halves = [x.bfloat16() for x in arguments]
    rounded = attend_to_cache(*halves, seen=seen, layer=layer(sinks=sinks.bfloat16()))
    without = attend_to_cache(*halves, seen=seen, layer=layer())
    torch.testing.assert_close(rounded.float(), exact, rtol=0, atol=0.02)
    assert (without.float() - exact).abs().max() > 0.2
