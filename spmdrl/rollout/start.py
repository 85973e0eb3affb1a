"""Which engine `rollout.engine` names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from spmdrl.config import Config
from spmdrl.dist.mesh import Meshes
from spmdrl.dist.session import World
from spmdrl.model.attention import choose_kernel
from spmdrl.model.load import compute_dtype
from spmdrl.plan import Plan
from spmdrl.rollout.engine import RolloutEngine
from spmdrl.rollout.torch_engine import TorchEngine
from spmdrl.types import UserError


def check_engine(cfg: Config, model_config: Any, *, num_ranks: int, device_type: str) -> None:
    """Raise UserError, a line for each problem, when the engine could not be started."""
    if cfg.rollout.engine == "torch":
        return
    from spmdrl.rollout.sglang_options import sglang_problems

    if problems := list(sglang_problems(cfg, model_config, num_ranks=num_ranks, device_type=device_type)):
        raise UserError("\n".join(problems))


def start_engine(
    cfg: Config,
    model_config: Any,
    plan: Plan,
    world: World,
    meshes: Meshes,
    *,
    tell: Callable[[str], None] = print,
) -> RolloutEngine:
    """Start this rank's engine, or join the ranks that share one; its weights are undefined until the first refit.

    `tell` gets what the user should know and can do without. Raises UserError when refits could not reach the engine.
    """
    if cfg.rollout.engine == "sglang":
        # Here, not above: whoever uses the other engine need not have installed it.
        from spmdrl.rollout.sglang_engine import SGLangEngine
        from spmdrl.rollout.sglang_options import launch_options
        from spmdrl.rollout.transport import choose_transport

        transport = choose_transport(cfg, model_config, world.device, meshes.data, tell=tell)
        return SGLangEngine(
            launch_options(cfg, plan, world),
            meshes.engine,
            model_config=model_config,
            transport=transport,
        )
    dtype = compute_dtype(cfg.model.compute_dtype, world.device.type)
    return TorchEngine(
        model_config,
        device=world.device,
        dtype=dtype,
        kernel=choose_kernel(cfg.model.attention, world.device.type, dtype),
        max_running=cfg.rollout.max_running,
        release=cfg.offload.engine,
    )
