"""Activation checkpointing of decoder layers.

"full" keeps only the input of a layer and repeats its whole forward pass in backward. "selective" keeps the results of
matrix products and of attention, which take nearly all of the time, and repeats only norms, rotary embeddings and
activation functions. Products that are cheap for the size of their results, such as those with the B of an adapter, say
so and are repeated as well.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Literal

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

Recomputed = Literal["full", "selective"]

# The operations whose results "selective" keeps. They are named, because most exist only where their package does. For
# an autograd.Function, such as linear.py's or flash-attn's, the operations inside it count.
_EXPENSIVE = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::_grouped_mm",
        "aten::_scaled_mm",
        "mkldnn::_linear_pointwise",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "spmdrl::short_attention",
        "spmdrl::plain_attention",
        "spmdrl::gated_delta_rule",
        "spmdrl::state_space_rule",
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


# transformers adds the biases of experts to these products in place, and a saved result must not change afterwards.
_CHANGED_BY_BIASES = frozenset({"aten::_grouped_mm", "aten::bmm", "aten::baddbmm"})

_is_cheap: ContextVar[bool] = ContextVar("_is_cheap", default=False)


@contextmanager
def cheap_products() -> Iterator[None]:
    """Have "selective" repeat the products in this block instead of keeping their results.

    Those of low rank take little time, and their results as much memory as those of a whole weight.
    """
    before = _is_cheap.set(True)
    try:
        yield
    finally:
        _is_cheap.reset(before)


def checkpoint_layers(
    model: PreTrainedModel, layers: Sequence[nn.Module], *, recomputed: Recomputed, every_layers: int
) -> None:
    """Recompute the first of every `every_layers` decoder layers of the model in backward.

    transformers recomputes only layers in training mode. The flag is set on the chosen layers but not on the modules
    inside them, so dropout stays off, and all other layers keep their activations.
    """
    options: dict[str, Any] = {"use_reentrant": False}
    if recomputed == "selective":
        has_biased_experts = any(".experts." in name and name.endswith("_bias") for name, _ in model.named_parameters())
        saved = _EXPENSIVE - _CHANGED_BY_BIASES if has_biased_experts else _EXPENSIVE
        options["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_save_or_recompute, saved))
    model.gradient_checkpointing_enable(options)
    for layer in layers[::every_layers]:
        layer.training = True


def _save_or_recompute(
    saved: frozenset[str], _: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
) -> CheckpointPolicy:
    name = operation.name().partition(".")[0]  # without the overload
    is_saved = name in saved and not _is_cheap.get()
    return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE
