"""The engines of benchmarks/ change the requests of a step, and leave others alone."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

from spmdrl.algo.seeds import rollout_seed
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.types import Request

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import workload
from forced_lengths import TailLengths
from noisy_engine import NoisyEngine

RUN_SEED, STEP, NUM_PROMPTS = 5, 3, 2


class Recorded(TorchEngine):
    """Has no model, and answers each request by itself; `seen` holds the weights at that time."""

    def __init__(self) -> None:
        self.version = STEP - 1
        self.weights = {"matrix": torch.eye(2), "norm": torch.ones(2)}
        self.seen: list[torch.Tensor] = []

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Request | None]]:
        self.seen.append(self.weights["matrix"].clone())
        return iter(list(enumerate(requests)))


class Tail(TailLengths, Recorded):
    run_seed, num_prompts = RUN_SEED, NUM_PROMPTS


class Noisy(NoisyEngine, Recorded):
    held_out = frozenset({rollout_seed(RUN_SEED, 0, 0, 0)})


@pytest.fixture
def requests() -> list[Request]:
    """A step's requests, in the order of its rollouts."""
    first = (STEP - 1) * NUM_PROMPTS
    places = [(first + prompt, sample) for prompt in range(NUM_PROMPTS) for sample in range(workload.GROUP_SIZE)]
    return [request(STEP, *place) for place in places]


def request(step: int, prompt_id: int, sample: int) -> Request:
    seed = rollout_seed(RUN_SEED, step, prompt_id, sample)
    return Request(prompt_ids=(2, 3), seed=seed, max_response_tokens=256, stop_token_ids=frozenset({1}))


def test_a_request_of_the_step_gets_its_length_in_any_order(requests: list[Request]) -> None:
    forced = [forced for _, forced in Tail().generate([None, *reversed(requests)])]
    assert forced[0] is None
    lengths = [one.max_response_tokens for one in reversed(forced[1:])]
    assert lengths == workload.response_lengths("tail", STEP, num_prompts=NUM_PROMPTS)
    assert {one.stop_token_ids for one in forced[1:]} == {frozenset()}
    assert [one.seed for one in reversed(forced[1:])] == [one.seed for one in requests]


def test_other_requests_keep_their_length() -> None:
    others = [request(0, 0, 0), request(STEP + 1, STEP * NUM_PROMPTS, 0)]
    assert [one for _, one in Tail().generate(others)] == others


def test_held_out_prompts_are_answered_without_noise(requests: list[Request]) -> None:
    engine, held_out = Noisy(), request(0, 0, 0)
    assert [one for _, one in engine.generate([held_out])] == [held_out]
    assert [one for _, one in engine.generate([None, *requests])] == requests
    assert list(engine.generate([])) == []
    exact, noisy = engine.seen
    assert torch.equal(exact, torch.eye(2)) and torch.equal(engine.weights["matrix"], exact)
    assert not torch.equal(noisy, exact)
    assert torch.equal(engine.weights["norm"], torch.ones(2))
