"""The recorder: writes each step's rollouts, what the trainer says about their tokens, and a fingerprint of the step if
`debug.save_rollouts` is set; for a replay, and for the page of its episodes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdrl.algo.metrics import Metrics
from spmdrl.checkpoint import resolved
from spmdrl.config import Config
from spmdrl.config.strict import as_written
from spmdrl.dist.collectives import raise_on_all_ranks
from spmdrl.learn.learner import POLICY, Learner
from spmdrl.model.policy import PackedModel, TokenLogprobs
from spmdrl.model.weight_files import write_tensors
from spmdrl.replay.fingerprints import GradientHooks, StepFingerprint
from spmdrl.rollout.collect import Collected
from spmdrl.rollout.files import Recording, disk_errors_explained, folder_of, read_tensors, write
from spmdrl.run import Launch
from spmdrl.types import PADDING_INDEX, MicroBatch, MiniBatch

# The trainer's log-probabilities of a step's tokens, kept beside its rollouts: what the mismatch compares with.
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
    path = _logprobs_path(folder, step, rank)
    unfinished = path.with_suffix(".unfinished")
    tensors = {
        "index": torch.tensor([index for index, _ in found], dtype=torch.int64),
        "num_tokens": torch.tensor([len(token_ids) for _, token_ids in found], dtype=torch.int64),
        "token_ids": torch.tensor([token for _, token_ids in found for token in token_ids], dtype=torch.int64),
        "logprobs": torch.cat([torch.empty(0), *found.values()]),
    }
    with disk_errors_explained(path):
        write_tensors(unfinished, tensors)
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
