"""Which engine `rollout.engine` names."""

from __future__ import annotations

from typing import Any

from spmdrl.config import Config
from spmdrl.dist.session import World
from spmdrl.model.attention import choose_kernel
from spmdrl.model.load import compute_dtype
from spmdrl.rollout.engine import RolloutEngine
from spmdrl.rollout.torch_engine import TorchEngine


def start_engine(cfg: Config, model_config: Any, world: World) -> RolloutEngine:
    """Start this rank's engine; its weights are undefined until the first refit."""
    dtype = compute_dtype(cfg.model.compute_dtype, world.device.type)
    return TorchEngine(
        model_config,
        device=world.device,
        dtype=dtype,
        kernel=choose_kernel(cfg.model.attention, world.device.type, dtype),
        max_running=cfg.rollout.max_running,
        release=cfg.offload.engine,
    )
