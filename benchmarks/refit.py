"""Time a refit of SGLang in buckets beside one call of the engine for each tensor: one process, the same transport.

    python benchmarks/refit.py --sizes 10m 200m 1b --repeats 7
    python benchmarks/refit.py --sizes 200m --lora 8
    python benchmarks/refit.py --sizes 10m 200m --fp8

Random Qwen3-shaped models in float32 on one rank, and SGLang in processes of its own. The two ways alternate; each
opens one update session and compares no digests. A refit that does follows each pair, and then the limit is timed: a
`copy_` of half a GiB on one thread, between buffers that no cache holds. With `--lora` refits of adapters of that rank
on all linear layers, which are always verified, alternate with refits of all weights. With `--fp8` refits in bfloat16
alternate with refits whose projections are in e4m3, into an engine that only copies what it gets: SGLang has no such
layers on a CPU. Prints one JSON object; `benchmarks/bench.py` says what is in it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import workload
from program import seconds
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from spmdrl.config import LoraConfig, ModelConfig, RefitConfig
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.engine.sglang import loader as sglang_loader
from spmdrl.engine.sglang import process as sglang_process
from spmdrl.engine.sglang.engine import SGLangEngine
from spmdrl.engine.sglang.options import SGLangOptions
from spmdrl.engine.sglang.surroundings import cpu_environment
from spmdrl.memory.buckets import bucket_bytes
from spmdrl.model.load import load_policy
from spmdrl.model.lora.policy import load_trained
from spmdrl.refit.refit import AdapterRefit, Refit
from spmdrl.types import Request, Response

MIB = 2**20
GIB = 2**30
EVERY_OTHER = 2
SIZES: dict[str, dict[str, int]] = {
    "tiny": {"hidden_size": 64, "num_hidden_layers": 2, "head_dim": 32, "vocab_size": 128},
    "10m": {"hidden_size": 256, "num_hidden_layers": 22, "head_dim": 32, "vocab_size": 4096, "intermediate_size": 288},
    "200m": {"hidden_size": 1024, "num_hidden_layers": 13, "head_dim": 128, "vocab_size": 32768},
    "1b": {"hidden_size": 2048, "num_hidden_layers": 21, "head_dim": 128, "vocab_size": 32768},
}
BYTES_PER_PARAMETER = 14  # of host memory: policy and engine 4 each, the checkpoint 2, as much again for a moment


def main() -> None:
    """Measure every size that fits, print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["10m", "200m", "1b"])
    parser.add_argument("--repeats", type=int, default=7, help="pairs of refits of each model")
    parser.add_argument("--lora", type=int, metavar="RANK", help="time refits of adapters instead")
    parser.add_argument("--fp8", action="store_true", help="time refits in bfloat16 and in e4m3 instead")
    parser.add_argument("--bucket-mib", type=int, default=bucket_bytes(RefitConfig(), device_bytes=None) // MIB)
    parser.add_argument("--copy-mib", type=int, default=512, help="of the plain copy")
    args = parser.parse_args()
    load_average = os.getloadavg()
    way, line = (measure_adapters, adapter_summary) if args.lora else (measure, summary)
    way, line = (measure_fp8, fp8_summary) if args.fp8 else (way, line)
    sizes: dict[str, Any] = {}
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        for size in args.sizes:
            needed = BYTES_PER_PARAMETER * count(model_config(size)) + 2 * GIB
            if (available := available_bytes()) < needed:
                sizes[size] = {"left_out": f"needs {needed / GIB:.1f} GiB, {available / GIB:.1f} are available"}
            else:
                sizes[size] = way(size, meshes, args)
            print(size, "left out" if "left_out" in sizes[size] else line(sizes[size]), file=sys.stderr, flush=True)
    result = {
        "bucket_mib": args.bucket_mib,
        "lora_rank": args.lora,
        "threads": torch.get_num_threads(),
        "sizes": sizes,
        "load_average": load_average[0],
        "load_average_after": os.getloadavg()[0],
        "versions": workload.versions(["torch", "transformers", "sglang"]),
    }
    print(json.dumps(result))


def measure(size: str, meshes: Meshes, args: argparse.Namespace) -> dict[str, Any]:
    """Both ways, alternating, into one engine."""
    config, copy_bytes = model_config(size), args.copy_mib * MIB
    refit_config = RefitConfig(bucket_bytes=args.bucket_mib * MIB, verify=EVERY_OTHER)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
        policy = load_policy(ModelConfig(path=folder), meshes.model, temperature=1.0)
        engine = SGLangEngine(launch(folder), meshes.engine, model_config=config, transport="shared_memory")
    try:
        refit = Refit(policy, engine, meshes, refit_config, dtype=torch.float32)
        first_s = seconds(lambda: refit(version=0))
        refit(version=1)
        refit(version=2)
        one_by_one = PerTensor(policy, SGLangCalls(engine), memory=engine.allocate, dtype=torch.float32)
        one_by_one()
        copy = Copy(copy_bytes)
        spmdrl_s, peer_s, verified_s, copy_s = [], [], [], []
        for version in range(3, 3 + 2 * args.repeats, 2):
            spmdrl_s.append(seconds(lambda version=version: refit(version=version)))
            peer_s.append(seconds(one_by_one))
            verified_s.append(seconds(lambda version=version: refit(version=version + 1)))
            copy_s.append(statistics.median(seconds(copy) for _ in range(3)))
        num_bytes = 4 * count(config)
        rates = [num_bytes / 1e9 / duration for duration in spmdrl_s]
        copy_rates = [copy_bytes / 1e9 / duration for duration in copy_s]
        return {
            "parameters": count(config),
            "tensors": len(one_by_one.weights),
            "buckets": len(plan_of(refit)),
            "gb": num_bytes / 1e9,
            "spmdrl_s": spmdrl_s,
            "peer_s": peer_s,
            "spmdrl_median_s": statistics.median(spmdrl_s),
            "peer_median_s": statistics.median(peer_s),
            "ratios": [ours / theirs for ours, theirs in zip(spmdrl_s, peer_s, strict=True)],
            "gb_per_s": statistics.median(rates),
            "copy_gb_per_s": statistics.median(copy_rates),
            "shares_of_copy": [ours / limit for ours, limit in zip(rates, copy_rates, strict=True)],
            "first_with_digests_s": first_s,
            "verified_s": verified_s,
            "verified_median_s": statistics.median(verified_s),
            "verified_ratios": [verified / plain for verified, plain in zip(verified_s, spmdrl_s, strict=True)],
            "digests_s": statistics.median(verified_s) - statistics.median(spmdrl_s),
        }
    finally:
        engine.close()


def summary(found: dict[str, Any]) -> str:
    """One line."""
    return (
        f"({found['parameters'] / 1e6:.0f}M in {found['tensors']} tensors, {found['buckets']} buckets): "
        f"{found['spmdrl_median_s'] * 1e3:.1f} ms, tensor by tensor {found['peer_median_s'] * 1e3:.1f} ms, ratio "
        f"{statistics.median(found['ratios']):.3f}; {found['gb_per_s']:.2f} GB/s, "
        f"{statistics.median(found['shares_of_copy']):.2f} of a copy's {found['copy_gb_per_s']:.1f} GB/s; "
        f"verified {found['verified_median_s'] * 1e3:.1f} ms, {statistics.median(found['verified_ratios']):.2f} times "
        "as long"
    )


def measure_adapters(size: str, meshes: Meshes, args: argparse.Namespace) -> dict[str, Any]:
    """Refits of adapters, of all weights, and of all weights with digests, alternating, into one engine."""
    config = model_config(size)
    refit_config = RefitConfig(bucket_bytes=args.bucket_mib * MIB, verify=EVERY_OTHER)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
        lora = LoraConfig(rank=args.lora)
        policy = load_trained(ModelConfig(path=folder), lora, meshes, temperature=1.0, seed=0)
        assert policy.adapters is not None
        options = launch(
            folder,
            enable_lora=True,
            lora_backend="torch_native",
            lora_target_modules=policy.adapters.config["target_modules"],
            max_lora_rank=args.lora,
            max_loras_per_batch=1,
        )
        engine = SGLangEngine(options, meshes.engine, model_config=config, transport="shared_memory")
    try:
        whole = Refit(policy, engine, meshes, refit_config, dtype=torch.float32)
        adapters = AdapterRefit(whole, policy.adapters, engine, meshes, dtype=torch.float32)
        for version in range(3):
            adapters(version=version)
        whole(version=3)
        adapters_s, verified_s, whole_s = [], [], []
        for version in range(4, 4 + 3 * args.repeats, 3):
            adapters_s.append(seconds(lambda version=version: adapters(version=version)))
            verified_s.append(seconds(lambda version=version: whole(version=version + 1)))
            whole_s.append(seconds(lambda version=version: whole(version=version + 2)))
        num_bytes = sum(tensor.nbytes for tensor in policy.adapters.tensors.values())
        return {
            "parameters": count(config),
            "tensors": len(policy.adapters.tensors),
            "gb": 4 * count(config) / 1e9,
            "adapters_gb": num_bytes / 1e9,
            "share_of_bytes": num_bytes / (4 * count(config)),
            "adapters_s": adapters_s,
            "whole_s": whole_s,
            "verified_s": verified_s,
            "adapters_median_s": statistics.median(adapters_s),
            "whole_median_s": statistics.median(whole_s),
            "verified_median_s": statistics.median(verified_s),
            "times_faster": [full / ours for ours, full in zip(adapters_s, whole_s, strict=True)],
            "times_faster_verified": [full / ours for ours, full in zip(adapters_s, verified_s, strict=True)],
        }
    finally:
        engine.close()


def adapter_summary(found: dict[str, Any]) -> str:
    """One line."""
    return (
        f"({found['parameters'] / 1e6:.0f}M): adapters {found['adapters_median_s'] * 1e3:.1f} ms in "
        f"{found['adapters_gb'] * 1e3:.1f} MB, {100 * found['share_of_bytes']:.2f} % of the bytes of all weights, "
        f"{found['whole_median_s'] * 1e3:.1f} ms and verified {found['verified_median_s'] * 1e3:.1f} ms: "
        f"{statistics.median(found['times_faster']):.1f} and "
        f"{statistics.median(found['times_faster_verified']):.1f} times as fast"
    )


class Receiver(RolloutEngine):
    """Copies every bucket into memory of its own, and samples nothing."""

    naming = "checkpoint"

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self._memory: dict[int, Tensor] = {}

    def load(self, number: int) -> None:
        num_bytes = self._buckets[number].num_bytes
        memory = self._memory.setdefault(number, torch.empty(num_bytes, dtype=torch.uint8))
        memory.copy_(self._buffers[number % len(self._buffers)][:num_bytes])

    def generate(self, requests: Iterable[Request | None]) -> Iterator[tuple[int, Response]]:
        raise NotImplementedError


def measure_fp8(size: str, meshes: Meshes, args: argparse.Namespace) -> dict[str, Any]:
    """Refits in bfloat16 and with projections in e4m3, alternating, each into memory of its own."""
    config, refit_config = model_config(size), RefitConfig(bucket_bytes=args.bucket_mib * MIB, verify="first")
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
        policy = load_policy(ModelConfig(path=folder), meshes.model, temperature=1.0)
    plain, fp8 = (
        Refit(policy, Receiver(), meshes, refit_config, dtype=torch.bfloat16, quantize=quantize)
        for quantize in (False, True)
    )
    for refit in (plain, fp8):
        refit(version=0)
    plain_s, fp8_s = [], []
    for version in range(1, 1 + args.repeats):
        plain_s.append(seconds(lambda version=version: plain(version=version)))
        fp8_s.append(seconds(lambda version=version: fp8(version=version)))
    plain_bytes, fp8_bytes = (sum(bucket.num_bytes for bucket in plan_of(refit)) for refit in (plain, fp8))
    return {
        "parameters": count(config),
        "bfloat16_gb": plain_bytes / 1e9,
        "fp8_gb": fp8_bytes / 1e9,
        "share_of_bytes": fp8_bytes / plain_bytes,
        "bfloat16_s": plain_s,
        "fp8_s": fp8_s,
        "bfloat16_median_s": statistics.median(plain_s),
        "fp8_median_s": statistics.median(fp8_s),
        "ratios": [quantized / as_is for quantized, as_is in zip(fp8_s, plain_s, strict=True)],
    }


def fp8_summary(found: dict[str, Any]) -> str:
    """One line."""
    return (
        f"({found['parameters'] / 1e6:.0f}M): {found['fp8_gb']:.3f} GB beside {found['bfloat16_gb']:.3f}, "
        f"{found['share_of_bytes']:.2f}; {found['fp8_median_s'] * 1e3:.0f} ms beside "
        f"{found['bfloat16_median_s'] * 1e3:.0f}"
    )


class Call(Protocol):
    """An engine that takes one tensor at a time, between `begin` and `end`."""

    def begin(self) -> None:
        """Open a session."""

    def load(self, name: str, tensor: Tensor, is_last: bool) -> None:
        """Return when the tensor was copied."""

    def end(self) -> None:
        """Close the session."""


class PerTensor:
    """The other way: each tensor is copied into memory that can be opened, and handed over by a call of its own."""

    def __init__(self, policy: Any, call: Call, *, memory: Callable[[int], Tensor], dtype: torch.dtype) -> None:
        self.weights: dict[str, Tensor] = dict(policy.model.named_parameters())
        self._call = call
        self._memory = memory(max(parameter.numel() for parameter in self.weights.values()) * dtype.itemsize)
        self._dtype = dtype

    @torch.no_grad()
    def __call__(self) -> None:
        """All of them, one after the other."""
        self._call.begin()
        last = list(self.weights)[-1]
        for name, parameter in self.weights.items():
            shard = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            tensor = self._memory.view(self._dtype)[: shard.numel()].view(shard.shape).copy_(shard)
            self._call.load(name, tensor, name == last)
        self._call.end()


class SGLangCalls:
    """SGLang's own interface for named tensors."""

    def __init__(self, engine: SGLangEngine) -> None:
        assert engine._process is not None
        self._process = engine._process

    def begin(self) -> None:
        """Open an update session."""
        self._process.ask("begin_weight_update", "BeginWeightUpdateReqInput", selector="all")

    def load(self, name: str, tensor: Tensor, is_last: bool) -> None:
        """Pickle a handle, and wait for the answer."""
        if tensor.is_cuda:
            torch.cuda.current_stream().synchronize()
        self._process.ask(
            "update_weights_from_tensor",
            "UpdateWeightsFromTensorReqInput",
            serialized_named_tensors=[sglang_process.serialized(name, sglang_process.Handle(tensor))],
            flush_cache=is_last,
        )

    def end(self) -> None:
        """Close the session."""
        self._process.ask("end_weight_update", "EndWeightUpdateReqInput")


def plan_of(refit: Refit) -> tuple[Any, ...]:
    """Its buckets."""
    return refit._gatherer.buckets


class Copy:
    """A `copy_` whose source and target are too large for any cache; their pages have been touched."""

    def __init__(self, num_bytes: int) -> None:
        self._source, self._target = (torch.full((num_bytes,), value, dtype=torch.uint8) for value in (1, 2))

    def __call__(self) -> None:
        self._target.copy_(self._source)


def available_bytes() -> int:
    """Host memory that can be had without swapping."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def model_config(size: str) -> Qwen3Config:
    """Qwen3 with tied embeddings, half as many key heads as heads."""
    shape = {"intermediate_size": 3 * SIZES[size]["hidden_size"]} | SIZES[size]
    heads = shape["hidden_size"] // shape["head_dim"]
    return Qwen3Config(
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
        **shape,
    )


def count(config: Qwen3Config) -> int:
    """Parameters, tied ones once."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in Qwen3ForCausalLM(config).parameters())


def launch(folder: str, **more: Any) -> SGLangOptions:
    """SGLang with one device and little room for requests: nothing is sampled. `more` are its arguments; without them
    the device is a CPU."""
    arguments = {
        "model_path": folder,
        "dtype": "float32",
        "load_format": "dummy",
        "custom_weight_loader": [sglang_loader.PATH],
        "device": "cpu",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "grammar_backend": "none",
        "skip_tokenizer_init": True,
        "disable_cuda_graph": True,
        "context_length": 256,
        "max_total_tokens": 512,
        "max_running_requests": 4,
        "mem_fraction_static": 0.9,
        "sleep_on_idle": True,
        "log_level": "error",
        **more,
    }
    environment = {"PYTHONWARNINGS": "ignore"} | (cpu_environment() if arguments["device"] == "cpu" else {})
    return SGLangOptions(
        arguments=arguments,
        environment=environment,
        owner=f"{os.getpid()}",
        release=frozenset(),
        max_running=4,
        longest_tokens=1,
    )


if __name__ == "__main__":
    main()
