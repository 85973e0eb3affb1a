"""Open what the episodes of a run share: their environments, the encoder of turns, and the parser of tool calls."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config
from spmdrl.data.turns import Parser, TurnEncoder, action_of, parse
from spmdrl.data.vision import ImageIntake
from spmdrl.envs.client import Environments
from spmdrl.rollout.episode import EnvContext

FALLBACK = "hermes"  # the parser of tool calls that needs no SGLang


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


def parser_problems(cfg: Config) -> Iterator[str]:
    """Yield a sentence when the parser of tool calls is none that there is."""
    if cfg.environment is not None and cfg.environment.tool_parser != FALLBACK:
        from spmdrl.engine.sglang import tool_calls  # which imports SGLang

        yield from tool_calls.parser_problems(cfg.environment.tool_parser)


def _parser(cfg: Config, tools: Sequence[dict[str, Any]]) -> Parser:
    assert cfg.environment is not None
    if cfg.environment.tool_parser == FALLBACK:
        return parse
    from spmdrl.engine.sglang import tool_calls  # which imports SGLang

    return tool_calls.parser_named(cfg.environment.tool_parser, tools)
