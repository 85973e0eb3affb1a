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
from tests.helpers.parity import SEQUENCES, Trained, assert_same_change, dealt, initial, trained
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences

AGGREGATIONS = ("sequence_mean_token_mean", "sequence_mean_token_sum", "constant")
FEW = {"count": 1, "deal": "like cards"}  # of several ranks all but one have no sequence
# Changes to the usual step; each is trained on one rank and on two.
STEPS: dict[str, dict[str, Any]] = {
    "usual": {},
    "few": FEW,
    **{aggregation: {"loss": {"aggregation": aggregation}} for aggregation in AGGREGATIONS},
    "on the host": {"model": {"cpu_offload": True}},
    "like cards": {"deal": "like cards"},
    "two updates": {"plan": {"updates_per_step": 2, "rollouts_per_mini_batch": SEQUENCES // 2, "num_updates": 2}},
    "bfloat16": {"model": {"compute_dtype": "bfloat16"}},
    "float16": {"model": {"compute_dtype": "float16"}},
}
ALONE = ("usual", "few", *AGGREGATIONS)


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen3(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def start(qwen3: str) -> dict[str, Tensor]:
    """The weights before any update."""
    return initial(qwen3)


@pytest.fixture(scope="module")
def alone(qwen3: str, llama: str) -> dict[str, Trained]:
    """Each step of `ALONE` on one rank, and the usual one of a Llama."""
    return run_ranks(1, trained, {name: (qwen3, STEPS[name]) for name in ALONE} | {"llama": (llama, {})})[0]


@pytest.fixture(scope="module")
def together(qwen3: str, llama: str) -> dict[str, Trained]:
    """The same on two ranks, and the other steps."""
    return run_ranks(2, trained, {name: (qwen3, step) for name, step in STEPS.items()} | {"llama": (llama, {})})[0]


def require_same_step(llama: str, one: Trained, other: Trained) -> None:
    assert_same_change(one[0], other[0], initial(llama), 1e-5)
    for name in ("update/grad_norm", "update/loss"):
        assert other[1][name] == pytest.approx(one[1][name], rel=1e-5)


def test_gradients_do_not_depend_on_the_number_of_ranks(llama: str, alone, together) -> None:
    require_same_step(llama, alone["llama"], together["llama"])


@pytest.mark.slow
def test_four_ranks_have_the_gradients_of_one(llama: str, qwen3: str, start, alone) -> None:
    few = {"count": 3, "deal": "like cards"}
    four = run_ranks(4, trained, {"llama": (llama, {}), "few": (qwen3, few)})[0]
    require_same_step(llama, alone["llama"], four["llama"])
    one = run_ranks(1, trained, {"few": (qwen3, few)})[0]
    assert_same_change(one["few"][0], four["few"][0], start, 1e-5)


def test_gradients_do_not_depend_on_where_parameters_are(start, together) -> None:
    assert_same_change(together["usual"][0], together["on the host"][0], start, 1e-5)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_every_aggregation_has_a_global_denominator(start, alone, together, aggregation: str) -> None:
    assert_same_change(alone[aggregation][0], together[aggregation][0], start, 1e-5)


def test_it_does_not_matter_which_rank_sampled_what(together) -> None:
    for name, weight in together["usual"][0].items():
        assert torch.equal(weight, together["like cards"][0][name]), name


def test_a_rank_without_sequences_takes_part(start, alone, together) -> None:
    assert_same_change(alone["few"][0], together["few"][0], start, 1e-5)


def test_the_first_update_is_exactly_on_policy(together) -> None:
    _, metrics = together["usual"]
    assert metrics["update/ratio"] == 1.0
    assert metrics["update/ratio_max_deviation"] == 0.0
    assert metrics["update/clip_fraction"] == 0.0
    assert metrics["update/k3_ref_nats"] == 0.0


def test_later_updates_of_a_step_are_not(together) -> None:
    _, metrics = together["two updates"]
    assert metrics["update/ratio_max_deviation"] > 0.01
    assert metrics["update/k3_ref_nats"] > 1e-4


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_full_precision(start, together, dtype: str) -> None:
    assert_same_change(together["usual"][0], together[dtype][0], start, 0.1)


def _overflowing(path: str) -> Any:
    """float16 with a loss scale that overflows, then one that does not."""
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        policy = load_policy(model_config(path, compute_dtype="float16"), meshes.model, temperature=1.0)
        mine = dealt(random_sequences(8), world.rank, world.num_ranks, "in blocks")
        batch = completed(build_batch(mine, plan_for(8, world.num_ranks), meshes, aggregation="token_mean"), meshes)
        learner = Learner(
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


@pytest.mark.slow
def test_float16_overflow_lowers_the_scale_and_leaves_the_weights_alone(qwen3: str) -> None:
    (history, scale), (other_history, other_scale) = run_ranks(2, _overflowing, qwen3)
    assert history == other_history and scale == other_scale
    *overflows, last = history
    assert overflows and all(overflow == (1.0, True) for overflow in overflows)
    assert last == (0.0, False)
    assert scale == 2.0 ** (40 - len(overflows))
