"""Models that look at images, before and behind responses: packed = alone = transformers' own forward, one rank =
FSDP = cp = tp, log-probabilities and gradients, with a frozen tower and with one that is trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForImageTextToText, PreTrainedModel

from spmdrl.config import ParallelConfig
from spmdrl.data.image_store import ImageStore
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import World, spmd_session
from spmdrl.model.load import load_policy
from spmdrl.model.policy import Policy
from spmdrl.step.batch import lay_end_to_end
from spmdrl.step.images import Images
from spmdrl.types import MicroBatch, Sequence
from tests.helpers.configs import model_config
from tests.helpers.models import HAS_EXPERT_PLANS
from tests.helpers.pairwise import all_rows, covering
from tests.helpers.ranks import run_ranks
from tests.helpers.vision_models import (
    Picture,
    in_turns,
    inputs_of,
    mixed_sequences,
    save_gemma3_vl,
    save_gemma4_that_hears,
    save_gemma4_vl,
    save_qwen2_5_vl,
    save_qwen3_5_moe_vl,
    save_qwen3_5_vl,
    save_qwen3_vl,
    save_qwen3_vl_moe,
    stored,
)

TEMPERATURE = 0.8
TOWERS = ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.", "model.embed_vision.")
FROZEN: tuple[str, ...] | None = None
TRAINED: tuple[str, ...] = ()
Scores = tuple[dict[int, Tensor], dict[str, Tensor]]  # (log-probabilities of each sequence, gradient of each parameter)

# The ways in which two ranks can share a model, where it allows them.
LAYOUTS: dict[str, ParallelConfig] = {
    "fsdp": ParallelConfig(),
    "cp": ParallelConfig(cp=2),
    "ulysses": ParallelConfig(cp=2, cp_style="ulysses"),
    "tp": ParallelConfig(tp=2),
    "ep": ParallelConfig(ep=2),
}
MODELS: dict[Callable[..., str], tuple[str, ...]] = {
    save_qwen2_5_vl: ("fsdp", "cp", "tp"),
    save_gemma3_vl: ("fsdp", "ulysses", "tp"),  # the tokens of an image see each other
    save_gemma4_vl: ("fsdp", "ulysses", "tp"),  # in layers with a window
    save_gemma4_that_hears: ("fsdp", "cp", "ulysses", "tp"),
    save_qwen3_vl: ("fsdp", "cp", "tp"),
    save_qwen3_vl_moe: ("fsdp", "cp", "tp", *(("ep",) if HAS_EXPERT_PLANS else ())),
    save_qwen3_5_vl: ("fsdp", "cp", "tp"),  # a recurrent layer
    save_qwen3_5_moe_vl: ("fsdp", "cp", "tp", *(("ep",) if HAS_EXPERT_PLANS else ())),  # and experts
}
# In `make test`: a tower whose tokens see each other, one that adds to layers of a half with experts.
IN_THE_GATE = (save_gemma4_vl, save_qwen3_vl_moe)
ALONE = ("packed", "alone")
POSSIBLE = all_rows(
    {"model": tuple(MODELS), "way": (*ALONE, *LAYOUTS), "tower": ("frozen", "trained")},
    lambda row: row["way"] in (*ALONE, *MODELS[row["model"]]),
)
# With every pair of model, way and tower.
FEW = covering([row for row in POSSIBLE if row["model"] in IN_THE_GATE])
OTHERS = [row for row in POSSIBLE if row not in FEW]


@dataclass(frozen=True)
class Ways:
    """One rank's scores with a frozen and with a trained tower, by way; "alone" has one sequence at a time."""

    frozen: dict[str, Scores]
    trained: dict[str, Scores]


@dataclass(frozen=True)
class Measured:
    """One model, scored in every way by each of two ranks, and by transformers."""

    ranks: list[Ways]
    plain: Scores


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((save, rows), id=f"{save.__name__.removeprefix('save_')}-{name}", marks=marks)
        for name, models, rows, marks in (("few", IN_THE_GATE, FEW, ()), ("others", MODELS, OTHERS, pytest.mark.slow))
        for save in models
    ],
)
def measured(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    folder = tmp_path_factory.mktemp("vl")
    save, rows = request.param
    path = save(folder / "model")
    sequences, pictures = mixed_sequences(path)
    first, second, *_ = pictures.values()
    # Of which two have images behind responses: what an environment shows.
    sequences += [in_turns(path, [first], [second, first], index=6), in_turns(path, [], [second], [], index=7)]
    sequences, store = stored(sequences, pictures, folder / "images")
    plain = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager", dtype=torch.float32)
    ways = [(row["tower"], row["way"]) for row in rows if row["model"] is save]
    ranks = run_ranks(2, every_way, path, sequences, str(folder / "images"), ways)
    store.close()
    return Measured(ranks, plain_scores(path, plain, sequences, {one.digest: one for one in pictures.values()}))


@pytest.mark.parametrize("tower", ["frozen", "trained"])
def test_every_way_agrees_with_transformers(measured: Measured, tower: str) -> None:
    logprobs, gradients = measured.plain
    frozen = {name for name in gradients if name.startswith(TOWERS)}
    assert frozen and getattr(measured.ranks[0], tower)
    for name, (_, found) in getattr(measured.ranks[0], tower).items():
        both = getattr(measured.ranks[0], tower)[name][0] | getattr(measured.ranks[1], tower)[name][0]
        for index, expected in logprobs.items():
            torch.testing.assert_close(both[index], expected, rtol=0, atol=1e-5)
        assert found.keys() == gradients.keys() - (frozen if tower == "frozen" else set()), name
        for parameter, gradient in found.items():
            # Some gradients are close to 0, and sums of parts that are not.
            error = (gradient - gradients[parameter]).norm() / gradients[parameter].norm().clamp(min=1.0)
            assert error < 1e-5, f"{name}: {parameter}: relative error {error:.1e}"


def plain_scores(path: str, model: PreTrainedModel, sequences: list[Sequence], pictures: dict[str, Picture]) -> Scores:
    """By transformers alone, a sequence at a time; of the loss tokens, as by a policy."""
    logprobs = {}
    for sequence in sequences:
        ids = torch.tensor(sequence.token_ids)
        log_p = (model(**inputs_of(path, sequence, pictures), use_cache=False).logits[0] / TEMPERATURE).log_softmax(-1)
        of_tokens = torch.nn.functional.pad(log_p[:-1].gather(1, ids[1:, None])[:, 0], (1, 0))
        of_tokens = torch.where(torch.tensor(sequence.loss_mask), of_tokens, 0.0)
        (of_tokens.sum() * sequence.reward).backward()
        logprobs[sequence.index] = of_tokens.detach()
    return logprobs, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def every_way(path: str, sequences: list[Sequence], images: str, ways: list[tuple[str, str]]) -> Ways:
    """Return this rank's results; under FSDP it has half of the sequences."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        store = ImageStore(Path(images), max_bytes=2**24)
        found: dict[str, dict[str, Scores]] = {"frozen": {}, "trained": {}}
        for tower, name in ways:
            meshes = _meshes(world, name)
            freeze = FROZEN if tower == "frozen" else TRAINED
            policy = load_policy(model_config(path, freeze=freeze), meshes.model, temperature=TEMPERATURE)
            found[tower][name] = _scores(policy, _shares(world, name, sequences), store, meshes)
        return Ways(**found)


def _meshes(world: World, way: str) -> Meshes:
    meshes = build_meshes(world, LAYOUTS.get(way, ParallelConfig()), ranks_per_engine=1)
    if way in LAYOUTS:
        return meshes
    grid = init_device_mesh("cpu", (world.num_ranks, 1, 1, 1), mesh_dim_names=("rank", "replicate", "shard", "tp"))
    model = replace(meshes.model, dense=grid["replicate", "shard", "tp"])
    return replace(meshes, model=model, training=grid["tp"])


def _shares(world: World, way: str, sequences: list[Sequence]) -> list[list[Sequence]]:
    """The sequences of this rank's micro-batches."""
    ordered = sorted(sequences, key=lambda sequence: len(sequence.token_ids))
    if way == "alone":
        return [[one] for one in sequences]
    if way in ("fsdp", "ep"):
        # The second micro-batch of the first rank is of text alone, and that of the second rank is empty.
        text = [one for one in ordered if not one.images]
        shown = [one for one in ordered if one.images]
        return [[shown[:2], text], [shown[2:], []]][world.rank]
    return [ordered[::2], ordered[1::2]]


def _scores(policy: Policy, shares: list[list[Sequence]], store: ImageStore, meshes: Meshes) -> Scores:
    images = Images(policy, store, meshes, dtype=torch.float32, max_patches=24)
    made = [lay_end_to_end(share, {}, multiple=meshes.model.cp.size()) for share in shares]
    micro_batches, _ = images.encode(made)
    logprobs: dict[int, Tensor] = {}
    for micro_batch in micro_batches:
        scores = policy(micro_batch)
        (scores.logprobs * micro_batch.rewards).sum().backward()
        logprobs |= _of_sequences(micro_batch, scores.logprobs.detach())
    gradients = {name: p.grad.full_tensor() for name, p in policy.model.named_parameters() if p.grad is not None}
    return logprobs, gradients


def _of_sequences(micro_batch: MicroBatch, values: Tensor) -> dict[int, Tensor]:
    parts = values.split(micro_batch.seqlens)
    return {index: part for index, part in zip(micro_batch.sequence_index, parts, strict=True) if index >= 0}
