"""The planner beside torch's own caching allocator, on stand-ins for GPUs (`tests/fake_cuda`): no GPU is needed.

`python benchmarks/memory_plan.py --python .venv-cuda/bin/python` measures two training steps of each case, of two
micro-batches each, and writes `results/memory-plan.json`. A shape and level has a process of its own. More ranks than 1
are one process with torch's fake process group.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[1]
GIB = 2**30
SHAPES = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B")
LEVELS = ("none", "selective", "full")


def main() -> None:
    """Measure every case, or with --case one of them in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="of an environment with the CUDA build of torch")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--ranks", nargs="+", type=int, default=[1])
    parser.add_argument("--tokens", nargs="+", type=int, default=[16_384, 65_536])
    parser.add_argument("--recompute", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/memory-plan.json")
    parser.add_argument("--case", nargs=3, metavar=("SHAPE", "LEVEL", "RANKS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        shape, level, ranks = args.case
        for row in measure(shape, level, int(ranks), args.tokens):
            print(json.dumps(row), flush=True)
        return
    for shape in args.shapes:
        for ranks in args.ranks:
            for level in args.recompute:
                record(args.out, [*in_a_process(args, shape, level, ranks)])


def in_a_process(args: argparse.Namespace, shape: str, level: str, ranks: int) -> list[dict[str, Any]]:
    """Measure the cases of one shape and level with stand-ins, in a process of their own."""
    with tempfile.TemporaryDirectory() as folder:
        build = f"import json; from tests.fake_cuda.build import environment as e; from pathlib import Path; \
            print(json.dumps(e(Path({folder!r}), memory_gib=4096)))"
        run: dict[str, Any] = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True, "check": True}
        stand_ins = json.loads(subprocess.run([args.python, "-c", build], **run).stdout)
        command = [args.python, __file__, "--tokens", *map(str, args.tokens), "--case", shape, level, str(ranks)]
        path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
        done = subprocess.run(command, env=os.environ | stand_ins | {"PYTHONPATH": path}, **run)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for row in rows:
        print(summary(row), file=sys.stderr, flush=True)
    return rows


def measure(shape: str, level: str, ranks: int, tokens: list[int]) -> list[dict[str, Any]]:
    """Measure what two steps allocate and reserve, for each number of tokens, the least first."""
    import torch
    import torch.distributed as dist
    from gpu_step import Trainer, micro_batch
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from spmdrl.config import ParallelConfig
    from spmdrl.dist import mesh
    from spmdrl.preflight.published import published_config

    config = published_config(shape)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    everyone = mesh.init_device_mesh("cuda", (ranks,), mesh_dim_names=("world",))
    _, model = mesh._training_meshes("cuda", torch.arange(ranks), 0, ParallelConfig())
    trainer = Trainer(config, level, SimpleNamespace(training=everyone, model=model))
    rows = []
    for count in sorted(tokens):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        lengths = [4096] * (count // 4096)
        batch = micro_batch(lengths, config.vocab_size)
        for _ in range(2):
            for _ in range(2):  # gradients of the first wait while the second has all of its activations
                (trainer.policy(batch).logprobs * batch.loss_weights.to("cuda")).sum().neg().backward()
            trainer._optimizer.step()
            trainer._optimizer.zero_grad()
        stats = torch.cuda.memory_stats()
        by_stream: dict[int, int] = {}
        for segment in torch.cuda.memory_snapshot():
            by_stream[segment["stream"]] = by_stream.get(segment["stream"], 0) + segment["total_size"]
        row = {"shape": shape, "ranks": ranks, "tokens": count, "recompute": level}
        row |= {name: stats[f"{name}_bytes.all.peak"] for name in ("requested", "allocated", "reserved")}
        row |= {"planned": planned_bytes(config, level, lengths, ranks=ranks), "torch": torch.__version__}
        rows.append(row | {"reserved_by_stream": sorted(by_stream.values(), reverse=True)})
    return rows


def planned_bytes(config: Any, level: str, lengths: list[int], *, ranks: int) -> int:
    """Return what the planner says that torch's allocator takes: cuBLAS's workspaces are among it."""
    from spmdrl.config import SftConfig
    from spmdrl.memory.overhead import CUBLAS_BYTES
    from spmdrl.preflight.forecast import Model, predict

    cfg = SftConfig.model_validate(
        {
            "run": {"name": "memory-plan", "num_steps": 1},
            "model": {"path": "random", "gradient_checkpointing": level},
            "data": {"max_prompt_tokens": 1, "sources": [{"kind": "jsonl", "path": "random"}]},
            "sft": {"sequences_per_step": len(lengths) * ranks, "max_response_tokens": max(lengths) - 1},
            "optim": {"lr": 1e-6},
            "pack": {"max_tokens_per_micro_batch": sum(lengths)},
        }
    )
    phases = predict(cfg, Model.read(config, cfg.model), num_ranks=ranks, device_bytes=GIB, on_gpu=True).phases
    return CUBLAS_BYTES + max(
        phase.process_bytes + phase.elsewhere.get("unused blocks", 0)
        for phase in phases
        if phase.name in ("forward-backward", "optimizer")
    )


def record(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put these rows in place of older ones of the same cases."""
    known = json.loads(path.read_text()) if path.exists() else {"benchmark": "memory-plan", "rows": []}
    cases = {case_of(row): row for row in [*known["rows"], *rows]}
    known["rows"] = [cases[case] for case in sorted(cases)]
    path.write_text(json.dumps(known, indent=1) + "\n")


def case_of(row: dict[str, Any]) -> tuple[int, int, int, int]:
    """Return what tells a row from others, in the order of the table."""
    return SHAPES.index(row["shape"]), row["ranks"], row["tokens"], LEVELS.index(row["recompute"])


def summary(row: dict[str, Any]) -> str:
    """Format one line of the table."""
    case = f"{row['shape']:<14} {row['ranks']:>2} ranks {row['tokens']:>6} tokens {row['recompute']:<9}"
    sizes = " ".join(f"{name} {row[name] / GIB:6.1f}" for name in ("allocated", "reserved", "planned"))
    return f"{case} {sizes} GiB, planned / reserved {row['planned'] / row['reserved']:.3f}"


if __name__ == "__main__":
    main()
