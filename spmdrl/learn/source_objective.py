"""The policy objective of a run: that of its algorithm, or of several, each on the tokens of its data sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from spmdrl.config import Config
from spmdrl.learn.objective import Objective, ObjectiveFunction, PolicyObjective
from spmdrl.model.policy import TokenLogprobs
from spmdrl.types import MicroBatch

_Somewhere = dict[str, tuple[Tensor, Tensor]]  # values [T], and where they are, [T] bool


def policy_objective(
    cfg: Config,
    coefficients: Mapping[str, float],
    *,
    longest_tokens: int,
    function: Callable[..., Any] | None = None,
) -> ObjectiveFunction:
    """Make the objective of a run. `function` is a policy loss in the place of those that the settings name."""
    parts = [
        PolicyObjective(
            one.loss, coefficients, one.correction, cfg.mismatch, cfg.distill, function, longest_tokens=longest_tokens
        )
        for one in cfg.algorithms
    ]
    if len(parts) == 1:
        return parts[0]
    compares = [cfg.reward.kl_coef > 0 or one.loss.kl_coef > 0 for one in cfg.algorithms]
    return SourcesObjective(tuple(parts), tuple(one.name for one in cfg.algorithms), tuple(compares))


@dataclass(frozen=True, slots=True)
class SourcesObjective:
    """The sum of the objectives of several algorithms, each of the sequences that name it."""

    parts: tuple[PolicyObjective, ...]
    names: tuple[str | None, ...]  # in metrics
    compares: tuple[bool, ...]  # whether each of them uses the reference

    def __call__(self, outputs: TokenLogprobs, micro_batch: MicroBatch) -> Objective:
        found: list[tuple[Objective, Tensor]] = []
        elsewhere: _Somewhere = {}
        for place, (part, name, compares) in enumerate(zip(self.parts, self.names, self.compares, strict=True)):
            seen = micro_batch.owned_by(place)
            if not compares:
                seen = replace(seen, ref_logprobs=None)
            objective = part(outputs, seen)
            found.append((objective, seen.loss_mask))
            if name is not None:
                assert objective.per_token is not None
                elsewhere[f"loss/mean_{name}"] = objective.per_token, seen.loss_mask
                for metric in ("update/entropy_nats", "update/clip_fraction"):
                    elsewhere[f"{metric}_{name}"] = objective.means[metric], seen.loss_mask
        common = set.intersection(*(set(one.means) for one, _ in found))
        weights: _Somewhere = {}
        for one, own in found:
            some = {name: (values, own) for name, values in one.means.items() if name not in common}
            _join(elsewhere, one.elsewhere | some)
            _join(weights, one.weights)
        return Objective(
            loss_sum=torch.stack([one.loss_sum for one, _ in found]).sum(),
            means={name: values for name, values in _all(found, "means").items() if name in common},
            peaks=_all(found, "peaks"),
            worst=_all(found, "worst"),
            weights=weights,
            elsewhere=elsewhere,
            expert_loads=outputs.expert_loads,
        )


def _join(joined: _Somewhere, more: _Somewhere) -> None:
    """Add values of some tokens to those of others."""
    for name, (values, where) in more.items():
        before, there = joined.get(name, (torch.zeros_like(values), torch.zeros_like(where)))
        joined[name] = torch.where(where, values, before), there | where


def _all(found: Sequence[tuple[Objective, Tensor]], kind: str) -> dict[str, Tensor]:
    """Join the values [T] of algorithms, each of its own tokens; a token has 0 where there is none."""
    joined: dict[str, Tensor] = {}
    for one, own in found:
        for name, values in getattr(one, kind).items():
            joined[name] = torch.where(own, values, joined.get(name, torch.zeros_like(values)))
    return joined
