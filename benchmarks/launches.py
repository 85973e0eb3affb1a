"""Count what an update of one micro-batch and a refit ask of a device at true sizes, by fake tensors; no timing.

    python benchmarks/launches.py --label after
    python benchmarks/launches.py --label trial --sizes 0.6b --layers 1 2 --out /tmp/trial.json

Qwen3's shapes on one device, bfloat16 with float32 shards, AdamW, `varlen`, nothing recomputed. The program itself
runs, on the emulated device of `tests/emulated_cuda`: every tensor there is a fake one, which has a shape and no
values, and Triton's kernels are counted instead of run. An operator of torch is one launch, or as many as `LAUNCHES`
says; its bytes are those of all tensors that it takes and gives. A wait is a read of the device's values by the host.
Another micro-batch of the same update adds to the gradients of the first. `least` says what could be done.

Writes a row for each size and number of layers, in place of those of the same label. Needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.machinery
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks/results/launches.json"
LAYERS = {"0.6b": 28, "4b": 36}
SEQUENCE_TOKENS = 1024
FORWARD, HEAD, LOSS, HEAD_BACKWARD, BACKWARD, REST = (
    *("layers forward", "head forward", "loss", "head backward", "layers backward"),
    "rest of an update",
)
# Operators that are not one launch on CUDA, by the kernels, copies and fills of torch 2.14.
LAUNCHES = {
    **dict.fromkeys(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "resize_"), 0),
    **dict.fromkeys(("detach", "alias", "lift_fresh", "set_", "record_stream", "_unsafe_view", "device"), 0),
    **dict.fromkeys(("select_backward", "slice_backward", "constant_pad_nd", "index_copy", "_varlen_attn"), 2),
    "_varlen_attn_backward": 3,  # beside the fill of its random state, which is an operator
}


def main() -> None:
    """Count each size in a process of its own, on the emulated device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--layers", nargs="+", type=int, help="1, 2 and all of the model, unless given")
    parser.add_argument("--tokens", type=int, default=16_384, help="of a micro-batch")
    parser.add_argument("--label", required=True, help="of the rows")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--case", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.case:
        for row in measure(args.sizes[0], args.layers, args.tokens):
            print(json.dumps(row), flush=True)
        return
    from results import provenance, write_result

    rows: list[dict[str, Any]] = []
    for size in args.sizes:
        for row in on_the_emulated_device(size, args.layers or [1, 2, LAYERS[size]], args.tokens):
            rows.append({"label": args.label, **row, **provenance()})
            print(summary(row), file=sys.stderr)
    known = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    others = [row for row in known if row["label"] != args.label]
    write_result(args.out, {"benchmark": "launches", "rows": others + rows})


def on_the_emulated_device(size: str, layers: list[int], tokens: int) -> list[dict[str, Any]]:
    """Start a process that has devices, and return its rows."""
    path = [ROOT / "tests/emulated_cuda/startup", ROOT, ROOT / "benchmarks", os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(map(str, path)), "EMULATED_CUDA_DEVICES": "1", "EMULATED_CUDA_GIB": "80"}
    case = ["--case", "--label", "", "--sizes", size, "--tokens", str(tokens), "--layers", *map(str, layers)]
    done = subprocess.run(
        [sys.executable, __file__, *case], env=os.environ | variables, stdout=subprocess.PIPE, text=True, check=True
    )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def measure(size: str, depths: list[int], tokens: int) -> Iterator[dict[str, Any]]:
    """Yield a row for each number of layers; this process has a device that is emulated."""
    stand_in_for_triton()
    counter = make_counter()
    import torch
    from gpu_step import Trainer, micro_batch, model_config

    from spmdrl.config import LossConfig, OptimConfig, RefitConfig
    from spmdrl.dist.mesh import build_meshes
    from spmdrl.dist.session import spmd_session
    from spmdrl.engine.torch.engine import TorchEngine
    from spmdrl.learn.learner import Learner
    from spmdrl.learn.objective import PolicyObjective
    from spmdrl.learn.update import update
    from spmdrl.model.logprobs import _TiledHead
    from spmdrl.refit.refit import Refit

    in_phase = counter.in_phase
    for name, phase in (("forward", HEAD), ("backward", HEAD_BACKWARD)):
        setattr(_TiledHead, name, staticmethod(in_phase(phase, getattr(_TiledHead, name))))
    torch.Tensor.backward = in_phase(BACKWARD, torch.Tensor.backward)  # type: ignore[method-assign]
    lengths = [SEQUENCE_TOKENS] * (tokens // SEQUENCE_TOKENS)
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        meshes = build_meshes(world)
        for depth in depths:
            config = model_config(size)
            config.num_hidden_layers, config.layer_types = depth, config.layer_types[:depth]
            batch = dataclasses.replace(micro_batch(lengths, config.vocab_size), advantages=torch.zeros(tokens))
            with counter.fake, counter:
                policy = Trainer(config, "none", meshes).policy
                learner = Learner(
                    policy,
                    OptimConfig(lr=1e-6),
                    in_phase(LOSS, PolicyObjective(LossConfig())),
                    num_updates=9,
                    dtype=torch.bfloat16,
                )
                policy.forward = in_phase(FORWARD, policy.forward)  # type: ignore[method-assign]

                def updated(number: int) -> dict[str, SimpleNamespace]:
                    counter.phases = {}
                    update(learner, [[batch] * number], meshes, step=1)  # noqa: B023
                    return counter.phases

                updated(1)  # makes the optimizer's state
                once, twice = updated(1), updated(2)
                more = total(minus(twice[name], once[name]) for name in twice)
                engine = TorchEngine(config, device=world.device, dtype=torch.bfloat16, kernel="varlen", max_running=1)
                refit = Refit(policy, engine, meshes, RefitConfig(verify=2), dtype=torch.bfloat16)
                refit._done = 1  # digests read memory
                counter.phases = {}
                refit(version=2)
                moved = counter.phases[REST]
            yield {
                "size": size,
                "layers": depth,
                "tokens": tokens,
                "phases": {name: figures(count) for name, count in once.items()},
                "another micro-batch": figures(more),
                "refit": figures(moved) | {"buckets": len(refit._gatherer.buckets)},
                "least": least(config, tokens),
            }


def least(config: Any, tokens: int) -> dict[str, dict[str, float]]:
    """Return what layers and head need if each operator reads its inputs once and writes its results once.

    A layer forward: 4 products (q, k and v are one, gate and up are one), 2 norms that add to the residual stream, the
    rotation of heads with their norms, attention, SwiGLU. Backward: 2 products for each, and a kernel for each of the
    others. FSDP frees weights in between, so both passes cast them, in one launch each, and a last one writes their
    gradients in float32. The head has the tiles that it has: forward a product and a kernel for each; backward three
    products, of which two add to float32 sums, and a kernel, and a cast for each slab of the vocabulary.
    """
    d, i, n, v = config.hidden_size, config.intermediate_size, config.num_hidden_layers, config.vocab_size
    a, k = (heads * config.head_dim for heads in (config.num_attention_heads, config.num_key_value_heads))
    weights = d * (a + 2 * k) + a * d + 3 * d * i
    products = ((d, a + 2 * k), (a, d), (d, 2 * i), (i, d))  # widths of input and result
    # For each token, elements of 2 bytes: products, norms, rotation, attention, SwiGLU.
    forward = sum(x + y for x, y in products) + 2 * 4 * d + 2 * (a + k) + (2 * a + 2 * k) + 3 * i
    backward = sum(2 * x + 2 * y for x, y in products) + 2 * 4 * d + 3 * (a + k) + (4 * a + 4 * k) + 5 * i
    cast, cast_gradient = 4 + 2 + 2, 2 + 2 + 4  # bytes for each weight, with those of the products
    slabs, chunks = -(-v // 8192), -(-tokens // 2048)
    tiles, logits = slabs * chunks, 2 * tokens * v
    read = slabs * tokens * d + chunks * v * d  # elements of the inputs of a pass over all tiles
    return {
        FORWARD: part(n * 10, n * (2 * tokens * forward + cast * weights)),
        HEAD: part(2 * tiles, 2 * logits + 2 * read),
        HEAD_BACKWARD: part(4 * tiles + slabs, 5 * logits + (2 + 2 + 8) * read + (4 + 2) * v * d),
        BACKWARD: part(n * 15, n * (2 * tokens * backward + (cast + cast_gradient) * weights)),
    }


def part(launches: int, num_bytes: float) -> dict[str, float]:
    """Return what is written down of a part of the least."""
    return {"launches": launches, "gigabytes": round(num_bytes / 1e9, 2)}


def stand_in_for_triton() -> None:
    """Import the Triton kernels of the program with a stand-in for Triton: their launches are counted."""

    class Kernel:
        def __init__(self, function: Callable[..., None]) -> None:
            self._name = function.__name__

        def __getitem__(self, grid: Any) -> Kernel:
            return self

        def __call__(self, *args: Any, **options: Any) -> None:
            the_counter[0].add(self._name, [*args, args[0]] if self._name == "_gradient" else args)  # in place

    class Language(ModuleType):
        constexpr = staticmethod(lambda value=None: value)

    triton, language = ModuleType("triton"), Language("triton.language")
    triton.jit, triton.language = Kernel, language  # type: ignore[attr-defined]
    triton.cdiv = lambda x, y: -(-x // y)  # type: ignore[attr-defined]
    triton.next_power_of_2 = lambda n: 1 << max(n - 1, 0).bit_length()  # type: ignore[attr-defined]
    modules = {"triton": triton, "triton.language": language}
    before = {name: sys.modules.get(name) for name in modules}
    triton.__spec__ = importlib.machinery.ModuleSpec("triton", None)
    import torch  # noqa: F401  before there is a module by which it would think that Triton is here

    sys.modules |= modules
    from spmdrl.model import fused_triton, logits_tile_triton  # noqa: F401

    for name, module in before.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module


the_counter: list[Any] = []


def make_counter() -> Any:
    """Make the dispatch mode that counts; torch is imported here, on the emulated device alone."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    aten = torch.ops.aten

    class Counting(TorchDispatchMode):
        """Counts operators with fake tensors, and computes those of the host, of which the program reads values."""

        def __init__(self) -> None:
            super().__init__()
            self.fake = FakeTensorMode(allow_non_fake_inputs=True)
            self.phase, self.phases = REST, {}

        def in_phase(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(*args: Any, **options: Any) -> Any:
                before, self.phase = self.phase, phase
                try:
                    return function(*args, **options)
                finally:
                    self.phase = before

            return wrapped

        def add(self, name: str, tensors: Any, *, launches: int = 1, waits: int = 0) -> None:
            count = self.phases.setdefault(self.phase, SimpleNamespace(launches=0, waits=0, bytes=0, of=Counter()))
            count.launches += launches
            count.waits += waits
            count.of[name] += launches
            if launches:
                count.bytes += sum(x.numel() * x.element_size() for x in tensors if isinstance(x, torch.Tensor))

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            device = torch.device(kwargs.get("device") or "cpu").type
            if device == "cpu" and not any(isinstance(x, FakeTensor) for x in given):
                with unset_fake_temporarily():
                    return func(*args, **kwargs)
            name = func.overloadpacket.__name__
            if func is aten._local_scalar_dense.default:
                self.add(name, given, waits=1)
                return given[0].dtype.is_floating_point or 1  # True is 1.0, too
            results = func(*args, **kwargs)
            made = [x for x in tree_leaves(results) if isinstance(x, torch.Tensor)]
            is_read = func is aten._to_copy.default and "device" in kwargs and device == "cpu"
            if is_read:
                with unset_fake_temporarily():
                    results = torch.ones(made[0].shape, dtype=made[0].dtype)
            is_empty = bool(made) and not any(x.numel() for x in made)
            if not (func.is_view or is_empty or is_on_itself(func, given)):
                known = {id(x) for x in given}
                tensors = [*given, *(x for x in made if id(x) not in known)]
                if func._schema.name.endswith("_") and name != "copy_" and not name.startswith("_"):
                    tensors.append(given[0])  # which is read, too
                waits = int(is_read and not kwargs.get("non_blocking"))
                self.add(name, tensors, launches=LAUNCHES.get(name, 1), waits=waits)
            return results

    def is_on_itself(func: Any, given: list[Any]) -> bool:
        """True for `x[part] += y`, which ends with a copy of the part to itself."""
        if func is not aten.copy_.default:
            return False
        one, other = given
        places = [(x.untyped_storage()._cdata, x.storage_offset(), x.shape, x.dtype) for x in (one, other)]
        return places[0] == places[1]

    class RmsNorm(torch.autograd.Function):
        """torch's kernels on CUDA, of which the CPU has the parts."""

        @staticmethod
        def forward(ctx: Any, x: Any, weight: Any, eps: float) -> Any:
            ctx.save_for_backward(x, weight)
            out, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
            counter.add("rms_norm", [x, weight, out, rstd])
            return out

        @staticmethod
        def backward(ctx: Any, grad: Any) -> tuple[Any, Any, None]:
            x, weight = ctx.saved_tensors
            grads = torch.empty_like(x), torch.empty_like(weight)
            counter.add("rms_norm_backward", [grad, x, weight, grads[0]])
            counter.add("rms_norm_backward", [grad, x, grads[1]])
            return *grads, None

    counter = Counting()
    the_counter[:] = [counter]
    torch.nn.functional.rms_norm = lambda x, shape, weight, eps: RmsNorm.apply(x, weight, eps)
    # CUDA's kernel for the head's sums; only that there is one matters.
    counter.library = torch.library.Library("aten", "IMPL")
    counter.library.impl("addmm.dtype_out", lambda *_, **__: None, "CUDA")
    FakeTensor.tolist = lambda self: self.cpu().tolist()  # one copy, not one for each number
    return counter


def minus(one: SimpleNamespace, other: SimpleNamespace) -> SimpleNamespace:
    """Return what one has more than the other."""
    of = Counter(one.of)
    of.subtract(other.of)
    return SimpleNamespace(
        launches=one.launches - other.launches, waits=one.waits - other.waits, bytes=one.bytes - other.bytes, of=of
    )


def total(counts: Iterator[SimpleNamespace]) -> SimpleNamespace:
    """Add them up."""
    every = list(counts)
    of: Counter[str] = sum((count.of for count in every), Counter())
    return SimpleNamespace(
        **{name: sum(getattr(count, name) for count in every) for name in ("launches", "waits", "bytes")}, of=of
    )


def figures(count: SimpleNamespace) -> dict[str, Any]:
    """Return what is written down."""
    of = {name: number for name, number in count.of.most_common() if number}
    return {"launches": count.launches, "waits": count.waits, "gigabytes": round(count.bytes / 1e9, 2), "of": of}


def summary(row: dict[str, Any]) -> str:
    """Format a line."""
    parts = row["phases"] | {name: row[name] for name in ("another micro-batch", "refit")}
    each = ", ".join(
        f"{name} {count['launches']} ({count['waits']} waits, {count['gigabytes']} GB)" for name, count in parts.items()
    )
    return f"{row['size']} of {row['layers']} layers, {row['tokens']} tokens: {each}"


if __name__ == "__main__":
    main()
