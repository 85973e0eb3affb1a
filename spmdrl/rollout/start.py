"""Which engine `rollout.engine` names, and who samples with it; or that rollouts are read from files."""

from __future__ import annotations

from typing import Any

from spmdrl import checkpoint
from spmdrl.config import Config
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.engine.receive import ListeningTorchEngine
from spmdrl.engine.restart import Restarts
from spmdrl.engine.sglang.layout import Share, held_weights
from spmdrl.engine.torch_engine import TorchEngine, check_model
from spmdrl.refit.digest import digest
from spmdrl.rollout.from_files import NoEngine, RecordedSampler, check_recorded
from spmdrl.rollout.remote import RemoteEngine, RemoteSampler
from spmdrl.rollout.sampler import LocalSampler, Sampler
from spmdrl.run import Launch
from spmdrl.types import UserError


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


def start_engine(run: Launch[Config]) -> RolloutEngine:
    """Start this rank's engine, or join the ranks that share one; its weights are undefined until the first refit.

    A rank that holds no engine gets a stand-in for the engines of other ranks. Raises UserError when refits could not
    reach the engine.
    """
    cfg, world, meshes, model_config = run.cfg, run.world, run.meshes, run.inputs.model_config
    if cfg.debug.load_rollouts is not None:
        return NoEngine(world.device)
    if not meshes.samples:
        return _remote_engine(run)
    if cfg.rollout.engine == "sglang":
        # Here, not above: whoever uses the other engine need not have installed it.
        from spmdrl.engine.sglang.engine import SGLangEngine
        from spmdrl.engine.sglang.options import launch_options
        from spmdrl.engine.sglang.receive import ListeningSGLangEngine
        from spmdrl.engine.sglang.transport import choose_transport

        options = launch_options(cfg, run.plan, world)
        if meshes.weights is not None:
            return ListeningSGLangEngine(options, meshes, model_config=model_config)
        transport = choose_transport(cfg, model_config, world.device, meshes.training, message=run.report.message)
        return SGLangEngine(options, meshes.engine, model_config=model_config, transport=transport)
    settings: dict[str, Any] = {
        "device": world.device,
        "dtype": run.dtype,
        "kernel": run.kernel,
        "max_running": cfg.rollout.max_running,
    }
    if meshes.weights is not None:
        return ListeningTorchEngine(model_config, meshes.weights, **settings)
    return TorchEngine(model_config, **settings, release=cfg.offload.engine)


def _remote_engine(run: Launch[Config]) -> RemoteEngine:
    cfg, plan, meshes, device = run.cfg, run.plan, run.meshes, run.device
    if cfg.rollout.engine == "sglang":
        from spmdrl.engine.sglang.process import digest as sglang_digest
        from spmdrl.engine.sglang.receive import sending_group

        shares = [
            Share.of(
                run.inputs.model_config,
                rank=rank,
                size=cfg.rollout.tp_size,
                device_type=device.type,
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
            device=device,
        )
    assert meshes.weights is not None
    sends = meshes.weights.get_coordinate() is not None
    return RemoteEngine(
        plan,
        meshes,
        naming="model",
        group=meshes.weights.get_group() if sends else None,
        digests=lambda whole: [{name: digest(tensor) for name, tensor in whole.items()}],
        device=device,
    )


def start_sampler(run: Launch[Config], engine: RolloutEngine, restarts: Restarts) -> Sampler:
    """The sampler of a rank that trains, ready to go on where the run begins: with its own engine, with those of other
    ranks, or from files."""
    sampler: Sampler
    if run.cfg.debug.load_rollouts is not None:
        sampler = RecordedSampler(run.cfg, run.plan, run.meshes.training)
    elif run.meshes.samples:
        sampler = LocalSampler(run, engine, restarts, message=run.report.message)
    else:
        sampler = RemoteSampler(run)
    step = run.resume_point.step
    sampler.restore(checkpoint.collector_state(run.resume_point.folder, step=step), step=step)
    return sampler
