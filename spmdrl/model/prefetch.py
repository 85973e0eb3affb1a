"""How far ahead of the layer that computes the next ones are gathered."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.distributed.fsdp import FSDPModule


def prefetch_layers(layers: Sequence[nn.Module], *, num_ahead: int) -> None:
    """Gather the next `num_ahead` layers while one computes, in forward and in backward; all are sharded by FSDP.

    What of a layer is sharded by itself, such as experts dealt to ranks, goes with it. One layer ahead is what FSDP
    does by itself, and nothing is set.
    """
    if num_ahead == 1:
        return
    units = [[module for module in layer.modules() if isinstance(module, FSDPModule)] for layer in layers]
    for place, (layer, *_) in enumerate(units):
        following = units[place + 1 : place + 1 + num_ahead]
        preceding = units[max(0, place - num_ahead) : place][::-1]
        layer.set_modules_to_forward_prefetch([unit for of_layer in following for unit in of_layer])
        layer.set_modules_to_backward_prefetch([unit for of_layer in preceding for unit in of_layer])
