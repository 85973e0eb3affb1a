"""Biases of experts follow the loads of a mini-batch, on any ranks, and are in checkpoints and refits."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from spmdrl import checkpoint
from spmdrl.config import OptimConfig, ParallelConfig
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import PolicyObjective
from spmdrl.model.load import load_policy
from spmdrl.model.routes import Routers
from spmdrl.step.batch import lay_end_to_end
from tests.helpers.checkpoints import save_and_wait
from tests.helpers.configs import loss_config, model_config
from tests.helpers.learners import COUNT, full_weights, update_once
from tests.helpers.models import save_other
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences

RATE = 0.125
Biases = dict[str, Tensor]


def start(path: str, meshes: Meshes) -> Learner:
    policy = load_policy(model_config(path), meshes.model, temperature=1.0)
    policy.routers = Routers(policy.model)
    optim = OptimConfig(name="sgd", lr=1e-3, expert_bias_rate=RATE)
    return Learner(policy, optim, PolicyObjective(loss_config()), num_updates=2, dtype=torch.float32)


def biases(learner: Learner, meshes: Meshes) -> Biases:
    """Those that a refit sends."""
    weights = full_weights(learner.model, meshes)  # type: ignore[arg-type]
    return {name: weight for name, weight in weights.items() if "e_score_correction_bias" in name}


Found = tuple[Tensor, Biases, Biases, Biases, Biases]


def _balanced(path: str, folder: str, layouts: list[ParallelConfig]) -> list[Found]:
    """By layout, the loads of the first step's tokens, and biases at the start, after one step, two, and two of a
    resumed run."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        return [_in_layout(path, f"{folder}-{n}", build_meshes(world, one)) for n, one in enumerate(layouts)]


def _in_layout(path: str, folder: str, meshes: Meshes) -> Found:
    first, second = (start(path, meshes) for _ in range(2))
    before = biases(first, meshes)
    with torch.no_grad():
        loads = first.model(lay_end_to_end(random_sequences(COUNT, seed=1), {})).expert_loads
    update_once(first, meshes, step=1)
    after = biases(first, meshes)
    save_and_wait(folder, {"policy": first}, meshes, step=1)
    update_once(first, meshes, step=2)
    checkpoint.restore(Path(folder), {"policy": second}, meshes.training, step=1)
    update_once(second, meshes, step=2)
    return loads, before, after, biases(first, meshes), biases(second, meshes)


def test_biases_follow_the_loads_of_all_ranks(tmp_path: Path) -> None:
    path = save_other("deepseek_v3", tmp_path / "model")
    (((loads, before, after, straight, resumed),),) = run_ranks(
        1, _balanced, path, str(tmp_path / "one"), [ParallelConfig()]
    )
    assert len(before) == len(loads) > 0
    moved = torch.stack([after[layer] - before[layer] for layer in before])
    assert torch.equal(moved, RATE * (loads.mean(1, keepdim=True) - loads).sign()) and moved.any()
    assert all(torch.equal(straight[layer], resumed[layer]) for layer in before)
    assert any(not torch.equal(straight[layer], after[layer]) for layer in before)
    layouts = [ParallelConfig(), ParallelConfig(cp=2)]
    for by_layout in run_ranks(2, _balanced, path, str(tmp_path / "two"), layouts):
        for their_loads, *others in by_layout:
            assert torch.equal(their_loads, loads)
            for mine, theirs in zip((before, after, straight, resumed), others, strict=True):
                assert all(torch.equal(mine[layer], theirs[layer]) for layer in before)
