"""The algorithm of a data source: its own advantage, loss and correction, where they are other than the run's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import Field, ValidationError

from spmdrl.config.algorithm import OF_ESTIMATORS, OF_LOSSES, AdvantageConfig, CorrectionConfig, LossConfig
from spmdrl.config.base import MissingSetting, Positive, Section, SectionT, fields_only
from spmdrl.config.errors import field_mistakes

OTHER_SOURCES = "others"  # in metrics, the sources that have the run's algorithm


class SourceAlgorithm(Section):
    weight: Positive = 1.0
    """Weight of this source's loss: the step's is the sum of those of all algorithms, each with its own denominator."""
    advantage: dict[str, Any] = Field(default_factory=dict)
    """Settings of `[advantage]` that are others for this source."""
    loss: dict[str, Any] = Field(default_factory=dict)
    """Settings of `[loss]` that are others for this source. With another `kind`, what only some kinds have begins with
    that kind's defaults, and so it is with `advantage.estimator`, `correction.kind` and `correction.reject`."""
    correction: dict[str, Any] = Field(default_factory=dict)
    """Settings of `[correction]` that are others for this source."""


@dataclass(frozen=True, slots=True)
class Algorithm:
    """How the rollouts of some data sources are trained on; these are compared, whitened and counted by themselves."""

    advantage: AdvantageConfig
    loss: LossConfig
    correction: CorrectionConfig
    name: str | None = None  # in metrics: the task of its source, or OTHER_SOURCES; None where it is that of no source
    weight: float = 1.0

    def changed_by(self, source: SourceAlgorithm, name: str) -> Algorithm:
        """Return the algorithm of a source. Raises MissingSetting where a setting of its own is wrong."""
        return Algorithm(
            _changed(self.advantage, source.advantage),
            _changed(self.loss, source.loss),
            _changed(self.correction, source.correction),
            name,
            source.weight,
        )


# The settings that only some values of another have.
_BELONG_TO: dict[tuple[type[Section], str], set[str]] = {
    (AdvantageConfig, "estimator"): OF_ESTIMATORS,
    (LossConfig, "kind"): OF_LOSSES,
    (CorrectionConfig, "kind"): {"level", "mode", "low", "high", "batch_normalize"},
    (CorrectionConfig, "reject"): {"reject_low", "reject_high"},
}
# The settings that a whole run has, each with a reason.
_ONE_UPDATE = "an update is one of all sources"
_ENTROPY = "the coefficient follows the entropy of all sources"
_SHARED: dict[tuple[type[Section], str], str] = {
    (LossConfig, "updates_per_step"): _ONE_UPDATE,
    (LossConfig, "stop_kl_nats"): _ONE_UPDATE,
    (LossConfig, "entropy_target_nats"): _ENTROPY,
    (LossConfig, "entropy_coef_change"): _ENTROPY,
    (CorrectionConfig, "router_replay"): "one pass records the routes of all sources",
    (CorrectionConfig, "old"): "one pass computes the log-probabilities of all sources",
}


def _changed(section: SectionT, changes: Mapping[str, Any]) -> SectionT:
    """Return the table with these settings; those that belonged to a choice which they change are as by default."""
    kind = type(section)
    chosen = [(names, choice) for (table, choice), names in _BELONG_TO.items() if table is kind and choice in changes]
    dropped = {name for names, choice in chosen if changes[choice] != getattr(section, choice) for name in names}
    values = {name: getattr(section, name) for name in kind.model_fields.keys() - dropped}
    try:
        with fields_only():
            return kind.model_validate(values | dict(changes))
    except ValidationError as error:
        raise MissingSetting("data.sources") from error


def override_problems(source: SourceAlgorithm, run: Algorithm) -> Iterator[str]:
    """Yield a sentence for each setting of a source's own that cannot be, named from its table on."""
    tables = ((run.advantage, "advantage"), (run.loss, "loss"), (run.correction, "correction"))
    for section, table in tables:
        kind, changes = type(section), getattr(source, table)
        for name in changes:
            if reason := _SHARED.get((kind, name)):
                yield f"{table}.{name} cannot differ between sources: {reason}; set it in [{table}]"
        try:
            with fields_only():
                kind.model_validate(changes)
        except ValidationError as error:
            yield from (f"{table}.{mistake.sentence}" for mistake in field_mistakes(kind, changes, error))
