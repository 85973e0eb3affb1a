"""Bytes of a device besides tensors: CUDA contexts, communicators, libraries' workspaces, the engine's graphs.

They are estimates until a device has been asked; `docs/memory.md` says how to ask one. Where each comes from:

    context     an estimate: what the driver takes of a Hopper GPU for a process that uses torch, modules loaded lazily
    kernels     what is left of 2.5 GiB that the processes of a run of 0.6B took beside tensors while both slept, on an
                H100 (gpu-proof-9-h100): code that Triton, FlashInfer and SGLang build or load, and what that keeps
    cuBLAS      two workspaces of 32 MiB, torch's size on Hopper: of the thread that calls and of autograd's
    NCCL        an estimate for each group that communicates: up to 32 channels, with buffers of 4 MiB (`NCCL_BUFFSIZE`)
                for the simple protocol and less for the others, to each neighbour in a ring
    graphs      2 MiB for each sequence of the largest captured batch: what SGLang reserves (`memory_hook.py`), which
                captures decode steps of up to 256 sequences, or 512 with 4 ranks or more to an engine
    workspace   of an engine: 512 MiB, which SGLang reserves for its attention kernels; one layer's activations for one
                chunk of prompts; and four float32 tensors of [running sequences, V] from which tokens are sampled
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from spmdrl.config import Config, TuningConfig
from spmdrl.config.engines import engine_facts
from spmdrl.config.plan import Plan, layouts
from spmdrl.memory.activations import Decoder, forward_bytes

_MIB = 2**20
CONTEXT_BYTES = 512 * _MIB
KERNEL_BYTES = 614 * _MIB
CUBLAS_BYTES = 2 * 32 * _MIB
NCCL_BYTES = 256 * _MIB  # a group
GRAPH_BYTES = 2 * _MIB  # a sequence of the largest captured batch
ATTENTION_BYTES = 512 * _MIB
CHUNK_TOKENS = 8192  # SGLang's choice for devices of 60 to 160 GB
_SAMPLING_TENSORS = 4  # logits, scaled logits, their probabilities, and sorted ones
_FLOAT32 = 4

Parts = Mapping[str, int]  # purpose -> bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Overhead:
    """Bytes on one device besides the tensors of its rank and its engine's share, by purpose."""

    rank: Parts = field(default_factory=dict)  # of the rank's process, as long as it lives
    engine: Parts = field(default_factory=dict)  # of the engine's process, from its start on
    asleep: Parts = field(default_factory=dict)  # more of that while the trainer works
    awake: Parts = field(default_factory=dict)  # more of that while the engine samples

    @property
    def at_launch(self) -> int:
        """Bytes that are taken when an engine measures how much is free."""
        return sum(self.rank.values()) + sum(self.engine.values())

    @property
    def while_training(self) -> Parts:
        """Parts that are there while the trainer works."""
        return {**self.rank, **self.engine, **self.asleep}

    @property
    def while_sampling(self) -> Parts:
        """Parts that are there while the engine samples."""
        return {**self.rank, **self.engine, **self.awake}


def device_overheads(
    cfg: Config | TuningConfig, run: Plan, decoder: Decoder, *, compute_bytes: int
) -> tuple[Overhead, Overhead]:
    """Count for the device of a rank that trains, and for that of a rank that holds an engine.

    They are one when every rank does both. `compute_bytes` is the size of an element of the compute dtype.
    """
    training = _process(num_communicators(cfg, run))
    if isinstance(cfg, TuningConfig) or engine_facts(cfg.rollout.engine).in_process:
        overhead = Overhead(rank=training)
        return overhead, overhead
    graphs = {"engine graphs": graph_bytes(cfg)}
    overhead = Overhead(
        rank=training,
        # SGLang makes two groups of the ranks of an engine: one of all, one for tensor parallelism.
        engine={f"engine {part}": size for part, size in _process(2 if cfg.rollout.tp_size > 1 else 0).items()},
        asleep={} if "cuda_graph" in cfg.offload.engine else graphs,
        awake={**graphs, "engine workspace": workspace_bytes(cfg, decoder, compute_bytes=compute_bytes)},
    )
    if not run.engine_ranks:
        return overhead, overhead
    # The one group that engines of their own join takes the weights of a refit.
    apart = Overhead(rank=_process(1), engine=overhead.engine, awake=overhead.awake)
    return Overhead(rank=training), apart


def num_communicators(cfg: Config | TuningConfig, run: Plan) -> int:
    """Count the groups over which a rank that trains communicates on its device; one rank alone needs none.

    NCCL takes a group's buffers when it first communicates, so groups that never do are left out. The others are made
    by `dist.mesh.build_meshes`; torch has one group for all axes that span every rank of the run.
    """
    parallel, ranks = cfg.parallel, run.training_ranks
    copy = ranks // parallel.dp_replicate
    groups = [ranks, run.num_shares, parallel.dp_replicate, copy // parallel.tp, copy, parallel.tp, parallel.cp]
    if parallel.ep > 1:
        groups += [parallel.ep, copy // parallel.ep, parallel.dp_replicate]
    for layout in set(layouts(cfg).values()):  # of models without gradients, which are summed over copies
        copy = ranks // layout.dp_replicate
        groups += [copy // layout.tp, layout.tp]
        groups += [layout.ep, copy // layout.ep] if layout.ep > 1 else []
    if run.engine_ranks:
        groups.append(1 + run.engine_ranks)
    return sum(1 < size < run.num_ranks for size in groups) + (1 < run.num_ranks in groups)


def graph_bytes(cfg: Config) -> int:
    """Bytes of an engine's graphs of decode steps."""
    if not cfg.rollout.cuda_graphs:
        return 0
    largest = 512 if cfg.rollout.tp_size >= 4 else 256
    return GRAPH_BYTES * min(largest, cfg.rollout.max_running)


def workspace_bytes(cfg: Config, decoder: Decoder, *, compute_bytes: int) -> int:
    """Bytes of an engine's temporary tensors, of which the fuller moment counts: in a layer, or when it samples."""
    tokens = cfg.rollout.chunked_prefill_tokens or CHUNK_TOKENS
    layer = forward_bytes(decoder.split(cfg.rollout.tp_size), compute_bytes=compute_bytes, num_tokens=tokens)
    sampling = _SAMPLING_TENSORS * _FLOAT32 * cfg.rollout.max_running * decoder.vocabulary
    return ATTENTION_BYTES + max(layer, sampling)


def _process(num_groups: int) -> dict[str, int]:
    parts = {"context": CONTEXT_BYTES, "kernels": KERNEL_BYTES, "cuBLAS": CUBLAS_BYTES, "NCCL": num_groups * NCCL_BYTES}
    return {part: size for part, size in parts.items() if size}
