"""The experts of a layer over several ranks: each split over tp, or dealt to the ranks of an ep mesh.

Modules of experts are transformers': called with hidden states [T, D], the k experts chosen for each token [T, k]
and their weights [T, k]; they return [T, D].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spmdrl.model.tensor_parallel import copy_to, gather_parts, own_part, own_weight, parameters_as, reduce_from

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def split_experts(module: nn.Module, tp: DeviceMesh) -> None:
    """Every rank computes its part of each expert; the parts are summed. The weights are split by the caller."""
    compute: Experts = module.forward

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        with parameters_as(module, own_weight):
            parts = compute(copy_to(hidden_states, tp), top_k_index, copy_to(top_k_weights, tp))
        return reduce_from(parts, tp)

    module.forward = forward


def deal_experts(module: nn.Module, ep: DeviceMesh, tp: DeviceMesh) -> None:
    """Every rank of `ep` has some of the experts, and tokens travel to them. The weights are split by the caller.

    Ranks of `tp` have the same tokens, and each sends a part of them. Both meshes' ranks must call it together.
    """
    compute: Experts = module.forward
    num_experts: Any = module.num_experts
    module.num_experts = num_experts // ep.size()

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        mine, chosen, weights = (own_part(x, tp, 0) for x in (hidden_states, top_k_index, top_k_weights))
        with parameters_as(module, own_weight):
            outputs = _dispatch(mine, chosen, weights, compute, num_experts=num_experts, ep=ep)
        return gather_parts(outputs, tp, 0, hidden_states.shape[0])

    module.forward = forward


def dealt_experts(model: nn.Module) -> list[nn.Module]:
    """The modules whose experts lie on different ranks of an ep mesh."""
    return [
        module
        for module in model.modules()
        if any(isinstance(x, DTensor) and x.device_mesh.mesh_dim_names == ("ep",) for x in module._parameters.values())
    ]


def _dispatch(
    hidden: Tensor, expert_ids: Tensor, weights: Tensor, compute: Experts, *, num_experts: int, ep: DeviceMesh
) -> Tensor:
    """Send each token [T, D] to the ranks of its experts [T, k], and add up what comes back by `weights` [T, k]."""
    num_chosen = expert_ids.shape[1]
    order = expert_ids.flatten().argsort(stable=True)  # by expert, and so by rank
    sent = expert_ids.flatten().bincount(minlength=num_experts).view(ep.size(), -1)  # [ranks, experts of each]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ep.get_group())
    num_sent, num_received = torch.stack([sent.sum(1), received.sum(1)]).tolist()

    arrived = _AllToAll.apply(hidden[order // num_chosen], num_sent, num_received, ep)
    local_ids = torch.arange(received.shape[1], device=hidden.device).repeat(ep.size())
    arrived_ids = local_ids.repeat_interleave(received.flatten(), output_size=sum(num_received))
    computed = _on_each(arrived, arrived_ids, compute)
    returned = _AllToAll.apply(computed, num_received, num_sent, ep)

    by_choice = returned[order.argsort()].unflatten(0, expert_ids.shape)
    return (by_choice * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _on_each(tokens: Tensor, expert_ids: Tensor, compute: Experts) -> Tensor:
    """tokens [N, D], each through the one expert [N] it came for."""
    if not tokens.shape[0]:
        # Every rank takes part in the backward pass, with a gradient of zero for its experts where no token came.
        nobody = tokens.sum(0, keepdim=True)
        return _on_each(nobody, expert_ids.new_zeros(1), compute)[:0]
    return compute(tokens, expert_ids.unsqueeze(1), tokens.new_ones(tokens.shape[0], 1))


class _AllToAll(torch.autograd.Function):
    """Rows of x [N, D]: so many of them to each rank, in order; returns those that arrive, in order of their ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_sent: list[int], num_received: list[int], mesh: DeviceMesh) -> Tensor:
        ctx.num_sent, ctx.num_received, ctx.mesh = num_sent, num_received, mesh
        return _exchange_rows(x, num_sent, num_received, mesh)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange_rows(grad, ctx.num_received, ctx.num_sent, ctx.mesh), None, None, None


def _exchange_rows(x: Tensor, num_sent: list[int], num_received: list[int], mesh: DeviceMesh) -> Tensor:
    arrived = x.new_empty(sum(num_received), *x.shape[1:])
    dist.all_to_all_single(arrived, x.contiguous(), num_received, num_sent, group=mesh.get_group())
    return arrived
