"""Optimizers on shards, and parameters with learning rates of their own: a rate of 0 freezes, a run resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from spmdrl import checkpoint
from spmdrl.algo.metrics import scalars
from spmdrl.config import OptimConfig
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.learn import optim
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import PolicyObjective
from spmdrl.model.load import load_policy, model_without_memory
from spmdrl.model.param_groups import rate_problems
from tests.helpers.checkpoints import save_and_wait
from tests.helpers.configs import loss_config, model_config
from tests.helpers.learners import full_state, update_once
from tests.helpers.models import save_qwen3
from tests.helpers.ranks import run_ranks
from tests.helpers.vision_models import save_qwen3_vl

LAYER, EMBEDDING = "layers.0.*", "embed_tokens.weight"
# So that clipping does not look at what a rate of 0 leaves alone.
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1e6}
SGD: dict[str, Any] = {"name": "sgd", "lr": 0.5, "weight_decay": 0.1}
SEVERAL: dict[str, Any] = {
    **{"name": "sgd", "lr": 0.5, "momentum": 0.5, "max_grad_norm": 1e6},
    **{"schedule": "linear", "warmup_steps": 2, "min_lr_fraction": 0.1},
    "rates": {LAYER: 0.05, EMBEDDING: 0.0},
}

# torch's own classes, which compute with DTensors.
THROUGH_DTENSORS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"fused": True}),
    "sgd": (torch.optim.SGD, {"foreach": False}),
}


def start(path: str, meshes: Meshes, optim: Mapping[str, Any], *, freeze: tuple[str, ...] = ()) -> Learner:
    policy = load_policy(model_config(path, freeze=freeze), meshes.model, temperature=1.0)
    objective = PolicyObjective(loss_config())
    return Learner(policy, OptimConfig(**optim), objective, num_updates=4, dtype=torch.float32)


def after_two_updates(path: str, meshes: Meshes, optim: Mapping[str, Any], **options: Any) -> dict[str, Tensor]:
    learner = start(path, meshes, optim, **options)
    for step in (1, 2):
        update_once(learner, meshes, step=step)
    return full_state(learner)


@dataclass(frozen=True)
class Resumed:
    """States after two updates at several rates, without and with a checkpoint between, and the rates of the first."""

    straight: dict[str, Tensor]
    resumed: dict[str, Tensor]
    rates: dict[str, float]


def _resumed(path: str, folder: str, meshes: Meshes) -> Resumed:
    first, second = (start(path, meshes, SEVERAL) for _ in range(2))
    metrics = scalars(update_once(first, meshes, step=1))
    save_and_wait(folder, {"policy": first}, meshes, step=1)
    update_once(first, meshes, step=2)
    checkpoint.restore(Path(folder), {"policy": second}, meshes.training, step=1)
    update_once(second, meshes, step=2)
    rates = {name: value for name, value in metrics.items() if name.startswith("update/lr")}
    return Resumed(full_state(first), full_state(second), rates)


def _on_one_rank(path: str, folder: str) -> Resumed:
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        return _resumed(path, folder, build_meshes(world))


def _through_dtensors(path: str, meshes: Meshes) -> dict[str, dict[str, Tensor]]:
    with mock.patch.object(optim, "optimizer_class", THROUGH_DTENSORS.__getitem__):
        return {
            "plain, through DTensors": after_two_updates(path, meshes, ADAMW),
            "sgd, through DTensors": after_two_updates(path, meshes, SGD),
        }


def _on_two_ranks(path: str, folder: str) -> tuple[Resumed, dict[str, dict[str, Tensor]]]:
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)
        return _resumed(path, folder, meshes), {
            "frozen": after_two_updates(path, meshes, ADAMW, freeze=(LAYER, EMBEDDING)),
            "at 0": after_two_updates(path, meshes, ADAMW | {"rates": {LAYER: 0.0, EMBEDDING: 0.0}}),
            "plain": after_two_updates(path, meshes, ADAMW),
            "sgd": after_two_updates(path, meshes, SGD),
            **_through_dtensors(path, meshes),
            "the same": after_two_updates(path, meshes, ADAMW | {"rates": {LAYER: ADAMW["lr"]}}),
        }


@dataclass(frozen=True)
class Trained:
    """Rates of a run on one and on two ranks, and the states of two ranks after two updates."""

    one: Resumed
    two: Resumed
    states: dict[str, dict[str, Tensor]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("rates")
    path = save_qwen3(folder / "model")
    (one,) = run_ranks(1, _on_one_rank, path, str(folder / "1"))
    (two, states), _ = run_ranks(2, _on_two_ranks, path, str(folder / "2"))
    return Trained(one, two, states)


@pytest.mark.parametrize("name", ["plain", "sgd"])
def test_steps_on_shards_are_those_through_dtensors(trained: Trained, name: str) -> None:
    shards, dtensors = trained.states[name], trained.states[f"{name}, through DTensors"]
    assert shards.keys() == dtensors.keys() and any(key.endswith("exp_avg") for key in shards) == (name == "plain")
    for key, value in shards.items():
        assert torch.equal(value, dtensors[key]), key


def test_a_rate_of_0_leaves_weights_as_freezing_does(trained: Trained) -> None:
    frozen, plain = trained.states["frozen"], trained.states["plain"]
    for name, value in frozen.items():
        assert torch.equal(value, trained.states["at 0"][name]), name
    assert sum(not torch.equal(value, plain[name]) for name, value in frozen.items()) > len(frozen) / 2


def test_the_rate_of_all_others_changes_no_bit(trained: Trained) -> None:
    plain, same = trained.states["plain"], trained.states["the same"]
    assert plain.keys() == same.keys()
    for name, value in plain.items():
        assert torch.equal(value, same[name]), name


def test_a_run_with_rates_resumes_and_is_that_of_one_rank(trained: Trained) -> None:
    one, two = trained.one.straight, trained.two.straight
    assert one.keys() == two.keys()
    for name, value in two.items():
        assert torch.equal(value, trained.two.resumed[name]), name
        torch.testing.assert_close(value, one[name], rtol=1e-4, atol=1e-6)


def test_the_schedule_scales_every_rate_and_metrics_show_them(trained: Trained) -> None:
    # The first of two updates of the warm-up.
    expected = {"update/lr": 0.25, f"update/lr/{LAYER}": 0.025, f"update/lr/{EMBEDDING}": 0.0}
    assert trained.one.rates == trained.two.rates == expected


def test_rates_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    text, eyes = save_qwen3(tmp_path / "text"), save_qwen3_vl(tmp_path / "eyes")

    def problems(path: str, rates: dict[str, float], freeze: tuple[str, ...] | None = None) -> list[str]:
        model = model_without_memory(AutoConfig.from_pretrained(path), model_config(path))
        return list(rate_problems(model, rates, freeze))

    assert not problems(text, {LAYER: 1e-3, EMBEDDING: 0.0})
    (unknown,) = problems(text, {"layer.*": 1e-3})
    assert unknown.startswith('optim.rates names "layer.*", and Qwen3ForCausalLM has no such parameter; its parameters')
    assert '"layers.*"' in unknown
    (frozen,) = problems(text, {"layers.0.mlp.*": 1e-3}, (LAYER,))
    assert "model.freeze = ['layers.0.*'] leaves none of them to train" in frozen
    (tower,) = problems(eyes, {"visual.*": 1e-7})
    assert "set model.freeze = [] to train it, or remove the rate" in tower
    assert not problems(eyes, {"visual.*": 1e-7}, ())
    (twice,) = problems(text, {LAYER: 1e-3, "layers.*.mlp.*": 1e-4})
    assert twice.startswith("optim.rates has two rates for model.layers.0.mlp.")
    assert twice.endswith('of "layers.0.*" and of "layers.*.mlp.*"; name each parameter once')
