"""The policy that a run trains, whole or by adapters, and how adapters start."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from spmdrl.algo.seeds import mix
from spmdrl.config import LoraConfig, ModelConfig
from spmdrl.config.model import QuantizedBase
from spmdrl.dist.collectives import copy_from
from spmdrl.dist.mesh import Meshes
from spmdrl.model.kernels import Kernel
from spmdrl.model.load import load_policy, model_without_memory
from spmdrl.model.lora.adapters import Adapters, LoraScaling, Target, matrix_names
from spmdrl.model.lora.layers import ExpertsTarget
from spmdrl.model.lora.peft import base_problems, read_adapter
from spmdrl.model.lora.quantized import QuantizedLinear, bytes_of, quantization_problems, quantized_names
from spmdrl.model.lora.targets import Wanted, short_names, target_problems, targets_of
from spmdrl.model.operators import operators_of
from spmdrl.model.policy import Policy
from spmdrl.model.weight_files import weights_digest
from spmdrl.types import UserError


def load_trained(
    cfg: ModelConfig,
    lora: LoraConfig | None,
    meshes: Meshes,
    *,
    temperature: float,
    seed: int,
    kernel: Kernel | None = None,
) -> Policy:
    """Load the policy that is trained: all of it, or with `lora` its adapters on a frozen base.

    Raises UserError like `load_policy`, and for targets that the model does not have.
    """
    if lora is None:
        return load_policy(cfg, meshes.model, temperature=temperature, kernel=kernel)
    policy = load_policy(cfg, meshes.model, temperature=temperature, role="base", quantized=lora.base, kernel=kernel)
    plan = plan_adapters(policy.model, lora)
    tp = meshes.model.tp
    multiply = operators_of(policy.kernel).linear
    targets = targets_of(policy.model, plan.wanted, multiply=multiply, tp=tp if tp.size() > 1 else None)
    layers, parameters = short_names(policy.model, targets)
    config = peft_config(plan.sent_strength, layers, parameters, base=cfg.path)
    base = weights_digest(cfg.path, meshes.training)
    start = None
    if plan.init != "default":
        start = init_factors(policy.model, targets, plan.strength, meshes.training, kind=plan.init)
    policy.adapters = Adapters(
        targets, plan.strength, meshes.training, config=config, base=base, init=plan.init, start=start
    )
    if start is None:
        every_a = {name: a for name, a in policy.adapters.trained.items() if ".lora_A." in name}
        # Every B stays 0, as in PEFT.
        policy.adapters.load(random_values(every_a, seed=seed) | plan.files)
    return policy


def adapter_problems(model_config: Any, cfg: ModelConfig, lora: LoraConfig | None) -> Iterator[str]:
    """Yield a sentence when `[lora]` does not fit the model; takes no memory for it."""
    if lora is not None:
        model = model_without_memory(model_config, cfg)
        if lora.base is not None:
            yield from quantization_problems(model, lora.base)
        try:
            plan_adapters(model, lora)
        except UserError as error:
            yield from str(error).splitlines()


def adapter_sizes(model_config: Any, cfg: ModelConfig, lora: LoraConfig) -> dict[str, int]:
    """Count the elements of each weight's adapter, by the weight's name. Raises UserError like `plan_adapters`."""
    model = model_without_memory(model_config, cfg)
    plan = plan_adapters(model, lora)
    return {
        target.weight: sum(map(math.prod, target.shapes(plan.strength.rank)))
        for target in targets_of(model, plan.wanted)
    }


def quantized_bytes(model_config: Any, cfg: ModelConfig, base: QuantizedBase) -> dict[str, int]:
    """Count the bytes of each weight that is stored in few bits, by its name."""
    model = model_without_memory(model_config, cfg)
    return {name: bytes_of(model.get_parameter(name).numel(), base) for name in quantized_names(model)}


@dataclass(frozen=True, slots=True)
class AdapterPlan:
    """The adapters that `[lora]` asks for."""

    strength: LoraScaling
    wanted: Wanted  # see `targets_of`
    init: Init = "default"
    files: dict[str, Tensor] = field(default_factory=dict)  # what they begin with, where they come from files

    @property
    def sent_strength(self) -> LoraScaling:
        """The strength of the plain adapters that engines and files get."""
        return self.strength if self.init == "default" else self.strength.doubled


def plan_adapters(model: PreTrainedModel, lora: LoraConfig) -> AdapterPlan:
    """Settle rank, scale and targets. The model may be on the meta device.

    Raises UserError for targets that the model does not have, and for files that cannot be read or are of another base.
    """
    if lora.path is None:
        if problems := list(target_problems(model, lora.targets)):
            raise UserError("\n".join(problems))
        if lora.init != "default" and any(isinstance(x, ExpertsTarget) for x in targets_of(model, lora.targets)):
            raise UserError(
                f'lora.init = "{lora.init}" begins at parts of the weights of linear layers, and lora.targets includes '
                "experts; name only linear layers there, or remove lora.init"
            )
        if problem := _rank_problem(model, lora):
            raise UserError(problem)
        return AdapterPlan(LoraScaling(rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora), lora.targets, lora.init)
    files = read_adapter(lora.path)
    sizes = {
        name: shape
        for target in targets_of(model, files.wanted)
        for name, shape in zip(matrix_names(target), target.shapes(files.strength.rank), strict=True)
    }
    if problems := list(base_problems(files, sizes, lora.path)):
        raise UserError("\n".join(problems))
    return AdapterPlan(files.strength, files.wanted, files=dict(files.tensors))


def _rank_problem(model: PreTrainedModel, lora: LoraConfig) -> str | None:
    """Return a sentence for a rank that weights do not have; None for any other."""
    # A of rank 1 has as many columns, and B as many rows, as the weight has inputs and outputs.
    sides = {x.weight: min(a[-1], b[0]) for x in targets_of(model, lora.targets) for a, b in [x.shapes(1)]}
    if lora.rank > (most := max(sides.values())):
        return (
            f"lora.rank = {lora.rank} is a higher rank than any weight of lora.targets has; set it to {most} or less, "
            "or train the whole model without [lora]"
        )
    narrow = min(sides, key=lambda name: sides[name])
    if lora.init != "default" and lora.rank > sides[narrow]:
        return (
            f'lora.init = "{lora.init}" begins at lora.rank = {lora.rank} parts of each weight, and {narrow} has '
            f'{sides[narrow]}; set lora.rank to {sides[narrow]} or less, or lora.init to "default"'
        )
    return None


def peft_config(
    strength: LoraScaling, target_modules: list[str], target_parameters: list[str], *, base: str
) -> dict[str, Any]:
    """Describe adapters as PEFT's adapter_config.json does."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": strength.rank,
        "lora_alpha": strength.alpha,
        "use_rslora": strength.rslora,
        "target_modules": target_modules,
        "target_parameters": target_parameters or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "use_dora": False,
    }


def random_values(matrices: Mapping[str, Tensor], *, seed: int) -> dict[str, Tensor]:
    """Give these matrices random numbers in +-1 / sqrt(columns).

    They depend on the seed and on the matrix's name, not on the ranks or on which other matrices there are.
    """
    found = {}
    for name, matrix in matrices.items():
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
        generator = torch.Generator().manual_seed(mix(seed, number))
        bound = 1.0 / math.sqrt(matrix.shape[1])
        found[name] = (torch.rand(matrix.shape, generator=generator) * 2.0 - 1.0) * bound
    return found


# Starts of adapters that are parts of the weights: the largest singular values (PiSSA), or orthogonal columns (OLoRA).
#
# The papers take the start from the weight. Here the weight stays as it is, and the adapter subtracts its start
# (`layers.Pair`): the base is then still the reference, and the first policy is the base bit for bit.

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
