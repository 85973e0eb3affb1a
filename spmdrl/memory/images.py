"""Bytes that looking at images takes: of one pass of a tower, of the features that it leaves, and of training it.

For one patch and one block of a tower autograd keeps the tensors below. b is the bytes of an element of the compute
dtype, D the width of the tower, H its heads and I the width of its MLP:

    norms       2 b D each         the input and the output; of a root mean square norm (4 + 2 b) D; of Gemma 4's
                                   seven, some of them of heads, 8 D, two tensors in float32
    attention   5 b D + 4 H        q, k, v, the result for each image and of all images, and float32 log-sums
    rotation    2 b D              rotated queries and keys; without it, one result less is saved
    MLP         2 b I              before and after the activation; 4 b I of a gated one
    clips       11 b D + 3 b I     where the inputs and outputs of products are clipped

Recomputing a block keeps only its input, b D. Selective recomputation keeps the results of products and attention too:
6 b D + 4 H, and b I, or 2 b I of a gated MLP. Besides the blocks there are the pixels, the tables of the rotation, the
last output, the features, and three tensors in what merges patches for each level: of b D for a patch, or for a token
where the mean of its patches is taken first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from spmdrl.config import Config, TuningConfig
from spmdrl.config.plan import Plan
from spmdrl.memory.activations import Level

_FLOAT32 = 4
PREFILL_TOKENS = 16384  # in one prefill of the torch engine
CACHED_TOKENS = 16384  # placeholders whose features the torch engine caches besides those of a prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """The widths of a tower for images."""

    num_blocks: int
    hidden: int
    heads: int
    mlp_width: int
    is_gated: bool  # the MLP
    has_rms_norms: bool  # root mean square norms, else layer norms
    wide_norms: int = 0  # in the place of these two: norms of a block, with those of heads, that keep float32 alone
    clips: bool = False  # inputs and outputs of products
    rotates: bool  # queries and keys, by their places
    pools: bool  # a token is the mean of its patches, else a product sees all of them
    patch_values: int  # numbers in a patch
    patches_per_token: int
    num_levels: int  # tensors that it makes for each token of an image
    features_width: int  # of each of them
    parameters: int
    block_parameters: int  # of one block

    @property
    def features_elements(self) -> int:
        """Numbers that it makes for each token of an image."""
        return self.num_levels * self.features_width


def pass_bytes(tower: Tower, *, num_patches: int, compute_bytes: int) -> int:
    """Bytes of a pass without gradients at its peak: the pixels, and of one block the stream, its copy and the widest
    part, and the stream in float32, of a norm."""
    widest = max(3 * tower.mlp_width, 5 * tower.hidden)
    elements = tower.patch_values + 2 * tower.hidden + widest
    return num_patches * (compute_bytes * elements + _FLOAT32 * tower.hidden)


def saved_block_bytes(tower: Tower, *, level: Level, compute_bytes: int) -> int:
    """Bytes per patch that one block under checkpointing `level` holds from forward to backward."""
    b, d = compute_bytes, tower.hidden
    if level == "full":
        return b * d
    log_sums = _FLOAT32 * tower.heads
    if level == "selective":
        return b * d + 6 * b * d + log_sums + (2 if tower.is_gated else 1) * b * tower.mlp_width
    norms = 2 * (_FLOAT32 + 2 * b) * d if tower.has_rms_norms else 4 * b * d
    if tower.wide_norms:
        norms = tower.wide_norms * 2 * _FLOAT32 * d
    clips = b * (11 * d + 3 * tower.mlp_width) if tower.clips else 0
    attention = (7 if tower.rotates else 4) * b * d + log_sums
    return norms + clips + attention + (4 if tower.is_gated else 2) * b * tower.mlp_width


def saved_bytes(tower: Tower, *, level: Level, every_layers: int, num_patches: int, compute_bytes: int) -> int:
    """Bytes that a pass over `num_patches` patches keeps for the backward pass."""
    recomputed = 0 if level == "none" else math.ceil(tower.num_blocks / every_layers)
    in_blocks = recomputed * saved_block_bytes(tower, level=level, compute_bytes=compute_bytes)
    in_blocks += (tower.num_blocks - recomputed) * saved_block_bytes(tower, level="none", compute_bytes=compute_bytes)
    tables = 2 * _FLOAT32 * tower.hidden // tower.heads if tower.rotates else 0
    around = tower.patch_values + (1 if tower.wide_norms else 2) * tower.hidden  # no last norm
    per_patch = num_patches * (in_blocks + tables + compute_bytes * around)
    merged = 3 * tower.hidden if tower.pools else (3 * tower.num_levels - 1) * tower.hidden * tower.patches_per_token
    return per_patch + num_patches // tower.patches_per_token * compute_bytes * (merged + tower.features_elements)


def block_workspace_bytes(tower: Tower, *, level: Level, num_patches: int, compute_bytes: int) -> int:
    """Bytes that the backward pass of one block needs in addition: what is recomputed, and the widest gradients."""
    every, saved = (saved_block_bytes(tower, level=one, compute_bytes=compute_bytes) for one in ("none", level))
    return num_patches * (every - saved + 3 * compute_bytes * (tower.mlp_width + tower.hidden))


def shown_tokens(cfg: Config | TuningConfig, run: Plan, *, num_sequences: int) -> int:
    """Count the placeholders of `num_rows` sequences at most: all tokens of their prompts show images, and the prompts
    differ where a rank's share has as many."""
    prompts = min(run.prompts_per_step, math.ceil(run.rollouts_per_step / run.num_shares))
    return min(num_sequences, prompts) * cfg.data.max_prompt_tokens


def step_tokens(cfg: Config | TuningConfig, run: Plan) -> int:
    """Count the placeholders of a step on one rank at most."""
    return shown_tokens(cfg, run, num_sequences=run.rollouts_per_step)


def features_bytes(tower: Tower, cfg: Config | TuningConfig, run: Plan, *, compute_bytes: int) -> int:
    """Bytes of features that a rank holds on the host at most. Nobody knows how many images an environment shows: they
    come on top."""
    return step_tokens(cfg, run) * tower.features_elements * compute_bytes


def pixels_bytes(tower: Tower, cfg: Config | TuningConfig, run: Plan) -> int:
    """Bytes of float32 pixels that a rank holds on the host at most, for a tower that encodes in every pass."""
    return step_tokens(cfg, run) * tower.patches_per_token * tower.patch_values * _FLOAT32


def engine_bytes(tower: Tower, cfg: Config, *, num_rows: int, compute_bytes: int) -> int:
    """Bytes that looking at images adds to the torch engine with `num_rows` rollouts at most: one pass, and features of
    a prefill and of those before it."""
    shown = cfg.data.max_prompt_tokens + (cfg.rollout.max_response_tokens if cfg.environment is not None else 0)
    tokens = min(num_rows * shown, PREFILL_TOKENS + CACHED_TOKENS)
    features = tokens * tower.features_elements * compute_bytes
    return features + pass_bytes(tower, num_patches=cfg.pack.max_patches_per_pass, compute_bytes=compute_bytes)
