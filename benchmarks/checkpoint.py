"""Time what a step waits for a checkpoint, beside a save that it waits for whole, and the disk's own write speed.

    python benchmarks/checkpoint.py --sizes 10m 50m 100m --repeats 5

Random Qwen3-shaped models in float32 on one rank, with the state of AdamW. In each round: a save in the background, of
which the stall is counted, and then all until it is written; torch's distributed checkpoint of the same tensors,
written onto the disk while the step waits; one file of as many bytes, written onto the disk; a copy of as many. While
the background writes, and again while it does not, a matrix product is repeated: what saving costs a step that goes on.
Prints one JSON object; `benchmarks/bench.py` says what is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import workload
from program import seconds
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from spmdrl import checkpoint
from spmdrl.checkpoint.storage import LearnerState, num_bytes, tree_of
from spmdrl.config import CheckpointConfig, ModelConfig, OptimConfig
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.learn.learner import Learner
from spmdrl.learn.objective import SftObjective
from spmdrl.model.load import load_policy

SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 1, "vocab_size": 64},
    "10m": {"hidden_size": 256, "num_hidden_layers": 12, "vocab_size": 4096},
    "50m": {"hidden_size": 512, "num_hidden_layers": 14, "vocab_size": 8192},
    "100m": {"hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 16384},
}


def main() -> None:
    """Measure every size, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["10m", "50m", "100m"])
    parser.add_argument("--repeats", type=int, default=5, help="rounds of each model")
    parser.add_argument("--folder", type=Path, help="a directory on the disk to measure; default: the temporary one")
    args = parser.parse_args()
    load_average = os.getloadavg()
    sizes: dict[str, Any] = {}
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        for size in args.sizes:
            with tempfile.TemporaryDirectory(dir=args.folder) as folder:
                sizes[size] = measure(SIZES[size], meshes, Path(folder), repeats=args.repeats)
            print(size, json.dumps(sizes[size]), file=sys.stderr, flush=True)
    result = {
        "threads": torch.get_num_threads(),
        "sizes": sizes,
        "load_average": load_average[0],
        "load_average_after": os.getloadavg()[0],
        "versions": workload.versions(["torch", "transformers"]),
    }
    print(json.dumps(result))


def measure(shape: dict[str, int], meshes: Meshes, folder: Path, *, repeats: int) -> dict[str, Any]:
    """All ways, in turn, of one model."""
    learner = learner_of(shape, meshes, folder)
    tree = tree_of({"policy": LearnerState.of(learner)})
    size = num_bytes(tree)
    saver = checkpoint.Saver(
        folder / "ours",
        {"policy": learner},
        meshes,
        CheckpointConfig(keep_last=1),
        configuration={},
        versions={},
    )
    content = torch.randn(size // 4)
    place = torch.zeros_like(content)
    times: dict[str, list[float]] = {
        name: [] for name in ("stall_s", "written_s", "torch_s", "disk_s", "copy_s", "work_s", "work_while_writing_s")
    }
    saver.save(1, metrics={})  # takes its memory
    saver.wait()
    for step in range(2, repeats + 2):
        began = time.perf_counter()
        saver.save(step, metrics={})
        times["stall_s"].append(time.perf_counter() - began)
        times["work_while_writing_s"].append(seconds(work))
        saver.wait()
        times["written_s"].append(time.perf_counter() - began)
        times["work_s"].append(seconds(work))
        times["torch_s"].append(seconds(lambda: save_with_torch(tree, folder / "torch")))
        times["disk_s"].append(seconds(lambda: write(content, folder / "file")))
        times["copy_s"].append(seconds(lambda: place.copy_(content)))
        shutil.rmtree(folder / "torch")
    saver.close()
    return {
        "parameters": sum(parameter.numel() for parameter in learner.model.parameters()),
        "gb": size / 1e9,
        **times,
        "stall_over_torch": ratios(times["stall_s"], times["torch_s"]),
        "stall_over_disk": ratios(times["stall_s"], times["disk_s"]),
        "stall_over_copy": ratios(times["stall_s"], times["copy_s"]),
        "torch_over_disk": ratios(times["torch_s"], times["disk_s"]),
        "work_slowdown": ratios(times["work_while_writing_s"], times["work_s"]),
        "stall_s_per_gb": statistics.median(times["stall_s"]) / (size / 1e9),
    }


def learner_of(shape: dict[str, int], meshes: Meshes, folder: Path) -> Learner:
    """A random model after one step of AdamW."""
    config = Qwen3Config(
        **shape,
        intermediate_size=3 * shape["hidden_size"],
        num_attention_heads=shape["hidden_size"] // 64,
        num_key_value_heads=shape["hidden_size"] // 128,
        head_dim=64,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).save_pretrained(folder / "model")
    policy = load_policy(ModelConfig(path=str(folder / "model")), meshes.model, temperature=1.0)
    learner = Learner(policy, OptimConfig(lr=1e-4), SftObjective(), num_updates=1, dtype=torch.float32)
    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter)
    learner.optimizer.step()
    learner.optimizer.zero_grad(set_to_none=True)
    return learner


def save_with_torch(tree: dict[str, Any], folder: Path) -> None:
    """torch's own synchronous save, onto the disk."""
    dcp.save(tree, storage_writer=dcp.FileSystemWriter(folder))


def write(content: Tensor, path: Path) -> None:
    """One file, onto the disk."""
    with path.open("wb") as file:
        file.write(memoryview(content.numpy()).cast("B"))
        file.flush()
        os.fsync(file.fileno())


def work() -> None:
    """About half a second of what a step does on one thread."""
    square = torch.ones(512, 512)
    for _ in range(100):
        square @ square


def ratios(ours: list[float], theirs: list[float]) -> list[float]:
    return [one / other for one, other in zip(ours, theirs, strict=True)]


if __name__ == "__main__":
    main()
