"""The weight files of a model directory: only safetensors of the directory itself; may they be read, and which are
they?"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from spmdrl.families import family_of
from spmdrl.model.few_bits import StoredFormat, StoredWeight, as_numbers, dtype_of, method_of, quantization_of
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


class _WeightIndex(BaseModel):
    """The part of an index that is read; its metadata may hold anything."""

    model_config = ConfigDict(strict=True)
    weight_map: dict[str, str]


def stored_weights(path: str | Path) -> dict[str, StoredWeight]:
    """Open a model directory's weights by their names in its files, those of few bits as the numbers they encode.

    Nothing but the heads of files is read before a weight is. Raises UserError, OSError and SafetensorError.
    """
    return dict(as_numbers(_heads(Path(path)), quantization_of(path)))


def stored_format(path: str | Path) -> StoredFormat:
    """Return the format in which a model directory has its weights. Raises as `stored_weights` does."""
    return StoredFormat(_heads(Path(path)), quantization_of(path))


def stored_sizes(path: str | Path) -> tuple[int, int, int] | None:
    """Count by the heads of a model directory's files: bytes of all that they hold, scales included; the numbers that
    these encode; and bytes of each number of the largest weight. None where files are missing or damaged."""
    try:
        stored, weights = _heads(Path(path)), stored_weights(path)
    except (UserError, OSError, SafetensorError):  # `weight_file_problems` says what is wrong
        return None
    num_bytes = sum(math.prod(part.get_shape()) * dtype_of(part).itemsize for part in stored.values())
    counts = {name: math.prod(weight.get_shape()) for name, weight in weights.items()}
    largest = weights[max(counts, key=counts.__getitem__)].get_dtype()
    return num_bytes, sum(counts.values()), {"F64": 8, "F32": 4}.get(largest, 2)


def _heads(folder: Path) -> dict[str, StoredWeight]:
    """Open what the directory's files hold as it is stored."""
    stored: dict[str, StoredWeight] = {}
    for name in sorted({*_places(folder).values()}) or [_ONLY]:
        stored |= heads_of(folder / name)
    return stored


def heads_of(file: Path) -> dict[str, StoredWeight]:
    """Open what one file holds as it is stored. Raises OSError and SafetensorError."""
    with safe_open(file, framework="pt") as weights:
        return {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118


def _places(folder: Path) -> Mapping[str, str]:
    """Return the file of each tensor by the index; {} where one file holds them all."""
    return {} if (folder / _ONLY).is_file() else read_json(folder / f"model{_INDEX}", _WeightIndex).weight_map


def weight_file_problems(path: str, *, parameters: Mapping[str, Sequence[int]] = {}) -> Iterator[str]:
    """Yield a sentence for each weight file of a model directory that is cut off, missing or no safetensors file, and
    for weights that are no floating-point numbers, of another size than the model's, or in two files.

    Reads the head of every file, and each index. `parameters` are the shapes of the model's weights by its own names; a
    file may hold other things too, such as masks. Loading shows whether the weights are the right ones.
    """
    folder, where = Path(path), f'model.path = "{shown(path)}"'
    file_of: dict[str, str] = {}
    stored: dict[str, StoredWeight] = {}
    for file in sorted(folder.glob(f"*{_WEIGHTS}")):
        try:
            heads = heads_of(file)
        except (SafetensorError, OSError) as error:
            yield f"{where}: its weights cannot be read: {shown(file.name)}: {error}"
            continue
        if twice := sorted(heads.keys() & file_of.keys()):
            yield (
                f"{where}: {shown(twice[0])} is in {shown(file_of[twice[0]])} and in {shown(file.name)}, and only one "
                "of them is read; move the file that is not meant out of the directory"
            )
        file_of |= dict.fromkeys(heads, file.name)
        stored |= heads
    try:
        weights = as_numbers(stored, quantization_of(folder))
    except UserError as error:
        yield f"{where}: {error}"
        return
    shapes = {name: weight.get_shape() for name, weight in weights.items()}
    strange = {
        name: dtype
        for name, dtype in ((name, weight.get_dtype()) for name, weight in weights.items())
        if dtype not in _FLOATING and (name.endswith(".weight") or name in parameters)
    }
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


def missing_weight_problems(
    path: str, model: PreTrainedModel, needed: Collection[str], *, may_have_others: bool = False
) -> Iterator[str]:
    """Yield a sentence when weight files without other problems lack some of the `needed` parameters, and unless they
    `may_have_others`, when they hold what no parameter takes, and no export has.

    `model` is without memory. transformers renames and fuses what the files hold, as it does to load them, but of
    tensors that have shapes alone: it reads only the heads. Where it cannot, loading shows what is missing.
    """
    folder = Path(path)
    places, stored = _places(folder), _heads(folder)
    weights = as_numbers(stored, quantization_of(folder))
    empty = {name: torch.empty(weight.get_shape(), device="meta") for name, weight in weights.items()}
    missing, others = _loaded(model, empty)
    is_left_out = _left_out(model)
    others = {name for name in others if not is_left_out(name)}
    if others and not may_have_others:
        yield (
            f'model.path = "{shown(path)}" holds {len(others)} weights that no parameter of {type(model).__name__} '
            f"takes, so they would be neither trained nor exported; the first is {shown(min(others))}; set in "
            "config.json what they belong to, or save the model without them"
        )
    if missing is not None and not (missing := missing & {*needed}):
        return
    if nowhere := sorted(places.keys() - stored.keys()):
        yield (
            f'model.path = "{shown(path)}": model{_INDEX} names {len(places)} tensors, and {len(nowhere)} of them are '
            f"missing; the first is {shown(nowhere[0])}, of {shown(places[nowhere[0]])}"
        )
    elif missing:
        yield lacking(path, sorted(missing))


def _loaded(model: PreTrainedModel, empty: dict[str, torch.Tensor]) -> tuple[set[str] | None, set[str]]:
    """Return the parameters that such tensors do not make, and those of them of which none is made; None and none where
    they cannot be made without values."""
    try:
        with quiet_transformers(logging.CRITICAL):
            _, found = type(model).from_pretrained(
                None,
                config=copy.deepcopy(model.config),
                state_dict=empty,
                device_map={"": "meta"},
                output_loading_info=True,
            )
    except Exception:
        return None, set()
    return {*found["missing_keys"]}, {*found["unexpected_keys"]}


@contextmanager
def quiet_transformers(level: int) -> Iterator[None]:
    """Let transformers log nothing below `level`, such as a table of what is missing or unused: who loads a model says
    what of it matters.

    Its handlers get the level, because a new one of its loggers clears what each of a process's loggers remembers.
    """
    transformers_logging.get_verbosity()  # makes its handlers where there are none yet
    logger = logging.getLogger("transformers")
    handlers, propagates = [(one, one.level) for one in logger.handlers], logger.propagate
    logger.propagate = False
    for handler, own in handlers:
        handler.setLevel(max(level, own))
    try:
        yield
    finally:
        logger.propagate = propagates
        for handler, own in handlers:
            handler.setLevel(own)


def lacking(path: str, missing: Sequence[str]) -> str:
    """Say that a model directory's files lack weights."""
    return (
        f'model.path = "{shown(path)}" lacks {len(missing)} of the weights that its config.json requires; '
        f"the first is {missing[0]}"
    )


def _index_problems(index: Path, where: str) -> Iterator[str]:
    """Yield a sentence when an index cannot be read, or names files that are missing or may not be read."""
    try:
        named = set(read_json(index, _WeightIndex).weight_map.values())
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


# Weights in a model's files that its architecture does not use, such as layers for multi-token prediction, or that only
# sounds go through.
#
# They are neither trained nor sampled with, and an export has them as they are.

_OF_LAYER = re.compile(r"^(?:(?:model|language_model)\.)*layers\.(\d+)\.")


def unused_names(model: PreTrainedModel, path: str) -> list[str]:
    """Return the names of the weights in the directory at `path` that have no parameter in the model: those that its
    class leaves out, those of layers after its last one, and those that only sounds go through."""
    is_left_out = _left_out(model)
    return sorted(name for name in stored_weights(path) if is_left_out(name))


def _left_out(model: PreTrainedModel) -> Callable[[str], bool]:
    """Return what says of a name in the model's files whether the model has no parameter for it by design."""
    num_layers = model.config.get_text_config().num_hidden_layers
    of_class = type(model)._keys_to_ignore_on_load_unexpected or ()
    of_parts = {x for part in model.modules() for x in vars(part).get("_keys_to_ignore_on_load_unexpected") or ()}
    of_layers = of_parts - {*of_class}  # by this model's settings, such as keys that layers of Gemma 4 share
    of_sounds = tuple(f"{model.base_model_prefix}.{part}." for part in family_of(model.config).of_sounds)

    def is_left_out(name: str) -> bool:
        if layer := _OF_LAYER.match(name):  # patterns of a class mean the layers of all models that it was made for
            return int(layer[1]) >= num_layers or any(re.search(pattern, name) for pattern in of_layers)
        return name.startswith(of_sounds) or any(re.search(pattern, name) for pattern in of_class)

    return is_left_out


def unused_parts(
    model: PreTrainedModel, path: str, as_stored: StoredFormat | None = None
) -> Mapping[str, StoredWeight]:
    """Return such weights by name; or what files in the format `as_stored` have of them, with scales of activations."""
    names = unused_names(model, path)
    if as_stored is not None:
        parts = {part: stored for name in names for part, stored in as_stored.parts_of(name).items()}
        return parts | as_stored.of_activations()
    weights = stored_weights(path) if names else {}
    return {name: weights[name] for name in names}


def unused_line(names: Sequence[str]) -> str | None:
    """Tell the user about such weights; None where there are none."""
    if not names:
        return None
    return (
        f"{len(names)} weights of model.path are no part of what is trained, such as {names[0]}: layers for "
        "multi-token prediction, a tower for sounds and the like; exports have them as they are"
    )


def few_bits_line(path: str) -> str | None:
    """Tell the user that weights are stored in few bits; None where they are not."""
    quantization = quantization_of(path)
    if quantization is None:
        return None
    return (
        f"the weights of model.path are stored in few bits ({method_of(quantization)}) and read as the bfloat16 "
        "numbers that they stand for; what is trained and sampled with is whole, and so are exports unless "
        'export.dtype = "source"'
    )
