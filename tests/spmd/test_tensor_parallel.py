"""A model split over tp and ep, and copies of it, give the gradients and weights of one rank."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, Olmo2Config

from spmdrl import checkpoint
from spmdrl.config import OptimConfig, ParallelConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import World, spmd_session
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import PolicyObjective
from spmdrl.learn.update import update
from spmdrl.model import operators
from spmdrl.model.load import load_policy
from spmdrl.step.batch import build_batch
from tests.helpers.batches import completed
from tests.helpers.checkpoints import save_and_wait
from tests.helpers.configs import loss_config, model_config, plan_for
from tests.helpers.learners import full_weights
from tests.helpers.models import (
    HAS_EXPERT_PLANS,
    needs_expert_plans,
    save_llama,
    save_model,
    save_qwen3,
    save_qwen3_moe,
)
from tests.helpers.parity import LOSS, assert_same_change, dealt, initial
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences

VOCABULARY = 96
MIXED = {"vocab_size": VOCABULARY, "num_experts": 8, "num_hidden_layers": 3, "mlp_only_layers": [0]}
SEQUENCES = 12
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
}

Case = tuple[str, dict[str, int]]  # a model (in the end, its directory) and settings of [parallel]
Outcome = tuple[dict[str, Tensor], dict[str, float]]  # every weight after one update, and the update's metrics


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of models that between them are split in every way there is."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "qwen3": save_qwen3(folder / "qwen3", vocab_size=VOCABULARY),
        "llama": save_llama(folder / "llama", vocab_size=VOCABULARY, attention_bias=True, mlp_bias=True),
        "qwen3_moe": save_qwen3_moe(folder / "qwen3_moe", **MIXED),
        # Embeddings that are scaled, windows, and norms around everything.
        "gemma3": save_model(
            folder / "gemma3",
            Gemma3TextConfig(
                **SMALL, head_dim=16, sliding_window=8, layer_types=["sliding_attention", "full_attention"]
            ),
        ),
        # Norms over all heads: projections are gathered, and every rank computes the whole attention.
        "olmo2": save_model(folder / "olmo2", Olmo2Config(**SMALL, pad_token_id=0)),
    }


def _update_each(cases: list[Case], experts: str | None = None) -> list[Outcome]:
    """One update of each case's model, split as the case says; run on each rank.

    `experts` is transformers' name of how experts are computed.
    """
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        return [_updated(world, path, ParallelConfig(**parallel), experts) for path, parallel in cases]


def _update_each_fused(cases: list[Case]) -> list[Outcome]:
    """`_update_each` with the layers of a GPU."""
    with mock.patch.object(operators, "_FAST", operators._FUSED):
        return _update_each(cases)


def _updated(world: World, path: str, parallel: ParallelConfig, experts: str | None) -> Outcome:
    meshes = build_meshes(world, parallel)
    settings, losses = model_config(path, gradient_checkpointing="full"), loss_config(**LOSS)
    policy = load_policy(settings, meshes.model, temperature=0.8)
    reference = load_policy(settings, meshes.model, temperature=0.8, role="reference") if losses.kl_coef else None
    if experts:
        policy.model.set_experts_implementation(experts)
    mine = dealt(random_sequences(SEQUENCES, vocabulary=VOCABULARY), world.rank, world.num_ranks, "like cards")
    batch = build_batch(mine, plan_for(SEQUENCES, world.num_ranks), meshes, aggregation="token_mean")
    optim = OptimConfig(name="sgd", lr=1.0, max_grad_norm=1e6)
    learner = Learner(policy, optim, PolicyObjective(losses), num_updates=1, dtype=torch.float32)
    mini_batches = completed(batch, meshes, policy, reference).mini_batches
    metrics = update(learner, mini_batches, meshes, step=1)
    return full_weights(policy, meshes), {name: metric.value() for name, metric in metrics.items()}


CASES: dict[int, list[Case]] = {
    2: [
        ("qwen3", {"tp": 2}),
        ("llama", {"tp": 2}),
        ("gemma3", {"tp": 2}),
        ("olmo2", {"tp": 2}),
        ("qwen3_moe", {"tp": 2}),
        ("qwen3_moe", {"ep": 2}),
        ("qwen3_moe", {"tp": 2, "ep": 2}),
    ],
    4: [
        ("qwen3", {"tp": 2}),
        ("llama", {"tp": 4}),
        ("qwen3", {"dp_replicate": 2}),
        ("qwen3", {"dp_replicate": 2, "tp": 2}),
        ("qwen3_moe", {"tp": 2}),
        ("qwen3_moe", {"tp": 2, "ep": 2}),
        ("qwen3_moe", {"ep": 4}),
        ("qwen3_moe", {"dp_replicate": 2, "ep": 2}),
    ],
}


def possible(cases: list[Case]) -> list[Case]:
    """Those that this transformers can split."""
    return [case for case in cases if HAS_EXPERT_PLANS or "ep" not in case[1]]


@pytest.fixture(scope="session")
def one_rank(models: dict[str, str]) -> dict[str, Outcome]:
    (outcomes,) = run_ranks(1, _update_each, [(path, {}) for path in models.values()])
    return dict(zip(models, outcomes, strict=True))


def assert_same_update(path: str, one: Outcome, others: list[Outcome]) -> None:
    """Every rank has the weights of one rank, and the first of them its metrics."""
    start = initial(path)
    for weights, _ in others:
        assert_same_change(one[0], weights, start, 1e-5)
    for name in ("update/grad_norm", "update/loss"):
        assert others[0][1][name] == pytest.approx(one[1][name], rel=1e-5, abs=1e-6), name


@pytest.mark.slow  # tests/spmd/test_matrix.py has splits of other models
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_split_model_has_the_gradients_of_one_rank(
    num_ranks: int, models: dict[str, str], one_rank: dict[str, Outcome]
) -> None:
    cases = possible(CASES[num_ranks])
    by_rank = run_ranks(num_ranks, _update_each, [(models[model], parallel) for model, parallel in cases])
    for number, (model, _) in enumerate(cases):
        assert_same_update(models[model], one_rank[model], [outcomes[number] for outcomes in by_rank])


@pytest.mark.parametrize(
    "cases",
    [
        [("llama", {"tp": 2}), ("qwen3_moe", {"ep": 2})],
        pytest.param([("qwen3", {"tp": 2}), ("qwen3_moe", {"tp": 2})], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_fused_layers_are_split_too(cases: list[Case], models: dict[str, str], one_rank: dict[str, Outcome]) -> None:
    cases = possible(cases)
    by_rank = run_ranks(2, _update_each_fused, [(models[model], parallel) for model, parallel in cases])
    for number, (model, _) in enumerate(cases):
        assert_same_update(models[model], one_rank[model], [outcomes[number] for outcomes in by_rank])


@needs_expert_plans
def test_a_rank_to_whose_experts_no_token_comes_takes_part(tmp_path: Path) -> None:
    path = save_qwen3_moe(tmp_path, **MIXED)
    model = AutoModelForCausalLM.from_pretrained(path)
    for name, parameter in model.named_parameters():
        if name.endswith("gate.weight"):  # every token finds all experts equally good, and takes the same two
            torch.nn.init.zeros_(parameter)
    model.save_pretrained(path)
    cases: list[Case] = [(path, {"ep": 4}), (path, {"tp": 2, "ep": 4})]
    ((one,),) = run_ranks(1, _update_each, [(path, {})], "eager")  # where no expert is used, no weight is touched
    name = "model.layers.2.mlp.experts.down_proj"
    assert ((one[0][name] - initial(path)[name]).abs().sum((1, 2)) > 0).sum() == 2
    for outcomes in zip(*run_ranks(4, _update_each, cases, "eager"), strict=True):
        assert_same_update(path, one, list(outcomes))


def _train_on(path: str, runs: list[tuple[Path, dict[str, int], int, int]]) -> list[dict[str, Tensor]]:
    """Every weight after AdamW's updates, each saved, of every (folder, parallel, step to start from, last step)."""
    weights = []
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        for folder, parallel, start, end in runs:
            meshes = build_meshes(world, ParallelConfig(**parallel))
            policy = load_policy(model_config(path), meshes.model, temperature=0.8)
            learner = Learner(
                policy, OptimConfig(lr=1e-3), PolicyObjective(loss_config()), num_updates=end, dtype=torch.float32
            )
            mine = dealt(random_sequences(SEQUENCES, vocabulary=VOCABULARY), world.rank, world.num_ranks, "like cards")
            batch = completed(
                build_batch(mine, plan_for(SEQUENCES, world.num_ranks), meshes, aggregation="token_mean"), meshes
            )
            checkpoint.restore(folder, {"policy": learner}, meshes.training, step=start)
            for step in range(start + 1, end + 1):
                update(learner, batch.mini_batches, meshes, step=step)
                save_and_wait(folder, {"policy": learner}, meshes, step=step)
            weights.append(full_weights(policy, meshes))
    return weights


@pytest.mark.slow
@needs_expert_plans
def test_a_split_model_goes_on_where_it_was_saved(models: dict[str, str], tmp_path: Path) -> None:
    path = models["qwen3_moe"]
    splits: dict[Path, dict[str, int]] = {tmp_path / "tp": {"tp": 2}, tmp_path / "both": {"tp": 2, "ep": 2}}
    runs = [(folder, split, *steps) for folder, split in splits.items() for steps in ((0, 2), (1, 2))]
    split = run_ranks(2, _train_on, path, runs)[0]
    whole = run_ranks(1, _train_on, path, [(folder, {}, 1, 2) for folder in splits])[0]
    split_again = run_ranks(2, _train_on, path, [(*run, 2, 2) for run in splits.items()])[0]
    for number in range(len(splits)):
        straight, resumed = split[2 * number : 2 * number + 2]
        for name, weight in straight.items():
            assert torch.equal(weight, resumed[name]), name
            # A tenth of what one update may move a weight.
            assert (weight - whole[number][name]).abs().max() < 1e-4, name
            assert torch.equal(whole[number][name], split_again[number][name]), name
