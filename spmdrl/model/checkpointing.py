"""Which activations of decoder layers are kept for the backward pass, and which are computed again.

Recomputing whole layers keeps the least and costs a second forward pass. Recomputing only what is cheap keeps the
results of matrix products and of attention, where nearly all of a forward pass goes, and computes norms, rotary
embeddings and activation functions again.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

Recomputed = Literal["full", "selective"]

# By name, because most of them exist only where their package does. Of an autograd.Function it is the operations inside
# that count: linear.py's on a CPU, flash-attn's.
_DEAR = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_grouped_mm",
        "aten::_scaled_mm",
        "mkldnn::_linear_pointwise",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "torch_attn::_varlen_attn",
        "aten::_flash_attention_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn_3::_flash_attn_forward",
        "flash_attn_3::fwd",
    }
)


# transformers adds the biases of experts to these products in place; what is kept must not change afterwards.
_CHANGED_BY_BIASES = frozenset({"aten::_grouped_mm", "aten::bmm", "aten::baddbmm"})


def checkpoint_layers(
    model: PreTrainedModel, layers: Sequence[nn.Module], *, recomputed: Recomputed, every_layers: int
) -> None:
    """Recompute the first of every `every_layers` of the model's decoder layers in backward.

    transformers recomputes only layers in training mode; the flag is set on those layers alone, so that dropout
    inside them stays off and the others keep all they need.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if recomputed == "selective":
        has_biased_experts = any(".experts." in name and name.endswith("_bias") for name, _ in model.named_parameters())
        kept = _DEAR - _CHANGED_BY_BIASES if has_biased_experts else _DEAR
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_keep, kept))
    model.gradient_checkpointing_enable(options)
    for layer in layers[::every_layers]:
        layer.training = True


def _keep(
    kept: frozenset[str], _: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    name = operation.name().partition(".")[0]  # without the overload
    return CheckpointPolicy.MUST_SAVE if name in kept else CheckpointPolicy.PREFER_RECOMPUTE
