"""Sequences arrive whole on the rank they were sent to, whoever held them."""

from __future__ import annotations

import dataclasses
import math

import torch

from spmdrl.dist.exchange import exchange, gather_infos
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.types import Sequence, TurnSpan
from tests.helpers.ranks import run_ranks
from tests.helpers.sequences import random_sequences


def routes_of(sequence: Sequence) -> torch.Tensor:
    """Three layers with two experts each."""
    first = sequence.index - 1
    return torch.arange(first, first + 6 * len(sequence.token_ids), dtype=torch.int16).view(-1, 3, 2)


def candidates_of(sequence: Sequence) -> torch.Tensor:
    """Five tokens each, of a large vocabulary."""
    first = 2**18 + sequence.index
    return torch.arange(first, first + 5 * len(sequence.token_ids), dtype=torch.int32).view(-1, 5)


def some_sequences(count: int) -> list[Sequence]:
    """Pairs of one rollout, with numbers that no float32 holds; every other one has a baseline."""
    baselines = [math.nan, 0.1]
    turns = [
        TurnSpan(
            number=number,
            start=number,
            end=number + 1,
            reward=-number / 3,
            state=2**52 - 1 - number,
            role=2**51 + number,
            team=2**52 - 1 - 2 * number,
            newest=number,
        )
        for number in range(3)
    ]
    return [
        dataclasses.replace(
            s,
            index=s.index // 2,
            segment=s.index % 2,
            baseline_reward=baselines[s.index % 2],
            turns=tuple(turns[: s.index % 4]),
            prior_turn_rewards=s.index / 3,
            routes=routes_of(s) if s.index % 3 else None,
            candidates=candidates_of(s) if s.index % 2 else None,
        )
        for s in random_sequences(count)
    ]


def _exchanged(count: int, holder: list[int], receiver: list[int]) -> list[Sequence]:
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        mesh = build_meshes(world).training
        mine = [s for s in some_sequences(count) if holder[number_of(s)] == world.rank]
        infos = gather_infos(mine, mesh)
        assert [info.place for info in infos] == [divmod(i, 2) for i in range(count)]
        assert [info.rank for info in infos] == holder
        return exchange(mine, infos, {divmod(i, 2): rank for i, rank in enumerate(receiver)}, mesh)


def number_of(sequence: Sequence) -> int:
    return 2 * sequence.index + sequence.segment


def test_every_sequence_arrives_unchanged() -> None:
    holder = [0, 0, 3, 3, 3, 1, 0, 3, 1, 0]  # rank 2 holds nothing
    receiver = [2, 0, 2, 3, 0, 0, 2, 2, 0, 2]  # rank 1 gets nothing
    received = run_ranks(4, _exchanged, 10, holder, receiver)
    originals = some_sequences(10)
    for rank, sequences in enumerate(received):
        assert [number_of(s) for s in sequences] == [i for i in range(10) if receiver[i] == rank]
        for sequence in sequences:
            original = originals[number_of(sequence)]
            assert sequence.token_ids == original.token_ids
            assert sequence.loss_mask == original.loss_mask
            assert (sequence.reward, sequence.prior_turn_rewards) == (original.reward, original.prior_turn_rewards)
            assert sequence.turns == original.turns
            assert math.isnan(sequence.baseline_reward) == math.isnan(original.baseline_reward)
            assert math.isnan(original.baseline_reward) or sequence.baseline_reward == original.baseline_reward
            for name in ("routes", "candidates"):
                sent, came = getattr(original, name), getattr(sequence, name)
                assert came is None if sent is None else torch.equal(came, sent)
            for one, other in zip(sequence.rollout_logprobs, original.rollout_logprobs, strict=True):
                assert abs(one - other) < 1e-6  # they travel as float32
