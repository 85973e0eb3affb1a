"""Rules between tables."""

from __future__ import annotations

from collections.abc import Iterator

from spmdrl.algo.packing import padding_tokens
from spmdrl.config.base import is_set, rule
from spmdrl.config.engines import ENGINE_SETTINGS, ENGINES, EngineFacts, engine_facts, engine_name_problems
from spmdrl.config.errors import all_keys, did_you_mean, is_by_name, sections_at
from spmdrl.config.rewards import JudgeReward, ModelReward
from spmdrl.config.whole import Config, PreferencesConfig, TuningConfig


@rule(Config)
def critic_needs_gae(cfg: Config) -> Iterator[str]:
    if not cfg.has_critic and any(is_set(cfg.critic, name) for name in type(cfg.critic).model_fields):
        yield (
            f'advantage.estimator = "{cfg.advantage.estimator}" asks no critic, so that [critic] has no meaning; '
            'set estimator = "gae", or remove [critic]'
        )


@rule(Config)
def critic_warmup_ends_before_the_run(cfg: Config) -> Iterator[str]:
    if cfg.critic.warmup_steps >= cfg.run.num_steps:
        yield (
            f"critic.warmup_steps = {cfg.critic.warmup_steps} leaves no step of run.num_steps = "
            f"{cfg.run.num_steps} to train the policy in; lower it"
        )


@rule(Config)
def group_size_allows_the_estimator(cfg: Config) -> Iterator[str]:
    estimator, group_size = cfg.advantage.estimator, cfg.rollout.group_size
    if group_size < (smallest := cfg.advantage.formula.smallest_group):
        yield (
            f'rollout.group_size = {group_size} leaves advantage.estimator = "{estimator}" no other rollout of the '
            f'prompt to compare with; set group_size to {smallest} or more, or estimator = "remax" or "gae"'
        )


@rule(Config)
def k_is_below_group_size(cfg: Config) -> Iterator[str]:
    group_size = cfg.rollout.group_size
    if "k" in cfg.advantage.formula.settings and (k := cfg.advantage.settings["k"]) >= group_size:
        yield (
            f"advantage.k = {k} of rollout.group_size = {group_size} rollouts leaves nothing to compare the best "
            f"of k with; set k to {group_size - 1} or less, or raise group_size"
        )


@rule(Config)
def kl_in_reward_needs_scored_baselines(cfg: Config) -> Iterator[str]:
    if cfg.reward.kl_coef > 0 and cfg.advantage.compares_with_greedy:
        yield (
            f"reward.kl_coef = {cfg.reward.kl_coef:g} takes the divergence off every reward, but "
            f'advantage.estimator = "{cfg.advantage.estimator}" compares with a greedy response, which policy and '
            "reference give no log-probabilities; set loss.kl_coef instead"
        )


@rule(Config)
def max_rl_needs_rewards_of_zero_or_more(cfg: Config) -> Iterator[str]:
    reward = cfg.reward
    lowering = {"overlong_tokens": reward.overlong_tokens, "kl_coef": reward.kl_coef}
    if cfg.advantage.estimator == "max_rl" and (names := [name for name, value in lowering.items() if value]):
        yield (
            f'advantage.estimator = "max_rl" divides by the mean reward of a group, which reward.{names[0]} = '
            f'{lowering[names[0]]:g} could make negative; remove that, or use "grpo"'
        )


@rule(Config)
def terms_are_compared_one_by_one(cfg: Config) -> Iterator[str]:
    if not cfg.advantage.formula.per_term:
        return
    estimator = f'advantage.estimator = "{cfg.advantage.estimator}"'
    if len(cfg.reward.terms) + (cfg.reward.overlong_tokens > 0) < 2:
        yield f'{estimator} compares the terms of a reward one by one, and there is one; set "grpo", or add a term'
    if cfg.reward.kl_coef > 0:
        yield (
            f"reward.kl_coef = {cfg.reward.kl_coef:g} takes the divergence off a reward, and {estimator} compares its "
            "terms one by one; set loss.kl_coef instead"
        )
    if cfg.rollout.dynamic_sampling:
        yield (
            "rollout.dynamic_sampling = true drops groups of equal rewards, whose terms may differ, and teach "
            f"something with {estimator}; remove one of them"
        )


@rule(Config)
def kl_counts_once(cfg: Config) -> Iterator[str]:
    if cfg.loss.kl_coef > 0 and cfg.reward.kl_coef > 0:
        yield (
            f"loss.kl_coef = {cfg.loss.kl_coef:g} and reward.kl_coef = {cfg.reward.kl_coef:g} would count the "
            "divergence to the reference twice; remove one of them"
        )


@rule(Config)
def sequence_losses_need_sequence_advantages(cfg: Config) -> Iterator[str]:
    if is_per_sequence(cfg) and (cfg.advantage.formula.per_token or cfg.advantage.formula.per_turn):
        yield (
            f'loss.kind = "{cfg.loss.kind}" knows one advantage for all tokens of a response, but '
            f'advantage.estimator = "{cfg.advantage.estimator}" gives each its own; change one of them'
        )


@rule(Config)
def sequence_losses_need_sequence_weights(cfg: Config) -> Iterator[str]:
    kind, level = cfg.correction.kind, cfg.correction.level
    if is_per_sequence(cfg) and kind != "none" and level == "token":
        instead = 'kind = "mis", mode = "mask" and level' if kind == "icepop" else "level"
        yield (
            f'correction.kind = "{kind}" at level = "token" weighs tokens one by one, but loss.kind = '
            f'"{cfg.loss.kind}" has one ratio for a whole response, so that each token would be trained with the mean '
            f'weight of all; set {instead} = "geometric" or "sequence"'
        )


@rule(Config)
def sequence_losses_reject_sequences(cfg: Config) -> Iterator[str]:
    if is_per_sequence(cfg) and cfg.correction.reject == "token":
        yield (
            f'correction.reject = "token" leaves out tokens, but loss.kind = "{cfg.loss.kind}" takes its ratio from '
            'all tokens of a response, so that they would be trained on; set it to "geometric" '
            'or "sequence"'
        )


@rule(Config)
def the_engine_is_compared_with_once(cfg: Config) -> Iterator[str]:
    if cfg.loss.compares_with_engine and cfg.correction.kind != "none":
        yield (
            f'loss.kind = "{cfg.loss.kind}" takes its ratio to what the engine says, so that correction.kind = '
            f'"{cfg.correction.kind}" would count the mismatch twice; remove correction.kind'
        )
    if cfg.loss.compares_with_engine and cfg.debug.assert_on_policy:
        yield (
            f'loss.kind = "{cfg.loss.kind}" takes its ratio to what the engine says, and debug.assert_on_policy = true '
            "asserts that the trainer's ratio to itself is 1; remove assert_on_policy"
        )


@rule(Config)
def teachers_know_no_candidates(cfg: Config) -> Iterator[str]:
    if cfg.rollout.top_k is not None and cfg.distill is not None:
        yield (
            f"rollout.top_k = {cfg.rollout.top_k} makes a token's distribution one over some tokens, and that of a "
            "teacher in [distill] is over all; remove top_k and top_p, or [distill]"
        )


@rule(Config)
def routes_of_the_first_pass_need_several_updates(cfg: Config) -> Iterator[str]:
    if cfg.correction.router_replay == "R2" and cfg.loss.updates_per_step == 1:
        yield (
            'correction.router_replay = "R2" replays the routes of the pass before the updates, and with '
            "loss.updates_per_step = 1 the only update takes the same by itself; raise updates_per_step, or set "
            'router_replay to "none", or to "R3" for tokens that other weights sampled'
        )
    if cfg.correction.router_replay == "R2" and cfg.correction.old == "rollout":
        yield (
            'correction.router_replay = "R2" needs the pass before the updates, which correction.old = "rollout" '
            'saves; set old = "trainer"'
        )


def is_per_sequence(cfg: Config) -> bool:
    """True for a policy loss that knows one advantage for all tokens of a response."""
    return cfg.loss.formula is not None and cfg.loss.formula.per_sequence


@rule(Config)
def dynamic_sampling_needs_group_comparison(cfg: Config) -> Iterator[str]:
    if cfg.rollout.dynamic_sampling and cfg.advantage.formula.per_token:
        yield (
            "rollout.dynamic_sampling = true drops groups of equal rewards, which do teach something with "
            f'advantage.estimator = "{cfg.advantage.estimator}", where no reward is compared with its group\'s; '
            "remove one of them"
        )


@rule(Config)
def overlong_tokens_are_below_the_limit(cfg: Config) -> Iterator[str]:
    limit = cfg.rollout.max_response_tokens
    if cfg.reward.overlong_tokens >= limit:
        yield (
            f"reward.overlong_tokens = {cfg.reward.overlong_tokens} is not below rollout.max_response_tokens = "
            f"{limit}, so that every response would be punished for its length; lower it"
        )


@rule(Config)
def offloaded_policy_is_not_moved(cfg: Config) -> Iterator[str]:
    if cfg.model.cpu_offload and cfg.offload.trainer != "none":
        yield (
            "model.cpu_offload = true keeps the policy in host memory at all times, so there is nothing for "
            f'offload.trainer = "{cfg.offload.trainer}" to move; set it to "none", or model.cpu_offload = false'
        )


@rule(Config)
def state_on_host_is_not_moved(cfg: Config) -> Iterator[str]:
    if cfg.optim.state_on_host and cfg.offload.trainer == "optimizer":
        yield (
            "optim.state_on_host = true keeps the optimizer's state on the host at all times, so there is nothing "
            'for offload.trainer = "optimizer" to move; set it to "all" or "none", or optim.state_on_host = false'
        )


@rule(Config, TuningConfig)
def state_on_host_needs_the_device(cfg: Config | TuningConfig) -> Iterator[str]:
    if cfg.model.cpu_offload and cfg.optim.state_on_host:
        yield (
            "model.cpu_offload = true runs the optimizer on the host, where its state is, so there is nothing for "
            "optim.state_on_host = true to bring to the device; remove one of them"
        )


@rule(Config)
def offload_needs_colocated(cfg: Config) -> Iterator[str]:
    for name in ("trainer", "engine"):
        if cfg.rollout.placement == "disaggregated" and is_set(cfg.offload, name):
            yield _no_shared_device(f"offload.{name}")


@rule(Config)
def transport_needs_colocated(cfg: Config) -> Iterator[str]:
    if cfg.rollout.placement == "disaggregated" and is_set(cfg.refit, "transport"):
        yield _no_shared_device("refit.transport")


def _no_shared_device(setting: str) -> str:
    return (
        f'{setting} has no meaning for rollout.placement = "disaggregated", where trainer and engine share no device; '
        "remove it"
    )


@rule(Config)
def engine_has_a_name(cfg: Config) -> Iterator[str]:
    yield from engine_name_problems(cfg.rollout.engine)


@rule(Config)
def settings_belong_to_the_engine(cfg: Config) -> Iterator[str]:
    if cfg.rollout.engine in ENGINES:  # preflight asks a user's engine, whose code it may load
        yield from engine_setting_problems(cfg, engine_facts(cfg.rollout.engine))


@rule(Config)
def released_graphs_need_graphs(cfg: Config) -> Iterator[str]:
    if "cuda_graph" in cfg.offload.engine and not cfg.rollout.cuda_graphs:
        yield 'offload.engine names "cuda_graph", but rollout.cuda_graphs = false; leave it out'


@rule(Config)
def loaded_rollouts_allow_no_evaluation(cfg: Config) -> Iterator[str]:
    if cfg.debug.load_rollouts is not None and cfg.eval is not None:
        yield (
            "debug.load_rollouts starts no engine, so nobody can answer the held-out prompts of [eval]; remove "
            "[eval], or evaluate the exported model"
        )


@rule(Config)
def loaded_rollouts_need_colocated(cfg: Config) -> Iterator[str]:
    if cfg.debug.load_rollouts is not None and cfg.rollout.placement == "disaggregated":
        yield (
            'debug.load_rollouts starts no engine, so that the ranks which rollout.placement = "disaggregated" '
            'gives to engines would have nothing to do; set placement = "colocated"'
        )


@rule(Config, TuningConfig)
def answers_need_evaluations(cfg: Config | TuningConfig) -> Iterator[str]:
    if isinstance(cfg, Config) and cfg.eval is not None:
        return
    if cfg.report.eval_samples:
        yield f"report.eval_samples = {cfg.report.eval_samples}: no held-out prompts are answered here; remove it"
    if cfg.checkpoint.keep_best is not None:
        yield (
            f'checkpoint.keep_best = "{cfg.checkpoint.keep_best}" is measured by evaluations, but there are none; '
            "remove it"
        )


@rule(Config, TuningConfig)
def watchdog_is_faster_than_patience(cfg: Config | TuningConfig) -> Iterator[str]:
    if cfg.watchdog.timeout_s > cfg.run.patience_minutes * 60:
        yield (
            f"watchdog.timeout_s = {cfg.watchdog.timeout_s:g} is more than run.patience_minutes = "
            f"{cfg.run.patience_minutes}, which would end a stuck run first and without stacks; set it to "
            f"{cfg.run.patience_minutes * 60} or less, or raise patience_minutes"
        )


@rule(Config, TuningConfig)
def schedule_ends_with_the_run(cfg: Config | TuningConfig) -> Iterator[str]:
    num_updates = cfg.run.num_steps * (1 if isinstance(cfg, TuningConfig) else cfg.loss.updates_per_step)
    for name in ("warmup_steps", "decay_steps"):
        if (length := getattr(cfg.optim, name)) > num_updates:
            yield (
                f"optim.{name} = {length} is longer than the run, which has {num_updates} optimizer steps; set "
                f"optim.{name} to {num_updates} or less"
            )


@rule(Config, TuningConfig)
def budget_holds_a_sequence(cfg: Config | TuningConfig) -> Iterator[str]:
    if isinstance(cfg, TuningConfig):
        table, longest, times = cfg.table, cfg.answers.max_response_tokens, cfg.sequences_per_row
    else:
        table, longest, times = "rollout", cfg.rollout.max_response_tokens, 1
    max_sequence = (cfg.data.max_prompt_tokens + longest) * times
    budget = cfg.pack.max_tokens_per_micro_batch
    # Micro-batches are filled up to a multiple of cp, and the budget holds with that.
    filled = max_sequence + padding_tokens(max_sequence, cfg.parallel.cp)
    if budget is not None and budget < filled:
        yield (
            f"pack.max_tokens_per_micro_batch = {budget} cannot hold {'a sequence' if times == 1 else 'a pair'} of "
            f"{max_sequence} tokens ({'' if times == 1 else 'twice '}data.max_prompt_tokens + "
            f"{table}.max_response_tokens); set it to {filled} or more, or lower those"
        )


@rule(Config)
def some_terms_score_finished_groups(cfg: Config) -> Iterator[str]:
    for place, term in cfg.reward.group_terms.items():
        name = f'reward.terms.{place}.kind = "{term.kind}"'
        if cfg.rollout.dynamic_sampling:
            yield (
                f"{name} scores when a step has its groups, and rollout.dynamic_sampling = true chooses them by their "
                "rewards before; set it to false"
            )
        if isinstance(term, ModelReward):
            if cfg.environment is not None:
                yield (
                    f"{name} scores one response to a prompt, and [environment] makes conversations; remove one of them"
                )
            if cfg.eval is not None and cfg.eval.success_at is None:
                yield (
                    f"{name} has no full marks by which eval/accuracy could count; set eval.success_at to the reward "
                    "from which a response is right"
                )
        elif isinstance(term, JudgeReward) and term.group is not None and (one := _groups_of_one(cfg, term.group)):
            yield f'reward.terms.{place}.group = "{term.group}" compares responses, and {one} has no others; raise it'


def _groups_of_one(cfg: Config, group: str) -> str | None:
    """The setting by which there is nothing to compare in a group."""
    if cfg.rollout.group_size == 1:
        return "rollout.group_size = 1"
    is_alone = cfg.eval is not None and cfg.eval.samples_per_prompt == 1
    return "eval.samples_per_prompt = 1" if is_alone and group == "ranking" else None


@rule(PreferencesConfig)
def micro_batches_hold_pairs(cfg: PreferencesConfig) -> Iterator[str]:
    number = cfg.pack.sequences_per_micro_batch
    if number is not None and number % 2:
        yield (
            f"pack.sequences_per_micro_batch = {number} divides a pair, whose two sequences are in one micro-batch; "
            f"set it to {number + 1}"
        )


@rule(PreferencesConfig)
def reward_models_are_trained_whole(cfg: PreferencesConfig) -> Iterator[str]:
    if cfg.pairs.trains_reward_model and cfg.lora is not None:
        yield (
            'pairs.loss = "bradley_terry" trains a head of its own, and adapters have none; remove [lora], or train '
            "fewer weights by model.freeze"
        )


@rule(PreferencesConfig)
def margins_belong_to_reward_models(cfg: PreferencesConfig) -> Iterator[str]:
    tables = {"data": cfg.data.sources, "held_out": cfg.held_out.sources if cfg.held_out else ()}
    for table, sources in tables.items():
        for place, source in enumerate(sources):
            if source.margin_column is not None and not cfg.pairs.trains_reward_model:
                yield (
                    f'{table}.sources.{place}.margin_column has no meaning for pairs.loss = "{cfg.pairs.loss}"; remove '
                    'it, or set loss = "bradley_terry"'
                )


@rule(Config, TuningConfig)
def resume_names_settings(cfg: Config | TuningConfig) -> Iterator[str]:
    known = set(all_keys(type(cfg)))
    for name in cfg.resume.changed:
        # Entries of a free table, such as rollout.sglang, have no names of their own.
        parts = name.split(".")
        longest = next((i for i in range(len(parts), 0, -1) if ".".join(parts[:i]) in known), 0)
        if longest and is_by_name(type(cfg).model_fields[parts[0]].annotation):
            continue
        if longest < len(parts) and (not longest or sections_at(type(cfg), tuple(parts[:longest]))):
            hint = did_you_mean(type(cfg), tuple(parts))
            yield f"resume.changed names {name}, which is no setting{hint}"


@rule(Config, TuningConfig)
def biases_of_experts_can_move(cfg: Config | TuningConfig) -> Iterator[str]:
    if cfg.optim.expert_bias_rate is None:
        return
    setting = f"optim.expert_bias_rate = {cfg.optim.expert_bias_rate:g}"
    if isinstance(cfg, TuningConfig):
        yield f"{setting} has no meaning: fine-tuning does not record which experts tokens go to; remove it"
    elif cfg.lora is not None:
        yield f"{setting} changes the base, which engines get once with [lora]; remove one of them"
    elif any(one.follows for one in cfg.models.values()):
        yield f"{setting} moves biases that copies in [models], which follow the policy's weights, do not; remove one"


@rule(TuningConfig)
def memory_report_needs_an_engine(cfg: TuningConfig) -> Iterator[str]:
    if cfg.report.memory:
        yield "report.memory = true has nothing to show: fine-tuning has no engine to make room for; remove it"


# Rules between adapters and other tables.


_WHOLE_ON_EACH_RANK = "keeps the base whole on every rank, on its device"


@rule(Config, TuningConfig)
def merged_belongs_to_adapters(cfg: Config | TuningConfig) -> Iterator[str]:
    if cfg.lora is None and not cfg.export.merged:
        yield "export.merged = false leaves nothing to export without [lora]; set export.at_end = false instead"


@rule(Config, TuningConfig)
def export_dtype_is_that_of_a_whole_model(cfg: Config | TuningConfig) -> Iterator[str]:
    if cfg.lora is not None and not cfg.export.merged and cfg.export.dtype != "auto":
        yield (
            f'export.dtype = "{cfg.export.dtype}" is that of a whole model, and export.merged = false leaves only '
            "adapters, which are float32; remove one of them"
        )


@rule(Config, TuningConfig)
def adapters_freeze_the_whole_model(cfg: Config | TuningConfig) -> Iterator[str]:
    if cfg.lora is not None and cfg.model.freeze is not None:
        yield "model.freeze has no meaning with [lora], under which only adapters are trained; remove one of them"


@rule(Config, TuningConfig)
def adapters_learn_at_one_rate(cfg: Config | TuningConfig) -> Iterator[str]:
    if cfg.lora is not None and cfg.optim.rates:
        yield "optim.rates has no meaning with [lora], under which only adapters are trained; remove one of them"


@rule(Config, TuningConfig)
def a_quantized_base_is_not_divided(cfg: Config | TuningConfig) -> Iterator[str]:
    if cfg.lora is None or cfg.lora.base is None:
        return
    for name in ("tp", "ep"):
        if (size := getattr(cfg.parallel, name)) > 1:
            yield (
                f'lora.base = "{cfg.lora.base}" {_WHOLE_ON_EACH_RANK}, and parallel.{name} = {size} would divide it; '
                f"set parallel.{name} = 1, or remove lora.base"
            )
    if cfg.model.cpu_offload:
        yield (
            f'lora.base = "{cfg.lora.base}" {_WHOLE_ON_EACH_RANK}, and model.cpu_offload = true would keep it on the '
            "host; set one of them only"
        )


@rule(Config)
def a_quantized_base_does_not_sleep(cfg: Config) -> Iterator[str]:
    if cfg.lora is not None and cfg.lora.base is not None and cfg.offload.trainer == "all":
        yield (
            f'lora.base = "{cfg.lora.base}" {_WHOLE_ON_EACH_RANK}, and offload.trainer = "all" would move it to the '
            'host; set offload.trainer = "optimizer" or "none"'
        )


def engine_setting_problems(cfg: Config, facts: EngineFacts) -> Iterator[str]:
    """Yield a sentence for each setting that means nothing to the engine with these facts."""
    engine = f'rollout.engine = "{cfg.rollout.engine}"'
    for setting in ENGINE_SETTINGS:
        section, _, name = setting.partition(".")
        if setting not in facts.settings and is_set(getattr(cfg, section), name):
            yield f"{setting} has no meaning for {engine}; remove it"
    if "cuda_graph" in cfg.offload.engine and not facts.has_graphs:
        yield f'offload.engine names "cuda_graph", but {engine} has no CUDA graphs; leave it out'
    if cfg.sends_adapters and not facts.takes_adapters:
        yield f"[lora]: {engine} takes no adapters; set lora.merge = true, and it gets merged weights"
    if cfg.correction.router_replay == "R3" and not facts.reports_routes:
        yield (
            f'correction.router_replay = "R3" replays what the engine chose, and {engine} reports no routes; set it to '
            '"R2", which needs several updates a step, or to "none"'
        )
    if cfg.rollout.top_k is not None and not facts.reports_candidates:
        yield (
            f"rollout.top_k = {cfg.rollout.top_k} trains on log-probabilities among the tokens that top-k and top-p "
            f'left, and {engine} does not report them; set rollout.engine = "torch", or remove top_k and top_p'
        )
    if cfg.debug.follow_schedule is not None and not facts.advances_clock:
        yield (
            f"debug.follow_schedule lets engines pause after a certain token, which {engine} cannot; set "
            'rollout.engine = "torch", or remove it'
        )
    if cfg.rollout.refit_in_flight and not facts.continues_after_refit:
        yield (
            f"rollout.refit_in_flight = true pauses rollouts at a token, and {engine} does not say that it can go on "
            "with them after a refit (`continues_after_refit` of its facts); remove refit_in_flight"
        )
    if cfg.run.deterministic and (cfg.steps_open or cfg.rollout.refit_in_flight) and not facts.advances_clock:
        yield (
            f"rollout.partial = true with run.deterministic = true: {engine} cannot pause after a certain token, and "
            'timing would decide which weights sample the next; set rollout.engine = "torch", or deterministic = false'
        )
    if cfg.rollout.placement == "disaggregated" and not facts.runs_disaggregated:
        yield f'rollout.placement = "disaggregated" does not work with {engine}; set it to "colocated"'
