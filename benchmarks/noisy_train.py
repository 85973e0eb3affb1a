"""Training with an engine that disagrees: the weights that it samples with carry noise, anew in every step.

    torchrun --nproc-per-node 2 benchmarks/noisy_train.py NOISE CONFIG.toml [section.key=value ...]

NOISE is the deviation of the noise over that of each weight matrix. The engine's log-probabilities are those of the
weights it samples with, so that `mismatch/...` shows the disagreement and `[correction]` can correct it. Held-out
prompts are answered without noise: `eval/accuracy` is the policy's own. Without torchrun it is one rank.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from spmdrl import train
from spmdrl.engine.torch_engine import TorchEngine
from spmdrl.rollout import start
from spmdrl.rollout.collect import Collected
from spmdrl.rollout.sampler import LocalSampler


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


def noisy_sampler(noise: float) -> type[LocalSampler]:
    """A sampler that collects what is trained on with perturbed weights, and evaluates with exact ones."""

    class NoisySampler(LocalSampler):
        def collect(self, step: int) -> Collected:
            """See `Sampler.collect`."""
            assert isinstance(self._engine, TorchEngine), "only the embedded engine's weights can be perturbed in place"
            with perturbed(self._engine.weights, noise=noise, seed=self._engine.version):
                return super().collect(step)

    return NoisySampler


if __name__ == "__main__":
    start.LocalSampler = noisy_sampler(float(sys.argv[1]))  # the one place that makes the sampler
    sys.exit(train.main(sys.argv[2:]))
