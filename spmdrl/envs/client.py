"""This rank's environments: many open episodes on few processes; failures are values."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from types import TracebackType

from spmdrl.config import EnvironmentConfig
from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.envs.protocol import Answer, MetricNames
from spmdrl.envs.session import EnvSession
from spmdrl.envs.supervisor import EnvWorkerSupervisor
from spmdrl.types import UserError
from spmdrl.workers.folders import sweep
from spmdrl.workers.process import START_LIMIT_S, all_loaded, process_variables, sandbox_hint


class EnvironmentClient:
    """Runs environments in `environment.num_workers` processes.

    UserError if their source cannot be loaded. Close it, or use it in a `with` statement.
    """

    def __init__(self, cfg: EnvironmentConfig) -> None:
        self._cfg = cfg
        self._lock = threading.Lock()  # of the keepers' numbers of open environments
        self._num_opened = 0
        sweep()
        variables = process_variables(cfg.sandbox)
        names = MetricNames()
        self._keepers = [EnvWorkerSupervisor(cfg, variables, names) for _ in range(cfg.num_workers)]
        try:
            starts = [keeper.loaded for keeper in self._keepers]
            *_, loaded = all_loaded(starts, "environment.source", [cfg.source], limit_s=START_LIMIT_S)
        except BaseException:
            self.close()
            raise
        self.tools = loaded.tools  # JSON schemas, as chat templates take them
        self.unprotected = loaded.unprotected  # what the sandbox cannot stop on this machine

    def __enter__(self) -> EnvironmentClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def check(self, start: EpisodeStart) -> Observation:
        """Begin an episode and end it. Raises UserError, with the environment's traceback, if that fails."""
        opened = self.open(start)
        answer = opened.reset().result()
        opened.close()
        if isinstance(answer, Observation):
            if answer.done:
                raise UserError("the environment's first reset returned done, so that there is nothing to act in")
            return answer
        if answer.kind == "timeout":
            raise UserError(
                f"the environment's first reset took more than environment.step_timeout_s = "
                f"{self._cfg.step_timeout_s:g} seconds"
            )
        where = f"first reset failed{sandbox_hint('environment', self._cfg.sandbox)}"
        raise UserError(f"the environment's {where}: {answer.reason}\n{answer.traceback}".rstrip())

    def open(
        self,
        start: EpisodeStart,
        history: Sequence[tuple[Action, Observation]] = (),
        greeting: Observation | None = None,
    ) -> OpenEnvironment:
        """Open the environment of an episode, in the process that has fewest.

        With a greeting, the answer to its reset, it is played again up to the end of its history. If that does not
        give the same observations, the next request fails.
        """
        assert greeting is not None or not history, "an episode begins with a reset"
        log = [] if greeting is None else [(None, greeting), *history]
        with self._lock:
            keeper = min(self._keepers, key=lambda keeper: keeper.num_open)
            keeper.num_open += 1
            self._num_opened += 1
            held = EnvSession(self._num_opened, start, log)
        return OpenEnvironment(held, keeper, functools.partial(self._release, keeper))

    def close(self) -> None:
        """End the processes. What is asked gets the failure "closed"."""
        for keeper in self._keepers:
            keeper.stop()
        for keeper in self._keepers:
            keeper.join()

    def _release(self, keeper: EnvWorkerSupervisor) -> None:
        with self._lock:
            keeper.num_open -= 1


class OpenEnvironment:
    """The environment of one episode, asked one thing at a time. Its futures never raise."""

    def __init__(self, held: EnvSession, keeper: EnvWorkerSupervisor, release: Callable[[], None]) -> None:
        """`release` is called once, when it is closed."""
        self._held, self._keeper, self._release = held, keeper, release
        self._is_closed = False
        keeper.post(held, lambda: None)  # what has a history is played again from now on

    def reset(self) -> Future[Answer]:
        """Begin the episode."""
        return self._ask(None)

    def step(self, action: Action) -> Future[Answer]:
        """Ask for the answer to an action."""
        return self._ask(action)

    def close(self) -> None:
        """End the episode and free the environment. What is asked gets the failure "closed"."""
        if not self._is_closed:
            self._is_closed = True
            self._release()
            self._keeper.post(self._held, self._held.close)

    def _ask(self, action: Action | None) -> Future[Answer]:
        future: Future[Answer] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel it: its result is set by another thread
        self._keeper.post(self._held, functools.partial(self._held.ask, action, future))
        return future
