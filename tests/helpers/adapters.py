"""Adapters with random numbers, and a model that has them merged."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.model.lora.adapters import matrix_names
from spmdrl.model.lora.layers import ExpertsTarget
from spmdrl.model.lora.targets import targets_of
from spmdrl.model.policy import Policy
from spmdrl.refit.bucket import AdapterVersion, bucket_of
from spmdrl.types import Sequence as Tokens

ALL_LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def random_adapters(
    model: nn.Module, version: int, *, rank: int = 4, targets: Sequence[str] = ALL_LINEAR, **config: Any
) -> AdapterVersion:
    """Adapters of a version, whose number is the seed; they change the model's answers."""
    generator = torch.Generator().manual_seed(version)
    tensors: dict[str, Tensor] = {}
    for name, layer in model.named_modules():
        if name.rpartition(".")[2] in targets and isinstance(layer, nn.Linear):
            outputs, inputs = layer.weight.shape
            tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(rank, inputs, generator=generator) / inputs**0.5
            tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(outputs, rank, generator=generator) / 8
    of_experts = [target for target in targets_of(model, targets) if isinstance(target, ExpertsTarget)]
    for target in of_experts:
        for name, shape in zip(matrix_names(target), target.shapes(rank), strict=True):
            tensors[name] = torch.randn(shape, generator=generator) / 8
    bucket = bucket_of(list(tensors.items()))
    flat = torch.empty(bucket.num_bytes, dtype=torch.uint8)
    for entry in bucket.flat_entries:
        entry.view(flat).copy_(tensors[entry.name])
    about = {"peft_type": "LORA", "r": rank, "lora_alpha": 2.0 * rank, "target_modules": list(targets)}
    about["target_parameters"] = [target.weight for target in of_experts] or None
    return AdapterVersion(version, about | config, bucket, flat)


@torch.no_grad()
def merged(model: nn.Module, adapters: AdapterVersion) -> Any:
    """A copy of the model with W + scale B A as its weights."""
    whole, tensors = copy.deepcopy(model), adapters.tensors
    for name, a in tensors.items():
        if name.endswith("lora_A.weight") and ".experts." not in name:
            layer = whole.get_submodule(name.removeprefix(PREFIX).removesuffix(".lora_A.weight"))
            layer.weight += adapters.scale * tensors[name.replace("lora_A", "lora_B")] @ a
    for target in targets_of(whole, adapters.config["target_parameters"] or ()):
        matrices = (tensors[name] for name in matrix_names(target))
        whole.get_parameter(target.weight).add_(target.product(*matrices), alpha=adapters.scale)
    return whole


class NoTokenizer:
    """In the place of a tokenizer, for an export of weights."""

    def save_pretrained(self, folder: Path) -> None:
        """Write nothing."""


def token_mean_loss(model: Any, sequences: Sequence[Tokens]) -> Tensor:
    """The loss of fine-tuning that transformers' own forward pass gives, averaged over all trained tokens."""
    losses, num_tokens = [], 0
    for sequence in sequences:
        pairs = zip(sequence.token_ids, sequence.loss_mask, strict=True)
        labels = torch.tensor([[token if trained else -100 for token, trained in pairs]])
        count = sum(sequence.loss_mask)
        losses.append(count * model(input_ids=torch.tensor([sequence.token_ids]), labels=labels).loss)
        num_tokens += count
    return torch.stack(losses).sum() / num_tokens


@torch.no_grad()
def change_adapters(policy: Policy, amount: float) -> None:
    """Change every adapter as an update would: alike on every rank."""
    assert policy.adapters is not None
    tensors = policy.adapters.trained
    for number, (name, tensor) in enumerate(tensors.items()):
        generator = torch.Generator().manual_seed(number)
        tensors[name] = tensor + amount * torch.randn(tensor.shape, generator=generator).to(tensor)
    policy.adapters.load(tensors)
