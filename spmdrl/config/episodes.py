"""Rules about episodes, between `[environment]` and other tables."""

from __future__ import annotations

from collections.abc import Iterator

from spmdrl.config.base import rule
from spmdrl.config.whole import Config


@rule(Config)
def turns_need_an_environment(cfg: Config) -> Iterator[str]:
    if cfg.environment is not None:
        return
    if cfg.advantage.formula.per_turn:
        yield (
            f'advantage.estimator = "{cfg.advantage.estimator}" compares the turns of episodes, but without '
            '[environment] a rollout is one response; add [environment], or set estimator = "grpo"'
        )
    if cfg.loss.environment_coef > 0:
        yield (
            f"loss.environment_coef = {cfg.loss.environment_coef:g} weighs what an environment says, but there is "
            "none; add [environment] or remove it"
        )
