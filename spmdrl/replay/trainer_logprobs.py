"""The trainer's log-probabilities of a step's tokens, kept beside its rollouts: what the mismatch compares with.

    RUN/rollouts/step-00000012/trainer-0.safetensors    one for each rank that trains, after the step's updates

They are those of the first forward pass of each micro-batch in the step, which `mismatch/...` is about too: of the pass
before the updates where there is one, else of the update itself.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdrl.config.strict import as_written
from spmdrl.model.policy import PackedModel, TokenLogprobs
from spmdrl.model.tensor_files import write_tensors
from spmdrl.rollout.files import disk_errors_explained, folder_of, read_tensors
from spmdrl.types import FILLING, MicroBatch, MiniBatch

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
                if index != FILLING:
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
    path = _path(folder, step, rank)
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
    for path in (_path(folder, step, rank) for rank in range(num_ranks)):
        if not path.exists():
            continue
        with as_written(path, "debug.save_rollouts"):
            tensors = read_tensors(path)
            counts = tensors["num_tokens"].tolist()
            of_sequences = zip(tensors["token_ids"].split(counts), tensors["logprobs"].split(counts), strict=True)
            for index, (token_ids, logprobs) in zip(tensors["index"].tolist(), of_sequences, strict=True):
                found[index, tuple(token_ids.tolist())] = logprobs
    return found


def _path(folder: Path, step: int, rank: int) -> Path:
    return folder_of(folder, step) / f"trainer-{rank}.safetensors"
