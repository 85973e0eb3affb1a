"""Which engine `rollout.engine` names, and who samples with it; or that rollouts are read from files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from spmdrl.config import Config
from spmdrl.config.plan import Plan
from spmdrl.data.stream import PromptStream
from spmdrl.dist.mesh import Meshes
from spmdrl.dist.session import World
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.engine.receive import ListeningTorchEngine
from spmdrl.engine.restart import Restarts
from spmdrl.engine.sglang.layout import Share, held_weights
from spmdrl.engine.torch_engine import TorchEngine, check_model
from spmdrl.faults.stop_request import StopRequest
from spmdrl.model.load import compute_dtype
from spmdrl.model.operators import kernel_of_run
from spmdrl.refit.digest import digest
from spmdrl.rewards.client import Pending
from spmdrl.rollout.from_files import NoEngine, RecordedSampler, check_recorded
from spmdrl.rollout.remote import RemoteEngine, RemoteSampler, engine_leaders
from spmdrl.rollout.sampler import LocalSampler, Sampler
from spmdrl.types import Prompt, Rollout, UserError


def check_engine(
    cfg: Config, model_config: Any, stop_token_ids: frozenset[int] | None, *, num_ranks: int, device_type: str
) -> None:
    """Raise UserError, a line for each problem, when the engine could not be started, or would not do what is asked.

    `stop_token_ids` are those that end a response, None when they could not be found.
    """
    if cfg.debug.load_rollouts is not None:
        return check_recorded(cfg)
    if cfg.rollout.engine == "torch":
        return check_model(model_config)
    from spmdrl.engine.sglang.options import sglang_problems

    problems = sglang_problems(cfg, model_config, stop_token_ids, num_ranks=num_ranks, device_type=device_type)
    if sentences := list(problems):
        raise UserError("\n".join(sentences))


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

    On ranks that hold none: what stands for the engines of other ranks.
    `tell` gets what the user should know and can do without. Raises UserError when refits could not reach the engine.
    """
    if cfg.debug.load_rollouts is not None:
        return NoEngine(world.device)
    if not meshes.samples:
        return _remote_engine(cfg, model_config, plan, world, meshes)
    if cfg.rollout.engine == "sglang":
        # Here, not above: whoever uses the other engine need not have installed it.
        from spmdrl.engine.sglang.engine import SGLangEngine
        from spmdrl.engine.sglang.options import launch_options
        from spmdrl.engine.sglang.receive import ListeningSGLangEngine
        from spmdrl.engine.sglang.transport import choose_transport

        if meshes.weights is not None:
            return ListeningSGLangEngine(launch_options(cfg, plan, world), meshes, model_config=model_config)
        transport = choose_transport(cfg, model_config, world.device, meshes.training, tell=tell)
        return SGLangEngine(
            launch_options(cfg, plan, world),
            meshes.engine,
            model_config=model_config,
            transport=transport,
        )
    dtype = compute_dtype(cfg.model.compute_dtype, world.device.type)
    settings: dict[str, Any] = {
        "device": world.device,
        "dtype": dtype,
        "kernel": kernel_of_run(cfg, world.device.type, dtype),
        "max_running": cfg.rollout.max_running,
    }
    if meshes.weights is not None:
        return ListeningTorchEngine(model_config, meshes.weights, **settings)
    return TorchEngine(model_config, **settings, release=cfg.offload.engine)


def _remote_engine(cfg: Config, model_config: Any, plan: Plan, world: World, meshes: Meshes) -> RemoteEngine:
    if cfg.rollout.engine == "sglang":
        from spmdrl.engine.sglang.process import digest as sglang_digest
        from spmdrl.engine.sglang.receive import sending_group

        shares = [
            Share.of(
                model_config,
                rank=rank,
                size=cfg.rollout.tp_size,
                device_type=world.device.type,
                on_policy=cfg.true_on_policy,
            )
            for rank in range(cfg.rollout.tp_size)
        ]
        return RemoteEngine(
            plan,
            meshes,
            naming="checkpoint",
            group=sending_group(plan, meshes),
            digests=lambda whole: [
                {name: sglang_digest(held) for name, held in held_weights(whole, share).items()} for share in shares
            ],
            device=world.device,
        )
    assert meshes.weights is not None
    sends = meshes.weights.get_coordinate() is not None
    return RemoteEngine(
        plan,
        meshes,
        naming="model",
        group=meshes.weights.get_group() if sends else None,
        digests=lambda whole: [{name: digest(tensor) for name, tensor in whole.items()}],
        device=world.device,
    )


def start_sampler(
    cfg: Config,
    plan: Plan,
    engine: RolloutEngine,
    submit: Callable[[Rollout], Pending],
    prompts: PromptStream,
    held_out: Sequence[Prompt],
    stop_token_ids: frozenset[int],
    meshes: Meshes,
    *,
    tell: Callable[[str], None],
    heed: Callable[[StopRequest | None], None],
    restarts: Restarts,
) -> Sampler:
    """Who samples for this rank, which trains: its own engine, those of other ranks, or a run before this one. See
    `LocalSampler`, `RemoteSampler` and `RecordedSampler`."""
    if cfg.debug.load_rollouts is not None:
        return RecordedSampler(cfg, plan, meshes.training)
    if meshes.samples:
        return LocalSampler(
            cfg, plan, engine, submit, prompts, held_out, stop_token_ids, meshes, tell=tell, restarts=restarts
        )
    return RemoteSampler(plan, engine_leaders(plan, ranks_per_engine=cfg.rollout.tp_size), meshes, tell=tell, heed=heed)
