"""Episodes: what is sampled turn by turn, whatever environments answer, and however long they take."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from spmdrl.algo.metrics import Mean, scalars
from spmdrl.algo.seeds import mix, rollout_seed, turn_seed
from spmdrl.config.environment import (
    ClassEnvironment,
    ContextConfig,
    EnvironmentConfig,
    NotesContext,
    SummaryContext,
    TruncateContext,
)
from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.engine.protocol import EngineDied
from spmdrl.envs.protocol import Answer, EnvironmentFailure
from spmdrl.rollout.env_context import EnvContext
from spmdrl.rollout.episode import Episode, EpisodeState
from spmdrl.rollout.group import PromptGroup
from spmdrl.rollout.sampling import Sampling
from spmdrl.rollout.scheduler import EpisodeScheduler, sample
from spmdrl.step.batch import to_sequences
from spmdrl.step.rewards import state_of, turn_spans
from spmdrl.step.samples import cached_fraction, episode_metrics
from spmdrl.types import FinishReason, Prompt, Request, Response, RewardedRollout, RewardOutcome, Rollout, Span
from tests.helpers.environments import FakeEncoder, FakeEnvironments, Step, fake_world
from tests.helpers.episodes import reloaded
from tests.helpers.fake_engine import FakeEngine

SAMPLING = Sampling(group_size=2, temperature=1.0, max_response_tokens=300, stop_token_ids=frozenset())
PROMPTS = [Prompt(prompt_id=i, token_ids=(2, 3 + i), text=f"{i}", answer=None, task="t", metadata={}) for i in range(8)]
CFG = EnvironmentConfig(source=ClassEnvironment(kind="class", name="a:A"), max_turns=6, max_turn_tokens=40)


def echo(start: EpisodeStart, number: int, action: Action) -> Answer:
    """Answer with two numbers; the episode is over after a number of steps that its seed decides."""
    last = number == 1 + start.seed % 3
    return Observation(
        messages=({"role": "user", "content": f"{number} {len(action.text) % 7}"},), reward=0.5 * number, done=last
    )


def world_of(
    step: Step = echo, *, cfg: EnvironmentConfig = CFG, delay_s: Any = lambda _: 0.0, **others: Any
) -> EnvContext:
    return fake_world(step, cfg, delay_s=delay_s, **others)


def client_of(world: EnvContext) -> FakeEnvironments:
    return cast(FakeEnvironments, world.client)


def stopping(max_running: int = 4, **others: Any) -> FakeEngine:
    """An engine whose responses end by themselves, after 1 to 20 tokens."""
    return FakeEngine(max_running=max_running, length=lambda seed: 1 + seed % 20, reason="stop", **others)


def rollouts_of(engine: FakeEngine, world: EnvContext | None, **others: Any) -> dict[tuple[int, int], Rollout]:
    found = sample(cast(Any, engine), PROMPTS, SAMPLING, world, lambda rollout: rollout, run_seed=5, step=1, **others)
    assert len(found) == len(PROMPTS) * SAMPLING.group_size
    return {(rollout.prompt.prompt_id, rollout.sample_index): rollout for rollout in found}


def test_tokens_are_the_turns_end_to_end() -> None:
    engine, world = stopping(), world_of()
    for (prompt_id, sample_index), rollout in rollouts_of(engine, world).items():
        (trajectory,) = rollout.trajectories
        first, *others = trajectory.turns
        assert rollout.end == "done" and not rollout.is_masked
        assert len(trajectory.turns) == 2 + mix(5, prompt_id) % 3
        assert first.context_ids == rollout.prompt.token_ids
        assert all(turn.context_ids[0] == 1 and turn.context_ids[-1] == 3 for turn in others)
        seed = rollout_seed(5, 1, prompt_id, sample_index)
        so_far: tuple[int, ...] = ()
        for number, turn in enumerate(trajectory.turns):
            request = engine.requests[turn_seed(seed, number)]
            assert request.prompt_ids == so_far + turn.context_ids
            so_far = request.prompt_ids + turn.response.token_ids
        assert so_far == trajectory.token_ids
        assert [token for token, is_sampled in zip(so_far, trajectory.trained, strict=True) if is_sampled] == [
            token for response in rollout.responses for token in response.token_ids
        ]
        assert rollout.environment_reward == sum(0.5 * number for number in range(len(trajectory.turns)))
    assert client_of(world).num_open == 0


@pytest.mark.parametrize("in_order", [False, True])
def test_how_long_environments_take_changes_nothing(in_order: bool) -> None:
    expected = rollouts_of(stopping(max_running=100), world_of())
    slow = world_of(delay_s=lambda seed: 0.001 * (mix(seed) % 20))
    assert rollouts_of(stopping(max_running=3, tick_s=0.0005), slow, in_order=in_order) == expected


def test_more_episodes_are_open_than_the_engine_has_slots() -> None:
    engine, world = stopping(max_running=2), world_of(delay_s=lambda _: 0.05)
    rollouts_of(engine, world)
    assert client_of(world).most_open > 4


def test_answered_episodes_go_on_before_new_ones_begin() -> None:
    engine, world = stopping(max_running=1), world_of(delay_s=None)
    rollouts_of(engine, world)
    # With one slot and environments that answer at once, few are open at the same time.
    assert client_of(world).most_open < len(PROMPTS)


def test_the_engine_is_known_to_wait_whatever_the_order() -> None:
    for in_order in (False, True):
        world = world_of(delay_s=lambda _: 0.01)
        scheduler = EpisodeScheduler(cast(Any, stopping()), in_order=in_order)
        group = PromptGroup.opened(PROMPTS[0], replace(SAMPLING, group_size=1), world, step=1, run_seed=5)
        scheduler.run(group.episodes, lambda episode: None)
        assert scheduler.idle_s > 0.01 * len(group.episodes[0].turns)


def test_an_evaluation_that_ends_with_its_engine_leaves_no_environment_open() -> None:
    class Mortal(FakeEngine):
        def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
            yield from itertools.islice(super().generate(requests), 5)
            raise EngineDied("killed")

    world = world_of(delay_s=lambda seed: 0.001 * (seed % 3))
    with pytest.raises(EngineDied):
        rollouts_of(Mortal(max_running=4, length=lambda seed: 1 + seed % 20, reason="stop"), world)
    assert client_of(world).most_open > 0 == client_of(world).num_open


def test_an_episode_without_an_environment_is_one_response() -> None:
    for rollout in rollouts_of(stopping(), None).values():
        (turn,) = rollout.turns
        assert (turn.context_ids, turn.action, turn.observation) == (rollout.prompt.token_ids, None, None)
        assert rollout.end == turn.response.finish_reason == "stop"


def test_a_turn_says_how_much_of_what_is_before_it_an_engine_had_read() -> None:
    class Reader(FakeEngine):
        def _response(self, row: Any, reason: FinishReason) -> Response:
            return replace(super()._response(row, reason), num_cached=len(row.request.prompt_ids) - 1)

    engine = Reader(max_running=4, length=lambda seed: 1 + seed % 20, reason="stop")
    rollouts, ends = rollouts_of(engine, world_of()).values(), list[int]()
    for rollout in rollouts:
        (trajectory,) = rollout.trajectories
        before = [
            start + len(turn.context_ids) for start, turn in zip(trajectory.starts, trajectory.turns, strict=False)
        ]
        assert [turn.response.num_cached for turn in trajectory.turns] == [end - 1 for end in before]
        ends += before
    assert cached_fraction(rollouts) == Mean(float(sum(ends) - len(ends)), float(sum(ends)))
    first, rest = (
        Response(token_ids=(5,), logprobs=(0.0,), finish_reason="abort", spans=(), num_cached=3),
        Response(token_ids=(6,), logprobs=(0.0,), finish_reason="stop", spans=(), num_cached=7),
    )
    assert first.continued(rest).num_cached == 3, "what was before the response was read for its first part"
    assert replace(first, token_ids=(), logprobs=(), num_cached=0).continued(rest).num_cached == 7


def test_a_state_says_who_acts_next() -> None:
    """Also of an episode that is read from a checkpoint: its environment gets the action again."""
    world = world_of()
    episode, other = PromptGroup.opened(PROMPTS[0], SAMPLING, world, step=1, run_seed=5).episodes
    states = [episode.state]
    for do in (episode.begin, episode.take_answer):
        do()
        states.append(episode.state)
    for reason in ("abort", "stop"):
        episode.add(Response(token_ids=(7,), logprobs=(-1.0,), finish_reason=reason, spans=(Span(0, 1),)))
        states.append(episode.state)
    other.restore(episode.saved())
    assert other.state is EpisodeState.STEPPING and not other.is_waiting
    for one in (episode, other):
        one.begin()
        assert one.is_waiting
        one.take_answer()
        assert one.state is EpisodeState.SAMPLING and one.turns == episode.turns
    S = EpisodeState
    assert states == [S.NEW, S.RESETTING, S.SAMPLING, S.SAMPLING, S.STEPPING]


def never_done(start: EpisodeStart, number: int, action: Action) -> Answer:
    return Observation(messages=({"role": "user", "content": "7"},))


def failing(answer: EnvironmentFailure) -> Step:
    return lambda start, number, action: answer if number else never_done(start, number, action)


def cfg_with(**settings: Any) -> EnvironmentConfig:
    return EnvironmentConfig(**(CFG.model_dump() | {"source": CFG.source} | settings))


@pytest.mark.parametrize(
    ("end", "world", "engine", "turns"),
    [
        ("max_turns", world_of(never_done), stopping(), 6),
        ("length", world_of(never_done), FakeEngine(length=lambda _: 1000), 1),
        ("context", world_of(never_done, cfg=cfg_with(max_turns=1000)), stopping(), None),
        ("episode_timeout", world_of(never_done, cfg=cfg_with(episode_timeout_s=1e-9)), stopping(), 1),
        ("step_timeout", world_of(failing(EnvironmentFailure(kind="timeout", reason="30 s"))), stopping(), 2),
        (
            "environment_error",
            world_of(failing(EnvironmentFailure(kind="error", reason="ValueError: no"))),
            stopping(),
            2,
        ),
        (
            "environment_error",
            world_of(initial_observation=EnvironmentFailure(kind="error", reason="gone")),
            stopping(),
            None,
        ),
        ("environment_error", world_of(initial_observation=Observation(done=True)), stopping(), None),
        (
            "environment_error",
            world_of(initial_observation=Observation(messages=({"role": "user", "content": " ".join(["9"] * 300)},))),
            stopping(),
            None,
        ),
    ],
)
def test_every_limit_is_an_end_of_its_own(end: str, world: EnvContext, engine: FakeEngine, turns: int | None) -> None:
    for rollout in rollouts_of(engine, world).values():
        assert rollout.end == end
        assert (rollout.failure is not None) == (end in ("step_timeout", "environment_error"))
        assert rollout.is_masked == (end in CFG.masked_ends)
        assert turns is None or len(rollout.turns) == turns
        for trajectory in rollout.trajectories:
            assert len(trajectory.token_ids) <= len(rollout.prompt.token_ids) + SAMPLING.max_response_tokens
            assert all(len(turn.response.token_ids) <= 40 for turn in trajectory.turns)
    assert client_of(world).num_open == 0


def test_an_episode_has_its_time_over_all_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a refit, after it, and after a stop of the run; the pauses between them do not count."""
    now = 0.0
    monkeypatch.setattr("spmdrl.rollout.episode.time", SimpleNamespace(monotonic=lambda: now))
    world = world_of(never_done, cfg=cfg_with(episode_timeout_s=10.0))

    def episode() -> Episode:
        return Episode(prompt=PROMPTS[0], sample_index=0, seed=5, sampling=SAMPLING, env_context=world)

    def said(reason: FinishReason) -> Response:
        return Response(token_ids=(5,), logprobs=(-1.0,), finish_reason=reason, spans=(Span(0, 1),))

    def answered(one: Episode) -> None:
        assert one.env_future is not None
        one.env_future.result(timeout=10)
        one.take_answer()

    first = episode()
    first.begin()
    answered(first)
    now += 4.0
    first.add(said("abort"))
    now += 100.0
    first.begin()
    now += 2.0
    first.add(said("abort"))
    later = episode()
    later.restore(first.saved())
    now += 100.0
    later.begin()
    now += 3.0
    later.add(said("stop"))
    answered(later)
    assert not later.is_finished and later.spent_s == 9.0
    now += 2.0
    later.add(said("stop"))
    answered(later)
    assert later.is_finished and later.end == "episode_timeout"
    # Of a pause counts what its environment has worked on, in a copy of the episode too.
    for answers_in_pause in (True, False):
        step: Future[Answer] = Future()
        one = episode()
        one.begin()
        answered(one)
        one._environment = SimpleNamespace(step=lambda action, step=step: step, close=lambda: None)  # type: ignore[assignment]
        one.add(said("stop"))
        now += 3.0
        if answers_in_pause:
            step.set_result(Observation(messages=({"role": "user", "content": "9"},)))
        now += 100.0 if answers_in_pause else 2.0
        copied = one.copy()
        copied.begin()
        assert copied.spent_s == (3.0 if answers_in_pause else 5.0) and one.spent_s == 0.0
        copied.begin()
        assert copied.spent_s == (3.0 if answers_in_pause else 5.0)


def test_a_greeting_follows_the_prompt() -> None:
    world = world_of(initial_observation=Observation(messages=({"role": "user", "content": "9"},)))
    for rollout in rollouts_of(stopping(), world).values():
        assert rollout.turns[0].context_ids == (*rollout.prompt.token_ids, 1, 9, 3)


def chats() -> list[Prompt]:
    """The prompts as chats of one message."""
    return [
        replace(prompt, messages=({"role": "user", "content": " ".join(map(str, prompt.token_ids))},))
        for prompt in PROMPTS
    ]


def test_what_a_template_does_not_rewrite_is_appended(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = rollouts_of(stopping(), world_of())
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", chats())
    rendered = rollouts_of(stopping(), world_of(cfg=cfg_with(history="template")))
    assert {key: r.trajectories for key, r in rendered.items()} == {key: r.trajectories for key, r in expected.items()}


def test_what_a_template_rewrites_begins_a_new_trajectory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", chats())
    world = replace(world_of(cfg=cfg_with(history="template")), encoder=cast(Any, FakeEncoder(rewrites=True)))
    for rollout in rollouts_of(stopping(), world).values():
        assert len(rollout.trajectories) == len(rollout.turns) > 1
        for place, trajectory in enumerate(rollout.trajectories):
            (turn,) = trajectory.turns
            assert turn.context_ids[: len(rollout.prompt.token_ids)] == rollout.prompt.token_ids
            assert turn.context_ids.count(99) == place  # every answer before it, as the template now writes it


def test_a_users_greeting_continues_the_prompts_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", chats())
    for rollout in rollouts_of(
        stopping(), world_of(initial_observation=Observation(messages=({"role": "user", "content": " 9"},)))
    ).values():
        assert rollout.turns[0].context_ids == (*rollout.prompt.token_ids, 9)


SUMMARY = SummaryContext(
    kind="summary", max_tokens=60, max_summary_tokens=30, keep_turns=1, request=" 71", heading=" 70 "
)
NOTES = NotesContext(kind="notes", pattern=r"(\b[1-4]\d\b)", heading=" 70 ")
TRUNCATE = TruncateContext(kind="truncate", max_tokens=30, placeholder="72")


def rewriting(context: ContextConfig) -> EnvContext:
    """Episodes of twelve turns whose conversations are rewritten."""
    return world_of(never_done, cfg=cfg_with(history="template", context=context, max_turns=12))


def test_a_summary_takes_the_place_of_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", chats())
    engine = stopping()
    rollouts = rollouts_of(engine, rewriting(SUMMARY))
    for (prompt_id, sample_index), rollout in rollouts.items():
        seed = rollout_seed(5, 1, prompt_id, sample_index)
        assert rollout.end == "max_turns" and len(rollout.trajectories) > 1
        assert sum(not turn.is_summary for turn in rollout.turns) == 12
        for number, turn in enumerate(rollout.turns):  # its seed is its own
            assert engine.requests[turn_seed(seed, number)].max_response_tokens <= (30 if turn.is_summary else 40)
        for before, after in itertools.pairwise(rollout.trajectories):
            *turns, summary = before.turns
            assert summary.is_summary and not any(turn.is_summary for turn in turns)
            assert summary.context_ids[-4:] == (1, 7, 71, 3) and summary.observation is None
            acted, first = turns[-1], after.turns[0]
            assert first.context_ids == (
                *rollout.prompt.token_ids,
                70,
                *summary.response.token_ids,
                *acted.response.token_ids,
                *(1, 7, 3),
            )
            read = before.token_ids[: -len(summary.response.token_ids)]
            assert first.replaced_tokens == len(read) - 1 > len(first.context_ids)  # without the request
            assert len(read) - 1 - len(rollout.prompt.token_ids) > SUMMARY.max_tokens
    metrics = scalars(episode_metrics(rollouts.values()))
    assert metrics["episode/compactions"] == sum(len(r.trajectories) - 1 for r in rollouts.values()) / 16
    assert metrics["episode/turns"] == 12


@pytest.mark.parametrize("is_trained", [True, False])
def test_a_summary_is_trained_as_it_was_sampled_or_not_at_all(
    is_trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", chats())
    context = SUMMARY.model_copy(update={"train_summaries": is_trained})
    for rollout in rollouts_of(stopping(), rewriting(context)).values():
        outcome = RewardOutcome(reward=1.0, parts={})
        mesh: Any = SimpleNamespace(size=lambda: 1)
        sequences = to_sequences([RewardedRollout(index=0, rollout=rollout, outcome=outcome)], mesh, turn_weight=1.0)
        for trajectory, sequence in zip(rollout.trajectories, sequences, strict=True):
            assert sequence.token_ids == trajectory.token_ids
            for turn, span in zip(trajectory.turns, sequence.turns, strict=True):
                here = slice(span.start, span.end)
                chosen = is_trained or not turn.is_summary
                assert sequence.token_ids[here] == turn.response.token_ids
                assert set(sequence.loss_mask[here]) == {chosen}
                assert sequence.rollout_logprobs[here] == (
                    turn.response.logprobs if chosen else (0.0,) * len(turn.response.token_ids)
                )
                assert (span.state == state_of(Observation(state="a summary is asked for"))) == turn.is_summary
        assert sum(sum(s.loss_mask) for s in sequences) == sum(
            len(turn.response.token_ids) for turn in rollout.turns if is_trained or not turn.is_summary
        )
        assert sum(span.reward for s in sequences for span in s.turns) == rollout.environment_reward


def test_a_summary_that_is_too_long_fails_its_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", chats())
    for settings, reason in (
        ({"max_tokens": 2, "max_summary_tokens": 1}, "a summary was cut off after 1 tokens"),
        ({"max_tokens": 31, "heading": f" {'70 ' * 60}"}, "which is no less"),
    ):
        context = SUMMARY.model_copy(update=settings)
        rollouts = rollouts_of(stopping(), rewriting(context)).values()
        failed = [rollout for rollout in rollouts if rollout.failure is not None]
        assert failed and {rollout.end for rollout in failed} == {"summary"}
        assert all(reason in str(rollout.failure) and not rollout.is_masked for rollout in failed)


def test_notes_and_placeholders_stay_of_what_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", chats())
    for rollout in rollouts_of(stopping(), rewriting(NOTES)).values():
        assert len(rollout.trajectories) == 12 - 1  # the second response still sees the whole first turn
        for place, trajectory in enumerate(rollout.trajectories[1:], start=1):
            notes = [token for turn in rollout.turns[:place] for token in turn.response.token_ids if 10 <= token < 50]
            (turn,) = trajectory.turns
            last = rollout.turns[place].response.token_ids
            assert turn.context_ids == (*rollout.prompt.token_ids, *([70, *notes] if notes else []), *last, 1, 7, 3)
    for rollout in rollouts_of(stopping(), rewriting(TRUNCATE)).values():
        assert len(rollout.trajectories) > 1
        for trajectory in rollout.trajectories[1:]:
            hidden = trajectory.turns[0].context_ids.count(72)
            place = rollout.turns.index(trajectory.turns[0])
            assert hidden == place - 1  # all but the last
            said = [(1, 72, 3)] * hidden + [(1, 7, 3)]
            answers = [turn.response.token_ids for turn in rollout.turns[:place]]
            parts = itertools.chain.from_iterable(zip(answers, said, strict=True))
            assert trajectory.turns[0].context_ids == (*rollout.prompt.token_ids, *itertools.chain(*parts))


def game(start: EpisodeStart, number: int, action: Action) -> Answer:
    """Two players in turn; at the end each gets what it has won beside the reward of the last move."""
    roles = ("white", "black")
    if number == 3:
        return Observation(reward=0.25, role_rewards={"white": 1.0, "black": -1.0}, done=True)
    return Observation(messages=({"role": "user", "content": "7"},), reward=0.5, role=roles[(number + 1) % 2])


def test_a_role_gets_its_rewards_in_its_last_turn() -> None:
    world = replace(world_of(game, initial_observation=Observation(role="white")), needs_roles=True)
    for rollout in rollouts_of(stopping(), world).values():
        (turns,) = turn_spans(rollout, weight=2.0)
        assert [turn.reward for turn in turns] == [1.0, 1.0, 3.0, -1.5] and rollout.environment_reward == 1.75
        white, black, *others = [turn.role for turn in turns]
        assert others == [white, black] and len({white, black, 0}) == 3


@pytest.mark.parametrize(
    ("step", "initial_observation", "reason"),
    [
        (game, Observation(), "has no role"),
        (never_done, Observation(role="white"), "has no role"),
        (lambda *_: Observation(role_rewards={"red": 1.0}, done=True), Observation(role="white"), "role 'red'"),
    ],
)
def test_roles_without_names_fail_an_episode(step: Step, initial_observation: Observation, reason: str) -> None:
    world = replace(world_of(step, initial_observation=initial_observation), needs_roles=True)
    for rollout in rollouts_of(stopping(), world).values():
        assert rollout.end == "environment_error" and reason in str(rollout.failure)
        assert len(list(turn_spans(rollout, weight=1.0))) == 1


@pytest.mark.parametrize("context", [None, SUMMARY, NOTES, TRUNCATE])
def test_an_episode_that_is_interrupted_and_saved_goes_on_as_if_it_had_not_been(
    context: ContextConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aborted after every few tokens, written to JSON, and read again, each time with another client."""
    monkeypatch.setattr(sys.modules[__name__], "PROMPTS", chats() if context else PROMPTS)
    opened = partial(rewriting, context) if context else world_of
    expected = rollouts_of(stopping(), opened())
    groups = [PromptGroup.opened(prompt, SAMPLING, opened(), step=1, run_seed=5) for prompt in PROMPTS]
    finished: dict[tuple[int, int], Rollout] = {}
    rounds = num_cut_summaries = 0
    while any(group.unfinished for group in groups):
        rounds += 1
        num_cut_summaries += sum(
            bool(one.response.token_ids) and one.is_summarizing for g in groups for one in g.episodes
        )
        world = opened()
        client_of(world).delay_s = lambda seed: 0.002 * (seed % 3)
        groups = [
            PromptGroup.restored(reloaded(group), prompt, SAMPLING, world)
            for group, prompt in zip(groups, PROMPTS, strict=True)
        ]
        engine = stopping(max_running=5, abort_after=7)
        episodes = [episode for group in groups for episode in group.unfinished]
        EpisodeScheduler(cast(Any, engine)).run(
            episodes, lambda episode: finished.update({key_of(episode): episode.rollout()})
        )
    assert rounds > 3 and (num_cut_summaries > 0) == (context is SUMMARY)
    assert without_versions(finished) == without_versions(expected)


def key_of(episode: Episode) -> tuple[int, int]:
    return episode.prompt.prompt_id, episode.sample_index


def without_versions(rollouts: dict[tuple[int, int], Rollout]) -> dict[tuple[int, int], Any]:
    return {key: (r.turns, r.end) for key, r in rollouts.items()}
