"""Prefetching: while one layer computes, FSDP gathers the weights of the next ones."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import nn
from torch.distributed.fsdp import FSDPModule


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
