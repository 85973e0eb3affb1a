"""Checks of what a model that looks at images can be trained with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spmdrl.config import Config, SftConfig
from spmdrl.data.families import family_of
from spmdrl.run import Inputs


def vision_problems(cfg: Config | SftConfig, model_config: Any) -> Iterator[str]:
    """Yield a sentence for each setting that a model with a tower does not support."""
    family = family_of(model_config)
    if family is None:
        return
    if family.sees_whole_images and cfg.parallel.cp > 1 and cfg.parallel.cp_style != "ulysses":
        yield (
            f'parallel.cp_style = "{cfg.parallel.cp_style}", but the tokens of an image of {family.model_type} see '
            'each other, and chunks could divide them; set it to "ulysses", or cp = 1'
        )
    if isinstance(cfg, SftConfig):
        return
    if cfg.true_on_policy:
        yield (
            f"true_on_policy = true, but the tower of {family.model_type} does not compute the same bits for images "
            "alone and together; set it to false"
        )
    if cfg.has_critic and cfg.critic.path not in (None, cfg.model.path):
        yield (
            f'critic.path = "{cfg.critic.path}", but the critic sees images as the tower of model.path does; remove '
            "critic.path"
        )


def decoded_lines(cfg: Config | SftConfig, inputs: Inputs) -> Iterator[str]:
    """Decode the images of the first step, for --dry-run, and yield a line that counts those that differ.

    Before, only the beginning of a training image's file is read. Raises UserError with the row of one that is damaged.
    """
    if inputs.images.store is None:
        return
    stream, num_prompts = inputs.prompts, inputs.plan.prompts_per_step
    if isinstance(cfg, SftConfig):
        shown = [(*pair.prompt.images, *pair.images) for pair in stream.pairs(0, num_prompts)]
    else:
        shown = [prompt.images for prompt in stream.take(0, num_prompts)]
    num_images = len({image.digest for images in shown for image in images})
    yield f"images of the first step, all decoded: {num_images}"
