"""The same batch gives the same gradients, whatever the aggregation, ranks and dtype (layouts: test_matrix.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.config import OptimConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import PolicyObjective
from spmdrl.learn.update import update
from spmdrl.model.load import load_policy
from spmdrl.step.batch import build_batch
from tests.helpers.batches import completed
from tests.helpers.configs import loss_config, model_config, plan_for
from tests.helpers.models import save_llama, save_qwen3
from tests.helpers.parity import SEQUENCES, assert_same_change, dealt, initial, trained
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def start(qwen3: str) -> dict[str, Tensor]:
    """The weights before any update."""
    return initial(qwen3)


@pytest.fixture(scope="session")
def usual(qwen3: str) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights and metrics after one update on 2 ranks, with all the defaults of `trained`."""
    return run_ranks(2, trained, qwen3, {})[0]


def test_gradients_do_not_depend_on_the_number_of_ranks(llama: str) -> None:
    start = initial(llama)
    (one, metrics), *_ = run_ranks(1, trained, llama, {})
    for num_ranks in (2, 4):
        results = run_ranks(num_ranks, trained, llama, {})
        assert_same_change(one, results[0][0], start, 1e-5)
        assert results[0][1]["update/grad_norm"] == pytest.approx(metrics["update/grad_norm"], rel=1e-5)
        assert results[0][1]["update/loss"] == pytest.approx(metrics["update/loss"], rel=1e-5)


def test_gradients_do_not_depend_on_where_parameters_are(qwen3: str, start, usual) -> None:
    (other, _), _ = run_ranks(2, trained, qwen3, {"model": {"cpu_offload": True}})
    assert_same_change(usual[0], other, start, 1e-5)


@pytest.mark.parametrize("aggregation", ["sequence_mean_token_mean", "sequence_mean_token_sum", "constant"])
def test_every_aggregation_has_a_global_denominator(qwen3: str, start, aggregation: str) -> None:
    options = {"loss": {"aggregation": aggregation}}
    ((one, _),) = run_ranks(1, trained, qwen3, options)
    (two, _), _ = run_ranks(2, trained, qwen3, options)
    assert_same_change(one, two, start, 1e-5)


def test_it_does_not_matter_which_rank_sampled_what(qwen3: str, usual) -> None:
    (cards, _), _ = run_ranks(2, trained, qwen3, {"deal": "like cards"})
    for name, weight in usual[0].items():
        assert torch.equal(weight, cards[name]), name


def test_a_rank_without_sequences_takes_part(qwen3: str, start) -> None:
    options = {"count": 3, "deal": "like cards"}
    ((one, _),) = run_ranks(1, trained, qwen3, options)
    (four, _), *_ = run_ranks(4, trained, qwen3, options)
    assert_same_change(one, four, start, 1e-5)


def test_the_first_update_is_exactly_on_policy(usual) -> None:
    _, metrics = usual
    assert metrics["update/ratio"] == 1.0
    assert metrics["update/ratio_max_deviation"] == 0.0
    assert metrics["update/clip_fraction"] == 0.0
    assert metrics["update/k3_ref_nats"] == 0.0


def test_later_updates_of_a_step_are_not(qwen3: str) -> None:
    options = {"plan": {"updates_per_step": 2, "rollouts_per_mini_batch": SEQUENCES // 2, "num_updates": 2}}
    (_, metrics), _ = run_ranks(2, trained, qwen3, options)
    assert metrics["update/ratio_max_deviation"] > 0.01
    assert metrics["update/k3_ref_nats"] > 1e-4


def test_half_precision_stays_near_full_precision(qwen3: str, start, usual) -> None:
    for dtype in ("bfloat16", "float16"):
        (half, _), _ = run_ranks(2, trained, qwen3, {"model": {"compute_dtype": dtype}})
        assert_same_change(usual[0], half, start, 0.1)


def _overflowing(path: str) -> Any:
    """float16 with a loss scale that overflows, then one that does not."""
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        policy = load_policy(model_config(path, compute_dtype="float16"), meshes.model, temperature=1.0)
        mine = dealt(random_sequences(8), world.rank, world.num_ranks, "in blocks")
        batch = completed(build_batch(mine, plan_for(8, world.num_ranks), meshes, aggregation="token_mean"), meshes)
        learner = Learner.start(
            policy, OptimConfig(name="sgd", lr=1.0), PolicyObjective(loss_config()), num_updates=40, dtype=torch.float16
        )
        learner.loss_scale.scale = 2.0**40
        before = [p.to_local().clone() for p in policy.parameters()]
        history = []
        for step in range(1, 41):
            metrics = update(learner, batch.mini_batches, meshes, step=step)
            unchanged = all(torch.equal(a, p.to_local()) for a, p in zip(before, policy.parameters(), strict=True))
            history.append((metrics["update/overflow_fraction"].value(), unchanged))
            if not unchanged:
                break
        del policy
        return history, learner.loss_scale.scale


def test_float16_overflow_lowers_the_scale_and_leaves_the_weights_alone(qwen3: str) -> None:
    (history, scale), (other_history, other_scale) = run_ranks(2, _overflowing, qwen3)
    assert history == other_history and scale == other_scale
    *overflows, last = history
    assert overflows and all(overflow == (1.0, True) for overflow in overflows)
    assert last == (0.0, False)
    assert scale == 2.0 ** (40 - len(overflows))
