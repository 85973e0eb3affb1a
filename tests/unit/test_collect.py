"""Which prompt groups a step collects, however many engines open them and however long each of them takes."""

from __future__ import annotations

import itertools
import json
import math
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed import HashStore, Store
from transformers import AutoModelForCausalLM

import spmdrl.dist.collectives
import spmdrl.engine.start
import spmdrl.rollout.collect
from spmdrl.algo.metrics import merge_all, scalars
from spmdrl.algo.seeds import mix, rollout_seed
from spmdrl.config.environment import ClassEnvironment, EnvironmentConfig
from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.engine.protocol import EngineDied
from spmdrl.engine.start import MAX_RESTARTS, Restarts
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.model.attention import IMPLEMENTATION
from spmdrl.refit.refit import load_whole
from spmdrl.rollout.clock import TOKENS_PER_TICK, RefitInFlight
from spmdrl.rollout.collect import Collected, Collector
from spmdrl.rollout.concurrent_eval import Rewarding, as_they_are
from spmdrl.rollout.curriculum import InOrder
from spmdrl.rollout.env_context import EnvContext
from spmdrl.rollout.episode import Episode
from spmdrl.rollout.group import PromptGroup
from spmdrl.rollout.part import CollectionRules, EnginePlace, GroupSource
from spmdrl.rollout.sampling import Sampling
from spmdrl.rollout.scheduler import sample
from spmdrl.rollout.tickets import SharedTickets
from spmdrl.types import Prompt, Request, Response, RewardOutcome, Rollout, Span, UserError
from tests.helpers import exact
from tests.helpers.environments import fake_world
from tests.helpers.exact import skip_where_inexact
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.models import save_llama, save_qwen3

GROUP_SIZE = 3
SAMPLING = Sampling(group_size=GROUP_SIZE, temperature=1.0, max_response_tokens=30, stop_token_ids=frozenset())
ROUTED = replace(SAMPLING, reports_routes=True)
LONG = replace(SAMPLING, max_response_tokens=6000)
PLAIN = CollectionRules(groups_per_step=8, max_groups=8)
OVERSAMPLED = CollectionRules(groups_per_step=8, extra_groups=4, max_groups=12)
PARTIAL = replace(OVERSAMPLED, carries_over=True, max_staleness=100)
OLDEST_FIRST = CollectionRules(
    groups_per_step=8, extra_groups=16, max_groups=24, oldest_first=True, carries_over=True, max_staleness=2
)
DYNAMIC = CollectionRules(groups_per_step=8, max_groups=32, drops_equal=True)
BASELINE = GROUP_SIZE  # the sample index of a group's greedy response, where it has one

Samples = dict[tuple[int, int], Response]  # by prompt_id and sample_index


class FakePrompts:
    def __init__(self, broken: int | None = None) -> None:
        self._broken = broken

    def take(self, start: int, count: int) -> list[Prompt]:
        if start == self._broken:
            raise UserError(f"prompt {start} is broken")
        return [
            Prompt(prompt_id=i, token_ids=(2 + i % 90, 3), text=f"{i}", answer=None, task="t", metadata={})
            for i in range(start, start + count)
        ]


class Ranks:
    """Threads that gather like ranks."""

    def __init__(self, count: int) -> None:
        self.slots: list[Any] = [None] * count
        self.barrier = threading.Barrier(count, timeout=30)


@dataclass
class Mesh:
    ranks: Ranks
    rank: int

    def get_local_rank(self) -> int:
        return self.rank

    def gather(self, value: Any) -> list[Any]:
        self.ranks.slots[self.rank] = value
        self.ranks.barrier.wait()
        everyones = list(self.ranks.slots)
        self.ranks.barrier.wait()
        return everyones


@pytest.fixture(autouse=True)
def _threads_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (spmdrl.dist.collectives, spmdrl.rollout.collect, spmdrl.engine.start):
        monkeypatch.setattr(module, "gather_objects", lambda mesh, value: mesh.gather(value))


def is_equal_group(prompt_id: int) -> bool:
    return prompt_id % 3 == 1


def judge(delay_s: Callable[[Rollout], float] | None = None) -> Callable[[Rollout], tuple[Rollout, Any]]:
    """Rewards that are all equal in a third of the groups, each after a while."""

    def outcome(rollout: Rollout) -> RewardOutcome:
        if delay_s:
            time.sleep(delay_s(rollout))
        prompt_id, index = rollout.prompt.prompt_id, rollout.sample_index
        return RewardOutcome(reward=0.5 if is_equal_group(prompt_id) else index / 7, parts={"p": index / 3})

    pool = ThreadPoolExecutor(4) if delay_s else None

    def submit(rollout: Rollout) -> tuple[Rollout, Any]:
        if pool:
            return rollout, pool.submit(outcome, rollout)
        future: Future[RewardOutcome] = Future()
        future.set_result(outcome(rollout))
        return rollout, future

    return submit


@dataclass
class Run:
    """The collectors of all ranks, with what they said."""

    collectors: list[Collector]
    engines: list[Any]
    messages: list[str]
    restarts: list[Restarts]
    schedules: list[Any]

    def step(self, step: int, flights: list[RefitInFlight | None] | None = None) -> list[Collected]:
        """What each rank collected."""

        def collect(collector: Collector) -> Collected:
            try:
                return collector.collect(step, flights and flights[collector._place.index])
            except BaseException:
                collector._place.mesh.ranks.barrier.abort()  # the end of a rank breaks the collectives of the others
                raise

        with ThreadPoolExecutor(len(self.collectors)) as pool:
            futures = [pool.submit(collect, collector) for collector in self.collectors]
            return [future.result(timeout=60) for future in futures]

    def steps(
        self, first: int, last: int, *, ask: Callable[[Collector], None] = lambda _: None
    ) -> list[tuple[Samples, dict[str, float]]]:
        """The samples and the metrics of each step; as in training, each has engines one version on, of which `ask`
        is called."""
        results = []
        for step in range(first, last + 1):
            for collector in self.collectors:
                collector._place.engine.version = step - 1
                ask(collector)
            everyones = self.step(step)
            metrics = scalars(merge_all([collected.metrics for collected in everyones]))
            results.append((samples_of(everyones), metrics))
        return results

    def steps_in_flight(
        self,
        first: int,
        last: int,
        *,
        after_s: float = 0.0,
        after_tokens: int = 0,
        ask: Callable[[Collector], None] = lambda _: None,
    ) -> list[tuple[Samples, dict[str, float]]]:
        """Each step begins with engines one version older, and the newer weights are there after a
        while, and for an engine not before it has sampled some tokens; then `ask` is called."""
        results, meeting = [], threading.Barrier(len(self.engines), timeout=30)

        def flight(engine: Any, step: int, since: float) -> RefitInFlight | None:
            def take() -> None:
                meeting.wait()
                engine.version += 1
                ask(self.collectors[self.engines.index(engine)])

            def is_announced() -> bool:
                return (
                    time.monotonic() >= since and engine.clock is not None and engine.clock.num_tokens >= after_tokens
                )

            return RefitInFlight(is_announced, take) if engine.version < step - 1 else None

        for step in range(first, last + 1):
            for engine in self.engines:
                engine.version = max(0, step - 2)
            flights = [flight(engine, step, time.monotonic() + after_s) for engine in self.engines]
            everyones = self.step(step, flights)
            assert all(engine.version == step - 1 for engine in self.engines)
            results.append((samples_of(everyones), scalars(merge_all([one.metrics for one in everyones]))))
        return results

    def state(self, step: int) -> dict[str, Any]:
        with ThreadPoolExecutor(len(self.collectors)) as pool:
            states = list(pool.map(lambda collector: collector.state(step), self.collectors))
        assert all(state == states[0] for state in states)
        return json.loads(json.dumps(states[0]))


def start(
    rules: CollectionRules,
    engines: list[Any],
    *,
    shared: bool = True,
    submit: Callable[[Rollout], Any] | None = None,
    sampling: Sampling = SAMPLING,
    prompts: list[FakePrompts] | None = None,
    store: HashStore | None = None,
    revive: bool = False,
    world: EnvContext | None = None,
    follows: list[Any] | None = None,
) -> Run:
    ranks, messages, store = Ranks(len(engines)), [], store or HashStore()
    schedules: list[Any] = []
    meshes: list[Any] = [Mesh(ranks, rank) for rank in range(len(engines))]
    restarts = [
        Restarts(mesh, (lambda: None) if revive else None, message=messages.append if rank == 0 else lambda text: None)
        for rank, mesh in enumerate(meshes)
    ]
    collectors = [
        Collector(
            EnginePlace(engine, rank, len(engines), meshes[rank], restarts[rank]),
            GroupSource(
                prompts[rank] if prompts else FakePrompts(),  # type: ignore[arg-type]
                sampling,
                11,
                submit or judge(),
                world,
            ),
            rules,
            store=store if shared else None,
            clocks=None if shared else store,
            follows=None if follows is None else dict(enumerate(follows, start=1)),
            record=(lambda step, schedule: schedules.append(schedule)) if rank == 0 else lambda step, schedule: None,
            message=messages.append if rank == 0 else lambda text: None,
        )
        for rank, engine in enumerate(engines)
    ]
    return Run(collectors, engines, messages, restarts, schedules)


class Evaluations:
    """An evaluation of each version, of the same two prompts of each engine."""

    def __init__(self) -> None:
        self.delivered: list[tuple[int, list[Any]]] = []  # version, and what was answered

    def ask(self, collector: Collector) -> None:
        engine, collected = collector._place.engine, collector._held_out
        collected.deliver(waits=True)
        version = engine.version

        def deliver(pending: Any) -> None:
            assert engine.version == version
            self.delivered.append((version, list(pending)))

        prompts = FakePrompts().take(3 + collector._place.index, 2)  # rollouts have the same ones
        groups = [PromptGroup.opened(one, LONG, None, step=0, run_seed=5) for one in prompts]
        collected.ask(groups, Rewarding(judge(), as_they_are), deliver)

    @property
    def tokens(self) -> dict[tuple[int, int, int], tuple[int, ...]]:
        """The tokens of each answer, by version, prompt and sample."""
        return {
            (version, one.prompt.prompt_id, one.sample_index): one.responses[0].token_ids
            for version, pending in self.delivered
            for one, _ in pending
        }


def samples_of(everyones: list[Collected]) -> Samples:
    """By prompt_id and sample_index; checks that places are those of whole groups in the order of their prompts.

    Greedy responses have no place, and follow at the end.
    """
    everything = [(everyone, rollout) for everyone in everyones for rollout, _ in everyone.pending]
    rollouts = {everyone.index_of(rollout): rollout for everyone, rollout in everything if not rollout.is_baseline}
    assert sorted(rollouts) == list(range(len(rollouts)))
    in_order = [(rollouts[i].prompt.prompt_id, rollouts[i].sample_index) for i in sorted(rollouts)]
    assert in_order == sorted(in_order)
    assert len(in_order) == GROUP_SIZE * len({prompt_id for prompt_id, _ in in_order})
    baselines = [rollout for _, rollout in everything if rollout.is_baseline]
    return {
        (rollout.prompt.prompt_id, rollout.sample_index): rollout.responses[0]
        for rollout in [*(rollouts[i] for i in sorted(rollouts)), *baselines]
    }


def whole_request(rollout: Rollout, sampling: Sampling) -> Request:
    """Request the response of a rollout from its beginning."""
    episode = Episode(prompt=rollout.prompt, sample_index=0, seed=rollout.seed, sampling=sampling)
    episode.begin()
    return episode.request()


def prompt_ids(samples: Samples) -> list[int]:
    return sorted({prompt_id for prompt_id, _ in samples})


def only_samples(results: list[tuple[Samples, dict[str, float]]]) -> list[Samples]:
    return [samples for samples, _ in results]


class MortalEngine(FakeEngine):
    """Dies after so many responses, with what it was sampling, as often as it is told to."""

    def __init__(self, *, responses: int, deaths: int = 1, **options: Any) -> None:
        super().__init__(**options)
        self._responses, self._deaths = responses, deaths

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        for number, answer in enumerate(super().generate(requests)):
            if self._deaths and number == self._responses:
                self._deaths -= 1
                raise EngineDied("the fake engine was killed")
            yield answer


def fast_and_slow() -> list[FakeEngine]:
    return [FakeEngine(), FakeEngine(max_running=2, tick_s=0.001)]


class CountingStore(Store):
    """A store in this process that counts requests."""

    def __init__(self) -> None:
        super().__init__()
        self.num_requests = 0
        self._values: dict[str, int] = {}

    def add(self, key: str, amount: int) -> int:
        self.num_requests += 1
        self._values[key] = self._values.get(key, 0) + amount
        return self._values[key]


def test_an_engine_asks_the_store_little() -> None:
    """docs/scaling.md says for how many engines one store is enough: three requests take a ticket, one sees that no
    permit is left, and who has met the last ticket does not ask again."""
    store = CountingStore()
    tickets = SharedTickets(store, step=1, wanted=2, permits=2, num_tickets=2)
    late = SharedTickets(store, step=1, wanted=2, permits=2, num_tickets=2)

    def asks(who: SharedTickets) -> tuple[int | None, int]:
        before = store.num_requests
        return who.take(), store.num_requests - before

    assert [asks(tickets), asks(tickets), asks(late)] == [(0, 3), (1, 3), (None, 1)]
    late.drop()
    assert [asks(late), asks(late), asks(tickets)] == [(None, 4), (None, 0), (None, 4)]
    assert late.is_empty() and tickets.is_empty()


def test_a_step_collects_the_same_however_many_engines_there_are_and_however_they_share() -> None:
    alone = start(PLAIN, [FakeEngine()]).steps(1, 3)
    assert [prompt_ids(samples) for samples, _ in alone] == [list(range(8 * i, 8 * i + 8)) for i in range(3)]
    shared = start(PLAIN, fast_and_slow())
    static = start(PLAIN, fast_and_slow(), shared=False)
    assert only_samples(shared.steps(1, 3)) == only_samples(static.steps(1, 3)) == only_samples(alone)
    assert not shared.messages and not static.messages
    assert len(shared.engines[0].asked) > len(shared.engines[1].asked) > 0, "the fast engine opens more, not all"


def test_a_response_is_being_scored_before_the_next_one_is_sampled() -> None:
    submitted = []

    class Watching(FakeEngine):
        def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
            for count, answer in enumerate(super().generate(requests), start=1):
                yield answer
                assert len(submitted) == count

    score = judge()
    start(PLAIN, [Watching()], submit=lambda rollout: submitted.append(rollout) or score(rollout)).step(1)
    assert len(submitted) == PLAIN.groups_per_step * GROUP_SIZE


def test_ranks_that_do_not_lead_an_engine_open_nothing() -> None:
    engines = [FakeEngine(), FakeEngine()]
    engines[1].leads = False
    run = start(PLAIN, engines)
    first, second = run.step(1)
    assert not second.pending and len(first.pending) == 8 * GROUP_SIZE


def test_a_step_leaves_nothing_in_the_store() -> None:
    store = HashStore()
    before = store.num_keys()
    start(OVERSAMPLED, fast_and_slow(), store=store).steps(1, 2)
    assert store.num_keys() == before


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "static"])
@pytest.mark.parametrize("num_engines", [1, 2])
def test_dynamic_sampling_keeps_the_first_groups_whose_rewards_differ(shared: bool, num_engines: int) -> None:
    run = start(DYNAMIC, fast_and_slow()[:num_engines], shared=shared, submit=judge(lambda r: mix(r.seed) % 5 / 1000))
    first = 0
    for samples, metrics in run.steps(1, 2):
        kept = prompt_ids(samples)
        assert len(kept) == 8 and not any(map(is_equal_group, kept))
        if shared or num_engines == 1:
            opened = range(first, kept[-1] + 1)
            assert kept == [i for i in opened if not is_equal_group(i)]
            assert metrics["rollout/opened_groups_count"] == len(opened)
            assert metrics["rollout/equal_groups_count"] == len(opened) - 8
            assert metrics["reward/equal_groups_fraction"] == 1.0  # of the dropped; the kept ones join in score.py
            first = kept[-1] + 1
        assert metrics["rollout/kept_groups_fraction"] == 1.0
    assert not run.messages


def test_groups_of_equal_rewards_are_measured_and_counted_too() -> None:
    """A curriculum would never learn that a prompt is too easy or too hard from the groups that are trained on."""
    run, measured = start(DYNAMIC, [FakeEngine()]), list[PromptGroup]()

    class Recording(InOrder):
        def rates(self, groups: Iterable[PromptGroup]) -> list[tuple[int, float]]:
            measured.extend(groups)
            return []

    run.collectors[0]._curriculum = Recording()
    ((samples, metrics),) = run.steps(1, 1)
    opened = range(prompt_ids(samples)[-1] + 1)
    dropped = [group for group in measured if is_equal_group(group.prompt.prompt_id)]
    assert sorted(group.prompt.prompt_id for group in measured) == list(opened) and len(dropped) == len(opened) - 8
    sampled = [response for group in dropped for episode in group.episodes for response in episode.responses]
    assert metrics["rollout/discarded_tokens"] == sum(len(response.token_ids) for response in sampled) > 0
    mean = (8 * 1 / 7 + 0.5 * len(dropped)) / len(opened)  # as `judge` rewards them
    assert metrics["reward/all_groups_mean"] == pytest.approx(mean, abs=1e-12)


def test_shared_dynamic_sampling_is_that_of_one_rank_sample_for_sample() -> None:
    alone = start(DYNAMIC, [FakeEngine()]).steps(1, 2)
    shared = start(DYNAMIC, fast_and_slow(), submit=judge(lambda r: random.random() / 200)).steps(1, 2)
    assert only_samples(alone) == only_samples(shared)


def test_deterministic_dynamic_sampling_does_not_depend_on_how_long_rewards_take() -> None:
    runs = []
    for delay_s in (lambda r: 0.0, lambda r: random.random() / 200, lambda r: 0.004 * (r.prompt.prompt_id % 4)):
        run = start(DYNAMIC, fast_and_slow(), shared=False, submit=judge(delay_s))
        found = run.steps(1, 2, ask=Evaluations().ask)
        runs.append((only_samples(found), [engine.asked for engine in run.engines]))
    assert runs[0] == runs[1] == runs[2]  # what was sampled, and in which company


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "static"])
def test_opening_stops_at_the_limit_and_says_so(shared: bool) -> None:
    run = start(replace(DYNAMIC, max_groups=10), fast_and_slow(), shared=shared)
    ((samples, metrics),) = run.steps(1, 1)
    assert prompt_ids(samples) == [i for i in range(10) if not is_equal_group(i)]
    num_kept = len(prompt_ids(samples))
    assert num_kept < 8 and metrics["rollout/kept_groups_fraction"] == num_kept / 8
    assert run.messages == [
        f"step 1 trains on {num_kept} of 8 prompt groups: 10 were opened (the limit is 10) and "
        f"{10 - num_kept} had equal rewards"
    ]


def test_a_step_ends_when_it_has_enough_and_throws_the_rest_away() -> None:
    run = start(OVERSAMPLED, fast_and_slow())
    (first, metrics), (second, _) = run.steps(1, 2)
    assert len(prompt_ids(first)) == len(prompt_ids(second)) == 8
    assert prompt_ids(first)[-1] < 12 and min(prompt_ids(second)) >= 8
    assert not set(prompt_ids(first)) & set(prompt_ids(second))
    assert metrics["rollout/aborted_count"] > 0
    assert metrics["rollout/discarded_tokens"] >= metrics["rollout/aborted_tokens"]
    assert run.state(2)["carried"] == []
    assert metrics["reward/sampled_mean"] >= 0
    ((_, metrics),) = start(replace(OVERSAMPLED, rewards_are_whole=False), fast_and_slow()).steps(1, 1)
    assert math.isnan(metrics["reward/sampled_mean"]), "of these rewards a term is missing"
    ((_, metrics),) = start(replace(OVERSAMPLED, has_rewards=False), fast_and_slow()).steps(1, 1)
    assert not any(name.startswith("reward/") for name in metrics)


def test_no_engine_waits_for_its_slowest_response() -> None:
    """One engine runs a response that takes a minute when the other keeps the last group."""
    endless = FakeEngine(max_running=1, tick_s=0.01, length=lambda seed: 6000)
    run = start(OVERSAMPLED, [FakeEngine(), endless], sampling=LONG)
    began = time.monotonic()
    ((samples, metrics),) = run.steps(1, 1)
    assert time.monotonic() - began < 10
    assert len(prompt_ids(samples)) == 8 and 0 < metrics["rollout/aborted_tokens"] < 1000


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoModelForCausalLM.from_pretrained(save_qwen3(tmp_path_factory.mktemp("model")))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rollout_that_goes_on_ends_like_one_that_was_never_interrupted(model: Any, temperature: float) -> None:
    sampling = replace(SAMPLING, temperature=temperature, stop_token_ids=frozenset(range(2, 12)))
    engine = TorchEngine(model.config, device=torch.device("cpu"), dtype=torch.float32, kernel="sdpa", max_running=8)
    load_whole(engine, dict(model.named_parameters()), version=0)
    rules = replace(PARTIAL, groups_per_step=4, extra_groups=4, max_groups=8)
    run = start(rules, [engine], sampling=sampling)
    continued = 0.0
    for step in range(1, 8):
        (collected,) = run.step(step)
        continued += scalars(collected.metrics)["rollout/continued_count"]
        requests = [whole_request(rollout, sampling) for rollout, _ in collected.pending]
        whole = dict(engine.generate(requests))
        for place, (rollout, _) in enumerate(collected.pending):
            (response,) = rollout.responses
            assert replace(response, logprobs=()) == replace(whole[place], logprobs=())
            torch.testing.assert_close(
                torch.tensor(response.logprobs), torch.tensor(whole[place].logprobs), rtol=0, atol=1e-5
            )
    assert continued >= 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("save", [save_qwen3, save_llama])
def test_a_rollout_that_goes_on_is_scored_with_the_bits_it_was_sampled_with(
    tmp_path: Path, save: Callable[[Path], str], dtype: torch.dtype
) -> None:
    """Under `true_on_policy` by the same weights: a prefix of an earlier step is filled in, and was decoded."""
    skip_where_inexact(tmp_path / "exact", dtype)
    model = AutoModelForCausalLM.from_pretrained(save(tmp_path / "model"), attn_implementation=IMPLEMENTATION)
    policy, engine = exact.policy_for(model, dtype), exact.engine_for(model, dtype, max_running=8)
    sampling = replace(SAMPLING, temperature=exact.TEMPERATURE, stop_token_ids=frozenset(range(2, 12)))
    rules = replace(PARTIAL, groups_per_step=4, extra_groups=4, max_groups=8, with_baseline=True)
    run = start(rules, [engine], sampling=sampling)
    continued = 0.0
    for step in range(1, 4):
        (collected,) = run.step(step)
        continued += scalars(collected.metrics)["rollout/continued_count"]
        done = [(whole_request(r, sampling), r.responses[0]) for r, _ in collected.pending if not r.is_baseline]
        assert exact.largest_mismatch(policy, done, per_micro_batch=5) == 0.0
    assert continued >= 3


def test_staleness_is_counted_from_the_oldest_tokens() -> None:
    engine = FakeEngine(length=lambda seed: 400 if seed % 17 == 0 else 1 + seed % 20)
    run = start(replace(PARTIAL, max_staleness=2), [engine], sampling=LONG)
    highest = 0.0
    for step, (samples, metrics) in enumerate(run.steps(1, 8), start=1):
        oldest = [step - 1 - response.oldest_version for response in samples.values()]
        tokens = [
            (step - 1 - span.version) for r in samples.values() for span in r.spans for _ in range(span.num_tokens)
        ]
        assert metrics["rollout/max_staleness_steps"] == max(oldest) <= 2
        assert metrics["rollout/mean_staleness_steps"] == pytest.approx(sum(tokens) / len(tokens))
        highest = max(highest, *oldest)
    assert highest == 2


def test_a_group_that_is_too_stale_is_sampled_again_from_its_prompt() -> None:
    run = start(replace(PARTIAL, max_staleness=0), [FakeEngine()])
    run.steps(1, 1)
    waiting = {group["prompt_id"]: group for group in run.state(1)["carried"]}
    assert waiting
    ((samples, metrics),) = run.steps(2, 2)
    again = set(prompt_ids(samples)) & waiting.keys()
    assert again and metrics["rollout/stale_groups_count"] == len(waiting)
    assert metrics["rollout/continued_count"] == 0 == metrics["rollout/max_staleness_steps"]
    for prompt_id, index in itertools.product(again, range(GROUP_SIZE)):
        token = mix(rollout_seed(11, 2, prompt_id, index), 0) % 50
        assert samples[prompt_id, index].token_ids[0] == token


@pytest.mark.parametrize("rules", [PLAIN, PARTIAL, DYNAMIC], ids=["plain", "partial", "dynamic"])
def test_a_greedy_response_comes_with_every_group_and_changes_nothing_else(rules: CollectionRules) -> None:
    """Where the others' rewards are equal the greedy one's is here too, so that the same groups are dropped."""
    with_greedy = replace(rules, with_baseline=True)
    run = start(with_greedy, fast_and_slow())
    found = run.steps(1, 3)
    for samples, _ in found:
        assert [index for _, index in samples].count(BASELINE) == len(prompt_ids(samples))
        assert {prompt_id for prompt_id, index in samples if index == BASELINE} == set(prompt_ids(samples))
    asked = {seed for engine in run.engines for _, seed in engine.asked}
    greedy = set().union(*(engine.greedy_seeds for engine in run.engines))
    of_baselines = {rollout_seed(11, step, i, BASELINE) for step in (1, 2, 3) for i in range(100)}
    assert greedy and greedy == asked & of_baselines
    if not rules.extra_groups:  # else timing decides which groups are trained on
        plain = start(rules, fast_and_slow()).steps(1, 3)
        for (samples, metrics), (others, other_metrics) in zip(found, plain, strict=True):
            assert {place: r for place, r in samples.items() if place[1] != BASELINE} == others
            for name in ("rollout/opened_groups_count", "rollout/equal_groups_count", "reward/all_groups_mean"):
                # Not to the last bit: each engine sums the rewards of the groups that it has opened.
                assert (name in metrics) == (name in other_metrics)
                assert metrics.get(name, 0) == pytest.approx(other_metrics.get(name, 0), rel=1e-12)


def test_a_group_of_equal_rewards_is_kept_where_its_greedy_reward_differs() -> None:
    def submit(rollout: Rollout) -> tuple[Rollout, Any]:
        future: Future[RewardOutcome] = Future()
        differs = rollout.is_baseline and not is_equal_group(rollout.prompt.prompt_id)
        future.set_result(RewardOutcome(reward=float(differs), parts={}))
        return rollout, future

    run = start(replace(DYNAMIC, with_baseline=True), fast_and_slow(), submit=submit)
    ((samples, metrics),) = run.steps(1, 1)
    assert prompt_ids(samples) == [i for i in range(12) if not is_equal_group(i)][:8]
    assert metrics["reward/all_groups_mean"] == 0.0, "a greedy reward is counted among those that are trained on"


def test_the_steps_staleness_is_that_of_what_is_trained_on() -> None:
    """A greedy response that takes longer than the others of its group does not count among their tokens."""
    long = {rollout_seed(11, step, i, BASELINE) for step in range(1, 5) for i in range(100)}
    engine = FakeEngine(length=lambda seed: 60 if seed in long else 5)
    run = start(replace(PARTIAL, with_baseline=True), [engine], sampling=LONG)
    for step, (samples, metrics) in enumerate(run.steps(1, 4), start=1):
        spans = [span for (_, index), r in samples.items() if index != BASELINE for span in r.spans]
        total = sum((step - 1 - span.version) * span.num_tokens for span in spans)
        assert metrics["rollout/mean_staleness_steps"] == total / sum(span.num_tokens for span in spans)


@pytest.mark.parametrize("gives_up", [False, True])
@pytest.mark.parametrize("with_baseline", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("drops_equal", [False, True])
def test_a_run_that_stopped_collects_what_it_would_have_collected(
    drops_equal: bool, with_baseline: bool, gives_up: bool
) -> None:
    """It stopped after a step, or gave the step after it up."""
    rules = replace(PARTIAL, drops_equal=drops_equal, max_groups=48 if drops_equal else 12, with_baseline=with_baseline)
    never_stopped = start(rules, [FakeEngine()]).steps(1, 5)
    for stop in range(1 - gives_up, 5 - gives_up):
        before = start(rules, [FakeEngine()])
        before.steps(1, stop + gives_up)
        after = start(rules, [FakeEngine()])
        after.collectors[0].restore(before.state(stop), step=stop)
        assert after.steps(stop + 1, 5) == never_stopped[stop:]


class Unknown(Future[RewardOutcome]):
    """A reward that nobody must wait for."""

    def result(self, timeout: float | None = None) -> RewardOutcome:
        raise AssertionError("waited for a reward")


def test_the_state_before_a_step_that_is_given_up_waits_for_none_of_its_rewards() -> None:
    run = start(PARTIAL, [FakeEngine()], submit=lambda rollout: (rollout, Unknown()))
    begun = run.state(0)
    run.steps(1, 1)
    assert run.state(0) == begun
    with pytest.raises(AssertionError, match="waited for a reward"):
        run.state(1)


def varied_length(seed: int) -> int:
    return 6 + 60 * (seed % 7 == 0) + seed % 9


def varied() -> list[FakeEngine]:
    """Engines whose responses vary tenfold in length; one has room for few and is slow."""
    slow = FakeEngine(max_running=9, tick_s=0.0005, length=varied_length)
    return [FakeEngine(max_running=20, length=varied_length), slow]


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "static"])
@pytest.mark.parametrize("num_engines", [1, 2])
def test_oldest_first_trains_on_every_prompt_in_its_step_and_throws_nothing_away(
    shared: bool, num_engines: int
) -> None:
    run = start(OLDEST_FIRST, varied()[:num_engines], shared=shared, sampling=LONG)
    ahead, stale = 0, 0.0
    for step, (samples, metrics) in enumerate(run.steps(1, 8), start=1):
        assert prompt_ids(samples) == list(range(8 * step - 8, 8 * step))
        assert metrics["rollout/discarded_tokens"] == metrics["rollout/stale_groups_count"] == 0
        assert metrics["rollout/max_staleness_steps"] <= 2
        opened = [i for engine in run.schedules[step - 1]["engines"] for i, _ in engine["opened"]]
        assert all(i < 8 * step + 16 for i in opened), "more groups are open than the staleness allows"
        ahead += len([i for i in opened if i >= 8 * step])
        stale = max(stale, metrics["rollout/max_staleness_steps"])
        assert all(len(response.token_ids) == varied_length(r.seed) for response, r in with_requests(run, samples))
    assert ahead and stale == 2


def with_requests(run: Run, samples: Samples) -> Iterator[tuple[Response, Request]]:
    """Each response, with the last request for it or for its rest."""
    requests = {request.seed: request for engine in run.engines for request in engine.requests.values()}
    by_place = {
        (i, index): requests[seed]
        for (i, index) in samples
        for step in range(1, 20)
        if (seed := rollout_seed(11, step, i, index)) in requests
    }
    return ((response, by_place[place]) for place, response in samples.items())


@pytest.mark.parametrize("evaluations", [None, Evaluations()], ids=["rollouts", "evaluations"])
def test_the_virtual_clock_makes_engines_pause_at_the_same_token_however_fast_they_are(
    evaluations: Evaluations | None,
) -> None:
    runs = []
    for delays in ((0.0, 0.0), (0.0, 0.002), (0.001, 0.0)):
        engines = varied()
        for engine, delay_s in zip(engines, delays, strict=True):
            engine._tick_s = delay_s
        run = start(OLDEST_FIRST, engines, shared=False, sampling=LONG, submit=judge(lambda r: random.random() / 300))
        found = only_samples(run.steps(1, 5, ask=evaluations.ask if evaluations else lambda _: None))
        runs.append((found, [engine.asked for engine in engines], run.schedules))
    assert runs[0] == runs[1] == runs[2]
    assert evaluations is None or len(evaluations.delivered) >= 3 * 4 * len(engines)
    pauses = [{engine["tokens"] for engine in schedule["engines"]} for schedule in runs[0][2]]
    assert any(len(tokens) == 1 and tokens.pop() % TOKENS_PER_TICK == 0 for tokens in pauses), pauses


def test_a_run_that_follows_a_schedule_does_what_that_run_did_by_the_real_clock() -> None:
    free = start(OLDEST_FIRST, varied(), sampling=LONG)
    found = free.steps(1, 5)
    slow = [FakeEngine(max_running=20, tick_s=0.0003, length=varied_length), varied()[1]]
    again = start(OLDEST_FIRST, slow, sampling=LONG, follows=free.schedules)
    assert only_samples(again.steps(1, 5)) == only_samples(found)
    assert again.schedules == free.schedules
    assert [engine.asked for engine in slow] == [engine.asked for engine in free.engines]
    with pytest.raises(UserError, match="has 2 engines in step 1, and this run has 1"):
        start(OLDEST_FIRST, [FakeEngine()], sampling=LONG, follows=free.schedules).step(1)
    other = start(OLDEST_FIRST, varied(), sampling=LONG, follows=[free.schedules[1]])
    with pytest.raises(UserError, match="had other prompt groups open than this one has"):
        other.step(1)


def test_engines_sample_on_while_the_rewards_of_a_step_are_computed() -> None:
    rules = replace(OLDEST_FIRST, awaits_rewards=True)

    def late(rollout: Rollout) -> float:
        return 0.2 if rollout.prompt.prompt_id == 7 else 0.0

    opened = []
    for waits in (False, True):
        engines = [FakeEngine(max_running=9, tick_s=0.001, length=varied_length)]
        run = start(replace(rules, awaits_rewards=waits), engines, sampling=LONG, submit=judge(late))
        (one,) = run.step(1)
        assert prompt_ids(samples_of([one])) == list(range(8))
        if waits:
            assert all(future.done() for _, future in one.pending)
        opened.append(len(run.schedules[0]["engines"][0]["opened"]))
    assert opened[1] > opened[0], opened
    # With all that may be open finished, and the last reward still to come, an engine waits for it.
    few = start(replace(rules, extra_groups=1, max_groups=9), [FakeEngine()], sampling=LONG, submit=judge(late))
    assert all(future.done() for _, future in few.step(1)[0].pending)


IN_FLIGHT = replace(OLDEST_FIRST, steps_ahead=1, max_staleness=3, refit_after=32)


@pytest.mark.parametrize("ask", [lambda _: None, Evaluations().ask], ids=["rollouts", "evaluations"])
def test_a_refit_in_flight_happens_after_the_same_tokens_however_fast_engines_and_trainer_are(
    ask: Callable[[Collector], None],
) -> None:
    runs = []
    for delays, after_s in (((0.0, 0.0), 0.0), ((0.0, 0.002), 0.05), ((0.001, 0.0), 0.01)):
        engines = varied()
        for engine, delay_s in zip(engines, delays, strict=True):
            engine._tick_s = delay_s
        run = start(IN_FLIGHT, engines, shared=False, sampling=LONG, submit=judge(lambda r: random.random() / 300))
        found = run.steps_in_flight(1, 5, after_s=after_s, ask=ask)
        runs.append((only_samples(found), [engine.asked for engine in engines], run.schedules))
        assert all(metrics["rollout/max_staleness_steps"] <= 3 for _, metrics in found)
        assert all(metrics["rollout/discarded_tokens"] == 0 for _, metrics in found)
    assert runs[0] == runs[1] == runs[2]
    samples, _, schedules = runs[0]
    assert [prompt_ids(one) for one in samples] == [list(range(8 * i, 8 * i + 8)) for i in range(5)]
    assert all(engine.get("refit_at", 99) <= 32 for schedule in schedules[1:] for engine in schedule["engines"])
    assert any(len(one[place].spans) > 1 for one in samples for place in one)
    # The tokens are those of a run in which nothing was interrupted; only what sampled them differs.
    in_step = only_samples(start(OLDEST_FIRST, varied(), shared=False, sampling=LONG).steps(1, 1))[0]
    assert {place: r.token_ids for place, r in samples[0].items()} == {p: r.token_ids for p, r in in_step.items()}


@pytest.mark.parametrize("open_ahead", [16, 0])
def test_a_refit_in_flight_by_the_real_clock_is_repeated_by_its_schedule(open_ahead: int) -> None:
    rules = replace(IN_FLIGHT, extra_groups=open_ahead, max_groups=8 + open_ahead, carries_over=open_ahead > 0)
    free = start(rules, varied(), sampling=LONG)
    found = free.steps_in_flight(1, 5, after_tokens=7)
    assert any(len(response.spans) > 1 for samples, _ in found for response in samples.values())
    slow = [FakeEngine(max_running=20, tick_s=0.0003, length=varied_length), varied()[1]]
    again = start(rules, slow, sampling=LONG, follows=free.schedules)
    assert only_samples(again.steps_in_flight(1, 5)) == only_samples(found)
    assert again.schedules == free.schedules
    with pytest.raises(UserError, match="has a refit in flight in step 1, and this run has not"):
        start(rules, varied(), sampling=LONG, follows=free.schedules[1:]).step(1)


@pytest.mark.parametrize("shared", [True, False], ids=["free", "virtual"])
def test_an_evaluation_is_sampled_beside_rollouts_by_one_version(shared: bool) -> None:
    """It stops none of them: they have the tokens of a run without it, and the next refit waits for it alone."""

    def engines() -> list[Any]:
        return [FakeEngine(max_running=30, length=varied_length) for _ in range(2)]

    plain, run = (start(IN_FLIGHT, engines(), shared=shared, sampling=LONG) for _ in range(2))
    evaluations = Evaluations()
    expected = plain.steps_in_flight(1, 5, after_tokens=7)
    found = run.steps_in_flight(1, 5, after_tokens=7, ask=evaluations.ask)
    tokens_of = [[{p: r.token_ids for p, r in one.items()} for one in only_samples(x)] for x in (expected, found)]
    assert tokens_of[0] == tokens_of[1]
    assert sorted(version for version, _ in evaluations.delivered) == [1, 1, 2, 2, 3, 3, 4, 4]
    for version, pending in evaluations.delivered:
        assert len(pending) == 2 * GROUP_SIZE
        for response in (response for rollout, _ in pending for response in rollout.responses):
            assert response.spans == (Span(version, len(response.token_ids)),)
    # The answers are those that an engine gives which samples nothing else.
    alone = [
        sample(cast(Any, FakeEngine(length=varied_length)), prompts, LONG, None, lambda one: one, run_seed=5, step=0)
        for prompts in (FakePrompts().take(3, 2), FakePrompts().take(4, 2))
    ]
    expected_answers = {(r.prompt.prompt_id, r.sample_index): r.responses[0].token_ids for one in alone for r in one}
    assert evaluations.tokens == {(v, *key): ids for v in range(1, 5) for key, ids in expected_answers.items()}
    again = start(IN_FLIGHT, engines(), sampling=LONG, follows=run.schedules)
    assert only_samples(again.steps_in_flight(1, 5, ask=Evaluations().ask)) == only_samples(found)
    assert again.schedules == run.schedules


def test_an_evaluation_is_delivered_when_its_rewards_are_there() -> None:
    """Not when the step is over, whose last rollouts began before that and take long."""
    engine = FakeEngine(max_running=100, tick_s=0.001, length=lambda seed: 1000 if seed in rollouts else 3)
    run, delivered = start(PLAIN, [engine], sampling=LONG), []
    rollouts = {rollout_seed(11, 1, prompt, sample) for prompt in range(8) for sample in range(GROUP_SIZE)}
    (collector,) = run.collectors
    groups = [PromptGroup.opened(one, LONG, None, step=0, run_seed=5) for one in FakePrompts().take(40, 2)]
    late, judged = judge(lambda _: 0.02), []

    def complete(pending: list[Any]) -> list[Any]:
        """Complete them as a judge of whole groups does, in a thread."""
        assert all(future.done() for _, future in pending)
        time.sleep(0.02)
        judged.extend(reversed(pending))
        return judged

    with ThreadPoolExecutor(1) as pool:
        collector._held_out.ask(
            groups,
            Rewarding(late, lambda pending: pool.submit(complete, pending)),
            lambda pending: delivered.append((pending, engine.clock and engine.clock.num_tokens)),
        )
        run.step(1)
    ((pending, tokens),) = delivered
    assert pending is judged and len(pending) == 2 * GROUP_SIZE and tokens is not None and 3 <= tokens < 1000


def test_after_refits_in_flight_a_run_that_stopped_collects_what_it_would_have_collected() -> None:
    never_stopped = start(IN_FLIGHT, varied(), shared=False, sampling=LONG).steps_in_flight(1, 5, ask=Evaluations().ask)
    for stop in range(1, 5):
        before = start(IN_FLIGHT, varied(), shared=False, sampling=LONG)
        before.steps_in_flight(1, stop, ask=Evaluations().ask)
        saved = before.state(stop)
        after = start(IN_FLIGHT, varied(), shared=False, sampling=LONG)
        for collector in after.collectors:
            collector.restore(saved, step=stop)
        assert after.steps_in_flight(stop + 1, 5, ask=Evaluations().ask) == never_stopped[stop:]


@pytest.mark.parametrize("gives_up", [False, True])
def test_oldest_first_a_run_that_stopped_collects_what_it_would_have_collected(gives_up: bool) -> None:
    never_stopped = start(OLDEST_FIRST, varied(), shared=False, sampling=LONG).steps(1, 5)
    for stop in range(1 - gives_up, 5 - gives_up):
        before = start(OLDEST_FIRST, varied(), shared=False, sampling=LONG)
        before.steps(1, stop + gives_up)
        saved = before.state(stop)
        assert saved["cursor"] == 8 * stop
        after = start(OLDEST_FIRST, varied(), shared=False, sampling=LONG)
        for collector in after.collectors:
            collector.restore(saved, step=stop)
        assert after.steps(stop + 1, 5) == never_stopped[stop:]


def test_with_nothing_open_ahead_the_oldest_are_those_of_the_step() -> None:
    rules = replace(OLDEST_FIRST, extra_groups=0, max_groups=8, carries_over=False, max_staleness=0)
    for shared in (True, False):
        plain = start(PLAIN, varied(), shared=shared).steps(1, 3)
        assert start(rules, varied(), shared=shared).steps(1, 3) == plain


def test_groups_that_would_be_too_stale_for_a_lower_limit_are_sampled_again_and_counted() -> None:
    before = start(OLDEST_FIRST, varied(), shared=False, sampling=LONG)
    before.steps(1, 3)
    saved = before.state(3)
    stale = [group["prompt_id"] for group in saved["carried"] if group["prompt_id"] >= 8 * 3 + 8]
    assert stale
    lower = replace(OLDEST_FIRST, extra_groups=8, max_groups=16, max_staleness=1)
    after = start(lower, varied(), shared=False, sampling=LONG)
    for collector in after.collectors:
        collector.restore(saved, step=3)
    found = after.steps(4, 6)
    assert [prompt_ids(samples) for samples, _ in found] == [list(range(8 * i, 8 * i + 8)) for i in (3, 4, 5)]
    assert all(metrics["rollout/max_staleness_steps"] <= 1 for _, metrics in found)
    assert found[0][1]["rollout/stale_groups_count"] >= 1 and found[0][1]["rollout/discarded_tokens"] > 0
    (oversampling,) = start(PARTIAL, [FakeEngine()], sampling=LONG).collectors
    with pytest.raises(UserError, match=r"oversample_fraction > 0 was False and is True"):
        oversampling.restore(saved, step=3)
    (in_step,) = start(replace(lower, extra_groups=0, carries_over=False), [FakeEngine()], sampling=LONG).collectors
    in_step.restore(saved, step=3)
    assert in_step._after[3].cursor == 24


def test_groups_that_go_on_are_dealt_to_another_number_of_ranks() -> None:
    before = start(PARTIAL, fast_and_slow())
    before.steps(1, 2)
    saved = before.state(2)
    assert saved["carried"]
    rates = {"0": {"7": {"success": 0.25, "visits": 2}}}
    saved["curriculum"] = {"rows": rates, "recent": {"a": [0.25]}, "opened": ["b"], "source_rows": [40, None]}
    after = start(PARTIAL, [FakeEngine() for _ in range(3)])
    for collector in after.collectors:
        collector.restore(saved, step=2)
    assert after.state(2) == saved
    everything: Samples = {}
    for samples, _ in after.steps(3, 6):
        assert not everything.keys() & samples.keys()
        everything |= samples
    assert after.state(6)["curriculum"] == saved["curriculum"]
    assert {group["prompt_id"] for group in saved["carried"]} <= {prompt_id for prompt_id, _ in everything}


def test_what_was_saved_is_refused_when_the_settings_do_not_fit() -> None:
    before = start(PARTIAL, [FakeEngine()])
    before.steps(1, 1)
    saved = before.state(1)
    (longer,) = start(PARTIAL, [FakeEngine()], sampling=replace(SAMPLING, max_response_tokens=31)).collectors
    with pytest.raises(UserError, match="max_response_tokens was 30 and is 31; set that back, or"):
        longer.restore(saved, step=1)
    (other_data,) = start(PARTIAL, [FakeEngine()]).collectors
    changed = saved | {"carried": [saved["carried"][0] | {"prompt_ids": [1]}]}
    with pytest.raises(UserError, match="the data now has another prompt there"):
        other_data.restore(changed, step=1)
    (greedy,) = start(replace(PARTIAL, with_baseline=True), [FakeEngine()]).collectors
    with pytest.raises(UserError, match="without a greedy response, but advantage"):
        greedy.restore(saved, step=1)
    for other, words in ((replace(SAMPLING, top_k=8), "top_k was None and is 8"), (ROUTED, "without the experts that")):
        (changed_now,) = start(PARTIAL, [FakeEngine()], sampling=other).collectors
        with pytest.raises(UserError, match=words):
            changed_now.restore(saved, step=1)
    without = start(OVERSAMPLED, [FakeEngine()])
    without.collectors[0].restore(saved, step=1)
    assert "unfinished prompt groups of step 1 are dropped" in without.messages[0]
    assert min(prompt_ids(without.steps(2, 2)[0][0])) == saved["cursor"]


def test_a_checkpoint_without_a_collector_goes_on_where_the_step_says() -> None:
    for rules in (PLAIN, OVERSAMPLED):
        run = start(rules, [FakeEngine()])
        run.collectors[0].restore(None, step=5)
        assert min(prompt_ids(run.steps(6, 6)[0][0])) == 40


@pytest.mark.parametrize(
    "rules", [PLAIN, DYNAMIC, PARTIAL, OLDEST_FIRST], ids=["plain", "dynamic", "partial", "oldest"]
)
def test_a_rank_that_fails_ends_the_step_of_all(rules: CollectionRules) -> None:
    """With the oldest first, by the virtual clock, for which one engine waits when the other fails."""
    broken = [FakePrompts(broken=3), FakePrompts(broken=3)]
    run = start(rules, fast_and_slow(), prompts=broken, shared=rules is not OLDEST_FIRST)
    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(collector.collect, 1) for collector in run.collectors]:
            with pytest.raises(UserError, match="prompt 3 is broken"):
                future.result(timeout=30)


@pytest.mark.parametrize("rules", [PLAIN, DYNAMIC], ids=["plain", "dynamic"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "static"])
def test_what_a_dead_engine_was_sampling_is_sampled_again(rules: CollectionRules, shared: bool) -> None:
    alone = start(rules, [FakeEngine()]).steps(1, 2)
    for responses in (0, 1, 7):
        engines = [MortalEngine(responses=responses), FakeEngine(max_running=2, tick_s=0.001)]
        run = start(rules, engines, shared=shared, revive=True)
        survived = run.steps(1, 1)
        assert [rank.take_count() for rank in run.restarts] == [1, 1]
        survived += run.steps(2, 2)
        assert [rank.take_count() for rank in run.restarts] == [0, 0]
        if shared:  # a static split drops other groups than one engine alone
            assert only_samples(survived) == only_samples(alone)
        else:
            assert only_samples(survived) == only_samples(start(rules, fast_and_slow(), shared=False).steps(1, 2))
        assert run.messages[0] == "step 1: the fake engine was killed; it is started again"


def test_a_death_ends_the_step_unless_it_shall_be_repaired_and_when_it_comes_too_often() -> None:
    for revive, deaths in ((False, 1), (True, MAX_RESTARTS + 1)):
        engines = [MortalEngine(responses=2, deaths=deaths), FakeEngine(max_running=2, tick_s=0.001)]
        run = start(DYNAMIC, engines, revive=revive)
        with pytest.raises(EngineDied):
            run.step(1)
        assert len(run.messages) == (MAX_RESTARTS if revive else 0)


ENVIRONMENT = EnvironmentConfig(source=ClassEnvironment(kind="class", name="a:A"), max_turns=6)

Episodes = dict[tuple[int, int], tuple[Any, str]]  # turns and end, by prompt_id and sample_index


def world_of_echoes() -> EnvContext:
    """Environments that answer after moments, two to four times."""

    def echo(start: EpisodeStart, number: int, action: Action) -> Observation:
        said = {"role": "user", "content": f"{number} {len(action.text) % 7}"}
        return Observation(messages=(said,), done=number == 1 + start.seed % 3)

    return fake_world(echo, ENVIRONMENT, delay_s=lambda seed: 0.001 * (seed % 3))


def talker(**options: Any) -> dict[str, Any]:
    """Options of an engine whose responses end by themselves."""
    return {"length": lambda seed: 1 + seed % 20, "reason": "stop", **options}


def episodes_of(run: Run, first: int, last: int) -> list[Episodes]:
    """The episodes of each step."""
    steps = []
    for step in range(first, last + 1):
        for engine in run.engines:
            engine.version = step - 1
        rollouts = [rollout for everyone in run.step(step) for rollout, _ in everyone.pending]
        steps.append({(r.prompt.prompt_id, r.sample_index): (r.turns, r.end) for r in rollouts})
    return steps


def num_begun(run: Run, step: int) -> int:
    """Episodes that go on in the next step."""
    carried = [group for collector in run.collectors for group in collector._after[step].carried]
    return sum(episode._environment is not None for group in carried for episode in group.unfinished)


@pytest.mark.parametrize(
    ("gives_up", "rules"),
    [
        pytest.param(False, PARTIAL, id="partial"),
        pytest.param(True, PARTIAL, id="partial that gives up", marks=pytest.mark.slow),
        pytest.param(False, OLDEST_FIRST, id="oldest first", marks=pytest.mark.slow),
        pytest.param(True, OLDEST_FIRST, id="oldest first that gives up", marks=pytest.mark.slow),
    ],
)
def test_episodes_go_on_in_later_steps_and_runs_and_leave_no_environment_open(
    gives_up: bool, rules: CollectionRules
) -> None:
    rules, world = replace(rules, in_order=True), world_of_echoes()
    run = start(rules, [FakeEngine(**talker())], sampling=LONG, world=world)
    whole = episodes_of(run, 1, 4)
    assert cast(Any, world.client).num_open == num_begun(run, 4) > 0
    for stop in range(1 - gives_up, 4 - gives_up):
        before = start(rules, [FakeEngine(**talker())], sampling=LONG, world=world_of_echoes())
        episodes_of(before, 1, stop + gives_up)
        resumed = world_of_echoes()
        after = start(rules, [FakeEngine(**talker())], sampling=LONG, world=resumed)
        after.collectors[0].restore(before.state(stop), step=stop)
        assert episodes_of(after, stop + 1, 4) == whole[stop:]
        assert cast(Any, resumed.client).num_open == num_begun(after, 4)


@pytest.mark.parametrize("rules", [PLAIN, DYNAMIC, PARTIAL], ids=["plain", "dynamic", "partial"])
def test_episodes_go_on_after_the_death_of_an_engine(rules: CollectionRules) -> None:
    alone = episodes_of(start(rules, [FakeEngine(**talker())], sampling=LONG, world=world_of_echoes()), 1, 2)
    for responses in (0, 7):
        engines = [MortalEngine(responses=responses, **talker()), FakeEngine(**talker(max_running=2, tick_s=0.001))]
        world = world_of_echoes()
        run = start(rules, engines, sampling=LONG, world=world, revive=True)
        survived = episodes_of(run, 1, 2)
        assert run.restarts[0].take_count() == 1
        assert cast(Any, world.client).num_open == num_begun(run, 2)
        if rules != PARTIAL:  # which trains on what is finished first
            assert survived == alone
