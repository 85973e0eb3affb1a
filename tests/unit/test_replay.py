"""A recorded step is read as it was written, damage is named, and fingerprints differ by as much as steps do."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spmdrl.replay.recorder import Fingerprint, StepFingerprint, difference
from spmdrl.rewards.client import Rewarded
from spmdrl.rollout.files import folder_of, read_part, read_parts, recorded_steps, write_part
from spmdrl.types import Candidates, Prompt, Response, RewardOutcome, Routes, Span, UserError
from tests.helpers.rollouts import RECORDING, one_turn

TOKENS = st.lists(st.integers(0, 2**17), max_size=5).map(tuple)
NUMBERS = st.floats(allow_nan=False)
SHAPES = st.tuples(*[st.integers(1, 3)] * 3)
ROUTES = st.builds(lambda start, shape: Routes.of(start, torch.full(shape, start)), st.integers(0, 9), SHAPES)


@st.composite
def outcomes(draw: st.DrawFn) -> Rewarded:
    """Any rollout of one of three prompts, with any reward."""
    prompt_id = draw(st.integers(0, 2))
    token_ids = draw(TOKENS)
    logprobs = draw(st.lists(NUMBERS, min_size=len(token_ids), max_size=len(token_ids)))
    prompt = Prompt(
        prompt_id=prompt_id,
        token_ids=(1, 2, 3)[:prompt_id],
        text=f"prompt {prompt_id} ü",
        answer=None if prompt_id else "4",
        task="sum",
        metadata={},
    )
    response = Response(
        token_ids=token_ids,
        logprobs=tuple(logprobs),
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        spans=tuple(draw(st.lists(st.builds(Span, st.integers(0, 9), st.integers(0, 9)), max_size=2))),
        routes=draw(st.none() | ROUTES),
        candidates=draw(st.none() | st.just(Candidates.of(4, torch.arange(3 * len(token_ids)).view(-1, 3)))),
    )
    rollout = one_turn(
        prompt,
        response,
        sample_index=draw(st.integers(0, 4)),
        seed=draw(st.integers(0, 2**63 - 1)),
        is_baseline=draw(st.booleans()),
    )
    parts = draw(st.dictionaries(st.text(max_size=3), NUMBERS, max_size=2))
    return rollout, RewardOutcome(reward=draw(NUMBERS), parts=parts, failure=draw(st.none() | st.text(max_size=5)))


@settings(max_examples=30, deadline=None)
@given(st.lists(outcomes(), max_size=5).map(tuple), st.dictionaries(st.integers(0, 99), st.integers(0, 99), max_size=3))
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, written: tuple[Rewarded, ...], places: dict[int, int]
) -> None:
    path = tmp_path_factory.getbasetemp() / "rank-0.safetensors"
    recording = dataclasses.replace(RECORDING, outcomes=written, places=places)
    write_part(path, recording)
    assert read_part(path) == recording


def test_what_is_missing_or_damaged_is_named(tmp_path: Path) -> None:
    place = folder_of(tmp_path, 7)
    place.mkdir()
    (tmp_path / "step-00000008.unfinished").mkdir()
    for rank in range(2):
        write_part(place / f"rank-{rank}.safetensors", dataclasses.replace(RECORDING, num_ranks=2, places={rank: 1}))
    assert recorded_steps(tmp_path) == [7]
    assert [part.places for part in read_parts(tmp_path, 7)] == [{0: 1}, {1: 1}]
    assert [part.places for part in read_parts(tmp_path, 7, index=1, count=3)] == [{1: 1}]
    with pytest.raises(UserError, match="no rollouts of step 8; the steps it holds: 7"):
        read_parts(tmp_path, 8)
    whole = (place / "rank-0.safetensors").read_bytes()
    (place / "rank-0.safetensors").write_bytes(whole[:-1])
    with pytest.raises(UserError, match=r"rank-0\.safetensors cannot be read"):
        read_parts(tmp_path, 7)
    (place / "rank-0.safetensors").write_bytes(whole)
    (place / "rank-1.safetensors").unlink()
    with pytest.raises(UserError, match=r"rank-1\.safetensors cannot be read"):
        read_parts(tmp_path, 7)


def fingerprint(gradient: torch.Tensor, advantage: float = 0.5) -> StepFingerprint:
    return StepFingerprint(
        advantages={(4, 0): torch.full((3,), advantage), (2, 1): torch.empty(0)},
        weights={"policy/w": "0" * 16},
        gradients={"policy/1/w": Fingerprint.of(gradient)},
        numbers={"update/loss": 0.1, "update/grad_norm": math.pi},
    )


def test_fingerprints_are_read_as_they_were_written(tmp_path: Path) -> None:
    found = fingerprint(torch.randn(3, 5, generator=torch.Generator().manual_seed(0)))
    found.write(tmp_path / "found-0.safetensors")
    read = StepFingerprint.read(tmp_path / "found-0.safetensors")
    assert (read.weights, read.gradients, read.numbers) == (found.weights, found.gradients, found.numbers)
    assert difference([found], [read]).is_none
    assert [path.name for path in tmp_path.iterdir()] == ["found-0.safetensors"]
    with pytest.raises(UserError, match=r"nowhere/found-0\.safetensors cannot be written"):
        found.write(tmp_path / "nowhere/found-0.safetensors")


def test_the_difference_of_gradients_is_estimated() -> None:
    """Of parts on two ranks: the mean of many estimates of a relative difference of 1e-3 is that."""
    random = torch.Generator().manual_seed(1)
    parts = [torch.randn(40, 50, generator=random) for _ in range(2)]
    before = [fingerprint(part) for part in parts]
    estimates = []
    for _ in range(50):
        noise = [1e-3 * torch.randn(40, 50, generator=random) for _ in range(2)]
        apart = difference(before, [fingerprint(part + x) for part, x in zip(parts, noise, strict=True)])
        estimates.append(apart.gradients["policy/1/w"] ** 2)
    assert math.sqrt(sum(estimates) / len(estimates)) == pytest.approx(1e-3, rel=0.2)
    assert not apart.is_none and apart.advantages == 0 and not apart.weights


def test_one_bit_is_a_difference() -> None:
    gradient = torch.zeros(5)
    other = gradient.clone()
    other[3] = -0.0
    assert not difference([fingerprint(gradient)], [fingerprint(other)]).is_none
    assert difference([fingerprint(gradient)], [fingerprint(gradient, advantage=0.75)]).advantages == 0.25


def test_what_one_of_two_lacks_is_infinitely_far() -> None:
    found = fingerprint(torch.ones(2))
    empty = StepFingerprint(advantages={}, weights={}, gradients={}, numbers={})
    apart = difference([found], [empty])
    assert apart.advantages == apart.gradients["policy/1/w"] == math.inf
    assert apart.weights == ["policy/w"] and math.isnan(apart.numbers["update/loss"])
