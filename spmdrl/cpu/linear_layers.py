"""float32 linear layers on a CPU, by the kernels that are fastest there.

torch multiplies float32 matrices with MKL. oneDNN, which torch ships as well, is up to 2.5 times as fast on some
processors and slower on others, so a run measures both and says here which to use. Until then all is
MKL. oneDNN compiles a kernel for every shape it meets; rows are padded to a few sizes so that it meets few of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from spmdrl.config.strict import read_json, shown
from spmdrl.cpu.kernels_c import CannotCompile, compile_all, compiled_in_use, use_compiled, write_whole
from spmdrl.dist.collectives import gather_objects, raise_on_all_ranks
from spmdrl.faults.verdict import print_once_per_node
from spmdrl.model.fused import fused_layers
from spmdrl.model.load import load_model_config
from spmdrl.model.machine import processor, users_cache
from spmdrl.types import UserError

if TYPE_CHECKING:
    from spmdrl.report import RunFolder
    from spmdrl.run import Run

ProductKernel = Literal["mkl", "onednn"]

MIN_ROWS = 32  # for fewer, the cost of a call outweighs the faster kernel
MANY_ROWS = 256  # training has this many or more; decoding has fewer
_SIZES_PER_OCTAVE = 16  # to which rows are padded: 6 % more at most


@dataclass(frozen=True, slots=True)
class LinearKernels:
    """The kernel of each kind of product."""

    few_rows: ProductKernel = "mkl"  # x W^T with MIN_ROWS rows or more
    many_rows: ProductKernel = "mkl"  # the same with MANY_ROWS or more
    weight_gradient: ProductKernel = "mkl"  # grad^T x with MANY_ROWS or more

    @property
    def is_plain(self) -> bool:
        """True when `torch.nn.functional.linear` does the same."""
        return self.few_rows == self.many_rows == self.weight_gradient == "mkl"


class _InUse:
    kernels = LinearKernels()


def use_kernels(kernels: LinearKernels) -> LinearKernels:
    """Use these kernels from now on, in the whole process; returns those that were used before."""
    before, _InUse.kernels = _InUse.kernels, kernels
    return before


def kernels_in_use() -> LinearKernels:
    """Return the kernels that this process uses now."""
    return _InUse.kernels


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`: x [..., D], weight [V, D] give [..., V]."""
    if not _has_choice(x, weight):
        return F.linear(x, weight, bias)
    rows = x.flatten(0, -2)
    if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
        y = _Linear.apply(rows, weight, bias)
    else:
        y = product(rows, weight, bias, _kernel_for(len(rows)))
    return y.view(*x.shape[:-1], -1)


def outer(grad: Tensor, x: Tensor) -> Tensor:
    """The gradient of a linear layer's weight: grad [N, V] and x [N, D] give grad^T x [V, D]."""
    is_measured = _has_choice(x, grad) and len(x) >= MANY_ROWS
    return weight_gradient(grad, x, _InUse.kernels.weight_gradient if is_measured else "mkl")


def layers(model: nn.Module) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """Yield the model's linear layers, and the others where functions in C compute them, each with its new class.

    Fused in torch, norms, rotations and gates are no faster.
    """
    yield from ((module, _LinearLayer) for module in model.modules() if type(module) is nn.Linear)
    if compiled_in_use() and all(parameter.dtype == torch.float32 for parameter in model.parameters()):
        yield from fused_layers(model)


class _LinearLayer(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


def product(x: Tensor, weight: Tensor, bias: Tensor | None, kernel: ProductKernel) -> Tensor:
    """x W^T + b by a kernel: x [N, D], weight [V, D] of any strides give [N, V]."""
    if kernel == "mkl":
        return F.linear(x, weight, bias)
    y: Tensor = torch.ops.mkldnn._linear_pointwise(_padded(x), weight, bias, "none", [], "")
    return y[: len(x)]


def weight_gradient(grad: Tensor, x: Tensor, kernel: ProductKernel) -> Tensor:
    """grad^T x by a kernel: grad [N, V], x [N, D] give [V, D]."""
    if kernel == "mkl":
        return grad.t() @ x
    whole = len(x) - len(x) % row_step(len(x))  # MKL computes the rest
    shaped = grad.new_empty(grad.shape[1], x.shape[1])  # only its shape is read
    parts = (part[:whole].contiguous().to_mkldnn() for part in (grad, x))
    total: Tensor = torch.ops.aten.mkldnn_linear_backward_weights(*parts, shaped, False)[0]
    return total if whole == len(x) else total.addmm_(grad[whole:].t(), x[whole:])


def _has_choice(x: Tensor, weight: Tensor) -> bool:
    # Cheapest tests first: every layer of every decode step comes here.
    return (
        x.numel() >= MIN_ROWS * x.shape[-1]
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and not _InUse.kernels.is_plain
    )


def _kernel_for(num_rows: int) -> ProductKernel:
    return _InUse.kernels.many_rows if num_rows >= MANY_ROWS else _InUse.kernels.few_rows


def row_step(num_rows: int) -> int:
    """Return the distance of the sizes that oneDNN gets around a number of rows: powers of two."""
    return max(MIN_ROWS, (1 << num_rows.bit_length() - 1) // _SIZES_PER_OCTAVE)


def _padded(rows: Tensor) -> Tensor:
    """Add rows of zeros up to one of the sizes that oneDNN gets."""
    num_rows, step = len(rows), row_step(len(rows))
    if num_rows % step == 0:
        return rows
    padded = rows.new_empty(-(-num_rows // step) * step, *rows.shape[1:])
    padded[:num_rows] = rows
    padded[num_rows:] = 0.0
    return padded


class _Linear(torch.autograd.Function):
    """y = x W^T + b, with dx = dy W and dW = dy^T x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias, _kernel_for(len(x)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            product(grad, weight.t(), None, _kernel_for(len(grad))) if needs_x else None,
            outer(grad, x) if needs_weight else None,
            grad.sum(0) if needs_bias else None,
        )


# The choice of a run's kernels: which ones multiply matrices fastest here, and whether layers are computed in C.
#
# The choice decides the last bits of results. So ranks agree on one, a run writes it into its folder and keeps it when
# it resumes, and the machine remembers what it measured, in a fraction of a second: the next run here chooses the same.


Shape = tuple[int, int]  # of a weight: outputs, inputs

BUDGET_S = 0.2
CACHE = "linear-kernels.json"
_MAX_SIZE = 512  # of either side of a weight: larger ones behave alike
_KINDS = tuple(kind.name for kind in fields(LinearKernels))
_FEW_ROWS = 128
_MAX_ROUNDS = 50
_KERNELS: tuple[ProductKernel, ...] = get_args(ProductKernel)
_GAIN = 0.9  # oneDNN must take less than this of MKL's time: near ties would fall differently each time


@contextmanager
def agree(run: Run[Any]) -> Iterator[None]:
    """Use the kernels that this run began with, or those that suit all of its ranks, while it is open.

    Every rank calls it. Raises UserError on every rank when the run began with functions in C that a rank cannot make.
    """
    before, was_compiled = use_kernels(_agree_on_kernels(run)), use_compiled(_agree_on_layers(run))
    try:
        yield
    finally:
        use_kernels(before)
        use_compiled(was_compiled)


def describe() -> dict[str, Any]:
    """Return the kernels in use, for machine.json."""
    return {"linear_kernels": asdict(kernels_in_use()), "layers_in_c": compiled_in_use()}


def _agree_on_kernels(run: Run[Any]) -> LinearKernels:
    """Return the kernels that this run began with, or the fastest ones of the first rank's processor."""
    chosen: LinearKernels | None = None
    with raise_on_all_ranks(run.meshes.world):
        if run.world.is_main:
            chosen = _recorded_kernels(run.folder) or choose_kernels(shapes_of(load_model_config(run.cfg.model)))
    agreed = gather_objects(run.meshes.world, chosen)[0]
    assert agreed is not None, "the first rank has not chosen"
    return agreed


def _agree_on_layers(run: Run[Any]) -> bool:
    """Return True when layers are to be computed in C: where this run started so, or all ranks can compile.

    Raises UserError on every rank when the run started so and a rank cannot.
    """
    recorded: bool | None = None
    with raise_on_all_ranks(run.meshes.world):
        if run.world.is_main:
            recorded = _recorded_layers(run.folder)
    problem: str | None = None
    notes: list[str] = []
    try:
        notes = compile_all()
    except CannotCompile as error:
        problem = str(error)
    found = gather_objects(run.meshes.world, (recorded, problem, notes))
    recorded = found[0][0]
    unable = {rank: why for rank, (_, why, _) in enumerate(found) if why}
    if run.world.is_main:
        for note in dict.fromkeys(note for _, _, theirs in found for note in theirs):  # ranks may share a cache
            print_once_per_node(note)
    if recorded and unable:
        rank, why = next(iter(unable.items()))
        raise UserError(
            f"{run.folder.machine}: this run has computed its layers in C so far, and rank {rank} cannot: {why}; or "
            "remove the file to go on without, which changes the last bits of results"
        )
    return not unable if recorded is None else recorded


def _recorded_layers(folder: RunFolder) -> bool | None:
    written = (folder.read_machine() or {}).get("layers_in_c")
    if written not in (None, True, False):
        raise UserError(f"{folder.machine}: layers_in_c is {written!r}, which is not true or false; remove the file")
    return written


def _recorded_kernels(folder: RunFolder) -> LinearKernels | None:
    written = (folder.read_machine() or {}).get("linear_kernels")
    if written is None:  # a new run, or one that began on other devices
        return None
    try:
        return kernels_of(written)
    except ValueError as error:
        raise UserError(f"{folder.machine}: linear_kernels: {error}; remove the file to choose them again") from error


def shapes_of(model_config: Any) -> list[Shape]:
    """The shapes of a decoder layer's linear weights, each at most _MAX_SIZE wide."""
    config = model_config.get_text_config()
    hidden = min(config.hidden_size, _MAX_SIZE)
    inner = min(getattr(config, "intermediate_size", None) or hidden, _MAX_SIZE)
    return list(dict.fromkeys([(hidden, hidden), (inner, hidden), (hidden, inner)]))


def choose_kernels(shapes: Sequence[Shape], cache: Path | None = None) -> LinearKernels:
    """Choose by what was measured earlier on a machine like this one, else by measuring.

    `cache` is the folder that remembers; None is the user's own.
    """
    known, key = (cache or users_cache()) / CACHE, _machine_and(shapes)
    remembered = _read(known)
    if key not in remembered:
        remembered[key] = measure(shapes)
        _write(known, remembered)
    return kernels_of(remembered[key])


def kernels_of(written: Any) -> LinearKernels:
    """Read kernels as `asdict` wrote them. Raises ValueError when they are not."""
    if not isinstance(written, dict) or {*written} != {*_KINDS} or any(one not in _KERNELS for one in written.values()):
        raise ValueError(f"{written} does not name a kernel for each of {', '.join(_KINDS)}")
    return LinearKernels(**written)


def measure(shapes: Sequence[Shape]) -> dict[str, ProductKernel]:
    """Time both kernels in turns on each kind of product over all shapes; returns the faster one of each kind.

    Each kind has a third of BUDGET_S; one that cannot be compared in that time stays with MKL. One thread measures: a
    run's other processes start at the same time, and a product on all cores would wait for the busiest.
    """
    if not torch.backends.mkldnn.is_available():
        return asdict(LinearKernels())
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {kind: _faster(kind, shapes, budget_s=BUDGET_S / len(_KINDS)) for kind in _KINDS}
    finally:
        torch.set_num_threads(num_threads)


def _faster(kind: str, shapes: Sequence[Shape], *, budget_s: float) -> ProductKernel:
    """Compare the fastest of a few rounds, which a busy machine disturbs least."""
    operands = []
    for outputs, inputs in shapes:
        rows = _FEW_ROWS
        if kind != "few_rows":  # as many as training has, unless the weight is so large that fewer take as long
            rows = min(max(2**26 // (outputs * inputs), 2 * MANY_ROWS), 4096)
            rows -= rows % row_step(rows)
        sizes = ((rows, inputs), (rows, outputs), (outputs, inputs))
        operands.append([torch.ones(size) for size in sizes])
    deadline = time.perf_counter() + budget_s
    best: dict[ProductKernel, float] = {}
    for number in range(_MAX_ROUNDS + 1):  # the first one compiles
        for kernel in _KERNELS:
            began = time.perf_counter()
            if began > deadline and number:
                break
            for x, grad, weight in operands:
                if kind == "weight_gradient":
                    weight_gradient(grad, x, kernel)
                else:
                    product(x, weight, None, kernel)
            if number:
                best[kernel] = min(best.get(kernel, float("inf")), time.perf_counter() - began)
    is_measured = best.keys() == set(_KERNELS)
    return "onednn" if is_measured and best["onednn"] < _GAIN * best["mkl"] else "mkl"


def _machine_and(shapes: Sequence[Shape]) -> str:
    """Describe what the choice depends on."""
    sizes = " ".join(f"{outputs}x{inputs}" for outputs, inputs in shapes)
    # glibc's settings too: oneDNN copies, and how fast that is depends on whether freed memory stays mapped.
    allocator = " ".join(f"{name}{os.environ[name]}" for name in sorted(os.environ) if name.startswith("MALLOC_"))
    return f"{processor()}; torch {torch.__version__}; {sizes}; {allocator}"


def _read(path: Path) -> dict[str, Any]:
    """Read what is remembered. A file that cannot be read is no reason not to train: then nothing is."""
    if not os.path.lexists(path):
        return {}
    try:
        found = read_json(path, dict[str, Any])
        return {key: asdict(kernels_of(value)) for key, value in found.items()}
    except UserError as error:
        why = str(error)
    except ValueError as error:
        why = f"{shown(path)}: {error}"
    print_once_per_node(f"{why}; which kernels are fastest is measured again")
    return {}


def _write(path: Path, remembered: dict[str, Any]) -> None:
    """Write the file. A folder that cannot be written only costs the next run 0.2 s."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, (json.dumps(remembered, indent=1) + "\n").encode())
    except OSError as error:
        print_once_per_node(
            f"{shown(path)} cannot be written: {error.strerror}; the next run measures again which kernels are fastest"
        )
