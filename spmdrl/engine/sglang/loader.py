"""Load one bucket of a refit into the engine's model; runs inside SGLang's processes.

SGLang has a loader for flat buckets. It opens and closes a bucket's memory each time, which on a CPU takes longer than
the copy; it calls the model's loader for each bucket, which on a GPU takes several times as long as the copy; and it
answers before a device has copied, so that with several devices one of them might still be reading what the trainer
writes next. This one keeps the memory open from one refit to the next, repeats the copies of the first one, and waits.

Bytes read and written for each byte of weights in the engine's dtype: the trainer's gather reads its float32 shards (2
for bfloat16) and writes the bucket (1), and with several ranks sends, receives and places it (3); the copy here reads
the bucket and writes the model (2); digests read the bucket and the model once each (1 + 1). No way through a bucket
can do with less than the write of the bucket, its read, and the write of the model (3).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmdrl.engine.sglang.copies import Copies
from spmdrl.refit.bucket import Bucket, Entry
from spmdrl.refit.digest import digests

PATH = f"{__name__}.load_bucket"  # by which SGLang finds it

_open: dict[int, Tensor] = {}  # the trainer's buffers, by number; while a tensor lives, torch does not open it again
_copies: dict[tuple[int, str], Copies] = {}  # by model and description


class Questions:
    """A rank's questions to its process of the engine: which digests certain weights have after each bucket.

    A question is a file with the weights' names, which is there when the bucket is loaded; the answer is a file beside
    it. What is hashed is the engine's own memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, number: int) -> str:
        """Where the question about bucket `number` is looked for."""
        return str(self._folder / f"{number}.names")

    def ask(self, number: int, names: Iterable[str]) -> None:
        """Ask for digests of these weights."""
        Path(self.path(number)).write_text(json.dumps(list(names)), encoding="utf-8")

    def take_answers(self) -> dict[str, str]:
        """Return the digest of every weight of the model that was asked for; "" for those that nobody asked for."""
        found: dict[str, str] = {}
        for path in self._folder.glob("*.digests"):
            found |= {
                name: value for name, value in json.loads(path.read_bytes()).items() if value or name not in found
            }
        for path in self._folder.iterdir():
            path.unlink()
        return found


def described(bucket: Bucket, *, buffer: int, stays_open: bool, question: str | None = None) -> str:
    """Describe a bucket in buffer number `buffer` for `load_bucket`. Only memory on the engine's kind of device can
    stay open: SGLang copies other memory to its device before it gets here. `question` is a path of `Questions`."""
    entries = [
        (entry.name, list(entry.shape), str(entry.dtype).removeprefix("torch."), entry.start)
        for entry in bucket.flat_entries
    ]
    return json.dumps({"buffer": buffer, "stays_open": stays_open, "question": question, "entries": entries})


def load_bucket(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Load one bucket, given as its description (instead of a name) and its memory [num_bytes] uint8."""
    ((description, flat),) = named_tensors
    about = json.loads(description)
    if about["stays_open"]:
        _open[about["buffer"]] = flat
    key = id(model), description
    if key in _copies and _copies[key].are_valid():
        _copies[key].repeat(model, flat)
    else:
        entries = [
            Entry(name, torch.Size(shape), getattr(torch, dtype), start)
            for name, shape, dtype, start in about["entries"]
        ]
        _copies[key] = Copies.noted(model, entries, flat)
    if about["question"] is not None:
        _answer(model, Path(about["question"]))
    if flat.is_cuda:
        torch.cuda.current_stream().synchronize()


def _answer(model: Any, question: Path) -> None:
    """Write the digests of the weights that are asked for, if any are."""
    try:
        names = json.loads(question.read_bytes())
    except FileNotFoundError:
        return
    weights = dict(model.named_parameters()) | _persistent_buffers(model)
    asked = digests({name: [weights[name]] for name in names if name in weights})
    answer = dict.fromkeys(weights, "") | asked
    question.with_suffix(".digests").write_text(json.dumps(answer), encoding="utf-8")


def _persistent_buffers(model: Any) -> dict[str, Tensor]:
    """The buffers that belong to a model's weights, which tables for rotary embeddings, for example, do not."""
    return {
        f"{prefix}.{name}" if prefix else name: tensor
        for prefix, module in model.named_modules()
        for name, tensor in module._buffers.items()
        if tensor is not None and name not in module._non_persistent_buffers_set
    }
