"""One engine's part of a step: the prompt groups that it samples, by which rules, and which of them it accepts."""

from __future__ import annotations

import concurrent.futures
import math
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from spmdrl.config import Config
from spmdrl.config.plan import Plan
from spmdrl.data.stream import PromptStream
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.engine.start import Restarts
from spmdrl.rewards.client import Pending
from spmdrl.rollout.clock import TOKENS_PER_TICK, TokenClock
from spmdrl.rollout.concurrent_eval import HeldOutAnswers
from spmdrl.rollout.curriculum import IN_ORDER, InOrder, Success
from spmdrl.rollout.env_context import EnvContext
from spmdrl.rollout.episode import Episode
from spmdrl.rollout.group import PromptGroup
from spmdrl.rollout.sampling import Sampling
from spmdrl.rollout.scheduler import POLL_S, EpisodeScheduler, RestoreImages
from spmdrl.rollout.tickets import Tickets
from spmdrl.types import Rollout


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectionRules:
    """Rules for opening, accepting and dropping the prompt groups of a step."""

    groups_per_step: int  # wanted, over all engines
    extra_groups: int = 0  # open at the same time beyond those
    oldest_first: bool = False  # steps train on the prompts in the order of the stream
    max_groups: int  # opened in a step at most, over all engines
    drops_equal: bool = False  # groups with equal rewards are replaced
    awaits_rewards: bool = False  # engines sample on until the rewards of the step are there
    carries_over: bool = False  # unfinished groups continue in the next step
    max_staleness: int = 1  # steps, of a group that is trained on
    steps_ahead: int = 0  # steps that may be sampled before the update of an earlier one
    refit_after: int | None = None  # tokens of each row before a refit in flight, by the virtual clock
    with_baseline: bool = False  # a group has a greedy response for its rewards to be compared with
    chooses_prompts: bool = False  # by a curriculum
    has_rewards: bool = True  # False where only teachers say what is better
    rewards_are_whole: bool = True  # when they are computed; else terms are added once a step has its groups
    in_order: bool = False  # nothing depends on how long environments take
    max_open: int | None = None  # episodes of an engine that are open at once

    @property
    def can_be_stale(self) -> bool:
        """True when tokens may come from older weights than those that are updated with them."""
        return self.carries_over or self.steps_ahead > 0

    @property
    def prompts_follow_from_step(self) -> bool:
        """True when every step uses exactly the prompts it wants, so that the step number alone gives them."""
        return not self.drops_equal and not self.extra_groups and not self.chooses_prompts


def training_rules(cfg: Config, plan: Plan) -> CollectionRules:
    """The rules that the settings give for groups to train on."""
    return CollectionRules(
        groups_per_step=plan.prompts_per_step,
        extra_groups=plan.extra_groups,
        oldest_first=cfg.rollout.oldest_first,
        max_groups=plan.max_groups,
        drops_equal=cfg.rollout.dynamic_sampling,
        awaits_rewards=cfg.rollout.oldest_first and plan.extra_groups > 0 and not cfg.run.deterministic,
        carries_over=cfg.rollout.partial and plan.extra_groups > 0,
        max_staleness=cfg.rollout.max_staleness,
        steps_ahead=plan.steps_ahead,
        refit_after=math.ceil(cfg.rollout.refit_after / TOKENS_PER_TICK) * TOKENS_PER_TICK,
        with_baseline=cfg.advantage.compares_with_greedy,
        chooses_prompts=cfg.data.curriculum is not None,
        has_rewards=cfg.reward.has_any,
        rewards_are_whole=not cfg.reward.group_terms,
        in_order=cfg.run.deterministic,
        max_open=cfg.environment.max_open if cfg.environment else None,
    )


@dataclass(frozen=True, slots=True)
class EnginePlace:
    """This rank's engine, and its place among all engines of the run."""

    engine: RolloutEngine
    index: int
    count: int
    mesh: DeviceMesh  # all ranks that hold engines
    restarts: Restarts


@dataclass(frozen=True, slots=True)
class GroupSource:
    """The source of prompt groups, and the destination of their finished rollouts."""

    prompts: PromptStream
    sampling: Sampling
    run_seed: int
    submit: Callable[[Rollout], Pending]  # starts to compute a rollout's reward
    env_context: EnvContext | None = None  # of episodes with an environment
    restore_images: RestoreImages | None = None  # called with the prompt of each request; None: there are no images
    curriculum: InOrder = IN_ORDER  # which prompts are taken


@dataclass(frozen=True, slots=True)
class PartSummary:
    """One rank's part, as the other ranks need to know it."""

    accepted: list[int]  # prompt ids
    num_dropped: int
    num_failed: int  # rewards of the dropped groups that could not be computed
    opened: dict[int, int]  # by prompt id: the engine's clock when it was opened
    num_tokens: int  # of the engine's clock when it paused; 0 where it advances none
    started: list[int]  # episodes, by part of the step
    refit_at: int | None  # of the same clock at the refit in flight; None: there was none
    version: int  # of the weights
    tickets_end: int  # one past the highest ticket taken, 0 when there was none
    left: list[int]  # prompt ids
    rates: Sequence[Success] = ()  # that a curriculum reads


class EnginePart:
    """One engine's work in one step."""

    def __init__(
        self,
        place: EnginePlace,
        source: GroupSource,
        rules: CollectionRules,
        tickets: Tickets,
        *,
        open_group: Callable[[int], PromptGroup],
        carried: Sequence[PromptGroup],
        is_due: Callable[[PromptGroup], bool],
        clock: TokenClock,
        held_out: HeldOutAnswers,
    ) -> None:
        """`is_due` says of a group whether the step may train on it. `held_out` is sampled alongside the groups."""
        self.accepted: list[PromptGroup] = []
        self.dropped: list[PromptGroup] = []
        self.opened: dict[int, int] = {}  # by prompt_id: the engine's clock when it was opened
        self.started: list[int] = []  # episodes, by part of the step: before a refit in flight, and after it
        self.tickets_end = 0
        self.num_continued = sum(bool(episode.responses) for group in carried for episode in group.unfinished)
        self._engine, self._source, self._rules = place.engine, source, rules
        self._scheduler = EpisodeScheduler(
            place.engine, restore_images=source.restore_images, in_order=rules.in_order, max_open=rules.max_open
        )
        self._tickets, self._open_group, self._is_due, self._clock = tickets, open_group, is_due, clock
        self._held_out = held_out
        # Groups that this engine samples at the same time, at most; those that only wait for a reward do not count.
        # The engine asks for requests only as it has room. But an engine with room for every group would take all
        # tickets before another took its first, so none has more than its share open at once.
        self._max_open = math.ceil((rules.groups_per_step + rules.extra_groups) / place.count)
        # By prompt_id; a group moves from one to the next, and is then accepted or dropped.
        self._unfinished = {prompt_id_of(group): group for group in carried if not group.is_sampled}
        self._undecided = {prompt_id_of(group): group for group in carried if group.is_sampled}

    @property
    def has_environments(self) -> bool:
        """True when this engine's episodes have environments."""
        return self._source.env_context is not None

    @property
    def idle_s(self) -> float:
        """Seconds in which the engine had nothing to do but to wait for environments."""
        return self._scheduler.idle_s

    @property
    def left(self) -> list[PromptGroup]:
        """The groups that were still open when the step had enough."""
        return [*self._unfinished.values(), *self._undecided.values()]

    def sample(self) -> None:
        """Sample until the step has enough groups, or can get no more, and each of this engine's is decided; with a
        refit in flight, first until that is due or nothing is left to sample.

        It can be called again after an interruption: responses that died with an engine are requested once more.
        """
        if self._engine.leads:
            with self._clocked(), self._stopped_in_time():
                self._scheduler.run(self._counted(), self._add, wait=self._wait)
        while not self._is_over() and any(map(self._is_due, self._undecided.values())):
            self._wait()

    def summary(self, rates: Sequence[Success] = ()) -> PartSummary:
        """Summarize this part for the other ranks, with the success rates of its groups."""
        return PartSummary(
            accepted=[prompt_id_of(group) for group in self.accepted],
            num_dropped=len(self.dropped),
            num_failed=sum(group.num_failed for group in self.dropped),
            opened=self.opened,
            num_tokens=self._clock.num_tokens,
            started=self.started,
            refit_at=self._clock.refit_at,
            version=self._engine.version,
            tickets_end=self.tickets_end,
            left=[prompt_id_of(group) for group in self.left],
            rates=rates,
        )

    def _counted(self) -> Iterator[Episode | None]:
        """Count the episodes that are started. Those of an evaluation, which are not counted, come after groups that
        continue and before new ones."""
        limit = self._clock.num_to_begin(len(self.started))
        self.started.append(0)
        held_out = self._held_out.episodes
        num_carried = sum(len(group.unfinished) for group in self._unfinished.values())
        for episode in self._episodes() if limit != 0 else ():
            if self.started[-1] >= num_carried:
                yield from held_out
                held_out = []
            self._held_out.deliver()
            self.started[-1] += episode is not None
            yield episode
            if self.started[-1] == limit:
                break
        yield from held_out
        while self._held_out.is_due:  # the last reward arrives between two episodes, or long after them
            yield None
            self._held_out.deliver()

    def _episodes(self) -> Iterator[Episode | None]:
        """Yield episodes as long as there are more: of groups that continue, then of those that this engine opens."""
        for group in list(self._unfinished.values()):
            if self._is_over():
                return
            yield from group.unfinished
        while not self._is_over():
            if self._tickets.is_interrupted():
                return
            if len(self._unfinished) < self._max_open and (ticket := self._tickets.take()) is not None:
                self.tickets_end = ticket + 1
                group = self._open_group(ticket)
                self.opened[prompt_id_of(group)] = self._clock.num_tokens
                self._unfinished[prompt_id_of(group)] = group
                yield from group.unfinished
            elif self._tickets.is_empty() and not self._rules.awaits_rewards:
                return
            else:
                yield None

    def _add(self, episode: Episode) -> None:
        if episode in self._held_out:
            self._held_out.add(episode)
            self._tickets.note_evaluation()
            if self._is_over() and self._unfinished:
                self._scheduler.stop()
            return
        group = self._unfinished[episode.prompt.prompt_id]
        group.pending[episode.sample_index] = self._source.submit(episode.rollout())
        if group.is_sampled:
            self._undecided[prompt_id_of(group)] = self._unfinished.pop(prompt_id_of(group))
            # At once, not in the thread that watches: what this engine samples after its last group is wasted.
            if self._is_over() and self._unfinished:
                self._scheduler.stop()

    def _is_over(self) -> bool:
        """Accept or drop the groups that can be decided; return True when the engine pauses."""
        needs_rewards = self._rules.drops_equal or self._rules.awaits_rewards
        for prompt_id, group in list(self._undecided.items()):
            if not self._is_due(group) or (needs_rewards and not group.is_rewarded):
                continue
            if self._rules.drops_equal and group.has_equal_rewards:
                self._tickets.drop()
                self.dropped.append(self._undecided.pop(prompt_id))
            elif self._tickets.accept():
                self.accepted.append(self._undecided.pop(prompt_id))
            else:
                break
        return self._must_pause()

    def _must_pause(self) -> bool:
        """Return True when the step has enough groups, or its refit in flight is due. Any thread may call this."""
        if self._held_out.is_sampling:
            return False
        return self._clock.is_refit_due if self._clock.awaits_refit else self._tickets.is_over()

    def _wait(self, others: Collection[Future[Any]] = ()) -> None:
        """Wait until a reward or one of `others` arrives, or until other engines may have changed what this one may
        do."""
        self._held_out.deliver()
        rewards = [future for group in self._undecided.values() for _, future in group.pending.values()]
        if missing := [*(future for future in rewards if not future.done()), *others]:
            concurrent.futures.wait(missing, timeout=POLL_S, return_when=concurrent.futures.FIRST_COMPLETED)
        else:
            time.sleep(POLL_S)

    @contextmanager
    def _clocked(self) -> Iterator[None]:
        """Let the engine count by the step's clock; what it samples alongside, such as evaluations, counts by none."""
        self._engine.clock = self._clock
        try:
            yield
        finally:
            self._engine.clock = None

    @contextmanager
    def _stopped_in_time(self) -> Iterator[None]:
        """With more groups open than wanted, end the engine's work as soon as any engine has accepted the last one, and
        before that for a refit in flight, by the real clock.

        A thread watches for that: this rank checks again only after a response, and that may be the slowest one.
        """
        if self._clock.is_virtual or not (self._rules.extra_groups or self._clock.awaits_refit):
            yield
            return
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(POLL_S):
                if self._must_pause():
                    self._scheduler.stop()

        watcher = threading.Thread(target=watch, name="collect", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


def prompt_id_of(group: PromptGroup) -> int:
    return group.prompt.prompt_id
