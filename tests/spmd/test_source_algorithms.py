"""Several algorithms in one step are the weighted sum of steps with one each, on any layout, packed or alone."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.algo.metrics import scalars
from spmdrl.config import Config, OptimConfig, ParallelConfig
from spmdrl.dist.collectives import merge_over
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import World, spmd_session
from spmdrl.learn.learner import Learner
from spmdrl.learn.source_objective import policy_objective
from spmdrl.learn.update import update
from spmdrl.model.load import load_policy
from spmdrl.step.advantages import add_advantages
from spmdrl.step.batch import build_batch
from spmdrl.step.correction import correct, select_by_covariance
from spmdrl.step.logprobs import add_logprobs
from spmdrl.types import Sequence
from tests.helpers.configs import model_config, plan_for
from tests.helpers.groups import COUNT, GROUP_SIZE, groups_config
from tests.helpers.learners import NO_FROZEN_MODELS, full_weights
from tests.helpers.models import HAS_EXPERT_PLANS, save_qwen3_moe
from tests.helpers.parity import assert_same_change, dealt, initial
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences

VOCABULARY, HALF = 96, COUNT // 2
Tables = dict[str, dict[str, Any]]
Outcome = tuple[dict[str, Tensor], dict[str, float]]
RUN: Tables = {"loss": {"clip_high": 0.28, "dual_clip": 3.0}, "correction": {"kind": "tis", "high": 1.5}}
PAIRS: list[tuple[Tables, Tables]] = [  # of the first data source, and of the second
    (
        {"advantage": {"estimator": "rloo", "whiten": True}, "loss": {"kl_coef": 0.1, "entropy_coef": 0.02}},
        {"loss": {"kind": "cispo", "aggregation": "sequence_mean_token_mean"}, "correction": {"kind": "none"}},
    ),
    (
        {"advantage": {"estimator": "reinforce_plus_plus", "discount": 0.9}, "loss": {"log_ratio_coef": 0.01}},
        {
            "advantage": {"estimator": "opo"},
            "loss": {"kind": "gspo", "aggregation": "constant"},
            "correction": {"kind": "mis", "mode": "clip", "level": "geometric", "low": 0.01, "batch_normalize": True},
        },
    ),
    (
        {
            "loss": {"kind": "clip_cov", "cov_fraction": 0.5, "cov_low": -9.0, "cov_high": 9.0},
            "correction": {"reject": "token", "reject_low": 0.7},
        },
        {"advantage": {"divide_by_std": False}, "loss": {"entropy_coef": 0.1, "kl_coef": 0.2, "kl_estimator": "k2"}},
    ),
]
WEIGHTS = 2.0, 0.5


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen3_moe(tmp_path_factory.mktemp("moe"), vocab_size=VOCABULARY, num_experts=4)


def config(*tables: Tables | None, weights: tuple[float, ...] = WEIGHTS) -> Config:
    """The run, with an algorithm for each source that has one."""
    own = [None if one is None else {"weight": weight, **one} for one, weight in zip(tables, weights, strict=False)]
    sources = [{"kind": "jsonl", "path": "a", "task": f"t{n}"} for n in range(len(own))]
    listed = [source | ({} if one is None else {"algorithm": one}) for source, one in zip(sources, own, strict=True)]
    return groups_config(**RUN, data={"sources": listed})


def alone(tables: Tables) -> Config:
    """The run whose algorithm is that of a source."""
    changed = config(tables).algorithms[1]
    return groups_config().under(changed)


def sequences() -> list[Sequence]:
    """Groups that begin alike, with log-probabilities near the policy's."""
    made = random_sequences(COUNT, vocabulary=VOCABULARY)
    prompts = [tuple(range(2 + n, 42 + n)) for n in range(COUNT // GROUP_SIZE)]
    return [
        dataclasses.replace(
            one,
            token_ids=(prompt := prompts[one.index // GROUP_SIZE]) + one.token_ids,
            loss_mask=(False,) * len(prompt) + one.loss_mask,
            rollout_logprobs=(0.0,) * len(prompt) + tuple(x - 1.0 if x else x for x in one.rollout_logprobs),
        )
        for one in made
    ]


FIRST, SECOND, BOTH = slice(0, HALF), slice(HALF, COUNT), slice(0, COUNT)
Case = tuple[Config, slice, tuple[int, int], dict[str, int], dict[str, Any]]  # with places of the halves' algorithms


def _train_each(path: str, cases: list[Case]) -> list[Outcome]:
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        return [_trained(world, path, *case) for case in cases]


def _trained(
    world: World, path: str, cfg: Config, part: slice, places: tuple[int, int], layout: dict[str, int], plan: Any
) -> Outcome:
    meshes = build_meshes(world, ParallelConfig(**layout))
    chosen = [dataclasses.replace(one, algorithm=places[one.index >= HALF]) for one in sequences()[part]]
    chosen = [dataclasses.replace(one, index=number) for number, one in enumerate(chosen)]
    settings = {"prompts_per_step": len(chosen) // GROUP_SIZE, "ranks_per_share": meshes.ranks_per_share}
    plan = plan_for(len(chosen), world.num_ranks, **({"max_tokens_per_micro_batch": 160} | settings | plan))
    policy = load_policy(model_config(path), meshes.model, temperature=1.0)
    learner = Learner(
        policy,
        OptimConfig(name="sgd", lr=1.0, max_grad_norm=1e6),
        policy_objective(cfg, {}, longest_tokens=0),
        num_updates=1,
        dtype=torch.float32,
    )
    mine = dealt(chosen, world.rank, world.num_ranks, "like cards")
    batch = build_batch(mine, plan, meshes, **cfg.weighting)
    if cfg.has_reference:
        seen = [one.with_columns({"ref_logprobs": one.rollout_logprobs - 0.3}) for one in batch.micro_batches]
        batch = batch.with_micro_batches(seen)
    batch = add_logprobs(batch, {"policy": learner}, NO_FROZEN_MODELS, cfg, meshes)
    batch = correct(add_advantages(batch, cfg, {}, meshes), cfg, meshes)
    batch = select_by_covariance(batch, cfg.losses, meshes, seed=3)
    metrics = merge_over(meshes.training, update(learner, batch.mini_batches, meshes, step=1) | batch.metrics)
    return full_weights(policy, meshes), scalars(metrics)


def test_a_step_of_two_algorithms_is_the_sum_of_two_steps(path: str) -> None:
    cases: list[Case] = []
    for first, second in PAIRS:
        cases.append((config(first, second), BOTH, (1, 2), {}, {}))
        cases.append((config(first, second), BOTH, (1, 2), {}, {"max_tokens_per_micro_batch": 4096}))
        cases.append((config(first, second), BOTH, (1, 2), {}, {"shares_prefixes": True}))
        cases += [(alone(first), FIRST, (0, 0), {}, {}), (alone(second), SECOND, (0, 0), {}, {})]
    (found,) = run_ranks(1, _train_each, path, cases)
    layouts = [{}, {"cp": 2}, {"tp": 2}, *([{"ep": 2}] if HAS_EXPERT_PLANS else [])]
    again: list[Case] = [(config(*PAIRS[1]), BOTH, (1, 2), layout, {}) for layout in layouts]
    divided = run_ranks(2, _train_each, path, again)[0]
    start = initial(path)
    for number in range(len(PAIRS)):
        (both, metrics), *others, (one, its), (other, of_other) = found[5 * number : 5 * number + 5]
        parts = [*zip(WEIGHTS, (one, other), strict=True)]
        summed = {name: start[name] + sum(w * (x[name] - start[name]) for w, x in parts) for name in start}
        assert max(float((both[name] - start[name]).abs().max()) for name in start) > 1e-3
        assert_same_change(both, summed, start, 1e-5)
        for weights, _ in others:
            assert_same_change(both, weights, start, 1e-5)
        total = WEIGHTS[0] * its["update/loss"] + WEIGHTS[1] * of_other["update/loss"]
        assert metrics["update/loss"] == pytest.approx(total, rel=1e-4, abs=1e-6)
        for name, source in (("update/entropy_nats", its), ("update/clip_fraction", its)):
            assert metrics[f"{name}_t0"] == pytest.approx(source[name], rel=1e-4, abs=1e-6)
        assert not [name for name in metrics if name.endswith("_others")], "no source has the run's algorithm"
    name = "correction/effective_fraction"
    assert found[0][1][name] == pytest.approx(found[3][1][name], rel=1e-5), "the second source has no correction"
    (both, metrics) = found[5]
    for weights, numbers in divided:
        assert_same_change(both, weights, start, 1e-5)
        of_sources = [name for name in metrics if name.endswith(("_t0", "_t1"))]
        assert len(of_sources) >= 8
        for name in of_sources:
            assert numbers[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name


def test_one_algorithm_has_the_bits_of_the_run(path: str) -> None:
    cases: list[Case] = [(config(None, None), BOTH, (0, 0), {}, {}), (config({}, weights=(1.0,)), BOTH, (1, 1), {}, {})]
    ((run, numbers), (source, its)) = run_ranks(1, _train_each, path, cases)[0]
    assert all(torch.equal(run[name], source[name]) for name in run)
    assert numbers.items() <= its.items()
