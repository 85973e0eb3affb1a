"""How far ahead of the layer that computes the next ones are gathered."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule


def prefetch_layers(layers: Sequence[nn.Module], *, num_ahead: int) -> None:
    """Gather the next `num_ahead` layers while one computes, in forward and in backward; all are sharded by FSDP.

    One layer ahead is what FSDP does by itself, and nothing is set.
    """
    if num_ahead == 1:
        return
    sharded: list[FSDPModule] = [layer for layer in layers if isinstance(layer, FSDPModule)]
    for place, layer in enumerate(sharded):
        layer.set_modules_to_forward_prefetch(sharded[place + 1 : place + 1 + num_ahead])
        layer.set_modules_to_backward_prefetch(sharded[max(0, place - num_ahead) : place][::-1])
