"""What the documentation, the configuration and the loop know of an algorithm beside its function."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Formula:
    """A function and its row in `docs/algorithms.md`."""

    function: Callable[..., Any]
    text: str  # the formula
    source: str
    when: str  # to use it
    settings: Mapping[str, bool | float | None] = field(default_factory=dict)  # its keyword arguments by default
    needs: tuple[str, ...] = ()  # what else of the batch it is given, by keyword


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator(Formula):
    """An advantage estimator. Of a group: rewards [P, G] to advantages [P, G]; per token: see `advantage.returns`."""

    whiten: bool = False  # over the global batch, unless the user says otherwise
    per_token: bool = False
    smallest_group: int = 2  # rollouts: fewer leave nothing to compare a reward with


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind(Formula):
    """A policy loss: logprobs, old_logprobs, advantages, loss_mask to `PolicyLoss`."""

    per_sequence: bool = False  # it knows one advantage a sequence
    off_policy_only: bool = False  # it does nothing of its own while the policy is the one that sampled
    # Whose tokens are chosen over the whole mini-batch: (covariance, seeds, positions), each [N], to priorities [N].
    prioritise: Callable[..., Any] | None = None
    choice: Mapping[str, float] = field(default_factory=dict)  # cov_fraction, and the keyword arguments of prioritise
