"""Which curves of a run are shown, in which order, and under which names: one table for all pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from spmdrl.report.series import History


@dataclass(frozen=True, slots=True)
class Chart:
    """Scalars that share a pair of axes."""

    title: str
    names: tuple[str, ...]

    def name_in(self, runs: Sequence[History]) -> str | None:
        """The first of its scalars that any of these runs has measured."""
        return next((name for name in self.names if any(len(run[name].finite()) for run in runs)), None)


# By what they are about, the most important first. The first of a chart's names that a run has is drawn: a run has one
# estimator of its divergence, for example.
GROUPS: dict[str, tuple[Chart, ...]] = {
    "Outcome": (
        Chart("reward", ("reward/mean",)),
        Chart("accuracy, held out", ("eval/accuracy",)),
        Chart("reward, held out", ("eval/reward",)),
        Chart("loss", ("update/loss",)),
        Chart("loss, held out", ("eval/loss",)),
    ),
    "Responses": (
        Chart("response length, tokens", ("rollout/response_tokens",)),
        Chart("entropy, nats", ("update/entropy_nats",)),
        Chart("responses that were cut, fraction", ("rollout/truncated_fraction",)),
        Chart("groups whose rewards agree, fraction", ("reward/equal_groups_fraction",)),
    ),
    "Engine and trainer": (
        Chart("largest mismatch, nats", ("mismatch/max_abs_nats",)),
        Chart("mean mismatch, nats", ("mismatch/mean_abs_nats",)),
    ),
    "Update": (
        Chart(
            "divergence from the reference, nats", ("update/k3_ref_nats", "update/k1_ref_nats", "update/k2_ref_nats")
        ),
        Chart("ratios that were clipped, fraction", ("update/clip_fraction",)),
        Chart("gradient norm", ("update/grad_norm",)),
        Chart("learning rate", ("update/lr",)),
        Chart("variance that the critic explains", ("critic/explained_variance",)),
    ),
    "Speed and memory": (
        Chart("loss tokens per second", ("speed/loss_tokens_per_s",)),
        Chart("time of a step, s", ("time/step_s",)),
        Chart("fullest device, GiB", ("memory/peak_gib",)),
    ),
}


def charts_of(runs: Sequence[History]) -> Iterator[tuple[Chart, str]]:
    """Yield the charts that these runs fill, each with the scalar that fills it."""
    for chart in (chart for charts in GROUPS.values() for chart in charts):
        name = chart.name_in(runs)
        if name is not None:
            yield chart, name
