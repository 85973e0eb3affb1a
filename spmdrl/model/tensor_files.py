"""Files of tensors that all who may read other files here may read: safetensors allows it to their owner only."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions that new files have here. Raises OSError and SafetensorError."""
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, None if header is None else dict(header))
    path.chmod(mode)


def open_to_readers(folder: Path) -> None:
    """Give the safetensors files in a folder, which a library has written, the permissions that new files have here."""
    probe = folder / ".permissions"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)
