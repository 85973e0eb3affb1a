"""Load one bucket of a refit into the engine's model; runs inside SGLang's processes.

SGLang has a loader for flat buckets. It opens and closes a bucket's memory each time, which on a CPU takes longer than
the copy; and it answers before a device has copied, so that with several devices one of them might still be reading
what the trainer writes next. This one keeps the memory open from one refit to the next, and waits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from spmdrl.refit.bucket import Bucket, Entry

PATH = f"{__name__}.load_bucket"  # by which SGLang finds it

_open: dict[int, Tensor] = {}  # the trainer's buffers, by number; while a tensor lives, torch does not open it again


def described(bucket: Bucket, *, buffer: int, stays_open: bool) -> str:
    """Describe a bucket in buffer number `buffer` for `load_bucket`. Only memory on the engine's kind of device can
    stay open: SGLang copies other memory to its device before it gets here."""
    entries = [
        (entry.name, list(entry.shape), str(entry.dtype).removeprefix("torch."), entry.start)
        for entry in bucket.flat_entries
    ]
    return json.dumps({"buffer": buffer, "stays_open": stays_open, "entries": entries})


def load_bucket(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load one bucket, given as its description (instead of a name) and its memory [num_bytes] uint8."""
    ((description, flat),) = named_tensors
    about = json.loads(description)
    if about["stays_open"]:
        _open[about["buffer"]] = flat
    entries = [
        Entry(name, torch.Size(shape), getattr(torch, dtype), start) for name, shape, dtype, start in about["entries"]
    ]
    model.load_weights([(entry.name, entry.view(flat)) for entry in entries])
    if flat.is_cuda:
        torch.cuda.current_stream().synchronize()
