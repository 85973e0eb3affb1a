"""SGLang on ranks of its own, sent its weights by broadcast: the same greedy samples and the same weights as beside the
trainer."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

import spmdrl.rollout.sampler
from spmdrl.config import Config
from spmdrl.config.plan import make_plan
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.engine.remote import RemoteEngine
from spmdrl.engine.start import Restarts, start_engine
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import PolicyObjective
from spmdrl.learn.update import update
from spmdrl.model.load import load_policy
from spmdrl.refit.refit import Refit
from spmdrl.rewards.client import Pending
from spmdrl.rollout.sampling import Sampling, training_sampling
from spmdrl.rollout.serve import serve
from spmdrl.rollout.start import start_sampler
from spmdrl.step.batch import build_batch, to_sequences
from spmdrl.step.rewards import shape_rewards
from spmdrl.types import Prompt, RewardOutcome, Rollout
from tests.helpers.batches import completed
from tests.helpers.engine_ranks import run_engine_ranks
from tests.helpers.launches import launch_of
from tests.helpers.models import save_qwen3, save_qwen3_next
from tests.helpers.sglang_delta_net import ARGUMENTS
from tests.helpers.sglang_engine import prompts, settings

NUM_STEPS = 3


class Stream:
    """Prompts without end."""

    dropped: ClassVar[dict[str, int]] = {}

    def take(self, first: int, count: int) -> list[Prompt]:
        return [
            Prompt(prompt_id=i, token_ids=prompts(i + 1)[i], text="", answer=None, task="t", metadata={})
            for i in range(first, first + count)
        ]


class FixedRewards:
    """Greedy responses to one prompt are all alike; their rewards are not."""

    def submit(self, rollout: Rollout) -> Pending:
        reward: Future[RewardOutcome] = Future()
        reward.set_result(RewardOutcome(reward=float(rollout.sample_index), parts={}))
        return rollout, reward

    def collect(self, pending: Iterable[Pending]) -> list[tuple[Rollout, RewardOutcome]]:
        return [(rollout, reward.result()) for rollout, reward in pending]


def greedy(cfg: Config, stop_token_ids: frozenset[int]) -> Sampling:
    return dataclasses.replace(training_sampling(cfg, stop_token_ids), temperature=0.0)


def config(path: str, **rollout: Any) -> Config:
    values = settings(path, 1, prompts_per_step=4, max_response_tokens=16).model_dump()
    # Advantages of equal responses cancel out: entropy is what moves the weights.
    changes = {"run": {"num_steps": NUM_STEPS}, "rollout": rollout, "loss": {"entropy_coef": 1.0}}
    changes["refit"] = {"probe_prompts": 2}  # although nothing is stale
    values |= {section: values[section] | change for section, change in changes.items()}
    return Config.model_validate(values | {"offload": {}})


def trained(path: str, rollout: dict[str, Any]) -> dict[str, Any]:
    """A run of a few steps from its pieces, all of its refits compared by digest."""
    cfg = config(path, **rollout)
    spmdrl.rollout.sampler.training_sampling = greedy  # in this rank's process alone
    rewards: Any = FixedRewards()
    stream: Any = Stream()
    found: dict[str, Any] = {"samples": [], "norms": []}
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        plan = make_plan(cfg, num_ranks=world.num_ranks)
        meshes = build_meshes(world, ranks_per_engine=cfg.rollout.tp_size, engine_ranks=plan.engine_ranks)
        run = launch_of(cfg, plan, world, meshes, Path(path), prompts=stream, rewards=rewards)
        with run.exits:
            if not meshes.trains:
                serve(run)
                return found
            engine = run.enter(closing(start_engine(run)))
            policy = load_policy(cfg.model, meshes.model, temperature=1.0)
            learner = Learner(
                policy, cfg.optim, PolicyObjective(cfg.loss), num_updates=plan.num_updates, dtype=torch.float32
            )
            refit = Refit(policy, engine, meshes, cfg.refit, dtype=torch.float32)
            sampler = start_sampler(run, engine, Restarts(meshes.training, None, message=print))
            assert isinstance(engine, RemoteEngine) == (world.num_ranks > 1)
            refit(version=0)
            for step in range(1, NUM_STEPS + 1):
                engine.wake()
                collected = sampler.collect(step)
                engine.sleep()
                rewarded = shape_rewards(rewards.collect(collected.pending), collected.index_of, cfg)
                found["samples"] += [
                    (one.rollout.prompt.prompt_id, one.rollout.responses[0].token_ids, one.rollout.responses[0].spans)
                    for one in rewarded
                ]
                sequences = to_sequences(rewarded, meshes.training)
                batch = build_batch(sequences, plan, meshes, aggregation=cfg.loss.aggregation)
                mini_batches = completed(batch, meshes, policy).mini_batches
                update(learner, mini_batches, meshes, step=step)
                refit(version=step)
            sampler.dismiss()
            found["weights"] = {
                name: parameter.full_tensor().detach().clone() for name, parameter in policy.model.named_parameters()
            }
            found["probes"] = [probe.responses[0].spans[0].version for probe in collected.probes]
        del policy, learner, refit
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_qwen3(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def colocated(path: str) -> dict[str, Any]:
    (found,) = run_engine_ranks(1, trained, path, {})
    return found


@pytest.mark.parametrize(
    "tp_size",
    [pytest.param(1, id="two-engines"), pytest.param(2, id="one-engine-of-two-devices", marks=pytest.mark.slow)],
)
def test_greedy_samples_and_weights_are_those_of_a_colocated_run(
    path: str, colocated: dict[str, Any], tp_size: int
) -> None:
    apart = {"placement": "disaggregated", "num_ranks": 2, "max_staleness": 0, "tp_size": tp_size}
    found, *_ = run_engine_ranks(3, trained, path, apart)
    assert len({tokens for _, tokens, _ in found["samples"]}) > NUM_STEPS
    assert found["samples"] == colocated["samples"]
    assert {span.version for _, _, spans in found["samples"] for span in spans} == set(range(NUM_STEPS))
    assert found["weights"].keys() == colocated["weights"].keys()
    for name, weight in colocated["weights"].items():
        assert torch.equal(weight, found["weights"][name]), name
    assert set(found["probes"]) == {NUM_STEPS - 1}


@pytest.mark.slow
def test_hybrids_hold_the_trainers_weights_by_sglangs_own_checksums(tmp_path: Path) -> None:
    apart = {"placement": "disaggregated", "num_ranks": 1, "max_staleness": 0, "sglang": ARGUMENTS}
    found, *_ = run_engine_ranks(2, trained, save_qwen3_next(tmp_path), apart)
    assert {span.version for _, _, spans in found["samples"] for span in spans} == set(range(NUM_STEPS))
