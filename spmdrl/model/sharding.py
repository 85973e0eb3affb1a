"""Sharding a model that has no weights yet over the ranks of a mesh, with FSDP2; activation checkpointing."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Literal

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
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from spmdrl.dist.mesh import ModelMeshes
from spmdrl.model.experts import distributed_experts
from spmdrl.model.lora.layers import is_cheap
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
    of_layers = ([module for module in layer.modules() if isinstance(module, FSDPModule)] for layer in layers)
    units = [modules for modules in of_layers if modules]
    for place, (layer, *_) in enumerate(units):
        following = units[place + 1 : place + 1 + num_ahead]
        preceding = units[max(0, place - num_ahead) : place][::-1]
        layer.set_modules_to_forward_prefetch([*chain.from_iterable(following)])
        layer.set_modules_to_backward_prefetch([*chain.from_iterable(preceding)])


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
    num_bytes = sum(parameter.numel() * parameter.element_size() for parameter in policy.parameters())
    is_one_unit = meshes.dense["shard"].size() == 1 and dtype == torch.float32 and num_bytes <= _ONE_UNIT_BYTES
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


def _sharding_axes(mesh: DeviceMesh, shard: str) -> DeviceMesh:
    """Return the axis that weights are sharded over, preceded by the replicate axis when there are several copies."""
    return mesh["replicate", shard] if mesh["replicate"].size() > 1 else mesh[shard]


def reshard(policy: PackedModel) -> None:
    """Free gathered parameters: a forward pass without gradients leaves some gathered for a backward pass."""
    for module in policy.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


@contextmanager
def turn_of(model: PackedModel, *, gathers_once: bool) -> Iterator[None]:
    """Surround the passes of a step of a model that is never trained, after which none of its weights are gathered.

    With `gathers_once` its weights stay gathered in between. Turns of two models must not overlap.
    """
    assert isinstance(model, FSDPModule), "a model without shards has nothing to gather"
    model.set_reshard_after_forward(not gathers_once)
    try:
        yield
    finally:
        model.set_reshard_after_forward(True)  # first: otherwise what an error has interrupted would stay gathered
        reshard(model)


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


# Activation checkpointing of decoder layers.
#
# "full" keeps only the input of a layer and repeats its whole forward pass in backward. "selective" keeps the results
# of matrix products and of attention, which take nearly all of the time, and repeats only norms, rotary embeddings and
# activation functions. Products that are cheap for the size of their results, such as those with the B of an adapter,
# say so and are repeated as well.

Recomputed = Literal["full", "selective"]

# The operations whose results "selective" keeps. They are named, because most exist only where their package does. For
# an autograd.Function, such as linear.py's or flash-attn's, the operations inside it count.
_EXPENSIVE = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_grouped_mm",
        "aten::_scaled_mm",
        "mkldnn::_linear_pointwise",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "spmdrl::short_attention",
        "spmdrl::plain_attention",
        "spmdrl::gated_delta_rule",
        "spmdrl::state_space_rule",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
        "aten::_flash_attention_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn_3::_flash_attn_forward",
        "flash_attn_3::fwd",
    }
)


# transformers adds the biases of experts to these products in place, and a saved result must not change afterwards.
_CHANGED_BY_BIASES = frozenset({"aten::_grouped_mm", "aten::bmm", "aten::baddbmm"})


def checkpoint_layers(
    model: PreTrainedModel, layers: Sequence[nn.Module], *, recomputed: Recomputed, every_layers: int
) -> None:
    """Recompute the first of every `every_layers` decoder layers of the model in backward.

    transformers recomputes only layers in training mode. The flag is set on the chosen layers but not on the modules
    inside them, so dropout stays off, and all other layers keep their activations.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if recomputed == "selective":
        has_biased_experts = any(".experts." in name and name.endswith("_bias") for name, _ in model.named_parameters())
        saved = _EXPENSIVE - _CHANGED_BY_BIASES if has_biased_experts else _EXPENSIVE
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_save_or_recompute, saved))
    model.gradient_checkpointing_enable(options)
    for layer in layers[::every_layers]:
        layer.training = True


def _save_or_recompute(
    saved: frozenset[str], _: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    name = operation.name().partition(".")[0]  # without the overload
    is_saved = name in saved and not is_cheap.get()
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
