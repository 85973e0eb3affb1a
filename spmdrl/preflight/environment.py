"""Try the environment before anything expensive: can it be started, reset with the first prompt, and appended to?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config, Section, SftConfig
from spmdrl.data.stream import PromptStream
from spmdrl.data.turns import TurnEncoder
from spmdrl.data.vision import ImageIntake
from spmdrl.envs.open import Environments, open_environments
from spmdrl.rollout.episode import start_of
from spmdrl.rollout.observed import spans_of
from spmdrl.rollout.world import parser_problems
from spmdrl.types import UserError


@dataclass(frozen=True, slots=True)
class TriedEnvironment:
    """The environment of a run, open as long as it is being checked."""

    client: Environments | None = None  # None: the run has none
    tools: Sequence[dict[str, Any]] = ()  # schemas of what the policy can call


def open_environment(cfg: Config | SftConfig, exits: ExitStack) -> TriedEnvironment:
    """Start the environment's processes until `exits` closes. Raises UserError when it cannot be loaded."""
    if isinstance(cfg, SftConfig) or cfg.environment is None or cfg.debug.load_rollouts is not None:
        return TriedEnvironment()
    _require_settings(cfg.environment)
    client = exits.enter_context(open_environments(cfg.environment))
    return TriedEnvironment(client, client.tools)


def _require_settings(section: Section) -> None:
    """Read every setting: one that is missing, which the user is told about, must not surprise a process."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Section):
                _require_settings(inner)


def environment_problems(
    cfg: Config | SftConfig,
    environment: TriedEnvironment,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: frozenset[int],
    prompts: PromptStream,
    images: ImageIntake,
) -> Iterator[str]:
    """Yield a sentence for each reason why episodes cannot go on after a response.

    Raises UserError when the reset with the first prompt fails, or shows an image that cannot be read.
    """
    if isinstance(cfg, SftConfig) or cfg.environment is None or environment.client is None:
        return
    yield from parser_problems(cfg)
    (prompt,) = prompts.take(0, 1)
    greeting = environment.client.check(start_of(prompt, cfg.run.seed))
    try:
        spans_of(greeting, images)
    except UserError as error:
        raise UserError(f"the environment's first reset shows an image: {error}") from error
    roles = {message["role"] for message in (*prompt.messages, *greeting.messages)} - {"assistant"}
    tools = environment.tools if greeting.tools is None else greeting.tools
    answers = "tool" if tools else "user"
    encoder = TurnEncoder(tokenizer, chat_template=cfg.data.chat_template, tools=tools, stop_token_ids=stop_token_ids)
    yield from encoder.problems({*(roles & {"system"}), answers}, history=cfg.environment.history)
