"""Context parallelism over NCCL; it needs two CUDA devices."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from spmdrl.model.attention import Kernel, choose_kernel, packed_attention
from spmdrl.model.context import context_attention, gather_tokens
from spmdrl.types import UserError
from tests.spmd.ranks import run_ranks
from tests.spmd.test_context import STYLES, _mesh, _mine, _offsets, _with_gradients

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")

HEADS, HEAD_DIM = 8, 64
LAYOUTS = [[512, 512], [1024], [500, 24, 500], [300, 1, 1, 700, 22], [1000, *[1] * 24]]
WINDOWS = [None, 100, 700]


def _kernel_equals_float32(kernel: Kernel) -> None:
    """With `kernel` in bfloat16 over two ranks, as SDPA in float32 of the same numbers on one."""
    with _mesh() as mesh:
        torch.manual_seed(0)
        for style, seqlens, kv_heads, window in product(STYLES, LAYOUTS, (8, 2, 1), WINDOWS):
            cu = _offsets(seqlens).cuda()
            tokens, options = sum(seqlens), {"layer": 0, "scale": HEAD_DIM**-0.5, "window": window}
            heads = (HEADS, kv_heads, kv_heads)
            # Drawn on the host: the same numbers on every device.
            qkv = [torch.randn(1, h, tokens, HEAD_DIM).cuda().bfloat16() for h in heads]
            grad = torch.randn(1, tokens, HEADS, HEAD_DIM).cuda().bfloat16()
            whole = [x.float().requires_grad_() for x in qkv]
            wanted = _with_gradients(packed_attention(cu, seqlens, "sdpa")(*whole, **options), grad.float(), whole)
            local = [_mine(x, 2, mesh).requires_grad_() for x in qkv]
            attend = context_attention(cu, seqlens, kernel, mesh, style=style)
            found = _with_gradients(attend(*local, **options), _mine(grad, 1, mesh), local)
            for one, of_all, dim in zip(found, wanted, (1, 2, 2, 2), strict=True):
                mine = _mine(of_all, dim, mesh)
                error = (one.float() - mine).norm() / mine.norm()
                assert error < 0.02, f"{style}, {seqlens}, {kv_heads} kv heads, window {window}: {error:.3g}"


@pytest.mark.parametrize("kernel", ["sdpa", "varlen", "flash_attn_2", "flash_attn_3"])
def test_two_devices_attend_as_one(kernel: Kernel) -> None:
    try:
        choose_kernel(kernel, "cuda", torch.bfloat16)
    except UserError as problem:
        pytest.skip(str(problem))
    run_ranks(2, _kernel_equals_float32, kernel)


def _gathered() -> None:
    with _mesh() as mesh:
        whole = torch.arange(8.0, device="cuda")
        local = _mine(whole, 0, mesh).clone().requires_grad_()
        gathered = gather_tokens(local, mesh)
        torch.testing.assert_close(gathered, whole, rtol=0, atol=0)
        (own,) = torch.autograd.grad(gathered.square().sum(), local)
        torch.testing.assert_close(own, 2 * local.detach(), rtol=0, atol=0)


def test_tokens_are_gathered_between_devices() -> None:
    run_ranks(2, _gathered)
