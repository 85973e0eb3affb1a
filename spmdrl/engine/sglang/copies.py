"""The copies by which a model's own loader takes in a bucket, noted once and repeated at every refit.

A loader spends its time in Python: it looks up names, cuts and narrows, and then copies one tensor. What it copies
where is the same at each refit. So the first time it is watched: every copy from the bucket into the model's memory is
noted, and from then on they are all done by one call.

Weights of which anything else is done (computed from, skipped, loaded by another thread) keep to the loader, by name.
If the loader reads the model's own memory, or writes to it what does not come from the bucket, all weights do. The
exception is what norms keep beside their weight, one more than it: such sums are noted too.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from spmdrl.refit.bucket import Entry

_COPY = torch.ops.aten.copy_.default
_ZERO, _FILL = torch.ops.aten.zero_.default, torch.ops.aten.fill_.Scalar
_ADD = torch.ops.aten.add_.Tensor

Interval = tuple[int, int]  # first byte, end
Derivation = tuple[Any, tuple[Any, ...]]  # an operator and its arguments, of which every tensor is the model's


@dataclass(frozen=True, slots=True)
class _Source:
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
    def place(self) -> Interval:
        """The bytes of the bucket that it spans."""
        return self.start, self.start + _span(self.size, self.stride) * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        """Make the view, of a bucket in memory `flat` [num_bytes] uint8."""
        start, end = self.place
        return flat[start:end].view(self.dtype).as_strided(self.size, self.stride)


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor of the model, and what it looked like when the copies were noted."""

    tensors: dict[str, Any]  # a module's parameters or buffers
    name: str
    looked: tuple[Any, ...]

    def is_same(self) -> bool:
        """Return False when the tensor was replaced, moved or laid out anew."""
        return _look(self.tensors.get(self.name)) == self.looked


class Copies:
    """One bucket's way into a model."""

    def __init__(
        self,
        fills: Sequence[tuple[Tensor, float]],
        copies: Sequence[tuple[Tensor, _Source]],
        derivations: Sequence[Derivation],
        loaded: Sequence[Entry],
        held: Sequence[_Held],
    ) -> None:
        """`fills`, `copies` and then `derivations` write to disjoint parts of the memory of `held`; `loaded` are left
        to the loader."""
        self.loaded = tuple(loaded)
        self._fills, self._derivations, self._held = fills, derivations, held
        # A device does a list of contiguous tensors, of one dtype on each side, in few launches.
        self._groups: dict[tuple[Any, ...], list[tuple[Tensor, _Source]]] = {}
        for target, source in copies:
            is_dense = target.is_contiguous() and source.is_contiguous
            self._groups.setdefault((target.dtype, source.dtype, is_dense), []).append((target, source))

    @classmethod
    def noted(cls, model: Any, entries: Sequence[Entry], flat: Tensor) -> Copies:
        """Let the model's loader load a bucket in memory `flat` [num_bytes] uint8, and note what it does."""
        held = list(_held_by(model))
        watch = _Watch(flat, [one.tensors[one.name] for one in held])
        with watch:
            model.load_weights([(entry.name, entry.view(flat)) for entry in entries])
        targets = [target for target, _ in (*watch.fills, *watch.copies)] + watch.derived
        if not watch.can_be_repeated or not _are_disjoint(map(_memory_of, targets)):
            return cls([], [], [], entries, [])
        places = [source.place for _, source in watch.copies]
        loaded = [entry for entry in entries if _meet(_place(entry), watch.used) or not _meet(_place(entry), places)]
        kept = [_place(entry) for entry in loaded]
        copies = [(target, source) for target, source in watch.copies if not _meet(source.place, kept)]
        written = {target.untyped_storage().data_ptr() for target in targets}
        return cls(
            watch.fills,
            copies,
            watch.derivations,
            loaded,
            [one for one in held if one.tensors[one.name].untyped_storage().data_ptr() in written],
        )

    def are_valid(self) -> bool:
        """Return True as long as the model's tensors are where they were."""
        return all(one.is_same() for one in self._held)

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


class _Watch(TorchDispatchMode):
    """Notes what is done with a bucket's memory and the model's, and does it."""

    def __init__(self, flat: Tensor, held: Sequence[Tensor]) -> None:
        super().__init__()
        self._bucket = flat.untyped_storage().data_ptr()
        self._first = flat.data_ptr()
        self._model = {tensor.untyped_storage().data_ptr() for tensor in held}
        self._computed: dict[int, Tensor] = {}  # from the bucket, by storage; kept, so that no other takes its place
        self.copies: list[tuple[Tensor, _Source]] = []
        self.fills: list[tuple[Tensor, float]] = []
        self.derivations: list[Derivation] = []
        self.derived: list[Tensor] = []  # what they write, each once
        self.used: list[Interval] = []  # bytes of the bucket of which something else was done
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
            is_loaded = _look(args[1]) in (_look(target) for target, _ in self.copies)
            self.derived += [args[0].detach()] if is_loaded else []
            return is_loaded
        return func is _ADD and not isinstance(args[1], Tensor) and _look(args[0]) in map(_look, self.derived)

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

    def _source(self, tensor: Tensor) -> _Source:
        return _Source(tensor.data_ptr() - self._first, tensor.dtype, tensor.shape, tensor.stride())


def _only_views(func: Any) -> bool:
    """Return True for operators that return nothing but views, and change nothing."""
    aliases = [one.alias_info for one in func._schema.returns]
    return bool(aliases) and all(alias is not None and not alias.is_write for alias in aliases)


def _held_by(model: nn.Module) -> Iterator[_Held]:
    """Yield the parameters and buffers of a model, tied ones once for each name."""
    for module in model.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    yield _Held(tensors, name, _look(tensor))


def _look(tensor: Tensor | None) -> tuple[Any, ...]:
    return () if tensor is None else (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())


def _span(size: Sequence[int], stride: Sequence[int]) -> int:
    """Count the elements from the first to the last of a strided tensor that is not empty."""
    return 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))


def _place(entry: Entry) -> Interval:
    return entry.start, entry.start + entry.num_bytes


def _memory_of(tensor: Tensor) -> Interval:
    start = tensor.data_ptr()
    return start, start + (_span(tensor.shape, tensor.stride()) * tensor.element_size() if tensor.numel() else 0)


def _meet(one: Interval, others: Sequence[Interval]) -> bool:
    """Return True when the interval and any of the others have bytes in common."""
    return any(start < one[1] and one[0] < end for start, end in others)


def _are_disjoint(intervals: Iterable[Interval]) -> bool:
    in_order = sorted(intervals)
    return all(end <= start for (_, end), (start, _) in itertools.pairwise(in_order))
