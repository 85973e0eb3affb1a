"""The optimizer by name, and the learning rates of each optimizer step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spmdrl.algo.schedules import lr_fraction
from spmdrl.config import OptimConfig
from spmdrl.model.offload import with_state_on_host
from spmdrl.types import UserError
from spmdrl.user_code import load

_PATTERN = "pattern"  # of a group of parameters: its key in `optim.rates`, None where it has none


class _OnShards(torch.optim.Optimizer):
    """Steps with this rank's shards: the update of an element needs no other element, and FSDP splits a gradient as its
    parameter.

    Given DTensors, torch works out in the first step how ranks share each of them: milliseconds for one, and more on a
    mesh of several dimensions. The state stays in DTensors, which checkpoints need.
    """

    def _init_group(self, group: dict[str, Any], *tensors: list[Any]) -> Any:
        found = super()._init_group(group, *tensors)  # type: ignore[misc]  # of the class beside this one
        if not group.get("momentum"):  # SGD would put the buffers of its first step into the state as they are
            for some in tensors:
                some[:] = (x.to_local() if isinstance(x, DTensor) else x for x in some)
        return found


class _AdamW(_OnShards, torch.optim.AdamW):
    """torch's AdamW, on shards."""


class _SGD(_OnShards, torch.optim.SGD):
    """torch's SGD, on shards where it has no momentum."""


def optimizer_class(name: str) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """Return the class that `optim.name` names, with the arguments that make it fast. Raises UserError if there is
    none."""
    if name == "adamw":
        return _AdamW, {"fused": True}
    if name == "sgd":
        return _SGD, {"foreach": False}  # with momentum, True would make the first step slower than many
    if ":" not in name:
        raise UserError(
            f'optim.name = "{name}" is not known; use "adamw", "sgd", "package.module:Class" or "path/file.py:Class"'
        )
    try:
        found = load(name)
    except ValueError as error:
        raise UserError(f'optim.name = "{name}": {error}') from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UserError(f'optim.name = "{name}" is not a torch.optim.Optimizer')
    return found, {}


def optimizer_problems(cfg: OptimConfig) -> Iterator[str]:
    """Try the optimizer on two small parameters, and yield a sentence for what is wrong with its settings."""
    module = nn.Linear(2, 2)
    try:
        optimizer = make_optimizer(module, cfg)
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    except UserError as error:
        yield str(error)
    except Exception as error:  # the class may be the user's: it can raise anything
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        yield f'optim.name = "{cfg.name}" does not work with these settings: {reason}'


def make_optimizer(
    policy: nn.Module, cfg: OptimConfig, own_rates: Mapping[nn.Parameter, str] = MappingProxyType({})
) -> torch.optim.Optimizer:
    """Make the optimizer of this rank's shards; one-dimensional parameters (norms, biases) are not decayed.

    `own_rates` are the parameters with another learning rate than `cfg.lr`, each with its key in `cfg.rates`.
    """
    kind, options = optimizer_class(cfg.name)
    if cfg.name == "adamw":
        options |= {"betas": cfg.betas, "eps": cfg.eps}
    elif cfg.name == "sgd":
        options |= {"momentum": cfg.momentum}
    else:
        options |= cfg.params
    if cfg.state_on_host:
        kind = with_state_on_host(kind)
    groups: dict[tuple[bool, str | None, DeviceMesh | None], list[nn.Parameter]] = {}
    for parameter in policy.parameters():
        if parameter.requires_grad:
            # By mesh too: torch updates many parameters in one call, but not of different meshes.
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((parameter.ndim > 1, own_rates.get(parameter), mesh), []).append(parameter)
    optimizer = kind(
        [
            {
                "params": parameters,
                "lr": _peak(cfg, pattern),
                "weight_decay": cfg.weight_decay if is_decayed else 0.0,
                _PATTERN: pattern,
            }
            for (is_decayed, pattern, _), parameters in groups.items()
        ],
        lr=cfg.lr,
        **options,
    )
    optimizer.register_step_pre_hook(_FreshBlocks())
    return optimizer


class _FreshBlocks:
    """Returns the memory that torch caches to a GPU before the first step allocates the state, which then stays.

    The state would lie in parts of blocks that activations have left, and these would fit into the rest no more.
    """

    def __init__(self) -> None:
        self._is_first = True

    def __call__(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if self._is_first and not optimizer.state:
            torch.cuda.empty_cache()  # does nothing where there is no GPU
        self._is_first = False


def set_learning_rates(
    optimizer: torch.optim.Optimizer, cfg: OptimConfig, *, update: int, num_updates: int
) -> dict[str | None, float]:
    """Set the learning rates of optimizer step `update`, counted from 1. Returns that of `cfg.lr` under None, and each
    other under its key in `cfg.rates`."""
    fraction = lr_fraction(
        update,
        schedule=cfg.schedule,
        num_steps=num_updates,
        warmup_steps=cfg.warmup_steps,
        decay_steps=cfg.decay_steps,
        min_lr_fraction=cfg.min_lr_fraction,
    )
    rates = {pattern: fraction * _peak(cfg, pattern) for pattern in (None, *cfg.rates)}
    for group in optimizer.param_groups:
        group["lr"] = rates[group[_PATTERN]]
    return rates


def _peak(cfg: OptimConfig, pattern: str | None) -> float:
    return cfg.lr if pattern is None else cfg.rates[pattern]
