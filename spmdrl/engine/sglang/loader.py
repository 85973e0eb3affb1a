"""Load one bucket of a refit into the engine's model; runs inside SGLang's processes.

SGLang has a loader for flat buckets. It opens and closes a bucket's memory each time, which on a CPU takes longer than
the copy; it calls the model's loader for each bucket, which on a GPU takes several times as long as the copy; and it
answers before a device has copied, so that with several devices one of them might still be reading what the trainer
writes next. This one keeps the memory open from one refit to the next, repeats the copies of the first one, and waits.

Bytes read and written for each byte of weights in the engine's dtype: the trainer's gather reads its float32 shards (2
for bfloat16) and writes the bucket (1), and with several ranks sends, receives and places it (3); the copy here reads
the bucket and writes the model (2); digests read the bucket and the model once each (1 + 1). No way through a bucket
can do with less than the write of the bucket, its read, and the write of the model (3).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spmdrl.faults.files import replace_json
from spmdrl.model.fp8 import SCALES
from spmdrl.refit.bucket import Bucket, Entry
from spmdrl.refit.digest import digests

# The copies by which a model's own loader takes in a bucket, recorded once and repeated at every refit.
#
# A loader spends its time in Python: it resolves names, cuts and narrows, and then copies one tensor. What it copies
# where is the same at each refit. So at the first one every copy from the bucket into the model's memory is recorded,
# and from then on they are all done by one call.
#
# Weights of which anything else is done (computed from, skipped, loaded by another thread) keep to the loader, by
# name. If the loader reads the model's own memory, or writes to it what does not come from the bucket, all weights
# do. The exception is what norms have besides their weight, one more than it: such sums are recorded too.


_COPY = torch.ops.aten.copy_.default
_ZERO, _FILL = torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar
_ADD = torch.ops.aten.add_.Tensor

ByteRange = tuple[int, int]  # first byte, end
Derivation = tuple[Any, tuple[Any, ...]]  # an operator and its arguments, of which every tensor is the model's


@dataclass(frozen=True, slots=True)
class _BucketView:
    """A strided view of a bucket."""

    start: int  # bytes
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]

    @property
    def is_contiguous(self) -> bool:
        """True when it leaves no gaps and keeps the order."""
        return self.stride == torch.empty(self.size, device="meta").stride()

    @property
    def place(self) -> ByteRange:
        """The bytes of the bucket that it spans."""
        return self.start, self.start + _span(self.size, self.stride) * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """Make the view, of a bucket in memory `flat` [num_bytes] uint8."""
        start, end = self.place
        return flat[start:end].view(self.dtype).as_strided(self.size, self.stride)


@dataclass(frozen=True, slots=True)
class _ModelTensor:
    """A tensor of the model, with its signature when the copies were recorded."""

    tensors: dict[str, Any]  # a module's parameters or buffers
    name: str
    signature: tuple[Any, ...]


class CopyPlan:
    """One bucket's way into a model."""

    def __init__(
        self,
        fills: Sequence[tuple[Tensor, float]],
        copies: Sequence[tuple[Tensor, _BucketView]],
        derivations: Sequence[Derivation],
        loaded: Sequence[Entry],
        targets: Sequence[_ModelTensor],
    ) -> None:
        """`fills`, `copies` and then `derivations` write to disjoint parts of the memory of `targets`; `loaded` are
        left to the loader."""
        self.loaded = tuple(loaded)
        self._fills, self._derivations, self._targets = fills, derivations, targets
        # A device does a list of contiguous tensors, of one dtype on each side, in few launches.
        self._groups: dict[tuple[Any, ...], list[tuple[Tensor, _BucketView]]] = {}
        for target, source in copies:
            is_dense = target.is_contiguous() and source.is_contiguous
            self._groups.setdefault((target.dtype, source.dtype, is_dense), []).append((target, source))

    @classmethod
    def record(cls, model: Any, entries: Sequence[Entry], flat: Tensor) -> CopyPlan:
        """Let the model's loader load a bucket in memory `flat` [num_bytes] uint8, and record what it does."""
        tensors = list(_tensors_of(model))
        recorder = _CopyRecorder(flat, [one.tensors[one.name] for one in tensors])
        with recorder:
            model.load_weights([(entry.name, entry.view(flat)) for entry in entries])
        targets = [target for target, _ in (*recorder.fills, *recorder.copies)] + recorder.derived
        if not recorder.can_be_repeated or not _are_disjoint(map(_memory_of, targets)):
            return cls([], [], [], entries, [])
        places = [source.place for _, source in recorder.copies]
        loaded = [entry for entry in entries if _meet(_place(entry), recorder.used) or not _meet(_place(entry), places)]
        left_places = [_place(entry) for entry in loaded]
        copies = [(target, source) for target, source in recorder.copies if not _meet(source.place, left_places)]
        written = {target.untyped_storage().data_ptr() for target in targets}
        return cls(
            recorder.fills,
            copies,
            recorder.derivations,
            loaded,
            [one for one in tensors if one.tensors[one.name].untyped_storage().data_ptr() in written],
        )

    def are_valid(self) -> bool:
        """Return True as long as none of the model's tensors was replaced, moved or laid out in another way."""
        return all(_signature_of(one.tensors.get(one.name)) == one.signature for one in self._targets)

    @torch.no_grad()
    def repeat(self, model: Any, flat: Tensor) -> None:
        """Load the bucket in memory `flat` [num_bytes] uint8, which may be other memory than the first time."""
        for target, value in self._fills:
            target.fill_(value)
        for copies in self._groups.values():
            torch._foreach_copy_([target for target, _ in copies], [source.view(flat) for _, source in copies])
        for operator, arguments in self._derivations:
            operator(*arguments)
        if self.loaded:
            model.load_weights([(entry.name, entry.view(flat)) for entry in self.loaded])


class _CopyRecorder(TorchDispatchMode):
    """Records what is done with a bucket's memory and the model's, and does it."""

    def __init__(self, flat: Tensor, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self._bucket = flat.untyped_storage().data_ptr()
        self._first = flat.data_ptr()
        self._model = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self._computed: dict[int, Tensor] = {}  # from the bucket, by storage; no other takes its place
        self.copies: list[tuple[Tensor, _BucketView]] = []
        self.fills: list[tuple[Tensor, float]] = []
        self.derivations: list[Derivation] = []
        self.derived: list[Tensor] = []  # what they write, each once
        self.used: list[ByteRange] = []  # bytes of the bucket of which something else was done
        self.can_be_repeated = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not kwargs and self._derives(func, args):
            self.derivations.append((func, tuple(x.detach() if isinstance(x, Tensor) else x for x in args)))
        elif func is _COPY and self._is_models(args[0]):
            if self._is_buckets(args[1]):
                self.copies.append((args[0].detach(), self._source(args[1])))
            elif not self._is_computed(args[1]):
                self.can_be_repeated = False
        elif func in (_ZERO, _FILL) and self._is_models(args[0]):
            self.fills.append((args[0].detach(), args[1] if func is _FILL else 0.0))
        elif not _only_views(func):
            self._use([x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)], result)
        return result

    def _derives(self, func: Any, args: Sequence[Any]) -> bool:
        """Return True for a copy of what was loaded, and for a number that is added to such a copy."""
        if func is _COPY and self._is_models(args[0]) and self._is_models(args[1]):
            is_loaded = _signature_of(args[1]) in (_signature_of(target) for target, _ in self.copies)
            self.derived += [args[0].detach()] if is_loaded else []
            return is_loaded
        if func is not _ADD or isinstance(args[1], Tensor):
            return False
        return _signature_of(args[0]) in map(_signature_of, self.derived)

    def _use(self, tensors: Sequence[Tensor], result: Any) -> None:
        if any(map(self._is_models, tensors)):
            self.can_be_repeated = False
        self.used += [self._source(tensor).place for tensor in tensors if self._is_buckets(tensor)]
        if any(self._is_buckets(tensor) or self._is_computed(tensor) for tensor in tensors):
            made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            self._computed |= {tensor.untyped_storage().data_ptr(): tensor for tensor in made}

    def _is_models(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._model

    def _is_buckets(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self._bucket

    def _is_computed(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._computed

    def _source(self, tensor: Tensor) -> _BucketView:
        return _BucketView(tensor.data_ptr() - self._first, tensor.dtype, tensor.shape, tensor.stride())


def _only_views(func: Any) -> bool:
    """Return True for operators that return nothing but views, and change nothing."""
    aliases = [one.alias_info for one in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _tensors_of(model: nn.Module) -> Iterator[_ModelTensor]:
    """Yield the parameters and buffers of a model, tied ones once for each name."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield _ModelTensor(tensors, name, _signature_of(tensor))


def _signature_of(tensor: Tensor | None) -> tuple[Any, ...]:
    return () if tensor is None else (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Count the elements from the first to the last of a strided tensor that is not empty."""
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def _place(entry: Entry) -> ByteRange:
    return entry.start, entry.start + entry.num_bytes


def _memory_of(tensor: Tensor) -> ByteRange:
    start = tensor.data_ptr()
    return start, start + (_span(tensor.shape, tensor.stride()) * tensor.element_size() if tensor.numel() else 0)


def _meet(one: ByteRange, others: Sequence[ByteRange]) -> bool:
    """Return True when the interval and any of the others have bytes in common."""
    return any(start < one[1] and one[0] < end for start, end in others)


def _are_disjoint(intervals: Iterable[ByteRange]) -> bool:
    in_order = sorted(intervals)
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(in_order))


PATH = f"{__name__}.load_bucket"  # by which SGLang finds it
LIST_VARIABLE = "SPMDRL_SCALES"  # of the engine's processes: the file for `note_scales`

_open: dict[int, Tensor] = {}  # the trainer's buffers, by number; while a tensor lives, torch does not open it again
_copies: dict[tuple[int, str], CopyPlan] = {}  # by model and description


class DigestRequests:
    """A rank's requests to its process of the engine: which digests certain weights have after each bucket.

    A request is a file with the weights' names, which is there when the bucket is loaded; the answer is a file next to
    it. What is hashed is the engine's own memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, number: int) -> str:
        """Name the file of the request about bucket `number`."""
        return str(self._folder / f"{number}.names")

    def ask(self, number: int, names: Iterable[str]) -> None:
        Path(self.path(number)).write_text(json.dumps(list(names)), encoding="utf-8")

    def take_answers(self) -> dict[str, str]:
        """Return the digest of every weight of the model that was asked for; "" for those that nobody asked for."""
        found: dict[str, str] = {}
        for path in self._folder.glob("*.digests"):
            found |= {
                name: value for name, value in json.loads(path.read_bytes()).items() if value or name not in found
            }
        for path in self._folder.iterdir():
            path.unlink()
        return found


def describe_bucket(bucket: Bucket, *, buffer: int, stays_open: bool, request: str | None = None) -> str:
    """Describe a bucket in buffer number `buffer` for `load_bucket`. Only memory on the engine's kind of device can
    stay open: SGLang copies other memory to its device before it gets here. `request` is one of `DigestRequests`."""
    entries = [
        (entry.name, list(entry.shape), str(entry.dtype).removeprefix("torch."), entry.start)
        for entry in bucket.flat_entries
    ]
    return json.dumps({"buffer": buffer, "stays_open": stays_open, "request": request, "entries": entries})


def load_bucket(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load one bucket, given as its description (instead of a name) and its memory [num_bytes] uint8."""
    ((description, flat),) = named_tensors
    about = json.loads(description)
    if about["stays_open"]:
        _open[about["buffer"]] = flat
    key = id(model), description
    if key in _copies and _copies[key].are_valid():
        _copies[key].repeat(model, flat)
    else:
        entries = [
            Entry(name, torch.Size(shape), getattr(torch, dtype), start)
            for name, shape, dtype, start in about["entries"]
        ]
        _copies[key] = CopyPlan.record(model, entries, flat)
    if about["request"] is not None:
        _answer(model, Path(about["request"]))
    if flat.is_cuda:
        torch.cuda.current_stream().synchronize()


def note_scales(model: nn.Module, file: Path) -> None:
    """Write the names of a model's scales of blocks, which are its list of weights in e4m3.

    Every device of an engine writes the same file, perhaps while it is read: it is whole at any time."""
    replace_json(file, [name for name, _ in model.named_parameters() if name.endswith(SCALES)])


def _answer(model: Any, request: Path) -> None:
    """Write the digests of the weights that are asked for, if any are."""
    try:
        names = json.loads(request.read_bytes())
    except FileNotFoundError:
        return
    weights = dict(model.named_parameters()) | _persistent_buffers(model)
    weights = {name: tensor for name, tensor in weights.items() if not _is_unit_scale(name, tensor)}
    asked = digests({name: [weights[name]] for name in names if name in weights})
    answer = dict.fromkeys(weights, "") | asked
    request.with_suffix(".digests").write_text(json.dumps(answer), encoding="utf-8")


def _is_unit_scale(name: str, tensor: Tensor) -> bool:
    """Return True for what keys or values in few bits are multiplied with where that is 1; no checkpoint has it."""
    return name.endswith((".attn.k_scale", ".attn.v_scale")) and tensor.item() == 1


def _persistent_buffers(model: Any) -> dict[str, Tensor]:
    """The buffers that belong to a model's weights, which tables for rotary embeddings, for example, do not."""
    return {
        f"{prefix}.{name}" if prefix else name: tensor
        for prefix, module in model.named_modules()
        for name, tensor in module._buffers.items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    }
