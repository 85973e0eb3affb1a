"""A whole configuration: all tables of a file."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import model_validator

from spmdrl.algo.advantage import ESTIMATORS
from spmdrl.config.algorithm import AdvantageConfig, LossConfig
from spmdrl.config.base import Section
from spmdrl.config.correction import CorrectionConfig, MismatchConfig
from spmdrl.config.data import DataConfig, EvalConfig, HeldOutConfig, PackConfig, PairsConfig
from spmdrl.config.model import ModelConfig, ParallelConfig
from spmdrl.config.names import all_keys, did_you_mean, sections_at
from spmdrl.config.optim import CriticConfig, OptimConfig
from spmdrl.config.rewards import RewardConfig
from spmdrl.config.rollout import OffloadConfig, RefitConfig, RolloutConfig
from spmdrl.config.run import (
    CheckpointConfig,
    DebugConfig,
    ExportConfig,
    ReportConfig,
    ResumeConfig,
    RunConfig,
    WatchdogConfig,
)

EXACT_BACKENDS = ("fa3", "triton")  # attention of SGLang whose kernels the trainer can use; the first is the default


# Arguments of SGLang that have nothing to do with numbers.
_SGLANG_KEEPS_EXACT = {
    "disable_radix_cache",
    "grammar_backend",
    "log_level",
    "schedule_conservativeness",
    "schedule_policy",
}


def _refuse_host_state_twice(model: ModelConfig, optim: OptimConfig) -> None:
    """Raises ValueError when the optimizer's state is on the host already."""
    if model.cpu_offload and optim.state_on_host:
        raise ValueError(
            "model.cpu_offload = true runs the optimizer on the host, where its state is, so there is nothing for "
            "optim.state_on_host = true to bring to the device; remove one of them"
        )


def _refuse_unmeasured_best(checkpoint: CheckpointConfig, *, measures: bool) -> None:
    """Raises ValueError when checkpoints are to be compared by what no evaluation measures."""
    if checkpoint.keep_best is not None and not measures:
        raise ValueError(
            f'checkpoint.keep_best = "{checkpoint.keep_best}" is measured by evaluations, but there are none; remove it'
        )


def _refuse_unknown_changes(kind: type[Section], resume: ResumeConfig) -> None:
    """Raises ValueError when `resume.changed` names what is no setting."""
    known = set(all_keys(kind))
    for name in resume.changed:
        # What is in a free table, such as rollout.sglang, has no name of its own.
        parts = name.split(".")
        longest = next((i for i in range(len(parts), 0, -1) if ".".join(parts[:i]) in known), 0)
        if longest < len(parts) and (not longest or sections_at(kind, tuple(parts[:longest]))):
            raise ValueError(f"resume.changed names {name}, which is no setting{did_you_mean(kind, tuple(parts))}")


def _refuse_less_patience(run: RunConfig, watchdog: WatchdogConfig) -> None:
    """Raises ValueError when collectives would end a stuck run before the watchdog could say where."""
    if watchdog.timeout_s > run.patience_minutes * 60:
        raise ValueError(
            f"watchdog.timeout_s = {watchdog.timeout_s:g} is more than run.patience_minutes = {run.patience_minutes}, "
            f"which would end a stuck run first and without stacks; set it to {run.patience_minutes * 60} or less, or "
            "raise patience_minutes"
        )


def _broken_promises(cfg: Config) -> Iterator[str]:
    """What is set that engine and trainer could not compute alike."""
    yield from _broken_by_sglang(cfg) if cfg.rollout.engine == "sglang" else ()
    for setting in ("tp", "cp", "ep"):
        if (size := getattr(cfg.parallel, setting)) > 1:
            yield f"parallel.{setting} = {size} sums in another order than an engine on one rank"
    if cfg.model.attention != "auto":
        yield f'model.attention = "{cfg.model.attention}" is not exact, and "auto" is'
    if cfg.model.compute_dtype == "float16":
        yield 'model.compute_dtype = "float16" has no exact kernels, and "float32" and "bfloat16" have'
    may_be_stale = cfg.rollout.partial or cfg.rollout.placement == "disaggregated"
    if may_be_stale and cfg.rollout.max_staleness > 0:
        yield (
            f"rollout.max_staleness = {cfg.rollout.max_staleness} trains on tokens that other weights sampled, which 0 "
            "does not"
        )


def _broken_by_sglang(cfg: Config) -> Iterator[str]:
    """The same of what only SGLang's operators cannot do."""
    rollout = cfg.rollout
    if rollout.tp_size > 1:
        yield f"rollout.tp_size = {rollout.tp_size} sums in another order than a trainer, and 1 does not"
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
    if risky := sorted(rollout.sglang.keys() - _SGLANG_KEEPS_EXACT):
        yield f"rollout.sglang sets {', '.join(risky)}, which may change what the engine computes"
    if cfg.model.compute_dtype == "float32":
        yield 'model.compute_dtype = "float32" is not what SGLang computes with then, and "bfloat16" is'
    if cfg.model.gradient_checkpointing == "selective":
        yield (
            'model.gradient_checkpointing = "selective" keeps rotary embeddings from being compiled as the engine\'s '
            'are, and "full" does not'
        )


class Config(Section):
    """One training run."""

    true_on_policy: bool = False
    """Engine and trainer compute log-probabilities with the same bits, so that the mismatch is exactly 0. See
    `docs/true-on-policy.md`."""
    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    rollout: RolloutConfig
    refit: RefitConfig = RefitConfig()
    offload: OffloadConfig = OffloadConfig()
    reward: RewardConfig
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    correction: CorrectionConfig = CorrectionConfig()
    mismatch: MismatchConfig = MismatchConfig()
    optim: OptimConfig
    critic: CriticConfig = CriticConfig()
    pack: PackConfig
    eval: EvalConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()
    resume: ResumeConfig = ResumeConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    report: ReportConfig = ReportConfig()
    debug: DebugConfig = DebugConfig()

    @property
    def has_reference(self) -> bool:
        """Whether a frozen reference model is loaded."""
        return self.loss.kl_coef > 0 or self.reward.kl_coef > 0

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return "values" in ESTIMATORS[self.advantage.estimator].needs

    @property
    def critic_model(self) -> ModelConfig:
        """What `[model]` is for the critic."""
        return self.model.model_copy(update={"path": self.critic.path or self.model.path})

    @property
    def critic_optim(self) -> OptimConfig:
        """What `[optim]` is for the critic."""
        own = {name: getattr(self.critic, name) for name in ("lr", "weight_decay", "max_grad_norm")}
        return self.optim.model_copy(update={name: value for name, value in own.items() if value is not None})

    @property
    def critic_gae_lambda(self) -> float:
        """That of the returns which the critic learns."""
        own = self.critic.gae_lambda
        return self.advantage.settings["gae_lambda"] if own is None else own

    @property
    def advantages_need_scores(self) -> bool:
        """Whether advantages are computed token by token, or from rewards that the reference takes part in."""
        return self.reward.kl_coef > 0 or ESTIMATORS[self.advantage.estimator].per_token

    @model_validator(mode="after")
    def _what_has_changed_is_a_setting(self) -> Config:
        _refuse_unknown_changes(Config, self.resume)
        return self

    @model_validator(mode="after")
    def _somebody_asks_the_critic(self) -> Config:
        if not self.has_critic and self.critic != CriticConfig():
            raise ValueError(
                f'advantage.estimator = "{self.advantage.estimator}" asks no critic, so that [critic] has no meaning; '
                'set estimator = "gae", or remove [critic]'
            )
        if self.critic.warmup_steps >= self.run.num_steps:
            raise ValueError(
                f"critic.warmup_steps = {self.critic.warmup_steps} leaves no step of run.num_steps = "
                f"{self.run.num_steps} to train the policy in; lower it"
            )
        return self

    @model_validator(mode="after")
    def _a_reward_has_something_to_be_compared_with(self) -> Config:
        estimator, group_size = self.advantage.estimator, self.rollout.group_size
        if group_size < (smallest := ESTIMATORS[estimator].smallest_group):
            raise ValueError(
                f'rollout.group_size = {group_size} leaves advantage.estimator = "{estimator}" no other rollout of the '
                f'prompt to compare with; set group_size to {smallest} or more, or estimator = "remax" or "gae"'
            )
        return self

    @model_validator(mode="after")
    def _a_greedy_response_has_no_divergence(self) -> Config:
        if self.reward.kl_coef > 0 and self.advantage.compares_with_greedy:
            raise ValueError(
                f"reward.kl_coef = {self.reward.kl_coef:g} takes the divergence off every reward, but "
                f'advantage.estimator = "{self.advantage.estimator}" compares with a greedy response, which policy and '
                "reference do not score; set loss.kl_coef instead"
            )
        return self

    @model_validator(mode="after")
    def _the_watchdog_is_first(self) -> Config:
        _refuse_less_patience(self.run, self.watchdog)
        return self

    @model_validator(mode="after")
    def _some_are_left_out_of_k(self) -> Config:
        k, group_size = self.advantage.settings.get("k", 0), self.rollout.group_size
        if k >= group_size:
            raise ValueError(
                f"advantage.k = {k} of rollout.group_size = {group_size} rollouts leaves nothing to compare the best "
                f"of k with; set k to {group_size - 1} or less, or raise group_size"
            )
        return self

    @model_validator(mode="after")
    def _a_sequence_has_the_advantages_its_loss_knows(self) -> Config:
        formula = self.loss.formula
        if formula is not None and formula.per_sequence and ESTIMATORS[self.advantage.estimator].per_token:
            raise ValueError(
                f'loss.kind = "{self.loss.kind}" knows one advantage for all tokens of a response, but '
                f'advantage.estimator = "{self.advantage.estimator}" gives each its own; change one of them'
            )
        return self

    @model_validator(mode="after")
    def _equal_groups_teach_nothing(self) -> Config:
        if self.rollout.dynamic_sampling and ESTIMATORS[self.advantage.estimator].per_token:
            raise ValueError(
                "rollout.dynamic_sampling = true drops groups of equal rewards, which do teach something with "
                f'advantage.estimator = "{self.advantage.estimator}", where no reward is compared with its group\'s; '
                "remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _kl_counts_once(self) -> Config:
        if self.loss.kl_coef > 0 and self.reward.kl_coef > 0:
            raise ValueError(
                f"loss.kl_coef = {self.loss.kl_coef:g} and reward.kl_coef = {self.reward.kl_coef:g} would count the "
                "divergence to the reference twice; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _not_every_response_is_overlong(self) -> Config:
        limit = self.rollout.max_response_tokens
        if self.reward.overlong_tokens >= limit:
            raise ValueError(
                f"reward.overlong_tokens = {self.reward.overlong_tokens} is not below rollout.max_response_tokens = "
                f"{limit}, so that every response would be punished for its length; lower it"
            )
        return self

    @model_validator(mode="after")
    def _true_on_policy_is_kept(self) -> Config:
        if self.true_on_policy and (problems := list(_broken_promises(self))):
            raise ValueError(f"true_on_policy = true, but {'; '.join(problems)}; change that, or remove true_on_policy")
        return self

    @model_validator(mode="after")
    def _the_best_is_measured(self) -> Config:
        _refuse_unmeasured_best(self.checkpoint, measures=self.eval is not None)
        return self

    @model_validator(mode="after")
    def _the_policy_is_offloaded_once(self) -> Config:
        if self.model.cpu_offload and self.offload.trainer != "none":
            raise ValueError(
                "model.cpu_offload = true keeps the policy in host memory at all times, so there is nothing for "
                f'offload.trainer = "{self.offload.trainer}" to move; set it to "none", or model.cpu_offload = false'
            )
        return self

    @model_validator(mode="after")
    def _the_optimizers_state_is_offloaded_once(self) -> Config:
        if self.optim.state_on_host and self.offload.trainer == "optimizer":
            raise ValueError(
                "optim.state_on_host = true keeps the optimizer's state on the host at all times, so there is nothing "
                'for offload.trainer = "optimizer" to move; set it to "all" or "none", or optim.state_on_host = false'
            )
        _refuse_host_state_twice(self.model, self.optim)
        return self

    @model_validator(mode="after")
    def _what_is_apart_takes_no_turns(self) -> Config:
        if self.rollout.placement == "colocated":
            return self
        for table, setting in ((self.offload, "trainer"), (self.offload, "engine"), (self.refit, "transport")):
            if getattr(table, setting) != type(table).model_fields[setting].default:
                name = "offload" if table is self.offload else "refit"
                raise ValueError(
                    f'{name}.{setting} has no meaning for rollout.placement = "disaggregated", where trainer and '
                    "engine share no device; remove it"
                )
        return self

    @model_validator(mode="after")
    def _the_engine_stands_for_the_trainer_only_on_policy(self) -> Config:
        rollout = self.rollout
        apart = rollout.placement == "disaggregated" and rollout.max_staleness > 0
        if self.correction.old == "rollout" and (rollout.partial or apart):
            why = "rollout.partial = true" if rollout.partial else f"rollout.max_staleness = {rollout.max_staleness}"
            raise ValueError(
                f'correction.old = "rollout" needs tokens that the weights before the update sampled, but with {why} '
                'older weights sample some of them; set correction.old = "trainer"'
            )
        return self

    @model_validator(mode="after")
    def _what_is_read_needs_no_engine(self) -> Config:
        if self.debug.load_rollouts is None:
            return self
        if self.eval is not None:
            raise ValueError(
                "debug.load_rollouts starts no engine, so nobody can answer the held-out prompts of [eval]; remove "
                "[eval], or evaluate the exported model"
            )
        if self.rollout.placement == "disaggregated":
            raise ValueError(
                'debug.load_rollouts starts no engine, so that the ranks which rollout.placement = "disaggregated" '
                'gives to engines would have nothing to do; set placement = "colocated"'
            )
        return self

    @model_validator(mode="after")
    def _weights_travel_where_there_is_a_way(self) -> Config:
        if self.rollout.engine == "torch" and self.refit.transport != "auto":
            raise ValueError(f'refit.transport = "{self.refit.transport}" has no meaning for rollout.engine = "torch"')
        return self

    @model_validator(mode="after")
    def _the_engine_has_what_it_gives_back(self) -> Config:
        if self.rollout.engine == "torch" and "cuda_graph" in self.offload.engine:
            raise ValueError(
                'offload.engine names "cuda_graph", but rollout.engine = "torch" has no CUDA graphs; leave it out'
            )
        if not self.rollout.cuda_graphs and "cuda_graph" in self.offload.engine:
            raise ValueError('offload.engine names "cuda_graph", but rollout.cuda_graphs = false; leave it out')
        return self


class SftConfig(Section):
    """One supervised fine-tuning run: the same update on (prompt, response) pairs."""

    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    sft: PairsConfig
    optim: OptimConfig
    pack: PackConfig
    held_out: HeldOutConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()
    resume: ResumeConfig = ResumeConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    report: ReportConfig = ReportConfig()

    @model_validator(mode="after")
    def _what_has_changed_is_a_setting(self) -> SftConfig:
        _refuse_unknown_changes(SftConfig, self.resume)
        return self

    @model_validator(mode="after")
    def _the_best_is_measured(self) -> SftConfig:
        _refuse_unmeasured_best(self.checkpoint, measures=False)
        return self

    @model_validator(mode="after")
    def _the_watchdog_is_first(self) -> SftConfig:
        _refuse_less_patience(self.run, self.watchdog)
        return self

    @model_validator(mode="after")
    def _memory_has_one_phase(self) -> SftConfig:
        if self.report.memory:
            raise ValueError("report.memory = true has nothing to show: fine-tuning has no engine to make room for")
        return self

    @model_validator(mode="after")
    def _the_optimizers_state_is_offloaded_once(self) -> SftConfig:
        _refuse_host_state_twice(self.model, self.optim)
        return self
