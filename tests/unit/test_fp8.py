"""Weights in e4m3 with scales of blocks: the numbers of a slow twin, whichever parts they are made of."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from spmdrl.model import fp8
from spmdrl.refit.bucket import ParameterLayout, Split


def slowly(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return e4m3 numbers and scales of a matrix, a block after the other."""
    numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    rows, columns = (math.ceil(size / 128) for size in weight.shape)
    scales = torch.empty(rows, columns)
    for i, j in itertools.product(range(rows), range(columns)):
        block = weight[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)].float()
        largest = torch.tensor(max(max(abs(x) for row in block.tolist() for x in row), 1e-4), dtype=torch.float32)
        numbers[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)] = (block * (448 / largest)).to(torch.float8_e4m3fn)
        scales[i, j] = largest / 448
    return numbers, scales


def bits(numbers: Tensor) -> Tensor:
    return numbers.view(torch.uint8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(256, 128), (130, 300), (1, 5)])
def test_blocks_are_quantized_one_by_one(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[:, -1] = 0
    numbers, scales = slowly(weight)
    maxima = fp8.block_maxima(weight)
    assert torch.equal(fp8.scales_of(maxima), scales)
    assert torch.equal(bits(fp8.quantized(weight, maxima)), bits(numbers))
    found = fp8.as_numbers({"w": numbers, "w_scale_inv": scales, "b": scales}, torch.float32)
    spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[: shape[0], : shape[1]]
    assert found.keys() == {"w", "b"} and torch.equal(found["w"], numbers.float() * spread)


def test_parts_whose_blocks_straddle_give_the_numbers_of_the_whole() -> None:
    """Rows and columns of three axes of ranks, one of them in groups as of fused weights."""
    weight = torch.randn(330, 290, generator=torch.Generator().manual_seed(0))
    layout = ParameterLayout(weight.shape, (Split(2, 0, groups=2), Split(3, 1), Split(2, 0)))
    numbers, scales = slowly(weight)
    covered = torch.zeros(weight.shape)
    for rank in range(12):
        for box, _ in layout.boxes(rank):
            first = (box[0].start, box[1].start)
            blocks = tuple(slice(part.start // 128, -(-part.stop // 128)) for part in box)
            found = fp8.quantized(weight[box], scales[blocks] * 448, first)
            again = fp8.dequantized(numbers[box], scales[blocks], first)
            assert torch.equal(bits(numbers[box]), bits(fp8.quantized(weight, fp8.block_maxima(weight))[box]))
            assert found.shape == weight[box].shape
            assert torch.equal(again, fp8.dequantized(numbers, scales)[box])
            covered[box] += 1
    assert torch.equal(covered, torch.ones(weight.shape))


def test_projections_are_quantized_and_nothing_else() -> None:
    layer = "model.layers.0."
    yes = [
        "self_attn.q_proj.weight",
        "mlp.down_proj.weight",
        "mlp.gate_up_proj.weight",
        "mlp.shared_expert.up_proj.weight",
    ]
    assert all(fp8.is_quantized(layer + name, 2) for name in yes)
    assert fp8.is_quantized(layer + "mlp.experts.gate_up_proj", 3)
    no = [
        "mlp.gate.weight",
        "mlp.shared_expert_gate.weight",
        "linear_attn.in_proj_qkvz.weight",
        "self_attn.q_norm.weight",
    ]
    assert not any(fp8.is_quantized(name, 2) for name in [layer + name for name in no])
    assert not any(fp8.is_quantized(name, 2) for name in ("model.embed_tokens.weight", "lm_head.weight"))
    assert not fp8.is_quantized(layer + "self_attn.q_proj.bias", 1)
    assert not fp8.is_quantized("model.visual.blocks.0.mlp.gate_proj.weight", 2)
