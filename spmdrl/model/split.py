"""Splitting a model's layers over tp and ep, by the plans that transformers has for each architecture."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from spmdrl.dist.mesh import ModelMeshes
from spmdrl.families import family_of
from spmdrl.model.experts import distribute_experts, split_experts
from spmdrl.model.tensor_parallel import (
    ColwiseGatheringLinear,
    ColwiseLinear,
    LatentLinear,
    RowwiseLinear,
    RowwiseSplittingLinear,
    SharedCopy,
    split_embedding,
    split_linear,
    split_parameter,
    sum_weight_gradients,
)
from spmdrl.model.trunk import Trunk
from spmdrl.types import UserError


def decoder_plan(config: Any) -> Mapping[str, str]:
    """Return the style of each module of a decoder that is split, by its name in the decoder; {} without a plan.

    `config` is the decoder's own, which of a model with a tower is its text config.
    """
    same = family_of(config).plan_of
    plan = getattr(config if same is None else CONFIG_MAPPING[same], "base_model_tp_plan", None)
    return plan or {}


def model_plan(model: PreTrainedModel) -> Mapping[str, str]:
    """Return the style of each module of a model that is split, by its name in the model; {} without a plan."""
    config = model.config.get_text_config()
    if family_of(config).plan_of is None:
        plan: Mapping[str, str] = model.tp_plan
        return plan
    decoder = Trunk(model).decoder
    (name,) = (name for name, module in model.named_modules() if module is decoder)
    return {f"{name}.{module}": style for module, style in decoder_plan(config).items()}


_ALIGNED_BYTES = 16
_LINEARS = {
    "colwise": ColwiseLinear,
    "colwise_gather_output": ColwiseGatheringLinear,
    "rowwise": RowwiseLinear,
    "rowwise_split_input": RowwiseSplittingLinear,
    "mla_kv_a_proj": LatentLinear,
}
_NORM, _SPLIT_EXPERTS, _DISTRIBUTED_EXPERTS = "replicated_with_grad_allreduce", "moe_tp_experts", "ep_dispatch_experts"
# Weights of experts are [experts, outputs, inputs]; "packed_colwise" holds the outputs of two layers, one after the
# other.
_EXPERT_WEIGHTS: dict[str, Placement] = {
    "grouped_gemm": Shard(0),
    "packed_colwise": _StridedShard(1, split_factor=2),
    "colwise": Shard(1),
    "rowwise": Shard(2),
}


@dataclass(frozen=True, slots=True)
class _SplitRule:
    """A plan's rule for one module, or for one parameter of a module of experts."""

    axis: Literal["tp", "ep"]
    style: str
    pattern: str  # the name, with * for the number of a layer
    parent: nn.Module  # of the module
    module: nn.Module
    parameter: str | None

    @property
    def is_supported(self) -> bool:
        """True when this module implements the rule."""
        if self.parameter:
            weight = self.module.get_parameter(self.parameter)
            return self.style == "grouped_gemm" or (self.style in _EXPERT_WEIGHTS and weight.ndim == 3)
        if self.style in _LINEARS:
            return type(self.module).forward is nn.Linear.forward
        if self.style == _SPLIT_EXPERTS:  # transposed weights would be split along the wrong dimension
            return not getattr(self.module, "is_transposed", False)
        return self.style == _NORM or (self.style == _DISTRIBUTED_EXPERTS and hasattr(self.module, "num_experts"))

    @property
    def size(self) -> tuple[int, str] | None:
        """(number, of what) that the rule splits; None when it splits nothing by itself."""
        if self.parameter:
            weight, placement = self.module.get_parameter(self.parameter), _EXPERT_WEIGHTS[self.style]
            assert isinstance(placement, Shard | _StridedShard)
            size = weight.shape[placement.dim]
            if self.style == "packed_colwise":
                return size // 2, f"outputs of each half of {self.pattern}"
            return size, f"{('experts', 'outputs', 'inputs')[placement.dim]} of {self.pattern}"
        if not isinstance(self.module, nn.Linear) or _LINEARS[self.style] is LatentLinear:
            return None
        if self.style.startswith("rowwise"):
            return self.module.in_features, f"inputs of {self.pattern}"
        if self.style == "colwise" and hasattr(self.parent, "qk_rope_head_dim"):  # latent attention
            return int(self.parent.num_heads), f"heads of {self.pattern}"  # type: ignore[arg-type]
        head = getattr(self.parent, "head_dim", None)
        if self.style == "colwise" and isinstance(head, int) and self.module.out_features % head == 0:
            return self.module.out_features // head, f"heads of {self.pattern}"  # attention needs whole ones
        return self.module.out_features, f"outputs of {self.pattern}"


def split_layers(model: PreTrainedModel, meshes: ModelMeshes) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """Split a model over `meshes.tp` and the ep axis of `meshes.expert`; yield its linear layers and their new classes.

    The model is on the meta device, its weights tied and its layers not yet changed. Raises UserError with the
    sentences of `split_problems`.
    """
    tp, ep = meshes.tp, meshes.expert["ep"] if meshes.expert else None
    sizes = {"tp": tp.size(), "ep": ep.size() if ep else 1}
    if problems := list(split_problems(model, **sizes)):
        raise UserError("\n".join(problems))
    shared_copies: dict[nn.Module, SharedCopy] = {}
    for rule in list(_rules(model, **sizes)):
        if rule.parameter:
            mesh = ep if ep and rule.axis == "ep" else tp
            split_parameter(rule.module, rule.parameter, mesh, _EXPERT_WEIGHTS[rule.style])
        elif rule.style == _NORM:
            sum_weight_gradients(rule.module, tp)
        elif rule.style == _SPLIT_EXPERTS:
            split_experts(rule.module, tp)
        elif ep and rule.style == _DISTRIBUTED_EXPERTS:
            distribute_experts(rule.module, ep, tp)
        elif isinstance(rule.module, nn.Linear):
            if rule.parent not in shared_copies:
                shared_copies[rule.parent] = SharedCopy(rule.parent, tp)
            split_linear(rule.module, _LINEARS[rule.style], tp, shared_copies[rule.parent])
            if _LINEARS[rule.style] is LatentLinear:
                vars(rule.module).update(rotated=rule.parent.qk_rope_head_dim)
            yield rule.module, _LINEARS[rule.style]
    if tp.size() > 1:
        _split_vocabulary(model, tp)


def _split_vocabulary(model: PreTrainedModel, tp: DeviceMesh) -> None:
    """Split the embedding and the head (if any) by rows, whatever the plan says: the head's forward is never called."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = head is not None and head.weight is embedding.weight
    split_embedding(embedding, tp)
    if head is None:
        return
    if is_tied:
        head.weight = embedding.weight
    else:
        split_parameter(head, "weight", tp, Shard(0))
    if head.bias is not None:
        split_parameter(head, "bias", tp, Shard(0))


def has_experts(model: PreTrainedModel) -> bool:
    return any(".experts." in name for name, _ in model.named_parameters())


def split_problems(model: PreTrainedModel, *, tp: int, ep: int, element_bytes: int = _ALIGNED_BYTES) -> Iterator[str]:
    """Yield a sentence for each reason why this model cannot be split by parallel.tp and parallel.ep.

    `element_bytes` is the size of an element of the compute dtype. The model may be on the meta device.
    """
    if ep > 1 and not hasattr(model, "ep_plan"):  # what 5.17 and 5.18 have under another name keeps all tokens
        yield (
            f"parallel.ep = {ep}, but transformers {transformers.__version__} has no plans that send tokens to the "
            "experts of other ranks; install 5.19 or newer, or set ep = 1"
        )
        return
    name = type(model).__name__
    rules = list(_rules(model, tp=tp, ep=ep))
    unknown = list(dict.fromkeys((rule.axis, rule.style, rule.pattern) for rule in rules if not rule.is_supported))
    for axis, num_ranks in (("tp", tp), ("ep", ep)):
        instead = "set tp = 1; cp and dp_shard split every model" if axis == "tp" else "set ep = 1"
        if num_ranks > 1 and not any(rule.axis == axis for rule in rules):
            yield f"parallel.{axis} = {num_ranks}, but there is no {axis} plan for {name}; {instead}"
        for _, style, where in (rule for rule in unknown if rule[0] == axis):
            yield (
                f'parallel.{axis} = {num_ranks}, but {name} needs "{style}" for {where}, which is not supported; '
                f"{instead}"
            )
    if not unknown:
        vocabulary = (model.get_input_embeddings().num_embeddings, "tokens of the vocabulary")
        yield from _indivisible("tp", tp, [vocabulary, *(rule.size for rule in rules if rule.axis == "tp")])
        yield from _unaligned(rules, tp=tp, element_bytes=element_bytes)
        yield from _indivisible("ep", ep, [rule.size for rule in rules if rule.axis == "ep"])


def _unaligned(rules: Sequence[_SplitRule], *, tp: int, element_bytes: int) -> Iterator[str]:
    """Yield a sentence when a rank's part of an expert is not a multiple of 16 bytes wide, as grouped_mm requires."""
    widths = {rule.size[0] for rule in rules if rule.axis == "tp" and rule.style == "packed_colwise" and rule.size}
    for width in sorted(widths):
        if width % tp == 0 and width // tp * element_bytes % _ALIGNED_BYTES:
            yield (
                f"parallel.tp = {tp} gives a rank {width // tp} of an expert's {width} features, but grouped products "
                f"need a multiple of {_ALIGNED_BYTES // element_bytes}; lower tp, or distribute experts with ep"
            )


def _indivisible(axis: str, num_ranks: int, sizes: Sequence[tuple[int, str] | None]) -> Iterator[str]:
    """Yield a sentence when some of these sizes cannot be divided by the number of ranks."""
    known = dict.fromkeys(size for size in sizes if size)
    wrong = [f"the {count} {what}" for count, what in known if count % num_ranks]
    if wrong:
        most = math.gcd(*(count for count, _ in known))
        possible = ", ".join(str(n) for n in range(1, most + 1) if most % n == 0)
        yield f"parallel.{axis} = {num_ranks} does not divide {', '.join(wrong)}; possible: {possible}"


def _rules(model: PreTrainedModel, *, tp: int, ep: int) -> Iterator[_SplitRule]:
    """Yield the rules for the model's layers; `_split_vocabulary` handles the ends, and towers stay whole."""
    ep_plan = model.ep_plan if ep > 1 else {}
    tp_plan = model_plan(model) if tp > 1 else {}
    whole = {part for tower in Trunk(model).towers for part in tower.modules()}
    whole |= {model.get_input_embeddings(), model.get_output_embeddings()}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if module in whole:
            continue
        parent = modules[name.rpartition(".")[0]]
        for parameter in (None, *module._parameters):
            pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", f"{name}.{parameter}" if parameter else name)
            if pattern in ep_plan:
                yield _SplitRule("ep", ep_plan[pattern], pattern, parent, module, parameter)
            elif pattern in tp_plan and not any(pattern.startswith(f"{experts}.") for experts in ep_plan):
                yield _SplitRule("tp", tp_plan[pattern], pattern, parent, module, parameter)
            elif parameter is None and module._parameters and _is_left_out(pattern, tp_plan):
                yield _SplitRule("tp", _NORM, pattern, parent, module, parameter)


def _is_left_out(pattern: str, tp_plan: Mapping[str, str]) -> bool:
    """True for what the plan does not name between split layers: the norm of each head, a learned activation."""
    parent, _, name = pattern.rpartition(".")
    before = {"q_norm": "q_proj", "k_norm": "k_proj", "act_fn": "up_proj"}.get(name)
    return before is not None and tp_plan.get(f"{parent}.{before}") == "colwise"
