"""The parts that the episodes of a run share: environments, the encoder of turns, the parser of tool calls, and images
that environments show."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.algo.seeds import environment_seed
from spmdrl.config import Config, EnvironmentConfig
from spmdrl.conversation import Action, EpisodeStart, Observation
from spmdrl.data.images import ImageFile
from spmdrl.data.turns import TurnEncoder, TurnParser, action_of, parse
from spmdrl.data.vision import NO_IMAGES, ImageIntake
from spmdrl.envs.protocol import Environments, OpenEpisode
from spmdrl.types import ImageSpan, Prompt, Rollout, Turn, UserError

FALLBACK = "hermes"  # the parser of tool calls that needs no SGLang


def start_of(prompt: Prompt, run_seed: int) -> EpisodeStart:
    """Return the input of the reset of a prompt's environment: the same for all its rollouts."""
    return EpisodeStart(
        prompt=prompt.question,
        answer=prompt.answer,
        task=prompt.task,
        metadata=prompt.metadata,
        seed=environment_seed(run_seed, prompt.prompt_id),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvContext:
    """The parts that the episodes of a run share: environments, and the translation between these and the policy."""

    cfg: EnvironmentConfig
    client: Environments
    encoder: TurnEncoder
    action_of: Callable[[tuple[int, ...]], Action]  # reads a response
    run_seed: int
    images: ImageIntake = NO_IMAGES  # what becomes of images that environments show
    needs_roles: bool = False  # observations must name the role in which the policy acts

    def open(self, prompt: Prompt, turns: Sequence[Turn], initial_observation: Observation | None) -> OpenEpisode:
        """Open an environment for a prompt; it replays what an episode has seen of it first."""
        history = [
            (turn.action, turn.observation)
            for turn in turns
            if turn.action is not None and turn.observation is not None
        ]
        return self.client.open(start_of(prompt, self.run_seed), history, initial_observation)


def open_env_context(
    cfg: Config,
    client: Environments,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: frozenset[int],
    images: ImageIntake,
) -> EnvContext:
    """Put together what episodes share; `client` has the environments, `images` reads what they show."""
    assert cfg.environment is not None
    return EnvContext(
        cfg=cfg.environment,
        client=client,
        encoder=TurnEncoder(
            tokenizer,
            chat_template=cfg.data.chat_template,
            tools=client.tools,
            stop_token_ids=stop_token_ids,
            images=images,
        ),
        action_of=functools.partial(
            action_of, tokenizer, parser=_parser(cfg, client.tools), stop_token_ids=stop_token_ids
        ),
        run_seed=cfg.run.seed,
        images=images,
        needs_roles=any(one.advantage.compares_roles for one in cfg.algorithms),
    )


# The images that environments have shown to the policy: made into pixels once, and again where these are gone.


def spans_of(observation: Observation, images: ImageIntake) -> tuple[ImageSpan, ...]:
    """Store the pixels of an observation's images; the first placeholder of each is token 0.

    Raises UserError when one cannot be read.
    """
    return tuple(images.span(ImageFile(file)) for file in observation.images)


def restore_shown(shown: Sequence[ImageSpan], observations: Iterable[Observation], images: ImageIntake) -> None:
    """Put the images that a policy was `shown` by its environment into the node's store again, unless they are there.

    `observations` are those of its episode; what follows the images that were shown has not been read. Raises UserError
    when they are others now.
    """
    files = (file for observation in observations for file in observation.images)
    for image, file in zip(shown, files, strict=False):
        if not images.has([image]) and images.span(ImageFile(file)).digest != image.digest:
            raise UserError(
                f"an image of an environment, of {len(file)} bytes, is not what it was before: the model's processor, "
                "data.min_pixels or data.max_pixels have changed since; set them back"
            )


def restore_rollout(rollout: Rollout, images: ImageIntake) -> None:
    """Do that for the images of a finished episode, all of which its last trajectory has, after those of the prompt."""
    restore_shown(rollout.trajectories[-1].images[len(rollout.prompt.images) :], rollout.observations, images)


def parser_problems(cfg: Config) -> Iterator[str]:
    """Yield a sentence when the parser of tool calls is none that there is."""
    if cfg.environment is not None and cfg.environment.tool_parser != FALLBACK:
        from spmdrl.engine.sglang import tool_calls  # which imports SGLang

        yield from tool_calls.parser_problems(cfg.environment.tool_parser)


def _parser(cfg: Config, tools: Sequence[dict[str, Any]]) -> TurnParser:
    assert cfg.environment is not None
    if cfg.environment.tool_parser == FALLBACK:
        return parse
    from spmdrl.engine.sglang import tool_calls  # which imports SGLang

    return tool_calls.parser_named(cfg.environment.tool_parser, tools)
