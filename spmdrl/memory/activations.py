"""Bytes of activations and logits in forward and backward of a decoder.

For one token and one layer autograd keeps the tensors below. b is the bytes of an element of the compute dtype, D the
hidden size, A and K the widths of all query heads and of all key heads, H the number of query heads, and I the width of
the MLP:

    norms       n (4 + b) D        the float32 input and the normalized input of each of the n norms (mostly two); n 8 D
                                   where weights are applied in float32, and so for norms of heads
    projections 2 b D              the input of q, k, v, and the input of gate and up
    head norms  (4 + b) (A + K)    where queries and keys have norms of their own
    attention   b (2 A + 2 K) + 4 H   q, k, v, the result (also the input of o), and float32 log-sums
    MLP         4 b I              gate, up, the activated gate, and the input of down; 2 b I of one without a gate
    recurrent   b (2 C + V) + 4 (C + 8 V)   of C channels that are convolved, and V values: what they are projected to,
                                   the inputs of convolution, rule, norm and gate; 7 b D of a short convolution alone

A layer has those parts that its kind has, and the input of its projections once for each of the first and the last two.
Heads of several sizes are counted by their mean. An MLP besides experts adds 4 b times its width, and latent attention
(4 + 2 b) for each value of a latent. Gemma 4 adds 4 K for norms of values; its inputs of each layer's own, of P values,
b (4 P + D) in the layer and (8 + b) P + b D outside; and of one layer of each kind the keys and values that others may
read, whatever is recomputed.

Fused layers (`model/fused.py`) keep less: b D + 4 for each norm (its input and the inverse root), b (A + K) for norms
of heads, and 3 b I for the MLP, whose activated gate is computed again.

Attention kernels without grouped heads get repeated keys and values: 2 A instead of 2 K. With experts, I is the sum
over a token's experts, and each of them adds 2 b D: the token's copy and its result.

Recomputing a layer keeps only its input: b D, or 4 D where the residual stream is float32. Selective recomputation also
keeps the results of products and attention: b (A + 2 K) and b D of the projections, b A + 4 H of attention, 2 b I and
b D of the MLP, or b D for each expert.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Literal

_FLOAT32 = 4

Level = Literal["none", "full", "selective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The widths of a decoder-only model, or of one rank's part under tensor parallelism."""

    num_layers: int
    hidden: int
    query_width: int  # of all heads
    key_width: int  # of all key heads, and of all value heads
    query_heads: int
    head_width: int
    mlp_width: int  # of all experts that one token is routed to
    experts_per_token: int  # 0 without experts
    norms: int  # of [hidden] in a layer
    has_head_norms: bool  # of queries and keys, after their projections
    vocabulary: int
    can_be_fused: bool = False  # whether `model/fused.py` has its layers
    num_attending: int | None = None  # layers with attention; None: all
    num_mlps: int | None = None  # layers with an MLP or experts; None: all
    num_recurrent: int = 0
    recurrent_widths: tuple[int, int] = (0, 0)  # elements of a recurrent layer, in the compute dtype and in float32
    has_gate: bool = True  # the MLP
    cached_width: int | None = None  # of a token's keys in all layers; None: those of every layer
    conv_elements: int = 0  # all that recurrent layers remember of a sequence, in the compute dtype
    state_elements: int = 0  # the same, in float32
    has_wide_norms: bool = False  # which apply their weights in float32
    shared_width: int = 0  # of the MLP besides experts
    heads_share: float = 1.0  # the mean size of heads, of the largest
    rotary_width: int | None = None  # of all rotary embeddings; None: head_width
    own_inputs: int = 0  # values of a layer's own input
    latent_width: int = 0  # of what latent attention projects queries and keys to, and norms
    router_width: int = 0  # experts, over all layers
    passed_keys: int | None = None  # elements of the keys that layers hand to others; None: values have no norms either

    @property
    def key_value_width(self) -> int:
        """Elements of one token's keys and values in all layers."""
        return 2 * (self.num_layers * self.key_width if self.cached_width is None else self.cached_width)

    def split(self, num_ranks: int) -> Decoder:
        """Return one rank's part under tensor parallelism: heads and the MLP are divided, hidden states are not."""
        key_width = max(self.head_width, self.key_width // num_ranks)
        return dataclasses.replace(
            self,
            query_width=self.query_width // num_ranks,
            key_width=key_width,
            cached_width=None if self.cached_width is None else self.cached_width * key_width // self.key_width,
            query_heads=math.ceil(self.query_heads / num_ranks),
            mlp_width=self.mlp_width // num_ranks,
            shared_width=self.shared_width // num_ranks,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ActivationSettings:
    """The settings that decide how many bytes of activations a token needs."""

    level: Level  # of checkpointing
    every_layers: int  # the first of each group of this many layers is checkpointed
    compute_bytes: int  # per element
    repeats_keys: bool  # whether the attention kernel needs keys and values repeated for each query head
    fused: bool = False  # whether norms, rotary embeddings and gated activations are those of `model/fused.py`
    wide_stream: bool = False  # whether the residual stream is float32, whatever the compute dtype


def layer_activation_bytes(decoder: Decoder, settings: ActivationSettings, *, level: Level) -> int:
    """Bytes per token that a layer under checkpointing `level` holds from forward to backward, a mean of all kinds."""
    shared, attention, *parts = _parts(decoder, settings, level=level)
    parts.insert(0, math.ceil(attention * decoder.heads_share))
    present = sum(size * number for size, number in zip(parts, _numbers(decoder), strict=True))
    return shared + math.ceil(present / decoder.num_layers)


def _numbers(decoder: Decoder) -> tuple[int, int, int]:
    """Count the layers with attention, with an MLP, and with a recurrent part."""
    every = decoder.num_layers
    attending = every if decoder.num_attending is None else decoder.num_attending
    return attending, every if decoder.num_mlps is None else decoder.num_mlps, decoder.num_recurrent


def _parts(decoder: Decoder, settings: ActivationSettings, *, level: Level) -> tuple[int, int, int, int]:
    """Bytes per token of what every layer holds, and of attention, an MLP and a recurrent part where it has them."""
    b, d, a, k = settings.compute_bytes, decoder.hidden, decoder.query_width, decoder.key_width
    if level == "full":
        return (_FLOAT32 if settings.wide_stream else b) * d, 0, 0, 0
    attention = b * a + _FLOAT32 * decoder.query_heads
    narrow, wide = decoder.recurrent_widths
    if level == "selective":
        results_of_down = max(1, decoder.experts_per_token) * b * d
        of_mlp = (2 if decoder.has_gate else 1) * b * (decoder.mlp_width + decoder.shared_width) + results_of_down
        of_mlp += b * d if decoder.shared_width else 0
        of_mlp += b * (decoder.own_inputs + d) if decoder.own_inputs else 0
        return b * d, b * (a + 2 * k) + b * d + attention, of_mlp, b * (narrow + d) // 2 + _FLOAT32 * wide // 6
    head_norms = (b if settings.fused else _norm_bytes(decoder, settings, width=1)) * (a + k)
    head_norms = head_norms if decoder.has_head_norms else 0
    head_norms += 0 if decoder.passed_keys is None else _FLOAT32 * k
    latents = (_FLOAT32 + 2 * b) * decoder.latent_width
    own = b * (4 * decoder.own_inputs + d) if decoder.own_inputs else 0
    tensors = (3 if settings.fused else 4) if decoder.has_gate else 2
    gates = tensors * b * (decoder.mlp_width + decoder.shared_width)
    return (
        decoder.norms * _norm_bytes(decoder, settings),
        b * d + head_norms + latents + attention + b * (a + 2 * (a if settings.repeats_keys else k)),
        own + b * d + gates + 2 * decoder.experts_per_token * b * d,
        b * (d + narrow) + _FLOAT32 * wide,
    )


def _norm_bytes(decoder: Decoder, settings: ActivationSettings, *, width: int | None = None) -> int:
    """Bytes per token that a norm of hidden states keeps, or of `width` values of heads."""
    b, d = settings.compute_bytes, width or decoder.hidden
    return b * d + _FLOAT32 if settings.fused else (_FLOAT32 + (_FLOAT32 if decoder.has_wide_norms else b)) * d


def activation_bytes(decoder: Decoder, settings: ActivationSettings, *, num_tokens: int) -> int:
    """Bytes that a forward pass over `num_tokens` tokens keeps for the backward pass.

    Outside the layers these are the last norm, the input of the head, and the two tables of the rotary embedding.
    """
    recomputed = 0 if settings.level == "none" else math.ceil(decoder.num_layers / settings.every_layers)
    in_layers = recomputed * layer_activation_bytes(decoder, settings, level=settings.level)
    in_layers += (decoder.num_layers - recomputed) * layer_activation_bytes(decoder, settings, level="none")
    b = settings.compute_bytes
    outside = _norm_bytes(decoder, settings) + b * decoder.hidden + 2 * b * (decoder.rotary_width or decoder.head_width)
    if decoder.own_inputs:
        outside += (2 * _FLOAT32 + b) * decoder.num_layers * decoder.own_inputs + b * decoder.hidden
    if settings.level != "none":
        outside += 2 * b * (decoder.passed_keys or 0)
    return num_tokens * (in_layers + outside)


def layer_workspace_bytes(decoder: Decoder, settings: ActivationSettings, *, num_tokens: int) -> int:
    """Bytes that the backward pass of one layer needs in addition: recomputed activations and the widest gradients.

    The gradients are three of [T, I] and of [T, D] in the compute dtype and, unless layers are fused, one of [T, D] in
    float32, of a norm.
    """
    b = settings.compute_bytes
    every, saved = (_parts(decoder, settings, level=level) for level in ("none", settings.level))
    shared, *parts = (whole - part for whole, part in zip(every, saved, strict=True))
    present = [size for size, number in zip(parts, _numbers(decoder), strict=True) if number]
    # Where layers have one part each, the largest; else attention or a recurrent part, and the MLP.
    is_alone = sum(_numbers(decoder)) <= decoder.num_layers
    recomputed = shared + (max(present) if is_alone else sum(present))
    widest = max(decoder.mlp_width + decoder.hidden, decoder.experts_per_token * decoder.hidden)
    gradients = 3 * b * widest + (0 if settings.fused else _FLOAT32 * decoder.hidden)
    return num_tokens * (recomputed + gradients)


def forward_bytes(decoder: Decoder, *, compute_bytes: int, num_tokens: int) -> int:
    """Bytes of one layer's activations at their peak without gradients: the stream, its copy and the widest part."""
    widest = max(3 * decoder.mlp_width, 3 * decoder.query_width + 2 * decoder.key_width)
    return num_tokens * compute_bytes * (2 * decoder.hidden + widest) + num_tokens * _FLOAT32 * decoder.hidden


def logits_bytes(
    decoder: Decoder,
    *,
    num_tokens: int,
    chunk_tokens: int,
    tile_elements: int,
    tile_columns: int,
    compute_bytes: int,
    on_gpu: bool,
    has_teacher: bool = False,
) -> int:
    """Bytes of the head's backward pass at its peak, when every token is a loss token.

    For a tile of R tokens and W columns: the logits [R, W], of which a GPU has those of the next tile as well, in the
    compute dtype, and a CPU four float32 copies (log-probabilities, their exponentials, terms of the entropy); and of
    the columns' weights [W, D] the float32 gradient, and a transposed copy and a product in the compute dtype, which a
    GPU needs for float32 alone. The hidden states' gradient [T, D] is float32. With a teacher's head, tiles of half as
    many tokens are in four float32 copies on a GPU too (both models' logits, what they differ by and its exponential),
    and twice in the compute dtype.
    """
    rows = min(chunk_tokens, num_tokens)
    columns = min(decoder.vocabulary, tile_columns, max(1, tile_elements // rows))
    each = 2 * compute_bytes if on_gpu else 4 * _FLOAT32
    if has_teacher:
        each = max(each, 2 * _FLOAT32 + compute_bytes)
    logits = rows * columns * each
    adds_products = on_gpu and compute_bytes == 2
    weights = columns * decoder.hidden * (_FLOAT32 + (0 if adds_products else 2 * compute_bytes))
    return logits + weights + num_tokens * decoder.hidden * _FLOAT32
