"""Tables about the model and how ranks share it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from spmdrl.config.base import Count, PathText, Section, rule


class ModelConfig(Section):
    path: PathText
    """A Hugging Face causal language model directory: config, safetensors weights, tokenizer; or the name of a model on
    a hub, `hf:ORGANISATION/NAME@REVISION`, in huggingface_hub's cache."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Dtype of forward and backward; master weights stay float32. `auto` is float32 on a CPU, bfloat16 on CUDA.
    float16 scales the loss dynamically."""
    attention: Literal["auto", "sdpa", "varlen", "flash_attn_2", "flash_attn_3"] = "auto"
    """Packed attention: `sdpa` runs one call per run of equal lengths and works everywhere; `varlen` is torch's own
    CUDA kernel; `flash_attn_*` need that package. `auto` is `sdpa` on a CPU and `varlen` on CUDA, except where a faster
    package is installed: FlashAttention 3 on Hopper, ring_flash_attn under context parallelism."""
    freeze: Annotated[tuple[str, ...], Field(strict=False)] | None = None
    """Parameters that are not trained, by patterns of their names in the base model, such as `["layers.0.*"]`. Unset:
    the tower of a model that looks at images, which then looks at each image once a step. `[]` trains all."""
    gradient_checkpointing: Literal["none", "full", "selective"] = "none"
    """Activations that the backward pass computes again instead of keeping: none; those of whole decoder layers; or
    `selective`, only norms, rotary embeddings and activation functions, so that no matrix product runs twice."""
    checkpoint_every_layers: Count = 1
    """Apply `gradient_checkpointing` to the first of every N layers; the others keep their activations."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after forward and gather them again in backward; `false` keeps all layers in
    between."""
    prefetch_layers: Count = 1
    """Layers that are gathered ahead of the one that computes. More hides slower links and holds more weights."""
    logits_chunk_tokens: Count = 2048
    """Most tokens whose logits exist at the same time. They are computed in tiles of bounded memory: the more tokens,
    the smaller the part of the vocabulary."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state of the policy in host memory between uses."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model directory."""


@rule(ModelConfig)
def checkpoint_every_layers_needs_checkpointing(model: ModelConfig) -> Iterator[str]:
    if model.gradient_checkpointing == "none" and model.checkpoint_every_layers > 1:
        yield (
            f"checkpoint_every_layers = {model.checkpoint_every_layers} has no meaning with "
            'gradient_checkpointing = "none", where no layer is recomputed; set that to "full" or "selective", or '
            "remove checkpoint_every_layers"
        )


class ParallelConfig(Section):
    dp_replicate: Count = 1
    """Copies of the policy, each sharded over the other ranks that train; gradients are summed over them (HSDP)."""
    dp_shard: Count | None = None
    """Ranks that share a copy and work on different sequences (FSDP). Unset: as many as the other settings leave."""
    cp: Count = 1
    """Context parallelism: neighbours that each compute a chunk of the same packed tokens. A copy is sharded over them
    too."""
    cp_style: Literal["all_gather", "ulysses"] = "all_gather"
    """`all_gather` gathers keys and values, a few heads at a time; `ulysses` exchanges tokens for heads, which cp must
    divide. See `docs/context.md`."""
    tp: Count = 1
    """Tensor parallelism: neighbours that each hold a part of every layer and compute the same tokens."""
    ep: Count = 1
    """Expert parallelism: neighbours that share the experts of a layer, to which tokens travel. It regroups the
    ranks of a copy and needs no others."""


@rule(ParallelConfig)
def cp_style_needs_cp(parallel: ParallelConfig) -> Iterator[str]:
    if parallel.cp == 1 and parallel.cp_style != "all_gather":
        yield f'cp_style = "{parallel.cp_style}" has no meaning with cp = 1; set cp above 1, or remove it'
