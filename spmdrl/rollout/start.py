"""Start what collects rollouts on this rank: with its own engine, from the engines of other ranks, or from files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spmdrl import checkpoint
from spmdrl.config import Config
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.engine.start import Restarts, engine_problems
from spmdrl.rollout.files import RecordedSampler, recording_problems
from spmdrl.rollout.remote import RemoteSampler
from spmdrl.rollout.sampler import LocalSampler, Sampler
from spmdrl.run import Launch


def sampling_problems(
    cfg: Config, model_config: Any, stop_token_ids: frozenset[int] | None, *, num_ranks: int, device_type: str
) -> Iterator[str]:
    """Yield a sentence for each reason why the run could not sample, or read, what the settings say.

    `stop_token_ids` end a response; None when they could not be found.
    """
    if cfg.debug.load_rollouts is not None:
        return recording_problems(cfg)
    return engine_problems(cfg, model_config, stop_token_ids, num_ranks=num_ranks, device_type=device_type)


def start_sampler(run: Launch[Config], engine: RolloutEngine, restarts: Restarts) -> Sampler:
    """Start the sampler of a rank that trains, where the run begins."""
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
