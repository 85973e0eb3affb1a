"""Storage for torch's distributed checkpoints: files are hashed while they are written, and loading runs no code from
them."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import filesystem as _filesystem
from torch.distributed.checkpoint import metadata as _metadata
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from spmdrl.checkpoint.manifest import Digest


class Writer(FileSystemWriter):
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
        self._digests[Path(path).name] = Digest(stream.num_bytes, stream.sha256.hexdigest())

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
    """Reads what `Writer` wrote. The table of tensors is a pickle, which here may name only torch's classes for it."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
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
