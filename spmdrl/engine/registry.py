"""The engine that the settings name: its class, what keeps it from starting, and its start on each rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spmdrl.config import Config
from spmdrl.config.engines import ENGINES, engine_name_problems, load_engine
from spmdrl.config.rules import engine_setting_problems
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.engine.remote import NoEngine
from spmdrl.run import Launch
from spmdrl.types import UserError


def engine_class(name: str) -> type[RolloutEngine]:
    """Load the class that `rollout.engine` names. Raises UserError when there is none."""
    found = load_engine(name)
    if not (isinstance(found, type) and issubclass(found, RolloutEngine)):
        raise UserError(f'rollout.engine = "{name}" is not a subclass of spmdrl.engine.protocol.RolloutEngine')
    if missing := sorted(found.__abstractmethods__):
        raise UserError(f'rollout.engine = "{name}" lacks {" and ".join(missing)}, which every engine defines')
    return found


def engine_problems(
    cfg: Config, model_config: Any, stop_token_ids: frozenset[int] | None, *, num_ranks: int, device_type: str
) -> Iterator[str]:
    """Yield a sentence for each reason why the engine could not start or would not do what the settings say.

    `stop_token_ids` end a response; None when they could not be found.
    """
    if list(engine_name_problems(cfg.rollout.engine)):
        return  # a rule of the configuration has said so
    try:
        engine = engine_class(cfg.rollout.engine)
        if cfg.rollout.engine not in ENGINES:  # the rules of the configuration know the others
            yield from engine_setting_problems(cfg, engine.facts)
        yield from engine.problems(cfg, model_config, stop_token_ids, num_ranks=num_ranks, device_type=device_type)
    except UserError as error:
        yield from str(error).splitlines()


def start_engine(run: Launch[Config]) -> RolloutEngine:
    """Start this rank's engine, or join the ranks that share one; its weights are undefined until the first refit.

    A rank that holds no engine gets a stand-in for the engines of other ranks. Raises UserError when refits could not
    reach the engine.
    """
    if run.cfg.debug.load_rollouts is not None:
        return NoEngine(run.device)
    engine = engine_class(run.cfg.rollout.engine)
    if not run.meshes.samples:
        return engine.start_sender(run)
    return engine.start(run) if run.meshes.weights is None else engine.start_receiver(run)
