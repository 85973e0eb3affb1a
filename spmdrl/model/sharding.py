"""Sharding a model that has no weights yet over the ranks of a mesh, with FSDP2."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Sequence
from itertools import chain

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import PreTrainedModel

from spmdrl.dist.mesh import ModelMeshes
from spmdrl.model.experts import distributed_experts
from spmdrl.model.operators import operators_of
from spmdrl.model.policy import PackedModel, ValueHead
from spmdrl.model.trunk import Trunk
from spmdrl.types import UserError

# Prefetching: while one layer computes, FSDP gathers the weights of the next ones.


def prefetch_layers(layers: Sequence[nn.Module], *, num_ahead: int) -> None:
    """Gather the next `num_ahead` layers while one computes, in forward and in backward.

    Parts of a layer that are sharded separately, such as the experts of expert parallelism, are gathered with it. A
    layer that is no unit of FSDP is left out. FSDP prefetches one layer by default, so 1 sets nothing.
    """
    if num_ahead == 1:
        return
    units = [modules for layer in layers if (modules := _sharded_modules(layer))]
    for place, (layer, *_) in enumerate(units):
        following = units[place + 1 : place + 1 + num_ahead]
        preceding = units[max(0, place - num_ahead) : place][::-1]
        layer.set_modules_to_forward_prefetch([*chain.from_iterable(following)])
        layer.set_modules_to_backward_prefetch([*chain.from_iterable(preceding)])


def _sharded_modules(layer: nn.Module) -> list[FSDPModule]:
    return [module for module in layer.modules() if isinstance(module, FSDPModule)]


_ONE_UNIT_BYTES = 64 * 2**20  # of the largest model that is one unit: its gradients are copied at once


def shard_policy(
    policy: PackedModel,
    meshes: ModelMeshes,
    *,
    dtype: torch.dtype,
    offload: OffloadPolicy | None,
    reshard_root: bool,
    reshard_layers: bool = True,
    ignored: Collection[nn.Parameter] = (),
) -> None:
    """Apply FSDP2, with a unit for each decoder layer, its distributed experts, each block of a tower, the rest of the
    tower, a critic's head, and the rest.

    A small model that every rank holds whole, in the dtype that it computes in, is a single unit: units within it would
    gather, cast and free nothing, and their hooks take time.

    Gradients are reduced in float32 and only summed: the loss is already divided by the global denominator. A critic's
    head computes in float32. Parameters that are `ignored` stay whole.
    """
    shard_unit = functools.partial(_shard_unit, ignored=set(ignored))
    precision = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=torch.float32,
        # In float32 everything has its dtype already, and FSDP would only look for what has not.
        cast_forward_inputs=dtype != torch.float32 and operators_of(policy.kernel).casts_inputs,
    )
    offload = offload or OffloadPolicy()
    for experts in distributed_experts(policy.model):
        assert meshes.expert is not None, "experts were distributed without a mesh"
        # Activations inside a layer already have their dtype, and a router may weigh experts in float32 on purpose.
        without_casts = dataclasses.replace(precision, cast_forward_inputs=False)
        axes = _sharding_axes(meshes.expert, "expert_shard")
        shard_unit(experts, axes, reshard=reshard_layers, precision=without_casts, offload=offload)
    axes = _sharding_axes(meshes.dense, "shard")
    is_one_unit = meshes.dense["shard"].size() == 1 and dtype == torch.float32 and _num_bytes(policy) <= _ONE_UNIT_BYTES
    if not is_one_unit:
        for unit in (*decoder_layers(policy.model), *policy.trunk.tower_blocks, *policy.trunk.towers):
            shard_unit(unit, axes, reshard=reshard_layers, precision=precision, offload=offload)
    for module in policy.modules():
        if isinstance(module, ValueHead):
            exact = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float32)
            shard_unit(module, axes, reshard=reshard_root, precision=exact, offload=offload)
    shard_unit(policy, axes, reshard=reshard_root, precision=precision, offload=offload)
    for method in (*policy.forwards, *(("encode",) if policy.trunk.family is not None else ())):
        register_fsdp_forward_method(policy, method)


def _shard_unit(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard: bool,
    precision: MixedPrecisionPolicy,
    offload: OffloadPolicy,
    ignored: set[nn.Parameter],
) -> None:
    """Apply FSDP2 to what is left of a module; its gradients are summed over `mesh` and never divided."""
    unit = fully_shard(
        module,
        mesh=mesh,
        reshard_after_forward=reshard,
        mp_policy=precision,
        offload_policy=offload,
        ignored_params=ignored,
    )
    unit.set_force_sum_reduction_for_comms(True)  # gloo has no pre-multiplied sum
    if mesh.size() > 1:  # one rank has no sum to divide, yet torch would divide by a factor of 1, into a copy
        unit.set_gradient_divide_factor(1.0)


def _num_bytes(policy: PackedModel) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in policy.parameters())


def _sharding_axes(mesh: DeviceMesh, shard: str) -> DeviceMesh:
    """Return the axis that weights are sharded over, preceded by the replicate axis when there are several copies."""
    return mesh["replicate", shard] if mesh["replicate"].size() > 1 else mesh[shard]


def reshard(policy: PackedModel) -> None:
    """Free gathered parameters: a forward pass without gradients leaves some gathered for a backward pass."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the layers of the model's language half: those that its architecture declares as not to be split."""
    names = set(model._no_split_modules or ())

    def is_layer(module: nn.Module) -> bool:
        # Base classes count too: FSDP gives a sharded module a class of its own.
        return any(base.__name__ in names for base in type(module).__mro__)

    layers = [module for module in Trunk(model).decoder.modules() if is_layer(module)]
    if not layers:
        raise UserError(f"model.path: {type(model).__name__} does not declare its layers in _no_split_modules")
    return layers
