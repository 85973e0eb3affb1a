"""Time refits on a CUDA device, in buckets and tensor by tensor, beside a plain copy on the device.

    python benchmarks/gpu_refit.py --sizes 0.6b 4b 8b --into process sglang --repeats 7

Qwen3's shapes with random weights: float32 shards on one rank, sent as bfloat16. They go into a plain process that
opens CUDA IPC handles by the loader that SGLang's processes use, and into SGLang itself where it can be imported. The
two ways alternate; digests are off after the first refit. The limit is a `copy_` of a GiB from the device to itself,
timed after each pair. Prints one JSON object, and writes it to benchmarks/results/gpu-refit.json; `--device cpu --sizes
tiny --transport shared_memory` tries the program where there is no device, and writes nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import torch
import workload
from program import seconds
from refit import EVERY_OTHER, Call, PerTensor, SGLangCalls, launch
from results import RESULTS, print_result, provenance
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from spmdrl.config import RefitConfig
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import device_bytes, spmd_session
from spmdrl.engine.sglang.engine import SGLangEngine
from spmdrl.memory.buckets import bucket_bytes
from spmdrl.refit.refit import Refit

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from tests.helpers.other_process import OtherProcess

MIB = 2**20
DTYPE = torch.bfloat16
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 3, "num_attention_heads": 4},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "8b": {"hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32},
}


def main() -> None:
    """Measure every size into every receiver."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.6b", "4b", "8b"])
    parser.add_argument("--into", nargs="+", choices=("process", "sglang"), default=["process", "sglang"])
    parser.add_argument("--repeats", type=int, default=7, help="pairs of refits")
    parser.add_argument(
        "--bucket-mib", type=int, default=bucket_bytes(RefitConfig(), device_bytes=device_bytes()) // MIB
    )
    parser.add_argument("--copy-mib", type=int, default=1024, help="of the plain copy")
    parser.add_argument("--transport", choices=("cuda_ipc", "shared_memory"), default="cuda_ipc")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device; --device cpu --sizes tiny only tries the program")
    if "sglang" in args.into and not find_spec("sglang"):
        sys.exit("SGLang is not installed; --into process measures without it")
    receivers = [name for name in RECEIVERS if name in args.into]
    origin, rows = provenance(), []
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        for name, size in product(receivers, args.sizes):
            policy = random_policy(model_config(size), meshes.training)
            with RECEIVERS[name](model_config(size), meshes.training, args.transport) as (engine, call):
                rows.append({"size": size, "into": name, **measure(policy, engine, call, meshes, args)})
            print(summary(rows[-1]), file=sys.stderr, flush=True)
            del policy
            torch.cuda.empty_cache()  # the next receiver is another process
    result = {
        "benchmark": "gpu-refit",
        "about": "refits on a device, beside one call for each tensor and a copy on the device",
        **origin,
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "versions": workload.versions(["torch", "transformers", *(["sglang"] if "sglang" in receivers else [])]),
        "load_average": os.getloadavg()[0],
        "command": "python benchmarks/gpu_refit.py " + " ".join(sys.argv[1:]),
        "settings": {"bucket_mib": args.bucket_mib, "transport": args.transport, "repeats": args.repeats},
        "rows": rows,
    }
    print_result(result, RESULTS / "gpu-refit.json" if args.device == "cuda" else None)


def measure(policy: Any, engine: Any, call: Call, meshes: Meshes, args: argparse.Namespace) -> dict[str, Any]:
    """Both ways, alternating, into one receiver."""
    cfg = RefitConfig(bucket_bytes=args.bucket_mib * MIB, verify=EVERY_OTHER)
    refit = Refit(policy, engine, meshes, cfg, dtype=DTYPE)
    first_s = timed(meshes.training, lambda: refit(version=0))  # compares digests
    refit(version=1)
    refit(version=2)
    one_by_one = PerTensor(policy, call, memory=engine.allocate, dtype=DTYPE)
    one_by_one()
    copy_bytes = args.copy_mib * MIB
    source, target = (
        torch.full((copy_bytes,), value, dtype=torch.uint8, device=meshes.training.device_type) for value in (1, 2)
    )
    bucketed, by_tensor, verified, copies = [], [], [], []
    for version in range(3, 3 + 2 * args.repeats, 2):
        bucketed.append(timed(meshes.training, lambda version=version: refit(version=version)))
        by_tensor.append(timed(meshes.training, one_by_one))
        verified.append(timed(meshes.training, lambda version=version: refit(version=version + 1)))
        copies.append(statistics.median(timed(meshes.training, lambda: target.copy_(source)) for _ in range(5)))
    gb = sum(parameter.numel() for parameter in one_by_one.weights.values()) * DTYPE.itemsize / 1e9
    shares = [(gb / ours) / (copy_bytes / 1e9 / limit) for ours, limit in zip(bucketed, copies, strict=True)]
    return {
        "tensors": len(one_by_one.weights),
        "gb": gb,
        "bucketed_s": bucketed,
        "by_tensor_s": by_tensor,
        "verified_s": verified,
        "verified_ratio": statistics.median(one / plain for one, plain in zip(verified, bucketed, strict=True)),
        "ratio": statistics.median(ours / theirs for ours, theirs in zip(bucketed, by_tensor, strict=True)),
        "gb_per_s": gb / statistics.median(bucketed),
        "copy_gb_per_s": copy_bytes / 1e9 / statistics.median(copies),
        "share_of_copy": statistics.median(shares),
        "first_with_digests_s": first_s,
    }


def summary(row: dict[str, Any]) -> str:
    """One line of the table."""
    ours, theirs = (statistics.median(row[name]) * 1e3 for name in ("bucketed_s", "by_tensor_s"))
    return (
        f"{row['size']:<5} into {row['into']:<8} {row['gb']:6.2f} GB in {row['tensors']} tensors: {ours:8.1f} ms, "
        f"tensor by tensor {theirs:8.1f} ms, ratio {row['ratio']:.3f}; {row['gb_per_s']:7.1f} GB/s, "
        f"{row['share_of_copy']:.3f} of a copy's {row['copy_gb_per_s']:.0f}; verified "
        f"{row['verified_ratio']:.2f} times as long"
    )


def timed(mesh: DeviceMesh, call: Callable[[], object]) -> float:
    """Seconds until it is done, on the device too."""

    def done() -> None:
        call()
        if mesh.device_type == "cuda":
            torch.cuda.synchronize()

    return seconds(done)


def model_config(size: str) -> Qwen3Config:
    """Qwen3's own shape of this size; only the largest has a head of its own."""
    return Qwen3Config(
        vocab_size=1024 if size == "tiny" else 151_936,
        head_dim=128,
        num_key_value_heads=8 if size != "tiny" else 2,
        max_position_embeddings=1024,
        tie_word_embeddings=size != "8b",
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        **SIZES[size],
    )


def random_policy(config: Qwen3Config, mesh: DeviceMesh) -> nn.Module:
    """The model with random float32 shards, as a trainer holds it; nothing is written to disk."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config).float()
    policy = nn.Module()
    policy.model, policy.adapters = model, None
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(policy, mesh=mesh)
    policy.to_empty(device=mesh.device_type)
    model.tie_weights()
    with torch.no_grad():
        for parameter in policy.parameters():
            assert isinstance(parameter, DTensor)
            parameter.to_local().normal_(0.0, 0.02)
    return policy


@contextmanager
def plain_process(config: Qwen3Config, mesh: DeviceMesh, transport: str) -> Iterator[tuple[Any, Call]]:
    """A process that copies what it opens, and does nothing else."""
    device = torch.device(mesh.device_type, torch.cuda.current_device() if mesh.device_type == "cuda" else None)
    engine = OtherProcess(device, transport=transport)
    try:
        yield engine, OneByOne(engine)
    finally:
        engine.close()


class OneByOne:
    """Calls of a plain process, which has no sessions."""

    def __init__(self, engine: OtherProcess) -> None:
        self.load = lambda name, tensor, is_last: engine.load_one(name, tensor)

    def begin(self) -> None:
        """Nothing to open."""

    def end(self) -> None:
        """Nothing to close."""


@contextmanager
def sglang(config: Qwen3Config, mesh: DeviceMesh, transport: str) -> Iterator[tuple[Any, Call]]:
    """SGLang with random weights of its own and little room for requests."""
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        options = launch(
            folder,
            dtype="bfloat16",
            device=mesh.device_type,
            attention_backend="torch_native" if mesh.device_type == "cpu" else "triton",  # needs the fewest kernels
            context_length=512,
            max_total_tokens=1024,
        )
        engine = SGLangEngine(options, mesh, model_config=config, transport=transport)
        try:
            yield engine, SGLangCalls(engine)
        finally:
            engine.close()


# In the order in which they are measured: once SGLang has started, the tensors that this process sends are in a form
# that only SGLang's processes can read.
RECEIVERS = {"process": plain_process, "sglang": sglang}


if __name__ == "__main__":
    main()
