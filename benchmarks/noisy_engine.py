"""An engine that disagrees: the weights that it samples with carry noise, anew after every refit.

    torchrun --nproc-per-node 2 -m spmdrl.train CONFIG.toml rollout.engine=benchmarks/noisy_engine.py:NoisyEngine

The engine's log-probabilities are those of the weights it samples with, so that `mismatch/...` shows the disagreement
and `[correction]` can correct it. Held-out prompts are answered without noise: `eval/accuracy` is the policy's own.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor

from spmdrl.algo.seeds import rollout_seed
from spmdrl.config import Config
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.run import Launch
from spmdrl.types import Request, Response


class NoisyEngine(TorchEngine):
    """Perturbs its weights while it samples what is trained on."""

    noise: ClassVar[float] = 0.4  # the deviation of the noise over that of each weight matrix
    held_out: frozenset[int]  # the seeds of requests for answers to held-out prompts

    @classmethod
    def start(cls, run: Launch[Config]) -> RolloutEngine:
        engine = super().start(run)
        assert isinstance(engine, NoisyEngine)
        samples = range(run.cfg.eval.samples_per_prompt if run.cfg.eval else 0)
        engine.held_out = frozenset(
            rollout_seed(run.cfg.run.seed, 0, prompt.prompt_id, sample)
            for prompt in run.inputs.held_out
            for sample in samples
        )
        return engine

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        remaining = iter(requests)
        first = next(filter(None, remaining), None)  # what comes together is all of a step, or all of an evaluation
        if first is None:
            return
        is_exact = first.seed in self.held_out
        with nullcontext() if is_exact else perturbed(self.weights, noise=self.noise, seed=self.version):
            yield from super().generate(itertools.chain([first], remaining))


@contextmanager
def perturbed(weights: Mapping[str, Tensor], *, noise: float, seed: int) -> Iterator[None]:
    """Add noise to all matrices for as long as the context lasts; the same noise on every rank."""
    exact = {name: weight.clone() for name, weight in weights.items() if weight.dim() > 1}
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in exact.items():
            drawn = torch.randn(weight.shape, generator=draw).to(weight)
            weights[name].add_(drawn, alpha=noise * float(weight.std()))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, weight in exact.items():
                weights[name].copy_(weight)
