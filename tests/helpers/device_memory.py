"""The memory of a CUDA device, a rank's shards, and copies of a learner's state on the host."""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from spmdrl.learn.learner import Learner

MIB = 2**20


def local(x: Tensor) -> Tensor:
    """This rank's part of a weight or gradient, which is all of it on one rank."""
    return x.to_local() if isinstance(x, DTensor) else x


def shards(model: nn.Module) -> list[Tensor]:
    """This rank's part of every weight."""
    return [parameter.to_local() for parameter in model.parameters() if isinstance(parameter, DTensor)]


def state(learner: Learner) -> list[Tensor]:
    """Host copies of the weights and moments."""
    with torch.no_grad():
        tensors = shards(learner.model)
        for moments in learner.optimizer.state.values():
            tensors += [x.to_local() if hasattr(x, "to_local") else x for x in moments.values()]
    return [tensor.cpu().clone() for tensor in tensors]


def allocated() -> int:
    """Bytes in tensors, as they were asked for; without cuBLAS's workspaces, which come from the same allocator, and
    without what an earlier test has left to the garbage collector."""
    gc.collect()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    return torch.cuda.memory_stats()["requested_bytes.all.current"]
