"""Seconds of each phase of a step, from bytes, FLOPs and the rates of a machine. Nothing here was measured.

Each phase takes the longest of what its units need, because they work at the same time, plus what cannot be hidden. The
formulas are the usual roofline (Williams, Waterman and Patterson 2009) and the costs of ring collectives (Thakur,
Rabenseifner and Gropp 2005): of n ranks an all-gather or a reduce-scatter of W bytes brings (n - 1)/n W to each in
n - 1 hops, an all-reduce twice that. With g GPUs and g network cards to a node, the rings of a collective over several
nodes use all cards: a node receives its W (1 - 1/nodes) bytes over g links.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from spmdrl.memory.activations import Decoder

_BF16, _FLOAT32 = 2, 4
_SLICES = 64  # of a rollout, over which running sequences and their lengths are taken as constant
_OPTIMIZER_BYTES = 7 * _FLOAT32  # a parameter: AdamW reads weight, gradient and two moments, and writes three of them


class Rate(NamedTuple):
    """The peak of a unit or a link, in FLOPs or bytes a second, and the fraction of it that is counted on."""

    peak: float
    fraction: float

    def seconds(self, amount: float) -> float:
        """Return the time for this many FLOPs or bytes."""
        return amount / (self.peak * self.fraction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """A GPU, its links in each direction, and delays that no bandwidth shortens."""

    flops: Rate  # bfloat16 products without sparsity, of training and of prompts
    memory: Rate
    nvlink: Rate  # to the GPUs of the node
    network: Rate  # to other nodes, a card for each GPU
    bus: Rate  # to the host
    gpus_per_node: int
    hop_s: float  # of a ring, from one GPU to the next
    decode_step_s: float  # of an engine for each decode step, in addition to its kernels
    bucket_s: float  # of an engine for each bucket of a refit
    bucket_bytes: int


H200 = Machine(
    flops=Rate(989e12, 0.40),
    memory=Rate(4.8e12, 0.70),
    nvlink=Rate(450e9, 0.75),
    network=Rate(50e9, 0.80),
    bus=Rate(64e9, 0.80),
    gpus_per_node=8,
    hop_s=3e-6,
    decode_step_s=1e-3,
    bucket_s=4e-3,
    bucket_bytes=2**30,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCost:
    """The numbers of a model that time depends on."""

    decoder: Decoder
    parameters: int
    in_experts: int  # of these
    num_experts: int  # of a layer; 0 without
    linear_flops: int  # of a forward pass over T tokens, linear T + quadratic T^2
    quadratic_flops: int

    def cache_bytes(self, tp: int) -> int:
        """Bytes of keys and values of one token on each of the `tp` ranks of an engine."""
        return _BF16 * self.decoder.split(tp).key_value_width

    def read_parameters(self, sequences: float) -> float:
        """Count the parameters that a decode step of so many sequences reads.

        A layer's expert is read unless every sequence goes to others; the sequences are taken to choose independently.
        """
        if not self.num_experts:
            return self.parameters
        missed = (1 - self.decoder.experts_per_token / self.num_experts) ** sequences
        return self.parameters - self.in_experts * missed

    def next_token_flops(self, context: float) -> float:
        """FLOPs for one token after `context` others: the difference of two forward passes."""
        return self.linear_flops + self.quadratic_flops * (2 * context + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The rollouts of a step, over all GPUs.

    Of the responses a fraction (1 - t/longest)^k has more than t tokens, with the k that gives their mean: most are
    short, and few reach the limit.
    """

    rollouts: int
    group_size: int
    prompt_tokens: int
    mean_tokens: int  # of a response
    longest_tokens: int
    updates: int  # optimizer steps in a step

    @property
    def shape(self) -> float:
        """The exponent k: the integral of (1 - t/longest)^k is longest / (k + 1), the mean."""
        return self.longest_tokens / self.mean_tokens - 1

    @property
    def tokens(self) -> float:
        """Tokens of all rollouts, with their prompts."""
        return self.rollouts * (self.prompt_tokens + self.mean_tokens)

    @property
    def mean_square(self) -> float:
        """The mean of the squared lengths of responses: 2 longest^2 / (k + 1)(k + 2)."""
        return 2 * self.longest_tokens**2 / ((self.shape + 1) * (self.shape + 2))

    @property
    def squared_tokens(self) -> float:
        """The sum of the squared lengths of all rollouts, with their prompts."""
        p = self.prompt_tokens
        return self.rollouts * (p * p + 2 * p * self.mean_tokens + self.mean_square)

    @property
    def settled_context(self) -> float:
        """Tokens before the next one, on average over the responses that run while others wait for their places.

        A response of n tokens is there for n steps, and n / 2 long on average: the mean is E[n^2] / 2 E[n].
        """
        return self.prompt_tokens + self.mean_square / (2 * self.mean_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How ranks divide the work."""

    ranks: int
    copy_ranks: int  # that hold one copy of the policy; copies sum their gradients
    engine_tp: int
    ep: int
    recomputes: bool  # whether the update repeats the forward pass, matrix products included
    micro_batch_tokens: int
    moved_bytes: int  # of a rank, to the host and back, so that the engine can sample
    max_running: int  # sequences that an engine decodes together
    cache_bytes: int  # of an engine's cache on each of its ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Seconds of the phases of a step, and of the unit that limits each."""

    rollout: float
    logprobs: float
    update: float
    refit: float
    handover: float
    why_rollout: str
    why_update: str
    why_refit: str

    @property
    def step(self) -> float:
        """Seconds of the step, whose phases follow each other."""
        return self.rollout + self.logprobs + self.update + self.refit + self.handover

    @property
    def limit(self) -> str:
        """The longest phase but the handover, and what limits it."""
        phases = {"rollout": self.rollout, "logprobs": self.logprobs, "update": self.update, "refit": self.refit}
        longest = max(phases, key=phases.__getitem__)
        why = {"rollout": self.why_rollout, "refit": self.why_refit}.get(longest, self.why_update)
        return f"{longest}: {why}"


def step_time(model: ModelCost, work: Work, layout: Layout, machine: Machine) -> StepTime:
    """Predict a step in which rollouts, log-probabilities, updates and a refit follow each other on every GPU."""
    rollout, why_rollout = rollout_s(model, work, layout, machine)
    logprobs, _ = training_s(model, work, layout, machine, backward=False)
    update, why_update = training_s(model, work, layout, machine, backward=True)
    refit, why_refit = refit_s(model, layout, machine)
    return StepTime(
        rollout=rollout,
        logprobs=logprobs,
        update=update,
        refit=refit,
        handover=2 * machine.bus.seconds(layout.moved_bytes),
        why_rollout=why_rollout,
        why_update=why_update,
        why_refit=why_refit,
    )


def decode_step_s(
    model: ModelCost, machine: Machine, *, running: float, context: float, tp: int
) -> tuple[float, dict[str, float]]:
    """Seconds of one decode step of `running` sequences of `context` tokens each, and of its parts.

    Weights and cache are read once, each rank its part; products go on meanwhile. Each layer sums two [running, D] in
    bfloat16 over the `tp` ranks of an engine, which share a node: every rank writes to all others, and reads the sums.
    """
    weights = machine.memory.seconds(model.read_parameters(running) * _BF16 / tp)
    cache = machine.memory.seconds(running * context * model.cache_bytes(tp))
    products = machine.flops.seconds(running * model.next_token_flops(context) / tp)
    d, layers = model.decoder.hidden, model.decoder.num_layers
    one_sum = machine.nvlink.seconds(2 * (tp - 1) / tp * running * d * _BF16) + 2 * machine.hop_s
    sums = 2 * layers * one_sum if tp > 1 else 0.0
    parts = {"reading weights": weights, "reading the cache": cache, "products": products}
    total = max(weights + cache, products) + sums + machine.decode_step_s
    return total, parts | {"sums": sums, "launches": machine.decode_step_s}


def rollout_s(model: ModelCost, work: Work, layout: Layout, machine: Machine) -> tuple[float, str]:
    """Seconds of a rollout phase, and what takes most of them.

    An engine runs as many sequences as it may and its cache holds. While others wait, each that ends makes room for the
    next; then the last ones end one by one, and the phase ends with the longest. A group's prompt is computed once.
    """
    tp, longest = layout.engine_tp, work.longest_tokens
    sequences = work.rollouts * tp / layout.ranks
    places = layout.cache_bytes / (work.settled_context * model.cache_bytes(tp))
    running = min(sequences, layout.max_running, places)
    # (decode steps, sequences, tokens of each): first all places are taken, then fewer and fewer.
    stretches = [((sequences - running) * work.mean_tokens / running, running, work.settled_context)]
    for i in range(_SLICES):
        part = (i + 0.5) / _SLICES
        left = max(1.0, running * (1 - part) ** work.shape)
        stretches.append((longest / _SLICES, left, work.prompt_tokens + part * longest))
    parts: dict[str, float] = {}
    seconds = 0.0
    for steps, running, context in stretches:
        one_step, of_it = decode_step_s(model, machine, running=running, context=context, tp=tp)
        seconds += steps * one_step
        for name, value in of_it.items():
            parts[name] = parts.get(name, 0.0) + steps * value
    p = work.prompt_tokens
    prompts = sequences / work.group_size * (model.linear_flops * p + model.quadratic_flops * p * p)
    return seconds + machine.flops.seconds(prompts / tp), max(parts, key=parts.__getitem__)


def training_s(model: ModelCost, work: Work, layout: Layout, machine: Machine, *, backward: bool) -> tuple[float, str]:
    """Seconds of all updates of a step, or of a pass that only computes log-probabilities, and what limits them.

    FLOPs are those of the forward pass, twice more backward, and once more where it is repeated. Work is dealt evenly,
    but no GPU has less than the longest sequence of an update, if it gets that one. For each micro-batch
    the weights are gathered in bfloat16, and for the backward pass again; gradients are scattered in float32, and where
    there are several copies each rank sums its shard over them. That goes on while layers compute, all but the first
    gather. Tokens that travel to their experts and back do not.
    """
    updates, longest = work.updates if backward else 1, work.prompt_tokens + work.longest_tokens
    tokens = max(work.tokens / layout.ranks, updates * longest)
    micro_batches = updates * math.ceil(tokens / updates / layout.micro_batch_tokens)
    evenly = (model.linear_flops * work.tokens + model.quadratic_flops * work.squared_tokens) / layout.ranks
    alone = updates * (model.linear_flops * longest + model.quadratic_flops * longest**2)
    forward = max(evenly, alone)
    passes = (4 if layout.recomputes else 3) if backward else 1
    compute = machine.flops.seconds(passes * forward)
    gather = _gather_s(model, layout, machine, element_bytes=_BF16)
    traffic = gather * (2 if backward else 1)
    if backward:
        traffic += _gather_s(model, layout, machine, element_bytes=_FLOAT32)
        copies = layout.ranks // layout.copy_ranks
        shard = model.parameters / layout.copy_ranks * _FLOAT32
        traffic += ring_s(shard, copies, machine, passes=2, apart=True)
    travel = _tokens_travel_s(model, tokens, layout, machine) * (passes - 1 if backward else 1)
    optimizer = machine.memory.seconds(updates * model.parameters / layout.copy_ranks * _OPTIMIZER_BYTES)
    hidden, shown = micro_batches * traffic, micro_batches * gather / model.decoder.num_layers
    parts = {
        "products": compute if evenly >= alone else 0.0,
        "the longest sequence": compute if evenly < alone else 0.0,
        "tokens that travel": travel,
        "gathers": hidden,
    }
    why = max(parts, key=parts.__getitem__)
    return max(compute + travel, hidden) + shown + (optimizer if backward else 0.0), why


def refit_s(model: ModelCost, layout: Layout, machine: Machine) -> tuple[float, str]:
    """Seconds of a refit, and what limits them: gathers, copies, or what the engine does for each bucket.

    Every rank gathers all weights, in bfloat16, bucket by bucket; its engine reads a bucket and writes its part.
    """
    whole = model.parameters * _BF16
    parts = {
        "gathers": ring_s(whole, layout.copy_ranks, machine),
        "copies": machine.memory.seconds(whole + whole / layout.engine_tp),
        "buckets": math.ceil(whole / machine.bucket_bytes) * machine.bucket_s,
    }
    why = max(parts, key=parts.__getitem__)
    return parts[why], why


def ring_s(num_bytes: float, ranks: int, machine: Machine, *, passes: int = 1, apart: bool = False) -> float:
    """Seconds of an all-gather or a reduce-scatter of `num_bytes` over `ranks`, or in two passes of an all-reduce.

    `apart` is for ranks that are each in another node, and have one card each; others fill nodes.
    """
    if ranks == 1:
        return 0.0
    hops = (ranks - 1) * machine.hop_s
    part = num_bytes * (ranks - 1) / ranks
    if apart:
        return passes * (machine.network.seconds(part) + hops)
    nodes = math.ceil(ranks / machine.gpus_per_node)
    across = machine.network.seconds(num_bytes * (nodes - 1) / nodes / machine.gpus_per_node)
    return passes * (max(machine.nvlink.seconds(part), across) + hops)


def _gather_s(model: ModelCost, layout: Layout, machine: Machine, *, element_bytes: int) -> float:
    """Seconds in which a rank gathers, layer by layer, the weights that it computes with, or scatters their gradients.

    Experts that are dealt to `ep` neighbours are gathered by ranks of which each node has one for each part.
    """
    layers, copy = model.decoder.num_layers, layout.copy_ranks
    if layout.ep == 1:
        return layers * ring_s(model.parameters * element_bytes / layers, copy, machine)
    dense = layers * ring_s((model.parameters - model.in_experts) * element_bytes / layers, copy, machine)
    part = model.in_experts / layout.ep * element_bytes / layers
    return dense + layers * ring_s(part, copy // layout.ep, machine, apart=True)


def _tokens_travel_s(model: ModelCost, tokens: float, layout: Layout, machine: Machine) -> float:
    """Seconds in which a rank's tokens go to their experts and back in one pass, among `ep` ranks of a node."""
    if layout.ep == 1:
        return 0.0
    copies = tokens * model.decoder.experts_per_token * (layout.ep - 1) / layout.ep
    there_and_back = 2 * copies * model.decoder.hidden * _BF16
    return model.decoder.num_layers * machine.nvlink.seconds(there_and_back)
