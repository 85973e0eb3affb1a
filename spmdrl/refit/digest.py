"""A number for the bits of a tensor: equal tensors have equal digests, on every device."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 1 << 22  # elements whose 8-byte copies exist at the same time
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def digest(tensor: Tensor) -> str:
    """Sum of the elements' bits, each times its odd place 2i + 1, modulo 2^64; 16 hexadecimal digits.

    Any one changed element, and any two that were exchanged, change it. It is not made to withstand an adversary.
    """
    words = tensor.contiguous().view(-1).view(_WORDS[tensor.dtype.itemsize])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK):
        part = words[start : start + _CHUNK].to(torch.int64)
        places = torch.arange(start, start + part.numel(), device=tensor.device)
        total += (part * (2 * places + 1)).sum()
    return f"{int(total) % 2**64:016x}"
