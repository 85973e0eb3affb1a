"""Collect the prompt groups of a step: which are opened, by which engine, and which are trained on.

Every engine takes tickets (`rollout/tickets.py`) as it has room. Ticket t of a step stands for one prompt of the
stream, and seeds belong to the prompt and the sample, so samples do not depend on which engine took the ticket.
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
class CollectionRules:
    """Rules for opening, keeping and dropping the prompt groups of a step."""

    groups_per_step: int  # wanted, over all engines
    extra_groups: int = 0  # open at the same time beyond those
    max_groups: int  # opened in a step at most, over all engines
    drops_equal: bool = False  # groups with equal rewards are replaced
    carries_over: bool = False  # unfinished groups go on in the next step
    max_staleness: int = 1  # steps, of a group that was carried over
    steps_ahead: int = 0  # steps that may be sampled before the update of an earlier one
    with_baseline: bool = False  # a group has a greedy response for its rewards to be compared with

    @property
    def can_be_stale(self) -> bool:
        """True when tokens may come from older weights than those that are updated with them."""
        return self.carries_over or self.steps_ahead > 0

    @property
    def prompts_follow_from_step(self) -> bool:
        """True when every step uses exactly the prompts it wants, so that the step number alone gives them."""
        return not self.drops_equal and not self.extra_groups


def training_rules(cfg: Config, plan: Plan) -> CollectionRules:
    """The rules that the settings give for groups to train on."""
    return CollectionRules(
        groups_per_step=plan.prompts_per_step,
        extra_groups=plan.extra_groups,
        max_groups=plan.max_groups,
        drops_equal=cfg.rollout.dynamic_sampling,
        carries_over=cfg.rollout.partial,
        max_staleness=cfg.rollout.max_staleness,
        steps_ahead=plan.steps_ahead,
        with_baseline=cfg.advantage.compares_with_greedy,
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
    """What prompt groups are made of, and where their finished rollouts go."""

    prompts: PromptStream
    sampling: Sampling
    run_seed: int
    submit: Callable[[Rollout], Pending]  # starts to compute a rollout's reward


@dataclass(frozen=True, slots=True)
class Collected:
    """This rank's part of a step's prompt groups."""

    pending: list[Pending]  # whole groups, in order; baselines are among them
    metrics: Metrics
    places: Mapping[int, int]  # of every rank's groups in the step's global order, by prompt_id
    group_size: int
    probes: Sequence[Rollout] = ()  # this rank's answers to the probe's prompts

    def index_of(self, rollout: Rollout) -> int:
        """Look up the rollout's place in the step's global order; a baseline has none."""
        assert not rollout.is_baseline, "a greedy response is not trained on"
        return self.places[rollout.prompt.prompt_id] * self.group_size + rollout.sample_index


@dataclass(frozen=True, slots=True)
class _Summary:
    """One rank's part, as the other ranks need to know it."""

    kept: list[int]  # prompt ids
    num_dropped: int
    num_failed: int  # rewards of the dropped groups that could not be computed
    num_opened: int
    tickets_end: int  # one past the highest ticket taken, 0 when there was none
    num_left: int


@dataclass(frozen=True, slots=True)
class _Progress:
    """The state of sampling between two steps."""

    cursor: int = 0  # the first prompt of the stream that no step has used
    carried: tuple[PromptGroup, ...] = ()  # this rank's groups that go on in the next step; they stay as they are
    num_carried: int = 0  # over all ranks


class Collector:
    """Collects the rollouts of step after step; between steps it holds the groups that go on in the next.

    Every rank has one and calls its methods together with the others; only ranks that lead an engine open groups.
    """

    def __init__(
        self,
        place: EnginePlace,
        source: GroupSource,
        rules: CollectionRules,
        *,
        store: Store | None,
        message: Callable[[str], None],
    ) -> None:
        """Engines share tickets through `store`; without one they split them beforehand. `message` shows the user a
        line."""
        self._place, self._source, self._rules = place, source, rules
        self._store, self._message = store, message
        self._after = {0: _Progress()}  # by step: the last that was collected, and the one before

    def collect(self, step: int) -> Collected:
        """Sample the step's prompt groups and start to compute their rewards; every rank must call this."""
        rules, source, before = self._rules, self._source, self._after[step - 1]
        first = (step - 1) * rules.groups_per_step if rules.prompts_follow_from_step else before.cursor
        tickets = self._tickets(step, before.num_carried)
        stale = [group for group in before.carried if _staleness(group, step) > rules.max_staleness]

        def opened(prompt: Prompt) -> PromptGroup:
            return PromptGroup.opened(
                prompt,
                step=step,
                run_seed=source.run_seed,
                group_size=source.sampling.group_size,
                with_baseline=rules.with_baseline,
            )

        part = _Part(
            self._place,
            source,
            rules,
            tickets,
            open_group=lambda ticket: opened(source.prompts.take(first + ticket, 1)[0]),
            carried=[opened(group.prompt) if group in stale else group.copy() for group in before.carried],
        )
        self._sample(part, tickets, step)
        summaries = gather_objects(self._place.mesh, part.summary())
        if self._place.engine.leads and self._place.index == 0:
            tickets.close()

        now = _Progress(
            cursor=first + max(summary.tickets_end for summary in summaries),
            carried=tuple(sorted(part.left, key=_prompt_id)) if rules.carries_over else (),
            num_carried=sum(summary.num_left for summary in summaries) if rules.carries_over else 0,
        )
        self._after = {step - 1: before, step: now}
        if shortfall := _shortfall(step, summaries, rules):
            self._message(shortfall)
        kept = sorted(part.kept, key=_prompt_id)
        everyones = sorted(prompt_id for summary in summaries for prompt_id in summary.kept)
        return Collected(
            pending=[pending for group in kept for pending in group.pending_rollouts()],
            metrics=_metrics(part, stale, rules, step=step, reports_wanted=self._place.mesh.get_local_rank() == 0),
            places={prompt_id: place for place, prompt_id in enumerate(everyones)},
            group_size=source.sampling.group_size,
        )

    def _sample(self, part: _Part, tickets: Tickets, step: int) -> None:
        """Sample this rank's part. Where it fails, the other engines stop waiting for it."""

        def sample() -> None:
            try:
                part.sample()
            except EngineDied:
                tickets.interrupt() if self._place.restarts.wanted else tickets.cancel()
                raise
            except BaseException:
                tickets.cancel()
                raise

        self._place.restarts.carry(sample, during=f"step {step}", before_revival=tickets.resume)

    def state(self, step: int) -> dict[str, Any]:
        """Return what a checkpoint must hold to go on after `step`, the last that was collected or the one before.

        It has JSON's types and is the same on every rank; every rank must call this.
        """
        progress = self._after[step]
        groups = gather_objects(self._place.mesh, [group.as_json() for group in progress.carried])
        carried = sorted((group for part in groups for group in part), key=lambda group: group["prompt_id"])
        return {"cursor": progress.cursor, "sampling": self._shared_settings(), "carried": carried}

    def restore(self, saved: Mapping[str, Any] | None, *, step: int) -> None:
        """Go on after `step` from a saved state. None means that none was saved: every step so far used exactly the
        prompts it wanted. Raises UserError when the settings no longer fit the groups that go on."""
        if saved is None:
            self._after = {step: _Progress(cursor=step * self._rules.groups_per_step)}
            return
        self._after = {step: _Progress(cursor=saved["cursor"])}
        groups = saved["carried"]
        if not self._rules.carries_over:
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
        # Every rank restores all of them, so that all raise the same error.
        everyones = [self._restored(group, step) for group in groups]
        mine = everyones[self._place.index :: self._place.count] if self._place.engine.leads else []
        self._after = {step: _Progress(cursor=saved["cursor"], carried=tuple(mine), num_carried=len(everyones))}

    def _restored(self, saved: Mapping[str, Any], step: int) -> PromptGroup:
        (prompt,) = self._source.prompts.take(saved["prompt_id"], 1)
        if list(prompt.token_ids) != saved["prompt_ids"]:
            raise UserError(
                f"the checkpoint of step {step} holds an unfinished group of prompt {prompt.prompt_id}, but the data "
                "now has another prompt there; set [data] and run.seed back, or set rollout.partial = false to drop "
                "unfinished groups"
            )
        if (len(saved["seeds"]) > self._source.sampling.group_size) != self._rules.with_baseline:
            have, wants = ("without", "one") if self._rules.with_baseline else ("with", "none")
            raise UserError(
                f"the checkpoint of step {step} holds unfinished prompt groups {have} a greedy response, but "
                f"advantage.estimator now compares with {wants}; set that back, or set rollout.partial = false to drop "
                "unfinished groups"
            )
        return PromptGroup.from_json(saved, prompt, group_size=self._source.sampling.group_size)

    def _shared_settings(self) -> dict[str, Any]:
        """The settings that all rollouts of a group must share."""
        sampling = self._source.sampling
        return {
            "group_size": sampling.group_size,
            "max_response_tokens": sampling.max_response_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": sorted(sampling.stop_token_ids),
        }

    def _tickets(self, step: int, num_carried: int) -> Tickets:
        rules = self._rules
        if self._store is None:
            return StaticTickets(
                engine_index=self._place.index,
                num_engines=self._place.count,
                wanted=rules.groups_per_step,
                num_tickets=rules.max_groups,
            )
        permits = rules.groups_per_step + rules.extra_groups - num_carried
        return SharedTickets(
            self._store,
            step=step,
            wanted=rules.groups_per_step,
            permits=permits,
            # Where no group is ever replaced, as many tickets can be taken as groups may be open.
            num_tickets=rules.max_groups if rules.drops_equal else permits,
        )


class _Part:
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
    ) -> None:
        self.kept: list[PromptGroup] = []
        self.dropped: list[PromptGroup] = []
        self.num_opened = self.tickets_end = 0
        self.num_continued = sum(
            group.responses[index].token_ids != () for group in carried for index in group.unfinished
        )
        self._engine, self._source, self._rules = place.engine, source, rules
        self._tickets, self._open_group = tickets, open_group
        # Groups that this engine samples at the same time, at most; those that only wait for a reward do not count.
        # The engine asks for requests only as it has room. But an engine with room for every group would take all
        # tickets before another took its first, so none has more than its share open at once.
        self._max_open = math.ceil((rules.groups_per_step + rules.extra_groups) / place.count)
        # By prompt_id; a group goes from one to the next, and is then kept or dropped.
        self._unfinished = {_prompt_id(group): group for group in carried if not group.is_sampled}
        self._undecided = {_prompt_id(group): group for group in carried if group.is_sampled}
        self._requested: list[tuple[PromptGroup, int]] = []  # (group, sample index) of each request, by place
        self._num_running = 0

    @property
    def left(self) -> list[PromptGroup]:
        """The groups that were still open when the step had enough."""
        return [*self._unfinished.values(), *self._undecided.values()]

    def sample(self) -> None:
        """Sample until the step has enough groups, or can get no more, and each of this engine's is kept or dropped.

        It can be called again after an interruption: responses that died with an engine are requested once more.
        """
        self._requested, self._num_running = [], 0
        requests = self._requests() if self._engine.leads else ()
        with self._aborted_in_time():
            for place, response in self._engine.generate(requests):
                self._add(place, response)
        while not self._is_over() and self._undecided:
            self._wait()

    def summary(self) -> _Summary:
        """Summarize this part for the other ranks."""
        return _Summary(
            kept=[_prompt_id(group) for group in self.kept],
            num_dropped=len(self.dropped),
            num_failed=sum(group.num_failed for group in self.dropped),
            num_opened=self.num_opened,
            tickets_end=self.tickets_end,
            num_left=len(self.left),
        )

    def _requests(self) -> Iterator[Request | None]:
        """Yield requests as long as there are more: of groups that go on, then of those that this engine opens."""
        for group in list(self._unfinished.values()):
            if self._is_over():
                return
            yield from self._requests_of(group)
        while not self._is_over():
            if self._tickets.is_interrupted():
                return
            if len(self._unfinished) < self._max_open and (ticket := self._tickets.take()) is not None:
                self.num_opened, self.tickets_end = self.num_opened + 1, ticket + 1
                group = self._open_group(ticket)
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
            self._requested.append((group, index))
            self._num_running += 1
            sampling = self._source.sampling.greedy() if group.is_baseline(index) else self._source.sampling
            yield sampling.request(group.prompt, group.seeds[index], group.responses[index].token_ids)

    def _add(self, place: int, response: Response) -> None:
        group, sample_index = self._requested[place]
        self._num_running -= 1
        if (rollout := group.add(sample_index, response)) is None:
            return
        group.pending[sample_index] = self._source.submit(rollout)
        if group.is_sampled:
            self._undecided[_prompt_id(group)] = self._unfinished.pop(_prompt_id(group))
            # At once, not in the thread that watches: what this engine samples after its last group is wasted.
            if self._is_over() and self._num_running:
                self._engine.abort()

    def _is_over(self) -> bool:
        """Keep or drop the groups that can be decided; return True when the step has enough."""
        for prompt_id, group in list(self._undecided.items()):
            if self._rules.drops_equal and not group.is_rewarded:
                continue
            if self._rules.drops_equal and group.has_equal_rewards:
                self._tickets.drop()
                self.dropped.append(self._undecided.pop(prompt_id))
            elif self._tickets.keep():
                self.kept.append(self._undecided.pop(prompt_id))
            else:
                break
        return self._tickets.is_over()

    def _wait(self) -> None:
        """Wait until a reward arrives, or until other engines may have changed what this one may do."""
        futures = [future for group in self._undecided.values() for _, future in group.pending.values()]
        if missing := [future for future in futures if not future.done()]:
            concurrent.futures.wait(missing, timeout=POLL_S, return_when=concurrent.futures.FIRST_COMPLETED)
        else:
            time.sleep(POLL_S)

    @contextmanager
    def _aborted_in_time(self) -> Iterator[None]:
        """With more groups open than wanted, end the engine's work as soon as any engine has kept the last one.

        A thread watches for that: this rank looks again only after a response, and that may be the slowest one.
        """
        if not self._rules.extra_groups or not self._engine.leads:
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
    """Count the steps between the weights that sampled its oldest token and those that the step updates."""
    return 0 if group.oldest_version is None else step - 1 - group.oldest_version


def _shortfall(step: int, summaries: Sequence[_Summary], rules: CollectionRules) -> str | None:
    """Return a line for the user when the step trains on fewer groups than it wants."""
    num_kept = sum(len(summary.kept) for summary in summaries)
    if num_kept == rules.groups_per_step:
        return None
    num_opened = sum(summary.num_opened for summary in summaries)
    num_dropped = sum(summary.num_dropped for summary in summaries)
    num_failed = sum(summary.num_failed for summary in summaries)
    trains = f"trains on {num_kept} of {rules.groups_per_step} prompt groups" if num_kept else "changes no weights"
    failed = f"; {num_failed} of their rewards could not be computed" if num_failed else ""
    return (
        f"step {step} {trains}: {num_opened} were opened (the limit is {rules.max_groups}) and {num_dropped} had equal "
        f"rewards{failed}"
    )


def _metrics(
    part: _Part, stale: Sequence[PromptGroup], rules: CollectionRules, *, step: int, reports_wanted: bool
) -> Metrics:
    """Metrics of this rank's part; one rank also reports how many groups all of them want."""
    metrics: Metrics = {}
    discarded = [*part.dropped, *stale]
    if rules.drops_equal:
        num_dropped = float(len(part.dropped))
        metrics |= {
            "rollout/opened_groups_count": Total(float(part.num_opened)),
            "rollout/equal_groups_count": Total(num_dropped),
            # These two are merged with those of the groups that are trained on.
            "reward/equal_groups_fraction": Mean(num_dropped, num_dropped),
            "reward/failed_count": Total(float(sum(group.num_failed for group in part.dropped))),
            "reward/all_groups_mean": Mean.of(
                reward for group in (*part.kept, *part.dropped) for reward in group.rewards
            ),
        }
    if rules.extra_groups:
        responses = [group.responses[index] for group in part.left for index in group.unfinished]
        aborted = [response for response in responses if response.token_ids]
        discarded += [] if rules.carries_over else part.left
        metrics |= {
            "rollout/aborted_count": Total(float(len(aborted))),
            "rollout/aborted_tokens": Total(float(sum(len(response.token_ids) for response in aborted))),
        }
    if rules.carries_over:
        metrics |= {
            "rollout/continued_count": Total(float(part.num_continued)),
            "rollout/stale_groups_count": Total(float(len(stale))),
        }
    if rules.can_be_stale:
        spans = [span for group in part.kept for response in group.trained for span in response.spans]
        metrics |= {
            "rollout/mean_staleness_steps": Mean(
                float(sum((step - 1 - span.version) * span.num_tokens for span in spans)),
                float(sum(span.num_tokens for span in spans)),
            ),
            "rollout/max_staleness_steps": Max(float(max((_staleness(g, step) for g in part.kept), default=0))),
        }
    if not rules.prompts_follow_from_step:
        metrics |= {
            "rollout/kept_groups_fraction": Mean(
                float(len(part.kept)), float(rules.groups_per_step if reports_wanted else 0)
            ),
            "rollout/discarded_tokens": Total(float(sum(group.num_tokens for group in discarded))),
        }
    return metrics
