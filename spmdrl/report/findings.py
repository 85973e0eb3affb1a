"""Rules over a run's metrics, as a table: how a fault shows, why it matters and what to set.

A rule compares the early and the late part of a run: the first and the last tenth of its steps, `WINDOW` at least. A
value of a part is the median, so that one odd step is no finding. A rule that compares the two needs `MIN_STEPS`.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from spmdrl.faults.lock import owner_of
from spmdrl.faults.supervise import newest_step
from spmdrl.faults.text import escaped
from spmdrl.report.console import format_number
from spmdrl.report.files import is_torn, read_rows
from spmdrl.report.run_folder import RecordedRun, RunFolder
from spmdrl.report.series import History, Series

WINDOW = 5  # reports: the fewest whose median says something
MIN_STEPS = 20  # so that the early and the late part are apart
SPIKE_MEMORY = 20  # steps before a spike that it is compared with

Check = Callable[[History], str | None]
"""A check of a run: the evidence, in numbers and steps, or None where nothing is wrong."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A fault of a run, how it shows, and what helps."""

    name: str
    check: Check
    why: str
    remedy: str
    page: str  # of docs/


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A rule that has seen something."""

    rule: Rule
    seen: str


def findings(run: History) -> list[Finding]:
    """Apply every rule to a run, in the order of `RULES`."""
    return [Finding(rule=rule, seen=seen) for rule in RULES if (seen := rule.check(run)) is not None]


def late(series: Series) -> Series:
    """The last tenth of what was reported, `WINDOW` reports at least; fewer where there are fewer."""
    size = max(WINDOW, len(series) // 10)
    return Series(series.steps[-size:], series.values[-size:])


def early(series: Series) -> Series:
    """The first tenth, like `late`."""
    size = max(WINDOW, len(series) // 10)
    return Series(series.steps[:size], series.values[:size])


def _both(series: Series) -> tuple[float, float] | None:
    """Medians of the early and the late part; None for a run that is too short to compare them."""
    known = series.finite()
    if len(known) < MIN_STEPS:
        return None
    return float(np.median(early(known).values)), float(np.median(late(known).values))


def _late_median(series: Series) -> tuple[float, str] | None:
    """The median of the late part, and its steps in words; None where it has fewer than `WINDOW` reports."""
    last = late(series.finite())
    if len(last) < WINDOW:
        return None
    return float(np.median(last.values)), f"median of steps {last.steps[0]} to {last.steps[-1]}"


def _change(name: str, series: Series, before: float, now: float) -> str:
    _, steps = _late_median(series) or (now, "")
    return f"{name} was {format_number(before)} at first and is {format_number(now)} ({steps})"


def stays(name: str, *, above: float = math.inf, below: float = -math.inf) -> Check:
    """Find a scalar that stays above or below a limit."""

    def check(run: History) -> str | None:
        median = _late_median(run[name])
        if median is None or below <= median[0] <= above:
            return None
        now, steps = median
        limit = f"above {format_number(above)}" if now > above else f"below {format_number(below)}"
        return f"{name} is {format_number(now)} ({steps}), {limit}"

    return check


def changed(name: str, *, to_above: float = math.inf, to_below: float = 0.0, floor: float = 0.0) -> Check:
    """Find a scalar that has grown by the factor `to_above`, and beyond `floor`, under which its size does not matter;
    or one that has fallen below the fraction `to_below` of its early value."""

    def check(run: History) -> str | None:
        medians = _both(run[name])
        if medians is None:
            return None
        before, now = medians
        has_grown = now > max(to_above * before, floor) if math.isfinite(to_above) else False
        has_shrunk = before > 0 and now < to_below * before
        return _change(name, run[name], before, now) if has_grown or has_shrunk else None

    return check


def counted(name: str) -> Check:
    """Find events that should not happen, by their count."""

    def check(run: History) -> str | None:
        seen = run[name].finite()
        steps = seen.steps[seen.values > 0]
        if not len(steps):
            return None
        when = f"in step {steps[0]}" if len(steps) == 1 else f"in {len(steps)} steps, {steps[0]} to {steps[-1]}"
        return f"{name} adds up to {seen.values.sum():g}, {when} of {run.last_step}"

    return check


def spikes(name: str, factor: float) -> Check:
    """Find values that are a multiple of the median of the `SPIKE_MEMORY` before them."""

    def check(run: History) -> str | None:
        seen = run[name].finite()
        ratios = [
            (float(value / usual), int(seen.steps[place]))
            for place, value in enumerate(seen.values)
            if place >= WINDOW and (usual := np.median(seen.values[max(0, place - SPIKE_MEMORY) : place])) > 0
        ]
        if not ratios or max(ratios)[0] <= factor:
            return None
        many = sum(ratio > factor for ratio, _ in ratios)
        ratio, step = max(ratios)
        return f"{name} was {ratio:.0f} times its median before in step {step}" + (
            f", and beyond {factor:g} times in {many} steps" if many > 1 else ""
        )

    return check


def unmoved(name: str) -> Check:
    """Find a scalar that is the same number in all reports."""

    def check(run: History) -> str | None:
        seen = run[name].finite()
        if len(seen) < 2 * WINDOW or np.ptp(seen.values) > 0:
            return None
        return f"{name} is {format_number(float(seen.values[0]))} in all of the {len(seen)} steps so far"

    return check


def without_tokens(run: History) -> np.ndarray:
    """Return the steps that trained on no token."""
    tokens = run["batch/loss_tokens"]
    return tokens.steps[tokens.values == 0]


def empty_steps(run: History) -> str | None:
    """Find steps that trained on no token."""
    steps = without_tokens(run)
    return f"batch/loss_tokens is 0 in {len(steps)} steps, first in step {steps[0]}" if len(steps) else None


def written_as_null(run: History) -> str | None:
    """Find numbers of the update that are not finite, in steps that trained on something: on tokens of each data
    source, where these have algorithms of their own."""
    of_sources = {name.removeprefix("loss/mean_"): series for name, series in run.matching("loss/mean_")}
    absent = tuple(f"_{source}" for source, series in of_sources.items() if not len(series.finite()))
    of_none = [without_tokens(run)]
    of_none += [x.steps[~np.isfinite(x.values)] for source, x in of_sources.items() if f"_{source}" not in absent]
    for name, series in run.matching("update/"):
        bad = series.steps[~np.isfinite(series.values) & ~np.isin(series.steps, np.concatenate(of_none))]
        if len(bad) and not (absent and name.endswith(absent)):
            return f"{name} is not a finite number in {len(bad)} steps, first in step {bad[0]}"
    return None


def any_of(prefix: str, suffix: str, check: Callable[[str], Check]) -> Check:
    """Apply a check to all scalars whose names begin and end so; the first finding counts."""

    def each(run: History) -> str | None:
        return next((seen for name, _ in run.matching(prefix, suffix) if (seen := check(name)(run))), None)

    return each


def without(check: Check, excuse: Callable[[History], bool]) -> Check:
    """Apply a check where there is no excuse."""
    return lambda run: None if excuse(run) else check(run)


def reward_rose(run: History) -> bool:
    """True when the late reward is above that of the middle of the run by more than its steps scatter."""
    reward = run["reward/mean"].finite()
    if not len(reward):
        return not len(run["rollout/response_tokens"])  # what samples without rewards has none that could rise
    half = len(reward) // 2
    if half < WINDOW:
        return True
    middle, last = reward.values[half - half // 4 : half + half // 4 + 1], late(reward).values
    error = _scatter(reward) * np.sqrt(1 / len(middle) + 1 / len(last))
    return bool(last.mean() > middle.mean() + 2 * error)


def _scatter(series: Series) -> float:
    """Standard deviation of single steps around their trend, whatever the trend."""
    return float(np.std(np.diff(series.values)) / np.sqrt(2))


def too_short(run: History) -> bool:
    """True for a run of fewer than `MIN_STEPS` steps."""
    return run.last_step < MIN_STEPS


def mostly_right(run: History) -> bool:
    """True when the policy answers nine tenths of the held-out prompts: little is left to learn."""
    accuracy = run["eval/accuracy"].finite()
    return bool(len(accuracy) and accuracy.values[-1] >= 0.9)


def nothing_left(run: History) -> bool:
    """True while the reward rises, and once nearly all answers are right."""
    return reward_rose(run) or mostly_right(run)


def reward_regressed(run: History) -> str | None:
    """Find a reward that has lost more than half of its gain."""
    reward = run["reward/mean"].finite()
    if len(reward) < MIN_STEPS:
        return None
    size = len(early(reward))
    means = np.convolve(reward.values, np.full(size, 1 / size), mode="valid")
    start, best, now = means[0], means.max(), means[-1]
    if best - now <= max(0.5 * (best - start), 2 * _scatter(reward)):
        return None
    peak = int(reward.steps[int(means.argmax()) + size - 1])
    return (
        f"reward/mean was {format_number(float(best))} at best, around step {peak}, and is {format_number(float(now))}"
        f" now; it began at {format_number(float(start))}"
    )


def never_right(run: History) -> str | None:
    """Find a run in which no held-out answer counts as right while rewards are earned."""
    accuracy, reward = run["eval/accuracy"].finite(), run["eval/reward"].finite()
    if len(accuracy) < 2 or accuracy.values.any() or not (reward.values > 0).any():
        return None
    return (
        f"eval/accuracy is 0 in all of {len(accuracy)} evaluations, "
        f"while eval/reward reached {format_number(float(reward.values.max()))}"
    )


def slower_phase(run: History) -> str | None:
    """Find a phase that takes more than twice as long as at first, and a tenth of the step or more."""
    steps = _both(run["time/step_s"])
    if steps is None:
        return None
    for name, series in run.matching("time/", "_s"):
        medians = _both(series)
        if name == "time/step_s" or medians is None:
            continue
        if medians[1] > max(2 * medians[0], 0.1 * steps[1]):
            return _change(name, series, *medians) + f", of {format_number(steps[1])} s for a step"
    return None


def short_ones_preferred(run: History) -> str | None:
    """Find a run whose trained responses are shorter, or longer, by 2 % than those that were sampled."""
    trained, sampled = _late_median(run["rollout/response_tokens"]), _late_median(run["rollout/sampled_tokens"])
    if trained is None or sampled is None or not sampled[0] or abs(trained[0] / sampled[0] - 1) <= 0.02:
        return None
    rewards = " and ".join(
        f"{name} is {format_number(median[0])}"
        for name in ("reward/mean", "reward/sampled_mean")
        if (median := _late_median(run[name])) is not None
    )
    return (
        f"rollout/response_tokens is {format_number(trained[0])}, but rollout/sampled_tokens is "
        f"{format_number(sampled[0])} ({trained[1]})" + (f", and of their rewards {rewards}" if rewards else "")
    )


# Thresholds are for a finding that is worth a look, not for a proof. Why each is where it is stands next to it.
RULES = (
    Rule(
        name="numbers that are not finite",
        check=written_as_null,
        why="a sum over tokens overflowed or was divided by zero, and every number after it is suspect",
        remedy="look at samples.jsonl of that step; lower optim.lr, or set model.compute_dtype to bfloat16",
        page="faults.md",
    ),
    Rule(
        name="steps trained on nothing",
        check=empty_steps,
        why="no response of the step had a token to train on, so its update changed nothing, and its means are of none",
        remedy="read `end` and `environment_failure` in samples.jsonl: where what the policy reads first is too long, "
        "raise rollout.max_response_tokens; where every episode is left out, look at environment.masked_ends",
        page="environments.md",
    ),
    Rule(
        name="the reward never moves",
        check=unmoved("reward/mean"),
        why="every rollout of every step got the same reward, so no group has an advantage and nothing is learned",
        remedy="check the reward on a reference answer with --dry-run; read responses in samples.jsonl: are they in "
        "the form that the reward looks for? Else begin with easier prompts",
        page="data.md#rewards",
    ),
    Rule(
        name="rewards failed",
        check=counted("reward/failed_count"),
        why="a failed reward counts as 0, whatever the response was worth",
        remedy="read `failure` in samples.jsonl, and call the function on such a response to see where it raises; a "
        "time limit is reward.timeout_s",
        page="data.md#rewards",
    ),
    Rule(
        name="environments failed",
        check=counted("episode/failed_count"),
        why="episodes without an end are masked: their tokens are sampled and not trained on",
        remedy="read `environment_failure` in samples.jsonl and the logs of the ranks",
        page="environments.md#processes-time-and-sandboxes",
    ),
    Rule(
        name="the reward fell back",
        check=reward_regressed,
        why="the policy was better before, and the run goes on from a worse one",
        remedy="go back to an earlier checkpoint (resume.checkpoint) with a lower optim.lr or a higher loss.kl_coef; "
        "keep the best one with checkpoint.keep_best",
        page="losses.md#kl-to-the-reference",
    ),
    Rule(
        # Four groups in five are then sampled for nothing. A policy that is nearly always right cannot do better.
        name="most groups agree",
        check=without(stays("reward/equal_groups_fraction", above=0.8), mostly_right),
        why="a group whose rewards are all equal has no advantages: its tokens cost time and teach nothing",
        remedy="set rollout.dynamic_sampling to replace such groups, raise rollout.group_size, or choose prompts that "
        "are neither too easy nor too hard; where hardly any reward is above 0, read responses in samples.jsonl first",
        page="collecting.md#dynamic-sampling",
    ),
    Rule(
        # Entropy falls as a policy learns, so the limit is far below the first. Once it is right, no limit is needed.
        name="entropy collapsed",
        check=without(changed("update/entropy_nats", to_below=0.1), nothing_left),
        why="the policy is sure of itself and no longer tries anything else, while the reward does not rise",
        remedy="raise loss.clip_high, set loss.entropy_coef or loss.entropy_target_nats, or lower optim.lr",
        page="losses.md#entropy",
    ),
    Rule(
        # A step then samples and trains on twice the tokens for the same reward.
        name="responses grow and the reward does not",
        check=without(changed("rollout/response_tokens", to_above=2.0), nothing_left),
        why="longer responses cost time and memory; with token_mean a long response also weighs more",
        remedy="look at samples.jsonl for repetition; set reward.overlong_tokens, or another loss.aggregation",
        page="losses.md#from-tokens-to-one-number",
    ),
    Rule(
        # What is thrown away counts with the tokens it had, so that the difference is larger than this.
        name="late responses are thrown away",
        check=short_ones_preferred,
        why="what is late is long, so the policy learns from responses that are not those it gives",
        remedy="set rollout.partial = true and rollout.oversample_fraction = 0, with which steps train on the oldest",
        page="collecting.md#rollouts-that-go-on-across-training",
    ),
    Rule(
        # One rollout in four is then judged by its length.
        name="many responses are cut",
        check=stays("rollout/truncated_fraction", above=0.25),
        why="a response that is cut before its answer is punished for its length alone",
        remedy="raise rollout.max_response_tokens, or shape the reward near the limit with reward.overlong_tokens",
        page="losses.md#rewards-before-they-are-compared",
    ),
    Rule(
        # What kernels round differently is there from the first step, so growth has another cause. Below 0.001 nats a
        # token's ratio is within 0.1 % of 1, whatever the factor.
        name="engine and trainer drift apart",
        check=changed("mismatch/mean_abs_nats", to_above=3.0, floor=1e-3),
        why="rollouts are no longer samples of the policy that is trained, and gradients are of something else",
        remedy="find the tokens in worst_tokens.jsonl; correct with correction.level, or set true_on_policy",
        page="agreement.md#correct-for-it",
    ),
    Rule(
        # Half of the tokens would do as well if they had equal weights: that is what the number says.
        name="engine and trainer disagree",
        check=stays("mismatch/effective_fraction", below=0.5),
        why="a few tokens carry most of the weight, so the gradient is that of few samples",
        remedy="set limits in [mismatch.stop], correct with correction.level, or set true_on_policy",
        page="agreement.md#set-limits",
    ),
    Rule(
        # At half a nat a token, ten tokens are e^5, about 150 times, as likely as under the reference.
        name="the policy has left the reference",
        check=any_of("update/k", "_ref_nats", lambda name: stays(name, above=0.5)),
        why="it writes what the reference would not, and may earn its reward by that rather than by better answers",
        remedy="raise loss.kl_coef, or lower optim.lr",
        page="losses.md#kl-to-the-reference",
    ),
    Rule(
        # One token in five is then left out of the gradient that the loss asks for.
        name="many ratios are clipped",
        check=stays("update/clip_fraction", above=0.2),
        why="clipped tokens give no gradient: the steps are larger than the clip allows for",
        remedy="lower optim.lr or loss.updates_per_step, or widen loss.clip_low and loss.clip_high",
        page="losses.md#the-policy-loss",
    ),
    Rule(
        name="the gradient spikes",
        # An order of magnitude, so that scatter between steps is no finding.
        check=spikes("update/grad_norm", 10.0),
        why="one such step can undo many, although optim.max_grad_norm bounds its size",
        remedy="look at samples.jsonl of that step; lower optim.max_grad_norm or optim.lr, or lengthen "
        "optim.warmup_steps",
        page="configuration.md",
    ),
    Rule(
        # A critic below 0 predicts worse than a constant would. One that has not learned yet may be there.
        name="the critic explains nothing",
        check=without(stays("critic/explained_variance", below=0.0), too_short),
        why="its values are noise in every advantage",
        remedy="raise critic.lr or critic.warmup_steps, or use an estimator that needs no critic",
        page="losses.md#ppo-with-a-critic",
    ),
    Rule(
        # As if one rank in four had nothing to do.
        name="ranks wait for each other",
        check=stays("batch/idle_fraction", above=0.25),
        why="the time of an update is that of its fullest rank, and the others are idle meanwhile",
        remedy="raise rollout.prompts_per_step, lower pack.max_tokens_per_micro_batch, or set pack.balance to flops",
        page="packing.md#how-it-is-balanced",
    ),
    Rule(
        name="a phase has become slow",
        check=without(slower_phase, lambda run: changed("rollout/response_tokens", to_above=1.5)(run) is not None),
        why="nothing that the run does has grown as much: another program, a full disk or a slow host may be behind it",
        remedy="see which rank is last with spmdrl ps, and what else its host does",
        page="faults.md#looking-at-a-run",
    ),
    Rule(
        name="no answer counts as right",
        check=never_right,
        why="accuracy is the share of answers with full marks: either none has earned them yet, or these rewards have "
        "another maximum",
        remedy="read samples.jsonl; if its best answers are right, set eval.success_at to the reward of such answers",
        page="seeing.md#accuracy",
    ),
)


# The report of `tools.doctor RUN`: what seems wrong in a run, as text.


_WIDTH = 110


def damages(path: Path) -> Iterator[str]:
    """Yield a sentence for what metrics.jsonl of a run lacks. Raises UserError.

    Nothing is torn or behind while a launch writes the file: then only rows between others can be missing.
    """
    folder = RunFolder(path)
    torn, at_end = is_torn(folder.metrics), folder.gap(newest_step(folder.checkpoints))
    inside = folder.gap(max((row["step"] for row in read_rows(folder.metrics)), default=0))
    if (torn or at_end != inside) and owner_of(path):
        torn, at_end = False, inside
    if torn:
        yield (
            "metrics.jsonl ends in the middle of a line, and no launch is writing it: its writer was killed, or had no "
            "room; a run that resumes drops that line"
        )
    if gap := at_end or inside:
        yield f"{gap}; the file was cut, or rows were removed: training is not affected, but charts have a gap"


def checkup(run: RecordedRun, found: Sequence[Finding], damage: Sequence[str] = ()) -> Iterator[str]:
    """Yield the lines of a report: how far the run is and what its files lack, then each finding with what it means
    and what helps."""
    of = "" if run.num_steps is None else f" of {run.num_steps}"
    yield f"{escaped(run.name)}: step {History(run.rows).last_step}{of}"
    for sentence in damage:
        yield f"warning: {sentence}"
    if (count := sum(row["step"] > 0 for row in run.rows)) < MIN_STEPS:
        yield f"what grew or fell is not judged: that wants {MIN_STEPS} steps, and {count} were recorded"
    if not found and not damage:
        yield f"nothing looks wrong to any of {len(RULES)} rules"
    for number, one in enumerate(found, start=1):
        yield ""
        yield f"{number}. {one.rule.name}"
        yield from _paragraph("seen", escaped(one.seen))
        yield from _paragraph("why", one.rule.why)
        yield from _paragraph("do", one.rule.remedy)
        yield from _paragraph("read", f"docs/{one.rule.page}")


def _paragraph(label: str, text: str) -> Iterator[str]:
    yield from textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=f"   {label:<6}",
        subsequent_indent=" " * 9,
        break_long_words=False,
        break_on_hyphens=False,
    )
