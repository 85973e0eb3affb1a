"""An algorithm's function with what the documentation, the configuration and the loop must know of it."""

from __future__ import annotations

import inspect
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

    @property
    def needs(self) -> tuple[str, ...]:
        """The columns that the function takes: its parameters that are not settings."""
        return tuple(name for name in inspect.signature(self.function).parameters if name not in self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator(Formula):
    """An advantage estimator: rewards [P, G] of groups, or token_rewards [T], to advantages of the same shape; or
    rewards [P, G] with those of N turns to advantages of the turns, [N]."""

    whiten: bool = False  # over the global batch, unless the user says otherwise
    smallest_group: int = 2  # rollouts: fewer leave nothing to compare a reward with
    per_term: bool = False  # its rewards are sums of terms that `normalized_terms` has compared one by one

    @property
    def per_token(self) -> bool:
        """True for an estimator of tokens, which takes token_rewards; others take the rewards of groups."""
        return "token_rewards" in self.needs

    @property
    def per_turn(self) -> bool:
        """True for an estimator of turns, which takes their rollouts."""
        return "turn_rollouts" in self.needs


@dataclass(frozen=True, slots=True, kw_only=True)
class LossKind(Formula):
    """A policy loss: logprobs, old_logprobs, advantages, loss_mask and what else it needs to `PolicyLoss`."""

    per_sequence: bool = False  # it knows one advantage a sequence
    off_policy_only: bool = False  # it does nothing of its own while the policy is the one that sampled
    # Whose tokens are chosen over the whole mini-batch: (covariance, seeds, positions), each [N], to priorities [N].
    prioritise: Callable[..., Any] | None = None
    choice: Mapping[str, float] = field(default_factory=dict)  # cov_fraction, and the keyword arguments of prioritise
