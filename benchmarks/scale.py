"""Count the collectives of a step, and the bytes that one rank receives, from 8 to 1,024 ranks.

    python benchmarks/scale.py --ranks 8 64 256 1024

One process stands for rank 0 of torch's fake process group, which has any number of ranks and moves nothing: the real
code of a step runs, and every collective that it issues is counted by kind. What the fake group leaves out is filled in
so that the code can go on: gathers give this rank's values for every other, except for the sizes of rollouts, and
exchanges bring zeros. Every rank has as many rollouts at any number of ranks. Bytes are those of the best known
algorithm: of n ranks an all-gather or a reduce-scatter brings (n - 1)/n of the whole to each, an all-reduce twice that.

Prints one JSON object: for each layout and number of ranks, each phase's collectives as {kind: [calls, bytes]}, and the
seconds that the plan of the data plane took.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from program import run_again
from results import provenance
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from spmdrl.config import LossConfig, ModelConfig, OptimConfig, PackConfig, ParallelConfig
from spmdrl.dist.collectives import merge_over
from spmdrl.dist.exchange import SequenceInfo, info_rows
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import World
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import PolicyObjective
from spmdrl.learn.update import update
from spmdrl.model.load import load_policy
from spmdrl.refit.gather import Gatherer
from spmdrl.step.batch import build_batch
from spmdrl.step.logprobs import add_columns
from spmdrl.tools.parity_cases import plan_of, random_batch

ROLLOUTS_PER_RANK = 64
MAX_TOKENS = 128
BUDGET = 4096
MODEL: dict[str, Any] = {
    "vocab_size": 4096,
    "num_hidden_layers": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
LAYOUTS = {
    "fsdp": ParallelConfig(),
    "hsdp of 8": ParallelConfig(dp_shard=8),
    "cp 8": ParallelConfig(cp=8),
    "tp 4": ParallelConfig(tp=4),
}


def main() -> None:
    """Count every layout at every number of ranks, each in a process; print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="+", type=int, default=[8, 64, 256, 1024])
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--hidden-size", type=int, default=1024, help="of the model")
    args = parser.parse_args()
    origin = provenance()
    cases = [(layout, ranks) for layout in args.layouts for ranks in args.ranks]
    if len(cases) == 1:
        rows = [count(*cases[0], args.hidden_size)]
    else:
        rows = [in_own_process(layout, ranks) for layout, ranks in cases]
    found = {
        "benchmark": "scale",
        "about": "collectives and bytes of a step, counted on rank 0",
        **origin,
        "commands": ["python benchmarks/scale.py > benchmarks/results/scale.json"],
        "rollouts_per_rank": ROLLOUTS_PER_RANK,
        "versions": {"torch": torch.__version__},
        "rows": rows,
    }
    print(json.dumps(found))


def in_own_process(layout: str, num_ranks: int) -> dict[str, Any]:
    """`count`, in a process that has no process group yet."""
    print(f"{layout}, {num_ranks} ranks", file=sys.stderr)
    [row] = run_again("--layouts", layout, "--ranks", str(num_ranks))["rows"]
    return row


def model_config(hidden_size: int) -> Qwen3Config:
    """A model whose other sizes follow from this one."""
    heads = hidden_size // MODEL["head_dim"]
    return Qwen3Config(
        **MODEL,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_attention_heads=heads,
        num_key_value_heads=max(1, heads // 2),
    )


def count(layout: str, num_ranks: int, hidden_size: int) -> dict[str, Any]:
    """The collectives of one step on rank 0 of so many."""
    dist.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    world = World(
        rank=0,
        num_ranks=num_ranks,
        local_rank=0,
        num_local_ranks=8,
        patience=timedelta(minutes=1),
        device=torch.device("cpu"),
    )
    parallel = LAYOUTS[layout]
    if parallel.dp_shard:
        parallel = parallel.model_copy(update={"dp_replicate": num_ranks // parallel.dp_shard})
    meter = Meter()
    with tempfile.TemporaryDirectory() as folder, meter:
        model = Qwen3ForCausalLM(model_config(hidden_size))
        model.save_pretrained(folder)
        meshes = build_meshes(world, parallel)
        policy = load_policy(ModelConfig(path=folder), meshes.model, temperature=1.0)
        learner = Learner(
            policy, OptimConfig(lr=1e-3), PolicyObjective(LossConfig()), num_updates=1, dtype=torch.float32
        )
        mine = random_batch(vocabulary=64, num_sequences=ROLLOUTS_PER_RANK, max_tokens=MAX_TOKENS)
        pack = PackConfig(max_tokens_per_micro_batch=BUDGET)
        everyones = [*(SequenceInfo.of(sequence, rank=0) for sequence in mine), *sizes_of_others(num_ranks)]
        plan = dataclasses.replace(plan_of(mine, pack, meshes, num_updates=1), rollouts_per_step=len(everyones))
        began = time.perf_counter()
        with meter.phase("batch", brought=info_rows(everyones)):
            batch = build_batch(mine, plan, meshes, aggregation="token_mean")
        plan_s = time.perf_counter() - began
        with meter.phase("prepare"):
            batch = add_columns(batch, {"advantages": lambda m: m.rewards.float()}, meshes.training)
        with meter.phase("update"):
            metrics = update(learner, batch.mini_batches, meshes, step=1)
        with meter.phase("metrics"):
            merge_over(meshes.training, metrics)
        with meter.phase("refit"):
            gatherer = Gatherer(policy, meshes.model.copy, dtype=torch.float32, bucket_bytes=2**28, naming="model")
            for _ in gatherer.whole_tensors():
                pass
    return {
        "layout": layout,
        "ranks": num_ranks,
        "parameters": model.num_parameters(),
        "micro_batches": len(batch.mini_batches[0]),
        "batch_s": round(plan_s, 3),
        "phases": meter.counts,
    }


def sizes_of_others(num_ranks: int) -> Iterator[SequenceInfo]:
    """Sizes that the other ranks would have sampled."""
    rng = random.Random(1)
    for index in range(ROLLOUTS_PER_RANK, num_ranks * ROLLOUTS_PER_RANK):
        prompt, response = rng.randint(1, MAX_TOKENS // 4), rng.randint(1, MAX_TOKENS * 3 // 4)
        yield SequenceInfo(
            index=index,
            num_tokens=prompt + response,
            num_loss_tokens=response,
            rank=index // ROLLOUTS_PER_RANK,
        )


class Meter(TorchDispatchMode):
    """Counts what is asked of process groups, and fills in what a fake one leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, dict[str, list[int]]] = {}
        self._kinds: dict[str, list[int]] = {}
        self._brought: Tensor | None = None

    @contextmanager
    def phase(self, name: str, *, brought: Tensor | None = None) -> Iterator[None]:
        """Count for this phase. A gather of values such as `brought`, as many of its dtype, brings these."""
        self._kinds, self._brought = self.counts.setdefault(name, {}), brought
        yield
        self._kinds, self._brought = {}, None

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it becomes plain tensors and collectives first
        if func is torch.ops.c10d.alltoall_base_.default:
            # The fake group wants every rank to send something; its handle is all that is needed of it.
            dummy = torch.zeros(dist.ProcessGroup.unbox(args[2]).size())
            result = func(dummy, dummy.clone(), args[2], [], [], *args[5:])
        else:
            result = func(*args, **(kwargs or {}))
        namespace, _, name = func.name().partition("::")
        if namespace == "c10d" and (found := _filled_in(name.partition(".")[0], args)) is not None:
            kind, num_bytes = found
            count = self._kinds.setdefault(kind, [0, 0])
            count[0] += 1
            count[1] += num_bytes
            if kind == "all_gather" and self._brought is not None and is_like(args[0], self._brought):
                args[0].view(-1).copy_(self._brought.view(-1))
        return result


def is_like(output: Any, brought: Tensor) -> bool:
    """True for a tensor of as many elements of the same dtype."""
    return isinstance(output, Tensor) and output.dtype == brought.dtype and output.numel() == brought.numel()


def _filled_in(name: str, args: Sequence[Any]) -> tuple[str, int] | None:
    """(kind, bytes that one rank receives) of a collective of c10d, whose output is filled in."""
    match name:
        case "_allgather_base_":
            whole, part = args[:2]
            if part.numel():  # a micro-batch may have no row that predicts a token
                whole.view(-1, part.numel()).copy_(part.reshape(1, -1).clone())  # FSDP gathers in place
            return "all_gather", _bytes(whole) - _bytes(part)
        case "allgather_":
            (outputs,), (part,) = args[:2]
            for output in outputs:
                output.copy_(part)
            return "all_gather", _bytes(part) * (len(outputs) - 1)
        case "_reduce_scatter_base_":
            part, whole = args[:2]
            part.view(-1).copy_(whole.view(-1)[: part.numel()])
            return "reduce_scatter", _bytes(whole) - _bytes(part)
        case "allreduce_":
            num_ranks = dist.ProcessGroup.unbox(args[1]).size()
            return "all_reduce", sum(2 * _bytes(x) * (num_ranks - 1) // num_ranks for x in args[0])
        case "alltoall_base_":
            args[0].zero_()
            return "all_to_all", _bytes(args[0])
        case "barrier" | "broadcast_":
            return name.rstrip("_"), 0
    return None


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


if __name__ == "__main__":
    main()
