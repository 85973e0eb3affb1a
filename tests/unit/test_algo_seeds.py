"""Random numbers are hashes: equal to the slow twin, well mixed, and independent of everything but their inputs."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from spmdrl.algo.seeds import mix, rollout_seed, uniform
from tests.helpers import oracle

WEYL, START = 0x9E3779B97F4A7C15, 0x243F6A8885A308D3


def some_words(count: int) -> list[int]:
    draw = random.Random(0)
    return [0, 1, 2, 2**62, 2**63 - 1, -1, -(2**63), *(draw.getrandbits(63) for _ in range(count))]


def test_mix_equals_its_slow_twin() -> None:
    for a, b in itertools.product(some_words(30), repeat=2):
        assert mix(a, b) == oracle.mix(a, b)
        assert 0 <= mix(a, b) < 2**63
    assert mix(7, 8, 9) == oracle.mix(7, 8, 9)


def test_mix_is_built_on_the_published_splitmix64() -> None:
    # SplitMix64 seeded with 1234567, as in many public test suites: the first two outputs.
    for count, published in ((1, 6457827717110365317), (2, 3203168211198807973)):
        state = (1234567 + count * WEYL) % 2**64
        value = (START ^ state) * pow(WEYL, -1, 2**64) % 2**64
        assert mix(value) == published >> 1


def test_hashes_never_change() -> None:
    """A change here changes the samples of every run that is resumed."""
    assert mix() == 1305961721744163945
    assert mix(0) == 8426236685722245019
    assert rollout_seed(0, 1, 2, 3) == 8738422418168178298
    assert rollout_seed(0, 1, 2, 3) == mix(0, 1, 2, 3)


def test_small_inputs_do_not_collide() -> None:
    seeds = {rollout_seed(*place) for place in itertools.product(range(10), repeat=4)}
    assert len(seeds) == 10**4
    assert mix(0) != mix(0, 0) != mix(0, 0, 0)
    assert mix(1, 2) != mix(2, 1)


def test_every_input_bit_flips_half_of_the_output_bits() -> None:
    draw = random.Random(1)
    values = [[draw.getrandbits(63) for _ in range(3)] for _ in range(40)]
    for place, bit in itertools.product(range(3), range(0, 63, 3)):
        flips = 0
        for value in values:
            other = list(value)
            other[place] ^= 1 << bit
            flips += (mix(*value) ^ mix(*other)).bit_count()
        # 40 x 63 fair coins: five deviations.
        assert abs(flips - 40 * 31.5) < 5 * math.sqrt(40 * 63) / 2


def test_uniform_equals_its_slow_twin() -> None:
    pairs = list(itertools.product(some_words(20), [0, 1, 2, 4095, 2**31, 2**62 + 1, -1]))
    seeds, positions = torch.tensor(pairs).T
    expected = torch.tensor([oracle.uniform(seed, position) for seed, position in pairs], dtype=torch.float64)
    fast = uniform(seeds, positions)
    assert fast.dtype == torch.float32
    assert torch.equal(fast.double(), expected)
    assert fast.min() >= 0 and fast.max() < 1


def test_uniform_does_not_depend_on_the_batch() -> None:
    seeds = torch.tensor([mix(i) for i in range(50)])
    positions = torch.arange(50) % 7
    whole = uniform(seeds, positions)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(0))
    assert torch.equal(uniform(seeds[order], positions[order]), whole[order])
    assert torch.equal(torch.cat([uniform(seeds[i : i + 1], positions[i : i + 1]) for i in range(50)]), whole)


def chi_square(counts: torch.Tensor) -> float:
    """(chi-square - degrees of freedom) in standard deviations, against equal expectations."""
    expected, freedom = counts.sum() / counts.numel(), counts.numel() - 1
    return float((((counts - expected) ** 2 / expected).sum() - freedom) / math.sqrt(2 * freedom))


NUM = 2**16
STREAMS = {
    "one seed, all positions": (torch.full((NUM,), 12345), torch.arange(NUM)),
    "all seeds, one position": (torch.arange(NUM), torch.full((NUM,), 3)),
    "rollout seeds, few positions": (
        torch.tensor([rollout_seed(0, 1, i, 0) for i in range(NUM // 64)]).repeat_interleave(64),
        torch.arange(64).repeat(NUM // 64),
    ),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_uniform_is_uniform(stream: str) -> None:
    numbers = uniform(*STREAMS[stream])
    words = (numbers.double() * 2**24).long()
    for digits in (words >> 16, words >> 8 & 255, words & 255):  # upper, middle and lower bits
        assert abs(chi_square(digits.bincount(minlength=256).double())) < 5
    assert abs(float(numbers.double().mean()) - 0.5) < 5 / math.sqrt(12 * NUM)


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbours_are_independent(stream: str, lag: int) -> None:
    sixteenths = (uniform(*STREAMS[stream]) * 16).long()
    pairs = sixteenths[:-lag] * 16 + sixteenths[lag:]
    assert abs(chi_square(pairs.bincount(minlength=256).double())) < 5


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_uniform_is_bitwise_the_same_on_cuda() -> None:
    seeds, positions = STREAMS["rollout seeds, few positions"]
    assert torch.equal(uniform(seeds.cuda(), positions.cuda()).cpu(), uniform(seeds, positions))
