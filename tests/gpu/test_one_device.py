"""What a single CUDA device must give: the CPU's numbers within the dtype's precision, and the exact equalities."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from spmdrl.algo.seeds import uniform
from spmdrl.config import OptimConfig, RefitConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.engine.torch.sampling import _cumulative
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import PolicyObjective, ValueObjective
from spmdrl.learn.update import update
from spmdrl.model.attention import packed_attention
from spmdrl.model.attention_layer import AttentionLayer
from spmdrl.model.load import load_critic, load_policy
from spmdrl.refit.refit import Refit
from spmdrl.step.batch import build_batch
from spmdrl.step.logprobs import add_columns
from spmdrl.types import Request
from tests.helpers.batches import completed
from tests.helpers.configs import loss_config, model_config, plan_for
from tests.helpers.device_memory import local, shards
from tests.helpers.models import save_qwen3
from tests.helpers.sequences import random_sequences
from tests.helpers.small_run import rows, sums_from_files, torchrun, write_small_run

RANDOM = pytest.mark.claim(
    "Training on one device", "Random numbers are those of the CPU, and tokens can be drawn deterministically."
)
LEVERS = pytest.mark.claim(
    "Memory", "Gradient checkpointing, full and selective, and host offload do not change an update."
)

CUDA = torch.device("cuda")
SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen3(tmp_path_factory.mktemp("qwen3"), **SIZES)


@RANDOM
def test_random_numbers_are_those_of_the_cpu() -> None:
    seeds, places = torch.arange(-500, 500) * 2**51 + 12345, torch.arange(1000)
    assert torch.equal(uniform(seeds.to(CUDA), places.to(CUDA)).cpu(), uniform(seeds, places))


@pytest.mark.claim(
    "Attention and models",
    "`varlen_attn` and SDPA give the outputs and gradients of the CPU: grouped heads, windows, sinks, earlier keys.",
)
@pytest.mark.parametrize("window", [None, 5])
def test_the_varlen_kernel_equals_sdpa(window: int | None) -> None:
    seqlens = [1, 3, 3, 17, 40]
    tokens = sum(seqlens)
    cu_seqlens = torch.tensor([0, *seqlens], device=CUDA).cumsum(0).to(torch.int32)
    torch.manual_seed(0)
    leaves = [torch.randn(1, heads, tokens, 32, device=CUDA, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    results = []
    layer = AttentionLayer(index=0, scale=0.2, window=window)
    for kernel in ("varlen", "sdpa"):
        q, k, v = (leaf.clone().requires_grad_() for leaf in leaves)
        out = packed_attention(cu_seqlens, seqlens, kernel)(q, k, v, layer)
        out.float().square().sum().backward()
        results.append([out, q.grad, k.grad, v.grad])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)


def trained(path: str, dtype: str, **model: object) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Weights and metrics after one update on one rank."""
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        settings = model_config(path, compute_dtype=dtype, **model)
        losses = loss_config(kl_coef=0.05, entropy_coef=0.01)
        policy = load_policy(settings, meshes.model, temperature=0.8)
        reference = load_policy(settings, meshes.model, temperature=0.8, role="reference") if losses.kl_coef else None
        batch = build_batch(random_sequences(16), plan_for(16, 1), meshes, aggregation="token_mean")
        optim = OptimConfig(name="sgd", lr=1.0, max_grad_norm=1e6)
        learner = Learner(policy, optim, PolicyObjective(losses), num_updates=1, dtype=getattr(torch, dtype))
        mini_batches = completed(batch, meshes, policy, reference).mini_batches
        metrics = update(learner, mini_batches, meshes, step=1)
        weights = {name: local(parameter).detach().cpu() for name, parameter in policy.model.named_parameters()}
        del policy, reference, learner
        return weights, {name: metric.value() for name, metric in metrics.items()}


@pytest.mark.claim(
    "Training on one device",
    "In float32, bfloat16 and float16 the first update has ratios of exactly 1 and a divergence from the reference of"
    " exactly 0.",
)
def test_the_first_update_is_exactly_on_policy(qwen3: str) -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        _, metrics = trained(qwen3, dtype)
        assert metrics["update/ratio_max_deviation"] == 0.0
        assert metrics["update/k3_ref_nats"] == 0.0


@LEVERS
@pytest.mark.parametrize(
    "changes", [{"gradient_checkpointing": "full"}, {"gradient_checkpointing": "selective"}, {"cpu_offload": True}]
)
def test_memory_levers_do_not_change_the_update(qwen3: str, changes: dict[str, bool]) -> None:
    usual, _ = trained(qwen3, "bfloat16")
    other, _ = trained(qwen3, "bfloat16", **changes)
    for name in usual:
        torch.testing.assert_close(usual[name], other[name], rtol=1e-3, atol=1e-4)


@pytest.mark.claim("Training on one device", "A critic learns next to the policy (PPO).")
@pytest.mark.parametrize("changes", [{}, {"cpu_offload": True}])
def test_a_critic_learns_in_float32_beside_layers_in_bfloat16(qwen3: str, changes: dict[str, bool]) -> None:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        critic = load_critic(model_config(qwen3, compute_dtype="bfloat16", **changes), meshes.model)
        learner = Learner(
            critic, OptimConfig(lr=1e-3), ValueObjective(math.inf), num_updates=8, dtype=torch.bfloat16, area="critic"
        )
        batch = build_batch(random_sequences(16), plan_for(16, 1), meshes, aggregation="token_mean")
        losses = []
        for step in range(1, 9):
            returns = {"returns": lambda micro_batch: torch.where(micro_batch.loss_mask, 1.0, 0.0)}
            asked = add_columns(batch, {"values": critic} | returns, meshes.training)
            assert all(m.values is not None and m.values.dtype == torch.float32 for m in asked.micro_batches)
            metrics = update(learner, asked.mini_batches, meshes, step=step)
            losses.append(metrics["critic/loss"].value())
        assert losses[0] == pytest.approx(0.5) and losses[-1] < 0.5 * losses[0]
        del critic, learner


@LEVERS
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_offloaded_shards_live_on_the_host(qwen3: str, dtype: str) -> None:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        policy = load_policy(model_config(qwen3, compute_dtype=dtype, cpu_offload=True), meshes.model, temperature=1.0)
        assert {shard.device.type for shard in shards(policy)} == {"cpu"}
        assert {parameter.device.type for parameter in policy.parameters()} == {"cpu"}
        del policy


@RANDOM
def test_tokens_can_be_drawn_deterministically() -> None:
    p = torch.rand(5, 1000, device=CUDA)
    plain = p.cumsum(-1)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(_cumulative(p), plain, rtol=1e-4, atol=1e-3)
        assert torch.equal(_cumulative(p), _cumulative(p))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.claim(
    "Training on one device", "An update in bfloat16, or in float16 with loss scaling, stays near one in float32."
)
def test_half_precision_stays_near_full_precision(qwen3: str) -> None:
    start = {name: p.detach() for name, p in AutoModelForCausalLM.from_pretrained(qwen3).named_parameters()}
    full, _ = trained(qwen3, "float32")
    scale = max((full[name] - start[name]).norm() for name in start)
    for dtype in ("bfloat16", "float16"):
        half, _ = trained(qwen3, dtype)
        for name in start:
            assert (full[name] - half[name]).norm() / scale < 0.1, (dtype, name)


@pytest.mark.claim(
    "Weights reach the engine",
    "The embedded torch engine holds the trainer's weights after a refit in buckets, and agrees with it.",
)
def test_engine_and_trainer_agree_after_a_refit(qwen3: str) -> None:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        policy = load_policy(model_config(qwen3, compute_dtype="bfloat16"), meshes.model, temperature=1.0)
        engine = TorchEngine(
            AutoConfig.from_pretrained(qwen3),
            device=world.device,
            dtype=torch.bfloat16,
            kernel="varlen",
            max_running=16,
        )
        Refit(policy, engine, meshes, RefitConfig(bucket_bytes=64 * 1024, verify="every"), dtype=torch.bfloat16)(
            version=1
        )
        for name, parameter in policy.model.named_parameters():
            assert torch.equal(engine.weights[name], parameter.full_tensor().bfloat16()), name
        asked = [Request(prompt_ids=(3, 4, 5 + i), seed=i, max_response_tokens=20) for i in range(40)]
        responses = dict(engine.generate(asked))
        again = dict(engine.generate(asked))
        assert responses.keys() == again.keys() == set(range(40))
        plain = AutoModelForCausalLM.from_pretrained(qwen3, dtype=torch.bfloat16).to(CUDA)
        for index, response in responses.items():
            ids = torch.tensor([asked[index].prompt_ids + response.token_ids], device=CUDA)
            with torch.no_grad():
                log_p = plain(ids).logits[0].float().log_softmax(-1)
            expected = log_p[2:-1].gather(-1, ids[0, 3:, None])[:, 0].cpu()
            torch.testing.assert_close(torch.tensor(response.logprobs), expected, rtol=0, atol=0.1)
        del policy


@pytest.mark.claim(
    "Training on one device", "A run with the embedded torch engine learns, and takes no more memory from step to step."
)
def test_a_short_run_learns_and_leaves_the_memory_it_took(tmp_path: Path) -> None:
    write_small_run(tmp_path, model={"hidden_size": 64, "num_layers": 2}, **sums_from_files(tmp_path))
    torchrun(tmp_path, 1, "run.num_steps=20", "run.deterministic=false")
    steps = rows(tmp_path / "runs/run")
    assert steps[-1]["reward/mean"] > steps[1]["reward/mean"]
    assert all(row["mismatch/max_abs_nats"] < 0.5 for row in steps[1:])
    peaks = [row["memory/peak_gib"] for row in steps[5:]]
    assert max(peaks) < 1.5 * min(peaks)
