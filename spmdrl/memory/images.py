"""Bytes that looking at images takes: of one pass of a tower, and of the features that it leaves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from spmdrl.config import Config, SftConfig
from spmdrl.config.plan import Plan

_FLOAT32 = 4
PREFILL_TOKENS = 16384  # in one prefill of the torch engine
KEPT_TOKENS = 16384  # placeholders whose features the torch engine keeps beside those of a prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Tower:
    """The widths of a tower for images."""

    hidden: int
    mlp_width: int
    num_levels: int  # tensors that it makes for each token of an image
    features_width: int  # of each of them
    parameters: int


def pass_bytes(tower: Tower, *, num_patches: int, compute_bytes: int) -> int:
    """Bytes of one block's activations at their peak without gradients: the stream, its copy and the widest part, and
    the stream in float32, of a norm."""
    widest = max(3 * tower.mlp_width, 5 * tower.hidden)
    return num_patches * (compute_bytes * (2 * tower.hidden + widest) + _FLOAT32 * tower.hidden)


def features_bytes(tower: Tower, cfg: Config | SftConfig, run: Plan, *, compute_bytes: int) -> int:
    """Bytes of features that a rank holds on the host at most: all tokens of its share's prompts show images, and it
    has a rollout of as many prompts as it can. Nobody knows how many an environment shows: they come on top."""
    prompts = min(run.prompts_per_step, math.ceil(run.rollouts_per_step / run.num_shares))
    tokens = prompts * cfg.data.max_prompt_tokens
    return tokens * tower.num_levels * tower.features_width * compute_bytes


def engine_bytes(tower: Tower, cfg: Config, *, num_rows: int, compute_bytes: int) -> int:
    """Bytes that looking at images adds to the torch engine with `num_rows` rollouts at most: one pass, and features of
    a prefill and of those before it."""
    shown = cfg.data.max_prompt_tokens + (cfg.rollout.max_response_tokens if cfg.environment is not None else 0)
    tokens = min(num_rows * shown, PREFILL_TOKENS + KEPT_TOKENS)
    features = tokens * tower.num_levels * tower.features_width * compute_bytes
    return features + pass_bytes(tower, num_patches=cfg.pack.max_patches_per_pass, compute_bytes=compute_bytes)
