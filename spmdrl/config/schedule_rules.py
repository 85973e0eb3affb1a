"""Rules about what samples tokens: older or other weights, an engine with the same bits, and an environment."""

from __future__ import annotations

from collections.abc import Iterator

from spmdrl.config.base import rule, run_rules
from spmdrl.config.data import ReasoningGymData
from spmdrl.config.environment import ReasoningGymEnvironment, SummaryContext
from spmdrl.config.rewards import EnvironmentReward
from spmdrl.config.whole import Config

# Tokens of older or other weights, and what decides which weights sample them.


@rule(Config)
def engine_logprobs_need_fresh_tokens(cfg: Config) -> Iterator[str]:
    rollout = cfg.rollout
    if cfg.correction.old == "rollout" and cfg.staleness > 0:
        why = "rollout.partial = true" if rollout.partial else f"rollout.max_staleness = {rollout.max_staleness}"
        yield (
            f'correction.old = "rollout" needs tokens that the weights before the update sampled, but with {why} '
            'older weights sample some of them; set correction.old = "trainer"'
        )


@rule(Config)
def older_tokens_need_a_correction(cfg: Config) -> Iterator[str]:
    if cfg.staleness > 1 and _corrects_nothing(cfg):
        yield (
            f"rollout.max_staleness = {cfg.staleness} trains on tokens that weights so many steps older "
            f"sampled, and nothing corrects for it; {_CORRECTIONS}; or lower max_staleness to 1"
        )


_CORRECTIONS = (
    'set correction.kind = "tis", "icepop" or "mis", correction.reject, correction.opsm_delta_nats, or loss.kind = '
    '"dppo_tv" or "dppo_kl"'
)


def _corrects_nothing(cfg: Config) -> bool:
    """Return True for a run that learns from rewards by a loss of ours, as if its own weights had sampled."""
    correction, loss = cfg.correction, cfg.loss
    corrects = correction.kind != "none" or correction.reject != "none" or correction.opsm_delta_nats is not None
    learns_from_rewards = loss.formula is not None and cfg.advantage.estimator != "none"
    return learns_from_rewards and not corrects and not loss.compares_with_engine


@rule(Config)
def fewer_bits_need_a_correction(cfg: Config) -> Iterator[str]:
    if not (fewer := cfg.rollout.fewer_bits):
        return
    if cfg.correction.old == "rollout":
        yield (
            f'correction.old = "rollout" takes what the engine says for what the trainer says, but with {fewer} it '
            'says something else; set correction.old = "trainer"'
        )
    elif _corrects_nothing(cfg):
        yield (
            f"{fewer} samples with other numbers than the trainer's, and nothing corrects for it; {_CORRECTIONS}; or "
            f"remove it"
        )


@rule(Config)
def quantized_engines_take_whole_weights(cfg: Config) -> Iterator[str]:
    if cfg.rollout.quantization is not None and cfg.lora is not None:
        yield (
            f'rollout.quantization = "{cfg.rollout.quantization}" sends whole weights in few bits, to which [lora] '
            "adds adapters that were not tried with it; remove one of them"
        )


@rule(Config)
def deterministic_runs_sample_one_version(cfg: Config) -> Iterator[str]:
    if cfg.run.deterministic and cfg.steps_ahead > 1:
        yield (
            f"rollout.max_staleness = {cfg.rollout.max_staleness} lets timing decide which weights sample a step, but "
            "run.deterministic = true; set partial = true, max_staleness = 0 or 1, or deterministic = false"
        )


@rule(Config)
def tokens_decide_about_refits_in_deterministic_runs(cfg: Config) -> Iterator[str]:
    rollout = cfg.rollout
    if rollout.refit_after_tokens is not None and not (cfg.run.deterministic and rollout.refit_in_flight):
        yield (
            "rollout.refit_after_tokens decides when a refit in flight takes place where run.deterministic = true and "
            "rollout.refit_in_flight = true, and elsewhere the trainer does; set both, or remove it"
        )


@rule(Config)
def cache_survives_the_update(cfg: Config) -> Iterator[str]:
    if cfg.rollout.cache_after_refit != "keep":
        return
    if cfg.run.deterministic:
        yield (
            'rollout.cache_after_refit = "keep" continues from keys and values that a resumed run computes again, with '
            "other bits, but run.deterministic = true; remove cache_after_refit, or set deterministic = false"
        )
    if cfg.rollout.placement == "colocated" and "kv_cache" in cfg.offload.engine:
        yield (
            'offload.engine frees the cache from which rollout.cache_after_refit = "keep" continues; set it to [], or '
            "remove cache_after_refit"
        )


@rule(Config)
def schedules_are_of_free_runs(cfg: Config) -> Iterator[str]:
    if cfg.debug.follow_schedule is None:
        return
    if cfg.run.deterministic:
        yield (
            "debug.follow_schedule repeats a run that went by the real clock, but run.deterministic = true needs no "
            "schedule; remove follow_schedule, or set deterministic = false"
        )
    if not (cfg.steps_open or cfg.rollout.refit_in_flight) or cfg.environment is not None:
        yield (
            "debug.follow_schedule says when engines open prompts ahead and pause, which rollout.partial without "
            "oversample_fraction does, and without [environment], whose answers take their own time; remove it"
        )


@rule(Config)
def deterministic_runs_do_not_oversample(cfg: Config) -> Iterator[str]:
    if cfg.run.deterministic and cfg.rollout.oversample_fraction:
        yield (
            f"rollout.oversample_fraction = {cfg.rollout.oversample_fraction:g} trains on the prompt groups that are "
            "finished first, which depends on timing, but run.deterministic = true; set oversample_fraction = 0 (with "
            "partial = true steps then train on the oldest), or deterministic = false"
        )


# Rules of `true_on_policy`: settings with which engine and trainer cannot compute the same bits.


EXACT_BACKENDS = ("fa3", "triton")  # attention of SGLang whose kernels the trainer can use; the first is the default
# Arguments of SGLang that have nothing to do with numbers.
_SGLANG_KEEPS_EXACT = {
    "disable_radix_cache",
    "grammar_backend",
    "log_level",
    "schedule_conservativeness",
    "schedule_policy",
}


@rule(Config)
def true_on_policy_needs_equal_bits(cfg: Config) -> Iterator[str]:
    if not cfg.true_on_policy:
        return
    clauses = (
        _sglang_attention,
        _sglang_sums,
        _sglang_operators,
        _parallel_sums,
        _trainer_kernels,
        _stale_weights,
        _merged_adapters,
        _fewer_bits,
    )
    if broken := list(run_rules(clauses, cfg)):
        yield f"true_on_policy = true, but {'; '.join(broken)}; change that, or remove true_on_policy"


def _sglang_attention(cfg: Config) -> Iterator[str]:
    rollout = cfg.rollout
    if rollout.engine != "sglang":
        return
    if rollout.attention_backend not in (None, *EXACT_BACKENDS):
        yield (
            f'rollout.attention_backend = "{rollout.attention_backend}" is none that the trainer can use too, and '
            f"{' and '.join(map(repr, EXACT_BACKENDS))} are"
        )
    if rollout.attention_backend == "triton" and rollout.partial:
        yield (
            "rollout.partial = true gives sampled tokens to the kernel for prompts when a response goes on, which with "
            'rollout.attention_backend = "triton" is another than the one they were sampled by, and with "fa3" is not'
        )


def _sglang_sums(cfg: Config) -> Iterator[str]:
    rollout = cfg.rollout
    if rollout.engine == "sglang" and rollout.tp_size > 1:
        yield f"rollout.tp_size = {rollout.tp_size} sums in another order than a trainer, and 1 does not"
    if rollout.engine == "sglang" and (risky := sorted(rollout.sglang.keys() - _SGLANG_KEEPS_EXACT)):
        yield f"rollout.sglang sets {', '.join(risky)}, which may change what the engine computes"


def _sglang_operators(cfg: Config) -> Iterator[str]:
    if cfg.rollout.engine != "sglang":
        return
    if cfg.model.compute_dtype == "float32":
        yield 'model.compute_dtype = "float32" is not what SGLang computes with then, and "bfloat16" is'
    if cfg.model.gradient_checkpointing == "selective":
        yield (
            'model.gradient_checkpointing = "selective" keeps rotary embeddings from being compiled as the engine\'s '
            'are, and "full" does not'
        )


def _parallel_sums(cfg: Config) -> Iterator[str]:
    for setting in ("tp", "cp", "ep"):
        if (size := getattr(cfg.parallel, setting)) > 1:
            yield f"parallel.{setting} = {size} sums in another order than an engine on one rank"


def _trainer_kernels(cfg: Config) -> Iterator[str]:
    if cfg.model.attention != "auto":
        yield f'model.attention = "{cfg.model.attention}" is not exact, and "auto" is'
    if cfg.model.compute_dtype == "float16":
        yield 'model.compute_dtype = "float16" has no exact kernels, and "float32" and "bfloat16" have'
    if cfg.pack.prefix_tree != "off":
        yield f'pack.prefix_tree = "{cfg.pack.prefix_tree}" sums attention in parts, and no engine does'


def _merged_adapters(cfg: Config) -> Iterator[str]:
    if cfg.merges_adapters:
        yield (
            "lora.merge = true gives the engine W + B A, whose products are rounded otherwise than the trainer's, and "
            "false gives it adapters"
        )


def _stale_weights(cfg: Config) -> Iterator[str]:
    if cfg.staleness > 0:
        yield f"rollout.max_staleness = {cfg.staleness} trains on tokens that other weights sampled, which 0 does not"


def _fewer_bits(cfg: Config) -> Iterator[str]:
    if fewer := cfg.rollout.fewer_bits:
        yield f"{fewer} computes with other numbers than the trainer's"


# Rules between `[environment]` and other tables.


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
