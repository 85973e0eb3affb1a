"""What depends on the global batch does so on any number of ranks; a guard stops all before weights change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.algo.metrics import scalars, worst_tokens
from spmdrl.config import LossConfig, MismatchLimits, OptimConfig
from spmdrl.dist.collectives import merge_over
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.learn.learner import Learner, UpdateGuards
from spmdrl.learn.objective import PolicyObjective
from spmdrl.learn.update import update
from spmdrl.model.load import load_policy
from spmdrl.step.batch import build_batch
from spmdrl.step.correction import correct
from spmdrl.step.logprobs import add_logprobs
from spmdrl.types import TrainingDiverged
from tests.helpers.batches import completed
from tests.helpers.configs import model_config, plan_for
from tests.helpers.groups import groups_config
from tests.helpers.learners import NO_FROZEN_MODELS
from tests.helpers.models import save_qwen3
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences

SEQUENCES = 16
CASES: list[tuple[int, dict[str, Any]]] = [  # updates per step, correction
    (1, {"kind": "mis", "mode": "clip", "level": "geometric", "low": 0.01, "batch_normalize": True}),
    (2, {"kind": "tis", "reject": "token", "reject_low": 0.3, "veto_below": 0.02, "opsm_delta_nats": 1.0}),
]

Weights = dict[str, Tensor]


@pytest.fixture(scope="session")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen3(tmp_path_factory.mktemp("qwen3"))


def _steps(
    path: str, cases: list[tuple[int, dict[str, Any]]]
) -> list[tuple[Weights, dict[str, float], list[tuple[int, int]]]]:
    """After one step with each correction: the weights, the step's metrics, the worst tokens' places."""
    results = []
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        for num_updates, case in cases:
            plan = plan_for(SEQUENCES, world.num_ranks, updates_per_step=num_updates, num_updates=num_updates)
            policy = load_policy(model_config(path), meshes.model, temperature=1.0)
            optim = OptimConfig(name="sgd", lr=1.0, max_grad_norm=1e6)
            cfg = groups_config(correction=case)
            learner = Learner(
                policy,
                optim,
                PolicyObjective(LossConfig(), correction=cfg.correction),
                num_updates=num_updates,
                dtype=torch.float32,
                guards=UpdateGuards(mesh=meshes.training, stop=MismatchLimits(max_abs_nats=1e3), assert_on_policy=True),
            )
            mine = random_sequences(SEQUENCES)[world.rank :: world.num_ranks]
            batch = build_batch(mine, plan, meshes, aggregation="token_mean")
            batch = add_logprobs(completed(batch, meshes), {"policy": learner}, NO_FROZEN_MODELS, cfg, meshes)
            batch = correct(batch, cfg, meshes)
            updated = update(learner, batch.mini_batches, meshes, step=1)
            metrics = merge_over(meshes.training, updated)
            weights = {name: p.full_tensor().detach() for name, p in policy.model.named_parameters()}
            (worst,) = worst_tokens(metrics).values()
            results.append((weights, scalars(metrics), [(token.sequence_index, token.position) for token in worst]))
            del policy, learner
    return results


def test_a_correction_does_not_depend_on_the_number_of_ranks(qwen3: str) -> None:
    (alone,) = run_ranks(1, _steps, qwen3, [*CASES, (1, {}), (2, {})])
    together = run_ranks(2, _steps, qwen3, CASES)[0]
    corrected, plain = alone[:2], alone[2:]
    for (weights, metrics, worst), (theirs, their_metrics, their_worst), (without, *_) in zip(
        corrected, together, plain, strict=True
    ):
        for name in metrics:
            if name.startswith(("mismatch/", "correction/", "update/loss", "update/grad_norm")):
                assert their_metrics[name] == pytest.approx(metrics[name], rel=1e-4, abs=1e-6), name
        assert their_worst == worst and len(worst) == 10
        for name, weight in weights.items():
            torch.testing.assert_close(theirs[name], weight, rtol=1e-4, atol=1e-5)
        assert any((weights[name] - without[name]).abs().max() > 1e-3 for name in weights)
    assert 0 < alone[1][1]["correction/rejected_fraction"] < 1
    assert 0 < alone[1][1]["correction/off_policy_fraction"] < 1


def _stopped(path: str, case: dict[str, Any], stop: dict[str, float]) -> tuple[str, bool]:
    """Return the words of this rank's limits, and whether the weights are unchanged."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        cfg = groups_config(correction=case)
        plan = plan_for(SEQUENCES, world.num_ranks)
        policy = load_policy(model_config(path), meshes.model, temperature=1.0)
        before = [p.full_tensor().detach().clone() for p in policy.parameters()]
        learner = Learner(
            policy,
            OptimConfig(lr=0.1),
            PolicyObjective(LossConfig(), correction=cfg.correction),
            num_updates=1,
            dtype=torch.float32,
            guards=UpdateGuards(mesh=meshes.training, stop=MismatchLimits(**stop), assert_on_policy=True),
        )
        batch = build_batch(random_sequences(SEQUENCES)[world.rank :: 2], plan, meshes, aggregation="token_mean")
        batch = add_logprobs(completed(batch, meshes), {"policy": learner}, NO_FROZEN_MODELS, cfg, meshes)
        said = ""
        try:
            update(learner, batch.mini_batches, meshes, step=1)
        except TrainingDiverged as error:
            said = str(error)
        after = [p.full_tensor().detach() for p in policy.parameters()]
        return said, all(map(torch.equal, before, after))


@pytest.mark.parametrize(
    ("case", "stop", "sentence"),
    [
        ({}, {"mean_abs_nats": 0.1}, "step 1, update 1: mismatch/mean_abs_nats is"),
        ({"old": "rollout"}, {}, "the policy has not moved in this step, but max |ratio - 1| is"),
    ],
    ids=("limit", "on policy"),
)
def test_a_guard_stops_every_rank_before_weights_change(
    qwen3: str, case: dict[str, Any], stop: dict[str, float], sentence: str
) -> None:
    (said, unchanged), *others = run_ranks(2, _stopped, qwen3, case, stop)
    assert sentence in said and said.endswith("no weights were changed") and unchanged
    assert others == [(said, True)]
