"""The pixels of images, once for each node: files in memory that all ranks of the node read."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from spmdrl.config.strict import shown
from spmdrl.types import Grid, ImageSpan, UserError
from spmdrl.workers.folders import SharedFolder, sweep

_SHARED_MEMORY = "/dev/shm"
_PREFIX = "spmdrl-images-"
_HEADER = struct.Struct("<q4q3q")  # dimensions, their sizes, the grid
_LOCK = ".lock"
_SHARES = 16
_FREE_FRACTION = 0.5  # of what is free in memory, where no setting says how much images may take


class StoreFull(UserError):
    """There is no room for an image, whatever it is."""


class ImageStore:
    """The pixels of images as the model's processor left them: files by digest in memory, one copy for each node.

    A digest names pixels and their grid. Any number of processes may put and get at the same time. Beyond `max_bytes`,
    the images that were not asked for the longest are removed; who has one in hand keeps it.
    """

    def __init__(self, folder: Path, *, max_bytes: int) -> None:
        """Processes with the same folder share the store. Raises UserError when the folder cannot be used."""
        try:
            self._shared = SharedFolder(str(folder))
            (folder / _LOCK).touch(0o600)
        except OSError as error:
            raise UserError(f"{shown(folder)} cannot keep images: {error.strerror}") from error
        self.folder = folder
        self.max_bytes = max_bytes
        self._unmeasured_bytes = 0  # that this process may still write before it adds up the files again

    def put(self, pixels: Tensor, grid: Grid) -> str:
        """Keep an image's pixels, [P, C] or [1, 3, H, W] float32, and return their digest, 32 hexadecimal digits.

        Raises StoreFull when there is no room.
        """
        sizes = (*pixels.shape, *(1,) * (4 - pixels.ndim))
        header = _HEADER.pack(pixels.ndim, *sizes, *grid)
        content = pixels.to(torch.float32).contiguous().numpy().data.cast("B")
        digest = hashlib.blake2b(header, digest_size=16)
        digest.update(content)
        file = self.folder / digest.hexdigest()
        if not self._touch(file):
            self._write(file, header, content)
            self._unmeasured_bytes -= len(header) + len(content)
            if self._unmeasured_bytes < 0:
                self._remove_oldest(but=file.name)
        return file.name

    def get(self, digest: str) -> Tensor | None:
        """Return an image's pixels; None where they are not here: never put on this node, or removed to make room."""
        file = self.folder / digest
        try:
            with file.open("rb") as opened:
                mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        except FileNotFoundError:
            return None
        self._touch(file)
        num_dimensions, *sizes = _HEADER.unpack_from(mapped)[:5]
        return torch.frombuffer(mapped, dtype=torch.float32, offset=_HEADER.size).view(sizes[:num_dimensions])

    def __contains__(self, digest: str) -> bool:
        """Return True where an image is here, and count that as its use."""
        return self._touch(self.folder / digest)

    def close(self) -> None:
        """Remove the images, unless another process of the run still reads them."""
        self._shared.close()

    def _write(self, file: Path, header: bytes, content: memoryview) -> None:
        """Write a file that appears whole or not at all."""
        try:
            with tempfile.NamedTemporaryFile(dir=self.folder, prefix=".", delete=False) as unfinished:
                try:
                    unfinished.write(header)
                    unfinished.write(content)
                    unfinished.flush()
                    os.rename(unfinished.name, file)
                except BaseException:
                    os.unlink(unfinished.name)
                    raise
        except OSError as error:
            raise StoreFull(
                f"{shown(self.folder)} cannot take an image of {len(content) / 2**20:.1f} MiB: {error.strerror}; lower "
                "data.image_store_gib or data.max_pixels, or give the container more shared memory (--shm-size)"
            ) from error

    @contextlib.contextmanager
    def _locked(self, kind: int) -> Iterator[None]:
        """Hold the lock of this node's processes and threads, which each use opens again."""
        descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, kind)
            yield
        finally:
            os.close(descriptor)

    def _touch(self, file: Path) -> bool:
        """Mark a file as used now; False if there is none. Nobody removes one that was found to be old before."""
        with self._locked(fcntl.LOCK_SH):
            try:
                os.utime(file)
            except FileNotFoundError:
                return False
            return True

    def _remove_oldest(self, *, but: str) -> None:
        """Remove the images that were used the longest ago until the others take no more than `max_bytes`."""
        with self._locked(fcntl.LOCK_EX):  # nobody uses an image between the look at its age and its end
            found: list[tuple[int, int, str]] = []
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):  # another process is making room as well
                        status = entry.stat()
                        found.append((status.st_mtime_ns, status.st_size, entry.name))
            excess = sum(size for _, size, _ in found) - self.max_bytes
            # Files are not added up for each new one: each of the processes may first fill its part of the room.
            self._unmeasured_bytes = max(0, -excess) // _SHARES
            for _, size, name in sorted(found):
                if excess > 0 and name != but and not name.startswith("."):
                    (self.folder / name).unlink(missing_ok=True)
                    excess -= size


def open_image_store(run_folder: Path, *, max_gib: float | None) -> ImageStore:
    """Open the store of a run on this node; the same for all of its ranks here.

    Without a limit it takes half of what is free. What runs that were killed have left is removed.
    """
    parent = _SHARED_MEMORY if os.path.isdir(_SHARED_MEMORY) else tempfile.gettempdir()
    sweep(parent, _PREFIX)
    run = hashlib.blake2b(os.fsencode(os.path.realpath(run_folder)), digest_size=8).hexdigest()
    status = os.statvfs(parent)
    free_bytes = status.f_bavail * status.f_frsize
    max_bytes = int(free_bytes * _FREE_FRACTION if max_gib is None else max_gib * 2**30)
    store = ImageStore(Path(parent, f"{_PREFIX}{os.getuid()}-{run}"), max_bytes=max_bytes)
    atexit.register(store.close)  # whatever ends the process before the system does
    return store


def pixels_of(image: ImageSpan, store: ImageStore | None) -> Tensor:
    """Return the pixels of a request's image. Raises UserError when they are no longer there."""
    assert store is not None, "a model of text was asked about an image"
    pixels = store.get(image.digest)
    if pixels is None:
        raise UserError(
            f"the pixels of the image {image.digest} were removed before the engine encoded it: there is no room "
            "for the images of the requests that run together; raise data.image_store_gib"
        )
    return pixels
