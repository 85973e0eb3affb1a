"""Experts over several ranks: each expert split over tp, or whole experts distributed over the ranks of an ep mesh.

A module of experts is transformers': it is called with hidden states [T, D], the k experts chosen for each token [T, k]
and their weights [T, k], and returns [T, D].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spmdrl.model.tensor_parallel import (
    copy_to,
    exchange,
    gather_parts,
    local_part,
    own_part,
    parameters_as,
    reduce_from,
)

Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def split_experts(module: nn.Module, tp: DeviceMesh) -> None:
    """Make every rank compute its part of each expert and sum the parts. The caller splits the weights."""
    compute: Experts = module.forward

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        with parameters_as(module, local_part):
            parts = compute(copy_to(hidden_states, tp), top_k_index, copy_to(top_k_weights, tp))
        return reduce_from(parts, tp)

    module.forward = forward


def distribute_experts(module: nn.Module, ep: DeviceMesh, tp: DeviceMesh) -> None:
    """Make every rank of `ep` compute some of the experts, and send tokens to them. The caller splits the weights.

    Ranks of `tp` have the same tokens, so each sends only a part of them. All ranks of both meshes must call the
    module's forward together.
    """
    compute: Experts = module.forward
    num_experts: Any = module.num_experts
    module.num_experts = num_experts // ep.size()

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        mine, chosen, weights = (own_part(x, tp, 0) for x in (hidden_states, top_k_index, top_k_weights))
        with parameters_as(module, local_part):
            outputs = _dispatch(mine, chosen, weights, compute, num_experts=num_experts, ep=ep)
        return gather_parts(outputs, tp, 0, hidden_states.shape[0])

    module.forward = forward


def distributed_experts(model: nn.Module) -> list[nn.Module]:
    """Return the modules whose experts are distributed over an ep mesh."""
    return [
        module
        for module in model.modules()
        if any(isinstance(x, DTensor) and x.device_mesh.mesh_dim_names == ("ep",) for x in module._parameters.values())
    ]


def _dispatch(
    hidden: Tensor, expert_ids: Tensor, weights: Tensor, compute: Experts, *, num_experts: int, ep: DeviceMesh
) -> Tensor:
    """Send each token [T, D] to the ranks of its experts [T, k] and sum the results, weighted by `weights` [T, k]."""
    num_chosen = expert_ids.shape[1]
    order = expert_ids.flatten().argsort(stable=True)  # by expert, and thereby by rank
    sent = expert_ids.flatten().bincount(minlength=num_experts).view(ep.size(), -1)  # [ranks, experts of each]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=ep.get_group())
    num_sent, num_received = torch.stack([sent.sum(1), received.sum(1)]).tolist()

    arrived = exchange(hidden[order // num_chosen], num_sent, num_received, ep)
    local_ids = torch.arange(received.shape[1], device=hidden.device).repeat(ep.size())
    arrived_ids = local_ids.repeat_interleave(received.flatten(), output_size=sum(num_received))
    computed = _apply_experts(arrived, arrived_ids, compute)
    returned = exchange(computed, num_received, num_sent, ep)

    by_choice = returned[order.argsort()].unflatten(0, expert_ids.shape)
    return (by_choice * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)


def _apply_experts(tokens: Tensor, expert_ids: Tensor, compute: Experts) -> Tensor:
    """Send each of tokens [N, D] through the one expert [N] it was sent to."""
    if not tokens.shape[0]:
        # A rank that received no token still joins the backward pass, with zero gradients for its experts.
        empty_row = tokens.sum(0, keepdim=True)
        return _apply_experts(empty_row, expert_ids.new_zeros(1), compute)[:0]
    return compute(tokens, expert_ids.unsqueeze(1), tokens.new_ones(tokens.shape[0], 1))


class _Joining(nn.Module):
    """Experts of a router that also has some that compute nothing (LongCat Flash). Where these take all tokens of a
    rank, its weights still join the backward pass, with gradients of 0: ranks sum the same gradients or none."""

    gate_up_proj: nn.Parameter
    down_proj: nn.Parameter

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        found: Tensor = super().forward(*arguments, **options)
        return found + (self.gate_up_proj[:0].sum() + self.down_proj[:0].sum()).to(found.dtype)


def joining_experts(model: nn.Module) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """Yield a model's experts that may be left without any token, and their new class."""
    for module in model.modules():
        if getattr(module, "zero_expert_num", 0) and hasattr(module, "gate_up_proj"):
            kind = type(module)
            yield module, type(kind.__name__, (_Joining, kind), {})
