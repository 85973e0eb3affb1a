"""Context parallelism over NCCL; it needs two CUDA devices."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor

from spmdrl.dist.collectives import sum_over
from spmdrl.model.attention import Kernel, choose_kernel, packed_attention
from spmdrl.model.attention_layer import Attend, AttentionLayer
from spmdrl.model.context import context_attention, gather_tokens
from spmdrl.types import UserError
from tests.helpers.context import STYLES, local_part, offsets_of, with_gradients, world_mesh
from tests.helpers.device_sizes import sized
from tests.helpers.ranks import run_ranks

CONTEXT = pytest.mark.claim("Several devices", "Context parallelism: two devices attend as one, with every kernel.")

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

HEADS, HEAD_DIM = 8, sized(64, emulated=16)
LAYOUTS = sized(
    [[512, 512], [1024], [500, 24, 500], [300, 1, 1, 700, 22], [1000, *[1] * 24]],
    emulated=[[32, 32], [64], [30, 4, 30], [19, 1, 1, 40, 3], [40, *[1] * 24]],
)
WINDOWS = sized([None, 100, 700], emulated=[None, 6, 44])


def _attended(attend: Attend, leaves: list[Tensor], grad: Tensor, window: int | None) -> list[Tensor]:
    """The result, and the gradients of query, key, value and, if they are given, sinks."""
    leaves = [leaf.detach().requires_grad_() for leaf in leaves]
    query, key, value, *sinks = leaves
    layer = AttentionLayer(index=0, scale=HEAD_DIM**-0.5, window=window, sinks=sinks[0] if sinks else None)
    out = attend(query, key, value, layer)
    return with_gradients(out, grad, leaves)


def _kernel_equals_float32(kernel: Kernel, has_sinks: bool) -> None:
    """With `kernel` in bfloat16 over two ranks, as SDPA in float32 of the same numbers on one."""
    with world_mesh() as mesh:
        torch.manual_seed(0)
        for style, seqlens, kv_heads, window in product(STYLES, LAYOUTS, (8, 2, 1), WINDOWS):
            cu, tokens = offsets_of(seqlens).cuda(), sum(seqlens)
            # Drawn on the host: the same numbers on every device.
            qkv = [torch.randn(1, h, tokens, HEAD_DIM).cuda().bfloat16() for h in (HEADS, kv_heads, kv_heads)]
            sinks = [torch.randn(HEADS).cuda().bfloat16()] if has_sinks else []
            grad = torch.randn(1, tokens, HEADS, HEAD_DIM).cuda().bfloat16()
            whole = [x.float() for x in (*qkv, *sinks)]
            wanted = _attended(packed_attention(cu, seqlens, "sdpa"), whole, grad.float(), window)
            wanted[:4] = (local_part(x, dim, mesh) for x, dim in zip(wanted[:4], (1, 2, 2, 2), strict=True))
            local = [*(local_part(x, 2, mesh) for x in qkv), *sinks]
            attend = context_attention(cu, seqlens, kernel, mesh, style=style)
            found = [x.float() for x in _attended(attend, local, local_part(grad, 1, mesh), window)]
            found[4:] = (sum_over(mesh, of_sinks) for of_sinks in found[4:])
            for one, other in zip(found, wanted, strict=True):
                error = (one - other).norm() / other.norm()
                assert error < 0.02, f"{style}, {seqlens}, {kv_heads} kv heads, window {window}: {error:.3g}"


CASES = [*product(("sdpa", "varlen"), (False, True)), ("flash_attn_2", False), ("flash_attn_3", False)]


@CONTEXT
@pytest.mark.parametrize(("kernel", "has_sinks"), CASES)
def test_two_devices_attend_as_one(kernel: Kernel, has_sinks: bool) -> None:
    try:
        choose_kernel(kernel, "cuda", torch.bfloat16)
    except UserError as problem:
        pytest.skip(str(problem))
    run_ranks(2, _kernel_equals_float32, kernel, has_sinks)


def _gathered() -> None:
    with world_mesh() as mesh:
        whole = torch.arange(8.0, device="cuda")
        local = local_part(whole, 0, mesh).clone().requires_grad_()
        gathered = gather_tokens(local, mesh)
        torch.testing.assert_close(gathered, whole, rtol=0, atol=0)
        (own,) = torch.autograd.grad(gathered.square().sum(), local)
        torch.testing.assert_close(own, 2 * local.detach(), rtol=0, atol=0)


@CONTEXT
def test_tokens_are_gathered_between_devices() -> None:
    run_ranks(2, _gathered)
