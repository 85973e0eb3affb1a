"""The engine that the settings name: its class, what keeps it from starting, its start on each rank, and its restart
after a death (`rollout.restart_engine`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch.distributed.device_mesh import DeviceMesh

from spmdrl.config import Config
from spmdrl.config.engines import ENGINES, engine_name_problems, load_engine
from spmdrl.config.rules import engine_setting_problems
from spmdrl.dist.collectives import gather_objects, raise_on_all_ranks
from spmdrl.engine.protocol import EngineDied, RolloutEngine
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
        return  # a rule of the configuration has reported it
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


MAX_RESTARTS = 3  # of one piece of work: an error that kills an engine more often will not go away

T = TypeVar("T")


class Restarts:
    """Runs work on the engines of all ranks of a mesh, and repeats it when one of them dies."""

    def __init__(self, mesh: DeviceMesh, revive: Callable[[], None] | None, *, message: Callable[[str], None]) -> None:
        """`revive` restarts engines that have died and gives all engines their weights; without it a death ends the
        run. `message` shows the user a line."""
        self._mesh, self._revive, self._message = mesh, revive, message
        self._count = 0

    @property
    def wanted(self) -> bool:
        """True when the run continues after the death of an engine."""
        return self._revive is not None

    def carry(self, work: Callable[[], T], *, during: str, before_revival: Callable[[], None] = lambda: None) -> T:
        """Run `work`, which is local to this rank, and return its result; every rank must call this.

        After a death every rank repeats its work. `before_revival` runs on every rank when all have stopped and none
        has started again. Raises what `work` does; a UserError on every rank.
        """
        for attempt in range(MAX_RESTARTS + 1):
            death: EngineDied | None = None
            with raise_on_all_ranks(self._mesh):
                try:
                    result = work()
                except EngineDied as error:
                    if self._revive is None or attempt == MAX_RESTARTS:
                        raise
                    death = error
            if self._revive is None:
                return result
            deaths = [said for said in gather_objects(self._mesh, str(death) if death else None) if said]
            if not deaths:
                return result
            self._count += 1
            self._message(f"{during}: {'; '.join(deaths)}; it is started again")
            before_revival()
            self._revive()
        raise AssertionError("the last attempt returns or raises")

    def take_count(self) -> int:
        """Count the restarts since the last call; the same on every rank."""
        count, self._count = self._count, 0
        return count
