"""A part of the model that is frozen: no gradient, no optimizer state, sent to the engine once, as it was resumed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from spmdrl import checkpoint
from spmdrl.config import OptimConfig, RefitConfig
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import PolicyObjective
from spmdrl.model.load import load_policy
from spmdrl.refit.refit import Refit, RefitMismatch
from tests.helpers.checkpoints import save_and_wait
from tests.helpers.configs import loss_config, model_config
from tests.helpers.learners import full_state, update_once
from tests.helpers.models import save_qwen3
from tests.helpers.ranks import run_ranks

FREEZE = ("layers.0.*", "embed_tokens.weight", "layers.2.self_attn.q_proj.weight")
FROZEN = "model.layers.0.mlp.up_proj.weight"


def start(path: str, meshes: Meshes, *, freeze: tuple[str, ...] = FREEZE) -> Learner:
    policy = load_policy(model_config(path, freeze=freeze), meshes.model, temperature=1.0)
    optim = OptimConfig(name="adamw", lr=1e-2, weight_decay=0.1)
    return Learner(policy, optim, PolicyObjective(loss_config()), num_updates=4, dtype=torch.float32)


@dataclass(frozen=True)
class Trained:
    """States before, after two updates, and after two updates with a checkpoint between."""

    before: dict[str, Tensor]
    straight: dict[str, Tensor]
    resumed: dict[str, Tensor]


def _trained(path: str, folder: str) -> Trained:
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        first = start(path, meshes)
        before = full_state(first)
        update_once(first, meshes, step=1)
        save_and_wait(folder, {"policy": first}, meshes, step=1)
        update_once(first, meshes, step=2)
        second = start(path, meshes)
        checkpoint.restore(Path(folder), {"policy": second}, meshes.training, step=1)
        update_once(second, meshes, step=2)
        return Trained(before, full_state(first), full_state(second))


def test_a_frozen_part_stays_and_a_run_with_one_resumes(tmp_path: Path) -> None:
    path = save_qwen3(tmp_path / "model")
    found = run_ranks(2, _trained, path, str(tmp_path / "checkpoints"))[0]
    assert found.resumed.keys() == found.straight.keys()
    for name, value in found.straight.items():
        assert torch.equal(value, found.resumed[name]), name
    frozen = {
        name
        for name in found.before
        if ".layers.0." in name or "embed_tokens" in name or name.endswith("layers.2.self_attn.q_proj.weight")
    }
    for name, value in found.before.items():
        assert torch.equal(value, found.straight[name]) == (name in frozen), name
    with_state = {name.removesuffix(".exp_avg") for name in found.straight if name.endswith(".exp_avg")}
    assert with_state == found.before.keys() - frozen


def _gradients(path: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The updated weights with and without a frozen part, of an optimizer that does not look at the norm."""
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        states = []
        for freeze in (FREEZE, ()):
            learner = start(path, meshes, freeze=freeze)
            update_once(learner, meshes, step=1)
            states.append({name: x for name, x in full_state(learner).items() if name.endswith(".exp_avg_sq")})
        return states[0], states[1]


def _sent(path: str) -> list[list[str]]:
    """The names of the weights that each of four refits sends, and what a damaged frozen weight leads to."""
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        learner = start(path, meshes)
        config = AutoConfig.from_pretrained(path)
        engine = TorchEngine(
            config,
            device=world.device,
            dtype=torch.float32,
            kernel="sdpa",
            max_running=4,
            release=("kv_cache", "weights"),
        )
        refit = Refit(
            learner.model, engine, meshes, RefitConfig(bucket_bytes=2**14, verify="every"), dtype=torch.float32
        )
        names: list[list[str]] = []
        load = engine.load

        def noted(number: int) -> None:
            names[-1] += [entry.name for entry in engine._buckets[number].flat_entries]
            load(number)

        engine.load = noted  # type: ignore[method-assign]
        for version in range(4):
            names.append([])
            refit(version=version)
            update_once(learner, meshes, step=version + 1)
            if version == 2 and world.rank == 1:  # so that the others have to send everything too
                engine.sleep()
        names.append([])
        with torch.no_grad():
            engine.weights[FROZEN][0, 0] += 1
        with pytest.raises(RefitMismatch, match=FROZEN):
            refit(version=4)
        return names


def test_frozen_weights_are_sent_once_and_stay_in_the_engine(tmp_path: Path) -> None:
    names = run_ranks(2, _sent, save_qwen3(tmp_path))[0]
    first, second, third, after_sleep, last = map(sorted, names)
    assert first == after_sleep and second == third == last
    left_out = set(first) - set(second)
    # The frozen projection of the last layer goes with the two that engines fuse with it.
    assert left_out == {name for name in first if ".layers.0." in name or "embed_tokens" in name}
    assert FROZEN in left_out and len(first) == len(set(first))


def test_gradients_of_the_rest_are_as_without_a_frozen_part(tmp_path: Path) -> None:
    frozen, whole = run_ranks(2, _gradients, save_qwen3(tmp_path))[0]
    assert 0 < len(frozen) < len(whole)
    # Of Adam's second moment: squares of clipped gradients, and clipping looks at the trained part alone.
    ratios = torch.stack([(frozen[name] / whole[name]).nanmedian() for name in frozen])
    for name in frozen:
        torch.testing.assert_close(frozen[name], whole[name] * ratios[0], rtol=1e-4, atol=1e-12)
    assert float(ratios[0]) > 1.0
