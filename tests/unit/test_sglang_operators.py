"""What a trainer computes with SGLang's kernels is the plain model's, but for the places where it rounds."""

from __future__ import annotations

import copy
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from spmdrl.dist.session import World
from spmdrl.engine.sglang.layout import TpShard, sharded_weights
from spmdrl.engine.sglang.options import sglang_options
from spmdrl.model import logprobs
from spmdrl.model.attention import IMPLEMENTATION
from spmdrl.model.attention_layer import AttentionLayer
from spmdrl.model.exact import sglang_kernels, sglang_operators
from spmdrl.model.kernels import Kernel, SequenceLayout, causal_attention
from spmdrl.model.layers import replace_layers
from spmdrl.model.logits_tile import Scale
from spmdrl.model.logprobs import HeadOptions
from spmdrl.model.operators import operators_of
from spmdrl.model.policy import Policy, TokenLogprobs
from spmdrl.model.sharding import checkpoint_layers, decoder_layers
from spmdrl.run import kernel_of_run
from spmdrl.step.batch import lay_end_to_end
from spmdrl.types import MicroBatch, UserError
from tests.helpers import kernels_on_cpu
from tests.helpers.config_file import GOOD, problems, read
from tests.helpers.models import save_gemma3, save_llama, save_qwen3
from tests.helpers.sequences import random_sequences

ENGINES: tuple[Kernel, ...] = ("sglang_fa3", "sglang_triton")
GOING_ON = ("rollout.partial=true", "rollout.oversample_fraction=0.5", "rollout.max_staleness=0")
SEQLENS, PROMPTS = [7, 1, 12, 2], [3, 1, 12, 1]  # a filling, a prompt without a response, a prompt of one token


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    kernels_on_cpu.use(monkeypatch)
    return monkeypatch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    path = save_qwen3(tmp_path_factory.mktemp("model"))
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation=IMPLEMENTATION)


@pytest.fixture(scope="module")
def batch() -> MicroBatch:
    return lay_end_to_end(random_sequences(5, seed=3), {})


def policy_of(model: PreTrainedModel, kernel: Kernel, *, dtype: torch.dtype = torch.float32, chunk: int = 8) -> Policy:
    own = copy.deepcopy(model).to(dtype)
    replace_layers(own, operators_of(kernel))
    return Policy(own, kernel=kernel, temperature=0.8, logits_chunk_tokens=chunk)


def scored(policy: Policy, batch: MicroBatch) -> tuple[TokenLogprobs, dict[str, torch.Tensor]]:
    scores = policy(batch)
    (scores.logprobs[batch.loss_mask].sum() + 0.1 * scores.entropy.sum()).backward()
    return scores, {name: x.grad for name, x in policy.named_parameters() if x.grad is not None}


@pytest.mark.parametrize("kernel", ENGINES)
def test_in_float32_it_is_the_plain_model(
    model: PreTrainedModel, batch: MicroBatch, kernel: Kernel, on_cpu: pytest.MonkeyPatch
) -> None:
    plain, expected = scored(policy_of(model, "sdpa"), batch)
    exact, found = scored(policy_of(model, kernel), batch)
    torch.testing.assert_close(exact.logprobs, plain.logprobs, atol=1e-5, rtol=0)
    torch.testing.assert_close(exact.entropy, plain.entropy, atol=1e-5, rtol=0)
    assert expected.keys() == found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("kernel", ENGINES)
def test_in_bfloat16_only_products_and_attention_are_narrow(
    model: PreTrainedModel, batch: MicroBatch, kernel: Kernel, on_cpu: pytest.MonkeyPatch
) -> None:
    policy = policy_of(model, kernel, dtype=torch.bfloat16)
    layer, seen = decoder_layers(policy.model)[0], {}

    def note(name: str, module: torch.nn.Module) -> None:
        module.register_forward_hook(lambda _, inputs, output: seen.update({name: output.dtype}))

    for name in ("input_layernorm", "self_attn.q_proj", "self_attn.q_norm", "self_attn.o_proj", "mlp.down_proj"):
        note(name, layer.get_submodule(name))
    note("embedding", policy.model.get_input_embeddings())
    note("layer", layer)
    scores, gradients = scored(policy, batch)
    wide = ("embedding", "layer", "input_layernorm", "self_attn.q_norm")
    assert seen == {name: torch.float32 if name in wide else torch.bfloat16 for name in seen} and len(seen) == 7
    assert torch.equal(scores.logprobs, scores.logprobs.bfloat16().float())
    with torch.no_grad():
        plain = policy_of(model, "sdpa")(batch)
    assert (scores.logprobs - plain.logprobs).abs().max() < 0.1
    assert all(x.dtype == torch.bfloat16 and x.isfinite().all() for x in gradients.values())


@pytest.mark.parametrize("kernel", ENGINES)
def test_neither_chunks_nor_recomputation_change_a_bit(
    model: PreTrainedModel, batch: MicroBatch, kernel: Kernel, on_cpu: pytest.MonkeyPatch
) -> None:
    exact, expected = scored(policy_of(model, kernel, dtype=torch.bfloat16), batch)
    kernels_on_cpu.in_portions_of(on_cpu, 20)
    other = policy_of(model, kernel, dtype=torch.bfloat16, chunk=10**6)
    checkpoint_layers(other.model, decoder_layers(other.model), recomputed="full", every_layers=1)
    again, found = scored(other, batch)
    assert torch.equal(exact.logprobs, again.logprobs)
    layers = [name for name in expected if ".layers." in name]
    assert layers and all(torch.equal(expected[name], found[name]) for name in layers)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("backend", ["fa3", "triton"])
def test_attention_is_the_plain_one_and_has_its_gradient(
    backend: sglang_kernels.Backend, heads: tuple[int, int], on_cpu: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(0)
    total = sum(SEQLENS)
    q, k, v = (
        torch.randn(total, count, 8, generator=generator).requires_grad_() for count in (heads[0], *heads[1:] * 2)
    )
    cu_seqlens = torch.tensor([0, *SEQLENS]).cumsum(0).int()
    sampled = torch.cat([torch.arange(n) >= prompt for n, prompt in zip(SEQLENS, PROMPTS, strict=True)])
    layer = AttentionLayer(index=0, scale=0.3)
    plain = causal_attention(SequenceLayout(SEQLENS, cu_seqlens), "sdpa")(q, k, v, layer)
    layout = SequenceLayout(SEQLENS, cu_seqlens, sampled=sampled)
    kernels_on_cpu.in_portions_of(on_cpu, 9)
    kernel: Kernel = "sglang_fa3" if backend == "fa3" else "sglang_triton"
    exact = causal_attention(layout, kernel)(q, k, v, layer)
    torch.testing.assert_close(exact, plain, atol=1e-6, rtol=0)
    weights = torch.randn(exact.shape, generator=generator)
    for one, other in zip(*(torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (exact, plain)), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=0)


def test_rotary_embeddings_are_compiled_once_for_every_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    """With gradients and without, at a first and at a second time."""

    def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, halves: bool) -> torch.Tensor:
        return torch.cat((x[..., :8] * cos[:, None], x[..., 8:] * sin[:, None]), dim=-1)

    counter = CompileCounter()
    compiled = torch.compile(turned, dynamic=True, backend=counter)
    monkeypatch.setattr(sglang_kernels, "_rotate", lambda: compiled)
    for num_tokens, num_heads, learns in ((50, 4, True), (50, 2, True), (30, 4, False), (31, 2, True)):
        x = torch.randn(num_tokens, num_heads, 16, requires_grad=learns)
        assert sglang_operators._rotated(x, *torch.randn(2, num_tokens, 8)).requires_grad == learns
    assert counter.frame_count == 1


@pytest.mark.parametrize("chunk", [8, 10**6])
def test_rows_of_logits_fit_into_a_tile(chunk: int, on_cpu: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    product = sglang_kernels.product
    on_cpu.setattr(sglang_kernels, "product", lambda x, *rest: (rows.append(len(x)), product(x, *rest))[1])
    on_cpu.setitem(logprobs.TILE_ELEMENTS, "cpu", 500)
    hidden, weight, targets = torch.randn(30, 16), torch.randn(100, 16), torch.arange(30)
    scores = sglang_operators.next_token_logprobs(hidden, weight, None, targets, HeadOptions(Scale(0.7), chunk))
    assert rows == [5] * 6
    expected = logprobs.next_token_logprobs(hidden, weight, None, targets, HeadOptions(Scale(0.7), chunk))
    torch.testing.assert_close(scores, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("released", ['["kv_cache"]', '["kv_cache", "cuda_graph"]'])
def test_what_an_engine_is_started_with_on_a_device(tmp_path: Path, released: str) -> None:
    cfg = read(tmp_path, GOOD, "true_on_policy=true", "rollout.engine=sglang", f"offload.engine={released}")
    plan: Any = SimpleNamespace(max_sampled_tokens=100)
    world = World(
        rank=0,
        num_ranks=1,
        local_rank=0,
        num_local_ranks=1,
        patience=timedelta(minutes=1),
        device=torch.device("cuda", 0),
    )
    launch = sglang_options(cfg, plan, world, Qwen3Config())
    chosen = {"rl_on_policy_target": "fsdp", "attention_backend": "fa3", "dtype": "bfloat16"}
    assert {name: launch.arguments[name] for name in chosen} == chosen
    assert launch.environment.items() >= sglang_kernels.ENVIRONMENT.items()
    gives_back = "cuda_graph" in released
    assert ("SGLANG_MEMORY_SAVER_CUDA_GRAPH" in launch.environment) == gives_back


@pytest.mark.parametrize("backend", ["fa3", "triton"])
def test_every_switch_is_told(backend: str) -> None:
    told = "\n".join(sglang_operators.switches(backend))
    arguments = ("rl_on_policy_target", "enable_deterministic_inference", "sampling_backend", "bf16_gemm_backend")
    for name in (*arguments, f'attention_backend = "{backend}"', *sglang_kernels.ENVIRONMENT):
        assert name in told, name


def test_engines_that_follow_hold_embedding_and_norms_in_float32() -> None:
    names = ("model.embed_tokens", "model.norm", "model.layers.0.self_attn.q_norm", "model.layers.0.input_layernorm")
    tensors = {f"{name}.weight": torch.ones(64, dtype=torch.bfloat16) for name in names}
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.ones(64, 64, dtype=torch.bfloat16)
    for follows, dtype in ((True, torch.float32), (False, torch.bfloat16)):
        held = sharded_weights(tensors, TpShard(0, 1, 2, 1, widens=follows))
        assert {held[f"{name}.weight"].dtype for name in names} == {dtype}
        assert held["model.layers.0.mlp.down_proj.weight"].dtype == torch.bfloat16


def test_models_that_sglang_computes_otherwise_are_refused(tmp_path: Path) -> None:
    def refusals(path: str) -> list[str]:
        return list(sglang_operators.model_problems(AutoConfig.from_pretrained(path)))

    assert not refusals(save_qwen3(tmp_path / "qwen3"))
    for save, sentence in ((save_llama, "not llama"), (save_gemma3, "not gemma3_text")):
        assert [sentence in problem for problem in refusals(save(tmp_path / save.__name__))] == [True]
    scaled = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
    assert 'this model has "linear"' in refusals(save_qwen3(tmp_path / "rope", rope_parameters=scaled))[0]
    sliding = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
    assert "does not support sliding windows" in refusals(save_qwen3(tmp_path / "sliding", **sliding))[0]
    assert "uses gelu" in refusals(save_qwen3(tmp_path / "gelu", hidden_act="gelu"))[0]


@pytest.mark.parametrize("backend, head_dim, refused", [("fa3", 64, 1), ("fa3", 128, 0), ("triton", 64, 0)])
def test_heads_that_fa3_computes_in_two_ways_are_refused(
    tmp_path: Path, backend: str, head_dim: int, refused: int
) -> None:
    config = AutoConfig.from_pretrained(save_qwen3(tmp_path, head_dim=head_dim))
    said = list(sglang_operators.attention_problems(config, backend))
    assert len(said) == refused and all(f"this model's have {head_dim}" in sentence for sentence in said)


def test_an_engine_without_kernels_on_a_device_has_none_there(tmp_path: Path) -> None:
    """Also for those who read the settings of a run that went elsewhere."""
    for engine, device_type in (("sglang", "cpu"), ("torch", "cuda")):
        cfg = read(tmp_path, GOOD, "true_on_policy=true", f"rollout.engine={engine}")
        with pytest.raises(UserError, match=f'no exact kernels for rollout.engine = "{engine}"'):
            kernel_of_run(cfg, device_type, torch.bfloat16)


@pytest.mark.parametrize(
    "settings, sentence",
    [
        (["rollout.tp_size=2"], "rollout.tp_size = 2 sums in another order"),
        (["rollout.attention_backend=flashinfer"], '"flashinfer" is none that the trainer can use too'),
        (
            ["rollout.attention_backend=triton", *GOING_ON],
            "rollout.partial = true",
        ),
        (
            ["rollout.sglang.disable_radix_cache=true", "rollout.sglang.kv_cache_dtype=fp8_e4m3"],
            "rollout.sglang sets kv_cache_dtype, which",
        ),
        (["model.compute_dtype=float32"], 'compute_dtype = "float32" is not what SGLang computes with'),
        (["model.gradient_checkpointing=selective"], '"selective" keeps rotary embeddings from being compiled'),
        (["parallel.cp=2"], "parallel.cp = 2 sums in another order"),
    ],
)
def test_settings_that_break_the_promise_are_refused(tmp_path: Path, settings: list[str], sentence: str) -> None:
    (problem,) = problems(tmp_path, GOOD, "true_on_policy=true", "rollout.engine=sglang", *settings)
    assert "true_on_policy = true, but " in problem and sentence in problem


def test_fa3_can_go_on_with_a_response(tmp_path: Path) -> None:
    cfg = read(
        tmp_path,
        GOOD,
        "true_on_policy=true",
        "rollout.engine=sglang",
        "rollout.attention_backend=fa3",
        *GOING_ON,
    )
    assert cfg.rollout.partial
