"""Engines whose responses have workload W's lengths: `rollout.engine = "benchmarks/forced_lengths.py:TailLengths"`.

Nothing else about them differs from `rollout.engine = "torch"`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import ClassVar

import workload

from spmdrl.algo.seeds import rollout_seed
from spmdrl.config import Config
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.run import Launch
from spmdrl.types import Request, Response


class ForcedLengths(TorchEngine):
    """Gives each request of a step the length that the workload has for it, and no token that stops it before.

    A request is known by its seed, so it gets its length on whatever rank and in whatever order it is sampled. What is
    not of the step, such as an evaluation, is left as it is.
    """

    workload: ClassVar[workload.Workload]
    run_seed: int
    num_prompts: int

    @classmethod
    def start(cls, run: Launch[Config]) -> RolloutEngine:
        engine = super().start(run)
        assert isinstance(engine, ForcedLengths)
        engine.run_seed, engine.num_prompts = run.cfg.run.seed, run.cfg.rollout.prompts_per_step
        return engine

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        lengths = self._lengths(step=self.version + 1)
        return super().generate(
            _forced(request, lengths.get(request.seed)) if request else None for request in requests
        )

    def _lengths(self, *, step: int) -> dict[int, int]:
        """The length of each response of a step, by its request's seed."""
        lengths = workload.response_lengths(self.workload, step, num_prompts=self.num_prompts)
        first_prompt = (step - 1) * self.num_prompts  # of the stream
        return {
            rollout_seed(
                self.run_seed, step, first_prompt + place // workload.GROUP_SIZE, place % workload.GROUP_SIZE
            ): n
            for place, n in enumerate(lengths)
        }


def _forced(request: Request, length: int | None) -> Request:
    if length is None:
        return request
    return dataclasses.replace(request, max_response_tokens=length, stop_token_ids=frozenset())


class FixedLengths(ForcedLengths):
    """Workload W's `fixed`."""

    workload = "fixed"


class TailLengths(ForcedLengths):
    """Workload W's `tail`."""

    workload = "tail"
