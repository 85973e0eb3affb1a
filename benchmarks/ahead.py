"""What asynchronous sampling gains on machines of 8 to 1,024 GPUs: the run's own scheduler with simulated engines.

    python benchmarks/ahead.py --result benchmarks/results/ahead.json

Time is simulated; everything else is the code of a run: each engine has a `Collector` in a thread of its own, with the
tickets, the virtual clock, groups and episodes of a deterministic run. A simulated engine (8 GPUs) takes 8 ms for a
token of each of its rows, of which there are 256 at most (`rollout.max_running`). Lengths are lognormal with a cap, one
response in ten waits for a tool first, and a reward takes seconds, a few of them half a minute. A step's update takes
time by its tokens, on all GPUs or on those that train.

    in step               every engine waits for the longest response of the step
    ahead, colocated      `rollout.partial` with `max_staleness`; all GPUs take turns
    ahead, disaggregated  the same, where half of the GPUs hold engines
    in flight             disaggregated, where engines pause for a refit instead of finishing their step before it
                          (`rollout.refit_in_flight`), after as many tokens as an update takes on average
    discard               a rule of asynchronous systems, written here: as many groups are open, on as many
                          GPUs, steps train on those that are finished first, and a group that is staler than the limit
                          by then is thrown away and replaced

With `--evaluate` schedules that sample ahead answer held-out prompts by every version, too, beside the rollouts, and
compared with that, while the rollouts are paused.

Each is compared with `in step` by trained tokens per second, and shows the share of tokens that were thrown away, and
how far the mean length and reward of what was trained on are from those of all that was sampled for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import itertools
import math
import statistics
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from results import print_result, provenance
from torch.distributed import HashStore

from spmdrl.algo.seeds import mix, rollout_seed
from spmdrl.engine.protocol import Clock, RequestQueue
from spmdrl.rollout.clock import TOKENS_PER_TICK, RefitInFlight, TokenClock
from spmdrl.rollout.collect import Collector
from spmdrl.rollout.concurrent_eval import HeldOutAnswers, Rewarding, as_they_are
from spmdrl.rollout.group import PromptGroup
from spmdrl.rollout.part import CollectionRules, EnginePlace, GroupSource
from spmdrl.rollout.sampling import Sampling
from spmdrl.rollout.scheduler import EpisodeScheduler
from spmdrl.types import Prompt, Request, Response, RewardOutcome, Rollout, Span

GPUS_PER_ENGINE = 8
STEP_S, FULL_ROWS, MAX_ROWS = 0.008, 256, 256  # of a token, with up to this many rows; rows that run together
MEDIAN_TOKENS, SIGMA, MAX_TOKENS = 500.0, 0.9, 4000
GROUP_SIZE, GROUPS_PER_ENGINE = 8, 16  # in a step, for each 8 GPUs
TOOL_FRACTION, TOOL_S = 0.1, 4.0
REWARD_S, LATE_REWARD_S, LATE_FRACTION = 1.0, 30.0, 0.002
TRAINED_PER_GPU_S, REFIT_S = 1500.0, 1.0  # tokens, seconds
TRAINING_SHARE = 0.5  # of the GPUs, where the others hold engines
SEED = 11


def uniform(seed: int, purpose: int) -> float:
    """A number of a rollout, in (0, 1)."""
    return (mix(seed, purpose) % (1 << 30) + 0.5) / (1 << 30)


def tokens_of(seed: int) -> int:
    """The length of a response."""
    normal = statistics.NormalDist().inv_cdf(uniform(seed, 1))
    return min(MAX_TOKENS, max(1, round(MEDIAN_TOKENS * math.exp(SIGMA * normal))))


def tool_s(seed: int) -> float:
    """The time that a response waits for a tool before it begins."""
    return TOOL_S * 2 * uniform(seed, 3) if uniform(seed, 2) < TOOL_FRACTION else 0.0


def reward_of(seed: int) -> float:
    """1 for a right answer; longer ones are more often wrong."""
    return float(uniform(seed, 4) < 0.8 - 0.6 * tokens_of(seed) / MAX_TOKENS)


def reward_s(seed: int) -> float:
    """The time that a reward takes."""
    return LATE_REWARD_S if uniform(seed, 5) < LATE_FRACTION else REWARD_S


def seeds_of(prompt_id: int) -> list[int]:
    """The rollouts of a group under the rule that is written here."""
    return [rollout_seed(SEED, 0, prompt_id, index) for index in range(GROUP_SIZE)]


class World:
    """Simulated time. Of the threads that are in it one runs at a time: the one whose time comes first."""

    def __init__(self, count: int) -> None:
        self.now = 0.0
        self._turns = [threading.Semaphore(0) for _ in range(count)]
        self._sleepers: list[tuple[float, int]] = []
        self._local = threading.local()
        self._gathered: list[Any] = [None] * count
        self._num_gathered = 0

    def enter(self, index: int) -> None:
        """Become a thread of this world; the first turn is given by `begin`."""
        self._local.index = index
        self._turns[index].acquire()

    def begin(self) -> None:
        """Let the threads run, which all wait in `enter`."""
        self._sleepers = [(0.0, index) for index in range(len(self._turns))]
        heapq.heapify(self._sleepers)
        self._next()

    def end(self) -> None:
        """Leave the world."""
        if self._sleepers:
            self._next()

    def sleep(self, seconds: float) -> None:
        """Let others run for some time."""
        self.sleep_until(self.now + seconds)

    def sleep_until(self, time: float) -> None:
        """Let others run until then."""
        heapq.heappush(self._sleepers, (max(time, self.now), self._local.index))
        self._next()
        self._turns[self._local.index].acquire()

    def gather(self, value: Any) -> list[Any]:
        """Exchange values between all threads, as ranks do; all have the same time afterwards."""
        index = self._local.index
        self._gathered[index] = value
        self._num_gathered += 1
        if self._num_gathered == len(self._turns):
            self._num_gathered, self._everyones = 0, list(self._gathered)
            for other in range(len(self._turns)):
                heapq.heappush(self._sleepers, (self.now, other))
        self._next()
        self._turns[index].acquire()
        return self._everyones

    def _next(self) -> None:
        if self._sleepers:
            self.now, index = heapq.heappop(self._sleepers)
            self._turns[index].release()


class SimulatedEngine:
    """Takes the time of sampling, and yields responses of which only the length means something."""

    leads = True
    clock: Clock | None = None

    def __init__(self, world: World, *, full_rows: float) -> None:
        self.version = 0
        self._world, self._full_rows = world, full_rows
        self._is_aborted = False

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        """Sample; see `RolloutEngine.generate`."""
        self._is_aborted = False
        queue, rows, count = RequestQueue(requests), [], 0  # of rows: the count at which each ends
        started: dict[int, tuple[int, Request]] = {}
        while True:
            for place, request in queue.take(MAX_ROWS - len(rows)):
                wait = 0 if request.response_ids else round(tool_s(request.seed) / STEP_S)
                rest = tokens_of(request.seed) - len(request.response_ids)
                heapq.heappush(rows, (count + wait + rest, place))
                started[place] = (count + wait, request)
            if not rows:
                assert queue.is_empty
                return
            num_tokens = min(rows[0][0] - count, TOKENS_PER_TICK - count % TOKENS_PER_TICK)
            self._world.sleep(num_tokens * STEP_S * max(1.0, len(rows) / self._full_rows))
            for _ in range(num_tokens - 1):
                assert self.clock is not None and not self.clock.advance()
            count += num_tokens
            while rows and rows[0][0] == count:
                _, place = heapq.heappop(rows)
                begun, request = started.pop(place)
                yield place, self._response(request, count - begun, "stop")
            queue.ask_again()
            if (self.clock is not None and self.clock.advance()) or self._is_aborted:
                yield from ((i, self._response(r, max(0, count - begun), "abort")) for i, (begun, r) in started.items())
                return

    def abort(self) -> None:
        """End what runs."""
        self._is_aborted = True

    def ask_soon(self) -> None:
        """Do nothing: no environment answers here."""

    def _response(self, request: Request, count: int, reason: Any) -> Response:
        spans = (Span(self.version, count),) if count else ()
        return Response(token_ids=(0,) * count, logprobs=(0.0,) * count, finish_reason=reason, spans=spans)


class Prompts:
    """A stream of prompts without words."""

    def take(self, start: int, count: int) -> list[Prompt]:
        """Make prompts."""
        return [
            Prompt(prompt_id=i, token_ids=(1,), text="", answer=None, task="t", metadata={})
            for i in range(start, start + count)
        ]


class Restarts:
    """Engines that never die."""

    wanted = False

    def carry(self, work: Callable[[], Any], **_: Any) -> Any:
        """Do the work."""
        return work()


@dataclass
class Account:
    """Tokens, seconds and lengths of a simulated schedule, in the steps after the warm-up."""

    seconds: float
    lengths: list[int]  # of the rollouts that were trained on
    rewards: list[float]
    lost_lengths: list[int]  # of those that were thrown away
    lost_rewards: list[float]
    staleness: float  # greatest, in steps
    stale_tokens: float = 0.0  # tokens that were trained on, each times its staleness

    def row(self, name: str, gpus: int, staleness: int) -> dict[str, Any]:
        """Make a row of the result, without what compares it."""
        num_tokens, num_lost = sum(self.lengths), sum(self.lost_lengths)
        return {
            "schedule": name,
            "gpus": gpus,
            "max_staleness": staleness,
            "tokens_per_s": num_tokens / self.seconds,
            "thrown_away_fraction": num_lost / (num_lost + num_tokens),
            "length_bias": statistics.fmean(self.lengths) / statistics.fmean(self.lengths + self.lost_lengths) - 1,
            "reward_bias": statistics.fmean(self.rewards) / statistics.fmean(self.rewards + self.lost_rewards) - 1,
            "max_staleness_seen": self.staleness,
            "mean_staleness": self.stale_tokens / num_tokens,
        }


def simulate(
    gpus: int,
    *,
    groups: int,
    staleness: int,
    apart: bool,
    steps: int,
    warmup: int,
    in_flight: bool = False,
    held_out: int = 0,
    pauses: bool = False,
) -> Account:
    """Let the scheduler of a run collect some steps on all GPUs in turns, or `apart` on half of them.

    Each engine answers `held_out` prompts by each version: beside the rollouts, or where an evaluation `pauses` them,
    before they go on.
    """
    training = round(gpus * TRAINING_SHARE) if apart else gpus
    sampling = gpus - training if apart else gpus
    count = max(1, sampling // GPUS_PER_ENGINE)
    ahead = min(1, staleness) if apart else 0
    rules = CollectionRules(
        groups_per_step=groups,
        extra_groups=groups * (staleness - ahead),
        max_groups=groups * (1 + staleness - ahead),
        oldest_first=staleness > 0,
        carries_over=staleness > ahead,
        max_staleness=staleness,
        steps_ahead=ahead,
        refit_after=refit_after(groups, training),
        in_order=True,
    )
    world, store = World(count), HashStore()
    full_rows = FULL_ROWS * sampling / count / GPUS_PER_ENGINE
    ends, found = {0: 0.0, -1: 0.0}, Account(0.0, [], [], [], [], 0.0)

    def submit(rollout: Rollout) -> tuple[Rollout, Future[RewardOutcome]]:
        future: Future[RewardOutcome] = Future()
        future.set_result(RewardOutcome(reward=reward_of(rollout.seed), parts={"ready": world.now}))
        return rollout, future

    def rank(index: int) -> None:
        world.enter(index)
        engine: Any = SimulatedEngine(world, full_rows=full_rows)
        mesh: Any = SimpleNamespace(get_local_rank=lambda: index, gather=world.gather)
        sampling = Sampling(
            group_size=GROUP_SIZE, temperature=1.0, max_response_tokens=MAX_TOKENS, stop_token_ids=frozenset()
        )
        answers = HeldOutAnswers()

        def evaluate() -> None:
            if not held_out:
                return
            prompts = Prompts().take(held_out * index, held_out)
            asked = dataclasses.replace(sampling, group_size=1)
            opened = [PromptGroup.opened(one, asked, None, step=0, run_seed=SEED) for one in prompts]
            answers.ask(opened, Rewarding(submit, as_they_are), lambda pending: None)
            if pauses:
                engine.clock = TokenClock()
                EpisodeScheduler(engine).run(answers.episodes, answers.add)

        collector = Collector(
            EnginePlace(engine, index, count, mesh, Restarts()),  # type: ignore[arg-type]
            GroupSource(
                Prompts(),  # type: ignore[arg-type]
                sampling,
                SEED,
                submit,
            ),
            rules,
            store=None,
            clocks=store,
            message=lambda line: None,
            held_out=answers,
        )
        for step in range(1, steps + 1):
            world.sleep_until(ends[step - 1 - ahead] + REFIT_S)
            engine.version = step - 1 - ahead if step > ahead else 0
            if not in_flight:
                evaluate()

            def take(engine: Any = engine, step: int = step) -> None:
                world.gather(None)
                world.sleep_until(ends[step - 1] + REFIT_S)
                engine.version = step - 1
                evaluate()

            flight = RefitInFlight(lambda: False, take) if in_flight and engine.version < step - 1 else None
            collected = collector.collect(step, flight)
            mine = [(rollout, future.result()) for rollout, future in collected.pending]
            parts = world.gather((mine, collected.metrics))
            outcomes = [outcome for part, _ in parts for outcome in part]
            ready = max(outcome.parts["ready"] + reward_s(rollout.seed) for rollout, outcome in outcomes)
            num_tokens = sum(rollout.num_sampled for rollout, _ in outcomes)
            begin = max(ready, world.now, ends[step - 1])
            ends[step] = begin + num_tokens / training / TRAINED_PER_GPU_S
            if index == 0 and step > warmup:
                found.lengths += [rollout.num_sampled for rollout, _ in outcomes]
                found.rewards += [outcome.reward for _, outcome in outcomes]
                spans = [span for rollout, _ in outcomes for response in rollout.responses for span in response.spans]
                found.stale_tokens += sum((step - 1 - span.version) * span.num_tokens for span in spans)
                lost = [metrics.get("rollout/discarded_tokens") for _, metrics in parts]
                assert not any(metric.value() for metric in lost if metric is not None)
                stale = [metrics.get("rollout/max_staleness_steps") for _, metrics in parts]
                found.staleness = max([found.staleness, *(metric.value() for metric in stale if metric is not None)])
                found.seconds = ends[step] - ends[warmup]
        world.end()

    with (
        mock.patch("spmdrl.rollout.collect.gather_objects", lambda mesh, value: mesh.gather(value)),
        mock.patch("spmdrl.rollout.clock.time", SimpleNamespace(sleep=lambda _: world.sleep(TOKENS_PER_TICK * STEP_S))),
        ThreadPoolExecutor(count) as pool,
    ):
        futures = [pool.submit(rank, index) for index in range(count)]
        world.begin()
        for future in futures:
            future.result()
    return found


def refit_after(groups: int, training: int) -> int:
    """The tokens of each row that engines sample while `training` GPUs update on a step of average length."""
    mean = statistics.fmean(tokens_of(seed) for number in range(100) for seed in seeds_of(number))
    seconds = groups * GROUP_SIZE * mean / training / TRAINED_PER_GPU_S + REFIT_S
    return round(seconds / STEP_S / TOKENS_PER_TICK) * TOKENS_PER_TICK


def discard(gpus: int, *, groups: int, staleness: int, steps: int, warmup: int) -> Account:
    """Train on what is finished first, and throw away what has become too stale: the rule that is compared with."""
    limit, training = groups * (staleness + 1), round(gpus * TRAINING_SHARE)
    most = round((gpus - training) / GPUS_PER_ENGINE * MAX_ROWS) // GROUP_SIZE  # groups that run together
    found = Account(0.0, [], [], [], [], 0.0)
    running: list[tuple[float, int, int]] = []  # end, group, version
    finished: list[tuple[int, int]] = []  # group, version
    numbers, now, version, update_end = itertools.count(), 0.0, 0, math.inf
    ends: list[float] = []  # of updates
    while version < steps:
        while len(running) < most and len(running) + len(finished) < limit:
            number = next(numbers)
            duration = max(tool_s(seed) + tokens_of(seed) * STEP_S + reward_s(seed) for seed in seeds_of(number))
            heapq.heappush(running, (now + duration, number, version))
        if update_end <= running[0][0]:
            now, version, update_end = update_end, version + 1, math.inf
            ends.append(now)
        else:
            now, number, begun = heapq.heappop(running)
            finished.append((number, begun))
        if update_end < math.inf:
            continue
        late = [number for number, begun in finished if version - begun > staleness]
        finished = [(number, begun) for number, begun in finished if version - begun <= staleness]
        trained, finished = (finished[:groups], finished[groups:]) if len(finished) >= groups else ([], finished)
        seeds = [seed for number, _ in trained for seed in seeds_of(number)]
        if seeds:
            update_end = now + sum(map(tokens_of, seeds)) / training / TRAINED_PER_GPU_S + REFIT_S
        if version >= warmup:
            lost = [seed for number in late for seed in seeds_of(number)]
            found.lost_lengths += map(tokens_of, lost)
            found.lost_rewards += map(reward_of, lost)
            found.lengths += map(tokens_of, seeds)
            found.rewards += map(reward_of, seeds)
            found.staleness = max([found.staleness, *(float(version - begun) for _, begun in trained)])
            found.stale_tokens += sum((version - begun) * sum(map(tokens_of, seeds_of(i))) for i, begun in trained)
    found.seconds = ends[-1] - ends[warmup - 1]
    return found


def rows_of(gpus: int, groups: int, limits: Sequence[int], *, steps: int, warmup: int) -> Iterator[dict[str, Any]]:
    """Simulate every schedule on a machine; `groups` of a step for each 8 GPUs."""
    options = {"groups": groups * gpus // GPUS_PER_ENGINE, "steps": steps, "warmup": warmup}
    in_step = simulate(gpus, staleness=0, apart=False, **options).row("in step", gpus, 0)
    yield in_step | {"ratio": 1.0}
    for limit in limits:
        for name, account in (
            ("ahead, colocated", simulate(gpus, staleness=limit, apart=False, **options)),
            ("ahead, disaggregated", simulate(gpus, staleness=limit, apart=True, **options)),
            ("in flight", simulate(gpus, staleness=limit, apart=True, in_flight=True, **options)),
            ("discard", discard(gpus, staleness=limit, **options)),
        ):
            row = account.row(name, gpus, limit)
            yield row | {"ratio": row["tokens_per_s"] / in_step["tokens_per_s"]}


def evaluated(gpus: int, groups: int, limits: Sequence[int], count: int, **options: int) -> Iterator[dict[str, Any]]:
    """Simulate schedules in which each engine answers `count` held-out prompts by every version."""
    options = {"groups": groups * gpus // GPUS_PER_ENGINE, "held_out": count, **options}
    for limit in limits:
        for name, apart in (("ahead, colocated", False), ("in flight", True)):
            paused, beside = (
                simulate(gpus, staleness=limit, apart=apart, in_flight=apart, pauses=pauses, **options).row(
                    f"{name}, evaluation {'alone' if pauses else 'beside'}", gpus, limit
                )
                for pauses in (True, False)
            )
            for row in (paused, beside):
                yield row | {"ratio": row["tokens_per_s"] / paused["tokens_per_s"]}


def main() -> int:
    """Simulate each machine, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", nargs="+", type=int, default=[8, 64, 256, 1024])
    parser.add_argument("--staleness", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--groups", type=int, default=GROUPS_PER_ENGINE, help="of a step, for each 8 GPUs")
    parser.add_argument("--steps", type=int, default=14, help="of which the first do not count")
    parser.add_argument("--warmup", type=int, default=6)
    parser.add_argument("--evaluate", type=int, default=0, help="held-out prompts of each engine, by each version")
    parser.add_argument("--result", type=Path, help="a file for the result")
    args = parser.parse_args()
    before = provenance()
    rows = []
    for gpus in args.gpus:
        options = {"steps": args.steps, "warmup": args.warmup}
        for row in (
            evaluated(gpus, args.groups, args.staleness, args.evaluate, **options)
            if args.evaluate
            else rows_of(gpus, args.groups, args.staleness, **options)
        ):
            rows.append(row)
            numbers = {name: value for name, value in row.items() if isinstance(value, float)}
            print(row["gpus"], row["schedule"], row["max_staleness"], numbers, file=sys.stderr)
    content = {**before, "simulated": True, "groups_per_8_gpus": args.groups, "rows": rows}
    if args.evaluate:
        content["held_out_per_engine"] = args.evaluate
    print_result(content, args.result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
