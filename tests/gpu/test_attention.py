"""Attention and whole models on a CUDA device: what the CPU computes in float32, within the dtype's precision."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from spmdrl.algo.prefix_tree import prefix_tree
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.model.attention_layer import AttentionLayer
from spmdrl.model.kernels import Kernel, SequenceLayout, causal_attention
from spmdrl.model.load import load_policy
from spmdrl.model.tree_attention import tree_attention
from spmdrl.step.batch import lay_end_to_end
from tests.helpers.configs import model_config
from tests.helpers.device_memory import local
from tests.helpers.models import (
    save_gemma3,
    save_gpt_oss,
    save_llama,
    save_qwen3,
    save_qwen3_5,
    save_qwen3_moe,
    save_qwen3_next,
)
from tests.helpers.sequences import random_sequences
from tests.helpers.trees import sequences_of_trees

SEQLENS = [1, 3, 3, 17, 40, 130]
MODELS = [save_qwen3, save_llama, save_gemma3, save_qwen3_moe, save_gpt_oss, save_qwen3_next, save_qwen3_5]


def attention_leaves(heads: int, kv_heads: int, head_dim: int, earlier: int) -> list[Tensor]:
    """q, k, v and sinks on the CPU, float32, every number one that bfloat16 has; `earlier` keys precede the queries."""
    torch.manual_seed(0)
    tokens = sum(SEQLENS)
    shapes = [(tokens, heads), (earlier + tokens, kv_heads), (earlier + tokens, kv_heads)]
    return [torch.randn(shape).bfloat16().float() for shape in [*((*shape, head_dim) for shape in shapes), (heads,)]]


def output_and_gradients(
    leaves: list[Tensor], kernel: Kernel, device: str, dtype: torch.dtype, *, window: int | None, has_sinks: bool
) -> list[Tensor]:
    leaves = [leaf.to(device, dtype, copy=True).requires_grad_() for leaf in leaves]
    q, k, v, sinks = leaves
    cu_seqlens = torch.tensor([0, *SEQLENS], device=device).cumsum(0).to(torch.int32)
    causal = causal_attention(SequenceLayout(SEQLENS, cu_seqlens, (len(k) - len(q),)), kernel)
    out = causal(q, k, v, AttentionLayer(index=0, scale=0.2, window=window, sinks=sinks if has_sinks else None))
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out.float() * slope.to(device)).sum().backward()
    return [x.detach().float().cpu() for x in (out, *(leaf.grad for leaf in leaves if leaf.grad is not None))]


@pytest.mark.claim(
    "Attention and models",
    "`varlen_attn` and SDPA give the outputs and gradients of the CPU: grouped heads, windows, sinks, earlier keys.",
)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("earlier", [0, 70])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(4, 4, 64), (8, 2, 64), (6, 1, 128), (4, 2, 16)])
@pytest.mark.parametrize("kernel", ["varlen", "sdpa"])
def test_forward_and_backward_equal_the_cpu(
    kernel: Kernel, heads: int, kv_heads: int, head_dim: int, earlier: int, window: int | None, has_sinks: bool
) -> None:
    leaves = attention_leaves(heads, kv_heads, head_dim, earlier)
    options = {"window": window, "has_sinks": has_sinks}
    expected = output_and_gradients(leaves, "sdpa", "cpu", torch.float32, **options)
    found = output_and_gradients(leaves, kernel, "cuda", torch.bfloat16, **options)
    assert len(found) == len(expected) == (5 if has_sinks else 4)
    for one, other in zip(found, expected, strict=True):
        # A window of one token leaves nothing to choose from: gradients of queries and keys are 0 but for rounding.
        assert (one - other).norm() < 0.02 * other.norm() + 0.02 * one.numel() ** 0.5 * (window == 1)


@pytest.mark.claim(
    "Attention and models",
    "Attention over prefix trees gives the outputs and gradients of the CPU: grouped heads, windows, sinks.",
)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("kernel", ["varlen", "sdpa"])
def test_trees_equal_the_cpu(kernel: Kernel, window: int | None, has_sinks: bool) -> None:
    tree = prefix_tree([sequence.token_ids for sequence in sequences_of_trees(12)])
    assert tree is not None
    torch.manual_seed(0)
    shapes = [(len(tree.tokens), heads, 64) for heads in (8, 2, 2)]
    leaves = [torch.randn(shape).bfloat16().float() for shape in [*shapes, (8,)]]

    def found(kernel: Kernel, device: str, dtype: torch.dtype) -> list[Tensor]:
        own = [leaf.to(device, dtype, copy=True).requires_grad_() for leaf in leaves]
        q, k, v, sinks = own
        layer = AttentionLayer(index=0, scale=0.2, window=window, sinks=sinks if has_sinks else None)
        out = tree_attention(tree, kernel, torch.device(device))(q, k, v, layer)
        slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        (out.float() * slope.to(device)).sum().backward()
        return [x.detach().float().cpu() for x in (out, *(leaf.grad for leaf in own if leaf.grad is not None))]

    both = found(kernel, "cuda", torch.bfloat16), found("sdpa", "cpu", torch.float32)
    for one, other in zip(*both, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


@pytest.mark.claim("Attention and models", "flash-attn 2 and 3 give the outputs and gradients of the CPU.")
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("kernel", "module"), [("flash_attn_2", "flash_attn"), ("flash_attn_3", "flash_attn_interface")]
)
def test_flash_attn_equals_the_cpu(kernel: Kernel, module: str, window: int | None) -> None:
    pytest.importorskip(module)
    leaves = attention_leaves(8, 2, 128, 70)
    options = {"window": window, "has_sinks": False}
    expected = output_and_gradients(leaves, "sdpa", "cpu", torch.float32, **options)
    found = output_and_gradients(leaves, kernel, "cuda", torch.bfloat16, **options)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()


# Largest and mean difference of a log-probability, nats. In bfloat16 a router may choose another expert for a token.
TOLERANCES = {"float32": (1e-3, 1e-4), "bfloat16": (3.0, 0.03)}


@pytest.mark.claim(
    "Attention and models",
    "Packed log-probabilities of Qwen3, Llama, Gemma 3, Qwen3-MoE, gpt-oss, Qwen3-Next and Qwen3.5 equal those of "
    "transformers on the CPU.",
)
@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("save", MODELS, ids=lambda save: save.__name__.removeprefix("save_"))
def test_packed_logprobs_equal_those_of_transformers_on_the_cpu(
    tmp_path: Path, save: Callable[..., str], dtype: str
) -> None:
    if save in (save_qwen3_next, save_qwen3_5) and find_spec("fla") is not None:
        pytest.skip("with flash-linear-attention installed, transformers cannot compute this model on a CPU")
    path = save(tmp_path)
    sequences = random_sequences(16)
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        policy = load_policy(model_config(path, compute_dtype=dtype), build_meshes(world).model, temperature=1.0)
        micro_batch = lay_end_to_end(sorted(sequences, key=lambda s: len(s.token_ids)), {})
        scores = policy(micro_batch.to(world.device))
        scores.logprobs.sum().backward()
        gradients = [p.grad for p in policy.parameters() if p.grad is not None]
        assert gradients and all(gradient.isfinite().all() for gradient in map(local, gradients))
        found = dict(
            zip(micro_batch.sequence_index, scores.logprobs.detach().cpu().split(micro_batch.seqlens), strict=True)
        )
        del policy, scores, gradients
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    differences = []
    for sequence in sequences:
        ids = torch.tensor(sequence.token_ids)
        with torch.no_grad():
            log_p = plain(ids[None], use_cache=False).logits[0].log_softmax(-1)
        wanted = torch.tensor(sequence.loss_mask[1:])  # a prompt's tokens have no log-probabilities
        differences.append((log_p[:-1].gather(1, ids[1:, None])[:, 0] - found[sequence.index][1:])[wanted].abs())
    largest, mean = TOLERANCES[dtype]
    assert torch.cat(differences).max() < largest
    assert torch.cat(differences).mean() < mean
