"""Predict the seconds of each phase of a step on 8 to 1,024 GPUs, on paper: `python benchmarks/scale_on_paper.py`.

For each model and number of GPUs it tries layouts, keeps those that fit by the memory planner with a tenth to spare,
and shows the fastest. All follows from bytes, FLOPs and the rates of a machine; nothing here was measured.

Each phase takes the longest of what its units need, because they work at the same time, plus what cannot be hidden. The
formulas are the usual roofline (Williams, Waterman and Patterson 2009) and the costs of ring collectives (Thakur,
Rabenseifner and Gropp 2005): of n ranks an all-gather or a reduce-scatter of W bytes brings (n - 1)/n W to each in
n - 1 hops, an all-reduce twice that. With g GPUs and g network cards to a node, the rings of a collective over several
nodes use all cards: a node receives its W (1 - 1/nodes) bytes over g links.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any, NamedTuple

from spmdrl.config import Config, ModelConfig
from spmdrl.faults.text import Parser, say
from spmdrl.memory.activations import Decoder
from spmdrl.memory.device import GIB
from spmdrl.preflight.forecast import Model, Prediction, decoder_of, expert_names, forward_flops, predict
from spmdrl.tools.model_source import published_config, shapes
from spmdrl.tools.program import program

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


DEVICE_GIB = 139  # of an H200 of 141 GB
SPARE_FRACTION = 0.1  # of a device, for what the planner does not know
MODELS = ("Qwen3-8B", "Qwen3-32B", "Qwen3-30B-A3B", "Qwen3-235B-A22B")
GPUS = (8, 64, 256, 1024)
MAX_RUNNING = 512  # of an engine
WORK = Work(rollouts=8192, group_size=8, prompt_tokens=512, mean_tokens=4096, longest_tokens=16384, updates=4)
_ENGINE_TP = {"Qwen3-32B": 2, "Qwen3-30B-A3B": 2, "Qwen3-235B-A22B": 8}  # the fewest GPUs that leave room for a cache

# What is tried, for every number of GPUs to a copy of the policy.
_LEVELS = ("none", "selective", "full")
_TRAINERS = ("none", "all")
_FRACTIONS = (0.8, 0.65, 0.5)

_COLUMNS = (
    *("model", "GPUs", "GPUs to a copy", "computed twice", "fullest, GiB"),
    *("rollout, s", "logprobs, s", "update, s", "refit, s", "handover, s", "step, s"),
    *("tokens/s a GPU", "limit"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """The fastest layout found for a model on so many GPUs."""

    model: str
    gpus: int
    work: Work
    layout: Layout
    level: str  # of gradient checkpointing
    fullest_bytes: int  # of the device, in its fullest phase
    time: StepTime

    @property
    def tokens_per_gpu_s(self) -> float:
        """Response tokens for each GPU and second of the whole step."""
        return self.work.rollouts * self.work.mean_tokens / self.gpus / self.time.step


def fastest(name: str, *, gpus: int, work: Work) -> Row | None:
    """Find the layout with the shortest step among those that fit; None when none does."""
    model, cost = _model(name), _cost(name)
    found: list[Row] = []
    for copy in _copies(gpus):
        for level, trainer, fraction in product(_LEVELS, _TRAINERS, _FRACTIONS):
            cfg = _config(name, gpus=gpus, copy=copy, level=level, trainer=trainer, fraction=fraction, work=work)
            plan = predict(cfg, model, num_ranks=gpus, device_bytes=DEVICE_GIB * GIB, on_gpu=True)
            fullest = max(phase.device_bytes for phase in plan.phases)
            if plan.problems or fullest > (1 - SPARE_FRACTION) * DEVICE_GIB * GIB:
                continue
            layout = _layout(cfg, plan, copy=copy)
            time = step_time(cost, work, layout, H200)
            found.append(
                Row(model=name, gpus=gpus, work=work, layout=layout, level=level, fullest_bytes=fullest, time=time)
            )
    return min(found, key=lambda row: row.time.step, default=None)


def steps_table(models: Sequence[str], gpus: Sequence[int], work: Work) -> str:
    """Format a row of Markdown for each model and number of GPUs."""
    lines = ["| " + " | ".join(_COLUMNS) + " |", "|---" * len(_COLUMNS) + "|"]
    for name, count in product(models, gpus):
        row = fastest(name, gpus=count, work=work)
        lines.append(f"| {name} | {count:,} | {_cells(row)} |" if row else f"| {name} | {count:,} | does not fit |")
    return "\n".join(lines)


def rates_table(machine: Machine) -> str:
    """Format a row of Markdown for each rate of a machine."""
    rates = {
        "bfloat16 products, of training and of prompts": (machine.flops, "TFLOP/s", 1e12),
        "device memory": (machine.memory, "TB/s", 1e12),
        "NVLink, in each direction": (machine.nvlink, "GB/s", 1e9),
        "network, for each GPU": (machine.network, "GB/s", 1e9),
        "PCIe to the host": (machine.bus, "GB/s", 1e9),
    }
    lines = ["| | peak | fraction |", "|---|---|---|"]
    for name, (rate, unit, scale) in rates.items():
        lines.append(f"| {name} | {rate.peak / scale:g} {unit} | {rate.fraction:g} |")
    delays = {
        "a hop of a ring": machine.hop_s,
        "a decode step, beside its kernels": machine.decode_step_s,
        "a bucket of a refit, in the engine": machine.bucket_s,
    }
    lines += [f"| {name} | {1e6 * seconds:g} us | |" for name, seconds in delays.items()]
    return "\n".join(lines)


@program("cannot predict")
def main(argv: Sequence[str] | None = None) -> int:
    """Print a table, or JSON; return the exit code."""
    parser = Parser(description="Predict the phases of a step on 8 to 1,024 H200.")
    parser.add_argument("--models", nargs="+", choices=shapes(), default=MODELS)
    parser.add_argument("--gpus", nargs="+", type=int, default=GPUS, help="multiples of 8")
    parser.add_argument("--rollouts", type=int, default=WORK.rollouts, help="of a step, over all GPUs")
    parser.add_argument("--mean-tokens", type=int, default=WORK.mean_tokens, help="of a response")
    parser.add_argument("--longest-tokens", type=int, default=WORK.longest_tokens, help="of a response")
    parser.add_argument("--json", action="store_true", help="print all numbers, in seconds and bytes")
    arguments = parser.parse_args(argv)
    if any(not 8 <= count <= 2**20 or count % 8 for count in arguments.gpus):
        parser.error("--gpus are multiples of 8: a node has 8; at most 1048576")
    each = WORK.group_size * math.lcm(*arguments.gpus)
    if arguments.rollouts < each or arguments.rollouts % each:
        parser.error(f"--rollouts is a multiple of {each}: every GPU begins groups of {WORK.group_size}")
    if not 0 < arguments.mean_tokens < arguments.longest_tokens <= 2**31:
        parser.error("--mean-tokens lies between 0 and --longest-tokens")
    work = dataclasses.replace(
        WORK,
        rollouts=arguments.rollouts,
        mean_tokens=arguments.mean_tokens,
        longest_tokens=arguments.longest_tokens,
    )
    if arguments.json:
        rows = (fastest(name, gpus=count, work=work) for name, count in product(arguments.models, arguments.gpus))
        say(json.dumps([_as_json(row) for row in rows if row], indent=1))
    else:
        say(steps_table(arguments.models, arguments.gpus, work))
    return 0


def _copies(gpus: int) -> Iterator[int]:
    """Yield the numbers of GPUs that a copy of the policy may have: whole nodes, each twice the one before."""
    copy = 8
    while copy <= gpus:
        if gpus % copy == 0:
            yield copy
        copy *= 2


@cache
def _model(name: str) -> Model:
    return Model.read(published_config(name), ModelConfig(path=name))


@cache
def _cost(name: str) -> ModelCost:
    model = _model(name)
    experts = expert_names(model.shapes)
    linear, quadratic = forward_flops(model.config, model.shapes)
    return ModelCost(
        decoder=decoder_of(model.config, model.shapes),
        parameters=sum(map(math.prod, model.shapes.values())),
        in_experts=sum(math.prod(model.shapes[part]) for part in experts),
        num_experts=model.config.num_experts if experts else 0,
        linear_flops=linear,
        quadratic_flops=quadratic,
    )


def _config(name: str, *, gpus: int, copy: int, level: str, trainer: str, fraction: float, work: Work) -> Config:
    tp = _ENGINE_TP.get(name, 1)
    tables: dict[str, dict[str, Any]] = {
        "run": {"name": "paper", "num_steps": 1},
        "model": {"path": name, "gradient_checkpointing": level},
        "parallel": {"dp_replicate": gpus // copy, "ep": 8 if _cost(name).num_experts else 1},
        "data": {"max_prompt_tokens": work.prompt_tokens, "sources": [{"kind": "jsonl", "path": "prompts.jsonl"}]},
        "rollout": {
            "engine": "sglang",
            "prompts_per_step": work.rollouts // work.group_size,
            "group_size": work.group_size,
            "max_response_tokens": work.longest_tokens,
            "max_running": min(MAX_RUNNING, work.rollouts * tp // gpus),
            "tp_size": tp,
            "memory_fraction": fraction,
        },
        "reward": {"terms": [{"kind": "math"}]},
        "loss": {"updates_per_step": work.updates},
        "optim": {"lr": 1e-6},
        "pack": {"max_tokens_per_micro_batch": work.prompt_tokens + work.longest_tokens},
        "refit": {"bucket_bytes": H200.bucket_bytes},
        "offload": {"trainer": trainer, "engine": ["kv_cache", "weights"]},
    }
    return Config.model_validate(tables)


def _layout(cfg: Config, plan: Prediction, *, copy: int) -> Layout:
    memory = plan.plan
    assert memory is not None and memory.engine_share is not None, "a colocated SGLang engine takes a share"
    return Layout(
        ranks=plan.rank.run.num_ranks,
        copy_ranks=copy,
        engine_tp=cfg.rollout.tp_size,
        ep=cfg.parallel.ep,
        recomputes=cfg.model.gradient_checkpointing == "full",
        micro_batch_tokens=cfg.data.max_prompt_tokens + cfg.rollout.max_response_tokens,
        moved_bytes=memory.moved,
        max_running=cfg.rollout.max_running,
        cache_bytes=memory.engine_share - memory.engine_weights,
    )


def _cells(row: Row) -> str:
    time, recomputed = row.time, {"none": "nothing", "selective": "norms", "full": "layers"}[row.level]
    seconds = (time.rollout, time.logprobs, time.update, time.refit, time.handover, time.step)
    return " | ".join(
        [
            f"{row.layout.copy_ranks:,}",
            recomputed,
            f"{row.fullest_bytes / GIB:.0f}",
            *(f"{x:.0f}" if x >= 10 else f"{x:.1f}" for x in seconds),
            f"{row.tokens_per_gpu_s:,.0f}",
            time.limit,
        ]
    )


def _as_json(row: Row) -> dict[str, Any]:
    return dataclasses.asdict(row) | {
        "step_s": row.time.step,
        "tokens_per_gpu_s": row.tokens_per_gpu_s,
        "limit": row.time.limit,
    }


if __name__ == "__main__":
    sys.exit(main())
