"""The recorder: writes each step's rollouts, what the trainer says about their tokens, and a fingerprint of the step if
`debug.save_rollouts` is set; for a replay, and for the page of its episodes.
"""

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
from torch import Tensor

from spmdrl.algo.metrics import Metrics, scalars
from spmdrl.algo.seeds import uniform
from spmdrl.checkpoint import resolved
from spmdrl.config import Config
from spmdrl.config.strict import as_written, parse_own_json
from spmdrl.dist.collectives import raise_on_all_ranks
from spmdrl.learn.learner import POLICY, Learner
from spmdrl.model.policy import PackedModel, TokenLogprobs
from spmdrl.model.tensor_parallel import local_part
from spmdrl.model.weight_files import write_tensors
from spmdrl.refit.digest import digest
from spmdrl.rollout.collect import Collected
from spmdrl.rollout.files import (
    Recording,
    as_bytes,
    disk_errors_explained,
    folder_of,
    from_bytes,
    read_header,
    read_tensors,
    write,
)
from spmdrl.run import Launch
from spmdrl.types import PADDING_INDEX, MicroBatch, MiniBatch, Place

# Fingerprints of a step: a compact record of its advantages, weights and gradients, and the distance between two.


NUM_PROJECTIONS = 8
_BITS = 24  # random bits in one value of `uniform`
_CHUNK = 1 << 22  # elements whose signs are in memory at the same time


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The digest of one rank's part of a gradient, and projections that estimate its distance from another.

    A projection is the sum of the elements with random signs. The squared difference of two projections estimates the
    squared norm of the difference of the parts (Alon, Matias and Szegedy 1996, doi:10.1145/237814.237823); the mean
    over `NUM_PROJECTIONS` has a relative error of about one half.
    """

    digest: str
    squared_norm: float
    projections: tuple[float, ...]

    @classmethod
    @torch.no_grad()
    def of(cls, part: Tensor) -> Fingerprint:
        """Compute the fingerprint of a local tensor; the signs are the same on every device."""
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
        """Estimate the squared norm of the difference of the two parts."""
        pairs = zip(self.projections, other.projections, strict=True)
        return sum((mine - theirs) ** 2 for mine, theirs in pairs) / NUM_PROJECTIONS


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFingerprint:
    """The fingerprint of one step on one rank."""

    advantages: Mapping[Place, Tensor]  # [n] float32 for each trained sequence, by its place in the step's global order
    weights: Mapping[str, str]  # digests of its parts before the step, by "learner/parameter"
    gradients: Mapping[str, Fingerprint]  # its parts as the optimizer gets them, by "learner/update/parameter"
    numbers: Mapping[str, float]  # losses and gradient norms over all ranks, by metric

    def write(self, path: Path) -> None:
        """Write a file; it gets its final name once it is complete. Raises UserError if it cannot be written."""
        tensors = {
            "places": torch.tensor(list(self.advantages), dtype=torch.int64).view(-1, 2),
            "num_tokens": torch.tensor([len(x) for x in self.advantages.values()], dtype=torch.int64),
            "advantages": torch.cat([torch.empty(0), *self.advantages.values()]),
            "gradients": torch.tensor(
                [[one.squared_norm, *one.projections] for one in self.gradients.values()], dtype=torch.float64
            ).view(-1, 1 + NUM_PROJECTIONS),
            "digests": as_bytes(
                {"weights": self.weights, "gradients": {name: one.digest for name, one in self.gradients.items()}}
            ),
        }
        _write(path, tensors, {"numbers": json.dumps(self.numbers)})

    @classmethod
    def read(cls, path: Path) -> StepFingerprint:
        """Read a file. Raises UserError if it is missing or damaged."""
        with as_written(path, "debug.save_rollouts"):
            numbers, tensors = parse_own_json(read_header(path)["numbers"]), read_tensors(path)
            digests = from_bytes(tensors["digests"])
            parts = tensors["advantages"].split(tensors["num_tokens"].tolist())
            return cls(
                advantages=dict(zip(map(tuple, tensors["places"].tolist()), parts, strict=True)),
                weights=digests["weights"],
                gradients={
                    name: Fingerprint(saved_digest, squared_norm, tuple(projections))
                    for (name, saved_digest), (squared_norm, *projections) in zip(
                        digests["gradients"].items(), tensors["gradients"].tolist(), strict=True
                    )
                },
                numbers=numbers,
            )


class GradientHooks:
    """Hooks on the optimizers of learners that take fingerprints of weights and gradients before each step."""

    def __init__(self, learners: Mapping[str, Learner]) -> None:
        self._weights: dict[str, str] = {}
        self._gradients: dict[str, Fingerprint] = {}
        self._updates = dict.fromkeys(learners, 0)
        self._depth = 0  # an optimizer with its state on the host has steps inside its step, one for each block
        for name, learner in learners.items():
            learner.optimizer.register_step_pre_hook(partial(self._before, name, learner))
            learner.optimizer.register_step_post_hook(self._after)

    def take(self, mini_batches: Iterable[MiniBatch], updated: Metrics) -> StepFingerprint:
        """Return the fingerprint of a step, after its updates; `updated` are the metrics of the updates."""
        fingerprint = StepFingerprint(
            advantages=_advantages(mini_batches),
            weights=self._weights,
            gradients=self._gradients,
            numbers={name: x for name, x in scalars(updated).items() if name.endswith(("/loss", "/grad_norm"))},
        )
        self._weights, self._gradients, self._updates = {}, {}, dict.fromkeys(self._updates, 0)
        return fingerprint

    def _before(self, name: str, learner: Learner, *_: Any) -> None:
        self._depth += 1
        if self._depth > 1:
            return
        self._updates[name] += 1
        update = self._updates[name]
        for parameter_name, parameter in learner.model.named_parameters():
            if update == 1:
                self._weights[f"{name}/{parameter_name}"] = digest(local_part(parameter.detach()))
            if parameter.grad is not None:
                self._gradients[f"{name}/{update}/{parameter_name}"] = Fingerprint.of(local_part(parameter.grad))

    def _after(self, *_: Any) -> None:
        self._depth -= 1


def _advantages(mini_batches: Iterable[MiniBatch]) -> dict[Place, Tensor]:
    """Return the advantages of each sequence's loss tokens, by the sequence's place."""
    advantages: dict[Place, Tensor] = {}
    for micro_batch in (micro_batch for mini_batch in mini_batches for micro_batch in mini_batch):
        assert micro_batch.advantages is not None
        seqlens = micro_batch.seqlens
        masks, values = micro_batch.loss_mask.split(seqlens), micro_batch.advantages.split(seqlens)
        for place, mask, value in zip(micro_batch.places, masks, values, strict=True):
            if place[0] != PADDING_INDEX:
                advantages[place] = value[mask]
    return advantages


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The difference between the fingerprints of a step and of its replay."""

    advantages: float  # the largest absolute difference over all tokens
    numbers: Mapping[str, float]  # absolute differences of losses and gradient norms, by metric
    same_parts: bool  # True when each rank holds the same parts of the model; else the next two are empty
    weights: Sequence[str]  # names of weights whose bits differed before the step
    gradients: Mapping[str, float]  # estimated relative distances of gradients whose bits differ, by name

    @property
    def is_none(self) -> bool:
        """True when nothing differs."""
        return not (self.advantages or any(self.numbers.values()) or self.weights or self.gradients)


def difference(before: Sequence[StepFingerprint], now: Sequence[StepFingerprint]) -> Difference:
    """Compare the fingerprints of all ranks; the numbers of ranks may differ."""
    same_parts = len(before) == len(now)
    gradients, gradients_now = _by_name([one.gradients for one in before]), _by_name([one.gradients for one in now])
    digests, digests_now = _by_name([one.weights for one in before]), _by_name([one.weights for one in now])
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
            name: _relative_distance(gradients.get(name, []), gradients_now.get(name, []))
            for name in dict.fromkeys([*gradients, *gradients_now])
            if same_parts and gradients.get(name) != gradients_now.get(name)
        },
    )


def _by_name(of_ranks: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Collect the values of all ranks under each name, in the order of ranks."""
    names = dict.fromkeys(name for values in of_ranks for name in values)
    return {name: [values[name] for values in of_ranks if name in values] for name in names}


def advantages_of_all(fingerprints: Sequence[StepFingerprint]) -> dict[Place, Tensor]:
    """Merge the advantages of all ranks; ranks that train on the same sequences have the same."""
    return {place: advantages for one in fingerprints for place, advantages in one.advantages.items()}


def _largest_difference(one: Mapping[Place, Tensor], other: Mapping[Place, Tensor]) -> float:
    """Return the largest absolute difference of any token; infinite if the tokens themselves differ."""
    if {place: x.shape for place, x in one.items()} != {place: x.shape for place, x in other.items()}:
        return math.inf
    return max((float((x - other[place]).abs().max()) for place, x in one.items() if x.numel()), default=0.0)


def _relative_distance(parts: Sequence[Fingerprint], others: Sequence[Fingerprint]) -> float:
    """Estimate the distance of two gradients, each given by the parts of all ranks, relative to the first's norm."""
    if len(parts) != len(others):
        return math.inf
    squared_norm = sum(part.squared_norm for part in parts)
    squared_difference = sum(one.squared_distance(other) for one, other in zip(parts, others, strict=True))
    if squared_norm == 0:
        return math.inf if squared_difference else 0.0
    return math.sqrt(squared_difference / squared_norm)


# The recorder.


# The trainer's log-probabilities of a step's tokens, stored next to its rollouts: what the mismatch compares with.
#
#     RUN/rollouts/step-00000012/trainer-0.safetensors    one for each rank that trains, after the step's updates
#
# They are those of the first forward pass of each micro-batch in the step, which `mismatch/...` is about too: of the
# pass before the updates where there is one, else of the update itself.


# By the index of the rollout in the step's global order, and the tokens of the trajectory; [n] float32, nats, nan where
# a token was not trained on.
TrainerLogprobs = Mapping[tuple[int, tuple[int, ...]], Tensor]


class LogprobHook:
    """A hook on the policy's forward pass that keeps what it computed for each micro-batch of a step."""

    def __init__(self, policy: PackedModel) -> None:
        self._first: dict[bytes, Tensor] = {}  # by the micro-batch's tokens
        policy.register_forward_hook(self._after)

    def take(self, mini_batches: Iterable[MiniBatch]) -> TrainerLogprobs:
        """Return the log-probabilities of this rank's sequences, and forget them."""
        first, self._first = self._first, {}
        found: dict[tuple[int, tuple[int, ...]], Tensor] = {}
        for micro_batch in (micro_batch for mini_batch in mini_batches for micro_batch in mini_batch):
            logprobs = first.get(_key(micro_batch))  # None: its update was left out
            if logprobs is None:
                continue
            seqlens = micro_batch.seqlens
            tokens, values = micro_batch.token_ids.split(seqlens), logprobs.split(seqlens)
            for index, token_ids, value in zip(micro_batch.sequence_index, tokens, values, strict=True):
                if index != PADDING_INDEX:
                    found[index, tuple(token_ids.tolist())] = value
        return found

    def _after(self, model: PackedModel, inputs: tuple[Any, ...], outputs: TokenLogprobs) -> None:
        if model.adapters is not None and not model.adapters.is_on:
            return  # the reference's
        (micro_batch,) = inputs
        key = _key(micro_batch)
        if key not in self._first:
            self._first[key] = outputs.logprobs.detach().cpu().masked_fill(~micro_batch.loss_mask.cpu(), math.nan)


def _key(micro_batch: MicroBatch) -> bytes:
    return micro_batch.token_ids.cpu().numpy().tobytes()


def write_trainer_logprobs(folder: Path, step: int, rank: int, found: TrainerLogprobs) -> None:
    """Write a rank's file; it gets its final name once it is complete. Raises UserError if it cannot be written."""
    tensors = {
        "index": torch.tensor([index for index, _ in found], dtype=torch.int64),
        "num_tokens": torch.tensor([len(token_ids) for _, token_ids in found], dtype=torch.int64),
        "token_ids": torch.tensor([token for _, token_ids in found for token in token_ids], dtype=torch.int64),
        "logprobs": torch.cat([torch.empty(0), *found.values()]),
    }
    _write(_logprobs_path(folder, step, rank), tensors)


def _write(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None) -> None:
    unfinished = path.with_suffix(".unfinished")
    with disk_errors_explained(path):
        write_tensors(unfinished, tensors, header)
        os.replace(unfinished, path)


def read_trainer_logprobs(folder: Path, step: int, *, num_ranks: int) -> TrainerLogprobs:
    """Read a step's log-probabilities of all ranks, as far as the step got to its end on them. Raises UserError if a
    file is damaged."""
    found: dict[tuple[int, tuple[int, ...]], Tensor] = {}
    for path in (_logprobs_path(folder, step, rank) for rank in range(num_ranks)):
        if not path.exists():
            continue
        with as_written(path, "debug.save_rollouts"):
            tensors = read_tensors(path)
            counts = tensors["num_tokens"].tolist()
            of_sequences = zip(tensors["token_ids"].split(counts), tensors["logprobs"].split(counts), strict=True)
            for index, (token_ids, logprobs) in zip(tensors["index"].tolist(), of_sequences, strict=True):
                found[index, tuple(token_ids.tolist())] = logprobs
    return found


def _logprobs_path(folder: Path, step: int, rank: int) -> Path:
    return folder_of(folder, step) / f"trainer-{rank}.safetensors"


class Recorder:
    """Writes a step's rollouts with their rewards, and later a fingerprint of what was computed from them.

    The rollouts are written first, so that they are there even if the step diverges.
    """

    def __init__(self, run: Launch[Config], learners: Mapping[str, Learner]) -> None:
        """All ranks that train call the methods together."""
        self._config, self._plan = resolved(run.cfg), run.plan.as_dict()
        save_rollouts = run.cfg.debug.save_rollouts
        self._keep_last = None if save_rollouts == "all" else save_rollouts
        self._hooks = GradientHooks(learners)
        self._logprobs = LogprobHook(learners[POLICY].model)
        self._mesh, self._folder = run.meshes.training, run.folder.rollouts

    def save_rollouts(self, step: int, collected: Collected) -> None:
        """Write the step's rollouts, once their rewards are known."""
        recording = Recording(
            step=step,
            num_ranks=self._mesh.size(),
            config=self._config,
            plan=self._plan,
            places=collected.places,
            outcomes=tuple((rollout, future.result()) for rollout, future in collected.pending),
        )
        write(self._folder, recording, self._mesh, keep_last=self._keep_last)

    def save_fingerprints(self, step: int, mini_batches: Sequence[MiniBatch], updated: Metrics) -> None:
        """Write the step's fingerprint and the trainer's log-probabilities, after its updates from these mini-batches;
        `updated` are their metrics."""
        fingerprint, logprobs = self._hooks.take(mini_batches, updated), self._logprobs.take(mini_batches)
        rank = self._mesh.get_local_rank()
        with raise_on_all_ranks(self._mesh):
            fingerprint.write(_path(self._folder, step, rank))
            write_trainer_logprobs(self._folder, step, rank, logprobs)


class NoRecorder:
    """Writes nothing."""

    def save_rollouts(self, step: int, collected: Collected) -> None:
        """Do nothing."""

    def save_fingerprints(self, step: int, mini_batches: Sequence[MiniBatch], updated: Metrics) -> None:
        """Do nothing."""


def start_recorder(run: Launch[Config], learners: Mapping[str, Learner]) -> Recorder | NoRecorder:
    """The recorder that `debug.save_rollouts` asks for; recordings go into the run's folder."""
    return NoRecorder() if run.cfg.debug.save_rollouts is None else Recorder(run, learners)


def read_fingerprints(folder: Path, step: int, *, num_ranks: int) -> list[StepFingerprint] | None:
    """Read a step's fingerprint of every rank; None if the step did not end on all of them. Raises UserError if a file
    is damaged."""
    paths = [_path(folder, step, rank) for rank in range(num_ranks)]
    return [StepFingerprint.read(path) for path in paths] if all(path.exists() for path in paths) else None


def _path(folder: Path, step: int, rank: int) -> Path:
    return folder_of(folder, step) / f"found-{rank}.safetensors"
