"""The critic's loss: how far its value of each token is from the return."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spmdrl.algo.formula import Formula


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """The critic's loss of each token."""

    per_token: Tensor  # [T] float32, with grad; 0 outside loss_mask
    clipped: Tensor  # [T] bool, True where the bound decides the loss


def clipped_value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, loss_mask: Tensor, *, clip_value: float
) -> ValueLoss:
    """max((V - R)^2, (clip(V, V_old - clip_value, V_old + clip_value) - R)^2) / 2.

    As in the first implementation of PPO (OpenAI baselines, ppo2; described in arXiv:2005.12729). All tensors are [T],
    in units of the reward; only values carries grad. Nothing is clipped with an infinite clip_value.
    """
    values, old_values, returns = (torch.where(loss_mask, column, 0.0) for column in (values, old_values, returns))
    free = (values - returns).square()
    near = torch.clamp(values, old_values - clip_value, old_values + clip_value)
    bounded = (near - returns).square()
    return ValueLoss(torch.maximum(free, bounded) / 2, bounded > free)


def fit_sums(returns: Tensor, values: Tensor, loss_mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Sums [] float64 over loss tokens of R, R^2, R - V, (R - V)^2 and 1, for returns R [T] and values V [T].

    Added up over all ranks they give the explained variance, 1 - var(R - V) / var(R).
    """
    returns, values = returns[loss_mask].double(), values[loss_mask].double()
    errors = returns - values
    count = returns.new_tensor(len(returns))
    return returns.sum(), returns.square().sum(), errors.sum(), errors.square().sum(), count


VALUE_LOSS = Formula(
    function=clipped_value_loss,
    text="max((V - R)^2, (clip(V, V_old - clip_value, V_old + clip_value) - R)^2) / 2",
    source="OpenAI baselines (ppo2), arXiv:2005.12729",
    when='With `advantage.estimator = "gae"`.',
    settings={"clip_value": 0.2},
)
