"""Adapters on disk, in PEFT's format: adapter_config.json and adapter_model.safetensors in one directory."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from spmdrl.config.base import Count
from spmdrl.config.model import Alpha
from spmdrl.config.strict import about, conform, open_file, read_json
from spmdrl.model.lora.adapters import PREFIX, LoraScaling
from spmdrl.model.weight_files import write_tensors
from spmdrl.types import UserError

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"  # of PEFT's older versions

# Settings of PEFT's that do not say what trained adapters compute, or that are read here.
_OTHERWISE_SAID = {
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("r", "lora_alpha", "use_rslora", "init_lora_weights", "target_modules", "target_parameters", "exclude_modules"),
    *("layers_to_transform", "layers_pattern", "inference_mode", "lora_dropout", "megatron_core", "loftq_config"),
    *("eva_config", "corda_config", "lora_ga_config", "qalora_group_size", "runtime_config", "ensure_weight_tying"),
}
_UNSET: tuple[Any, ...] = (None, False, "none", [], {})  # values of all others with which adapters are plain ones
# Starts that change the base, from which such adapters would be a difference.
_CHANGING_STARTS = ("pissa", "olora", "corda", "loftq", "lora_ga")


class _AdapterConfig(BaseModel):
    """The part of adapter_config.json that is read."""

    model_config = ConfigDict(strict=True)
    r: Count
    lora_alpha: Alpha
    use_rslora: bool = False
    init_lora_weights: bool | str | None = True
    target_modules: list[str] | str | None = None
    target_parameters: list[str] | None = None


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """The contents of a directory in PEFT's format."""

    strength: LoraScaling
    tensors: Mapping[str, Tensor]  # float32, by PEFT's names
    parameters: tuple[str, ...] = ()  # the ends of their names, for those of experts

    @property
    def wanted(self) -> tuple[str, ...]:
        """The names of what is adapted, for `targets_of`: modules in full, then parameters by their ends."""
        stems = (name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in self.tensors)
        return (*dict.fromkeys(stems), *self.parameters)


def write_adapter(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write adapters into a directory that exists."""
    on_host = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    write_tensors(folder / WEIGHTS, on_host, {"format": "pt"})
    (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def read_adapter(path: str) -> AdapterFiles:
    """Read a directory. Raises UserError about `lora.path` when it holds no adapters, or adapters of another kind."""
    setting, folder = f'lora.path = "{path}"', Path(path)
    if not (folder / CONFIG).is_file():
        raise UserError(f"{setting} is not a directory of adapters: it has no {CONFIG}")
    if not (folder / WEIGHTS).exists() and (folder / _PICKLE).exists():
        raise UserError(
            f"{setting} has its matrices as {_PICKLE}, a pickle, which may run any code; save them as {WEIGHTS}"
        )
    try:
        written = read_json(folder / CONFIG, dict[str, Any])
        if (kind := written.get("peft_type")) != "LORA":
            raise UserError(f'{CONFIG} has peft_type = "{kind}"; only LoRA can be read')
        with about(folder / CONFIG):
            config = conform(written, _AdapterConfig)
        open_file(folder / WEIGHTS).close()  # raises where load_file would wait, as for a pipe
        tensors = load_file(folder / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:  # ValueError: UserError too
        raise UserError(f"{setting} cannot be read: {' '.join(str(error).split())}") from error
    floats = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    problems = [*_other_kinds(written), *_other_names(tensors), *_other_targets(tensors, config), *_no_numbers(floats)]
    if problems:
        raise UserError(f"{setting} {'; '.join(problems)}")
    strength = LoraScaling(rank=config.r, alpha=config.lora_alpha, rslora=config.use_rslora)
    return AdapterFiles(strength, floats, tuple(config.target_parameters or ()))


def _other_kinds(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a clause for each setting of PEFT's with which adapters are, or may be, not those that are trained here:
    they compute something else, or layers have different ranks."""
    for name, value in config.items():
        if name not in _OTHERWISE_SAID and value not in _UNSET:
            yield f"sets {name} = {json.dumps(value)}, which is not supported"
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGING_STARTS):
        yield (
            f'has init_lora_weights = "{start}", with which PEFT changes the base too; save it with '
            "path_initial_model_for_weight_conversion, as a plain adapter"
        )


def _other_names(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a clause when the file holds something else than pairs of matrices."""
    unknown = [name for name in tensors if not (name.startswith(PREFIX) and name.endswith(_SIDES))]
    if unknown:
        yield f"holds {len(unknown)} tensors that are no matrices of adapters; the first is {unknown[0]}"
    stems = {name.removesuffix(side) for name in tensors for side in _SIDES if name.endswith(side)}
    if alone := sorted(f"{stem}{side}" for stem in stems for side in _SIDES if f"{stem}{side}" not in tensors):
        yield f"lacks {len(alone)} matrices; the first is {alone[0]}"
    if not tensors:
        yield "holds no tensors"


def _other_targets(tensors: Mapping[str, Tensor], config: _AdapterConfig) -> Iterator[str]:
    """Yield a clause when the file holds matrices of a layer that the configuration does not name: PEFT would leave
    them out. A pattern, and parameters besides layers, are not checked."""
    if not isinstance(config.target_modules, list) or config.target_parameters:
        return
    ends = tuple(f".{target}" for target in config.target_modules)
    stems = (name.removeprefix(PREFIX).rpartition(".lora_")[0] for name in tensors if name.endswith(_SIDES))
    if others := [stem for stem in dict.fromkeys(stems) if not f".{stem}".endswith(ends)]:
        yield f"holds matrices of {len(others)} layers that its target_modules do not name; the first is {others[0]}"


def _no_numbers(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield a clause when a matrix holds no floating-point numbers, or some that are not finite."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            yield f"holds {name} as {str(tensor.dtype).removeprefix('torch.')}, which is no floating-point number"
            return
        if not tensor.isfinite().all():
            yield f"holds numbers that are not finite, the first in {name}"
            return


_SIDES = (".lora_A.weight", ".lora_B.weight")


def base_problems(files: AdapterFiles, sizes: Mapping[str, tuple[int, int]], path: str) -> Iterator[str]:
    """Yield a sentence when files do not hold the matrices of these names and sizes, which would fit the model."""
    setting = f'lora.path = "{path}" belongs to another base than model.path'
    if unknown := [name.removeprefix(PREFIX) for name in files.tensors if name not in sizes]:
        yield f"{setting}: {len(unknown)} of its matrices have no layer in this model; the first is {unknown[0]}"
    elif lacking := [name.removeprefix(PREFIX) for name in sizes if name not in files.tensors]:
        yield f"{setting}: it lacks {len(lacking)} matrices of this model; the first is {lacking[0]}"
    else:
        for name, size in sizes.items():
            if (found := tuple(files.tensors[name].shape)) != size:
                yield f"{setting}: {name.removeprefix(PREFIX)} is {list(found)}, and should be {list(size)} there"
                return
