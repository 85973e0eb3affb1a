"""What forward and backward of a decoder hold beside its weights: plain arithmetic, in bytes.

For one token and one layer autograd keeps, with b bytes an element of the compute dtype, D the hidden size, A and K the
widths of all query heads and of all key heads, H query heads, and I the width of the MLP:

    norms       n (4 + b) D        the float32 input and the normalized input of each of the n norms (two, mostly)
    projections 2 b D              what enters q, k, v, and what enters gate and up
    head norms  (4 + b) (A + K)    where queries and keys have norms of their own
    attention   b (2 A + 2 K) + 4 H   q, k, v, the result, which o reads too, and float32 log-sums
    MLP         4 b I              gate, up, the activated gate, and what enters down

Attention kernels that know no grouped heads are given keys and values repeated: 2 A for 2 K. Of experts, I is the sum
over those that a token goes to, and 2 b D each come on top: a token's copy and its result.

Recomputing a layer keeps b D, its input, or 4 D where the stream between layers is float32. Recomputing selectively
keeps beside it what products and attention gave:
b (A + 2 K) and b D of the projections, b A + 4 H of attention, 2 b I and b D of the MLP, or b D of each expert.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

_FLOAT32 = 4
_LOGITS_ALIVE = 4  # float32 tiles at the same time: log-probabilities, their exponentials, what entropy takes

Level = Literal["none", "full", "selective"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoder:
    """The widths of a decoder-only model, of one rank's part where layers are cut (tensor parallelism)."""

    num_layers: int
    hidden: int
    query_width: int  # of all heads
    key_width: int  # of all key heads, and of all value heads
    query_heads: int
    head_width: int
    mlp_width: int  # of all experts that one token goes to
    experts_per_token: int  # 0 without experts
    norms: int  # of [hidden] in a layer
    norms_heads: bool  # queries and keys, after their projections
    vocabulary: int

    def cut(self, ways: int) -> Decoder:
        """One of `ways` neighbours' part of each layer: heads and the MLP are divided, hidden states are not."""
        return Decoder(
            num_layers=self.num_layers,
            hidden=self.hidden,
            query_width=self.query_width // ways,
            key_width=max(self.head_width, self.key_width // ways),
            query_heads=math.ceil(self.query_heads / ways),
            head_width=self.head_width,
            mlp_width=self.mlp_width // ways,
            experts_per_token=self.experts_per_token,
            norms=self.norms,
            norms_heads=self.norms_heads,
            vocabulary=self.vocabulary,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """How layers are computed: what decides the bytes a token."""

    level: Level  # of checkpointing
    every_layers: int  # of which the first is checkpointed
    compute_bytes: int  # an element
    repeats_keys: bool  # whether the attention kernel is given keys and values once for each query head
    wide_stream: bool = False  # whether what a layer is given is float32, whatever it computes in


def kept_per_layer(decoder: Decoder, kept: Kept, *, level: Level) -> int:
    """Bytes that one layer under `level` holds for each token from forward to backward."""
    b, d, a, k = kept.compute_bytes, decoder.hidden, decoder.query_width, decoder.key_width
    if level == "full":
        return (_FLOAT32 if kept.wide_stream else b) * d
    attention = b * a + _FLOAT32 * decoder.query_heads
    if level == "selective":
        results_of_down = max(1, decoder.experts_per_token) * b * d
        return b * d + b * (a + 2 * k) + b * d + attention + 2 * b * decoder.mlp_width + results_of_down
    return (
        decoder.norms * (_FLOAT32 + b) * d
        + 2 * b * d
        + ((_FLOAT32 + b) * (a + k) if decoder.norms_heads else 0)
        + attention
        + b * (a + 2 * (a if kept.repeats_keys else k))
        + 4 * b * decoder.mlp_width
        + 2 * decoder.experts_per_token * b * d
    )


def kept_bytes(decoder: Decoder, kept: Kept, *, num_tokens: int) -> int:
    """What a forward pass over so many tokens leaves for the backward pass.

    Beside the layers: the last norm, the hidden states that the head reads, and the rotary embedding's two tables.
    """
    recomputed = 0 if kept.level == "none" else math.ceil(decoder.num_layers / kept.every_layers)
    in_layers = recomputed * kept_per_layer(decoder, kept, level=kept.level)
    in_layers += (decoder.num_layers - recomputed) * kept_per_layer(decoder, kept, level="none")
    beside = (_FLOAT32 + 2 * kept.compute_bytes) * decoder.hidden + 2 * kept.compute_bytes * decoder.head_width
    return num_tokens * (in_layers + beside)


def layer_workspace_bytes(decoder: Decoder, kept: Kept, *, num_tokens: int) -> int:
    """What the backward pass of one layer needs on top: what it computes again, and the gradients of its widest part.

    Those are three of [T, I] and of [T, D] in the compute dtype, and one of [T, D] in float32, of a norm.
    """
    b = kept.compute_bytes
    again = kept_per_layer(decoder, kept, level="none") - kept_per_layer(decoder, kept, level=kept.level)
    gradients = 3 * b * (decoder.mlp_width + decoder.hidden) + _FLOAT32 * decoder.hidden
    return num_tokens * (again + gradients)


def forward_bytes(decoder: Decoder, *, compute_bytes: int, num_tokens: int) -> int:
    """The most that a forward pass without gradients holds in a layer: the stream, its copy and the MLP's width."""
    widest = max(3 * decoder.mlp_width, 3 * decoder.query_width + 2 * decoder.key_width)
    return num_tokens * compute_bytes * (2 * decoder.hidden + widest) + num_tokens * _FLOAT32 * decoder.hidden


def logits_bytes(decoder: Decoder, *, num_tokens: int, chunk_tokens: int, tile_elements: int) -> int:
    """The logits of one tile and what is computed from them, in float32; and the gradient of the hidden states, which
    is summed over the tiles."""
    rows = min(chunk_tokens, num_tokens)
    tile = rows * min(decoder.vocabulary, max(1, tile_elements // rows))
    return _FLOAT32 * (_LOGITS_ALIVE * tile + num_tokens * decoder.hidden)
