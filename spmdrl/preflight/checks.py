"""Checks of what a run would start: its environment, and a model that sees images."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config, Section, TuningConfig
from spmdrl.config.environment import SummaryContext
from spmdrl.config.rewards import EnvironmentReward
from spmdrl.data.stream import PromptStream
from spmdrl.data.turns import TurnEncoder
from spmdrl.data.vision import ImageIntake
from spmdrl.envs.client import Environments, open_environments
from spmdrl.families import vision_family
from spmdrl.rollout.env_context import parser_problems, spans_of, start_of
from spmdrl.run import Inputs
from spmdrl.types import UserError

# Try the environment before anything expensive: can it be started, reset with the first prompt, and appended to?


@dataclass(frozen=True, slots=True)
class TriedEnvironment:
    """The environment of a run, open as long as it is being checked."""

    client: Environments | None = None  # None: the run has none
    tools: Sequence[dict[str, Any]] = ()  # schemas of what the policy can call


def open_environment(cfg: Config | TuningConfig, exits: ExitStack) -> TriedEnvironment:
    """Start the environment's processes until `exits` closes. Raises UserError when it cannot be loaded."""
    if isinstance(cfg, TuningConfig) or cfg.environment is None or cfg.debug.load_rollouts is not None:
        return TriedEnvironment()
    _require_settings(cfg.environment)
    client = exits.enter_context(open_environments(cfg.environment))
    return TriedEnvironment(client, client.tools)


def _require_settings(section: Section) -> None:
    """Read every setting: one that is missing, which the user is warned of, must not surprise a process."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Section):
                _require_settings(inner)


def environment_problems(
    cfg: Config | TuningConfig,
    environment: TriedEnvironment,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: frozenset[int],
    prompts: PromptStream,
    images: ImageIntake,
) -> Iterator[str]:
    """Yield a sentence for each reason why episodes cannot go on after a response.

    Raises UserError when the reset with the first prompt fails, or shows an image that cannot be read.
    """
    if isinstance(cfg, TuningConfig) or cfg.environment is None or environment.client is None:
        return
    yield from parser_problems(cfg)
    if not environment.client.gives_rewards and any(isinstance(one, EnvironmentReward) for one in cfg.reward.terms):
        yield (
            'reward.terms has kind = "environment", and the class of environment.source has neither get_reward() nor '
            "an attribute reward, so that every reward would be 0; give it one of them (a reward_func of TRL's "
            'is not called here), or reward its text by a term of kind = "function"'
        )
    (prompt,) = prompts.take(0, 1)
    greeting = environment.client.check(start_of(prompt, cfg.run.seed))
    try:
        spans_of(greeting, images)
    except UserError as error:
        raise UserError(f"the environment's first reset shows an image: {error}") from error
    if cfg.environment.context is not None and not prompt.messages:
        yield (
            f'environment.context.kind = "{cfg.environment.context.kind}" rewrites messages, but the prompts are texts '
            "that no chat template has rendered; put a chat_template.jinja into model.path, or remove "
            "[environment.context]"
        )
    by_role = [one.advantage.estimator for one in cfg.algorithms if one.advantage.compares_roles]
    if by_role and greeting.role is None:
        yield (
            f'advantage.estimator = "{by_role[0]}" compares each role with its own, but what the '
            "environment says first names none; let it return Observation(role=...), or an agent call the model "
            "policy/NAME"
        )
    roles = {message["role"] for message in (*prompt.messages, *greeting.messages)} - {"assistant"}
    tools = environment.tools if greeting.tools is None else greeting.tools
    answers = {"tool" if tools else "user"}
    if isinstance(cfg.environment.context, SummaryContext):
        answers.add("user")  # asks for it
    encoder = TurnEncoder(tokenizer, chat_template=cfg.data.chat_template, tools=tools, stop_token_ids=stop_token_ids)
    yield from encoder.problems(answers | (roles & {"system"}), history=cfg.environment.history)


# Checks of what a model that looks at images can be trained with.


def vision_problems(cfg: Config | TuningConfig, model_config: Any) -> Iterator[str]:
    """Yield a sentence for each setting that a model with a tower does not support."""
    family = vision_family(model_config)
    if family is None:
        return
    if family.sees_whole_images and cfg.parallel.cp > 1 and cfg.parallel.cp_style != "ulysses":
        yield (
            f'parallel.cp_style = "{cfg.parallel.cp_style}", but the tokens of an image of {family.model_type} see '
            'each other, and chunks could divide them; set it to "ulysses", or cp = 1'
        )
    if isinstance(cfg, TuningConfig):
        return
    if cfg.environment is not None and cfg.environment.context is not None:
        yield (
            f'environment.context.kind = "{cfg.environment.context.kind}" leaves out observations, and with '
            f"{family.model_type} those may be images, which an episode that goes on would look for in vain; remove "
            "[environment.context]"
        )
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


def decoded_lines(cfg: Config | TuningConfig, inputs: Inputs) -> Iterator[str]:
    """Decode the images of the first step, for --dry-run, and yield a line that counts those that differ.

    Before, only the beginning of a training image's file is read. Raises UserError with the row of one that is damaged.
    """
    if inputs.images.store is None:
        return
    stream, num_prompts = inputs.prompts, inputs.plan.prompts_per_step
    if isinstance(cfg, TuningConfig):
        shown = [(*pair.prompt.images, *pair.images) for pair in stream.pairs(0, num_prompts)]
    else:
        shown = [prompt.images for prompt in stream.take(0, num_prompts)]
    num_images = len({image.digest for images in shown for image in images})
    yield f"images of the first step, all decoded: {num_images}"
