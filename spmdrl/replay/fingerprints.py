"""What a step computed from its rollouts, small enough to be kept, and how far two such findings are apart."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from spmdrl.algo.metrics import Metrics, scalars
from spmdrl.algo.seeds import uniform
from spmdrl.learn.update import Learner
from spmdrl.refit.digest import digest
from spmdrl.rollout.files import as_bytes, disk_errors_explained, from_bytes, read_header, read_tensors
from spmdrl.step.batch import FILLING, MiniBatch

NUM_PROJECTIONS = 8
_BITS = 24  # of one `uniform`
_CHUNK = 1 << 22  # elements whose signs exist at the same time


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """A part of a gradient, known again by its bits, and how far from another by a few numbers.

    The square of the difference of two projections, each a sum over the elements with signs that chance has chosen, is
    expected to be the squared norm of the difference of the parts (Alon, Matias and Szegedy 1996,
    doi:10.1145/237814.237823); the mean over `NUM_PROJECTIONS` is off by about half of it.
    """

    digest: str
    squared_norm: float
    projections: tuple[float, ...]

    @classmethod
    @torch.no_grad()
    def of(cls, part: Tensor) -> Fingerprint:
        """Of a tensor that is whole on this rank; on any device the signs are the same."""
        flat = part.reshape(-1)
        sums = torch.zeros(1 + NUM_PROJECTIONS, dtype=torch.float64, device=part.device)
        for start in range(0, flat.numel(), _CHUNK):
            values = flat[start : start + _CHUNK].double()
            places = torch.arange(start, start + values.numel(), device=part.device)
            bits = (uniform(torch.zeros_like(places), places) * 2**_BITS).long()
            signs = (1 - 2 * (bits >> number & 1) for number in range(NUM_PROJECTIONS))
            sums += torch.stack([values.square().sum(), *((values * sign).sum() for sign in signs)])
        squared_norm, *projections = sums.tolist()
        return cls(digest(part), squared_norm, tuple(projections))

    def squared_distance(self, other: Fingerprint) -> float:
        """The squared norm of the difference of the two parts, estimated."""
        pairs = zip(self.projections, other.projections, strict=True)
        return sum((mine - theirs) ** 2 for mine, theirs in pairs) / NUM_PROJECTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFingerprint:
    """What one rank found in one step."""

    advantages: Mapping[int, Tensor]  # [n] float32 of the sequences it trained on, by place in the step's global order
    weights: Mapping[str, str]  # digests of its parts before the step, by "learner/parameter"
    gradients: Mapping[str, Fingerprint]  # of its parts, by "learner/update/parameter"; as the optimizer got them
    numbers: Mapping[str, float]  # losses and gradient norms of all ranks together, by metric

    def write(self, path: Path) -> None:
        """Write a file, which has its final name when it is whole. Raises UserError when it cannot be written."""
        unfinished = path.with_suffix(".unfinished")
        tensors = {
            "index": torch.tensor(list(self.advantages), dtype=torch.int64),
            "num_tokens": torch.tensor([len(x) for x in self.advantages.values()], dtype=torch.int64),
            "advantages": torch.cat([torch.empty(0), *self.advantages.values()]),
            "gradients": torch.tensor(
                [[mark.squared_norm, *mark.projections] for mark in self.gradients.values()], dtype=torch.float64
            ).view(-1, 1 + NUM_PROJECTIONS),
            "digests": as_bytes(
                {"weights": self.weights, "gradients": {name: mark.digest for name, mark in self.gradients.items()}}
            ),
        }
        with disk_errors_explained(path):
            save_file(tensors, unfinished, metadata={"numbers": json.dumps(self.numbers)})
            os.replace(unfinished, path)

    @classmethod
    def read(cls, path: Path) -> StepFingerprint:
        """What was written. Raises UserError when the file is missing or damaged."""
        numbers, tensors = json.loads(read_header(path)["numbers"]), read_tensors(path)
        digests = from_bytes(tensors["digests"])
        parts = tensors["advantages"].split(tensors["num_tokens"].tolist())
        return cls(
            advantages=dict(zip(tensors["index"].tolist(), parts, strict=True)),
            weights=digests["weights"],
            gradients={
                name: Fingerprint(found, squared_norm, tuple(projections))
                for (name, found), (squared_norm, *projections) in zip(
                    digests["gradients"].items(), tensors["gradients"].tolist(), strict=True
                )
            },
            numbers=numbers,
        )


class GradientHooks:
    """Looks at what optimizers are about to step with; `take` once a step."""

    def __init__(self, learners: Mapping[str, Learner]) -> None:
        self._weights: dict[str, str] = {}
        self._gradients: dict[str, Fingerprint] = {}
        self._updates = dict.fromkeys(learners, 0)
        self._depth = 0  # an optimizer with its state on the host steps within its step, once for each block
        for name, learner in learners.items():
            learner.optimizer.register_step_pre_hook(partial(self._before, name, learner))
            learner.optimizer.register_step_post_hook(self._after)

    def take(self, mini_batches: Iterable[MiniBatch], updated: Metrics) -> StepFingerprint:
        """What was found since the last call; `updated` is what the updates reported."""
        found = StepFingerprint(
            advantages=_advantages(mini_batches),
            weights=self._weights,
            gradients=self._gradients,
            numbers={name: x for name, x in scalars(updated).items() if name.endswith(("/loss", "/grad_norm"))},
        )
        self._weights, self._gradients, self._updates = {}, {}, dict.fromkeys(self._updates, 0)
        return found

    def _before(self, name: str, learner: Learner, *_: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._updates[name] += 1
        update = self._updates[name]
        for parameter_name, parameter in learner.model.named_parameters():
            if update == 1:
                self._weights[f"{name}/{parameter_name}"] = digest(_local(parameter.detach()))
            if parameter.grad is not None:
                self._gradients[f"{name}/{update}/{parameter_name}"] = Fingerprint.of(_local(parameter.grad))

    def _after(self, *_: Any) -> None:
        self._depth -= 1


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _advantages(mini_batches: Iterable[MiniBatch]) -> dict[int, Tensor]:
    """Of every sequence, its loss tokens' advantages."""
    advantages: dict[int, Tensor] = {}
    for pack in (pack for mini_batch in mini_batches for pack in mini_batch):
        masks, values = pack.loss_mask.split(pack.seqlens), pack.advantages.split(pack.seqlens)
        for index, mask, value in zip(pack.sequence_index, masks, values, strict=True):
            if index != FILLING:
                advantages[index] = value[mask]
    return advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """How far what was found is from what was found before."""

    advantages: float  # the largest absolute difference of any token
    numbers: Mapping[str, float]  # absolute differences of losses and gradient norms, by metric
    same_parts: bool  # whether each rank had the same parts of the model; else the next two are empty
    weights: Sequence[str]  # names of those that were not the same bits before the step
    gradients: Mapping[str, float]  # of those that are not the same bits: relative to the norm, estimated

    @property
    def is_none(self) -> bool:
        """Whether nothing differs at all."""
        return not (self.advantages or any(self.numbers.values()) or self.weights or self.gradients)


def difference(before: Sequence[StepFingerprint], now: Sequence[StepFingerprint]) -> Difference:
    """Compare the findings of all ranks, which may be other ranks than before."""
    same_parts = len(before) == len(now)
    marks, marks_now = _by_name([found.gradients for found in before]), _by_name([found.gradients for found in now])
    digests, digests_now = _by_name([found.weights for found in before]), _by_name([found.weights for found in now])
    numbers, numbers_now = before[0].numbers, now[0].numbers
    return Difference(
        advantages=_largest_difference(advantages_of_all(before), advantages_of_all(now)),
        numbers={
            name: abs(numbers.get(name, math.nan) - numbers_now.get(name, math.nan))
            for name in sorted({*numbers, *numbers_now})
        },
        same_parts=same_parts,
        weights=[name for name, x in digests.items() if digests_now.get(name) != x] if same_parts else [],
        gradients={
            name: _apart(marks.get(name, []), marks_now.get(name, []))
            for name in dict.fromkeys([*marks, *marks_now])
            if same_parts and marks.get(name) != marks_now.get(name)
        },
    )


def _by_name(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """What each rank has under a name, in the order of ranks."""
    names = dict.fromkeys(name for found in of_ranks for name in found)
    return {name: [found[name] for found in of_ranks if name in found] for name in names}


def advantages_of_all(findings: Sequence[StepFingerprint]) -> dict[int, Tensor]:
    """Of all ranks, those that train on the same sequences having found the same."""
    return {index: advantages for found in findings for index, advantages in found.advantages.items()}


def _largest_difference(one: Mapping[int, Tensor], other: Mapping[int, Tensor]) -> float:
    """Of any token's advantages; infinite when one has tokens that the other has not."""
    if {index: x.shape for index, x in one.items()} != {index: x.shape for index, x in other.items()}:
        return math.inf
    return max((float((x - other[index]).abs().max()) for index, x in one.items() if x.numel()), default=0.0)


def _apart(marks: Sequence[Fingerprint], others: Sequence[Fingerprint]) -> float:
    """The norm of the difference of two gradients, of which each rank has a part, relative to that of the first."""
    if len(marks) != len(others):
        return math.inf
    squared_norm = sum(mark.squared_norm for mark in marks)
    squared_difference = sum(one.squared_distance(other) for one, other in zip(marks, others, strict=True))
    if squared_norm == 0:
        return math.inf if squared_difference else 0.0
    return math.sqrt(squared_difference / squared_norm)
