"""The real SGLang, started by gloo ranks: it says what the trainer says, and holds what the trainer holds.

Starting an engine takes longer than everything that is asked of it, so one run of ranks answers several tests.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from spmdrl.config.environment import ClassEnvironment, EnvironmentConfig
from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.engine.sglang.engine import _response
from spmdrl.envs.client import open_environments
from spmdrl.refit.refit import RefitMismatch
from spmdrl.rollout.env_context import EnvContext
from spmdrl.rollout.sampling import Sampling
from spmdrl.rollout.scheduler import sample
from spmdrl.types import Prompt, Request, Response, Rollout
from tests.helpers.agents import agent_config, script
from tests.helpers.engine_ranks import run_engine_ranks
from tests.helpers.environments import fake_world
from tests.helpers.models import save_qwen3
from tests.helpers.sglang_engine import (
    Rank,
    answers,
    change,
    greedy,
    interrupted,
    prompts,
    rank_with_engine,
    settings,
    worst_difference,
)

SOURCE = ClassEnvironment(kind="class", name="a.py:A")
TEMPERATURE = 0.7
MAX_PROMPT, MAX_RESPONSE = 32, 96  # of `settings`


def sampled(count: int, num_tokens: int = 24) -> list[Request]:
    return [
        Request(
            prompt_ids=ids,
            seed=i,
            max_response_tokens=num_tokens,
            temperature=TEMPERATURE,
            stop_token_ids=frozenset({1}),
        )
        for i, ids in enumerate(prompts(count))
    ]


def answered(start: EpisodeStart, number: int, action: Action) -> Observation:
    """Answer with three tokens, four times."""
    content = f"{2 + start.seed % 20} {3 + number} {2 + len(action.text) % 20}"
    return Observation(messages=({"role": "user", "content": content},), done=number == 3)


# The same as an agent, which repeats what it is answered.
AGENT = """
    messages, seed = [user(episode["prompt"])], episode["seed"]
    for number in range(4):
        answer = chat(messages)
        said = f"{2 + seed % 20} {3 + number} {2 + len(answer['content']) % 20}"
        messages += [answer, user(said)]
"""


def episodes(rank: Rank, world: EnvContext, *, temperature: float = TEMPERATURE) -> list[Rollout]:
    """Sample episodes of several turns."""
    stops = frozenset(range(1, 9) if temperature else range(1, 96, 2))  # the likeliest tokens are often the same ones
    asked = [
        Prompt(prompt_id=i, token_ids=ids, text=" ".join(map(str, ids)), answer=None, task="", metadata={})
        for i, ids in enumerate(prompts(12))
    ]
    rollouts = sample(
        rank.engine,
        asked,
        Sampling(group_size=1, temperature=temperature, max_response_tokens=96, stop_token_ids=stops),
        world,
        lambda rollout: rollout,
        run_seed=5,
        step=1,
    )
    return sorted(rollouts, key=lambda rollout: rollout.prompt.prompt_id)


def asked_and_answered(rollouts: list[Rollout]) -> tuple[list[Request], list[Response]]:
    """Each turn as a request and its response."""
    requests, responses = [], []
    for rollout in rollouts:
        so_far: tuple[int, ...] = ()
        for turn in rollout.turns:
            so_far += turn.context_ids
            requests.append(Request(prompt_ids=so_far, seed=0, max_response_tokens=1))
            responses.append(turn.response)
            so_far += turn.response.token_ids
    return requests, responses


def read_and_written(rollouts: list[Rollout]) -> list[list[tuple[tuple[int, ...], tuple[int, ...]]]]:
    """Return the tokens that the policy read and those that it wrote, by episode and turn."""
    return [[(turn.context_ids, turn.response.token_ids) for turn in rollout.turns] for rollout in rollouts]


def read_again(rollouts: list[Rollout]) -> Iterator[int]:
    """Yield how many tokens of an episode's turns so far were not in the cache at each later turn."""
    for rollout in rollouts:
        (trajectory,) = rollout.trajectories
        for start, turn in list(zip(trajectory.starts, trajectory.turns, strict=False))[1:]:
            yield start - turn.response.num_cached


def resources() -> dict[str, float]:
    """What a refit could leave behind, of this process and the engine's."""
    me = psutil.Process()
    processes = [me, *me.children(recursive=True)]
    return {
        "files": sum(process.num_fds() for process in processes),
        "segments": len(os.listdir("/dev/shm")),
        "rss_mib": sum(process.memory_info().rss for process in processes) / 2**20,
    }


def sockets() -> set[tuple[str, int]]:
    """The name and rights of the folder of each Unix socket with a name that this process and the engine's have."""
    me = psutil.Process()
    processes = [me, *me.children(recursive=True)]
    folders = {Path(one.laddr).parent for process in processes for one in process.net_connections("unix") if one.laddr}
    return {(folder.name, stat.S_IMODE(folder.stat().st_mode)) for folder in folders if folder.is_absolute()}


def all_of_it(path: str, agent: list[str], tp_size: int, num_refits: int) -> dict[str, Any]:
    """Everything that one set of engines is asked, on one rank."""
    found: dict[str, Any] = {"differences": [], "refits": num_refits}
    with rank_with_engine(settings(path, 2, tp_size=tp_size, temperature=TEMPERATURE, max_running=48)) as rank:
        engine = rank.engine
        found["leads"] = engine.leads
        found["sockets"] = sockets()

        rank.refit(version=0)
        engine.wake()
        asked = sampled(20)
        found["differences"].append(worst_difference(rank, asked, answers(engine, asked)))
        engine.sleep()

        before = {}
        for version in range(1, num_refits + 1):
            change(rank.policy, 0.002)
            rank.refit(version=version)  # compares every weight by digest
            if version == 5:
                before = resources()
        found["growth"] = {name: value - before[name] for name, value in resources().items()}

        engine.wake()
        responses = answers(engine, asked)
        found["differences"].append(worst_difference(rank, asked, responses))
        found["spans"] = {span.version for answer in responses for span in answer.spans}
        found["reasons"] = {
            (answer.finish_reason, answer.token_ids[-1] == 1, len(answer.token_ids)) for answer in responses
        }

        (found["longest"],) = answers(engine, [greedy(tuple(range(2, 2 + MAX_PROMPT)), MAX_RESPONSE)]) or [None]

        world = fake_world(answered, EnvironmentConfig(source=SOURCE))
        rollouts = episodes(rank, world)
        found["turns"] = [len(rollout.turns) for rollout in rollouts]
        found["read again"] = list(read_again(rollouts))
        found["differences"].append(worst_difference(rank, *asked_and_answered(rollouts)))

        cfg = agent_config(agent)
        with open_environments(cfg) as client:
            # Greedy: on a CPU SGLang ignores seeds.
            theirs, own = (episodes(rank, one, temperature=0.0) for one in (replace(world, client=client), world))
        found["an agent's turns"], found["the same in process"] = read_and_written(theirs), read_and_written(own)

        whole = answers(engine, [greedy(ids, 80) for ids in prompts(8)])
        found["cuts"] = list(interrupted(rank, whole))
        engine.sleep()

        found["corrupted"] = corrupted(rank, version=num_refits + 1)
        rank.refit(version=num_refits + 2)  # and the next is in order again
        found["changed"] = rank.changed()
    found["changed for good"] = rank.changed()
    return found


def corrupted(rank: Rank, version: int) -> str:
    """Flip one bit of the first rank's second bucket after it was gathered; what this rank is told."""
    load = rank.engine.load

    def flip(number: int) -> None:
        if number == 1 and rank.world.is_main:
            rank.refit._buffers[1][40] ^= 1
        load(number)

    rank.engine.load = flip  # type: ignore[method-assign]
    try:
        rank.refit(version=version)
    except RefitMismatch as error:
        return str(error)
    finally:
        rank.engine.load = load  # type: ignore[method-assign]
    return "nothing was noticed"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1, 50), id="an-engine-for-each-rank", marks=pytest.mark.slow),
        pytest.param((2, 20), id="one-engine-for-two-ranks"),
    ],
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = save_qwen3(tmp_path_factory.mktemp("model"), max_position_embeddings=MAX_PROMPT + MAX_RESPONSE)
    agent = script(tmp_path_factory.mktemp("agent"), AGENT)
    return run_engine_ranks(2, all_of_it, path, agent, *request.param)


@pytest.fixture
def leaders(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [rank for rank in ranks if rank["leads"]]


def test_log_probabilities_are_the_trainers_before_and_after_refits(leaders: list[dict[str, Any]]) -> None:
    assert leaders
    for rank in leaders:
        assert max(rank["differences"]) < 1e-5


def test_episodes_have_turns_whose_log_probabilities_are_the_trainers(leaders: list[dict[str, Any]]) -> None:
    for leader in leaders:
        assert max(leader["turns"]) == 4 and sum(leader["turns"]) > 24  # the differences above are those of all turns


def test_a_later_turn_reads_only_what_is_new(leaders: list[dict[str, Any]]) -> None:
    for leader in leaders:
        assert max(leader["read again"]) <= 1, "of what was there before, at most the last sampled token"


def test_an_agents_episodes_are_those_in_process_token_for_token(leaders: list[dict[str, Any]]) -> None:
    for leader in leaders:
        turns = leader["the same in process"]
        assert sum(map(len, turns)) > 24 and leader["an agent's turns"] == turns


def test_refits_leave_nothing_behind(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["growth"]["files"] <= 2
        assert rank["growth"]["segments"] <= 2
        assert rank["growth"]["rss_mib"] < 64


def test_responses_say_which_weights_sampled_them_and_why_they_ended(leaders: list[dict[str, Any]]) -> None:
    for rank in leaders:
        assert rank["spans"] == {rank["refits"]}
        for reason, ends_with_stop_token, length in rank["reasons"]:
            assert (reason == "stop") == ends_with_stop_token
            assert reason == "stop" or length == 24


def test_a_sequence_may_be_as_long_as_the_model_was_made_for(leaders: list[dict[str, Any]]) -> None:
    for rank in leaders:
        assert rank["longest"].finish_reason == "length" and len(rank["longest"].token_ids) == MAX_RESPONSE


def test_an_engine_leaves_its_rank_as_it_was(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["changed"] == ({"SIGQUIT"} if rank["leads"] else set())  # by which its processes say that they fail
        assert rank["changed for good"] == set()


def test_only_its_user_reaches_an_engine_by_its_sockets(ranks: list[dict[str, Any]]) -> None:
    found = set().union(*(rank["sockets"] for rank in ranks))
    assert any(name.startswith("spmdrl-") for name, _ in found)  # others are torch's and Python's
    assert {mode for _, mode in found} == {0o700}, found


def test_an_interrupted_response_goes_on_to_the_same_tokens(leaders: list[dict[str, Any]]) -> None:
    for rank in leaders:
        assert all(same for _, _, same in rank["cuts"])
        assert any(reason == "abort" and 0 < length < 80 for reason, length, _ in rank["cuts"])


@pytest.mark.parametrize(
    ("token_ids", "reason"),
    [((), "abort"), ((4, 5), "abort"), ((1, 5), "abort"), ((4, 1), "stop"), ((4, 5, 6), "length"), ((4, 5, 1), "stop")],
)
def test_what_ends_in_the_last_pass_before_an_abort_has_ended(token_ids: tuple[int, ...], reason: str) -> None:
    request = Request(
        prompt_ids=(7,), seed=0, max_response_tokens=5, stop_token_ids=frozenset({1}), response_ids=(2, 3)
    )
    about = {"finish_reason": {"type": "abort"}, "output_token_logprobs": [(-1.0, i, None) for i in token_ids]}
    response = _response({"output_ids": list(token_ids), "meta_info": about}, request, version=3)
    assert response.finish_reason == reason and response.token_ids == token_ids


def test_one_flipped_bit_stops_every_rank_and_names_the_weights(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert f"after the refit to version {rank['refits'] + 1} the engine does not hold" in rank["corrupted"]
        assert "model.layers.0" in rank["corrupted"]


def unfused(path: str, num_ranks: int) -> list[str]:
    """Refit a mixture of experts twice into one engine for all ranks; names of weights that differ."""
    differing: list[str] = []
    with rank_with_engine(settings(path, num_ranks, tp_size=num_ranks)) as rank:
        for version in (0, 1):
            change(rank.policy, 0.01)
            try:
                rank.refit(version=version)
            except RefitMismatch as error:
                differing.append(str(error))
        names = {entry.name for bucket in rank.refit._gatherer.buckets for entry in bucket.flat_entries}
        assert "model.layers.0.mlp.experts.3.up_proj.weight" in names
    return differing


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_experts_arrive_bit_for_bit(tmp_path: Path, num_ranks: int) -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        eos_token_id=1,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path)
    assert run_engine_ranks(num_ranks, unfused, str(tmp_path), num_ranks) == [[]] * num_ranks
