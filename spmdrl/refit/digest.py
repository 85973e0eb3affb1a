"""Digests of tensors: tensors with equal bits have equal digests, on every device.

A tensor's memory is read as words of 8 bytes, little-endian and signed, the last one filled up with zeros. Word i has
the odd weight m(i) = (2 (i mod B) + 1) (2 B floor(i / B) + 1), with B = 2^15, and a digest is two sums modulo 2^64:

    whole = sum over i of m(i) word(i)          upper = sum over i of m(i) floor(word(i) / 2^32)

They say as much as the sums of the lower and of the upper halves, for whole = lower + 2^32 upper. A changed element
changes a half by d with 0 < |d| < 2^32, and so one of these sums: an odd multiple of d is not a multiple of 2^64. Two
different elements that are exchanged, and lie at the same place of their words, change a sum by d (m(i) - m(j)). Among
2^31 words (16 GiB) no two weights differ by a multiple of 2^32, so this is not a multiple of 2^64 either. At different
places d is multiplied by something else that is not a multiple of 2^32. Digests are not cryptographic.

On a CPU the words of a block of B are multiplied with the same B odd numbers, while they are in a core's cache. On a
CUDA device one kernel reads all tensors, each byte once, and one transfer brings all sums to the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK_WORDS = 1 << 15
_WORD_BYTES = 8
_ODD = 2 * torch.arange(BLOCK_WORDS) + 1


def digest(tensor: Tensor) -> str:
    """Return the tensor's digest, 32 hexadecimal digits. Its shape and dtype do not matter, only its bytes."""
    return digests({"": [tensor]})[""]


@torch.no_grad()
def digests(weights: Mapping[str, Sequence[Tensor]]) -> dict[str, str]:
    """Return the digest of each weight, which is given as one tensor or as parts whose bytes lie end to end.

    All tensors are on one device. Waits once for the device, however many weights there are.
    """
    words = [_words(parts) for parts in weights.values()]
    on_device = any(part.is_cuda for parts in words for part in parts)
    sums = _sums_on_device(words) if on_device else map(_sums_on_host, words)
    return {
        name: f"{whole % 2**64:016x}{upper % 2**64:016x}" for name, (whole, upper) in zip(weights, sums, strict=True)
    }


def _words(parts: Sequence[Tensor]) -> list[Tensor]:
    """View the parts as words [n] int64 that lie end to end; they are copied where they cannot be viewed so."""
    flat = [part.detach().contiguous().view(-1).view(torch.uint8) for part in parts]
    if not all(part.numel() % _WORD_BYTES == part.storage_offset() % _WORD_BYTES == 0 for part in flat):
        joined = torch.cat(flat)
        flat = [pad(joined, [0, -joined.numel() % _WORD_BYTES])]
    return [part.view(torch.int64) for part in flat]


def _sums_on_host(parts: Iterable[Tensor]) -> tuple[int, int]:
    """Compute the two sums of the words in these parts [n] int64, not yet modulo 2^64."""
    whole = upper = 0
    halves = torch.empty(BLOCK_WORDS, dtype=torch.int64)
    for words, block, first in _blocks(parts):
        odd, half = _ODD[first : first + len(words)], halves[: len(words)]
        factor = 2 * BLOCK_WORDS * block + 1
        whole += factor * int(torch.dot(words, odd))
        torch.bitwise_right_shift(words, 32, out=half)
        upper += factor * int(torch.dot(half, odd))
    return whole, upper


def _blocks(parts: Iterable[Tensor]) -> Iterator[tuple[Tensor, int, int]]:
    """Yield pieces of the parts that lie in one block each: the piece, its block, its first word in the block."""
    place = 0
    for part in parts:
        while len(part):
            block, first = divmod(place, BLOCK_WORDS)
            piece, part = part[: BLOCK_WORDS - first], part[BLOCK_WORDS - first :]
            yield piece, block, first
            place += len(piece)


def _sums_on_device(words: Sequence[Sequence[Tensor]]) -> list[tuple[int, int]]:
    from spmdrl.refit.digest_triton import sums  # triton is there wherever torch has CUDA, and only there

    return [(whole, upper) for whole, upper in sums(words).tolist()]
