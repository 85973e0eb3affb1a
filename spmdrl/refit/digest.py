"""Digests of tensors: tensors with equal bits have equal digests, on every device."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 22  # elements converted to 8 bytes at a time
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digest(tensor: Tensor) -> str:
    """Sum the bits of each element i times 2i + 1, modulo 2^64, and return 16 hexadecimal digits.

    Changing one element, or exchanging two different ones, changes the digest. It is not cryptographic.
    """
    words = tensor.contiguous().view(-1).view(_WORDS[tensor.dtype.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=tensor.device)
        total += (part * (2 * places + 1)).sum()
    return f"{int(total) % 2**64:016x}"
