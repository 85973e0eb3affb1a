"""Time training steps on one CUDA device, with transformers' layers and with the fused ones, and compare memory.

    python benchmarks/gpu_step.py --sizes 0.6b 1.7b 4b --tokens 16384 65536 --recompute none selective full

Qwen3's shapes with random weights, in the policy that a run trains: float32 shards, bfloat16 computation, AdamW. A step
is one packed micro-batch: forward, backward, optimizer. The two kinds of layers alternate on the same weights, and a
ratio is of neighbours. A size that does not fit is recorded as such, and the next one is tried; cases that would begin
after `--minutes` are left out. Prints one JSON object, and writes it to benchmarks/results/gpu-step.json;
`--device cpu --sizes tiny --tokens 256` tries the program where there is no device, and writes nothing.

    MFU = 3 sum over sequences of (linear L + quadratic L^2) / (seconds x peak)

with the coefficients of `spmdrl/preflight/forecast.py`: a backward pass counts as two forward passes, and recomputation
as none. The peak is the dense bfloat16 rate of the device's data sheet; a device that is not in the table has no MFU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
import workload
from results import RESULTS, print_result, provenance
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

from spmdrl.config import ModelConfig, OptimConfig, SftConfig
from spmdrl.dist.mesh import Meshes, build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.learn.optim import make_optimizer
from spmdrl.memory.phases import training_phases
from spmdrl.model.attention import IMPLEMENTATION, choose_kernel, fastest_varlen
from spmdrl.model.fused import fused_layers
from spmdrl.model.layers import set_classes
from spmdrl.model.load import compute_dtype
from spmdrl.model.policy import Policy
from spmdrl.model.sharding import checkpoint_layers, decoder_layers, prefetch_layers, shard_policy
from spmdrl.preflight.forecast import Model, forward_flops, predict
from spmdrl.step.batch import lay_end_to_end
from spmdrl.types import MicroBatch, Sequence

GIB = 2**30
LEVELS = ("none", "selective", "full")
KINDS = ("eager", "fused")
OUT_OF_MEMORY, NO_TIME = "out of memory", "no time left"
Result = TypeVar("Result")
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "0.6b": {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
# Dense bfloat16 FLOP/s, by a part of the device's name, from NVIDIA's data sheets of the A100, H100, H200 and DGX B200:
# half of the rate with sparsity, where they give that one.
PEAKS = {"A100": 312e12, "H100 PCIe": 756e12, "H100 80GB HBM3": 989e12, "H200": 989e12, "B200": 2250e12}


def main() -> None:
    """Measure every case, the cheapest recomputation first."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=["0.6b", "1.7b", "4b"])
    parser.add_argument("--tokens", nargs="+", type=int, default=[16_384, 65_536], help="of a micro-batch")
    parser.add_argument("--recompute", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--sequence-tokens", type=int, default=4096, help="of each packed sequence")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of timed steps")
    parser.add_argument("--minutes", type=float, default=7.5, help="after which no other case begins")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit("there is no CUDA device; --device cpu --sizes tiny --tokens 256 only tries the program")
    origin, last_start = provenance(), time.monotonic() + 60 * args.minutes
    rows: list[dict[str, Any]] = []
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        for level, size in itertools.product(args.recompute, args.sizes):
            if time.monotonic() > last_start:
                rows += ({"size": size, "recompute": level, "tokens": n, "failed": NO_TIME} for n in args.tokens)
                continue
            for row in measure(size, level, meshes, args):
                rows.append(row)
                print(summary(row), file=sys.stderr, flush=True)
            gc.collect()  # sharded models refer to themselves
            if args.device == "cuda":
                torch.cuda.empty_cache()
    result = {
        "benchmark": "gpu-step",
        "about": "training steps on a device, with fused layers and with transformers'",
        **origin,
        "device": device_name(args.device),
        "peak_flops": peak_flops(device_name(args.device)),
        "versions": workload.versions(["torch", "transformers"]),
        "load_average": os.getloadavg()[0],
        "command": "python benchmarks/gpu_step.py " + " ".join(sys.argv[1:]),
        "settings": {"sequence_tokens": args.sequence_tokens, "repeats": args.repeats},
        "rows": rows,
    }
    print_result(result, RESULTS / "gpu-step.json" if args.device == "cuda" else None)
    if any("failed" in row and row["failed"] not in (OUT_OF_MEMORY, NO_TIME) for row in rows):
        sys.exit("some cases failed for another reason than memory or time")


def measure(size: str, level: str, meshes: Meshes, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of tokens; one that failed says why."""
    config, peak = model_config(size), peak_flops(device_name(args.device))
    trainer, failed = attempt(partial(Trainer, config, level, meshes))
    for tokens in sorted(args.tokens):
        count, rest = divmod(tokens, args.sequence_tokens)
        lengths = [args.sequence_tokens] * count + [rest] * (rest > 1)
        row = {"size": size, "recompute": level, "tokens": sum(lengths)}
        if trainer is not None:
            batch = micro_batch(lengths, config.vocab_size)
            steps, failed = attempt(partial(trainer.alternate, batch, args.repeats))
        if trainer is None or steps is None:
            trainer = None  # FSDP cannot go on after a step that broke off, and more tokens need more memory
            yield {**row, "failed": failed}
            continue
        flops = step_flops(config, lengths)
        for kind in KINDS:
            predicted = predicted_bytes(config, level, lengths, is_fused=kind == "fused", device_type=args.device)
            row[kind] = described(steps[kind], tokens=sum(lengths), flops=flops, peak=peak, predicted=predicted)
        pairs = zip(steps["fused"], steps["eager"], strict=True)
        ratio = statistics.median(one.seconds / other.seconds for one, other in pairs)
        yield {**row, "ratio": ratio, "attention": trainer.policy.kernel}


def attempt(work: Callable[[], Result]) -> tuple[Result | None, str]:
    """(result, "") or (None, why there is none); with the reason, all that the work held is let go."""
    try:
        return work(), ""
    except torch.OutOfMemoryError:
        return None, OUT_OF_MEMORY
    except Exception as error:  # the other cases are worth as much
        return None, f"{type(error).__name__}: {error}".partition("\n")[0]


@dataclass(frozen=True, slots=True)
class Step:
    """One step as it was measured."""

    phases_s: dict[str, float]
    peak_bytes: int  # 0 on a CPU

    @property
    def seconds(self) -> float:
        """The time of all phases together."""
        return sum(self.phases_s.values())


@dataclass(slots=True)
class Clock:
    """The moments at which the phases of a step end, on the device's own clock."""

    on_gpu: bool
    marks: list[tuple[str, Any]] = field(default_factory=list)

    def mark(self, name: str) -> None:
        """A phase ends here, as far as the device has come by then."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.marks.append((name, event if self.on_gpu else time.perf_counter()))

    def take(self) -> dict[str, float]:
        """The seconds of each phase after the first mark."""
        if self.on_gpu:
            torch.cuda.synchronize()
        pairs, self.marks = list(itertools.pairwise(self.marks)), []
        if self.on_gpu:
            return {name: before.elapsed_time(after) / 1e3 for (_, before), (name, after) in pairs}
        return {name: after - before for (_, before), (name, after) in pairs}


class Trainer:
    """A policy with random weights and its optimizer, whose layers can be exchanged between steps."""

    def __init__(self, config: Qwen3Config, level: str, meshes: Meshes) -> None:
        self.device = torch.device(meshes.training.device_type)
        dtype = compute_dtype("auto", self.device.type)
        with self.device:
            model = AutoModelForCausalLM.from_config(
                config, attn_implementation=IMPLEMENTATION, dtype=torch.float32
            ).eval()
        kernel = choose_kernel("auto", self.device.type, dtype)
        self.policy = Policy(
            model,
            kernel=fastest_varlen(model) if kernel == "varlen" else kernel,
            temperature=1.0,
            logits_chunk_tokens=ModelConfig(path=".").logits_chunk_tokens,
        )
        eager = {module: type(module) for module in model.modules()}
        set_classes(fused_layers(model))
        self._layers: dict[nn.Module, dict[str, Any]] = {
            module: {"eager": kind, "fused": type(module)} for module, kind in eager.items() if type(module) is not kind
        }
        shard_policy(self.policy, meshes.model, dtype=dtype, offload=None, reshard_root=False)
        prefetch_layers(decoder_layers(model), num_ahead=1)
        if level != "none":
            checkpoint_layers(model, decoder_layers(model), recomputed=level, every_layers=1)
        self._optimizer = make_optimizer(self.policy, OptimConfig(lr=1e-6))
        self._clock = Clock(self.device.type == "cuda")
        model.base_model.register_forward_hook(lambda *_: self._clock.mark("layers"))

    def alternate(self, batch: MicroBatch, repeats: int) -> dict[str, list[Step]]:
        """Steps of each kind in turn, after one of each that is not counted."""
        steps: dict[str, list[Step]] = {kind: [] for kind in KINDS}
        for _, kind in itertools.product(range(1 + repeats), KINDS):
            for module, kinds in self._layers.items():
                module.__class__ = kinds[kind]
            steps[kind].append(self.step(batch))
        return {kind: counted for kind, (_, *counted) in steps.items()}

    def step(self, batch: MicroBatch) -> Step:
        """Forward, backward and an update of the weights."""
        on_gpu = self.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        self._clock.mark("start")
        scores = self.policy(batch)
        self._clock.mark("head")
        (scores.logprobs * batch.loss_weights.to(self.device)).sum().neg().backward()
        self._clock.mark("backward")
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._clock.mark("optimizer")
        return Step(self._clock.take(), torch.cuda.max_memory_allocated() if on_gpu else 0)


def described(steps: list[Step], *, tokens: int, flops: int, peak: float | None, predicted: int) -> dict[str, Any]:
    """The figures of one kind of layers."""
    seconds = statistics.median(step.seconds for step in steps)
    measured = max(step.peak_bytes for step in steps)
    return {
        "steps_s": [step.seconds for step in steps],
        "tokens_per_s": tokens / seconds,
        "mfu": flops / seconds / peak if peak else None,
        "phase_fractions": {
            name: statistics.median(step.phases_s[name] / step.seconds for step in steps) for name in steps[0].phases_s
        },
        "peak_gib": measured / GIB if measured else None,
        "predicted_gib": predicted / GIB,
    }


def summary(row: dict[str, Any]) -> str:
    """One line of the table."""
    case = f"{row['size']:<5} {row['tokens']:>6} tokens, {row['recompute']:<9}"
    if "failed" in row:
        return f"{case}: {row['failed']}"
    kinds = []
    for kind in KINDS:
        figures = row[kind]
        mfu = f"{figures['mfu']:.3f} MFU, " if figures["mfu"] else ""
        peak = f"{figures['peak_gib']:.1f} GiB of " if figures["peak_gib"] else ""
        shares = ", ".join(f"{name} {share:.0%}" for name, share in figures["phase_fractions"].items())
        kinds.append(
            f"{kind} {figures['tokens_per_s']:,.0f} tokens/s, {mfu}{peak}{figures['predicted_gib']:.1f} GiB ({shares})"
        )
    return f"{case}: {'; '.join(kinds)}; ratio {row['ratio']:.3f}"


def model_config(size: str) -> Qwen3Config:
    """Qwen3's own shape of this size."""
    tiny = size == "tiny"
    return Qwen3Config(
        vocab_size=1024 if tiny else 151_936,
        head_dim=16 if tiny else 128,
        num_key_value_heads=2 if tiny else 8,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        architectures=["Qwen3ForCausalLM"],
        **SIZES[size],
    )


def micro_batch(lengths: list[int], vocabulary: int) -> MicroBatch:
    """Packed sequences of random tokens, of which all but each first are trained on alike."""
    draw = torch.Generator().manual_seed(0)
    weight = 1 / (sum(lengths) - len(lengths))
    sequences = [
        Sequence(
            index=index,
            token_ids=tuple(torch.randint(vocabulary, (length,), generator=draw).tolist()),
            loss_mask=(False,) + (True,) * (length - 1),
            rollout_logprobs=(0.0,) * length,
            reward=0.0,
        )
        for index, length in enumerate(lengths)
    ]
    return lay_end_to_end(sequences, dict.fromkeys(range(len(lengths)), weight))


def step_flops(config: Qwen3Config, lengths: list[int]) -> int:
    """FLOPs of forward and backward, without recomputation."""
    linear, quadratic = forward_flops(config, Model.read(config, ModelConfig(path=".")).shapes)
    return 3 * sum((linear + quadratic * length) * length for length in lengths)


def predicted_bytes(config: Qwen3Config, level: str, lengths: list[int], *, is_fused: bool, device_type: str) -> int:
    """The planner's bytes of such a step on the device: the fuller of forward-backward and optimizer."""
    cfg = SftConfig.model_validate(
        {
            "run": {"name": "gpu-step", "num_steps": 1},
            "model": {"path": "random", "gradient_checkpointing": level},
            "data": {"max_prompt_tokens": 1, "sources": [{"kind": "jsonl", "path": "random"}]},
            "sft": {"sequences_per_step": len(lengths), "max_response_tokens": max(lengths) - 1},
            "optim": {"lr": 1e-6},
            "pack": {"max_tokens_per_micro_batch": sum(lengths)},
        }
    )
    model, on_gpu = Model.read(config, cfg.model), device_type == "cuda"
    rank = predict(cfg, model, num_ranks=1, device_bytes=GIB, on_gpu=on_gpu).rank
    phases = training_phases(cfg, dataclasses.replace(rank, fuses_layers=is_fused))
    return max(phase.process_bytes for phase in phases if phase.name in ("forward-backward", "optimizer"))


def device_name(device_type: str) -> str:
    """Name what computes."""
    return torch.cuda.get_device_name() if device_type == "cuda" else "cpu"


def peak_flops(name: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device; None for one that is not in the table."""
    return next((peak for part, peak in PEAKS.items() if part in name), None)


if __name__ == "__main__":
    main()
