"""The weight files of a model directory: whether they can be read, and which they are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch.distributed.device_mesh import DeviceMesh

from spmdrl.dist.collectives import gather_objects

_INDEX = "model.safetensors.index.json"


def weight_file_problems(path: str) -> Iterator[str]:
    """Yield a sentence for each weight file of a model directory that is cut off, missing or no safetensors file.

    Reads the head of every file, and the index of several. Loading shows whether the weights are the right ones.
    """
    folder = Path(path)
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            yield f'model.path = "{path}": its weights cannot be read: {file.name}: {error}'
    index = folder / _INDEX
    if not index.exists():
        return
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError) as error:
        yield f'model.path = "{path}": {_INDEX} is not an index of weights: {error}'
        return
    if absent := sorted(str(name) for name in named if not (folder / str(name)).is_file()):
        yield (
            f'model.path = "{path}": {_INDEX} names {len(named)} files, and {len(absent)} of them are missing; the '
            f"first is {absent[0]}"
        )


def weights_digest(path: str, mesh: DeviceMesh) -> str:
    """Hash the weight files of a model directory, a part of them on each rank; every rank of the mesh must call this.

    It depends on neither the ranks nor the directory's place.
    """
    files = sorted(Path(path).glob("*.safetensors"))
    mine = {file.name: _hash(file) for file in files[mesh.get_local_rank() :: mesh.size()]}
    of_all = sorted(pair for part in gather_objects(mesh, mine) for pair in part.items())
    return hashlib.sha256(json.dumps(of_all).encode()).hexdigest()


def _hash(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
