"""A step that found fewer prompt groups than planned is still cut into whole groups, the same on every rank."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from spmdrl.algo.metrics import scalars
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.learn.update import update
from spmdrl.report.report import with_speed
from spmdrl.step.advantages import add_advantages
from spmdrl.step.batch import build_batch
from spmdrl.step.correction import correct, select_by_covariance
from spmdrl.step.logprobs import add_logprobs
from tests.helpers.configs import plan_for
from tests.helpers.groups import groups_config
from tests.helpers.learners import NO_FROZEN_MODELS
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences

GROUP_SIZE, PLANNED_GROUPS, UPDATES = 3, 8, 4


def _cuts(numbers_of_groups: list[int]) -> list[tuple[list[list[int]], dict[str, float]]]:
    """For each number of groups: this rank's sequences of each mini-batch, and the batch's metrics."""
    plan = {"prompts_per_step": PLANNED_GROUPS, "updates_per_step": UPDATES, "max_tokens_per_micro_batch": 64}
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        cuts = []
        for num_groups in numbers_of_groups:
            # Engines took groups by chance: the last rank has most of them.
            sequences = random_sequences(num_groups * GROUP_SIZE)
            mine = [s for s in sequences if min(s.index // GROUP_SIZE, world.num_ranks - 1) == world.rank]
            the_plan = plan_for(PLANNED_GROUPS * GROUP_SIZE, world.num_ranks, **plan)
            batch = build_batch(mine, the_plan, meshes, aggregation="token_mean")
            cut = [
                sorted(i for micro_batch in mini_batch for i in micro_batch.sequence_index if i >= 0)
                for mini_batch in batch.mini_batches
            ]
            cuts.append((cut, scalars(batch.metrics)))
            if not num_groups:
                idle: Any = SimpleNamespace(frozen_steps=0, limits=None, followers={})
                cfg = groups_config(loss={"kind": "kl_cov", "updates_per_step": 2}, correction={"reject": "token"})
                batch = add_logprobs(batch, {"policy": idle}, NO_FROZEN_MODELS, cfg, meshes)
                batch = correct(add_advantages(batch, cfg, {}, meshes), cfg, meshes)
                batch = select_by_covariance(batch, cfg.losses, meshes, seed=0)
                assert update(idle, batch.mini_batches, meshes, step=2) == {}
        return cuts


def test_fewer_groups_than_planned_are_cut_evenly() -> None:
    expected = {8: [2, 2, 2, 2], 7: [1, 2, 2, 2], 5: [1, 1, 1, 2], 2: [0, 1, 0, 1], 0: [0, 0, 0, 0]}
    alone, *_ = run_ranks(1, _cuts, list(expected))
    ranks = run_ranks(2, _cuts, list(expected))
    for place, (num_groups, groups_in_each) in enumerate(expected.items()):
        cut, metrics = alone[place]
        assert [len(indices) for indices in cut] == [GROUP_SIZE * count for count in groups_in_each]
        assert [i for indices in cut for i in indices] == list(range(num_groups * GROUP_SIZE))
        shared = [sorted(one + other) for one, other in zip(*(rank[place][0] for rank in ranks), strict=True)]
        assert shared == cut
        assert metrics["batch/loss_tokens"] == pytest.approx(sum(rank[place][1]["batch/loss_tokens"] for rank in ranks))


def test_a_step_without_any_group_has_a_speed() -> None:
    assert with_speed({"time/step_s": 2.0, "batch/loss_tokens": 0.0})["speed/loss_tokens_per_s"] == 0.0
