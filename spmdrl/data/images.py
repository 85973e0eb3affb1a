"""Images as data has them, in a file or as its bytes. They are opened and decoded here and nowhere else."""

from __future__ import annotations

import hashlib
import io
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy
import PIL.Image

from spmdrl.config.strict import open_file, shown
from spmdrl.data.image_forms import MAX_IMAGE_BYTES, file_or_path
from spmdrl.faults.text import sentence_of
from spmdrl.faults.verdict import print_once_per_node
from spmdrl.types import UserError

# Files of snapshots in a hub's cache, which are links to the blobs of the same repository.
#
# The cache has `datasets--ORGANISATION--NAME/snapshots/COMMIT` with these links, and `blobs` next to `snapshots`.


_REPOSITORY = re.compile(r"(models|datasets|spaces)--.+")


def blob_of(entry: Path, root: Path) -> Path | None:
    """Return the blob that `entry` is a link to; None for everything that the cache itself does not make.

    `root` is a snapshot's folder, or one in it, without links. The link lies in the root, and leads to a file among the
    blobs of its repository, in one step.
    """
    snapshot = next((folder for folder in (root, *root.parents) if _is_snapshot(folder)), None)
    folder = Path(os.path.realpath(entry.parent))
    if snapshot is None or not folder.is_relative_to(root) or not (folder / entry.name).is_symlink():
        return None
    target = folder / os.readlink(folder / entry.name)
    blob = snapshot.parent.parent / "blobs" / target.name
    leads_there = Path(os.path.realpath(target.parent)) == blob.parent
    return blob if leads_there and blob.is_file() and not blob.is_symlink() else None


def _is_snapshot(folder: Path) -> bool:
    return folder.parent.name == "snapshots" and _REPOSITORY.fullmatch(folder.parent.parent.name) is not None


FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_ORIENTATION = 0x0112  # of EXIF
_TURNS = {
    2: PIL.Image.Transpose.FLIP_LEFT_RIGHT,
    3: PIL.Image.Transpose.ROTATE_180,
    4: PIL.Image.Transpose.FLIP_TOP_BOTTOM,
    5: PIL.Image.Transpose.TRANSPOSE,
    6: PIL.Image.Transpose.ROTATE_270,
    7: PIL.Image.Transpose.TRANSVERSE,
    8: PIL.Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True, slots=True)
class ImageFile:
    """An image that is not decoded yet: the path of its file, or the file's bytes."""

    content: Path | bytes

    @property
    def name(self) -> str:
        if isinstance(self.content, bytes):
            return f"the image of {len(self.content)} bytes"
        return f"the image {shown(self.content)}"

    @property
    def identity(self) -> str:
        """A text that differs between images: a file's path, or a hash of the bytes."""
        if isinstance(self.content, bytes):
            return hashlib.blake2b(self.content, digest_size=16).hexdigest()
        return str(self.content)


def image_file(value: Any, root: Path) -> ImageFile:
    """Return the image that a value of the data names; paths are relative to `root` and stay inside.

    `image_forms.file_or_path` has the forms. Raises UserError.
    """
    try:
        found = file_or_path(value)
    except ValueError as error:
        raise UserError(str(error)) from error
    return ImageFile(found if isinstance(found, bytes) else _inside(found, root))


def _inside(path: str, root: Path) -> Path:
    """Return the file of a path, without links. Raises UserError when it lies outside of the root, and is no blob of
    the hub's repository of which the root is a snapshot."""
    try:
        real, top = Path(os.path.realpath(root / path)), Path(os.path.realpath(root))
        blob = None if real.is_relative_to(top) else blob_of(top / path, top)
    except (OSError, ValueError) as error:
        raise UserError(f"the image {shown(path)} is not a path: {error}") from error
    if blob is None and not real.is_relative_to(top):
        raise UserError(
            f"the image {shown(path)} lies outside of {shown(root)}, where the images of this data are; set image_root "
            "to a folder that holds all of them"
        )
    return blob or real


def size_of(image: ImageFile, *, max_pixels: int) -> tuple[int, int]:
    """Return an image's (height, width) as it is shown, from its first bytes. Raises UserError as `decode` does."""
    with _opened(image, max_pixels) as opened:
        width, height = opened.size
        return (width, height) if _orientation(opened) >= 5 else (height, width)


def decode(image: ImageFile, *, max_pixels: int) -> PIL.Image.Image:
    """Return an image in RGB, turned as its EXIF says, on white where it is transparent.

    Raises UserError when it cannot be read, has no pixels or more than `max_pixels`, or is an animation.
    """
    with _opened(image, max_pixels) as opened:
        turn = _TURNS.get(_orientation(opened))
        opened.load()
        return _in_rgb(opened if turn is None else opened.transpose(turn))


@contextmanager
def _opened(image: ImageFile, max_pixels: int) -> Iterator[PIL.Image.Image]:
    """Open an image whose pixels are still to be decoded."""
    with open_file(image.content) if isinstance(image.content, Path) else io.BytesIO(image.content) as file:
        num_bytes = os.fstat(file.fileno()).st_size if isinstance(image.content, Path) else len(image.content)
        if not 0 < num_bytes <= MAX_IMAGE_BYTES:
            found = f"has more than {MAX_IMAGE_BYTES >> 20} MiB" if num_bytes else "is empty"
            raise UserError(f"{image.name} {found}")
        with _errors_explained(image.name), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about metadata
            warnings.simplefilter("error", PIL.Image.DecompressionBombWarning)
            opened = PIL.Image.open(file, formats=FORMATS)
            _require_usual(image.name, opened, max_pixels)
            yield opened


def _require_usual(name: str, opened: PIL.Image.Image, max_pixels: int) -> None:
    width, height = opened.size
    if width * height > max_pixels:
        raise UserError(
            f"{name} has {width} x {height} pixels, more than data.max_image_pixels = {max_pixels}; raise it, or make "
            "the image smaller"
        )
    # The JPEGs of some cameras hold more pictures behind the first, which is the photo.
    if opened.format != "MPO" and getattr(opened, "is_animated", False):
        raise UserError(f"{name} is an animation ({opened.format}); take one frame of it")


@contextmanager
def _errors_explained(name: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except (PIL.Image.DecompressionBombWarning, PIL.Image.DecompressionBombError) as error:
        raise UserError(f"{name} has more pixels than any picture: {sentence_of(error)}") from error
    except PIL.UnidentifiedImageError as error:
        raise UserError(f"{name} is damaged, has no pixels, or is none of {', '.join(FORMATS)}") from error
    except Exception as error:  # decoders raise many types for bytes that nobody thought of
        raise UserError(f"{name} is damaged: {sentence_of(error) or type(error).__name__}") from error


def _orientation(opened: PIL.Image.Image) -> int:
    """Return which way up an image is, as its header says: 1 to 8, and 1 where nothing is."""
    exif = PIL.Image.Exif()
    try:
        exif.load(opened.info.get("exif") or b"")
        found = exif.get(_ORIENTATION, 1)
    except Exception:  # as for any bytes that nobody thought of; the pixels may be whole
        _say_unturned()
        return 1
    return found if found in _TURNS else 1


@cache
def _say_unturned() -> None:
    """Say once that there are such images."""
    print_once_per_node("warning: there are images whose EXIF cannot be read; they are not turned, whatever it meant")


def _in_rgb(image: PIL.Image.Image) -> PIL.Image.Image:
    if image.mode.startswith("I"):  # gray in 16 bits
        return PIL.Image.fromarray((numpy.asarray(image) >> 8).astype(numpy.uint8)).convert("RGB")
    if image.has_transparency_data:
        white = PIL.Image.new("RGBA", image.size, "white")
        return PIL.Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")
