"""PPO with a critic: the same on one rank and on any layout of two; sleeping, stopped and resumed, the same bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from spmdrl import checkpoint
from spmdrl.algo.metrics import merge_all, scalars
from spmdrl.config import Config, ParallelConfig
from spmdrl.dist.collectives import merge_over
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.learn.learner import start_learners
from spmdrl.learn.update import update
from spmdrl.model.load import load_policy
from spmdrl.model.offload import TrainerMemory
from spmdrl.step.advantages import add_advantages
from spmdrl.step.batch import build_batch
from spmdrl.step.logprobs import add_logprobs
from spmdrl.types import UserError
from tests.helpers.checkpoints import save_and_wait
from tests.helpers.configs import model_config, plan_for
from tests.helpers.groups import COUNT, GROUP_SIZE, everywhere, groups_config
from tests.helpers.learners import NO_FROZEN_MODELS
from tests.helpers.models import save_llama, save_qwen3
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences

STEPS = 3
SGD = {"name": "sgd", "momentum": 0.5, "lr": 0.05}
ADAMW = {"lr": 1e-3}
LAYOUTS: list[tuple[int, dict[str, int]]] = [(1, {}), (2, {}), (2, {"cp": 2}), (2, {"tp": 2}), (2, {"dp_replicate": 2})]


def ppo(policy: str, critic: str, optim: dict[str, Any]) -> Config:
    cfg = groups_config(
        run={"num_steps": STEPS},
        advantage={"estimator": "gae", "gae_lambda": 0.9},
        loss={"updates_per_step": 2},
        critic={"path": critic, "lr": 2 * optim["lr"], "clip_value": 0.01, "gae_lambda": 1.0, "warmup_steps": 1},
    )
    changes = {"model": model_config(policy), "optim": cfg.optim.model_validate(optim)}
    return Config.model_validate({name: getattr(cfg, name) for name in Config.model_fields} | changes)


def _trained(cfg: Config, layouts: list[dict[str, int]]) -> list[Any]:
    """Of each layout: the metrics of every step, and values and returns by sequence in the last."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        found = []
        for layout in layouts:
            meshes = build_meshes(world, ParallelConfig(**layout))
            plan = _plan(world.num_ranks, meshes.ranks_per_share)
            mine = random_sequences(COUNT)[world.rank :: world.num_ranks]
            batch = build_batch(mine, plan, meshes, aggregation="token_mean")
            batch = dataclasses.replace(batch, metrics={})  # those of packing depend on the layout
            policy = load_policy(cfg.model, meshes.model, temperature=1.0)
            learners = start_learners(policy, cfg, plan, meshes, dtype=torch.float32)
            history = []
            for step in range(1, STEPS + 1):
                prepared = add_logprobs(batch, learners, NO_FROZEN_MODELS, cfg, meshes)
                prepared = add_advantages(prepared, cfg, {}, meshes)
                updated = [update(learners[x], prepared.mini_batches, meshes, step=step) for x in learners]
                history.append(scalars(merge_over(meshes.training, merge_all([prepared.metrics, *updated]))))
            columns = [
                everywhere([(getattr(m, name), m) for m in prepared.micro_batches], meshes)
                for name in ("values", "returns")
            ]
            found.append((history, columns))
            del policy, learners
        return found


def _plan(num_ranks: int, ranks_per_share: int) -> Any:
    return plan_for(
        COUNT,
        num_ranks,
        prompts_per_step=COUNT // GROUP_SIZE,
        num_steps=STEPS,
        updates_per_step=2,
        num_updates=2 * STEPS,
        rollouts_per_mini_batch=COUNT // 2,
        ranks_per_share=ranks_per_share,
    )


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A policy whose head is its embedding, and a critic of another architecture whose head is not."""
    folder = tmp_path_factory.mktemp("models")
    return (
        save_qwen3(folder / "qwen3", vocab_size=98, num_hidden_layers=2),
        save_llama(folder / "llama", vocab_size=98, num_hidden_layers=1, seed=1),
    )


def test_every_layout_trains_policy_and_critic_as_one_rank_does(paths: tuple[str, str]) -> None:
    cfg = ppo(*paths, SGD)
    found = [
        one
        for num_ranks in (1, 2)
        for one in run_ranks(num_ranks, _trained, cfg, [x for n, x in LAYOUTS if n == num_ranks])[0]
    ]
    (history, (values, returns)), *others = found
    first, *_, last = history
    assert first["critic/value_mean"] == first["critic/explained_variance"] == 0.0, "its head is 0 at first"
    assert "update/loss" not in first and "update/loss" in last, "the policy waits for the critic"
    assert last["critic/explained_variance"] > 0.01 and 0 < last["critic/clip_fraction"] < 1
    for sequence in random_sequences(COUNT):  # with a gae_lambda of 1, whatever the critic expects
        of = returns[sequence.index]
        assert of == pytest.approx([sequence.reward] * len(of), abs=1e-6)
    for other_history, columns in others:
        for one, other in zip(history, other_history, strict=True):
            assert one.keys() == other.keys()
            for name in one:
                assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name
        for mine, theirs in zip((values, returns), columns, strict=True):
            assert mine.keys() == theirs.keys() and all(
                theirs[index] == pytest.approx(of, rel=1e-4, abs=1e-5) for index, of in mine.items()
            )


def _resumed(cfg: Config, folder: str, first: int, last: int, moves: Any) -> Any:
    """Every weight after step `last`, begun from the checkpoint before step `first`; asleep and saved after every step.

    And how much was asleep at the end, after which steps all optimizers had a state, and what a run without a critic
    is told.
    """
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        plan = _plan(world.num_ranks, meshes.ranks_per_share)
        batch = build_batch(
            random_sequences(COUNT)[world.rank :: world.num_ranks], plan, meshes, aggregation="constant"
        )
        policy = load_policy(cfg.model, meshes.model, temperature=1.0)
        learners = start_learners(policy, cfg, plan, meshes, dtype=torch.float32)
        checkpoint.restore(Path(folder), learners, meshes.training, step=first - 1)
        trainer = TrainerMemory(list(learners.values()), world.device, moves=moves)
        have_state = []
        weights = sum(p.to_local().untyped_storage().nbytes() for x in learners.values() for p in x.model.parameters())
        for step in range(first, last + 1):
            prepared = add_logprobs(batch, learners, NO_FROZEN_MODELS, cfg, meshes)
            prepared = add_advantages(prepared, cfg, {}, meshes)
            for name in learners:
                update(learners[name], prepared.mini_batches, meshes, step=step)
            trainer.sleep()
            asleep = trainer.asleep_bytes
            trainer.wake()
            save_and_wait(folder, learners, meshes, step=step)
            have_state.append(trainer.has_optimizer_state)
        state = {
            f"{name}.{key}": p.full_tensor().detach()  # type: ignore[attr-defined]
            for name, learner in learners.items()
            for key, p in learner.model.named_parameters()
        }
        refusal = ""
        try:
            checkpoint.restore(Path(folder), {"policy": learners["policy"]}, meshes.training, step=last)
        except UserError as error:
            refusal = str(error)
        del policy, learners, trainer
        return state, asleep / weights, have_state, refusal


@pytest.mark.slow
def test_asleep_and_resumed_is_bitwise_awake_and_never_stopped(paths: tuple[str, str], tmp_path: Path) -> None:
    cfg = ppo(*paths, ADAMW)
    whole, nothing, have_state, refusal = run_ranks(2, _resumed, cfg, str(tmp_path / "whole"), 1, STEPS, "none")[0]
    run_ranks(2, _resumed, cfg, str(tmp_path / "parts"), 1, 1, "all")  # the policy has not taken a step yet
    parts, everything, *_ = run_ranks(2, _resumed, cfg, str(tmp_path / "parts"), 2, STEPS, "all")[0]
    assert have_state == [False, True, True]
    assert whole.keys() == parts.keys() and "critic.value_head.weight" in whole
    assert all(torch.equal(one, parts[name]) for name, one in whole.items())
    assert (nothing, everything) == (0.0, pytest.approx(3.0, rel=0.01)), "weights and both moments of both models"
    assert refusal.startswith("the checkpoint of step 3 holds policy and critic, but this run trains policy; ")
