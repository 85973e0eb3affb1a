"""Open what the episodes of a run share: their environments, the encoder of turns, and the parser of tool calls."""

from __future__ import annotations

import functools

from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config
from spmdrl.data.tool_calls import action_of, parse
from spmdrl.data.turns import TurnEncoder
from spmdrl.envs.open import Environments
from spmdrl.rollout.episode import World


def open_world(
    cfg: Config, client: Environments, tokenizer: PreTrainedTokenizerBase, stop_token_ids: frozenset[int]
) -> World:
    """Put together what episodes share; `client` has the environments."""
    assert cfg.environment is not None
    return World(
        cfg=cfg.environment,
        client=client,
        encoder=TurnEncoder(
            tokenizer,
            chat_template=cfg.data.chat_template,
            tools=client.tools,
            stop_token_ids=stop_token_ids,
        ),
        action_of=functools.partial(action_of, tokenizer, parser=parse, stop_token_ids=stop_token_ids),
        run_seed=cfg.run.seed,
    )
