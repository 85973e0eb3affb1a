"""Functions in C for float32 on a CPU, made on the machine that runs them.

torch has no kernels that norm, rotate or gate in one pass over a tensor on a CPU, and its own compiler takes tens of
seconds at each start. The C compiler that a machine has takes half a second once: what it makes is in the user's cache,
by source, compiler and processor, with its digest at its end. What is damaged there is made again, and a line says so.
Where there is no compiler, layers stay transformers', and the decoder has the same functions in torch
(`model/fused_plain.py`).

Their last bits differ from torch's. So ranks agree on whether to use them, and a run keeps to it when it resumes.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import operator
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spmdrl.model.attention_layer import AttentionLayer, SeenKeys
from spmdrl.model.cpu_room import EqualLengths
from spmdrl.model.machine import instructions, processor_name, users_cache

_SOURCES = Path(__file__).parent / "c"
# Sums may be reassociated, so that they fit vector registers; infinities and nan keep their meaning.
_FLAGS = (
    *("-O3", "-march=native", "-fopenmp", "-shared", "-fPIC"),
    *("-fassociative-math", "-fno-signed-zeros", "-fno-trapping-math", "-fno-math-errno"),
)
_C_TYPES: Mapping[str, Any] = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}
_LIMIT_S = 60.0
_DIGEST = hashlib.sha256  # of a library, behind its last byte, which no loader reads
_DIGEST_BYTES = 32
# Numbers that a thread reads or multiplies while it would wake another: fewer are not worth it, and on a busy machine
# the other one may come late.
_SERIAL = 2**17


class CannotCompile(Exception):
    """This machine cannot make the functions, or cannot load what it made. The message says why."""


class _InUse:
    is_on = False


@dataclass(frozen=True, slots=True)
class Library:
    """A loaded library, and a sentence about what had to be compiled again; empty where nothing had to."""

    functions: ctypes.CDLL
    note: str = ""


def compile_all() -> list[str]:
    """Compile and load every function, unless this machine has done so before. Raises CannotCompile.

    Returns sentences about what the cache had and could not be used.
    """
    return [note for source in sorted(_SOURCES.glob("*.c")) if (note := library(source.stem).note)]


def use_compiled(on: bool) -> bool:
    """Use compiled functions from now on, or torch's, in the whole process; returns what was used before."""
    before, _InUse.is_on = _InUse.is_on, on
    return before


def compiled_in_use() -> bool:
    """Return True when this process uses compiled functions."""
    return _InUse.is_on


def serves(*tensors: Tensor | None) -> bool:
    """Return True when compiled functions are in use, and take these tensors."""
    return _InUse.is_on and all(
        x is None or (x.dtype == torch.float32 and x.device.type == "cpu" and type(x) in (Tensor, nn.Parameter))
        for x in tensors
    )


def threads_for(amount: int) -> int:
    """Return how many threads are worth their start to read `amount` numbers, or for four times as many products."""
    return 1 if amount < _SERIAL else torch.get_num_threads()


@functools.cache
def library(name: str) -> Library:
    """Load `c/name.c`, and compile it first unless this machine has done so before. Raises CannotCompile."""
    compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
    if compiler is None:
        raise CannotCompile("there is no C compiler: install gcc")
    source = _SOURCES / f"{name}.c"
    try:
        sources = [file.read_text(encoding="utf-8") for file in (source, *sorted(_SOURCES.glob("*.h")))]
        # The path too: CC may be a script that adds flags of its own.
        made_by = (*_FLAGS, compiler, _run([compiler, "--version"]), processor_name(), instructions(), _DIGEST.__name__)
        described = "\n".join([*sources, *made_by])
        file_name = f"{name}-{hashlib.sha256(described.encode()).hexdigest()[:32]}.so"
        note = ""
        try:
            known = _private_folder() / file_name
            if os.path.lexists(known):
                try:
                    return Library(_load_checked(known))
                except OSError as error:
                    note = f"{known} cannot be used: {error}; it was compiled again"
            return Library(_load(_compile(compiler, source, known)), note)
        except OSError as error:
            note = f"{users_cache()} cannot hold functions in C: {error}; they are compiled at each start"
            with tempfile.TemporaryDirectory() as temporary:  # what is loaded stays, the file need not
                return Library(_load(_compile(compiler, source, Path(temporary) / file_name)), note)
    except (OSError, subprocess.SubprocessError) as error:
        raise CannotCompile(f"{compiler} failed: {' '.join(str(error).split())}") from error


class CFunction:
    """A function of `c/SOURCE.c`, which returns 0, or something else when there is no memory for it."""

    def __init__(self, source: str, name: str, arguments: str) -> None:
        """`arguments` has a letter for each: p for the data of a tensor or None, and after those i for an integer and f
        for a float."""
        self._source, self._name, self._arguments = source, name, arguments
        self._num_tensors = arguments.count("p")

    def __call__(self, *arguments: Any) -> None:
        """Call it. Raises MemoryError."""
        tensors = arguments[: self._num_tensors]
        pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
        if self._loaded(*pointers, *arguments[self._num_tensors :]):
            raise MemoryError(f"there is no memory for {self._name} of {self._source}.c")

    @functools.cached_property
    def _loaded(self) -> Callable[..., int]:
        found = library(self._source).functions[self._name]
        found.argtypes, found.restype = [_C_TYPES[letter] for letter in self._arguments], ctypes.c_int
        return found


def write_whole(path: Path, content: bytes) -> None:
    """Write a file, complete or not at all, whatever ends the process or the machine. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with unfinished.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _compile(compiler: str, source: Path, target: Path) -> Path:
    """Write the library with its digest, complete or not at all."""
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    try:
        _run([compiler, *_FLAGS, "-o", str(unfinished), str(source), "-lm"])
        content = unfinished.read_bytes()
    finally:
        unfinished.unlink(missing_ok=True)
    write_whole(target, content + _DIGEST(content).digest())
    return target


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise OSError(done.stderr[-500:] or f"exit code {done.returncode}")
    return done.stdout


def _load_checked(path: Path) -> ctypes.CDLL:
    """Load a library of the cache. Raises OSError unless it is what this user has written there."""
    found = path.lstat()
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise OSError("it is not an ordinary file of this user")
    content = path.read_bytes()
    if _DIGEST(content[:-_DIGEST_BYTES]).digest() != content[-_DIGEST_BYTES:]:
        raise OSError("its content is not what was written")
    return _load(path)


def _load(path: Path) -> ctypes.CDLL:
    """Load a library; its threads are torch's, because the loader finds torch's OpenMP, which has the same name.

    Where a build of torch brings OpenMP under another name, there are two pools of threads: slower, and not wrong.
    """
    return ctypes.CDLL(str(path))


def _private_folder() -> Path:
    """Return a folder that only this user can write, because what lies in it is run. Raises OSError without one."""
    folder = users_cache() / "compiled"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.stat()
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise OSError(f"{folder} belongs to another user, or others can write there")
    return folder


# Functions in C for float32 on a CPU: norms, rotations and gates as `model/fused_plain.py` has them, and attention.
#
# Norms, rotations and gates read their inputs once and write their results once. Only the last dim of an input has to
# be contiguous; an input that is not so gets copied. Results are contiguous. Scores of attention exist for a few
# queries at a time.


_ROWS_PER_PART = 64  # as in c/fused.c

_RMS_NORM = CFunction("fused", "rms_norm", "ppppiifi")
_RMS_NORM_BACKWARD = CFunction("fused", "rms_norm_backward", "pppppppiii")
_ROTATE = CFunction("fused", "rotate", "pppppiiiiiiifi")
_ROTATE_BACKWARD = CFunction("fused", "rotate_backward", "ppppppppiiiiiiiiifi")
_SWIGLU = CFunction("fused", "swiglu", "pppiiiii")
_SWIGLU_BACKWARD = CFunction("fused", "swiglu_backward", "pppppiiiiii")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute `fused_plain.rms_norm`: x [..., D] and weight [D] give [..., D] and [..., 1]."""
    x, weight = x.contiguous(), weight.contiguous()
    width = x.shape[-1]
    out, rstd = torch.empty_like(x), x.new_empty(*x.shape[:-1], 1)
    if x.numel():
        _RMS_NORM(x, weight, out, rstd, x.numel() // width, width, eps, threads_for(x.numel()))
    return out, rstd


def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `fused_plain.rms_norm_backward`: the gradients of x [..., D] and weight [D]."""
    grad, x, weight = grad.contiguous(), x.contiguous(), weight.contiguous()
    width = x.shape[-1]
    num_rows = x.numel() // width
    grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight)
    parts = x.new_empty(_num_parts(num_rows), width)
    threads = threads_for(x.numel())
    _RMS_NORM_BACKWARD(grad, x, weight, rstd, grad_x, grad_weight, parts, num_rows, width, threads)
    return grad_x, grad_weight


def rotate(x: Tensor, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Compute `fused_plain.rotate`: x [T, H, D], weight [D] or None, cos and sin [T, D] give [T, H, D]."""
    x, cos, sin = _dense(x), _dense(cos), _dense(sin)
    out = x.new_empty(x.shape)
    sizes = (x.shape[0], x.shape[1], x.shape[2] // 2, *x.stride()[:2], cos.stride(0), sin.stride(0))
    _ROTATE(x, weight, cos, sin, out, *sizes, eps, threads_for(x.numel()))
    return out


def rotate_backward(
    grad: Tensor, x: Tensor | None, weight: Tensor | None, cos: Tensor, sin: Tensor, eps: float
) -> tuple[Tensor, Tensor | None]:
    """Compute `fused_plain.rotate_backward`: the gradients of x [T, H, D] and weight [D]."""
    grad, cos, sin = _dense(grad), _dense(cos), _dense(sin)
    heads = grad if x is None else _dense(x)
    grad_x = grad.new_empty(grad.shape)
    grad_weight = None if weight is None else torch.zeros_like(weight)
    parts = None if weight is None else grad.new_empty(_num_parts(len(grad)), len(weight))
    strides = (*grad.stride()[:2], *heads.stride()[:2], cos.stride(0), sin.stride(0))
    sizes = (grad.shape[0], grad.shape[1], grad.shape[2] // 2)
    tensors = (grad, heads, weight, cos, sin, grad_x, grad_weight, parts)
    _ROTATE_BACKWARD(*tensors, *sizes, *strides, eps, threads_for(grad.numel()))
    return grad_x, grad_weight


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Compute `fused_plain.swiglu`: gate and up [..., I] give [..., I]."""
    gate_rows, up_rows = _rows(gate), _rows(up)
    out = gate.new_empty(gate.shape)
    strides = (gate_rows.stride(0), up_rows.stride(0))
    _SWIGLU(gate_rows, up_rows, out, *gate_rows.shape, *strides, threads_for(out.numel()))
    return out


def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `fused_plain.swiglu_backward`: the gradients of gate and up."""
    rows = tuple(_rows(x) for x in (grad, gate, up))
    grad_gate, grad_up = gate.new_empty(gate.shape), up.new_empty(up.shape)
    strides = tuple(x.stride(0) for x in rows)
    _SWIGLU_BACKWARD(*rows, grad_gate, grad_up, *rows[0].shape, *strides, threads_for(grad.numel()))
    return grad_gate, grad_up


def _num_parts(num_rows: int) -> int:
    return -(-num_rows // _ROWS_PER_PART)


def _dense(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _rows(x: Tensor) -> Tensor:
    """View [..., I] as [N, I], or copy what has no such view."""
    return _dense(x.flatten(0, -2) if x.ndim > 1 else x[None])


_ATTEND = CFunction("attention", "attend", "pppppppiiiiiiiiiiifi")
_ATTEND_TO_CACHE = CFunction("attention", "attend_to_cache", "pppppiiiiiiiiiiiifi")
_ATTEND_NEWEST = CFunction("attention", "attend_newest", "pppppppppiiiiiiiiiiiffi")
_ATTEND_BACKWARD = CFunction("attention", "attend_backward", "ppppppppiiiiiiiiiiiiifi")


def attend(q: Tensor, k: Tensor, v: Tensor, seqlens: Sequence[int], scale: float) -> Tensor:
    """Causal attention within sequences: q [T, H, D], k and v [T, K, D] with K dividing H give [T, H, D]."""
    q, k, v = (_dense(x) for x in (q, k, v))
    out = q.new_empty(q.shape)
    strides = [stride for x in (q, k, v) for stride in x.stride()[:2]]
    starts = _starts(seqlens)
    sizes = (len(seqlens), *_sizes(q, k), *strides, max(seqlens), scale, _threads(q, seqlens))
    _ATTEND(q, k, v, out, starts, starts, None, *sizes)
    return out


def attend_to_rows(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    first_row: int,
    seqlens: Sequence[int],
    earlier: Sequence[int],
    scale: float,
) -> Tensor:
    """Attend with the last seqlens[i] tokens of row first_row + i of a cache to all tokens of that row, which are
    earlier[i] more: q [T, H, D] over keys and values [rows, K, capacity, D] gives [T, H, D].

    The two caches have the same strides, and whole tokens are neighbours.
    """
    assert keys.stride() == values.stride() and keys.stride()[2:] == (keys.shape[3], 1)
    q, width = _dense(q), keys.shape[3]
    out = q.new_empty(q.shape)
    strides = (*q.stride()[:2], *2 * (width, keys.stride(1)))
    lengths = [before + length for before, length in zip(earlier, seqlens, strict=True)]
    row_starts = torch.arange(first_row, first_row + len(seqlens)) * (keys.stride(0) // width)
    sizes = (len(seqlens), q.shape[1], keys.shape[1], width, *strides, max(lengths), scale)
    threads = threads_for(q.shape[1] * width * sum(map(operator.mul, seqlens, lengths)) // 4)
    _ATTEND(q, keys, values, out, _starts(seqlens), row_starts, torch.tensor(earlier), *sizes, threads)
    return out


def attend_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, seqlens: Sequence[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v."""
    grad, q, k, v = (_dense(x) for x in (grad, q, k, v))
    results = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    strides = [stride for x in (grad, q, k, v) for stride in x.stride()[:2]]
    sizes = (len(seqlens), *_sizes(q, k), *strides, max(seqlens), scale, _threads(q, seqlens))
    _ATTEND_BACKWARD(grad, q, k, v, *results, _starts(seqlens), *sizes)
    return results


def attend_to_cache(q: Tensor, keys: Tensor, values: Tensor, seen: SeenKeys, scale: float) -> Tensor:
    """Attend with the newest token of each row: q [n, H, D] over keys and values [n, K, L, D] give [n, H, D]."""
    q = _dense(q)
    keys, values = (x if x.stride()[2:] == (x.shape[3], 1) else x.contiguous() for x in (keys, values))
    out = q.new_empty(q.shape)
    strides = [stride for x in (q, keys, values) for stride in x.stride()[:2]]
    sizes = (len(q), q.shape[1], keys.shape[1], q.shape[2], *strides, seen.longest, seen.window or 0)
    threads = threads_for(q.numel() * seen.longest // 4)
    _ATTEND_TO_CACHE(q, keys, values, out, seen.lengths, *sizes, scale, threads)
    return out


def attend_newest(
    qkv: Tensor,
    norms: tuple[Tensor | None, Tensor | None],
    cos: Tensor,
    sin: Tensor,
    eps: float,
    keys: Tensor,
    values: Tensor,
    seen: SeenKeys,
    scale: float,
) -> Tensor:
    """Attend with the newest token of each row, and store its key and value: qkv [n, H + 2 K, D] gives [n, H, D].

    Queries and keys are normalized with `norms` [D], unless those are None, and rotated by the angles of cos and sin
    [n, D]. The two caches [rows, K, capacity, D] have the same strides, and whole tokens are neighbours.
    """
    assert keys.stride() == values.stride() and keys.stride()[2:] == (keys.shape[3], 1)
    num_rows, num_kv_heads, width = len(qkv), keys.shape[1], keys.shape[3]
    num_heads = qkv.shape[1] - 2 * num_kv_heads
    qkv, cos, sin = qkv.contiguous(), _dense(cos), _dense(sin)
    out = qkv.new_empty(num_rows, num_heads, width)
    strides = (qkv.stride(0), cos.stride(0), sin.stride(0), *keys.stride()[:2])
    sizes = (num_rows, num_heads, num_kv_heads, width, *strides, seen.longest, seen.window or 0)
    threads = threads_for(out.numel() * seen.longest // 4)
    _ATTEND_NEWEST(qkv, *norms, cos, sin, keys, values, out, seen.lengths, *sizes, scale, eps, threads)
    return out


def _starts(seqlens: Sequence[int]) -> Tensor:
    return torch.tensor([0, *accumulate(seqlens)], dtype=torch.int64)


def _sizes(q: Tensor, k: Tensor) -> tuple[int, int, int]:
    return q.shape[1], k.shape[1], q.shape[2]


def _threads(q: Tensor, seqlens: Sequence[int]) -> int:
    return threads_for(q.shape[1] * q.shape[2] * sum(length * length for length in seqlens) // 4)


# Causal attention of short sequences on a CPU: many sequences in one call, in C or as plain products.
#
# torch's fused kernel works on one sequence and one head at a time; below some hundred tokens its overhead is most of
# what it does. In C sequences may have any lengths; without a compiler a batch of sequences is two products. Backward
# computes the probabilities again, so that it saves no more than other kernels.
#
# For products, sequences of similar lengths form a batch, padded at their ends. No query sees the padding of its own
# sequence, because it comes later, so the results are exact.


MAX_TOKENS = 128  # of a sequence; at this length the fused kernel takes as long
_MAX_SCORES = 2**22  # numbers in one batch, which exist for a moment
_MAX_PADDED = 1.25  # times the tokens of a batch: more calls cost more than this much more work


def batches_of_similar_length(seqlens: Sequence[int], limit: int, *, num_heads: int) -> Iterator[list[int]]:
    """Group neighbouring sequences, in their order; those longer than `limit` only with others of equal length."""
    batch: list[int] = []
    longest = total = 0
    for length in seqlens:
        longest_then = max(longest, length)
        is_padded_too_much = longest_then * (len(batch) + 1) > _MAX_PADDED * (total + length)
        is_mixed = longest_then > limit and length != longest
        is_too_large = longest_then <= limit and (len(batch) + 1) * num_heads * longest_then**2 > _MAX_SCORES
        if batch and (is_padded_too_much or is_mixed or is_too_large):
            yield batch
            batch, longest, total = [], 0, 0
        batch.append(length)
        longest, total = max(longest, length), total + length
    if batch:
        yield batch


def attend_packed(
    q: Tensor, k: Tensor, v: Tensor, seqlens: list[int], layer: AttentionLayer, equal_lengths: EqualLengths
) -> Tensor:
    """Attend within sequences: short ones together, where they are faster so, and others by `equal_lengths`.

    q is [T, H, D], k and v [T, K, D], as many keys as queries, and no sinks; the result is [T, H, D].
    """
    limit = MAX_TOKENS if layer.window is None else min(MAX_TOKENS, layer.window)
    if max(seqlens) <= limit and serves(q, k, v):
        return attend_short(q, k, v, seqlens, layer.scale)
    outputs, start = [], 0
    for batch in batches_of_similar_length(seqlens, limit, num_heads=q.shape[1]):
        tokens = slice(start, start + sum(batch))
        start = tokens.stop
        part = (q[tokens], k[tokens], v[tokens])
        is_short = max(batch) <= limit
        outputs.append(attend_short(*part, batch, layer.scale) if is_short else equal_lengths(*part, len(batch), layer))
    return torch.cat(outputs) if len(outputs) > 1 else outputs[0]


def attend_short(q: Tensor, k: Tensor, v: Tensor, seqlens: list[int], scale: float) -> Tensor:
    """Causal attention within sequences: q [T, H, D], k and v [T, K, D] with K dividing H give [T, H, D]."""
    return _short_attention(q, k, v, seqlens, scale)


class _Batch:
    """A batch of sequences as matrices: one for each sequence and key head; its query heads are neighbouring rows."""

    def __init__(self, seqlens: list[int], num_kv_heads: int, device: torch.device) -> None:
        self.length = max(seqlens)
        self._num_kv_heads = num_kv_heads
        self._places: Tensor | None = None  # of the tokens in the padded batch; None where nothing is padded
        self._num_padded = len(seqlens) * self.length
        if self._num_padded != sum(seqlens):
            lengths = torch.tensor(seqlens, device=device)
            self._places = (torch.arange(self.length, device=device) < lengths[:, None]).flatten().nonzero().flatten()

    def matrices(self, x: Tensor) -> Tensor:
        """[T, K G, D] to [n K, L G, D], 0 where padded."""
        if self._places is not None:
            x = x.new_zeros(self._num_padded, *x.shape[1:]).index_copy_(0, self._places, x)
        heads = x.unflatten(1, (self._num_kv_heads, -1)).unflatten(0, (-1, self.length))  # [n, L, K, G, D]
        return heads.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def tokens(self, x: Tensor) -> Tensor:
        """[n K, L G, D] back to [T, K G, D]."""
        heads = x.unflatten(1, (self.length, -1)).unflatten(0, (-1, self._num_kv_heads))  # [n, K, L, G, D]
        padded = heads.transpose(1, 2).flatten(2, 3).flatten(0, 1)
        return padded if self._places is None else padded[self._places]


def _probabilities(queries: Tensor, keys: Tensor, length: int, scale: float) -> Tensor:
    """softmax(scale Q K^T) without later keys: queries [B, L G, D] and keys [B, L, D] give [B, L G, L]."""
    later = queries.new_full((length, length), -torch.inf).triu_(1)
    mask = later.repeat_interleave(queries.shape[1] // length, dim=0)
    return F.softmax(torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale), dim=-1)


# An operator of its own, so that selective checkpointing keeps its result and not the scores inside.
@torch.library.custom_op("spmdrl::short_attention", mutates_args=())
def _short_attention(q: Tensor, k: Tensor, v: Tensor, seqlens: list[int], scale: float) -> Tensor:
    """P = softmax(scale Q K^T + mask), O = P V."""
    if serves(q, k, v):
        return attend(q, k, v, seqlens, scale)
    batch = _Batch(seqlens, k.shape[1], q.device)
    p = _probabilities(batch.matrices(q), batch.matrices(k), batch.length, scale)
    return batch.tokens(torch.bmm(p, batch.matrices(v)))


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.seqlens, ctx.scale = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    q, k, v = ctx.saved_tensors
    if serves(grad, q, k, v):
        return *attend_backward(grad, q, k, v, ctx.seqlens, ctx.scale), None, None
    batch = _Batch(ctx.seqlens, k.shape[1], grad.device)
    queries, keys, values = (batch.matrices(x) for x in (q, k, v))
    by_out = batch.matrices(grad)
    p = _probabilities(queries, keys, batch.length, ctx.scale)
    by_v = torch.bmm(p.transpose(1, 2), by_out)
    by_p = torch.bmm(by_out, values.transpose(1, 2))
    by_scores = torch._softmax_backward_data(by_p, p, -1, p.dtype).mul_(ctx.scale)
    by_q, by_k = torch.bmm(by_scores, keys), torch.bmm(by_scores.transpose(1, 2), queries)
    q, k, v = (batch.tokens(x) for x in (by_q, by_k, by_v))
    return q, k, v, None, None


_short_attention.register_autograd(_backward, setup_context=_keep)
