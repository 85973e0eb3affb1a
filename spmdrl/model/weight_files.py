"""The weight files of a model directory: only safetensors of the directory itself; may they be read, and which are
they?"""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from spmdrl.config.strict import read_json, shown
from spmdrl.dist.collectives import gather_objects
from spmdrl.types import UserError

# Files of tensors that all who may read other files here may read: safetensors allows it to their owner only.


def write_tensors(path: Path, tensors: Mapping[str, Tensor], header: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file with the permissions that new files have here. Raises OSError and SafetensorError."""
    path.unlink(missing_ok=True)
    path.touch()
    mode = path.stat().st_mode
    save_file(dict(tensors), path, None if header is None else dict(header))
    path.chmod(mode)


def open_to_readers(folder: Path) -> None:
    """Give the safetensors files in a folder, which a library has written, the permissions that new files have here."""
    probe = folder / ".permissions"
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for file in folder.glob("*.safetensors"):
        file.chmod(mode)


_WEIGHTS, _INDEX = ".safetensors", ".safetensors.index.json"
_ONLY = f"model{_WEIGHTS}"  # in place of the files of an index
_FLOATING = ("F64", "F32", "F16", "BF16")  # safetensors' names; smaller floats have scales, which are no weights


class _Index(BaseModel):
    """The part of an index that is read; its metadata may hold anything."""

    model_config = ConfigDict(strict=True)
    weight_map: dict[str, str]


def weight_file_problems(path: str, *, parameters: Mapping[str, Sequence[int]] = {}) -> Iterator[str]:
    """Yield a sentence for each weight file of a model directory that is cut off, missing or no safetensors file, and
    for weights that are no floating-point numbers, of another size than the model's, or in two files.

    Reads the head of every file, and each index. `parameters` are the shapes of the model's weights by its own names; a
    file may hold other things too, such as masks. Loading shows whether the weights are the right ones.
    """
    folder, where = Path(path), f'model.path = "{shown(path)}"'
    strange: dict[str, str] = {}
    file_of: dict[str, str] = {}
    shapes: dict[str, list[int]] = {}
    for file in sorted(folder.glob(f"*{_WEIGHTS}")):
        try:
            with safe_open(file, framework="pt") as weights:
                heads = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118
                dtypes = {name: head.get_dtype() for name, head in heads.items()}
                shapes |= {name: list(head.get_shape()) for name, head in heads.items()}
        except (SafetensorError, OSError) as error:
            yield f"{where}: its weights cannot be read: {shown(file.name)}: {error}"
            continue
        strange |= {
            name: dtype
            for name, dtype in dtypes.items()
            if dtype not in _FLOATING and (name.endswith(".weight") or name in parameters)
        }
        if twice := sorted(dtypes.keys() & file_of.keys()):
            yield (
                f"{where}: {shown(twice[0])} is in {shown(file_of[twice[0]])} and in {shown(file.name)}, and only one "
                "of them is read; move the file that is not meant out of the directory"
            )
        file_of |= dict.fromkeys(dtypes, file.name)
    # In order of size, because some kinds of models are loaded transposed.
    if other := [name for name in parameters if name in shapes and sorted(shapes[name]) != sorted(parameters[name])]:
        yield (
            f"{where} holds {len(other)} weights of another shape than its config.json requires; the first is "
            f"{shown(other[0])}: {shapes[other[0]]} instead of {list(parameters[other[0]])}"
        )
    if strange:
        name, dtype = min(strange.items())
        yield (
            f"{where}: {len(strange)} of its weights are no floating-point numbers that can be trained; the first is "
            f"{shown(name)}, of {dtype}; save the model in bfloat16 or float32"
        )
    for index in sorted(folder.glob(f"*{_INDEX}")):
        yield from _index_problems(index, where)


def missing_weight_problems(path: str, model: PreTrainedModel, needed: Collection[str]) -> Iterator[str]:
    """Yield a sentence when weight files without other problems lack some of the `needed` parameters.

    `model` is without memory. transformers renames and fuses what the files hold, as it does to load them, but of
    tensors that have shapes alone: it reads only the heads. Where it cannot, loading shows what is missing.
    """
    folder = Path(path)
    index = folder / f"model{_INDEX}"
    places = {} if (folder / _ONLY).is_file() else read_json(index, _Index).weight_map
    held: dict[str, torch.Tensor] = {}
    for name in sorted({*places.values()}) or [_ONLY]:
        with safe_open(folder / name, framework="pt") as weights:
            shapes = {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
        held |= {name: torch.empty(shape, device="meta") for name, shape in shapes.items()}
    missing = _missing(model, held)
    if missing is not None and not (missing := missing & {*needed}):
        return
    if nowhere := sorted(places.keys() - held.keys()):
        yield (
            f'model.path = "{shown(path)}": {index.name} names {len(places)} tensors, and {len(nowhere)} of them are '
            f"missing; the first is {shown(nowhere[0])}, of {shown(places[nowhere[0]])}"
        )
    elif missing:
        yield lacking(path, sorted(missing))


def _missing(model: PreTrainedModel, held: dict[str, torch.Tensor]) -> set[str] | None:
    """Return the parameters that such tensors do not make; None where they cannot be made without values."""
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)  # it would print a table of what is missing
    try:
        _, found = type(model).from_pretrained(
            None, config=copy.deepcopy(model.config), state_dict=held, device_map={"": "meta"}, output_loading_info=True
        )
        return {*found["missing_keys"]}
    except Exception:
        return None
    finally:
        transformers_logging.set_verbosity(verbosity)


def lacking(path: str, missing: Sequence[str]) -> str:
    """Say that a model directory's files lack weights."""
    return (
        f'model.path = "{shown(path)}" lacks {len(missing)} of the weights that its config.json requires; '
        f"the first is {missing[0]}"
    )


def _index_problems(index: Path, where: str) -> Iterator[str]:
    """Yield a sentence when an index cannot be read, or names files that are missing or may not be read."""
    try:
        named = set(read_json(index, _Index).weight_map.values())
    except UserError as error:
        yield f"{where}: {index.name} is not an index of weights: {error}"
        return
    if foreign := sorted(name for name in named if Path(name).name != name or not name.endswith(_WEIGHTS)):
        yield (
            f'{where}: {index.name} names "{shown(foreign[0])}"; weights are read from *{_WEIGHTS} files of the '
            "directory alone: save the model as such"
        )
    elif absent := sorted(name for name in named if not (index.parent / name).is_file()):
        yield (
            f"{where}: {index.name} names {len(named)} files, and {len(absent)} of them are missing; the first is "
            f"{shown(absent[0])}"
        )


def weights_digest(path: str, mesh: DeviceMesh) -> str:
    """Hash the weight files of a model directory, a part of them on each rank; every rank of the mesh must call this.

    It depends on neither the ranks nor the directory's place.
    """
    files = sorted(Path(path).glob(f"*{_WEIGHTS}"))
    mine = {file.name: _hash(file) for file in files[mesh.get_local_rank() :: mesh.size()]}
    of_all = sorted(pair for part in gather_objects(mesh, mine) for pair in part.items())
    return hashlib.sha256(json.dumps(of_all).encode()).hexdigest()


def _hash(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


# Weights in a model's files that its architecture does not use, such as layers for multi-token prediction.
#
# They are neither trained nor sampled with, and an export keeps them as they are.


def kept_names(model: PreTrainedModel, path: str) -> dict[str, Path]:
    """Return the file of each weight in the directory at `path` that transformers leaves out, by its name there."""
    patterns = [re.compile(pattern) for pattern in type(model)._keys_to_ignore_on_load_unexpected or ()]
    found: dict[str, Path] = {}
    for file in sorted(Path(path).glob("*.safetensors")) if patterns else ():
        with safe_open(file, framework="pt") as weights:
            names: Iterable[str] = weights.keys()
            found |= {name: file for name in names if any(pattern.search(name) for pattern in patterns)}
    return found


def read_kept(names: dict[str, Path]) -> dict[str, Tensor]:
    """Read such weights, into host memory."""
    tensors: dict[str, Tensor] = {}
    for file in sorted(set(names.values())):
        with safe_open(file, framework="pt") as weights:
            tensors |= {name: weights.get_tensor(name) for name, place in names.items() if place == file}
    return tensors


def kept_line(names: Iterable[str]) -> str | None:
    """Tell the user about such weights; None where there are none."""
    ordered = sorted(names)
    if not ordered:
        return None
    return (
        f"{len(ordered)} weights of model.path are no part of what is trained, such as {ordered[0]}: layers for "
        "multi-token prediction and the like; exports keep them as they are"
    )
