"""Episodes of agents: what comes through the endpoint is, token for token, what the policy sampled."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmdrl.config.environment import ClassEnvironment, EnvironmentConfig
from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.data.turns import TurnEncoder, action_of, parse
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.envs.client import open_environments
from spmdrl.envs.protocol import Answer
from spmdrl.refit.refit import load_whole
from spmdrl.rollout.env_context import EnvContext
from spmdrl.rollout.group import PromptGroup
from spmdrl.rollout.sampling import Sampling
from spmdrl.rollout.scheduler import EpisodeScheduler, sample
from spmdrl.types import Prompt, Rollout
from tests.helpers.agents import agent_config, script
from tests.helpers.chat_templates import family_tokenizer, stops_of
from tests.helpers.environments import FakeEnvironments
from tests.helpers.episodes import reloaded
from tests.helpers.fake_engine import FakeEngine
from tests.helpers.models import save_qwen3

FAMILY = "Qwen3"
TALK = """
    messages = [user(episode["prompt"])]
    for number in range(2 + episode["seed"] % 3):
        answer = chat(messages)
        post("/reward", {"reward": number})
        messages += [answer, user(f"{number}: {len(answer['content'])} characters")]
"""


def talk(start: EpisodeStart, number: int, action: Action) -> Answer:
    """The program above, in this process."""
    if number == 1 + start.seed % 3:
        return Observation(reward=number, done=True)
    text = f"{number}: {len(action.text)} characters"
    return Observation(messages=({"role": "user", "content": text},), reward=number)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> TorchEngine:
    folder = save_qwen3(tmp_path_factory.mktemp("model"), vocab_size=len(family_tokenizer(FAMILY)), eos_token_id=1)
    model = AutoModelForCausalLM.from_pretrained(folder)
    engine = TorchEngine(model.config, device=torch.device("cpu"), dtype=torch.float32, kernel="sdpa", max_running=4)
    load_whole(engine, dict(model.named_parameters()), version=0)
    return engine


def encoder(family: str = FAMILY) -> TurnEncoder:
    return TurnEncoder(family_tokenizer(family), chat_template="auto", tools=[], stop_token_ids=stops_of(family))


def rollouts(engine: Any, cfg: EnvironmentConfig, client: Any, family: str = FAMILY) -> list[Rollout]:
    """Six episodes about three questions."""
    world = world_of(cfg, client, family)
    found = sample(engine, prompts(), sampling(), world, lambda rollout: rollout, run_seed=5, step=1)
    return sorted(found, key=lambda rollout: (rollout.prompt.prompt_id, rollout.sample_index))


def world_of(cfg: EnvironmentConfig, client: Any, family: str = FAMILY) -> EnvContext:
    tokenizer = family_tokenizer(family)
    return EnvContext(
        cfg=cfg,
        client=client,
        encoder=encoder(family),
        action_of=functools.partial(action_of, tokenizer, parser=parse, stop_token_ids=stops_of(family)),
        run_seed=5,
    )


def sampling() -> Sampling:
    every = frozenset(range(0, len(family_tokenizer(FAMILY)), 9))  # a random model would hardly ever come to an end
    return Sampling(group_size=2, temperature=1.0, max_response_tokens=600, stop_token_ids=stops_of(FAMILY) | every)


def prompts() -> Iterator[Prompt]:
    for number in range(3):
        messages = ({"role": "user", "content": f"What is {number} + 1?"},)
        token_ids, text = encoder().first(list(messages))
        yield Prompt(
            prompt_id=number, token_ids=token_ids, text=text, answer=None, task="t", metadata={}, messages=messages
        )


def by_agent(engine: Any, command: list[str], *, family: str = FAMILY) -> list[Rollout]:
    cfg = agent_config(command)
    with open_environments(cfg) as client:
        return rollouts(engine, cfg, client, family)


def turns_of(found: list[Rollout]) -> list[Any]:
    return [
        [(turn.context_ids, turn.response.token_ids, turn.action, turn.observation.reward) for turn in rollout.turns]
        for rollout in found
    ]


def test_an_episode_through_the_endpoint_is_the_same_episode_in_process(engine: TorchEngine, tmp_path: Path) -> None:
    in_process = EnvironmentConfig(source=ClassEnvironment(kind="class", name="a:A"))
    expected = rollouts(engine, in_process, cast(Any, FakeEnvironments(talk, delay_s=lambda _: 0.0)))
    found = by_agent(engine, script(tmp_path, TALK))
    assert [rollout.end for rollout in found] == [rollout.end for rollout in expected] == ["done"] * 6
    assert all(len(rollout.trajectories) == 1 for rollout in found)
    assert sum(len(rollout.turns) for rollout in found) > 12
    assert turns_of(found) == turns_of(expected)


def test_a_branch_begins_with_the_tokens_that_were_sampled(engine: TorchEngine, tmp_path: Path) -> None:
    body = """
        messages = [user(episode["prompt"])]
        messages += [chat(messages), user("go on")]
        chat(messages)
        chat([*messages[:-1], user("or so?")])
        chat([user("Something else.")])
    """
    for rollout in by_agent(engine, script(tmp_path, body)):
        trunk, branch, other = rollout.trajectories
        first, _ = trunk.turns
        kept = first.context_ids + first.response.token_ids
        (turn,) = branch.turns
        said = encoder().appended([{"role": "user", "content": "or so?"}], after=first.response.token_ids)
        assert turn.context_ids == kept + said
        assert other.turns[0].context_ids == encoder().rendered([{"role": "user", "content": "Something else."}])
        assert rollout.end == "done"


def test_a_limit_of_the_agent_s_ends_a_response_and_not_the_episode(engine: TorchEngine, tmp_path: Path) -> None:
    body = """
        messages = [user(episode["prompt"])]
        status, answer = post("/chat/completions", {"messages": messages, "max_tokens": 1})
        assert answer["usage"]["completion_tokens"] == 1
        chat([*messages, answer["choices"][0]["message"], user(answer["choices"][0]["finish_reason"])])
    """
    found = by_agent(engine, script(tmp_path, body))
    assert {rollout.end for rollout in found} == {"done"}
    reasons = {rollout.turns[0].response.finish_reason for rollout in found}
    assert "length" in reasons
    for rollout in found:
        first, second = rollout.turns
        assert len(first.response.token_ids) == 1
        assert first.observation.messages[0]["content"] == first.response.finish_reason
        assert len(second.response.token_ids) > 0


def test_tools_of_a_call_are_shown_by_the_template(engine: TorchEngine, tmp_path: Path) -> None:
    body = """
        tool = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
        chat([user("?")], tools=[{"type": "function", "function": tool}])
    """
    rollout = by_agent(engine, script(tmp_path, body))[0]
    shown = family_tokenizer(FAMILY).decode(list(rollout.turns[0].context_ids))
    assert '"name": "add"' in shown and "<tools>" in shown


@pytest.mark.parametrize("max_running", [1, 4])
def test_no_more_programs_run_at_once_than_the_limit(engine: TorchEngine, tmp_path: Path, max_running: int) -> None:
    running, most, lock = 0, 0, threading.Lock()
    cfg = agent_config(script(tmp_path, TALK), source={"max_open": 2})
    with open_environments(cfg) as client:
        opens = client.open

        def counted(*arguments: Any) -> Any:
            nonlocal running, most
            opened = opens(*arguments)
            with lock:
                running += 1
                most = max(most, running)
            closes = opened.close

            def close() -> None:
                nonlocal running
                with lock:
                    running -= 1
                closes()

            opened.close = close
            return opened

        client.open = counted
        assert len(rollouts(engine, cfg, client)) == 6
    assert (running, most) == (0, 2)


def test_a_conversation_that_the_template_refuses_ends_the_episode(tmp_path: Path) -> None:
    command = script(tmp_path, "chat([user('?')]); chat([user('a'), user('b')])")
    for rollout in by_agent(fake_engine(), command, family="Gemma 3"):
        assert (rollout.end, len(rollout.turns), rollout.is_masked) == ("environment_error", 1, True)
        assert "the chat template of Gemma 3 refuses" in (rollout.failure or "")


def test_an_agent_s_episode_that_was_saved_goes_on_as_if_it_had_not_been(tmp_path: Path) -> None:
    """Aborted after every few tokens, written to JSON, and read again, each time with another server."""
    cfg = agent_config(script(tmp_path, TALK))
    expected = by_agent(fake_engine(), script(tmp_path, TALK))
    groups = [PromptGroup.opened(prompt, sampling(), world_of(cfg, None), step=1, run_seed=5) for prompt in prompts()]
    finished: dict[tuple[int, int], Rollout] = {}
    rounds = 0
    while any(group.unfinished for group in groups):
        rounds += 1
        with open_environments(cfg) as client:
            world = world_of(cfg, client)
            groups = [
                PromptGroup.restored(reloaded(group), prompt, sampling(), world)
                for group, prompt in zip(groups, prompts(), strict=True)
            ]
            episodes = [episode for group in groups for episode in group.unfinished]
            EpisodeScheduler(fake_engine(abort_after=25)).run(
                episodes,
                lambda episode: finished.update({(episode.prompt.prompt_id, episode.sample_index): episode.rollout()}),
            )
    assert rounds > 1
    assert turns_of([finished[key] for key in sorted(finished)]) == turns_of(expected)


def fake_engine(**others: Any) -> Any:
    """An engine whose responses end by themselves, after 1 to 20 tokens."""
    return FakeEngine(max_running=4, length=lambda seed: 1 + seed % 20, reason="stop", **others)
