"""Everything that is added up to a loss equals its oracle in value and gradient, however the batch is cut."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from spmdrl.algo.kl import KL_ESTIMATORS
from spmdrl.algo.losses import AGGREGATIONS
from spmdrl.config import CorrectionConfig, DistillConfig, LossConfig
from spmdrl.learn.objective import PolicyObjective, distill_values
from spmdrl.model.policy import TokenLogprobs
from tests.helpers import oracle
from tests.helpers.corrections import CLIP, CUTS, MAX_RESPONSE_TOKENS, batch, random_columns

KL_COEF, ENTROPY_COEF = 0.3, 0.05


def reference_of(old_logprobs: Any) -> Any:
    """What the reference says of a token; of garbage it is garbage."""
    return 0.7 * old_logprobs - 0.4


def entropy_of(rollout_logprobs: Any) -> Any:
    return -rollout_logprobs


def with_reference(sequences: list[dict[str, Tensor]], cut: list[int], cfg: LossConfig) -> tuple[float, Tensor, Tensor]:
    """(loss, its gradient by logprobs, by entropy) summed over micro-batches, both of the loss tokens in order."""
    objective, loss, slopes = PolicyObjective(cfg), 0.0, []
    for micro_batch, now in batch(sequences, cut, cfg.aggregation):
        assert micro_batch.old_logprobs is not None
        micro_batch = dataclasses.replace(micro_batch, ref_logprobs=reference_of(micro_batch.old_logprobs))
        logprobs = now.clone().requires_grad_()
        entropy = torch.where(micro_batch.loss_mask, entropy_of(micro_batch.rollout_logprobs), 1.0).requires_grad_()
        part = objective(TokenLogprobs(logprobs, entropy), micro_batch).loss_sum
        gradients = torch.autograd.grad(part, [logprobs, entropy])
        assert all((gradient[~micro_batch.loss_mask] == 0).all() for gradient in gradients)
        loss += float(part.detach())
        slopes.append(torch.stack([gradient[micro_batch.loss_mask] for gradient in gradients]))
    by_logprob, by_entropy = torch.cat(slopes, dim=1)
    return loss, by_logprob, by_entropy


def by_hand(sequences: list[dict[str, Tensor]], cfg: LossConfig) -> tuple[float, list[float], list[float]]:
    """The same, token by token."""
    rows = [
        [[*row, entropy_of(row[2])] for row in zip(*(s[name][s["mask"]].tolist() for name in "nobA"), strict=True)]
        for s in sequences
    ]

    def loss() -> float:
        losses = [
            [
                oracle.policy_loss(now, old, advantage, True, clip_low=CLIP, clip_high=CLIP, dual_clip=None)[0]
                + KL_COEF
                * oracle.kl(now, reference_of(old), cfg.kl_estimator)
                * (math.exp(now - sampled) if cfg.kl_importance_ratio else 1.0)
                + cfg.log_ratio_coef * (now - sampled) ** 2
                - ENTROPY_COEF * entropy
                for now, old, sampled, advantage, entropy in row
            ]
            for row in rows
        ]
        return oracle.global_loss(losses, cfg.aggregation, MAX_RESPONSE_TOKENS)

    def along(token: list[float], place: int) -> Callable[[float], float]:
        def at(value: float) -> float:
            before, token[place] = token[place], value
            result = loss()
            token[place] = before
            return result

        return at

    by_place = [
        [oracle.slope(along(token, place), token[place]) for token in itertools.chain(*rows)] for place in (0, 4)
    ]
    return loss(), *by_place  # type: ignore[return-value]  # two of them


TERMS: list[dict[str, Any]] = [
    *({"kl_estimator": estimator} for estimator in KL_ESTIMATORS),
    {"kl_estimator": "k1", "kl_importance_ratio": True},
    {"kl_estimator": "k3", "kl_importance_ratio": True, "log_ratio_coef": 0.2},
]


@pytest.mark.parametrize("terms", TERMS, ids=str)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_whole_loss_equals_the_oracle_wherever_the_batch_is_cut(aggregation: str, terms: dict[str, Any]) -> None:
    """With responses of one token and of none, and inf and NaN wherever nothing is trained."""
    cfg = LossConfig.model_validate(
        {"clip_low": CLIP, "clip_high": CLIP, "aggregation": aggregation, "kl_coef": KL_COEF, "allow_k1_loss": True}
        | {"entropy_coef": ENTROPY_COEF, **terms}
    )
    sequences = random_columns()
    expected, *slopes = by_hand(sequences, cfg)
    for cut in CUTS:
        loss, *gradients = with_reference(sequences, cut, cfg)
        assert loss == pytest.approx(expected, rel=1e-6, abs=1e-6)
        for gradient, slope in zip(gradients, slopes, strict=True):
            assert gradient.tolist() == pytest.approx(slope, rel=1e-6, abs=1e-6)


def test_a_teacher_that_sees_hints_of_some_sources_has_one_divergence_in_the_metrics() -> None:
    taught = torch.tensor([[True, False, False, False], [False, True, True, False]])
    micro_batch: Any = SimpleNamespace(distill_weights=torch.ones(4), taught_by=lambda place: taught[place])
    rows = ({"model": "a", "tasks": ["x"], "hint_column": "h"}, {"model": "a", "tasks": ["y"]})
    distill = DistillConfig.model_validate({"teachers": rows, "divergence": "forward"})
    found = distill_values(torch.arange(4.0), micro_batch, distill)
    assert found.keys() == {"distill/forward_nats", "distill/forward_nats_a"}
    assert found["distill/forward_nats_a"][1].tolist() == [True, True, True, False]


def test_the_mismatch_is_the_trainers_also_where_the_ratio_compares_with_the_engine() -> None:
    """`old_logprobs` are then the engine's: with them every mismatch would be reported as 0."""
    objective = PolicyObjective(LossConfig(), correction=CorrectionConfig(old="rollout"))
    for micro_batch, now in batch(random_columns(3), CUTS[0], "token_mean"):
        micro_batch = dataclasses.replace(micro_batch, old_logprobs=micro_batch.rollout_logprobs)
        found = objective(TokenLogprobs(now, torch.zeros_like(now)), micro_batch).means["mismatch/mean_abs_nats"]
        mask, expected = micro_batch.loss_mask, (now - micro_batch.rollout_logprobs).abs()
        assert expected[mask].min() > 0
        torch.testing.assert_close(found[mask], expected[mask], rtol=1e-5, atol=1e-6, check_dtype=False)
