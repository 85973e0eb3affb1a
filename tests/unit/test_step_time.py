"""Seconds of phases, where they can be worked out by hand."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from benchmarks.scale_on_paper import (
    Layout,
    Machine,
    ModelCost,
    Rate,
    Work,
    decode_step_s,
    refit_s,
    ring_s,
    rollout_s,
    step_time,
    training_s,
)
from spmdrl.memory.activations import Decoder

# Rates of which seconds can be read off, and no delays.
MACHINE = Machine(
    flops=Rate(2e15, 0.5),
    memory=Rate(2e12, 0.5),
    nvlink=Rate(1e11, 1.0),
    network=Rate(1e10, 1.0),
    bus=Rate(1e10, 1.0),
    gpus_per_node=8,
    hop_s=0.0,
    decode_step_s=0.0,
    bucket_s=0.0,
    bucket_bytes=10**9,
)
DECODER = Decoder(
    num_layers=10,
    hidden=1000,
    query_width=1000,
    key_width=1000,
    query_heads=10,
    head_width=100,
    mlp_width=3000,
    experts_per_token=0,
    norms=2,
    has_head_norms=False,
    vocabulary=1000,
)
PARAMETERS = 10**9
MODEL = ModelCost(
    decoder=DECODER,
    parameters=PARAMETERS,
    in_experts=0,
    num_experts=0,
    linear_flops=2 * PARAMETERS,
    quadratic_flops=0,
)
WEIGHTS_S = 2 * PARAMETERS / 1e12  # of reading them once
CACHE_BYTES = 2 * 10 * 1000 * 2  # of a token: keys and values, layers, width, bfloat16
WORK = Work(rollouts=64, group_size=8, prompt_tokens=0, mean_tokens=1000, longest_tokens=4000, updates=1)


def layout(**changes: Any) -> Layout:
    usual = Layout(
        ranks=8,
        copy_ranks=8,
        engine_tp=1,
        ep=1,
        recomputes=False,
        micro_batch_tokens=10**6,
        moved_bytes=0,
        max_running=1000,
        cache_bytes=10**12,
    )
    return dataclasses.replace(usual, **changes)


def test_a_few_sequences_are_decoded_as_fast_as_weights_are_read() -> None:
    seconds, parts = decode_step_s(MODEL, MACHINE, running=1, context=0, tp=1)
    assert seconds == pytest.approx(WEIGHTS_S)
    assert max(parts, key=parts.__getitem__) == "reading weights"
    on_two, _ = decode_step_s(MODEL, MACHINE, running=1, context=0, tp=2)
    sums = 2 * 10 * 2 * (1000 * 2 / 2) / 1e11  # two a layer, and of an all-reduce over two ranks each half goes twice
    assert on_two == pytest.approx(WEIGHTS_S / 2 + sums)
    slow = dataclasses.replace(MACHINE, hop_s=1e-6)
    for tp in (2, 8):  # all at once, so that more ranks take no more hops
        seconds, parts = decode_step_s(MODEL, slow, running=1e-9, context=0, tp=tp)
        assert parts["sums"] == pytest.approx(2 * 10 * 2e-6) == pytest.approx(seconds - WEIGHTS_S / tp)


def test_many_sequences_are_decoded_as_fast_as_their_cache_is_read() -> None:
    seconds, parts = decode_step_s(MODEL, MACHINE, running=400, context=10_000, tp=1)
    assert seconds == pytest.approx(WEIGHTS_S + 400 * 10_000 * CACHE_BYTES / 1e12)
    assert max(parts, key=parts.__getitem__) == "reading the cache"


def test_very_many_are_decoded_as_fast_as_products_are_computed() -> None:
    seconds, parts = decode_step_s(MODEL, MACHINE, running=10_000, context=0, tp=1)
    assert seconds == pytest.approx(10_000 * 2 * PARAMETERS / 1e15) == pytest.approx(parts["products"])


def test_one_sequence_reads_its_own_experts_and_many_read_all() -> None:
    chosen = dataclasses.replace(DECODER, experts_per_token=8)
    experts = dataclasses.replace(MODEL, decoder=chosen, in_experts=960_000_000, num_experts=128)
    assert experts.read_parameters(1) == pytest.approx(40_000_000 + 960_000_000 * 8 / 128)
    assert experts.read_parameters(1000) == pytest.approx(PARAMETERS)
    assert MODEL.read_parameters(1) == PARAMETERS


def test_lengths_have_the_mean_that_they_should() -> None:
    slices = 20_000
    at = [(i + 0.5) / slices * WORK.longest_tokens for i in range(slices)]
    more = [(1 - t / WORK.longest_tokens) ** WORK.shape for t in at]  # the fraction of responses that are longer
    width = WORK.longest_tokens / slices
    assert width * sum(more) == pytest.approx(WORK.mean_tokens, rel=1e-3)
    assert width * sum(2 * t * s for t, s in zip(at, more, strict=True)) == pytest.approx(WORK.mean_square, rel=1e-3)


def test_a_rollout_waits_for_the_longest_response() -> None:
    few, why = rollout_s(MODEL, dataclasses.replace(WORK, rollouts=8), layout(), MACHINE)
    assert few >= 4000 * WEIGHTS_S and few == pytest.approx(4000 * WEIGHTS_S, rel=0.1)
    assert why == "reading weights"
    half_the_machine, _ = rollout_s(MODEL, dataclasses.replace(WORK, rollouts=4), layout(ranks=4), MACHINE)
    assert half_the_machine == pytest.approx(few)


def test_sequences_without_a_place_wait_for_one() -> None:
    every, _ = rollout_s(MODEL, WORK, layout(), MACHINE)
    four, _ = rollout_s(MODEL, WORK, layout(max_running=4), MACHINE)
    # Four of eight wait: as many tokens again as four have, one each for four sequences at a time.
    assert four - every == pytest.approx(1000 * WEIGHTS_S, rel=0.05)
    room_for_four = int(4 * WORK.settled_context * CACHE_BYTES)
    assert rollout_s(MODEL, WORK, layout(cache_bytes=room_for_four), MACHINE)[0] == pytest.approx(four)


def test_an_update_takes_three_forward_passes_and_four_with_recomputation() -> None:
    fast_links = dataclasses.replace(MACHINE, nvlink=Rate(1e20, 1.0), memory=Rate(1e20, 1.0))
    # 64 responses of 1,000 tokens over 8 ranks: more for each than the longest response has.
    forward = 8 * 1000 * 2 * PARAMETERS / 1e15
    for recomputes, passes in ((False, 3), (True, 4)):
        seconds, why = training_s(MODEL, WORK, layout(recomputes=recomputes), fast_links, backward=True)
        assert seconds == pytest.approx(passes * forward) and why == "products"
    assert training_s(MODEL, WORK, layout(), fast_links, backward=False)[0] == pytest.approx(forward)


def test_no_rank_computes_less_than_the_longest_sequence() -> None:
    fast_links = dataclasses.replace(MACHINE, nvlink=Rate(1e20, 1.0), memory=Rate(1e20, 1.0), network=Rate(1e20, 1.0))
    longest = 3 * 4000 * 2 * PARAMETERS / 1e15
    for ranks in (16, 64):
        seconds, why = training_s(MODEL, WORK, layout(ranks=ranks, copy_ranks=ranks), fast_links, backward=True)
        assert seconds == pytest.approx(longest)
    assert why == "the longest sequence"
    four = dataclasses.replace(WORK, updates=4)
    assert training_s(MODEL, four, layout(ranks=64), fast_links, backward=True)[0] == pytest.approx(4 * longest)


def test_small_micro_batches_are_limited_by_gathers() -> None:
    small = layout(micro_batch_tokens=100)
    seconds, why = training_s(MODEL, WORK, small, MACHINE, backward=True)
    gather = 2 * PARAMETERS * 7 / 8 / 1e11  # in bfloat16; gradients in float32 are twice as many bytes
    optimizer = 7 * 4 * PARAMETERS / 8 / 1e12
    assert seconds == pytest.approx(80 * (2 * gather + 2 * gather + gather / 10) + optimizer)
    assert why == "gathers"


def test_copies_sum_their_shards_over_the_network() -> None:
    one, _ = training_s(MODEL, WORK, layout(ranks=16, copy_ranks=16, micro_batch_tokens=100), MACHINE, backward=True)
    two, _ = training_s(MODEL, WORK, layout(ranks=16, copy_ranks=8, micro_batch_tokens=100), MACHINE, backward=True)
    inside, across = 2 * PARAMETERS * 7 / 8 / 1e11, 2 * PARAMETERS * 15 / 16 / 1e11
    slower = max(across, 2 * PARAMETERS / 2 / 8 / 1e10)  # a node receives the other half over eight cards
    shards = 2 * 4 * PARAMETERS / 8 / 2 / 1e10
    optimizer = 7 * 4 * PARAMETERS / 1e12
    assert one == pytest.approx(40 * (4 + 0.1) * slower + optimizer / 16)
    assert two == pytest.approx(40 * ((4 + 0.1) * inside + shards) + optimizer / 8)


def test_dealt_experts_are_not_gathered_but_their_tokens_travel() -> None:
    chosen = dataclasses.replace(DECODER, experts_per_token=2)
    experts = dataclasses.replace(MODEL, decoder=chosen, in_experts=PARAMETERS, num_experts=8)
    dealt = layout(ep=8)
    seconds, _ = training_s(experts, WORK, dealt, MACHINE, backward=False)
    compute = 8 * 1000 * 2 * PARAMETERS / 1e15
    # Two copies of each token go to another rank and back in each layer, seven of eight of them.
    travel = 10 * 2 * (8000 * 2 * 7 / 8) * 1000 * 2 / 1e11
    assert seconds == pytest.approx(compute + travel)


@pytest.mark.parametrize("micro_batch_tokens", [200, 10**6])
def test_more_gpus_are_never_slower_but_for_what_gathers_cost_more(micro_batch_tokens: int) -> None:
    work = dataclasses.replace(WORK, rollouts=65_536)
    times = [
        training_s(MODEL, work, layout(ranks=n, micro_batch_tokens=micro_batch_tokens), MACHINE, backward=True)[0]
        for n in (8, 16, 64, 256, 1024)
    ]
    assert all(more < fewer for fewer, more in itertools.pairwise(times))


def test_a_refit_takes_the_bytes_over_the_bandwidth_that_limits() -> None:
    assert refit_s(MODEL, layout(), MACHINE) == (pytest.approx(2 * PARAMETERS * 7 / 8 / 1e11), "gathers")
    # Without a gather the engine reads every weight and writes it.
    assert refit_s(MODEL, layout(copy_ranks=1), MACHINE) == (pytest.approx(2 * WEIGHTS_S), "copies")
    slow = dataclasses.replace(MACHINE, bucket_s=0.5)
    assert refit_s(MODEL, layout(), slow) == (pytest.approx(2 * 0.5), "buckets")


def test_a_ring_takes_its_bytes_and_its_hops() -> None:
    assert ring_s(8e11, 1, MACHINE) == 0.0
    assert ring_s(8e11, 8, MACHINE) == pytest.approx(7.0)
    assert ring_s(8e11, 8, MACHINE, passes=2) == pytest.approx(14.0)
    assert ring_s(8e11, 16, MACHINE) == pytest.approx(max(7.5, 4e11 / 8 / 1e10))
    assert ring_s(8e11, 16, MACHINE, apart=True) == pytest.approx(75.0)
    assert ring_s(0, 1024, dataclasses.replace(MACHINE, hop_s=1e-6)) == pytest.approx(1023e-6)


def test_a_step_is_its_phases_one_after_the_other() -> None:
    time = step_time(MODEL, WORK, layout(moved_bytes=10**10), MACHINE)
    assert time.handover == pytest.approx(2.0)
    assert time.step == pytest.approx(time.rollout + time.logprobs + time.update + time.refit + 2.0)
    assert time.limit == "rollout: reading weights"
