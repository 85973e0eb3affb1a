"""A whole configuration: all tables of a file."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from spmdrl.config.algorithm import (
    OTHER_SOURCES,
    AdvantageConfig,
    Algorithm,
    CorrectionConfig,
    LossConfig,
    MismatchConfig,
)
from spmdrl.config.base import Section
from spmdrl.config.data import (
    AnswersConfig,
    DataConfig,
    EvalConfig,
    HeldOutPairsConfig,
    HeldOutResponsesConfig,
    HeldOutRowsConfig,
    PackConfig,
    PairsConfig,
    PreferenceDataConfig,
    PromptsConfig,
    ResponsesConfig,
    SetData,
)
from spmdrl.config.distill import REFERENCE, DistillConfig, Models, OtherModelConfig, frozen_models
from spmdrl.config.environment import EnvironmentConfig
from spmdrl.config.model import CriticConfig, FrozenModelConfig, LoraConfig, ModelConfig, OptimConfig, ParallelConfig
from spmdrl.config.rewards import MathReward, ReasoningGymReward, RewardConfig
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


class Config(Section):
    """One training run."""

    true_on_policy: bool = False
    """Engine and trainer compute log-probabilities with the same bits, so that the mismatch is exactly 0. See
    `docs/true-on-policy.md`."""
    run: RunConfig
    model: ModelConfig
    lora: LoraConfig | None = None
    models: Models = Field(default_factory=dict)
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    rollout: RolloutConfig
    refit: RefitConfig = RefitConfig()
    offload: OffloadConfig = OffloadConfig()
    environment: EnvironmentConfig | None = None
    reward: RewardConfig = RewardConfig()
    distill: DistillConfig | None = None
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
    def success_at(self) -> float:
        """The reward from which a response counts as right: `eval.success_at`, or a reward of 1 from every term."""
        if self.eval is not None and self.eval.success_at is not None:
            return self.eval.success_at
        return sum(term.weight for term in self.reward.terms if term.weight > 0)

    @property
    def set_rewards(self) -> dict[str, RewardConfig]:
        """The rewards of evaluation sets by the names of their rules, where they are not those of the run."""
        sources = self.eval.sources if self.eval is not None else ()
        used = {source.rule for source in sources if isinstance(source, SetData)}
        rules = (MathReward(kind="math"), ReasoningGymReward(kind="reasoning_gym"))
        own = {one.kind: self.reward.model_copy(update={"terms": (one,)}) for one in rules if one.kind in used}
        return {rule: cfg for rule, cfg in own.items() if cfg.terms != self.reward.terms}

    @property
    def algorithms(self) -> tuple[Algorithm, ...]:
        """The run's algorithm, and those of data sources that have one; a rollout names its own by the place here."""
        is_used = any(one.algorithm is None for one in self.data.sources)
        run = Algorithm(self.advantage, self.loss, self.correction, OTHER_SOURCES if is_used else None)
        own = {one.task: one.algorithm for one in self.data.sources if one.algorithm is not None}
        return (run, *(run.changed_by(one, task) for task, one in own.items()))

    @property
    def losses(self) -> tuple[LossConfig, ...]:
        """The policy loss of each algorithm."""
        return tuple(one.loss for one in self.algorithms)

    @property
    def algorithm_places(self) -> dict[str, int]:
        """The places of the algorithms by the task of their data source; all others have the run's."""
        return {one.name: place for place, one in enumerate(self.algorithms) if place and one.name is not None}

    def under(self, algorithm: Algorithm) -> Config:
        """Return the run whose sources all have this algorithm."""
        sources = tuple(one.model_copy(update={"algorithm": None}) for one in self.data.sources)
        sections = {name: getattr(algorithm, name) for name in ("advantage", "loss", "correction")}
        return self.model_copy(update={"data": self.data.model_copy(update={"sources": sources}), **sections})

    @property
    def has_reference(self) -> bool:
        """True when the policy is compared with a frozen reference."""
        return self.reward.kl_coef > 0 or any(one.loss.kl_coef > 0 for one in self.algorithms)

    @property
    def penalizes_divergence(self) -> bool:
        """True when the divergence from another model is taken off rewards or advantages, before the updates."""
        return self.reward.kl_coef > 0 or (self.distill is not None and not self.distill.over_vocabulary)

    @property
    def frozen_models(self) -> dict[str, OtherModelConfig]:
        """The models that the policy is compared with, by name. The reference of adapters is their base."""
        began = OtherModelConfig(path=self.model.path) if self.lora is None else OtherModelConfig(adapters="off")
        return frozen_models(self.models, self.distill, reference=began if self.has_reference else None)

    @property
    def beside(self) -> dict[str, FrozenModelConfig]:
        """The settings of `frozen_models` and of reward models, by their tables."""
        models = ((f"models.{name}", one) for name, one in self.frozen_models.items())
        terms = ((f"reward.terms.{place}", term) for place, term in self.reward.model_terms.items())
        return {**dict(models), **dict(terms)}

    @property
    def temperatures(self) -> dict[str, float]:
        """The temperature at which each of `frozen_models` is asked: the policy's, but that of teachers may be set."""
        own, teachers = self.rollout.temperature, self.distill and self.distill.teacher_temperature
        return {name: own if name == REFERENCE else teachers or own for name in self.frozen_models}

    @property
    def weighting(self) -> dict[str, Any]:
        """Settings that say what a token counts in the loss of its mini-batch."""
        return {**self.loss.weighting, "distill": self.distill, "others": self.algorithms[1:]}

    @property
    def sequences(self) -> dict[str, Any]:
        """Settings that say what a sequence takes over from its rollout."""
        return {
            "turn_weight": self.reward.turn_weight,
            "needs_routes": self.correction.router_replay == "R3",
            "needs_candidates": self.rollout.top_k is not None,
            "algorithms": self.algorithm_places,
        }

    @property
    def sends_adapters(self) -> bool:
        """True when refits send the engine adapters, and its base once."""
        return self.lora is not None and not self.lora.merge

    @property
    def merges_adapters(self) -> bool:
        """True when the engine gets merged weights instead of adapters."""
        return self.lora is not None and self.lora.merge

    @property
    def has_critic(self) -> bool:
        """True when a critic is trained too."""
        return "values" in self.advantage.formula.needs

    @property
    def critic_model(self) -> ModelConfig:
        """`[model]` for the critic: the same settings, with its own path."""
        return self.model.model_copy(update={"path": self.critic.path or self.model.path})

    def scorer_model(self, place: int) -> ModelConfig:
        """`[model]` for the reward model of the term at this place: the same settings, with its own path."""
        return self.model.model_copy(update={"path": self.reward.model_terms[place].path, "freeze": None})

    @property
    def critic_optim(self) -> OptimConfig:
        """`[optim]` for the critic: the same settings, except those that `[critic]` sets."""
        own = {name: getattr(self.critic, name) for name in ("lr", "weight_decay", "max_grad_norm")}
        return self.optim.model_copy(update={name: value for name, value in own.items() if value is not None})

    @property
    def critic_gae_lambda(self) -> float:
        """The `gae_lambda` of the returns that the critic learns."""
        own = self.critic.gae_lambda
        return self.advantage.settings["gae_lambda"] if own is None else own

    @property
    def staleness(self) -> int:
        """Most steps between the weights that sampled a token and those that it updates."""
        can_be_stale = self.rollout.partial or self.rollout.placement == "disaggregated"
        return self.rollout.max_staleness if can_be_stale else 0

    @property
    def steps_ahead(self) -> int:
        """Whole steps that engines may sample ahead. Groups that continue in the next step are one step staler then."""
        rollout = self.rollout
        if rollout.placement == "colocated":
            return 0
        if rollout.oldest_first:
            return min(1, rollout.max_staleness)
        return max(0, rollout.max_staleness - rollout.partial)

    @property
    def steps_open(self) -> int:
        """Steps of which engines may open prompt groups before it is their turn, with the oldest first."""
        return self.rollout.max_staleness - self.steps_ahead if self.rollout.oldest_first else 0


class TuningConfig(Section):
    """A run that learns from answers in files: nothing is sampled. Its kinds are below."""

    table: ClassVar[str]  # that says how much of the answers a step takes
    rows_setting: ClassVar[str]  # of the table: rows behind one optimizer step
    sequences_per_row: ClassVar[int] = 1  # which stay in one micro-batch

    run: RunConfig
    model: ModelConfig
    lora: LoraConfig | None = None
    models: Models = Field(default_factory=dict)
    parallel: ParallelConfig = ParallelConfig()
    data: PromptsConfig
    optim: OptimConfig
    pack: PackConfig
    held_out: HeldOutRowsConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()
    resume: ResumeConfig = ResumeConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    report: ReportConfig = ReportConfig()

    @property
    def answers(self) -> AnswersConfig:
        """The table that `table` names."""
        answers: AnswersConfig = getattr(self, self.table)
        return answers

    @property
    def rows_per_step(self) -> int:
        """Rows behind one optimizer step, over all ranks."""
        number: int = getattr(self.answers, self.rows_setting)
        return number

    @property
    def has_reference(self) -> bool:
        """True when the policy is compared with a frozen reference."""
        return False

    @property
    def frozen_models(self) -> dict[str, OtherModelConfig]:
        """The models that the policy is compared with, by name."""
        return frozen_models(self.models, None, reference=self.began if self.has_reference else None)

    @property
    def beside(self) -> dict[str, FrozenModelConfig]:
        """The settings of `frozen_models`, by their tables."""
        return {f"models.{name}": one for name, one in self.frozen_models.items()}

    @property
    def began(self) -> OtherModelConfig:
        """The model that training begins with; that of adapters is their base."""
        return OtherModelConfig(path=self.model.path) if self.lora is None else OtherModelConfig(adapters="off")

    @property
    def temperatures(self) -> dict[str, float]:
        """The temperature at which each of `frozen_models` is asked."""
        return dict.fromkeys(self.frozen_models, 1.0)


class SftConfig(TuningConfig):
    """One supervised fine-tuning run: the same update on (prompt, response) pairs."""

    table = "sft"
    rows_setting = "sequences_per_step"

    data: DataConfig
    sft: ResponsesConfig
    held_out: HeldOutResponsesConfig | None = None
    distill: DistillConfig | None = None

    @property
    def frozen_models(self) -> dict[str, OtherModelConfig]:
        """The models that the policy learns from, by name."""
        return frozen_models(self.models, self.distill, reference=None)

    @property
    def temperatures(self) -> dict[str, float]:
        """The temperature at which each of `frozen_models` is asked."""
        return dict.fromkeys(self.frozen_models, (self.distill and self.distill.teacher_temperature) or 1.0)

    @property
    def weighting(self) -> dict[str, Any]:
        """Settings that say what a token counts in the loss of its mini-batch."""
        return {"aggregation": "token_mean", "distill": self.distill}


class PreferencesConfig(TuningConfig):
    """One run on pairs of answers of which one is preferred: the policy learns to prefer it too."""

    table = "pairs"
    rows_setting = "pairs_per_step"
    sequences_per_row = 2

    data: PreferenceDataConfig
    pairs: PairsConfig
    held_out: HeldOutPairsConfig | None = None

    @property
    def has_reference(self) -> bool:
        """True when the policy is compared with a frozen reference."""
        return not self.pairs.trains_reward_model
