"""Refits of the embedded engine, compared weight by weight."""

from __future__ import annotations

import torch
from transformers import AutoConfig

from spmdrl.config import RefitConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import World, spmd_session
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.model.load import load_policy
from spmdrl.refit.refit import Refit
from tests.helpers.configs import model_config

Case = tuple[str, torch.dtype, int]  # a model's directory, the engine's dtype, bytes of a bucket


def refit_differences(*cases: Case) -> list[list[float]]:
    """Change every weight, refit, compare: for each case the largest difference of each of two refits."""
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        return [_differences(world, *case) for case in cases]


def _differences(world: World, path: str, dtype: torch.dtype, bucket_bytes: int) -> list[float]:
    meshes = build_meshes(world)
    policy = load_policy(model_config(path), meshes.model, temperature=1.0)
    engine = TorchEngine(
        AutoConfig.from_pretrained(path), device=world.device, dtype=dtype, kernel="sdpa", max_running=4
    )
    refit = Refit(policy, engine, meshes, RefitConfig(bucket_bytes=bucket_bytes, verify="every"), dtype=dtype)
    worst = []
    for version in (1, 2):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter.to_local().mul_(1.01).add_(0.001 * version)
        refit(version=version)
        assert engine.version == version
        held = engine.weights
        full = {name: parameter.full_tensor().detach() for name, parameter in policy.model.named_parameters()}
        assert held.keys() == full.keys()
        worst.append(max(float((held[name] != full[name].to(dtype)).sum()) for name in full))
    return worst
