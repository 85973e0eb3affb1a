"""Digests of tensors: tensors with equal bits have equal digests, on every device.

A tensor's memory is read as words of 8 bytes, little-endian and signed, filled up with zeros. They stand in rows of
2048, and 32 rows form a table. Modulo 2^64, word by word, the words of each row are added, and those of each column of
each table. The sums x(0), x(1), ... of all rows are then weighted with odd numbers, and so are those of all columns:

    whole = sum over i of (2 i + 1) x(i)        upper = sum over i of (2 i + 1) floor(x(i) / 2^32)

also modulo 2^64; these four numbers are the digest. A changed element changes the sum of its row, and `whole` of the
rows, because an odd multiple of what is not 0 is not 0. Two different elements that are exchanged change the sums of
their rows, or, in the same row, of their columns, or, in the same word, of that word's row. Two sums change so: at the
same place of two words, one half of the first sum changes by a and that of the second by a', where a + a' is 0 or both
have one sign; so (2 i + 1) a + (2 k + 1) a' is not 0, and too small to be a multiple of 2^64 as long as the tensor has
less than 16 GiB. `whole` and `upper` together say what happened to either half. At different places `whole` is enough.
Digests are not cryptographic.

On a CPU each byte is fetched from memory once: a table is added up both ways while it is in a core's cache. On a CUDA
device one kernel reads all tensors once, and one transfer brings all digests to the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

ROW_WORDS = 1 << 11
TABLE_ROWS = 1 << 5
_TABLE_WORDS = TABLE_ROWS * ROW_WORDS
_WORD_BYTES = 8


def digest(tensor: Tensor) -> str:
    """Return the tensor's digest, 64 hexadecimal digits. Its shape and dtype do not matter, only its bytes."""
    return digests({"": [tensor]})[""]


@torch.no_grad()
def digests(weights: Mapping[str, Sequence[Tensor]]) -> dict[str, str]:
    """Return the digest of each weight, which is given as one tensor or as parts whose bytes lie end to end.

    All tensors are on one device. Waits once for the device, however many weights there are.
    """
    words = [_words(parts) for parts in weights.values()]
    kinds = {part.is_cuda for parts in words for part in parts}
    assert len(kinds) < 2, "tensors of one call are on one device"
    on_device = True in kinds
    found = _sums_on_device(words) if on_device else [_sums_on_host(parts) for parts in words]
    return {
        name: "".join(f"{number % 2**64:016x}" for number in numbers)
        for name, numbers in zip(weights, found, strict=True)
    }


def _words(parts: Sequence[Tensor]) -> list[Tensor]:
    """View the parts as words [n] int64, whole tables of them but for the last part. They are copied where they do not
    lie so."""
    flat = [part.detach().contiguous().view(-1).view(torch.uint8) for part in parts]
    are_tables = all(part.numel() % (_TABLE_WORDS * _WORD_BYTES) == 0 for part in flat[:-1])
    are_words = all(part.numel() % _WORD_BYTES == part.storage_offset() % _WORD_BYTES == 0 for part in flat)
    if not (are_tables and are_words):
        joined = torch.cat(flat)
        flat = [pad(joined, [0, -joined.numel() % _WORD_BYTES])]
    return [part.view(torch.int64) for part in flat]


def _sums_on_host(parts: Sequence[Tensor]) -> list[int]:
    """Compute the four numbers of the words in these parts [n] int64; modulo 2^64 they are the digest."""
    rows, columns = [], []
    for part in parts:
        if missing := -len(part) % ROW_WORDS:  # pad copies even where nothing is missing
            part = pad(part, [0, missing])
        for table in part.view(-1, ROW_WORDS).split(TABLE_ROWS):
            rows.append(table.sum(1))
            columns.append(table.sum(0))
    return [*_weighted(torch.cat(rows)), *_weighted(torch.cat(columns))]


def _weighted(sums: Tensor) -> tuple[int, int]:
    """Weight the sums [n] int64 of all rows or columns: `whole` and `upper`."""
    odd = 2 * torch.arange(len(sums)) + 1
    return int(torch.dot(sums, odd)), int(torch.dot(sums >> 32, odd))


def _sums_on_device(weights: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    from spmdrl.refit.digest_triton import sums  # triton is there wherever torch has CUDA, and only there

    return sums(weights, row_words=ROW_WORDS, table_rows=TABLE_ROWS).tolist()
