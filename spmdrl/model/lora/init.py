"""Starts of adapters that are parts of the weights: the largest singular values (PiSSA), or orthogonal columns (OLoRA).

The papers take the start from the weight. Here the weight stays as it is, and the adapter subtracts its start
(`low_rank.Pair`): the base is then still the reference, and the first policy is the base bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spmdrl.dist.collectives import copy_from
from spmdrl.model.lora.adapters import LoraScaling, Target, matrix_names
from spmdrl.model.lora.quantized import QuantizedLinear

Init = Literal["default", "pissa", "olora"]
Factors = tuple[Tensor, Tensor]  # A0 [rank, inputs] and B0 [outputs, rank], float32


@torch.no_grad()
def init_factors(
    model: nn.Module, targets: Sequence[Target], strength: LoraScaling, mesh: DeviceMesh, *, kind: Init
) -> dict[str, Tensor]:
    """Compute the start of every target's matrices, by PEFT's names; every rank of the mesh must call this.

    The ranks share the work, and all get the same bits.
    """
    starts: dict[str, Tensor] = {}
    for first in range(0, len(targets), mesh.size()):
        group = targets[first : first + mesh.size()]
        pairs = [[torch.empty(shape, device=mesh.device_type) for shape in x.shapes(strength.rank)] for x in group]
        for owner, target in enumerate(group):
            whole = _whole(model, target.weight)
            if owner == mesh.get_local_rank():
                pairs[owner] = [matrix.contiguous() for matrix in _FACTORS[kind](whole.float(), strength)]
        for owner, target in enumerate(group):
            for name, matrix in zip(matrix_names(target), pairs[owner], strict=True):
                copy_from(mesh, matrix, rank=owner)
                starts[name] = matrix
    return starts


def principal(weight: Tensor, strength: LoraScaling) -> Factors:
    """Return the factors of the weight's part with the largest singular values (PiSSA), each with their roots.

    Singular vectors have no sign: another library or device may give some of them negated, in both factors.
    """
    u, s, vh = torch.linalg.svd(weight, full_matrices=False)
    roots = (s[: strength.rank] / strength.scale).sqrt()
    return roots[:, None] * vh[: strength.rank], u[:, : strength.rank] * roots


def orthogonal(weight: Tensor, strength: LoraScaling) -> Factors:
    """Return the first columns and rows of the weight's QR decomposition (OLoRA); they count with the scale."""
    q, r = torch.linalg.qr(weight)
    return r[: strength.rank], q[:, : strength.rank]


def _whole(model: nn.Module, name: str) -> Tensor:
    """Gather a linear layer's weight from its shards, which may be in host memory."""
    layer = model.get_submodule(name.rpartition(".")[0])
    if isinstance(layer, QuantizedLinear):
        return layer.whole()
    weight = layer.weight
    assert isinstance(weight, DTensor), "a parameter was not sharded"
    mesh = weight.device_mesh
    local = weight.to_local().to(mesh.device_type)
    return DTensor.from_local(
        local, mesh, weight.placements, shape=weight.shape, stride=weight.stride(), run_check=False
    ).full_tensor()


_FACTORS: dict[Init, Callable[[Tensor, LoraScaling], Factors]] = {"pissa": principal, "olora": orthogonal}
