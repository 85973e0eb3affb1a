"""The embedded engine with adapters: of several versions at once, each request with those of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from spmdrl.engine.protocol import AdapterRefs
from spmdrl.engine.torch import scheduler
from spmdrl.engine.torch.engine import TorchEngine
from spmdrl.refit.refit import load_whole
from spmdrl.types import Request, Response, Span
from tests.helpers.adapters import ALL_LINEAR, merged, random_adapters
from tests.helpers.models import (
    save_gemma3,
    save_gpt_oss,
    save_llama,
    save_qwen3,
    save_qwen3_5,
    save_qwen3_moe,
    save_qwen3_next,
)

NUM_TOKENS = 12


@pytest.fixture(scope="module", params=[save_qwen3, save_llama, save_gemma3])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoModelForCausalLM.from_pretrained(request.param(tmp_path_factory.mktemp("model")))


def engine_for(model: Any, max_running: int = 16) -> TorchEngine:
    engine = TorchEngine(
        model.config, device=torch.device("cpu"), dtype=torch.float32, kernel="sdpa", max_running=max_running
    )
    load_whole(engine, dict(model.named_parameters()), version=0)
    return engine


def request(number: int, prompt: int | None = None) -> Request:
    ids = tuple(2 + (7 * (number if prompt is None else prompt) + 3 * i) % 90 for i in range(1 + number % 5))
    return Request(prompt_ids=ids, seed=number, max_response_tokens=NUM_TOKENS + number % 3)


def worst(model: Any, asked: list[Request], responses: list[Response]) -> float:
    """Largest difference from a plain forward pass."""
    found = 0.0
    for one, answer in zip(asked, responses, strict=True):
        ids = torch.tensor([one.prompt_ids + answer.token_ids])
        with torch.no_grad():
            logits = model(ids).logits[0, len(one.prompt_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(-1, ids[0, len(one.prompt_ids) :, None])[:, 0]
        found = max(found, float((torch.tensor(answer.logprobs) - expected).abs().max()))
    return found


def answers(engine: TorchEngine, asked: list[Request]) -> list[Response]:
    found = dict(engine.generate(asked))
    return [found[i] for i in sorted(found)]


def check_adapters(model: Any, targets: tuple[str, ...]) -> None:
    """Base, then two versions: the answers of each are those of the model with that version merged."""
    engine, asked = engine_for(model), [request(i) for i in range(9)]
    assert worst(model, asked, answers(engine, asked)) <= 1e-5
    for version in (1, 2):
        adapters = random_adapters(model, version, targets=targets)
        assert engine.load_adapters(adapters) == []
        found = answers(engine, asked)
        assert worst(merged(model, adapters), asked, found) <= 1e-5
        assert worst(model, asked, found) > 1e-2, "the adapters are not applied"
        assert all(response.spans == (Span(version, len(response.token_ids)),) for response in found)


@pytest.mark.parametrize("targets", [ALL_LINEAR, ("q_proj", "v_proj"), ("up_proj",), ("o_proj", "down_proj")])
def test_adapters_are_their_merged_model(model: Any, targets: tuple[str, ...]) -> None:
    check_adapters(model, targets)


@pytest.mark.parametrize(
    ("save", "targets"),
    [
        (save_qwen3_next, ("in_proj_qkvz", "in_proj_ba")),
        (save_qwen3_next, ("in_proj_qkvz", "in_proj_ba", "out_proj", "shared_expert_gate", *ALL_LINEAR)),
        (save_qwen3_5, ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")),
        (save_qwen3_5, ("out_proj",)),
    ],
)
def test_adapters_of_recurrent_layers(save: Callable[..., str], targets: tuple[str, ...], tmp_path: Path) -> None:
    check_adapters(AutoModelForCausalLM.from_pretrained(save(tmp_path, initializer_range=0.05)), targets)


@pytest.mark.parametrize(
    ("save", "targets"),
    [
        (save_qwen3_moe, ("experts.gate_up_proj", "experts.down_proj", *ALL_LINEAR)),
        (save_gpt_oss, ("experts.down_proj",)),  # whose experts are [experts, inputs, outputs]
    ],
)
def test_adapters_of_experts(save: Callable[..., str], targets: tuple[str, ...], tmp_path: Path) -> None:
    """Alone, and the base and two versions in one batch, whose rows are computed by experts of their own."""
    model = AutoModelForCausalLM.from_pretrained(save(tmp_path))
    check_adapters(model, targets)
    engine, versions = engine_for(model), [random_adapters(model, version, targets=targets) for version in (1, 2)]
    load = {5 * adapters.version: lambda adapters=adapters: engine.load_adapters(adapters) for adapters in versions}
    for number, response in dict(engine.generate(asking(load, 15))).items():
        whole = model if number < 5 else merged(model, versions[number // 5 - 1])
        assert worst(whole, [request(number, prompt=0)], [response]) <= 1e-5


def test_rslora_divides_by_the_root_of_the_rank(model: Any) -> None:
    engine, asked = engine_for(model), [request(i) for i in range(3)]
    adapters = random_adapters(model, 1, use_rslora=True)
    assert adapters.scale == 2 * 4 / 4**0.5
    engine.load_adapters(adapters)
    assert worst(merged(model, adapters), asked, answers(engine, asked)) <= 1e-5


def asking(load: dict[int, Callable[[], Any]], count: int) -> Iterator[Request | None]:
    """Requests, all of one prompt, among which adapters are loaded."""
    for number in range(count):
        if number in load:
            load[number]()
            yield None  # let what was taken before begin
        yield request(number, prompt=0)


@pytest.mark.parametrize("max_running", [4, 32])
def test_a_request_keeps_the_version_that_was_newest_when_it_was_taken(model: Any, max_running: int) -> None:
    """Base, v1 and v2 sample the same prompts in one batch; nothing waits, and no row reads another's keys."""
    engine = engine_for(model, max_running)
    versions = [random_adapters(model, version) for version in (1, 2)]
    load = {5 * adapters.version: lambda adapters=adapters: engine.load_adapters(adapters) for adapters in versions}
    responses = dict(engine.generate(asking(load, 15)))
    for number, response in responses.items():
        (span,) = response.spans
        assert span.version == number // 5
        whole = model if span.version == 0 else merged(model, versions[span.version - 1])
        assert worst(whole, [request(number, prompt=0)], [response]) <= 1e-5


def test_what_another_version_has_read_is_read_again(model: Any) -> None:
    """Half of the second turns are asked for before a new version comes, and half after it."""
    engine = engine_for(model)
    adapters = random_adapters(model, 1)
    begins = [replace(request(i), cache_on_finish=frozenset({"length"})) for i in range(6)]
    later: list[Request] = []

    def source() -> Iterator[Request | None]:
        yield from begins
        while len(later) < 3:
            yield None
        yield from later[:3]
        while len(later) < 6:
            yield None
        engine.load_adapters(adapters)
        yield from later[3:]

    found = {}
    for place, response in engine.generate(source()):
        found[place] = response
        if place < len(begins):
            so_far = begins[place].prompt_ids + response.token_ids
            later.append(replace(begins[place], prompt_ids=(*so_far, 5, 6), seed=90 + place))
    asked = [*begins, *later]
    assert [found[place].spans[0].version for place in range(12)] == [0] * 9 + [1] * 3
    assert worst(model, asked[:9], [found[place] for place in range(9)]) <= 1e-5
    assert worst(merged(model, adapters), asked[9:], [found[place] for place in range(9, 12)]) <= 1e-5


def test_a_version_lives_as_long_as_a_request_needs_it(model: Any) -> None:
    engine = engine_for(model, 4)
    for version in (1, 2):
        engine.load_adapters(random_adapters(model, version))
    assert sorted(engine.runner.adapters.versions) == [2]
    held: list[list[int]] = []

    def requests() -> Iterator[Request | None]:
        yield replace(request(0), max_response_tokens=60)
        for version in (3, 4):
            engine.load_adapters(random_adapters(model, version))
            held.append(sorted(engine.runner.adapters.versions))
            yield None
            yield replace(request(version), max_response_tokens=40)

    assert {i: response.spans[0].version for i, response in engine.generate(requests())} == {0: 2, 1: 3, 2: 4}
    assert held == [[2, 3], [2, 3, 4]]
    assert sorted(engine.runner.adapters.versions) == [4]


def test_aborted_requests_hold_no_version(model: Any) -> None:
    engine = engine_for(model, 4)
    engine.load_adapters(random_adapters(model, 1))

    def requests() -> Iterator[Request]:
        yield request(0)
        engine.load_adapters(random_adapters(model, 2))
        engine.abort()
        yield request(1)

    assert {response.finish_reason for _, response in engine.generate(requests())} == {"abort"}
    assert sorted(engine.runner.adapters.versions) == [2]


def test_tensors_that_arrive_otherwise_are_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, adapters = engine_for(model), random_adapters(model, 1)
    real = engine.runner.adapters.load

    def load(given: Any) -> Any:
        copies = real(given)
        next(iter(copies.tensors.values()))[0, 0] += 1
        return copies

    monkeypatch.setattr(engine.runner.adapters, "load", load)
    assert engine.load_adapters(adapters) == [next(iter(adapters.tensors))]


def test_a_prompt_counts_once_for_each_version_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "PREFILL_TOKENS", 8)
    same = Request(prompt_ids=(2, 3, 4, 5, 6), seed=0, max_response_tokens=4)
    waiting = deque(scheduler.RequestState(index, same, version) for index, version in enumerate((1, 1, 2)))
    assert [state.version for state in scheduler.admit(waiting, 3)] == [1, 1]


def test_an_unused_version_is_returned_once() -> None:
    versions = AdapterRefs()
    for version in (1, 2, 3):
        versions.add(version)
    versions.begin(1)
    assert versions.pop_unused(3) == [2]
    assert versions.pop_unused(3) == []
    versions.end(1)
    assert versions.pop_unused(3) == [1]


def test_adapters_in_bits_of_their_rows(tmp_path: Path) -> None:
    """Exact kernels: a row's log-probabilities do not depend on the versions beside it."""
    model = AutoModelForCausalLM.from_pretrained(save_qwen3(tmp_path))
    engine = TorchEngine(
        model.config, device=torch.device("cpu"), dtype=torch.float32, kernel="invariant", max_running=16
    )
    load_whole(engine, dict(model.named_parameters()), version=0)
    load = {5: lambda: engine.load_adapters(random_adapters(model, 1))}
    together = dict(engine.generate(asking(load, 10)))
    for number in range(5, 10):
        alone = answers(engine, [request(number, prompt=0)])[0]
        assert (alone.token_ids, alone.logprobs) == (together[number].token_ids, together[number].logprobs)
