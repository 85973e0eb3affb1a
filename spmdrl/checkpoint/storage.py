"""Storage for torch's distributed checkpoints: files are hashed while they are written, and loading runs no code from
them."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import filesystem as _filesystem
from torch.distributed.checkpoint import metadata as _metadata
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map, tree_unflatten

from spmdrl.checkpoint.manifest import Digest
from spmdrl.learn.learner import Learner
from spmdrl.model.offload import HostBuffers
from spmdrl.model.tensor_parallel import local_part


class CheckpointWriter(FileSystemWriter):
    """Writes this rank's part of a state that is in host memory."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, per_thread_copy_ahead=0)  # nothing must be copied from a device
        self.digests: dict[str, Digest] = {}  # files that this rank has written, by name
        self.fs = _HashingFiles(self.digests)


class _HashingFiles(FileSystem):
    """A file system that hashes what is written. An OSError of the disk is raised unchanged: torch would replace it by
    an error of its own."""

    def __init__(self, digests: dict[str, Digest]) -> None:
        """`digests` receives the digest of each written file, by name."""
        self._digests = digests

    @contextmanager
    def create_stream(self, path: str | os.PathLike, mode: str) -> Generator[io.IOBase, None, None]:
        file = Path(path).open(mode)  # noqa: SIM115  closing it may fail a second time, which must be ignored
        stream = _HashingStream(cast(io.BufferedIOBase, file))
        try:
            yield cast(io.IOBase, stream)
            stream.close()
        except Exception:
            if stream.problem is None:
                raise
        finally:
            with suppress(OSError):  # after a full disk, closing fails again for the rest of the buffer
                file.close()
        if stream.problem is not None:
            raise OSError(stream.problem.errno, stream.problem.strerror, str(path))
        self._digests[Path(path).name] = Digest(num_bytes=stream.num_bytes, sha256=stream.sha256.hexdigest())

    def rename(self, path: str | os.PathLike, new_path: str | os.PathLike) -> None:
        super().rename(path, new_path)
        self._digests[Path(new_path).name] = self._digests.pop(Path(path).name)


class _HashingStream:
    """The part of a file's interface that torch uses to write."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        self._file = file
        self.sha256 = hashlib.sha256()
        self.num_bytes = 0
        self.problem: OSError | None = None

    def write(self, data: Any) -> int:
        self._attempt(lambda: self._file.write(data))
        self.sha256.update(data)
        size = memoryview(data).nbytes
        self.num_bytes += size
        return size

    def flush(self) -> None:
        self._attempt(self._file.flush)

    def close(self) -> None:
        self._attempt(self._file.close)

    def tell(self) -> int:
        return self.num_bytes

    def fileno(self) -> int:
        # The caller is about to fsync: everything that is buffered here must be in the file by then.
        self.flush()
        return self._file.fileno()

    def _attempt(self, work: Callable[[], object]) -> None:
        try:
            work()
        except OSError as error:
            self.problem = self.problem or error
            raise


class Reader(FileSystemReader):
    """Reads what `CheckpointWriter` wrote. The table of tensors is a pickle, which here may name only torch's classes
    for it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Read the table of tensors. Raises UnpicklingError for names that no such table has."""
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _TableUnpickler(file).load()
        if not isinstance(metadata, Metadata):
            raise pickle.UnpicklingError(f"its .metadata is no table of tensors, but {type(metadata).__name__}")
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        return metadata


class _TableUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = {
            "torch.distributed.checkpoint.metadata": {*_metadata.__all__, "_MEM_FORMAT_ENCODING"},
            _filesystem.__name__: {"_StorageInfo"},
            "torch": {"Size"},
            "torch.serialization": {"_get_layout"},
            "pathlib": {"PosixPath"},
            "pathlib._local": {"PosixPath"},
        }
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or name in known.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the checkpoint's .metadata names {module}.{name}, which does not belong there")


class LoadPlanner(DefaultLoadPlanner):
    """Reads values that are not tensors with torch's restricted unpickler."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        # Raises for anything but plain values; the parent class would unpickle everything.
        torch.load(value, weights_only=True)
        value.seek(0)
        super().load_bytes(read_item, value)


# The tensors of a checkpoint: the state of learners, in the form that torch's distributed checkpoints need.


Tree = dict[str, Any]

FOLLOWER = "follower-"  # comes before its name
WITHOUT_FROZEN = StateDictOptions(strict=False)  # to set weights of which those that are not trained are missing


@dataclass(frozen=True, slots=True)
class LearnerState:
    """The state dicts of a learner; they share its memory."""

    weights: dict[str, Any]
    optimizer: dict[str, Any]
    followers: dict[str, dict[str, Any]] = field(default_factory=dict)  # weights of the copies that follow, by name

    @classmethod
    def of(cls, learner: Learner) -> LearnerState:
        """Return a learner's state, to save it. Torch makes up a state for an optimizer that has taken no step, as if
        it had taken one; the optimizer does not keep it here."""
        has_state = bool(learner.optimizer.state)
        state = cls.to_fill(learner)
        if not has_state:
            learner.optimizer.state.clear()
        return state

    @classmethod
    def to_fill(cls, learner: Learner) -> LearnerState:
        """Return a learner's state, to load into it. An optimizer that has taken no step keeps the state that torch
        makes up.

        Otherwise torch would make it up again while setting the loaded state. An optimizer with its state on the host
        has only one memory for both, so the loaded state would be overwritten.
        """
        followers = {name: get_model_state_dict(one.model) for name, one in learner.followers.items()}
        optimizer = get_optimizer_state_dict(learner.model, learner.optimizer)
        return cls(trained_weights(learner.model), optimizer, followers)


def trained_weights(model: nn.Module) -> dict[str, Any]:
    """Return a model's weights and buffers by name, without those that are frozen; they share its memory."""
    frozen = {name for name, weight in model.named_parameters(remove_duplicate=False) if not weight.requires_grad}
    return {name: weight for name, weight in get_model_state_dict(model).items() if name not in frozen}


def tree_of(states: Mapping[str, LearnerState]) -> Tree:
    """Select what a checkpoint holds. Not the optimizer's settings, which each launch may change, nor its parameter
    groups, which depend on the ranks that the parameters are split over."""
    return {
        name: {
            "weights": state.weights,
            "optimizer": {"state": state.optimizer["state"]},
            **{f"{FOLLOWER}{of}": weights for of, weights in state.followers.items()},
        }
        for name, state in states.items()
    }


def in_chunks(tree: Tree) -> Tree:
    """Convert a tree to the form in which torch's checkpoints save it correctly; shares its memory."""
    return tree_map(_in_chunks, tree)


@torch.no_grad()
def copy_to_host(tree: Tree, buffers: HostBuffers) -> Tree:
    """Copy the tree with every local tensor into memory of `buffers`, which the next copy reuses."""
    leaves, shape = tree_flatten_with_path(tree)
    locals_ = {keystr(path): local_part(value) for path, value in leaves if isinstance(value, Tensor)}
    places = buffers.take({name: local.nbytes for name, local in locals_.items()})
    copies = {
        name: places[name].view(local.dtype).view(local.shape).copy_(local, non_blocking=True)
        for name, local in locals_.items()
    }
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return tree_unflatten([_with_local(value, copies.get(keystr(path))) for path, value in leaves], shape)


def num_bytes(tree: Tree) -> int:
    """Count the bytes of this rank's part of the tree."""
    leaves, _ = tree_flatten_with_path(tree)
    return sum(local_part(value).nbytes for _, value in leaves if isinstance(value, Tensor))


def _with_local(value: Any, copy: Tensor | None) -> Any:
    if isinstance(value, DTensor):
        return DTensor(copy, value._spec, requires_grad=False)
    return value if copy is None else copy


def _in_chunks(value: Any) -> Any:
    """Split a DTensor of which this rank holds two parts that are not adjacent; shares its memory. Other values are
    returned unchanged.

    Experts over tp are such tensors: a rank has a part of the gate projection and the same part of the up projection.
    """
    packed = _packed_axis(value)
    if packed is None:
        return value
    placement, local = value.placements[packed], value.to_local()
    size = value.shape[placement.dim] // placement.split_factor
    within = value.device_mesh.get_local_rank(packed) * size // value.device_mesh.size(packed)
    _, start = compute_local_shape_and_global_offset(value.shape, value.device_mesh, value.placements)
    parts = list(local.chunk(placement.split_factor, placement.dim))
    offsets = [
        (*start[: placement.dim], number * size + within, *start[placement.dim + 1 :]) for number in range(len(parts))
    ]
    return DTensor(LocalShardsWrapper(parts, offsets), value._spec, requires_grad=False)


def _packed_axis(value: Any) -> int | None:
    """Return the axis of a DTensor's mesh along which a rank's parts are not adjacent, if there is one."""
    if not isinstance(value, DTensor):
        return None
    for axis, placement in enumerate(value.placements):
        # If a second axis splits the same dimension, "strided" only tells the order of the two splits.
        if isinstance(placement, _StridedShard):
            dims = [getattr(other, "dim", None) for other in value.placements]
            if dims.count(placement.dim) == 1:
                return axis
    return None
