"""Parameters with learning rates of their own: a rate of 0 freezes, an equal one changes nothing, a run resumes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from spmdrl import checkpoint
from spmdrl.algo.metrics import scalars
from spmdrl.config import OptimConfig
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import PolicyObjective
from spmdrl.model.load import load_policy, own_rate_problems
from tests.helpers.checkpoints import save_and_wait
from tests.helpers.configs import loss_config, model_config
from tests.helpers.learners import full_state, update_once
from tests.helpers.models import save_qwen3
from tests.helpers.ranks import run_ranks
from tests.helpers.vision_models import save_qwen3_vl

LAYER, EMBEDDING = "layers.0.*", "embed_tokens.weight"
# So that clipping does not look at what a rate of 0 leaves alone.
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1, "max_grad_norm": 1e6}
SGD: dict[str, Any] = {"name": "sgd", "lr": 0.5, "momentum": 0.5, "max_grad_norm": 1e6}
LINEAR: dict[str, Any] = {"schedule": "linear", "warmup_steps": 2, "min_lr_fraction": 0.1}


def start(path: str, meshes: Meshes, optim: Mapping[str, Any], *, freeze: tuple[str, ...] = ()) -> Learner:
    policy = load_policy(model_config(path, freeze=freeze), meshes.model, temperature=1.0)
    objective = PolicyObjective(loss_config())
    return Learner.start(policy, OptimConfig(**optim), objective, num_updates=4, dtype=torch.float32)


@dataclass(frozen=True)
class Trained:
    """States after two updates, and the metrics of the second one with other rates."""

    frozen: dict[str, Tensor]
    at_zero: dict[str, Tensor]
    plain: dict[str, Tensor]
    at_same: dict[str, Tensor]
    other: dict[str, Tensor]
    resumed: dict[str, Tensor]
    rates: dict[str, float]


def _trained(path: str, folder: str) -> Trained:
    with spmd_session(threads_per_rank=1, deterministic=True) as world:
        meshes = build_meshes(world)

        def after_two(optim: Mapping[str, Any], **options: Any) -> dict[str, Tensor]:
            learner = start(path, meshes, optim, **options)
            for step in (1, 2):
                update_once(learner, meshes, step=step)
            return full_state(learner)

        other = SGD | LINEAR | {"rates": {LAYER: 0.05, EMBEDDING: 0.0}}
        first, second = start(path, meshes, other), start(path, meshes, other)
        update_once(first, meshes, step=1)
        save_and_wait(folder, {"policy": first}, meshes, step=1)
        metrics = update_once(first, meshes, step=2)
        checkpoint.restore(Path(folder), {"policy": second}, meshes.training, step=1)
        update_once(second, meshes, step=2)
        return Trained(
            frozen=after_two(ADAMW, freeze=(LAYER, EMBEDDING)),
            at_zero=after_two(ADAMW | {"rates": {LAYER: 0.0, EMBEDDING: 0.0}}),
            plain=after_two(ADAMW),
            at_same=after_two(ADAMW | {"rates": {LAYER: 1e-2}}),
            other=full_state(first),
            resumed=full_state(second),
            rates={name: value for name, value in scalars(metrics).items() if name.startswith("update/lr")},
        )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Trained]:
    folder = tmp_path_factory.mktemp("rates")
    path = save_qwen3(folder / "model")
    return {number: run_ranks(number, _trained, path, str(folder / str(number)))[0] for number in (1, 2)}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_rate_of_0_leaves_weights_as_freezing_does(trained: dict[int, Trained], num_ranks: int) -> None:
    found = trained[num_ranks]
    moved = 0
    for name, value in found.frozen.items():
        assert torch.equal(value, found.at_zero[name]), name
        moved += not torch.equal(value, found.plain[name])
    assert moved > len(found.frozen) / 2


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_rate_of_all_others_changes_no_bit(trained: dict[int, Trained], num_ranks: int) -> None:
    found = trained[num_ranks]
    assert found.plain.keys() == found.at_same.keys()
    for name, value in found.plain.items():
        assert torch.equal(value, found.at_same[name]), name


def test_a_run_with_rates_resumes_and_is_that_of_one_rank(trained: dict[int, Trained]) -> None:
    one, two = trained[1].other, trained[2].other
    assert one.keys() == two.keys()
    for name, value in two.items():
        assert torch.equal(value, trained[2].resumed[name]), name
        torch.testing.assert_close(value, one[name], rtol=1e-4, atol=1e-6)


def test_the_schedule_scales_every_rate_and_metrics_show_them(trained: dict[int, Trained]) -> None:
    # The second of four updates ends the warm-up.
    assert (
        trained[1].rates
        == trained[2].rates
        == {
            "update/lr": 0.5,
            f"update/lr/{LAYER}": 0.05,
            f"update/lr/{EMBEDDING}": 0.0,
        }
    )


def test_rates_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    text, eyes = save_qwen3(tmp_path / "text"), save_qwen3_vl(tmp_path / "eyes")

    def problems(path: str, rates: dict[str, float], freeze: tuple[str, ...] | None = None) -> list[str]:
        return list(own_rate_problems(AutoConfig.from_pretrained(path), model_config(path, freeze=freeze), rates))

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
