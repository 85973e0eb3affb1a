"""The planner beside torch's own caching allocator, on stand-ins for GPUs (`tests/fake_cuda`): no GPU is needed.

`python benchmarks/memory_plan.py --python .venv-cuda/bin/python` measures two training steps of each of `CASES`, the
second of two micro-batches, and writes `results/memory-plan.json`; `--planned` only plans the recorded cases. The cases
of a shape share a process. More ranks than 1 are one process with torch's fake process group.
"""

from __future__ import annotations

import argparse
import copy
import functools
import gc
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
GIB = 2**30
SHAPES = ("Qwen3-0.6B", "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B")
LEVELS = ("none", "selective", "full")
WAYS = ("fsdp", "hsdp", "adapters", "offload")  # hsdp: two copies
SEQUENCE_TOKENS = 4096


CASES = (  # shapes, ranks, ways, tokens of a micro-batch; each at every level
    (SHAPES, (1, 8, 64), ("fsdp",), (16_384,)),
    (("Qwen3-14B", "Qwen3-32B"), (16,), ("fsdp",), (16_384,)),
    (("Qwen3-0.6B", "Qwen3-4B", "Qwen3-30B-A3B"), (8,), ("fsdp",), (65_536,)),
    (("Qwen3-1.7B", "Qwen3-8B", "Qwen3-30B-A3B"), (16,), ("hsdp",), (16_384,)),
    (("Qwen3-8B",), (1, 8), ("adapters",), (16_384,)),
    (("Qwen3-30B-A3B",), (8,), ("adapters",), (16_384,)),
    (("Qwen3-8B",), (8,), ("offload",), (16_384,)),
)


def main() -> None:
    """Measure every case, or with --case those of one shape in this process."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", default=sys.executable, help="of an environment with the CUDA build of torch")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--ranks", nargs="+", type=int, help="only these")
    parser.add_argument("--recompute", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS), help="of training")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/memory-plan.json")
    parser.add_argument("--planned", action="store_true", help="measure nothing")
    parser.add_argument("--case", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        for case in cases_of(args):
            print(json.dumps(measure(case)), flush=True)
    elif args.planned:
        for row in json.loads(args.out.read_text())["rows"]:
            print(summary(row))
    else:
        for shape in args.shapes:
            in_a_process(args, shape)


def cases_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield what tells a row from others."""
    for grid in CASES:
        for shape, ranks, way, tokens, level in itertools.product(*grid, LEVELS):
            wanted = shape in args.shapes and way in args.ways and level in args.recompute
            if wanted and ranks in (args.ranks or [ranks]):
                yield {"shape": shape, "ranks": ranks, "way": way, "tokens": tokens, "recompute": level}


def in_a_process(args: argparse.Namespace, shape: str) -> None:
    """Measure the cases of one shape with stand-ins, in a process of their own, and record each when it is done."""
    with tempfile.TemporaryDirectory() as folder:
        build = f"import json; from tests.fake_cuda.build import environment as e; from pathlib import Path; \
            print(json.dumps(e(Path({folder!r}), memory_gib=4096)))"
        run: dict[str, Any] = {"cwd": ROOT, "stdout": subprocess.PIPE, "text": True}
        stand_ins = json.loads(subprocess.run([args.python, "-c", build], check=True, **run).stdout)
        command = [args.python, __file__, "--case", "--shapes", shape]
        for name in ("ranks", "recompute", "ways"):
            command += [f"--{name}", *map(str, values)] if (values := getattr(args, name)) else []
        path = os.pathsep.join([str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")])
        with subprocess.Popen(command, env=os.environ | stand_ins | {"PYTHONPATH": path}, **run) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith("{"):
                    row = json.loads(line)
                    record(args.out, row)
                    print(summary(row), file=sys.stderr, flush=True)
        if process.returncode:
            sys.exit(process.returncode)


def measure(case: dict[str, Any]) -> dict[str, Any]:
    """Measure what two steps, the second of two micro-batches, allocate and reserve on this process's first device."""
    import torch
    from gpu_step import micro_batch
    from results import commit_id

    from spmdrl.tools.model_source import published_config

    config = published_config(case["shape"])
    lengths = [SEQUENCE_TOKENS] * (case["tokens"] // SEQUENCE_TOKENS)
    cfg = settings(case)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    policy, optimizer = trained(config, cfg, case["ranks"])
    batch = micro_batch(lengths, config.vocab_size)
    for num_micro_batches in (1, 2):
        with policy.summing_gradients():
            for _ in range(
                num_micro_batches
            ):  # gradients of the first wait while the second has all of its activations
                (policy(batch).logprobs * batch.loss_weights.to("cuda")).sum().neg().backward()
        optimizer.step()
        policy.refresh()
        optimizer.zero_grad()
    stats = torch.cuda.memory_stats()
    by_stream: dict[int, int] = {}
    for segment in torch.cuda.memory_snapshot():
        by_stream[segment["stream"]] = by_stream.get(segment["stream"], 0) + segment["total_size"]
    row = case | {name: stats[f"{name}_bytes.all.peak"] for name in ("requested", "allocated", "reserved")}
    row |= {"reserved_by_stream": sorted(by_stream.values(), reverse=True)}
    return row | {"torch": torch.__version__, "commit": commit_id()}


def trained(config: Any, cfg: Any, ranks: int) -> tuple[Any, Any]:
    """Build the policy that these settings train, with its optimizer, on the first of `ranks` ranks.

    The other ranks are those of torch's fake process group. Weights have shapes and no values.
    """
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from spmdrl.dist import mesh
    from spmdrl.learn.optim import make_optimizer
    from spmdrl.model.attention import fastest_varlen
    from spmdrl.model.layers import replace_layers
    from spmdrl.model.load import model_without_memory
    from spmdrl.model.lora.adapters import Adapters
    from spmdrl.model.lora.policy import plan_adapters
    from spmdrl.model.lora.targets import targets_of
    from spmdrl.model.operators import operators_of
    from spmdrl.model.policy import Policy
    from spmdrl.model.sharding import checkpoint_layers, decoder_layers, prefetch_layers, shard_policy
    from spmdrl.model.trunk import attention_of

    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    everyone = mesh.init_device_mesh("cuda", (ranks,), mesh_dim_names=("world",))
    _, meshes = mesh._training_meshes("cuda", torch.arange(ranks), 0, cfg.parallel)
    offloads = cfg.model.cpu_offload
    model = copy.deepcopy(model_without_memory(config, cfg.model))
    model.set_attn_implementation(attention_of(config))
    model.to(torch.bfloat16 if cfg.lora else torch.float32)
    kernel = fastest_varlen(model)
    policy = Policy(model, kernel=kernel, temperature=1.0, logits_chunk_tokens=cfg.model.logits_chunk_tokens)
    operators = operators_of(kernel)
    replace_layers(model, operators, device_type="cuda")
    offload = CPUOffloadPolicy(pin_memory=True) if offloads else None
    shard_policy(policy, meshes, dtype=torch.bfloat16, offload=offload, reshard_root=False)
    prefetch_layers(decoder_layers(model), num_ahead=1)
    policy.to_empty(device="cpu" if offloads else "cuda")
    for module in policy.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, buffer.to("cuda"), persistent=False)
    model.eval()
    if cfg.model.gradient_checkpointing != "none":
        checkpoint_layers(model, decoder_layers(model), recomputed=cfg.model.gradient_checkpointing, every_layers=1)
    if cfg.lora is not None:
        policy.requires_grad_(False)
        plan = plan_adapters(model, cfg.lora)
        targets = targets_of(model, plan.wanted, multiply=operators.linear)
        policy.adapters = Adapters(targets, plan.strength, everyone["world"], config={}, base="")
    return policy, make_optimizer(policy, cfg.optim)


def settings(case: dict[str, Any]) -> Any:
    """Return the settings of a run that trains this case."""
    from spmdrl.config import SftConfig

    sequences = case["tokens"] // SEQUENCE_TOKENS
    return SftConfig.model_validate(
        {
            "run": {"name": "memory-plan", "num_steps": 1},
            "model": {
                "path": "random",
                "gradient_checkpointing": case["recompute"],
                "cpu_offload": case["way"] == "offload",
            },
            "data": {"max_prompt_tokens": 1, "sources": [{"kind": "jsonl", "path": "random"}]},
            "sft": {"sequences_per_step": sequences * case["ranks"], "max_response_tokens": SEQUENCE_TOKENS - 1},
            "optim": {"lr": 1e-6},
            "pack": {"max_tokens_per_micro_batch": case["tokens"]},
            "parallel": {"dp_replicate": 2 if case["way"] == "hsdp" else 1},
            **({"lora": {"rank": 16}} if case["way"] == "adapters" else {}),
        }
    )


def planned_bytes(case: dict[str, Any]) -> int:
    """Return what the planner says that torch's allocator takes: cuBLAS's workspaces are among it."""
    from spmdrl.memory.overhead import CUBLAS_BYTES

    phases = prediction(case).phases
    return CUBLAS_BYTES + max(
        phase.process_bytes + phase.elsewhere.get("unused blocks", 0)
        for phase in phases
        if phase.name in ("forward-backward", "optimizer")
    )


def prediction(case: dict[str, Any]) -> Any:
    """Return the planner's prediction of a case."""
    from spmdrl.preflight.forecast import predict

    model = model_of(case["shape"], case["way"] == "adapters")
    return predict(settings(case), model, num_ranks=case["ranks"], device_bytes=GIB, on_gpu=True)


@functools.cache
def model_of(shape: str, has_adapters: bool) -> Any:
    """Return the shapes of a model's weights."""
    from spmdrl.config import LoraConfig, ModelConfig
    from spmdrl.preflight.forecast import Model
    from spmdrl.tools.model_source import published_config

    return Model.read(
        published_config(shape), ModelConfig(path="random"), lora=LoraConfig(rank=16) if has_adapters else None
    )


def record(path: Path, row: dict[str, Any]) -> None:
    """Put this row in place of an older one of the same case."""
    known = json.loads(path.read_text()) if path.exists() else {"benchmark": "memory-plan", "rows": []}
    cases = {order_of(row): row for row in [*known["rows"], row]}
    known["rows"] = [cases[case] for case in sorted(cases)]
    path.write_text(json.dumps(known, indent=1) + "\n")


def order_of(row: dict[str, Any]) -> tuple[int, ...]:
    """Return what tells a row from others, in the order of the table."""
    places = SHAPES.index(row["shape"]), WAYS.index(row["way"]), LEVELS.index(row["recompute"])
    return places[0], places[1], row["ranks"], row["tokens"], places[2]


def summary(row: dict[str, Any]) -> str:
    """Format one line of the table."""
    case = f"{row['shape']:<14} {row['ranks']:>2} ranks {row['way']:<8} {row['tokens']:>6} tokens {row['recompute']:<9}"
    sizes = " ".join(f"{name} {row[name] / GIB:6.1f}" for name in ("allocated", "reserved"))
    planned = planned_bytes(row)
    return f"{case} {sizes} planned {planned / GIB:6.1f} GiB, planned / reserved {planned / row['reserved']:.3f}"


if __name__ == "__main__":
    main()
