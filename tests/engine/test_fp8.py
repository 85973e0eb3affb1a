"""SGLang with weights in e4m3: its own quantizer's numbers, its own list and layout of weights, and refits of them.

Its layers compute in torch here: `tests/helpers/sglang_fp8.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from spmdrl.engine.sglang.process import import_sglang
from spmdrl.model import fp8
from spmdrl.model.few_bits import quantization_of
from spmdrl.model.policy import Policy
from spmdrl.model.weight_files import stored_weights
from spmdrl.refit.refit import RefitMismatch
from spmdrl.types import UserError
from tests.helpers.engine_ranks import run_engine_ranks
from tests.helpers.few_bits import save_deepseek_in_fp8, save_gpt_oss_in_mxfp4
from tests.helpers.models import save_qwen3, save_qwen3_moe
from tests.helpers.sglang_engine import answers, change, greedy, prompts, rank_with_engine, settings, worst_difference

SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "head_dim": 128,
    "num_hidden_layers": 2,
}
EXPERTS = {"num_experts": 5, "moe_intermediate_size": 128}
FP8 = {"quantization": "fp8"}
CORRECTION = {"kind": "tis"}


def against_sglang() -> list[tuple[Any, ...]]:
    """Return the shapes and dtypes whose bits differ from those of SGLang's own functions."""
    import_sglang()
    from sglang.benchmark.deepseek_utils import per_block_cast_to_fp8
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant

    differing = []
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in ((128, 128), (256, 384), (200, 300), (1, 5)):
            weight = (torch.randn(shape, generator=generator).exp() - 1).to(dtype)
            numbers, scales = per_block_cast_to_fp8(weight)
            maxima = fp8.block_maxima(weight)
            stands_for = block_quant_dequant(numbers, scales, [128, 128], dtype)
            same = (
                torch.equal(fp8.quantized(weight, maxima).view(torch.uint8), numbers.view(torch.uint8)),
                torch.equal(fp8.scales_of(maxima), scales),
                torch.equal(fp8.as_numbers({"w": numbers, "w_scale_inv": scales}, dtype)["w"], stands_for),
            )
            if not all(same):
                differing.append((shape, dtype, same))
    return differing


def published_against_sglang(paths: list[str]) -> list[str]:
    """Return the weights of models in few bits that stand for other numbers by SGLang's own functions."""
    import_sglang()
    from sglang.srt.layers.quantization.fp8_utils import block_quant_dequant
    from sglang.srt.layers.quantization.mxfp4_tensor import MXFP4QuantizeUtil

    differing: list[str] = []
    for path in paths:
        files, quantization = load_file(f"{path}/model.safetensors"), quantization_of(path) or {}
        for name, weight in stored_weights(path).items():
            if f"{name}_blocks" in files:
                parts = files[f"{name}_blocks"].flatten(-2), files[f"{name}_scales"]
                numbers = MXFP4QuantizeUtil.dequantize(parts[0], torch.bfloat16, parts[1], [32]).transpose(1, 2)
            elif f"{name}_scale_inv" in files:
                block = quantization["weight_block_size"]
                numbers = block_quant_dequant(files[name], files[f"{name}_scale_inv"], block, torch.bfloat16)
            else:
                continue
            if not torch.equal(numbers, weight[...]):
                differing.append(name)
    return differing


@torch.no_grad()
def stand_for_e4m3(policy: Policy) -> None:
    """Give the policy the weights that its engine has."""
    for name, parameter in policy.model.named_parameters():
        if fp8.is_quantized(name, parameter.ndim):
            maxima = fp8.block_maxima(parameter)
            parameter.copy_(fp8.dequantized(fp8.quantized(parameter, maxima), fp8.scales_of(maxima)))


def refits(path: str, published: list[str]) -> dict[str, Any]:
    """Refit an engine three times; its log-probabilities, and its answer to a bit that falls over."""
    found: dict[str, Any] = {"sglang": against_sglang(), "published": published_against_sglang(published)}
    cfg = settings(path, 1, max_running=10, correction=CORRECTION, **FP8)
    with rank_with_engine(cfg) as rank:
        for version in range(3):  # the second and third repeat the copies of the first
            change(rank.policy, 0.02)
            rank.refit(version=version)  # compares every weight by digest
        rank.engine.wake()
        asked = [greedy(ids, 8) for ids in prompts(6)]
        said = answers(rank.engine, asked)
        found["without"] = worst_difference(rank, asked, said)
        stand_for_e4m3(rank.policy)
        found["with"] = worst_difference(rank, asked, said)
        load = rank.engine.load

        def corrupt(number: int) -> None:
            rank.engine._buffers[number % 2][rank.engine._buckets[number].num_bytes - 1] ^= 1
            load(number)

        rank.engine.load = corrupt  # type: ignore[method-assign]
        try:
            rank.refit(version=3)
        except RefitMismatch as error:
            found["corrupt"] = str(error)
    return found


def other_list(path: str) -> str:
    """Start an engine whose list of weights in e4m3 is another."""
    fp8.is_quantized, before = (lambda name, ndim: before(name, ndim) and "down_proj" not in name), fp8.is_quantized
    import spmdrl.refit.gather as room

    room.is_quantized = fp8.is_quantized
    try:
        with rank_with_engine(settings(path, 1, correction=CORRECTION, **FP8)) as rank:
            rank.refit(version=0)
    except UserError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize(
    ("save", "sizes"),
    [pytest.param(save_qwen3, {}, marks=pytest.mark.slow), (save_qwen3_moe, EXPERTS)],
    ids=["dense", "experts"],
)
def test_sglang_holds_the_integers_that_were_sent(
    tmp_path: Path, save: Callable[..., str], sizes: dict[str, int]
) -> None:
    published = [save_gpt_oss_in_mxfp4(tmp_path / "mxfp4"), save_deepseek_in_fp8(tmp_path / "fp8")]
    (found,) = run_engine_ranks(1, refits, save(tmp_path / "model", **SIZES, **sizes), published)
    assert found["sglang"] == found["published"] == []
    assert found["with"] < 1e-4 and found["without"] > 100 * found["with"]
    assert "does not hold the trainer's weights" in found["corrupt"]


@pytest.mark.slow
def test_another_list_of_weights_is_refused(tmp_path: Path) -> None:
    (said,) = run_engine_ranks(1, other_list, save_qwen3(tmp_path, **SIZES))
    assert said == (
        'rollout.quantization = "fp8": SGLang has 2 weights in e4m3 that would be sent as they are, '
        "model.layers.0.mlp.down_proj.weight among them; remove rollout.quantization"
    )
