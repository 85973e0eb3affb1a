"""The optimizer by name, and the learning rate of each optimizer step."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spmdrl.algo.schedule import lr_fraction
from spmdrl.config import OptimConfig
from spmdrl.model.host_state import with_state_on_host
from spmdrl.types import UserError


def optimizer_class(name: str) -> tuple[Callable[..., torch.optim.Optimizer], dict[str, Any]]:
    """The class that `optim.name` means, and the arguments that make it fast. Raises UserError if there is none."""
    if name == "adamw":
        return torch.optim.AdamW, {"fused": True}
    if name == "sgd":
        return torch.optim.SGD, {"foreach": True}
    module, _, attribute = name.partition(":")
    if not module or not attribute:
        raise UserError(f'optim.name = "{name}" is not known; use "adamw", "sgd" or "package.module:Class"')
    try:
        found = getattr(importlib.import_module(module), attribute)
    except Exception as error:  # the module is the user's: importing it can raise anything
        raise UserError(f'optim.name = "{name}" cannot be imported: {type(error).__name__}: {error}') from error
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise UserError(f'optim.name = "{name}" is not a torch.optim.Optimizer')
    return found, {}


def check_optimizer(cfg: OptimConfig) -> None:
    """Take one step on two small parameters. Raises UserError when the settings do not make an optimizer."""
    module = nn.Linear(2, 2)
    try:
        optimizer = make_optimizer(module, cfg)
        module(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    except UserError:
        raise
    except Exception as error:
        raise UserError(f'optim.name = "{cfg.name}" does not work with these settings: {error}') from error


def make_optimizer(policy: nn.Module, cfg: OptimConfig) -> torch.optim.Optimizer:
    """The optimizer over the policy's shards; one-dimensional parameters (norms, biases) are not decayed."""
    kind, options = optimizer_class(cfg.name)
    if cfg.name == "adamw":
        options |= {"betas": cfg.betas, "eps": cfg.eps}
    elif cfg.name == "sgd":
        options |= {"momentum": cfg.momentum}
    else:
        options |= cfg.params
    if cfg.state_on_host:
        kind = with_state_on_host(kind)
    groups: dict[tuple[bool, DeviceMesh | None], list[nn.Parameter]] = {}
    for parameter in policy.parameters():
        if parameter.requires_grad:
            # By mesh too: torch updates many parameters in one call, but not of different meshes.
            mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
            groups.setdefault((parameter.ndim > 1, mesh), []).append(parameter)
    return kind(
        [
            {"params": parameters, "weight_decay": cfg.weight_decay if is_decayed else 0.0}
            for (is_decayed, _), parameters in groups.items()
        ],
        lr=cfg.lr,
        **options,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, cfg: OptimConfig, *, update: int, num_updates: int) -> float:
    """Set and return the learning rate of optimizer step `update`, counted from 1."""
    lr = cfg.lr * lr_fraction(
        update,
        schedule=cfg.schedule,
        num_steps=num_updates,
        warmup_steps=cfg.warmup_steps,
        decay_steps=cfg.decay_steps,
        min_lr_fraction=cfg.min_lr_fraction,
    )
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr
