"""Which prompts of the stream a step takes: all in turn, or those that a curriculum gives a chance.

The stream stays what it is: a curriculum passes over prompts of it, and none comes in another place. Whether prompt i
is taken is a hash of (seed, i) compared with its chance, and the chance follows from what earlier steps have measured.
So a step takes the same prompts on any number of ranks, and in a run that was resumed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spmdrl.algo.metrics import Max, Metrics
from spmdrl.algo.seeds import mix
from spmdrl.config import Config, CurriculumConfig
from spmdrl.data.stream import Item, PromptStream
from spmdrl.rollout.codec import Codec
from spmdrl.rollout.group import PromptGroup
from spmdrl.types import UserError
from spmdrl.user_code import argument_problems, asked_for, call, load

_PURPOSE = 5  # hashed with the run's seed
_GRAIN = 2**53  # of a chance
_CACHED_ROWS = 100_000  # whose metadata a function of the user's may ask for again
_COLUMNS = ("task", "success", "visits", "epoch", "metadata")

Success = tuple[int, float]  # a prompt of the stream, the fraction of its responses that were right


@dataclass(frozen=True, slots=True)
class MeasuredRow:
    """A row of a file when it was last sampled."""

    success: float
    visits: int


@dataclass(frozen=True, slots=True)
class Measurements:
    """Success rates that a curriculum has seen until the end of a step."""

    rows: Mapping[int, Mapping[int, MeasuredRow]] = field(default_factory=dict)  # by source and row
    recent: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # latest rates, by a source that opens others
    opened: tuple[str, ...] = ()  # sources whose gates are open
    source_rows: tuple[int | None, ...] = ()  # of each source that was measured; None where rows are generated


NOTHING_MEASURED = Measurements()
MEASUREMENTS = Codec[Measurements](Measurements)


class InOrder:
    """Takes every prompt in turn."""

    def positions(self, first: int, count: int, so_far: Measurements) -> Sequence[int]:
        """Return the next `count` prompts of the stream that are taken, where none before `first` is left."""
        return range(first, first + count)

    def rates(self, groups: Iterable[PromptGroup]) -> list[Success]:
        """Return what groups have shown, whose rewards this waits for."""
        return []

    def after(self, so_far: Measurements, rates: Sequence[Success]) -> Measurements:
        """Return what is measured after a step in which all ranks together have seen these rates."""
        return so_far

    def require_same_sources(self, measured: Measurements) -> None:
        """Raise UserError for rates that an earlier run has measured of other data."""

    def metrics(self, measured: Measurements, first: int, end: int) -> Metrics:
        """Metrics of a step that has taken prompts from `first` to before `end`, after which so much is measured."""
        return {}


class Curriculum(InOrder):
    """Takes prompts by their chances."""

    def __init__(self, cfg: CurriculumConfig, prompts: PromptStream, *, success_at: float, seed: int) -> None:
        """A response is right with a reward of `success_at` or more."""
        self._cfg, self._prompts, self._success_at, self._seed = cfg, prompts, success_at, seed
        self._function = load(cfg.function) if cfg.function is not None else None
        self._asked_for = asked_for(self._function, _COLUMNS) if self._function is not None else set()
        self._cached: dict[tuple[int, int], dict[str, Any]] = {}  # metadata, by source and row
        self._gated = {gate.opens: gate for gate in cfg.gates}
        self._lap = prompts.lap

    def positions(self, first: int, count: int, so_far: Measurements) -> Sequence[int]:
        return _Positions(lambda index: self._next(index, so_far), first, count)

    def _next(self, index: int, so_far: Measurements) -> int:
        """Find the first prompt from `index` on that is taken."""
        hopeless = 0
        while hopeless <= self._lap:
            chance = self._chance(index, so_far)
            if mix(self._seed, _PURPOSE, index) % _GRAIN < chance * _GRAIN:
                return index
            hopeless = 0 if chance else hopeless + 1
            index += 1
        raise UserError(
            f"data.curriculum.function = {self._cfg.function!r} gave each of {hopeless} prompts, all that there are, "
            "the chance 0, so that nothing is left to train on; return more than 0 for some"
        )

    def _chance(self, index: int, so_far: Measurements) -> float:
        item = self._prompts.item(index)
        if item.task in self._gated and item.task not in so_far.opened:
            return 0.0
        measured = so_far.rows.get(item.source, {}).get(item.row) if item.row is not None else None
        if self._function is not None:
            return self._asked(index, item, measured)
        return 1.0 if measured is None else max(self._cfg.explore, self._worth(measured.success))

    def _worth(self, success: float) -> float:
        """How much a row with this rate is wanted, from 0 to 1."""
        match self._cfg.kind:
            case "band":
                return float(self._cfg.low <= success <= self._cfg.high)
            case "learnability":
                return 4.0 * success * (1.0 - success)
        return 1.0

    def _asked(self, index: int, item: Item, measured: MeasuredRow | None) -> float:
        assert self._function is not None
        columns: dict[str, Any] = {
            "task": item.task,
            "success": None if measured is None else measured.success,
            "visits": 0 if measured is None else measured.visits,
            "epoch": item.epoch,
        }
        if "metadata" in self._asked_for:
            columns["metadata"] = self._metadata(index, item)
        try:
            chance = call(self._function, columns, {})
        except Exception as error:
            raise UserError(f"{self._name} failed for prompt {index}: {type(error).__name__}: {error}") from error
        if isinstance(chance, bool | int | float) and 0.0 <= chance <= 1.0:
            return float(chance)
        raise UserError(f"{self._name} returned {str(chance)[:40]!r} for prompt {index}; return a number from 0 to 1")

    def _metadata(self, index: int, item: Item) -> dict[str, Any]:
        """Return the other columns of a prompt, which of a row in a file are read once, as far as there is room."""
        if item.row is None:
            return self._prompts.metadata(index)
        place = item.source, item.row
        if (found := self._cached.get(place)) is None:
            found = self._prompts.metadata(index)
            if len(self._cached) < _CACHED_ROWS:
                self._cached[place] = found
        return dict(found)

    @property
    def _name(self) -> str:
        return f"data.curriculum.function = {self._cfg.function!r}"

    def rates(self, groups: Iterable[PromptGroup]) -> list[Success]:
        """Return the fraction of right responses of each group with a reward; failed rewards are left out."""
        found = []
        for group in groups:
            outcomes = [group.pending[index][1].result() for index in range(group.group_size)]
            rewards = [outcome.reward for outcome in outcomes if outcome.failure is None]
            if rewards:
                right = sum(reward >= self._success_at or math.isclose(reward, self._success_at) for reward in rewards)
                found.append((group.prompt.prompt_id, right / len(rewards)))
        return found

    def after(self, so_far: Measurements, rates: Sequence[Success]) -> Measurements:
        """Return the measurements with these rates added in the order of their prompts, and the gates they open."""
        rows = {source: dict(known) for source, known in so_far.rows.items()}
        recent = dict(so_far.recent)
        longest = {
            gate.after: max(g.groups for g in self._cfg.gates if g.after == gate.after) for gate in self._cfg.gates
        }
        for prompt_id, success in sorted(rates):
            item = self._prompts.item(prompt_id)
            if item.row is not None:
                known = rows.setdefault(item.source, {})
                visits = known[item.row].visits if item.row in known else 0
                known[item.row] = MeasuredRow(success, visits + 1)
            if item.task in longest:
                recent[item.task] = (*recent.get(item.task, ()), success)[-longest[item.task] :]
        opened = [*so_far.opened]
        for gate in self._cfg.gates:
            latest = recent.get(gate.after, ())[-gate.groups :]
            if gate.opens not in opened and len(latest) == gate.groups and sum(latest) >= gate.success * gate.groups:
                opened.append(gate.opens)
        return Measurements(rows, recent, tuple(opened), tuple(self._prompts.num_rows))

    def require_same_sources(self, measured: Measurements) -> None:
        """Raise UserError when rows were measured of sources with other numbers of rows."""
        before, now = measured.source_rows, tuple(self._prompts.num_rows)
        if before and before != now:
            counts = [
                ", ".join("generated" if rows is None else f"{rows:,}" for rows in each) for each in (before, now)
            ]
            raise UserError(
                f"data.curriculum goes by success rates of sources with {counts[0]} rows, and data.sources now have "
                f"{counts[1]}; set data.sources back, or begin a new run"
            )

    def metrics(self, measured: Measurements, first: int, end: int) -> Metrics:
        """Return metrics of the prompts `first` to `end`, counted over all epochs, and of what is measured so far."""
        numbers = self._prompts.num_rows
        known = [row for rows in measured.rows.values() for row in rows.values()]
        in_files = sum(number or 0 for number in numbers)
        found = {"curriculum/epochs": end / self._lap, "curriculum/passed_prompts": float(end - first)}
        if in_files:
            found["curriculum/measured_fraction"] = len(known) / in_files
        if in_files and self._cfg.needs_repeats:
            lost = sum(1.0 - self._worth(row.success) for row in known)
            found["curriculum/left_fraction"] = 1.0 - lost / in_files
        if known:
            found["curriculum/success_mean"] = sum(row.success for row in known) / len(known)
        if self._gated:
            found["curriculum/open_gates_count"] = float(len(measured.opened))
        return {name: Max(value) for name, value in found.items()}


class _Positions(Sequence[int]):
    """Prompts of the stream, each found when it is asked for: a step may take fewer."""

    def __init__(self, following: Callable[[int], int], first: int, count: int) -> None:
        self._following, self._first, self._count = following, first, count
        self._found: list[int] = []

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any) -> Any:
        while len(self._found) <= place < self._count:
            self._found.append(self._following(self._found[-1] + 1 if self._found else self._first))
        return self._found[place]


IN_ORDER = InOrder()


def curriculum_of(cfg: Config, prompts: PromptStream) -> InOrder:
    """Return what decides which prompts of the stream a run takes."""
    if cfg.data.curriculum is None:
        return IN_ORDER
    return Curriculum(cfg.data.curriculum, prompts, success_at=cfg.success_at, seed=cfg.run.seed)


def curriculum_problems(cfg: CurriculumConfig | None) -> list[str]:
    """Return a sentence for each reason why the user's function cannot be asked."""
    if cfg is None or cfg.function is None:
        return []
    name = f"data.curriculum.function = {cfg.function!r}"
    try:
        function = load(cfg.function)
    except ValueError as error:
        return [f"{name}: {error}"]
    return [f"{name}: {sentence}" for sentence in argument_problems(function, _COLUMNS, {})]
