"""Fused layers compute what transformers' layers compute, values and gradients; half precision is no less exact."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from spmdrl.memory.activations import ActivationSettings, activation_bytes
from spmdrl.model import fused
from spmdrl.model.layers import set_classes
from spmdrl.model.policy import Policy
from spmdrl.model.sharding import checkpoint_layers, decoder_layers
from spmdrl.preflight.forecast import decoder_of
from spmdrl.types import UserError
from tests.helpers.fused_cases import CASES, HALF, Case, eager, gradients, inputs_of
from tests.helpers.layers import layers_in_c
from tests.helpers.live import Watch
from tests.helpers.policies import policy_of, tokens

TINY = {"hidden_size": 48, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": TINY | {"kind": LlamaConfig},
    "qwen2": {key: value for key, value in TINY.items() if key != "head_dim"} | {"kind": Qwen2Config},
    "qwen3": TINY | {"kind": Qwen3Config},
    "qwen3_moe": TINY | EXPERTS | {"hidden_size": 128, "head_dim": 32, "kind": Qwen3MoeConfig},
}
WINDOW = {"kind": Qwen2Config, "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_plain_functions_equal_transformers_layers(case: Case) -> None:
    given = inputs_of(case, torch.float64)
    for one, other in zip(gradients(case.fused, given), gradients(eager(case), given), strict=True):
        # transformers' norms are float32 whatever they get.
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("case", [case for case in CASES if math.prod(case.shape) > 100], ids=str)
@pytest.mark.parametrize("dtype", HALF)
def test_half_precision_is_no_further_from_the_truth_than_transformers(case: Case, dtype: torch.dtype) -> None:
    given = [x.to(dtype) for x in inputs_of(case, torch.float64)]
    truth = gradients(case.fused, [x.double() for x in given])
    ours, theirs = gradients(case.fused, given), gradients(eager(case), given)
    for mine, other, right in zip(ours, theirs, truth, strict=True):
        assert mine.dtype == dtype
        assert (mine - right).abs().sum() <= 1.01 * (other - right).abs().sum()


@pytest.mark.parametrize("in_c", [False, True], ids=["torch", "c"])
@pytest.mark.parametrize("family", [*FAMILIES, "window"])
def test_a_fused_model_equals_transformers_model(family: str, in_c: bool) -> None:
    sizes = FAMILIES.get(family, FAMILIES["qwen2"] | WINDOW)
    batch = tokens(20, 13, 1)
    plain = policy_of("none", **sizes)
    fast = fused_policy("none", **sizes)
    replaced = {type(module).__module__ for module in fast.modules()}
    assert fused.__name__ in replaced and fused.__name__ not in {type(module).__module__ for module in plain.modules()}
    exact = scores_and_gradients(plain, batch)
    with layers_in_c(in_c):
        found = scores_and_gradients(fast, batch)
    for one, other in zip(found, exact, strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()


def test_other_models_keep_their_own_layers() -> None:
    gelu = policy_of("none", **TINY, hidden_act="gelu", kind=LlamaConfig).model
    types = {type(module) for module in gelu.modules()}
    set_classes(fused.fused_layers(gelu))
    assert {type(module) for module in gelu.modules()} == types
    assert not fused.has_fused_layers(gelu.config) and fused.has_fused_layers(Qwen3Config())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_is_what_the_formula_says(family: str, dtype: torch.dtype) -> None:
    seqlens = (100, 60, 40)
    kept_by_level = {}
    for level, every_layers in (("none", 1), ("full", 1), ("selective", 1), ("selective", 3)):
        policy = fused_policy(level, every_layers=every_layers, dtype=dtype, **FAMILIES[family])
        with Watch() as watch:
            scores = policy(tokens(*seqlens))
            measured = kept_by_level[level] = watch.live_bytes
        kept = ActivationSettings(
            level=level, every_layers=every_layers, compute_bytes=dtype.itemsize, repeats_keys=False, fused=True
        )
        predicted = activation_bytes(described(policy), kept, num_tokens=sum(seqlens))
        assert 0.9 < predicted / measured < 1.1, (level, every_layers, predicted / measured)
        scores.logprobs.sum().backward()  # what was kept serves
    assert kept_by_level["full"] < kept_by_level["selective"] < kept_by_level["none"]


def test_less_is_kept_than_by_transformers_layers() -> None:
    kept = []
    for make in (fused_policy, policy_of):
        policy = make("none", dtype=torch.bfloat16, **FAMILIES["qwen3"])
        with Watch() as watch:
            scores = policy(tokens(100, 60, 40))
            kept.append(watch.live_bytes)
        del scores
    assert kept[0] < 0.7 * kept[1]


@pytest.mark.parametrize("family", FAMILIES)
def test_levels_of_recomputation_change_no_gradient(family: str) -> None:
    batch = tokens(40, 24)
    none = scores_and_gradients(fused_policy("none", **FAMILIES[family]), batch)
    with layers_in_c():
        in_c = [scores_and_gradients(fused_policy(level, **FAMILIES[family]), batch) for level in ("none", "selective")]
    assert all(torch.equal(one, other) for one, other in zip(*in_c, strict=True))
    for level in ("full", "selective"):
        with Watch() as watch:
            again = scores_and_gradients(fused_policy(level, **FAMILIES[family]), batch)
        assert all(torch.equal(one, other) for one, other in zip(none, again, strict=True))
        assert watch.operations["aten::sigmoid"] > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles here")
def test_a_device_that_triton_cannot_compile_for_is_refused() -> None:
    with pytest.raises(UserError, match=r"^Triton cannot compile .* install gcc and python3-dev"):
        fused.check_compiler(torch.device("cuda"))


def fused_policy(level: str, **sizes: Any) -> Policy:
    """A policy with fused layers, though it is on a CPU."""
    every_layers = sizes.pop("every_layers", 1)
    policy = policy_of("none", **sizes)
    set_classes(fused.fused_layers(policy.model))
    if level != "none":
        checkpoint_layers(policy.model, decoder_layers(policy.model), recomputed=level, every_layers=every_layers)
    return policy


def described(policy: Policy) -> Any:
    shapes = {name: tuple(parameter.shape) for name, parameter in policy.model.named_parameters()}
    return decoder_of(policy.model.config, shapes)


def scores_and_gradients(policy: Policy, batch: Any) -> list[Tensor]:
    scores = policy(batch)
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    return [scores.logprobs, scores.entropy, *(p.grad for p in policy.parameters())]


def test_the_tables_of_angles_hold_each_angle_twice() -> None:
    """`rotate` reads their first half only."""
    for rope in ({"rope_type": "default"}, {"rope_type": "yarn", "factor": 4.0}):
        config = Qwen3Config(rope_parameters={"rope_theta": 1e4, **rope}, max_position_embeddings=64, head_dim=16)
        for table in qwen3.Qwen3RotaryEmbedding(config)(torch.zeros(1), torch.arange(9)[None]):
            assert torch.equal(table[..., :8], table[..., 8:])
