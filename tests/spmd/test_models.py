"""Of every supported model: packed = one at a time, two ranks = one, trainer = transformers' own forward = engine."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import PreTrainedModel

from spmdrl.dist.mesh import ModelMeshes, build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.model.load import load_model_config, load_policy, weights_of
from spmdrl.model.policy import Policy
from spmdrl.model.rotary import changes_after
from spmdrl.model.trunk import model_class
from spmdrl.refit.bucket import Naming
from spmdrl.refit.gather import Gatherer
from spmdrl.refit.refit import load_whole
from spmdrl.step.batch import lay_end_to_end
from spmdrl.types import Request, Sequence
from tests.helpers.configs import model_config
from tests.helpers.models import (
    OTHERS,
    save_gemma3,
    save_gpt_oss,
    save_llama,
    save_mistral,
    save_other,
    save_qwen2,
    save_qwen3,
    save_qwen3_5,
    save_qwen3_5_moe,
    save_qwen3_moe,
    save_qwen3_next,
)
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences

MODELS = [save_qwen3, save_gemma3, save_qwen3_moe, save_gpt_oss, save_qwen3_next, save_qwen3_5_moe]
# Each is much like one of MODELS: `make test-long` has them.
ALIKE = [save_llama, save_qwen2, save_mistral, save_qwen3_5]
TEMPERATURE = 0.8
Scores = tuple[dict[int, Tensor], dict[str, Tensor]]  # (log-probabilities of each sequence, gradient of each parameter)


@dataclass(frozen=True)
class Ways:
    """One rank's scores, and the weights it sent to an engine."""

    packed: Scores  # alone, several sequences in a micro-batch
    single: Scores  # alone, a sequence at a time, with layers that are recomputed in backward
    shared: Scores  # sharded over all ranks, each with some of the sequences
    sent: dict[Naming, dict[str, Tensor]]


@dataclass(frozen=True)
class Measured:
    """One model, scored in every way."""

    path: Path
    plain: PreTrainedModel
    sequences: list[Sequence]
    ranks: list[Ways]  # what each of two ranks saw


@pytest.fixture(
    scope="module",
    params=[
        *(
            pytest.param(save, id=save.__name__.removeprefix("save_"), marks=marks)
            for models, marks in ((MODELS, ()), (ALIKE, pytest.mark.slow))
            for save in models
        ),
        *(pytest.param(partial(save_other, name), id=name, marks=pytest.mark.slow) for name in OTHERS),
    ],
)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    path = request.param(tmp_path_factory.mktemp("model"))
    config = load_model_config(model_config(path))
    plain = model_class(config).from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    sequences = sampled_sequences(plain)
    return Measured(Path(path), plain, sequences, run_ranks(2, every_way, path, sequences))


def test_packed_sharded_and_plain_forwards_agree(measured: Measured) -> None:
    first, second = measured.ranks
    logprobs, gradients = plain_scores(measured.plain, measured.sequences)
    both = first.shared[0] | second.shared[0]
    for index, expected in logprobs.items():
        for way in (first.packed[0], first.single[0], both):
            torch.testing.assert_close(way[index], expected, rtol=0, atol=1e-5)
    for name, expected in gradients.items():
        for _, found in (first.packed, first.single, first.shared):
            error = (found[name] - expected).norm() / expected.norm()
            assert error < 1e-5, f"{name}: relative error {error:.1e}"


def test_what_the_engine_reported_is_what_the_trainer_computes(measured: Measured) -> None:
    logprobs, _ = measured.ranks[0].packed
    for sequence in measured.sequences:
        sampled = torch.tensor(sequence.loss_mask)
        reported = torch.tensor(sequence.rollout_logprobs)
        torch.testing.assert_close(logprobs[sequence.index][sampled], reported[sampled], rtol=0, atol=1e-5)


def test_weights_are_sent_under_the_names_of_model_and_files(measured: Measured) -> None:
    expected = {
        "model": weights_of(measured.plain),
        "checkpoint": load_file(measured.path / "model.safetensors"),
    }
    for naming, weights in expected.items():
        sent = measured.ranks[0].sent[naming]
        assert sent.keys() == weights.keys()
        for name, weight in weights.items():
            assert torch.equal(sent[name], weight), name


def sampled_sequences(model: PreTrainedModel) -> list[Sequence]:
    """What the embedded engine samples with the model's weights, with a cache; prompts shared by two."""
    device = torch.device("cpu")
    engine = TorchEngine(model.config, device=device, dtype=torch.float32, kernel="sdpa", max_running=5)
    load_whole(engine, weights_of(model), version=0)
    limit = changes_after(model.config)
    lengths = (3, 4, 5, 6 if limit is None else limit + 1)  # no response may cross it
    prompts = [sequence.token_ids[:length] for sequence, length in zip(random_sequences(4), lengths, strict=True)]
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
            reward=1.0 - 0.3 * i,
        )
        for i, response in engine.generate(asked)
    ]


def plain_scores(model: PreTrainedModel, sequences: list[Sequence]) -> Scores:
    """By transformers alone, a sequence at a time; of the loss tokens, as by a policy."""
    logprobs = {}
    for sequence in sequences:
        ids = torch.tensor(sequence.token_ids)
        log_p = (model(ids[None], use_cache=False).logits[0] / TEMPERATURE).log_softmax(-1)
        of_tokens = torch.nn.functional.pad(log_p[:-1].gather(1, ids[1:, None])[:, 0], (1, 0))
        of_tokens = torch.where(torch.tensor(sequence.loss_mask), of_tokens, 0.0)
        (of_tokens.sum() * sequence.reward).backward()
        logprobs[sequence.index] = of_tokens.detach()
    return logprobs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def every_way(path: str, sequences: list[Sequence]) -> Ways:
    """What this rank sees; beside the other rank it has half of the sequences."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world).model
        grid = init_device_mesh("cpu", (world.num_ranks, 1, 1, 1), mesh_dim_names=("rank", "replicate", "shard", "tp"))
        alone = replace(meshes, dense=grid["replicate", "shard", "tp"])
        ordered = sorted(sequences, key=lambda sequence: len(sequence.token_ids))  # as packing does
        halves = [ordered[::2], ordered[1::2]]

        def load(meshes: ModelMeshes, **model: str) -> Policy:
            return load_policy(model_config(path, **model), meshes, temperature=TEMPERATURE)

        shared = load(meshes)
        namings: tuple[Naming, ...] = ("model", "checkpoint")
        return Ways(
            packed=trainer_scores(load(alone), halves),
            single=trainer_scores(load(alone, gradient_checkpointing="full"), [[s] for s in sequences]),
            shared=trainer_scores(shared, [halves[world.rank]]),
            sent={naming: sent_weights(shared, meshes.copy, naming) for naming in namings},
        )


def sent_weights(policy: Policy, mesh: DeviceMesh, naming: Naming) -> dict[str, Tensor]:
    """Whole weights from the shards of all ranks, as a refit sends them."""
    gatherer = Gatherer(policy, mesh, dtype=torch.float32, bucket_bytes=2**14, naming=naming)
    return {name: tensor.clone() for bucket in gatherer.whole_tensors() for name, tensor in bucket}


def trainer_scores(policy: Policy, micro_batches: list[list[Sequence]]) -> Scores:
    """By the policy, every rank with micro-batches of its own."""
    logprobs: dict[int, Tensor] = {}
    for sequences in micro_batches:
        micro_batch = lay_end_to_end(sequences, {})
        scores = policy(micro_batch)
        (scores.logprobs * micro_batch.rewards).sum().backward()
        of_each = scores.logprobs.detach().split(micro_batch.seqlens)
        logprobs |= {sequence.index: part for sequence, part in zip(sequences, of_each, strict=True)}
    gradients = {name: p.grad.full_tensor() for name, p in policy.model.named_parameters() if p.grad is not None}
    return logprobs, gradients
