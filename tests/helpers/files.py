"""Damage to files."""

from __future__ import annotations

from pathlib import Path


def flip_bit(path: Path, place: int) -> None:
    """Flip the lowest bit of one byte."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
