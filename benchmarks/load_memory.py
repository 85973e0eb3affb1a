"""Measure the host memory that loading a model takes: a random checkpoint of 1 billion parameters on 2 gloo ranks.

    python benchmarks/load_memory.py

Each rank loads its shard through spmdrl's loader and then reads every parameter: safetensors maps files lazily, so a
load that touches nothing proves nothing. A thread samples RssAnon (memory of our own) and RssFile (pages of the
checkpoint, which the kernel can drop at any time) all the while. RssAnon may reach 1.25 times the rank's shard in
float32, plus 512 MiB, which must also hold Python and torch themselves. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import workload
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from spmdrl.config import ModelConfig
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import World, spmd_session
from spmdrl.model.load import load_policy

MIB = 2**20
FILE_BYTES = 512 * MIB  # a file of the checkpoint is closed when it has reached this
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def load_on_this_rank(path: Path, world: World) -> list[Tensor]:
    """Load the model at `path` as training does, which is measured; return this rank's shard of each parameter."""
    policy = load_policy(ModelConfig(path=str(path)), build_meshes(world).model, temperature=1.0)
    return [parameter.to_local() for parameter in policy.parameters() if isinstance(parameter, DTensor)]


def main() -> None:
    """Write the checkpoint, load it on all ranks, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="of the checkpoint; training is float32")
    parser.add_argument("--layers", type=int, default=14, help="14 make 1.0 billion parameters")
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rank-loads", type=Path, help=argparse.SUPPRESS)  # set by this program, in the ranks
    args = parser.parse_args()
    if args.rank_loads:
        measure_this_rank(args.rank_loads)
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        written = write_checkpoint(folder, dtype=DTYPES[args.dtype], num_layers=args.layers, vocabulary=args.vocabulary)
        ranks = run_ranks(folder, num_ranks=args.ranks)
    print(json.dumps(result(args, written, ranks)))


def write_checkpoint(folder: Path, *, dtype: torch.dtype, num_layers: int, vocabulary: int) -> Mapping[str, float]:
    """Write Qwen3-1.7B's architecture with these sizes and random weights, never more than a file in memory."""
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=True,
        architectures=["Qwen3ForCausalLM"],
        dtype=str(dtype).removeprefix("torch."),
    )
    config.save_pretrained(folder)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    model.tie_weights()
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    places: dict[str, str] = {}
    absolute_sum, pending = 0.0, dict[str, Tensor]()
    for name, shape in shapes.items():
        weight = torch.empty(shape, dtype=dtype).normal_(0.0, 0.02, generator=generator)
        absolute_sum += sum_absolute([weight])
        pending[name] = weight
        if name == list(shapes)[-1] or sum(tensor.nbytes for tensor in pending.values()) >= FILE_BYTES:
            file = f"model-{len(set(places.values())) + 1:05d}.safetensors"
            save_file(pending, folder / file, metadata={"format": "pt"})
            places |= dict.fromkeys(pending, file)
            pending = {}
        del weight
    num_parameters = sum(shape.numel() for shape in shapes.values())
    num_bytes = num_parameters * dtype.itemsize
    index = {"metadata": {"total_size": num_bytes}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return {
        "num_parameters": num_parameters,
        "checkpoint_bytes": num_bytes,
        "checkpoint_files": len(set(places.values())),
        "absolute_sum": absolute_sum,
    }


def sum_absolute(tensors: Iterable[Tensor]) -> float:
    """The sum of all absolute values, a few MiB at a time: a sum in another dtype would copy its whole argument."""
    return math.fsum(chunk.double().abs().sum().item() for tensor in tensors for chunk in tensor.view(-1).split(MIB))


def run_ranks(folder: Path, *, num_ranks: int) -> list[dict[str, Any]]:
    """Start the ranks, wait, and return what each measured."""
    launcher = workload.torchrun(num_ranks) if num_ranks > 1 else []
    command = [sys.executable, *launcher, __file__, "--rank-loads", str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(num_ranks)]


def measure_this_rank(folder: Path) -> None:
    """Runs in each rank under torchrun: load, touch, and leave the result in `folder`."""
    with spmd_session(threads_per_rank=0, deterministic=False) as world:
        with ResidentMemory() as memory:
            start = time.perf_counter()
            shards = load_on_this_rank(folder, world)
            load_s = time.perf_counter() - start
            absolute_sum = sum_absolute(shards)
        measured = {
            "rank": world.rank,
            "shard_bytes": sum(shard.nbytes for shard in shards),
            "absolute_sum": absolute_sum,
            "load_s": load_s,
            **memory.result(),
        }
        (folder / f"rank-{world.rank}.json").write_text(json.dumps(measured), encoding="utf-8")


class ResidentMemory:
    """Samples this process's resident memory from a thread, and keeps the peaks."""

    def __init__(self, *, interval_s: float = 0.002) -> None:
        self._interval_s = interval_s
        self._before: Mapping[str, int] = {}
        self._peaks = {"RssAnon": 0, "RssFile": 0, "VmHWM": 0}
        self._num_samples = 0
        self._longest_gap_s = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample_until_ended, daemon=True)

    def __enter__(self) -> ResidentMemory:
        self._before = resident_bytes()
        Path("/proc/self/clear_refs").write_text("5")  # starts VmHWM, the kernel's own peak of the total, afresh
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _sample_until_ended(self) -> None:
        last, ended = time.perf_counter(), False
        while not ended:
            ended = self._ended.wait(self._interval_s)  # one sample more after the end
            now = resident_bytes()
            self._peaks = {key: max(peak, now[key]) for key, peak in self._peaks.items()}
            self._num_samples += 1
            self._longest_gap_s = max(self._longest_gap_s, time.perf_counter() - last)
            last = time.perf_counter()

    def result(self) -> Mapping[str, float]:
        """The peaks. A long gap is one in which a library kept the interpreter to itself and nothing was sampled."""
        return {
            "anon_before_mib": self._before["RssAnon"] / MIB,
            "peak_anon_mib": self._peaks["RssAnon"] / MIB,
            "peak_file_mib": self._peaks["RssFile"] / MIB,
            "peak_total_mib": self._peaks["VmHWM"] / MIB,
            "num_samples": self._num_samples,
            "longest_gap_s": self._longest_gap_s,
        }


def resident_bytes() -> dict[str, int]:
    """RssAnon, RssFile and VmHWM of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in lines)
    return {key: int(fields[key].split()[0]) * 1024 for key in ("RssAnon", "RssFile", "VmHWM")}


def result(args: argparse.Namespace, written: Mapping[str, float], ranks: list[dict[str, Any]]) -> Mapping[str, Any]:
    """Make the object that is printed. Raises when the ranks together do not hold the weights that were written."""
    loaded, wanted = math.fsum(rank.pop("absolute_sum") for rank in ranks), written["absolute_sum"]
    assert math.isclose(loaded, wanted, rel_tol=1e-9), f"the ranks hold other weights: {loaded}, not {wanted}"
    shard_bytes = sum(rank["shard_bytes"] for rank in ranks)
    assert shard_bytes == 4 * written["num_parameters"], f"the shards have {shard_bytes} bytes together"
    for rank in ranks:
        rank["limit_mib"] = 1.25 * rank["shard_bytes"] / MIB + 512
        rank["anon_over_limit"] = rank["peak_anon_mib"] / rank["limit_mib"]
    ratio = max(rank["anon_over_limit"] for rank in ranks)
    return {
        "checkpoint_dtype": args.dtype,
        **{key: value for key, value in written.items() if key != "absolute_sum"},
        "num_ranks": args.ranks,
        "ranks": ranks,
        "anon_over_limit": ratio,
        "within_limit": ratio <= 1.0,
        "versions": workload.versions(["torch", "transformers", "safetensors"]),
    }


if __name__ == "__main__":
    main()
