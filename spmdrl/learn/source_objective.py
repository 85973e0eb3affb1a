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
    names: tuple[str, ...]
    compares: tuple[bool, ...]  # whether each of them uses the reference

    def __call__(self, outputs: TokenLogprobs, micro_batch: MicroBatch) -> Objective:
        found: list[tuple[Objective, Tensor]] = []
        elsewhere: dict[str, tuple[Tensor, Tensor]] = {}
        for place, (part, name, compares) in enumerate(zip(self.parts, self.names, self.compares, strict=True)):
            seen = micro_batch.owned_by(place)
            if not compares:
                seen = replace(seen, ref_logprobs=None)
            objective = part(outputs, seen)
            found.append((objective, seen.loss_mask))
            for metric in ("update/entropy_nats", "update/clip_fraction"):
                elsewhere[f"{metric}_{name}"] = objective.means[metric], seen.loss_mask
            assert objective.per_token is not None
            elsewhere[f"loss/mean_{name}"] = objective.per_token, seen.loss_mask
        common = set.intersection(*(set(one.means) for one, _ in found))
        for one, own in found:
            some = {name: (values, own) for name, values in one.means.items() if name not in common}
            for name, (values, where) in (one.elsewhere | some).items():
                before, there = elsewhere.get(name, (torch.zeros_like(values), torch.zeros_like(where)))
                elsewhere[name] = torch.where(where, values, before), there | where
        return Objective(
            loss_sum=torch.stack([one.loss_sum for one, _ in found]).sum(),
            means={name: values for name, values in _all(found, "means").items() if name in common},
            peaks=_all(found, "peaks"),
            worst=_all(found, "worst"),
            weights=_all(found, "weights", without=1.0),
            elsewhere=elsewhere,
            expert_loads=outputs.expert_loads,
        )


def _all(found: Sequence[tuple[Objective, Tensor]], kind: str, without: float = 0.0) -> dict[str, Tensor]:
    """Join the values [T] of algorithms, each of its own tokens; a token has `without` where there is none."""
    joined: dict[str, Tensor] = {}
    for one, own in found:
        for name, values in getattr(one, kind).items():
            joined[name] = torch.where(own, values, joined.get(name, torch.full_like(values, without)))
    return joined
