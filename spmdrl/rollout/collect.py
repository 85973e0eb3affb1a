"""Collect the prompt groups of a step: which are opened, by which engine, and which are trained on.

Every engine takes tickets (`rollout/tickets.py`) as it has room. Ticket t of a step is one prompt of the
stream, and seeds belong to the prompt and the sample, so samples do not depend on which engine took the ticket.

Oldest first (`CollectionRules.oldest_first`), step k trains on the k-th `groups_per_step` prompts of the stream, and
engines may open the next `extra_groups` meanwhile. So no group is older than `extra_groups / groups_per_step` steps
when it is trained on, and none is thrown away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from spmdrl.algo.metrics import Max, Mean, Metrics, Total
from spmdrl.config.strict import as_written
from spmdrl.dist.collectives import gather_objects
from spmdrl.engine.protocol import EngineDied
from spmdrl.rewards.client import Pending
from spmdrl.rollout.clock import RecordedClock, RefitInFlight, TokenClock, VirtualClock
from spmdrl.rollout.concurrent_eval import HeldOutAnswers
from spmdrl.rollout.curriculum import MEASUREMENTS, NOTHING_MEASURED, Measurements
from spmdrl.rollout.group import SAVED_GROUP, PromptGroup, SavedGroup
from spmdrl.rollout.part import CollectionRules, EnginePart, EnginePlace, GroupSource, PartSummary, prompt_id_of
from spmdrl.rollout.tickets import OwnTickets, RecordedTickets, SharedTickets, StaticTickets, Tickets
from spmdrl.types import Prompt, Rollout, UserError

_OVERSAMPLES = "oversample_fraction > 0"  # in a state: its unfinished groups may be of any prompts before the cursor


@dataclass(frozen=True, slots=True)
class Collected:
    """This rank's part of a step's prompt groups."""

    pending: list[Pending]  # whole groups, in order; baselines are among them
    metrics: Metrics
    places: Mapping[int, int]  # of every rank's groups in the step's global order, by prompt_id
    group_size: int
    probes: Sequence[Rollout] = ()  # this rank's answers to the probe's prompts

    def with_pending(self, pending: list[Pending]) -> Collected:
        """Return the same groups with other rewards."""
        return dataclasses.replace(self, pending=pending)

    def index_of(self, rollout: Rollout) -> int:
        """Look up the rollout's place in the step's global order; a baseline has none."""
        assert not rollout.is_baseline, "a greedy response is not trained on"
        return self.places[rollout.prompt.prompt_id] * self.group_size + rollout.sample_index


@dataclass(frozen=True, slots=True)
class _SamplingState:
    """The state of sampling between two steps."""

    cursor: int = 0  # the first prompt of the stream that no step has used
    carried: tuple[PromptGroup, ...] = ()  # this rank's groups that continue in the next step; they stay as they are
    everyones: frozenset[int] = frozenset()  # prompt ids of those of all ranks
    measured: Measurements = NOTHING_MEASURED  # what a curriculum reads


@dataclass(frozen=True, slots=True)
class _Window:
    """The prompts of the stream that a step may open."""

    first: int
    positions: Sequence[int]  # in the stream, by ticket
    groups_per_step: int | None  # oldest first: as many are trained on in each step, in order; None: in any order

    def steps_until(self, prompt_id: int) -> int:
        """Count the steps after this one until a prompt is trained on, as far as that is known."""
        return 0 if self.groups_per_step is None else (prompt_id - self.first) // self.groups_per_step

    def is_due(self, group: PromptGroup) -> bool:
        """Return True when the step may train on the group."""
        return self.steps_until(prompt_id_of(group)) == 0


class Collector:
    """Collects the rollouts of step after step; between steps it has the groups that continue in the next.

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
        clocks: Store | None = None,
        record: Callable[[int, Mapping[str, Any]], None] = lambda step, schedule: None,
        follows: Mapping[int, Mapping[str, Any]] | None = None,
        held_out: HeldOutAnswers | None = None,
    ) -> None:
        """Engines share tickets through `store`; without one they split them beforehand, and where they sample ahead
        see each other's virtual clocks through `clocks`. `message` shows the user a line; `record` gets the schedule of
        each step, in JSON's types, on the first rank. With `follows`, which `record` has got in another run, by step,
        engines do what they did there. They sample `held_out` alongside the steps, where it has requests."""
        self._place, self._source = place, source
        self._rules = rules if follows is None else dataclasses.replace(rules, awaits_rewards=False)
        self._store, self._clocks, self._message, self._record = store, clocks, message, record
        self._follows = follows
        self._curriculum = source.curriculum
        self._after = {0: _SamplingState()}  # by step: the last that was collected, and the one before
        self._held_out = held_out or HeldOutAnswers()

    def collect(self, step: int, in_flight: RefitInFlight | None = None) -> Collected:
        """Sample the step's prompt groups and start to compute their rewards; every rank must call this.

        With a refit `in_flight`, engines pause for it at a token and continue with its weights; none ends the step
        before it.
        """
        rules, source, before = self._rules, self._source, self._after[step - 1]
        first = (step - 1) * rules.groups_per_step if rules.prompts_follow_from_step else before.cursor
        window = self._window(first, before)
        clock = self._clock(step, in_flight)
        tickets = self._tickets(step, window, before, clock)
        stale = [group for group in before.carried if self._will_be_stale(group, step, window)]

        def opened(prompt: Prompt) -> PromptGroup:
            return PromptGroup.opened(
                prompt,
                source.sampling,
                source.env_context,
                step=step,
                run_seed=source.run_seed,
                with_baseline=rules.with_baseline,
            )

        part = EnginePart(
            self._place,
            source,
            rules,
            tickets,
            open_group=lambda ticket: opened(source.prompts.take(window.positions[ticket], 1)[0]),
            carried=[opened(group.prompt) if group in stale else group.copy() for group in before.carried],
            is_due=window.is_due,
            clock=clock,
            held_out=self._held_out,
        )
        self._sample(part, tickets, step)
        if in_flight is not None:
            in_flight.take()
            tickets.note_evaluation()
            clock.note_refit()
            self._sample(part, tickets, step)
        for group in [*stale, *([] if rules.carries_over else part.left)]:
            group.close()
        rates = self._curriculum.rates([*part.accepted, *part.dropped])
        summaries = gather_objects(self._place.mesh, part.summary(rates))
        if self._place.engine.leads and self._place.index == 0:
            tickets.close()
            self._record(step, _schedule(summaries))

        num_tickets = max(summary.tickets_end for summary in summaries)
        cursor = window.positions[num_tickets - 1] + 1 if num_tickets else first
        now = _SamplingState(
            cursor=first + rules.groups_per_step if rules.oldest_first else cursor,
            carried=tuple(sorted(part.left, key=prompt_id_of)) if rules.carries_over else (),
            everyones=frozenset(i for summary in summaries for i in summary.left if rules.carries_over),
            measured=self._curriculum.after(before.measured, [rate for one in summaries for rate in one.rates]),
        )
        self._after = {step - 1: before, step: now}
        if shortfall := _shortfall(step, summaries, rules):
            self._message(shortfall)
        accepted = sorted(part.accepted, key=prompt_id_of)
        everyones = sorted(prompt_id for summary in summaries for prompt_id in summary.accepted)
        return Collected(
            pending=[pending for group in accepted for pending in group.pending_rollouts()],
            metrics=_metrics(part, stale, rules, step=step, reports_wanted=self._place.mesh.get_local_rank() == 0)
            | self._curriculum.metrics(now.measured, first, cursor),
            places={prompt_id: place for place, prompt_id in enumerate(everyones)},
            group_size=source.sampling.group_size,
        )

    def _sample(self, part: EnginePart, tickets: Tickets, step: int) -> None:
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
        """Return what a checkpoint must hold to continue after `step`, the last that was collected or the one before.

        It has JSON's types and is the same on every rank; every rank must call this.
        """
        progress = self._after[step]
        groups = gather_objects(self._place.mesh, [SAVED_GROUP.dump(group.saved()) for group in progress.carried])
        carried = sorted((group for part in groups for group in part), key=lambda group: group["prompt_id"])
        return {
            "cursor": progress.cursor,
            "sampling": self._shared_settings(),
            "carried": carried,
            "curriculum": MEASUREMENTS.dump(progress.measured),
        }

    def restore(self, saved: Mapping[str, Any] | None, *, step: int) -> None:
        """Continue after `step` from a saved state. None means that none was saved: every step so far used exactly the
        prompts it wanted. Raises UserError when the settings no longer fit the groups that continue."""
        if saved is None:
            self._after = {step: _SamplingState(cursor=step * self._rules.groups_per_step)}
            return
        with as_written(f"collector.json of step {step}", "a run"):
            measured = MEASUREMENTS.load(saved.get("curriculum", {}))
        self._curriculum.require_same_sources(measured)
        self._after = {step: _SamplingState(cursor=saved["cursor"], measured=measured)}
        if saved.get("ahead") is not None:
            self._message(f"the checkpoint holds rollouts of step {step + 1} by older weights; they are sampled again")
        groups = saved["carried"]
        if not self._rules.carries_over:
            if groups:
                setting = "max_staleness = 0" if self._rules.oldest_first else "partial = false"
                self._message(f"rollout.{setting}: {len(groups)} unfinished prompt groups of step {step} are dropped")
            return
        before, now = {_OVERSAMPLES: True, "top_k": None, "top_p": 1.0} | saved["sampling"], self._shared_settings()
        if groups and "episodes" not in groups[0]:
            raise UserError(
                f"the checkpoint of step {step} holds unfinished prompt groups in the form of an earlier version; set "
                "rollout.partial = false to drop them"
            )
        if groups and before != now:
            changes = ", ".join(
                f"{name} was {before[name]} and is {now[name]}" for name in now if before[name] != now[name]
            )
            raise UserError(
                f"the checkpoint of step {step} holds unfinished prompt groups, but of [rollout] {changes}; set that "
                "back, or set rollout.partial = false to drop those groups"
            )
        # Every rank restores all of them, so that all raise the same error.
        with as_written(f"collector.json of step {step}", "a run"):
            everyones = [self._restored(SAVED_GROUP.load(group), step) for group in groups]
        ids, cursor = [prompt_id_of(group) for group in everyones], saved["cursor"]
        if self._rules.oldest_first:
            engines = [self._owner(prompt_id - cursor) for prompt_id in ids]
        else:
            engines = [place % self._place.count for place in range(len(ids))]
        mine = (group for group, engine in zip(everyones, engines, strict=True) if engine == self._place.index)
        carried = tuple(mine) if self._place.engine.leads else ()
        self._after = {step: _SamplingState(cursor, carried, frozenset(ids), measured)}

    def _restored(self, saved: SavedGroup, step: int) -> PromptGroup:
        (prompt,) = self._source.prompts.take(saved.prompt_id, 1)
        if (prompt.token_ids, prompt.images) != (saved.prompt_ids, saved.prompt_images):
            raise UserError(
                f"the checkpoint of step {step} holds an unfinished group of prompt {prompt.prompt_id}, but the data "
                "now has another prompt there; set [data] and run.seed back, or set rollout.partial = false to drop "
                "unfinished groups"
            )
        if (len(saved.seeds) > self._source.sampling.group_size) != self._rules.with_baseline:
            have, wants = ("without", "one") if self._rules.with_baseline else ("with", "none")
            raise UserError(
                f"the checkpoint of step {step} holds unfinished prompt groups {have} a greedy response, but "
                f"advantage.estimator now compares with {wants}; set that back, or set rollout.partial = false to drop "
                "unfinished groups"
            )
        sampled = [response for episode in saved.episodes for response in episode.sampled]
        if self._source.sampling.reports_routes and any(response.routes is None for response in sampled):
            raise UserError(
                f"the checkpoint of step {step} holds unfinished prompt groups without the experts that tokens went "
                'to, which correction.router_replay = "R3" replays; set it back, or set rollout.partial = false to '
                "drop unfinished groups"
            )
        return PromptGroup.restored(saved, prompt, self._source.sampling, self._source.env_context)

    def _shared_settings(self) -> dict[str, Any]:
        """The settings that all rollouts of a group must share."""
        sampling = self._source.sampling
        return {
            "group_size": sampling.group_size,
            "max_response_tokens": sampling.max_response_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "stop_token_ids": sorted(sampling.stop_token_ids),
            _OVERSAMPLES: not self._rules.oldest_first,
        }

    def _window(self, first: int, before: _SamplingState) -> _Window:
        rules = self._rules
        if not rules.oldest_first:
            return _Window(first, self._curriculum.positions(first, rules.max_groups, before.measured), None)
        ahead = range(first, first + rules.groups_per_step + rules.extra_groups)
        return _Window(first, [i for i in ahead if i not in before.everyones], rules.groups_per_step)

    def _owner(self, place: int) -> int:
        """The engine that opens the prompt at this place after the first of a step, where each has its own."""
        return place % self._rules.groups_per_step % self._place.count

    def _will_be_stale(self, group: PromptGroup, step: int, window: _Window) -> bool:
        """Return True for a group that is too stale by the time it is trained on: with the settings that it was opened
        with, none is."""
        return _staleness(group, step + window.steps_until(prompt_id_of(group))) > self._rules.max_staleness

    def _clock(self, step: int, in_flight: RefitInFlight | None) -> TokenClock:
        rules, place = self._rules, self._place
        if self._follows is not None:
            found = self._followed(step)
            if ("refit_at" in found) != (in_flight is not None):
                was = "a refit" if "refit_at" in found else "no refit"
                raise UserError(
                    f"debug.follow_schedule has {was} in flight in step {step}, and this run has not; follow a run "
                    "with the same settings that began with the same checkpoint, or remove it"
                )
            return RecordedClock(found["tokens"], refit_at=found.get("refit_at"), started=found.get("started", ()))
        if self._clocks is None or not rules.oldest_first or not (rules.extra_groups or in_flight):
            return TokenClock(None if in_flight is None else in_flight.is_announced)
        refit_after = None if in_flight is None else rules.refit_after
        return VirtualClock(self._clocks, step=step, index=place.index, count=place.count, refit_after=refit_after)

    def _followed(self, step: int) -> Mapping[str, Any]:
        """Return the recorded schedule of this engine in a step. Raises UserError if there is none."""
        engines = (self._follows or {}).get(step, {}).get("engines", ())
        if len(engines) != self._place.count:
            raise UserError(
                f"debug.follow_schedule has {len(engines)} engines in step {step}, and this run has "
                f"{self._place.count}; follow a run with as many steps and engines, or remove it"
            )
        found: Mapping[str, Any] = engines[self._place.index]
        return found

    def _tickets(self, step: int, window: _Window, before: _SamplingState, clock: TokenClock) -> Tickets:
        rules = self._rules

        def evaluates() -> bool:
            return self._held_out.is_sampling

        if isinstance(clock, RecordedClock):
            ticket_of = {position: ticket for ticket, position in enumerate(window.positions)}
            found = self._followed(step)
            open_here = {*(prompt_id for prompt_id, _ in found["opened"]), *map(prompt_id_of, before.carried)}
            if (
                open_here != {*found["trained"], *found["left"]}
                or not {i for i, _ in found["opened"]} <= ticket_of.keys()
            ):
                raise UserError(
                    f"debug.follow_schedule: step {step} of that run had other prompt groups open than this one has; "
                    "follow a run with the same settings that began with the same checkpoint, or remove it"
                )
            return RecordedTickets(((ticket_of[i], tokens) for i, tokens in found["opened"]), clock=clock)
        if isinstance(clock, VirtualClock):
            places = {ticket: position - window.first for ticket, position in enumerate(window.positions)}
            mine = [ticket for ticket, place in places.items() if self._owner(place) == self._place.index]
            due = sum(places[ticket] < rules.groups_per_step for ticket in mine)
            wanted = due + sum(map(window.is_due, before.carried))
            return OwnTickets(mine, wanted=wanted, clock=clock, evaluates=evaluates)
        if self._store is None:
            return StaticTickets(
                engine_index=self._place.index,
                num_engines=self._place.count,
                wanted=rules.groups_per_step,
                num_tickets=rules.max_groups,
                evaluates=evaluates,
            )
        if rules.oldest_first:
            permits = len(window.positions)
        else:
            permits = rules.groups_per_step + rules.extra_groups - len(before.everyones)
        return SharedTickets(
            self._store,
            step=step,
            wanted=rules.groups_per_step,
            permits=permits,
            # Where no group is ever replaced, as many tickets can be taken as groups may be open.
            num_tickets=rules.max_groups if rules.drops_equal else permits,
        )


def _schedule(summaries: Sequence[PartSummary]) -> dict[str, Any]:
    """Describe what each engine did when, in JSON's types: a few bytes for each group."""
    engines = [
        {
            "version": summary.version,
            "tokens": summary.num_tokens,  # of each row, when it paused
            **({} if summary.refit_at is None else {"refit_at": summary.refit_at}),  # tokens, too
            "started": summary.started,  # episodes, by part of the step: before a refit in flight, and after it
            "opened": list(summary.opened.items()),  # prompt, and tokens of each row before
            "trained": summary.accepted,
            "left": sorted(summary.left),
        }
        for summary in summaries
    ]
    return {"engines": engines}


def _staleness(group: PromptGroup, step: int) -> int:
    """Count the steps between the weights that sampled its oldest token and those that the step updates."""
    return 0 if group.oldest_version is None else step - 1 - group.oldest_version


def _shortfall(step: int, summaries: Sequence[PartSummary], rules: CollectionRules) -> str | None:
    """Return a line for the user when the step trains on fewer groups than it wants."""
    num_accepted = sum(len(summary.accepted) for summary in summaries)
    if num_accepted == rules.groups_per_step:
        return None
    num_opened = sum(len(summary.opened) for summary in summaries)
    num_dropped = sum(summary.num_dropped for summary in summaries)
    num_failed = sum(summary.num_failed for summary in summaries)
    trains = (
        f"trains on {num_accepted} of {rules.groups_per_step} prompt groups" if num_accepted else "changes no weights"
    )
    failed = f"; {num_failed} of their rewards could not be computed" if num_failed else ""
    return (
        f"step {step} {trains}: {num_opened} were opened (the limit is {rules.max_groups}) and {num_dropped} had equal "
        f"rewards{failed}"
    )


def _metrics(
    part: EnginePart, stale: Sequence[PromptGroup], rules: CollectionRules, *, step: int, reports_wanted: bool
) -> Metrics:
    """Metrics of this rank's part; one rank also reports how many groups all of them want."""
    metrics: Metrics = {}
    late = [*stale, *([] if rules.carries_over else part.left)]
    discarded = [*part.dropped, *late]
    if rules.drops_equal:
        num_dropped = float(len(part.dropped))
        metrics |= {
            "rollout/opened_groups_count": Total(float(len(part.opened))),
            "rollout/equal_groups_count": Total(num_dropped),
            # These two are merged with those of the groups that are trained on.
            "reward/equal_groups_fraction": Mean(num_dropped, num_dropped),
            "reward/failed_count": Total(float(sum(group.num_failed for group in part.dropped))),
            "reward/all_groups_mean": Mean.of(
                reward for group in (*part.accepted, *part.dropped) for reward in group.rewards
            ),
        }
    if rules.extra_groups:
        responses = [episode.response for group in part.left for episode in group.unfinished]
        aborted = [response for response in responses if response.token_ids]
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
        spans = [span for group in part.accepted for response in group.trained for span in response.spans]
        metrics |= {
            "rollout/mean_staleness_steps": Mean(
                float(sum((step - 1 - span.version) * span.num_tokens for span in spans)),
                float(sum(span.num_tokens for span in spans)),
            ),
            "rollout/max_staleness_steps": Max(float(max((_staleness(g, step) for g in part.accepted), default=0))),
        }
    if part.has_environments:
        metrics["time/environment_wait_s"] = Max(part.idle_s)
    if not rules.prompts_follow_from_step:
        metrics |= {
            "rollout/kept_groups_fraction": Mean(
                float(len(part.accepted)), float(rules.groups_per_step if reports_wanted else 0)
            ),
            "rollout/discarded_tokens": Total(float(sum(group.num_tokens for group in discarded))),
            # This and the next are merged with those of the groups that are trained on: what was late may be longer.
            "rollout/sampled_tokens": Mean.of(
                float(num_tokens) for group in late for num_tokens in group.tokens_of_each if num_tokens
            ),
        }
        if rules.has_rewards:
            metrics["reward/sampled_mean"] = Mean.of(
                reward for group in late for reward in group.known_rewards if rules.rewards_are_whole
            )
    return metrics
