"""What a critic learns and how well it knows it: equal to the slow twins, however the tokens are cut."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics

import pytest
import torch
from torch import Tensor

from spmdrl.algo.losses import clipped_value_loss, fit_sums
from spmdrl.algo.metrics import ExplainedVariance
from spmdrl.memory.device import ModelSize, plan_memory
from spmdrl.memory.overhead import Overhead
from spmdrl.model.load import critic_shapes, parameter_shapes
from spmdrl.preflight.forecast import Model, predict
from tests.helpers import oracle
from tests.helpers.configs import minimal_config, model_config
from tests.helpers.models import QWEN3

CLIPS = [0.2, 1.0, math.inf]


def columns(seed: int = 0) -> tuple[Tensor, Tensor]:
    """Mask [T], and values, old values and returns [3, T]."""
    draw = torch.Generator().manual_seed(seed)
    return torch.rand(64, generator=draw) < 0.7, torch.randn(3, 64, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("clip", CLIPS)
def test_loss_equals_the_oracle_whatever_lies_outside_the_mask(clip: float) -> None:
    mask, clean = columns()
    slow = [oracle.value_loss(*token, clip) if m else 0.0 for m, token in zip(mask, clean.T.tolist(), strict=True)]
    for garbage in (0.0, math.inf, math.nan):
        loss = clipped_value_loss(*torch.where(mask, clean, garbage), mask, clip_value=clip)
        torch.testing.assert_close(loss.per_token, torch.tensor(slow, dtype=torch.float64), rtol=1e-12, atol=1e-12)
        assert loss.clipped.any() == (clip < math.inf) and not (loss.clipped & ~mask).any()


@pytest.mark.parametrize("clip", CLIPS)
def test_gradient_is_the_oracles_slope(clip: float) -> None:
    mask, clean = columns(1)
    values = torch.where(mask, clean[0], math.nan).requires_grad_()
    loss = clipped_value_loss(values, clean[1], clean[2], mask, clip_value=clip).per_token.sum()
    (gradient,) = torch.autograd.grad(loss, values)
    step = 1e-6
    slow = [
        (oracle.value_loss(v + step, old, r, clip) - oracle.value_loss(v - step, old, r, clip)) / (2 * step) if m else 0
        for m, (v, old, r) in zip(mask, clean.T.tolist(), strict=True)
    ]
    torch.testing.assert_close(gradient, torch.tensor(slow, dtype=torch.float64), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cuts", [[], [20], [0, 1, 50, 64]])
def test_explained_variance_does_not_depend_on_the_cut(cuts: list[int]) -> None:
    mask, (values, _, returns) = columns(2)
    returns = returns + 2 * values + 5
    edges = [0, *cuts, len(mask)]
    parts = [
        ExplainedVariance(*map(float, fit_sums(returns[a:b], values[a:b], mask[a:b])))
        for a, b in itertools.pairwise(edges)
    ]
    whole = parts[0]
    for part in parts[1:]:
        whole = part.merge(whole)
    errors = (returns - values)[mask].tolist()
    expected = 1 - statistics.pvariance(errors) / statistics.pvariance(returns[mask].tolist())
    assert 0.1 < expected < 0.9 and whole.value() == pytest.approx(expected, rel=1e-12)


def test_equal_returns_leave_nothing_to_explain() -> None:
    mask, (values, *_) = columns(3)
    assert math.isnan(ExplainedVariance(*map(float, fit_sums(torch.full((64,), 0.1), values, mask))).value())
    assert math.isnan(ExplainedVariance(*map(float, fit_sums(values, values, mask & False))).value())
    assert ExplainedVariance(*map(float, fit_sums(values, values, mask))).value() == 1.0


def test_a_critic_takes_weights_and_state_of_its_own_and_gradients_in_turn() -> None:
    cfg = minimal_config(advantage={"estimator": "gae"})
    small = ModelSize(whole=2**20, shard=2**20, root=2**10, largest_layer=2**15)
    large = ModelSize(whole=2**22, shard=2**22, root=2**12, largest_layer=2**17)
    sizes = {
        "num_ranks": 1,
        "compute_bytes": 2,
        "device_bytes": 2**36,
        "bucket_bytes": 2**28,
        "overhead": Overhead(),
    }
    alone, both = plan_memory(cfg, small, **sizes), plan_memory(cfg, small, critic=large, **sizes)
    critic = plan_memory(cfg, large, **sizes)
    assert both.weights == alone.weights + critic.weights
    assert both.optimizer == alone.optimizer + critic.optimizer
    assert both.asleep == alone.asleep + critic.asleep > 0
    assert (both.gradients, both.gathered) == (critic.gradients, critic.gathered)


def test_the_planner_has_a_phase_for_the_critic() -> None:
    cfg = minimal_config(advantage={"estimator": "gae"})
    model = Model.read(QWEN3, model_config("m"), critic=Model.read_critic(QWEN3, model_config("m")))
    prediction = predict(cfg, model, num_ranks=2, device_bytes=2**36, on_gpu=True)
    phases = {phase.name: phase for phase in prediction.phases}
    policy, critic = phases["forward-backward"].device, phases["critic"].device
    assert {name: critic[name] for name in ("weights", "optimizer", "gradients")} == {
        name: policy[name] for name in ("weights", "optimizer", "gradients")
    }
    assert critic["weights"] + critic["optimizer"] == 2 * (1 + 2) * critic["gradients"], "of two, with AdamW"
    assert sum(critic.values()) < sum(policy.values()), "it has no logits"
    training = dataclasses.asdict(prediction.rank.memory)
    assert prediction.plan is not None and training.items() <= dataclasses.asdict(prediction.plan).items()
    assert phases["load"].device == {"weights": 2 * training["gradients"]}, "one is read after the other"
    assert phases["load"].host["weights on their way"] == training["gradients"]


def test_an_untied_head_is_not_the_critics() -> None:
    untied = type(QWEN3)(**(QWEN3.to_dict() | {"tie_word_embeddings": False}))
    (policy, _), (critic, _) = (shapes(untied, model_config("m")) for shapes in (parameter_shapes, critic_shapes))
    assert policy.keys() - critic.keys() == {"lm_head.weight"} and not critic.keys() - policy.keys()
