"""Every supported architecture: packed = one at a time, two ranks = one, trainer = transformers' own forward = engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM, PreTrainedModel

from spmdrl.batch import lay_end_to_end
from spmdrl.dist.session import spmd_session
from spmdrl.model.load import load_model_config, load_policy
from spmdrl.refit.refit import load_whole
from spmdrl.rollout.torch_engine import TorchEngine
from spmdrl.types import Request, Sequence, UserError
from tests.spmd.ranks import run_ranks
from tests.tiny import (
    model_config,
    random_sequences,
    save_gemma3,
    save_gpt_oss,
    save_llama,
    save_qwen3,
    save_qwen3_5,
    save_qwen3_moe,
    save_qwen3_next,
)

ATTENTION_ONLY = [save_qwen3, save_llama, save_gemma3, save_qwen3_moe, save_gpt_oss]
RECURRENT = [save_qwen3_next, save_qwen3_5]
TEMPERATURE = 0.8
Scores = tuple[dict[int, Tensor], dict[str, Tensor]]  # (log-probabilities of each sequence, gradient of each parameter)


def name_of(save: Callable[..., str]) -> str:
    return save.__name__.removeprefix("save_")


@pytest.mark.parametrize("save", ATTENTION_ONLY + RECURRENT, ids=name_of)
def test_packed_sharded_and_plain_forwards_agree(tmp_path: Path, save: Callable[..., str]) -> None:
    path = save(tmp_path)
    plain = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    sampled = save in ATTENTION_ONLY
    sequences = sampled_sequences(plain) if sampled else random_sequences(8)
    expected = plain_scores(plain, sequences)
    (packed, single, shared), (_, _, shared_other) = run_ranks(2, every_way, path, sequences)
    for sequence in sequences:
        n = len(sequence.token_ids)
        ways = [packed[0], single[0], {**shared[0], **shared_other[0]}]
        for way in ways:
            torch.testing.assert_close(way[sequence.index], expected[0][sequence.index], rtol=0, atol=1e-5)
        if sampled:
            rollout, trained = torch.tensor(sequence.rollout_logprobs), torch.tensor(sequence.loss_mask)
            assert trained.sum() and len(rollout) == n
            torch.testing.assert_close(packed[0][sequence.index][trained], rollout[trained], rtol=0, atol=1e-5)
    for name, gradient in expected[1].items():
        for way in (packed, single, shared):
            error = (way[1][name] - gradient).norm() / gradient.norm()
            assert error < 1e-5, f"{name}: relative error {error:.1e}"


def sampled_sequences(model: PreTrainedModel) -> list[Sequence]:
    """What the embedded engine samples with the model's weights, with a cache; prompts shared by two."""
    device = torch.device("cpu")
    engine = TorchEngine(model.config, device=device, dtype=torch.float32, kernel="sdpa", max_running=5)
    load_whole(engine, dict(model.named_parameters()), version=0)
    prompts = [sequence.token_ids[: 3 + sequence.index] for sequence in random_sequences(4)]
    asked = [
        Request(prompt_ids=prompts[i // 2], seed=i, max_response_tokens=12 + i % 3, temperature=TEMPERATURE)
        for i in range(8)
    ]
    return [
        Sequence(
            index=i,
            token_ids=asked[i].prompt_ids + response.token_ids,
            loss_mask=(False,) * len(asked[i].prompt_ids) + (True,) * len(response.token_ids),
            rollout_logprobs=(0.0,) * len(asked[i].prompt_ids) + response.logprobs,
            advantage=1.0 - 0.3 * i,
        )
        for i, response in engine.generate(asked)
    ]


def plain_scores(model: PreTrainedModel, sequences: list[Sequence]) -> Scores:
    """By transformers alone, a sequence at a time."""
    logprobs = {}
    for sequence in sequences:
        ids = torch.tensor(sequence.token_ids)
        log_p = (model(ids[None], use_cache=False).logits[0] / TEMPERATURE).log_softmax(-1)
        of_tokens = torch.nn.functional.pad(log_p[:-1].gather(1, ids[1:, None])[:, 0], (1, 0))
        (of_tokens.sum() * sequence.advantage).backward()
        logprobs[sequence.index] = of_tokens.detach()
    return logprobs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def every_way(path: str, sequences: list[Sequence]) -> tuple[Scores, Scores, Scores]:
    """This rank alone with packed sequences, alone with one at a time, and with half of them beside the other rank."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        grid = init_device_mesh("cpu", (world.num_ranks, 1), mesh_dim_names=("data", "alone"))
        ordered = sorted(sequences, key=lambda sequence: len(sequence.token_ids))  # as packing does
        halves = [ordered[::2], ordered[1::2]]
        packed = trainer_scores(path, grid["alone"], halves)
        single = trainer_scores(path, grid["alone"], [[sequence] for sequence in sequences])
        shared = trainer_scores(path, grid["data"], [halves[world.rank]])
        return packed, single, shared


def trainer_scores(path: str, mesh: DeviceMesh, micro_batches: list[list[Sequence]]) -> Scores:
    """By the policy, sharded over the mesh, every rank with micro-batches of its own."""
    policy = load_policy(model_config(path), mesh, temperature=TEMPERATURE)
    logprobs: dict[int, Tensor] = {}
    for sequences in micro_batches:
        micro_batch = lay_end_to_end(sequences, {})
        scores = policy(micro_batch)
        (scores.logprobs * micro_batch.advantages).sum().backward()
        of_each = scores.logprobs.detach().split(micro_batch.seqlens)
        logprobs |= {sequence.index: part for sequence, part in zip(sequences, of_each, strict=True)}
    gradients = {name: p.grad.full_tensor() for name, p in policy.model.named_parameters() if p.grad is not None}
    return logprobs, gradients
