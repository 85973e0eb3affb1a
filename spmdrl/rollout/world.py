"""Open what the episodes of a run share: their environments, the encoder of turns, and the parser of tool calls."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config
from spmdrl.data.tool_calls import action_of, parse
from spmdrl.data.turns import TurnEncoder
from spmdrl.envs.open import Environments
from spmdrl.rollout.episode import World

_MAX_KEPT_ENCODERS = 64  # for tools that came with an agent's calls


def open_world(
    cfg: Config, client: Environments, tokenizer: PreTrainedTokenizerBase, stop_token_ids: frozenset[int]
) -> World:
    """Put together what episodes share; `client` has the environments."""
    assert cfg.environment is not None

    def encoder(tools: Sequence[dict[str, Any]]) -> TurnEncoder:
        return TurnEncoder(tokenizer, chat_template=cfg.data.chat_template, tools=tools, stop_token_ids=stop_token_ids)

    return World(
        cfg=cfg.environment,
        client=client,
        encoder=encoder(client.tools),
        encoder_with=_kept(encoder),
        action_of=functools.partial(action_of, tokenizer, parser=parse, stop_token_ids=stop_token_ids),
        run_seed=cfg.run.seed,
    )


def _kept(
    encoder: Callable[[Sequence[dict[str, Any]]], TurnEncoder],
) -> Callable[[Sequence[dict[str, Any]]], TurnEncoder]:
    """Make an encoder once for each set of tools."""

    @functools.lru_cache(_MAX_KEPT_ENCODERS)
    def encoder_of(tools: str) -> TurnEncoder:
        return encoder(json.loads(tools))

    return lambda tools: encoder_of(json.dumps(tools))
