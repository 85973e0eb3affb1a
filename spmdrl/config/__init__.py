"""Settings that the user wrote: typed, frozen, never corrected. `plan.py` computes what they imply.

The attribute docstrings of the tables are the configuration reference: `docs/configuration.md` is generated from them.
"""

# Rules hold once they are imported.
from spmdrl.config import rules, schedule_rules, source_rules
from spmdrl.config.algorithm import (
    AdvantageConfig,
    Algorithm,
    CorrectionConfig,
    LossConfig,
    MismatchConfig,
    MismatchLimits,
)
from spmdrl.config.base import MissingSetting, SandboxConfig, Section, SectionT, run_rules
from spmdrl.config.data import (
    CurriculumConfig,
    DataConfig,
    EvalConfig,
    FileData,
    FileSettings,
    GateConfig,
    HeldOutConfig,
    HeldOutPromptsConfig,
    PackConfig,
    PairsConfig,
    PreferenceFile,
    PromptsConfig,
    ReasoningGymData,
    SetData,
)
from spmdrl.config.distill import DistillConfig, OtherModelConfig, TeacherConfig
from spmdrl.config.environment import EnvironmentConfig
from spmdrl.config.model import CriticConfig, LoraConfig, ModelConfig, OptimConfig, ParallelConfig
from spmdrl.config.read import Draft, read_config, read_draft, read_run_config, read_table
from spmdrl.config.rewards import (
    ChoiceReward,
    CodeReward,
    ExactReward,
    FormatReward,
    FunctionReward,
    JudgeReward,
    LengthReward,
    MathReward,
    ModelReward,
    ReasoningGymReward,
    RewardConfig,
    RewardTerm,
)
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
from spmdrl.config.schedule_rules import EXACT_BACKENDS
from spmdrl.config.whole import Config, PreferencesConfig, SftConfig, TuningConfig
