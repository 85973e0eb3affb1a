"""The rollouts of a step: which prompt groups are drawn, by which engine, and which of them are trained on.

Every engine draws tickets (`rollout/tickets.py`) as it has room. Ticket t of a step is one prompt of the stream, and
seeds belong to the prompt and the sample, so nothing that is sampled depends on who drew it.
"""

from __future__ import annotations

import concurrent.futures
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.algo.metrics import Max, Mean, Metrics, Total
from spmdrl.config import Config
from spmdrl.config.plan import Plan
from spmdrl.data.stream import PromptStream
from spmdrl.dist.collectives import gather_objects
from spmdrl.engine.protocol import EngineDied, RolloutEngine
from spmdrl.engine.restart import Restarts
from spmdrl.rewards.client import Pending
from spmdrl.rollout.group import PromptGroup
from spmdrl.rollout.sample import Sampling
from spmdrl.rollout.tickets import SharedTickets, StaticTickets, Tickets
from spmdrl.types import Prompt, Request, Response, Rollout, UserError

POLL_S = 0.1  # how soon an engine sees what others have done


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    """How the prompt groups of a step are chosen, and what belongs to one beside the rollouts to be trained on."""

    groups_per_step: int  # wanted, over all engines
    extra_groups: int = 0  # open at the same time beyond those
    max_draws: int  # over all engines
    drops_equal: bool = False  # whether groups with equal rewards are replaced
    carries_over: bool = False  # whether unfinished groups go on in the next step
    max_staleness: int = 1  # steps, of a group that was carried over
    steps_ahead: int = 0  # steps that may be sampled before the update of an earlier one
    with_baseline: bool = False  # whether a group has a greedy response for its rewards to be compared with

    @property
    def can_be_stale(self) -> bool:
        """Whether tokens may come from older weights than those that are updated with them."""
        return self.carries_over or self.steps_ahead > 0

    @property
    def moves_by_plan(self) -> bool:
        """Whether every step uses exactly the prompts it wants, so that the step alone says which."""
        return not self.drops_equal and not self.extra_groups


def training_drawing(cfg: Config, plan: Plan) -> Drawing:
    """The prompt groups to learn from."""
    return Drawing(
        groups_per_step=plan.prompts_per_step,
        extra_groups=plan.extra_groups,
        max_draws=plan.max_groups,
        drops_equal=cfg.rollout.dynamic_sampling,
        carries_over=cfg.rollout.partial,
        max_staleness=cfg.rollout.max_staleness,
        steps_ahead=plan.steps_ahead,
        with_baseline=cfg.advantage.compares_with_greedy,
    )


@dataclass(frozen=True, slots=True)
class Collected:
    """This rank's part of what a step is trained on."""

    pending: list[Pending]  # whole groups, in order; baselines are among them
    metrics: Metrics
    places: Mapping[int, int]  # of every rank's groups in the step's global order, by prompt_id
    group_size: int
    probes: Sequence[Rollout] = ()  # this rank's answers to the probe's prompts

    def index_of(self, rollout: Rollout) -> int:
        """The rollout's place in the step's global order, where a baseline has none."""
        assert not rollout.is_baseline, "a greedy response is not trained on"
        return self.places[rollout.prompt.prompt_id] * self.group_size + rollout.sample_index


@dataclass(frozen=True, slots=True)
class _Summary:
    """What all ranks must know of one rank's part."""

    kept: list[int]  # prompt ids
    num_dropped: int
    num_failed: int  # rewards of those
    num_drawn: int
    tickets_end: int  # one past the highest ticket drawn, 0 when there was none
    num_left: int


@dataclass(frozen=True, slots=True)
class _Place:
    """Where sampling is between two steps."""

    cursor: int = 0  # the first prompt of the stream that no step has used
    carried: tuple[PromptGroup, ...] = ()  # this rank's groups that go on in the next step; they stay as they are
    num_carried: int = 0  # over all ranks


class Collector:
    """Collects the rollouts of step after step; between steps it holds the groups that go on in the next.

    Every rank has one and calls its methods together with the others; only ranks whose engine leads draw groups.
    With a `store` tickets are shared through it; without one they are split beforehand.
    """

    def __init__(
        self,
        engine: RolloutEngine,
        submit: Callable[[Rollout], Pending],
        prompts: PromptStream,
        sampling: Sampling,
        drawing: Drawing,
        mesh: DeviceMesh,
        *,
        store: Store | None,
        engine_index: int,
        num_engines: int,
        run_seed: int,
        message: Callable[[str], None],
        restarts: Restarts,
    ) -> None:
        """`submit` starts the scoring of a finished rollout; `message` shows the user a line."""
        self._engine, self._submit, self._prompts = engine, submit, prompts
        self._sampling, self._drawing, self._mesh, self._store = sampling, drawing, mesh, store
        self._engine_index, self._num_engines = engine_index, num_engines
        self._run_seed, self._message, self._restarts = run_seed, message, restarts
        self._after = {0: _Place()}  # by step: the last that was collected, and the one before

    def collect(self, step: int) -> Collected:
        """Sample the step's prompt groups and start their scoring; every rank must call this."""
        drawing, before = self._drawing, self._after[step - 1]
        first = (step - 1) * drawing.groups_per_step if drawing.moves_by_plan else before.cursor
        tickets = self._tickets(step, before.num_carried)
        stale = [group for group in before.carried if _staleness(group, step) > drawing.max_staleness]

        def fresh(prompt: Prompt) -> PromptGroup:
            return PromptGroup.drawn(
                prompt,
                step=step,
                run_seed=self._run_seed,
                group_size=self._sampling.group_size,
                with_baseline=drawing.with_baseline,
            )

        part = _Part(
            self._engine,
            self._submit,
            self._sampling,
            drawing,
            tickets,
            draw=lambda ticket: fresh(self._prompts.take(first + ticket, 1)[0]),
            carried=[fresh(group.prompt) if group in stale else group.copy() for group in before.carried],
            max_open=self._max_open(),
        )
        self._sample(part, tickets, step)
        summaries = gather_objects(self._mesh, part.summary())
        if self._engine.leads and self._engine_index == 0:
            tickets.close()

        now = _Place(
            cursor=first + max(summary.tickets_end for summary in summaries),
            carried=tuple(sorted(part.left, key=_prompt_id)) if drawing.carries_over else (),
            num_carried=sum(summary.num_left for summary in summaries) if drawing.carries_over else 0,
        )
        self._after = {step - 1: before, step: now}
        if shortfall := _shortfall(step, summaries, drawing):
            self._message(shortfall)
        kept = sorted(part.kept, key=_prompt_id)
        everyones = sorted(prompt_id for summary in summaries for prompt_id in summary.kept)
        return Collected(
            pending=[pending for group in kept for pending in group.scored_rollouts()],
            metrics=_metrics(part, stale, drawing, step=step, speaks_for_all=self._mesh.get_local_rank() == 0),
            places={prompt_id: place for place, prompt_id in enumerate(everyones)},
            group_size=self._sampling.group_size,
        )

    def _sample(self, part: _Part, tickets: Tickets, step: int) -> None:
        """Sample this rank's part, so that an engine whose part ends early keeps no other waiting."""

        def sample() -> None:
            try:
                part.sample()
            except EngineDied:
                tickets.interrupt() if self._restarts.wanted else tickets.cancel()
                raise
            except BaseException:
                tickets.cancel()
                raise

        self._restarts.carry(sample, during=f"step {step}", before_revival=tickets.resume)

    def state(self, step: int) -> dict[str, Any]:
        """What a checkpoint must hold to go on after `step`, the last that was collected or the one before, in JSON's
        types, the same on every rank; every rank must call this."""
        place = self._after[step]
        groups = gather_objects(self._mesh, [group.as_json() for group in place.carried])
        carried = sorted((group for part in groups for group in part), key=lambda group: group["prompt_id"])
        return {"cursor": place.cursor, "sampling": self._shared_settings(), "carried": carried}

    def restore(self, saved: Mapping[str, Any] | None, *, step: int) -> None:
        """Go on after `step` from a saved state; None when none was saved, which is as if every step so far had used
        the prompts it wanted. Raises UserError when the settings no longer fit the groups that go on."""
        if saved is None:
            self._after = {step: _Place(cursor=step * self._drawing.groups_per_step)}
            return
        self._after = {step: _Place(cursor=saved["cursor"])}
        groups = saved["carried"]
        if not self._drawing.carries_over:
            if groups:
                self._message(
                    f"rollout.partial = false: {len(groups)} unfinished prompt groups of step {step} are dropped"
                )
            return
        before, now = saved["sampling"], self._shared_settings()
        if groups and before != now:
            changes = ", ".join(
                f"{name} was {before[name]} and is {now[name]}" for name in now if before[name] != now[name]
            )
            raise UserError(
                f"the checkpoint of step {step} holds unfinished prompt groups, but of [rollout] {changes}; set that "
                "back, or set rollout.partial = false to drop those groups"
            )
        # All of them on every rank, so that what is wrong with one is told by all.
        everyones = [self._restored(group, step) for group in groups]
        mine = everyones[self._engine_index :: self._num_engines] if self._engine.leads else []
        self._after = {step: _Place(cursor=saved["cursor"], carried=tuple(mine), num_carried=len(everyones))}

    def _restored(self, saved: Mapping[str, Any], step: int) -> PromptGroup:
        (prompt,) = self._prompts.take(saved["prompt_id"], 1)
        if list(prompt.token_ids) != saved["prompt_ids"]:
            raise UserError(
                f"the checkpoint of step {step} holds an unfinished group of prompt {prompt.prompt_id}, but the data "
                "now has another prompt there; set [data] and run.seed back, or set rollout.partial = false to drop "
                "unfinished groups"
            )
        if (len(saved["seeds"]) > self._sampling.group_size) != self._drawing.with_baseline:
            have, wants = ("without", "one") if self._drawing.with_baseline else ("with", "none")
            raise UserError(
                f"the checkpoint of step {step} holds unfinished prompt groups {have} a greedy response, but "
                f"advantage.estimator now compares with {wants}; set that back, or set rollout.partial = false to drop "
                "unfinished groups"
            )
        return PromptGroup.from_json(saved, prompt, group_size=self._sampling.group_size)

    def _shared_settings(self) -> dict[str, Any]:
        """The settings that all rollouts of a group must share."""
        return {
            "group_size": self._sampling.group_size,
            "max_response_tokens": self._sampling.max_response_tokens,
            "temperature": self._sampling.temperature,
            "stop_token_ids": sorted(self._sampling.stop_token_ids),
        }

    def _tickets(self, step: int, num_carried: int) -> Tickets:
        drawing = self._drawing
        if self._store is None:
            return StaticTickets(
                engine_index=self._engine_index,
                num_engines=self._num_engines,
                wanted=drawing.groups_per_step,
                max_draws=drawing.max_draws,
            )
        permits = drawing.groups_per_step + drawing.extra_groups - num_carried
        return SharedTickets(
            self._store,
            step=step,
            wanted=drawing.groups_per_step,
            permits=permits,
            # Where no group is ever replaced, no more can be drawn than may be open.
            max_draws=drawing.max_draws if drawing.drops_equal else permits,
        )

    def _max_open(self) -> int:
        """Groups that this engine samples at the same time, at most.

        What the engine can run needs no number here: it asks for requests only as it has room. But where it has room
        for all of them it would take every ticket before another engine took its first, so none has more than its
        share at once. Groups that only wait for a reward do not count.
        """
        return math.ceil((self._drawing.groups_per_step + self._drawing.extra_groups) / self._num_engines)


class _Part:
    """What one engine does in one step."""

    def __init__(
        self,
        engine: RolloutEngine,
        submit: Callable[[Rollout], Pending],
        sampling: Sampling,
        drawing: Drawing,
        tickets: Tickets,
        *,
        draw: Callable[[int], PromptGroup],
        carried: Sequence[PromptGroup],
        max_open: int,
    ) -> None:
        self.kept: list[PromptGroup] = []
        self.dropped: list[PromptGroup] = []
        self.num_drawn = self.tickets_end = 0
        self.num_continued = sum(
            group.responses[index].token_ids != () for group in carried for index in group.unfinished
        )
        self._engine, self._submit, self._sampling, self._drawing = engine, submit, sampling, drawing
        self._tickets, self._draw, self._max_open = tickets, draw, max_open
        # By prompt_id; a group goes from one to the next, and is then kept or dropped.
        self._unfinished = {_prompt_id(group): group for group in carried if not group.is_sampled}
        self._undecided = {_prompt_id(group): group for group in carried if group.is_sampled}
        self._asked: list[tuple[PromptGroup, int]] = []  # (group, sample index) of each request, by place
        self._num_running = 0

    @property
    def left(self) -> list[PromptGroup]:
        """Groups that were open when the step had enough."""
        return [*self._unfinished.values(), *self._undecided.values()]

    def sample(self) -> None:
        """Sample until the step has enough groups, or can get no more, and this engine's are kept or dropped.

        After an interruption it can be called again: responses that an engine took with it are asked for once more.
        """
        self._asked, self._num_running = [], 0
        requests = self._requests() if self._engine.leads else ()
        with self._aborted_in_time():
            for place, response in self._engine.generate(requests):
                self._take(place, response)
        while not self._is_over() and self._undecided:
            self._wait()

    def summary(self) -> _Summary:
        """For the other ranks."""
        return _Summary(
            kept=[_prompt_id(group) for group in self.kept],
            num_dropped=len(self.dropped),
            num_failed=sum(group.num_failed for group in self.dropped),
            num_drawn=self.num_drawn,
            tickets_end=self.tickets_end,
            num_left=len(self.left),
        )

    def _requests(self) -> Iterator[Request | None]:
        """What the engine is to run, as long as there is more: groups that go on, then those it draws."""
        for group in list(self._unfinished.values()):
            if self._is_over():
                return
            yield from self._requests_of(group)
        while not self._is_over():
            if self._tickets.is_interrupted():
                return
            if len(self._unfinished) < self._max_open and (ticket := self._tickets.draw()) is not None:
                self.num_drawn, self.tickets_end = self.num_drawn + 1, ticket + 1
                group = self._draw(ticket)
                self._unfinished[_prompt_id(group)] = group
                yield from self._requests_of(group)
            elif self._tickets.is_empty():
                return
            elif self._num_running:
                yield None
            else:
                self._wait()

    def _requests_of(self, group: PromptGroup) -> Iterator[Request]:
        for index in group.unfinished:
            self._asked.append((group, index))
            self._num_running += 1
            sampling = self._sampling.greedy() if group.is_baseline(index) else self._sampling
            yield sampling.request(group.prompt, group.seeds[index], group.responses[index].token_ids)

    def _take(self, place: int, response: Response) -> None:
        group, sample_index = self._asked[place]
        self._num_running -= 1
        if (rollout := group.add(sample_index, response)) is None:
            return
        group.pending[sample_index] = self._submit(rollout)
        if group.is_sampled:
            self._undecided[_prompt_id(group)] = self._unfinished.pop(_prompt_id(group))
            # Not left to the thread that watches: what this engine samples after its own last group is for nothing.
            if self._is_over() and self._num_running:
                self._engine.abort()

    def _is_over(self) -> bool:
        """Keep and drop the groups that can be decided; whether the step has enough."""
        for prompt_id, group in list(self._undecided.items()):
            if self._drawing.drops_equal and not group.is_scored:
                continue
            if self._drawing.drops_equal and group.has_equal_rewards:
                self._tickets.drop()
                self.dropped.append(self._undecided.pop(prompt_id))
            elif self._tickets.keep():
                self.kept.append(self._undecided.pop(prompt_id))
            else:
                break
        return self._tickets.is_over()

    def _wait(self) -> None:
        """Until a reward comes, or other engines may have changed what this one may do."""
        futures = [future for group in self._undecided.values() for _, future in group.pending.values()]
        if missing := [future for future in futures if not future.done()]:
            concurrent.futures.wait(missing, timeout=POLL_S, return_when=concurrent.futures.FIRST_COMPLETED)
        else:
            time.sleep(POLL_S)

    @contextmanager
    def _aborted_in_time(self) -> Iterator[None]:
        """With more groups open than wanted, end the engine's work as soon as any engine has kept the last one.

        In a thread of its own: the slowest response, which is not worth waiting for, is the one that would be waited
        for before this rank looks again.
        """
        if not self._drawing.extra_groups or not self._engine.leads:
            yield
            return
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(POLL_S):
                if self._tickets.is_over():
                    self._engine.abort()

        watcher = threading.Thread(target=watch, name="collect", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join()


def _prompt_id(group: PromptGroup) -> int:
    return group.prompt.prompt_id


def _staleness(group: PromptGroup, step: int) -> int:
    """Steps between the weights that sampled the oldest of it and those that the step updates."""
    return 0 if group.oldest_version is None else step - 1 - group.oldest_version


def _shortfall(step: int, summaries: Sequence[_Summary], drawing: Drawing) -> str | None:
    """What the user must know when the step is trained on less than was asked for."""
    num_kept = sum(len(summary.kept) for summary in summaries)
    if num_kept == drawing.groups_per_step:
        return None
    num_drawn = sum(summary.num_drawn for summary in summaries)
    num_dropped = sum(summary.num_dropped for summary in summaries)
    num_failed = sum(summary.num_failed for summary in summaries)
    trains = f"trains on {num_kept} of {drawing.groups_per_step} prompt groups" if num_kept else "changes no weights"
    failed = f"; {num_failed} of their rewards could not be computed" if num_failed else ""
    return (
        f"step {step} {trains}: {num_drawn} were drawn (the limit is {drawing.max_draws}) and {num_dropped} had equal "
        f"rewards{failed}"
    )


def _metrics(
    part: _Part, stale: Sequence[PromptGroup], drawing: Drawing, *, step: int, speaks_for_all: bool
) -> Metrics:
    """Of this rank's part; what is the same on all ranks comes from the one that speaks for all."""
    metrics: Metrics = {}
    discarded = [*part.dropped, *stale]
    if drawing.drops_equal:
        num_dropped = float(len(part.dropped))
        metrics |= {
            "rollout/drawn_groups_count": Total(float(part.num_drawn)),
            "rollout/equal_groups_count": Total(num_dropped),
            # These two join what `rollout_metrics` says of the groups that are trained on.
            "reward/equal_groups_fraction": Mean(num_dropped, num_dropped),
            "reward/failed_count": Total(float(sum(group.num_failed for group in part.dropped))),
            "reward/drawn_mean": Mean.of(reward for group in (*part.kept, *part.dropped) for reward in group.rewards),
        }
    if drawing.extra_groups:
        responses = [group.responses[index] for group in part.left for index in group.unfinished]
        aborted = [response for response in responses if response.token_ids]
        discarded += [] if drawing.carries_over else part.left
        metrics |= {
            "rollout/aborted_count": Total(float(len(aborted))),
            "rollout/aborted_tokens": Total(float(sum(len(response.token_ids) for response in aborted))),
        }
    if drawing.carries_over:
        metrics |= {
            "rollout/continued_count": Total(float(part.num_continued)),
            "rollout/stale_groups_count": Total(float(len(stale))),
        }
    if drawing.can_be_stale:
        spans = [span for group in part.kept for response in group.trained for span in response.spans]
        metrics |= {
            "rollout/mean_staleness_steps": Mean(
                float(sum((step - 1 - span.version) * span.num_tokens for span in spans)),
                float(sum(span.num_tokens for span in spans)),
            ),
            "rollout/max_staleness_steps": Max(float(max((_staleness(g, step) for g in part.kept), default=0))),
        }
    if not drawing.moves_by_plan:
        metrics |= {
            "rollout/kept_groups_fraction": Mean(
                float(len(part.kept)), float(drawing.groups_per_step if speaks_for_all else 0)
            ),
            "rollout/discarded_tokens": Total(float(sum(group.num_tokens for group in discarded))),
        }
    return metrics
