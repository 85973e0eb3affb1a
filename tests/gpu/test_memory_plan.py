"""On a device: levers change where memory is and no number, and predictions are near what torch allocates."""

from __future__ import annotations

import gc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from spmdrl.config import OptimConfig, ReportConfig
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import PolicyObjective
from spmdrl.learn.update import update
from spmdrl.memory.activations import ActivationSettings, activation_bytes
from spmdrl.model.kernels import varlen_takes_groups
from spmdrl.model.load import load_policy
from spmdrl.model.offload import StateOnHost, TrainerMemory
from spmdrl.preflight.forecast import Model, decoder_of, predict
from spmdrl.report import Report
from spmdrl.report.report import resource_metrics
from spmdrl.step.batch import build_batch
from tests.helpers.batches import completed
from tests.helpers.configs import loss_config, minimal_config, model_config, plan_for
from tests.helpers.device_memory import MIB, allocated, shards, state
from tests.helpers.device_sizes import sized
from tests.helpers.live import Watch
from tests.helpers.models import save_qwen3
from tests.helpers.policies import policy_of, tokens
from tests.helpers.sequences import random_sequences

PREDICTED = pytest.mark.claim(
    "Memory", "Predicted memory is near what torch allocates: activations, an update, the peak of a phase."
)

CUDA = torch.device("cuda")
SIZES = sized(
    {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128},
    emulated={"hidden_size": 128, "intermediate_size": 512, "head_dim": 32},
)
SEQUENCE_TOKENS = sized(512, emulated=128)  # eight of them
UPDATE = sized({"count": 64, "max_tokens": 250}, emulated={"count": 32, "max_tokens": 100})
LEVELS = ["none", "selective", "full"]
MOVED = ("token_ids", "positions", "cu_seqlens", "loss_mask")  # what a forward pass reads


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen3(tmp_path_factory.mktemp("qwen3"), num_hidden_layers=6, **SIZES)


@PREDICTED
@pytest.mark.parametrize("level", LEVELS)
def test_what_is_kept_is_what_the_formula_says(level: str) -> None:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    policy = policy_of(level, dtype=torch.bfloat16, kernel="varlen", **SIZES, **heads).to(CUDA)
    batch = tokens(*[SEQUENCE_TOKENS] * 8)
    batch = replace(batch, **{name: getattr(batch, name).to(CUDA) for name in MOVED})
    policy(batch).logprobs.sum().backward()  # cuBLAS's workspaces, and gradients
    before = allocated()
    scores = policy(batch)
    measured = allocated() - before
    shapes = {name: tuple(parameter.shape) for name, parameter in policy.model.named_parameters()}
    options = {"repeats_keys": not varlen_takes_groups(), "fused": True}
    kept = ActivationSettings(level=level, every_layers=1, compute_bytes=2, **options)
    predicted = activation_bytes(decoder_of(policy.model.config, shapes), kept, num_tokens=SEQUENCE_TOKENS * 8)
    assert 0.85 < predicted / measured < 1.15
    with Watch() as watch:
        scores.logprobs.sum().backward()
    attention = sum(count for name, count in watch.operations.items() if name.endswith("_varlen_attn"))
    assert bool(attention) == (level == "full"), watch.operations


def start(path: str, meshes: Meshes, *, state_on_host: bool = False, level: str = "none") -> Learner:
    policy = load_policy(model_config(path, gradient_checkpointing=level), meshes.model, temperature=1.0)
    optim = OptimConfig(lr=1e-3, weight_decay=0.1, state_on_host=state_on_host)
    return Learner(policy, optim, PolicyObjective(loss_config()), num_updates=4, dtype=torch.bfloat16)


def train(learner: Learner, meshes: Meshes, *, step: int, count: int = 8, max_tokens: int = 40) -> int:
    """One update; returns the tokens of the largest micro-batch."""
    sequences = random_sequences(count, seed=step, max_tokens=max_tokens)
    plan = plan_for(count, 1, max_sequence_tokens=max_tokens, max_tokens_per_micro_batch=8192)
    batch = build_batch(sequences, plan, meshes, aggregation="token_mean")
    update(learner, completed(batch, meshes).mini_batches, meshes, step=step)
    return max(len(micro_batch.token_ids) for mini_batch in batch.mini_batches for micro_batch in mini_batch)


@pytest.mark.claim("Memory", "The optimizer's state on the host gives the bits of that on the device.")
def test_state_on_the_host_is_bitwise_state_on_the_device(qwen3: str) -> None:
    results: dict[bool, tuple[list[Tensor], int]] = {}
    for on_host in (False, True):
        with spmd_session(threads_per_rank=1, deterministic=True) as world:
            meshes = build_meshes(world)
            learner = start(qwen3, meshes, state_on_host=on_host)
            if on_host:
                assert isinstance(learner.optimizer, StateOnHost)
                learner.optimizer.block_bytes = 8 * MIB
            memory = TrainerMemory([learner], CUDA, moves="all")
            for step in (1, 2):
                train(learner, meshes, step=step)
                memory.sleep()
                memory.wake()
            held = allocated()
            weights = sum(shard.nbytes for shard in shards(learner.model))
            results[on_host] = state(learner), held
            if on_host:
                moments = [value for values in learner.optimizer.state.values() for value in values.values()]
                locals_ = [value.to_local() if hasattr(value, "to_local") else value for value in moments]
                assert all(local.is_pinned() for local in locals_)
            del learner, memory
    for one, other in zip(results[False][0], results[True][0], strict=True):
        assert torch.equal(one, other)
    assert results[False][1] - results[True][1] > 2 * weights - MIB


@PREDICTED
@pytest.mark.parametrize("level", LEVELS)
def test_an_update_takes_what_the_plan_says(qwen3: str, level: str) -> None:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        learner = start(qwen3, meshes, level=level)
        train(learner, meshes, step=1, **UPDATE)
        gc.collect()
        torch.cuda.reset_peak_memory_stats()
        num_tokens = train(learner, meshes, step=2, **UPDATE)
        measured = torch.cuda.max_memory_allocated()
        del learner
    cfg = minimal_config(
        model={"path": qwen3, "gradient_checkpointing": level, "logits_chunk_tokens": 16},
        rollout={"prompts_per_step": 1024, "group_size": 2, "max_response_tokens": 8},
        pack={"max_tokens_per_micro_batch": num_tokens},
    )
    model = Model.read(AutoConfig.from_pretrained(Path(qwen3)), cfg.model)
    device_bytes = torch.cuda.get_device_properties(0).total_memory
    prediction = predict(cfg, model, num_ranks=1, device_bytes=device_bytes, on_gpu=True)
    (phase,) = [phase for phase in prediction.phases if phase.name == "forward-backward"]
    predicted = phase.process_bytes - phase.device["engine"] - phase.device["refit buckets"]
    assert 0.7 < predicted / measured < 1.3, (predicted / MIB, measured / MIB)


@PREDICTED
def test_the_peak_of_a_phase_is_its_own() -> None:
    with Report(ReportConfig(console="plain"), None, num_steps=1, active=False) as report:
        kept = torch.zeros(4 * MIB, dtype=torch.uint8, device=CUDA)
        gc.collect()  # what an earlier test has left must not go in the middle of this one
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()  # nor its peak before the first phase
        for name, size in (("update", 64 * MIB), ("save", 8 * MIB)):
            with report.span(name):
                torch.zeros(size, dtype=torch.uint8, device=CUDA)
        peaks = report.take_peaks()
    assert {name: peaks[name].device_bytes - before for name in ("update", "save")} == {
        "update": 64 * MIB,
        "save": 8 * MIB,
    }
    measured = resource_metrics(peaks)
    assert measured["memory/update_host_peak_gib"].value() > 0
    assert kept.is_cuda and measured["memory/peak_gib"].value() == (before + 64 * MIB) / 2**30
