"""A model split over tp and ep, and copies of it, give the gradients and weights of one rank."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

from spmdrl.batch import build_batch
from spmdrl.config import OptimConfig, ParallelConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import World, spmd_session
from spmdrl.model.load import load_policy, load_reference
from spmdrl.objective import PolicyObjective
from spmdrl.update import Learner, prepare, update
from tests.spmd.ranks import run_ranks
from tests.spmd.test_parity import LOSS, assert_same_change, dealt, initial
from tests.tiny import loss_config, model_config, plan_for, random_sequences, save_llama, save_qwen3, save_qwen3_moe

VOCABULARY = 96
SEQUENCES = 12

Outcome = tuple[dict[str, Tensor], dict[str, float]]  # every weight after one update, and the update's metrics


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    builders = {"qwen3": save_qwen3, "llama": save_llama, "qwen3_moe": save_qwen3_moe}
    return {
        name: save(tmp_path_factory.mktemp(name), vocab_size=VOCABULARY) for name, save in builders.items()
    }


def _update_each(cases: list[tuple[str, dict[str, int]]]) -> list[Outcome]:
    """One update of each case's model, split as the case says; run on each rank."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        return [_updated(world, path, ParallelConfig(**parallel)) for path, parallel in cases]


def _updated(world: World, path: str, parallel: ParallelConfig) -> Outcome:
    meshes = build_meshes(world, parallel)
    settings, losses = model_config(path, gradient_checkpointing=True), loss_config(**LOSS)
    policy = load_policy(settings, meshes.model, temperature=0.8)
    reference = load_reference(settings, losses, meshes.model, temperature=0.8)
    mine = dealt(random_sequences(SEQUENCES, vocabulary=VOCABULARY), world.rank, world.num_ranks, "in blocks")
    plan = plan_for(SEQUENCES, world.num_ranks)
    batch = build_batch(mine, plan, meshes, aggregation="token_mean")
    learner = Learner.start(
        policy, OptimConfig(name="sgd", lr=1.0, max_grad_norm=1e6), num_updates=1, dtype=next(policy.parameters()).dtype
    )
    mini_batches = prepare(policy, reference, batch.mini_batches, meshes.training)
    metrics = update(learner, mini_batches, PolicyObjective(losses), meshes, step=1)
    weights = {name: parameter.full_tensor().detach() for name, parameter in policy.model.named_parameters()}
    return weights, {name: metric.value() for name, metric in metrics.items()}


CASES: dict[int, list[tuple[str, dict[str, int]]]] = {
    2: [
        ("qwen3", {"tp": 2}),
        ("llama", {"tp": 2}),
        ("qwen3_moe", {"tp": 2}),
        ("qwen3_moe", {"ep": 2}),
        ("qwen3_moe", {"tp": 2, "ep": 2}),
    ],
    4: [
        ("qwen3", {"tp": 2}),
        ("llama", {"tp": 4}),
        ("qwen3", {"dp_replicate": 2}),
        ("qwen3", {"dp_replicate": 2, "tp": 2}),
        ("qwen3_moe", {"tp": 2, "ep": 2}),
        ("qwen3_moe", {"ep": 4}),
        ("qwen3_moe", {"dp_replicate": 2, "ep": 2}),
    ],
}


@pytest.fixture(scope="session")
def one_rank(models: dict[str, str]) -> dict[str, Outcome]:
    (outcomes,) = run_ranks(1, _update_each, [(path, {}) for path in models.values()])
    return dict(zip(models, outcomes, strict=True))


@pytest.mark.parametrize("num_ranks", CASES)
def test_a_split_model_has_the_gradients_of_one_rank(
    num_ranks: int, models: dict[str, str], one_rank: dict[str, Outcome]
) -> None:
    cases = CASES[num_ranks]
    by_rank = run_ranks(num_ranks, _update_each, [(models[model], parallel) for model, parallel in cases])
    for number, (model, parallel) in enumerate(cases):
        start, (weights, metrics) = initial(models[model]), one_rank[model]
        for outcomes in by_rank:
            assert_same_change(weights, outcomes[number][0], start, 1e-5)
        others = by_rank[0][number][1]
        for name in ("update/grad_norm", "update/loss"):
            assert others[name] == pytest.approx(metrics[name], rel=1e-5, abs=1e-6), (model, parallel, name)
