"""Reads what torch's distributed checkpoints pickle, as data: their files cannot make this process run anything."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem

from spmdrl.types import UserError

_METADATA = ".metadata"
_KNOWN = {
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "pathlib._local": {"Path", "PosixPath", "PurePosixPath"},  # where Python 3.13 has them
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
}


def load_data_only(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None = None) -> None:
    """`dcp.load` into `state`, in place, for what may have been tampered with. Every rank of the group must call this.

    Raises UserError when the checkpoint's metadata is not there, damaged, or names something that could run.
    """
    reader = DataOnlyReader(folder)
    reader.read_metadata()  # by ourselves first: torch wraps what its readers raise
    dcp.load(state, storage_reader=reader, planner=DataOnlyPlanner(), process_group=group)


class DataOnlyReader(FileSystemReader):
    """A FileSystemReader that refuses metadata in which anything but a checkpoint's own types is named.

    torch unpickles the metadata, which may call whatever it names. Raises UserError.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """See torch's."""
        path = self._folder / _METADATA
        try:
            metadata = _DataUnpickler(io.BytesIO(path.read_bytes())).load()
        except OSError as error:
            raise UserError(f"the checkpoint {self._folder} cannot be read: {error}") from error
        except UserError as error:
            raise UserError(f"the checkpoint {self._folder} is not one of ours: {error}") from error
        except Exception as error:  # whatever bytes can do to an unpickler
            raise UserError(f"the checkpoint {self._folder} is damaged: {_METADATA}: {error}") from error
        if not isinstance(metadata, Metadata):
            raise UserError(f"the checkpoint {self._folder} is not one of ours: {_METADATA} holds no metadata")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class DataOnlyPlanner(DefaultLoadPlanner):
    """A DefaultLoadPlanner that reads values that are no tensors as torch reads weights; it would unpickle them."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """See torch's."""
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            raise UserError(f"the checkpoint's {read_item.dest_index.fqn} is not one of ours: {error}") from error
        value.seek(0)
        super().load_bytes(read_item, value)  # the same bytes, which name nothing that could run


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if name not in _KNOWN.get(module, ()):
            raise UserError(f"{_METADATA} names {module}.{name}, which could run code")
        return super().find_class(module, name)
