"""Training with an engine that disagrees: its weights carry noise, anew after every refit.

    torchrun --nproc-per-node 2 benchmarks/mismatch.py NOISE CONFIG.toml [section.key=value ...]

NOISE is the noise's deviation over that of each parameter. The engine's log-probabilities are those of the weights it
samples with, so that `mismatch/...` shows the disagreement and `[correction]` can correct it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

import torch

from spmdrl import train
from spmdrl.rollout import start
from spmdrl.rollout.torch_engine import TorchEngine
from spmdrl.types import Request, Response

NOISE = float(sys.argv[1])


class NoisyEngine(TorchEngine):
    """The torch engine, which perturbs what a refit has brought, after the refit was found to be right."""

    clean = False

    def end_update(self) -> None:
        super().end_update()
        self.clean = True

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        if self.clean:
            self._perturb()
        return super().generate(requests)

    @torch.no_grad()
    def _perturb(self) -> None:
        draw = torch.Generator().manual_seed(self.version)  # the same on every rank
        for weight in self.weights().values():
            if weight.dim() > 1:
                noise = torch.randn(weight.shape, generator=draw).to(weight)
                weight.add_(noise, alpha=NOISE * float(weight.std()))
        self.clean = False


if __name__ == "__main__":
    start.TorchEngine = NoisyEngine  # the one place that makes the engine
    sys.exit(train.main(sys.argv[2:]))
