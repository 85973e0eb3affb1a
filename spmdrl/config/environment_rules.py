"""Rules between `[environment]` and other tables."""

from __future__ import annotations

from collections.abc import Iterator

from spmdrl.config.base import rule
from spmdrl.config.data import ReasoningGymData
from spmdrl.config.environment import ReasoningGymEnvironment, SummaryContext
from spmdrl.config.rewards import EnvironmentReward
from spmdrl.config.whole import Config


@rule(Config)
def environment_reward_needs_an_environment(cfg: Config) -> Iterator[str]:
    if cfg.environment is None and any(isinstance(term, EnvironmentReward) for term in cfg.reward.terms):
        yield 'reward.terms has the kind "environment", but there is no [environment] to give rewards; remove the term'


@rule(Config)
def turns_need_messages(cfg: Config) -> Iterator[str]:
    if cfg.environment is not None and cfg.data.chat_template == "rendered":
        yield (
            'data.chat_template = "rendered" fixes what stands around a prompt, but an [environment] shows its tools '
            'there and goes on after it; set it to "auto", and give the messages of the prompts'
        )


@rule(Config)
def turns_fit_into_the_response(cfg: Config) -> Iterator[str]:
    environment, limit = cfg.environment, cfg.rollout.max_response_tokens
    if environment is None or environment.max_turn_tokens is None or environment.context is not None:
        return
    longest = environment.max_turns * environment.max_turn_tokens
    if longest > limit:
        yield (
            f"environment.max_turns x max_turn_tokens = {environment.max_turns} x {environment.max_turn_tokens} = "
            f"{longest} tokens do not fit into rollout.max_response_tokens = {limit}, which counts everything after "
            "the prompt, the environment's messages too; raise it or lower one of them"
        )


@rule(Config)
def summaries_have_room(cfg: Config) -> Iterator[str]:
    context = cfg.environment.context if cfg.environment is not None else None
    if not isinstance(context, SummaryContext):
        return
    needed, limit = context.max_tokens + context.max_summary_tokens, cfg.rollout.max_response_tokens
    if needed >= limit:
        yield (
            f"environment.context.max_tokens + max_summary_tokens = {context.max_tokens} + "
            f"{context.max_summary_tokens} = {needed} leave no room for the request in rollout.max_response_tokens = "
            f"{limit}, which counts everything after the prompt; raise it or lower one of them"
        )


@rule(Config)
def parsers_belong_to_sglang(cfg: Config) -> Iterator[str]:
    if cfg.environment is not None and cfg.environment.tool_parser != "hermes" and cfg.rollout.engine != "sglang":
        yield (
            f'environment.tool_parser = "{cfg.environment.tool_parser}" is one of SGLang\'s, but rollout.engine = '
            f'"{cfg.rollout.engine}"; set it to "hermes", or engine = "sglang"'
        )


@rule(Config)
def attempts_need_items(cfg: Config) -> Iterator[str]:
    if cfg.environment is None or not isinstance(cfg.environment.source, ReasoningGymEnvironment):
        return
    sources = [*cfg.data.sources, *(cfg.eval.sources if cfg.eval else ())]
    if any(not isinstance(source, ReasoningGymData) for source in sources):
        yield (
            'environment.source.kind = "reasoning_gym" needs items of reasoning-gym, but a source of data or eval has '
            "another kind; use one kind for all"
        )


@rule(Config)
def roles_share_no_reward(cfg: Config) -> Iterator[str]:
    if cfg.advantage.compares_roles and cfg.rollout.dynamic_sampling:
        yield (
            "rollout.dynamic_sampling = true drops prompt groups of equal rewards, which are sums over roles, but "
            f'advantage.estimator = "{cfg.advantage.estimator}" compares each role by itself; set it to false'
        )


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
