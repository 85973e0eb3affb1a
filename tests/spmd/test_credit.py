"""A step of episodes: the same on any ranks and however it is packed, with denominators that count rollouts."""

from __future__ import annotations

import itertools
import statistics
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.algo.losses import AGGREGATIONS
from spmdrl.algo.metrics import scalars
from spmdrl.algo.seeds import mix, uniform
from spmdrl.config import Config, OptimConfig
from spmdrl.dist.collectives import gather_objects, merge_over
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import PolicyObjective
from spmdrl.learn.update import update
from spmdrl.model.load import load_policy
from spmdrl.step.advantages import add_advantages
from spmdrl.step.batch import build_batch, to_sequences
from spmdrl.step.correction import correct
from spmdrl.types import MicroBatch, Place, Sequence
from tests.helpers import oracle
from tests.helpers.configs import model_config, plan_for
from tests.helpers.episodes import FAILED, MASKED, random_episodes
from tests.helpers.groups import groups_config
from tests.helpers.models import save_llama
from tests.helpers.ranks import run_ranks

GROUPS, GROUP_SIZE, WEIGHT, COEF = 4, 4, 0.5, 0.2
COUNT = GROUPS * GROUP_SIZE
ENVIRONMENT = {"environment": {"source": {"kind": "class", "name": "a.py:A"}}}
CREDITS: list[dict[str, Any]] = [
    {"advantage": {"estimator": "grpo"}},
    {"advantage": {"estimator": "opo"}, "reward": {"kl_coef": 0.3}},
    {"advantage": {"estimator": "reinforce_plus_plus"}, "reward": {"kl_coef": 0.3}},
    {"advantage": {"estimator": "gae", "whiten": False}},
    {"advantage": {"estimator": "gigpo"}},
    {"advantage": {"estimator": "gigpo", "whiten": True}, "reward": {"kl_coef": 0.3}},
    {"advantage": {"estimator": "grpo_by_role"}},
    {"advantage": {"estimator": "hierarchical_grpo"}},
]
CORRECTION = {"correction": {"kind": "tis", "reject": "token", "batch_normalize": True}}
# Number of ranks, and how they pack.
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (1, {"max_tokens_per_micro_batch": None, "sequences_per_micro_batch": 1}),
    (2, {"max_tokens_per_micro_batch": 64}),
]
Columns = dict[Place, list[float]]  # of each sequence, at its loss tokens


def sampled(place: Place, length: int, purpose: int) -> Tensor:
    """Numbers [length] that belong to a sequence and its tokens, wherever those are."""
    return -3 * uniform(torch.full((length,), mix(*place, purpose)), torch.arange(length))


def with_logprobs(m: MicroBatch) -> MicroBatch:
    names = ("old_logprobs", "ref_logprobs", "values")
    columns = [
        torch.cat([sampled(place, n, purpose) for place, n in zip(m.places, m.seqlens, strict=True)])
        for purpose in range(len(names))
    ]
    return m.with_columns(dict(zip(names, columns, strict=True)))


def everywhere(columns: list[tuple[Tensor | None, MicroBatch]], meshes: Meshes) -> Columns:
    mine = {}
    for column, m in columns:
        assert column is not None
        parts = zip(m.places, column.split(m.seqlens), m.loss_mask.split(m.seqlens), strict=True)
        mine.update({place: values[mask].tolist() for place, values, mask in parts if place[0] >= 0})
    return {place: values for part in gather_objects(meshes.training, mine) for place, values in part.items()}


def config(case: dict[str, Any]) -> Config:
    return groups_config(**(ENVIRONMENT | case))


def _found(packing: dict[str, Any], path: str) -> dict[str, Any]:
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        plan = plan_for(
            COUNT,
            world.num_ranks,
            prompts_per_step=GROUPS,
            updates_per_step=2,
            rollouts_per_mini_batch=COUNT // 2,
            num_updates=2,
            **packing,
        )
        mine = random_episodes(GROUPS, GROUP_SIZE, weight=WEIGHT)[world.rank :: world.num_ranks]
        sequences = to_sequences(mine, meshes.training, turn_weight=WEIGHT)
        found: dict[str, Any] = {"weights": [], "corrected": [], "credits": [], "means": [], "metrics": []}
        for aggregation in AGGREGATIONS:
            batch = build_batch(sequences, plan, meshes, aggregation=aggregation)
            found["weights"].append(everywhere([(m.loss_weights, m) for m in batch.micro_batches], meshes))
            batch = batch.with_micro_batches(map(with_logprobs, batch.micro_batches))
            corrected = correct(batch, config(CORRECTION | {"loss": {"aggregation": aggregation}}), meshes)
            found["corrected"].append(everywhere([(m.loss_weights, m) for m in corrected.micro_batches], meshes))
        for case in CREDITS:
            credited = add_advantages(batch, config(case), {}, meshes)
            found["credits"].append(everywhere([(m.advantages, m) for m in credited.micro_batches], meshes))
            found["means"].append(credited.advantages)
            metrics = scalars(merge_over(meshes.training, credited.metrics))
            found["metrics"].append({name: x for name, x in metrics.items() if not name.startswith("batch/")})
        found["updated"] = [_updated(path, sequences, meshes, plan, coef) for coef in (0.0, COEF)]
        return found


def _updated(path: str, sequences: list[Sequence], meshes: Meshes, plan: Any, coef: float) -> tuple[Tensor, float]:
    """The weights after a step of SGD with rate 1, and the cross entropy of what environments said."""
    policy = load_policy(model_config(path), meshes.model, temperature=1.0)
    cfg = config({"loss": {"aggregation": "sequence_mean_token_mean"}})
    optim = OptimConfig(name="sgd", lr=1.0, max_grad_norm=1e6)
    learner = Learner(policy, optim, PolicyObjective(cfg.loss), num_updates=2, dtype=torch.float32)
    batch = build_batch(sequences, plan, meshes, aggregation=cfg.loss.aggregation, environment_coef=coef)
    batch = add_advantages(batch, cfg, {}, meshes)
    metrics = scalars(merge_over(meshes.training, update(learner, batch.mini_batches, meshes, step=1)))
    weights = torch.cat([p.full_tensor().detach().flatten() for p in policy.parameters()])  # type: ignore[attr-defined]
    return weights, metrics.get("loss/environment_nats", 0.0)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By layout; every rank is told everything, so one speaks for all."""
    path = save_llama(tmp_path_factory.mktemp("models") / "llama")
    return [run_ranks(num_ranks, _found, packing, path)[0] for num_ranks, packing in LAYOUTS]


def numbers_of_loss_tokens() -> dict[Place, int]:
    return {
        (one.index, part): 0 if one.index == MASKED else sum(trajectory.trained)
        for one in random_episodes(GROUPS, GROUP_SIZE, weight=WEIGHT)
        for part, trajectory in enumerate(one.rollout.trajectories)
    }


def assert_same(one: Columns, other: Columns) -> None:
    assert one.keys() == other.keys()
    for place, values in one.items():
        assert other[place] == pytest.approx(values, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("number", range(len(AGGREGATIONS)), ids=list(AGGREGATIONS))
def test_weights_count_rollouts_however_many_sequences_they_have(found: Any, number: int) -> None:
    counts = numbers_of_loss_tokens()
    of_rollout = {
        index: sum(counts[place] for place in places)
        for index, places in itertools.groupby(sorted(counts), key=lambda place: place[0])
    }
    for one in found:
        assert_same(one["corrected"][number], found[0]["corrected"][number])
        weights = one["weights"][number]
        assert {place: len(values) for place, values in weights.items()} == counts
        for half in (range(COUNT // 2), range(COUNT // 2, COUNT)):
            tokens = sum(of_rollout[i] for i in half)
            rollouts = sum(of_rollout[i] > 0 for i in half)
            for place, values in weights.items():
                if place[0] in half and values:
                    expected = [1 / tokens, 1 / (of_rollout[place[0]] * rollouts), 1 / rollouts, 1 / (rollouts * 32)]
                    assert values == pytest.approx([expected[number]] * len(values))
    assert found[0]["corrected"][number] != found[0]["weights"][number]


@pytest.mark.parametrize("number", range(len(CREDITS)), ids=[str(case) for case in CREDITS])
def test_advantages_do_not_depend_on_the_cut(found: Any, number: int) -> None:
    for one in found:
        assert_same(one["credits"][number], found[0]["credits"][number])
        assert one["metrics"][number] == pytest.approx(found[0]["metrics"][number], abs=1e-6)
        for index, mean in one["means"][number].items():
            values = [v for place, of_part in one["credits"][number].items() if place[0] == index for v in of_part]
            if values or number > 1:  # a rollout that is not trained on has an advantage all the same
                assert mean == pytest.approx(statistics.fmean(values or [0.0]), abs=1e-5)
        assert {"advantage/turn_0_mean", "advantage/turn_3_mean"} <= one["metrics"][number].keys()


def test_a_group_compares_rollouts_and_gigpo_their_turns_too(found: Any) -> None:
    episodes = random_episodes(GROUPS, GROUP_SIZE, weight=WEIGHT)
    expected: Columns = {}
    compared: Columns = {}
    for first in range(0, COUNT, GROUP_SIZE):
        group = episodes[first : first + GROUP_SIZE]
        rewards = [one.outcome.reward for one in group]
        turns = []
        for one in group:
            read, of_rollout = ["start"], []
            for turn in one.rollout.turns:
                if turn.observation is not None:
                    given = 0.0 if one.index == FAILED else WEIGHT * turn.observation.reward
                    of_rollout.append((read[-1], given))
                    read.append(str(turn.observation.state))
            turns.append(of_rollout)
        slow = oracle.gigpo(rewards, turns, **config(CREDITS[4]).advantage.settings)
        whole = oracle.group_advantages(rewards, "grpo", lengths=[], divide_by_std=True)
        for one, of_turns, advantage in zip(group, slow, whole, strict=True):
            values = iter(of_turns)
            for part, trajectory in enumerate(one.rollout.trajectories):
                lengths = [len(turn.response.token_ids) for turn in trajectory.turns]
                laid_out = [a for n in lengths if n for a in [next(values)] * n]
                place = (one.index, part)
                expected[place] = [] if one.index == MASKED else laid_out
                compared[place] = [] if one.index == MASKED else [advantage] * sum(lengths)
    for one in found:
        assert_same(compared, one["credits"][0])
        assert_same(expected, one["credits"][4])


def test_whitened_turns_weigh_their_tokens(found: Any) -> None:
    for one in found:
        values = [value for of_part in one["credits"][5].values() for value in of_part]
        assert statistics.fmean(values) == pytest.approx(0.0, abs=1e-5)
        assert statistics.pstdev(values) == pytest.approx(1.0, rel=1e-3)


def test_updates_do_not_depend_on_the_cut(found: Any) -> None:
    (plain, none), (echo, nats) = found[0]["updated"]
    (their_plain, _), (their_echo, their_nats) = found[1]["updated"]
    torch.testing.assert_close(their_plain, plain, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(their_echo, echo, rtol=1e-4, atol=1e-5)
    assert none == 0.0 and their_nats == pytest.approx(nats, rel=1e-4) and nats > 1.0
    assert (plain - echo).abs().max() > 1e-3
