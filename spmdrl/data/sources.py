"""Sources of rows. A source is a pure function from a row number (0, 1, 2, ... without end) to a row."""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import os
import random
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from spmdrl.algo.seeds import mix
from spmdrl.config import FileData, FileSettings, PreferenceFile, ReasoningGymData, SetData
from spmdrl.config.base import LARGEST
from spmdrl.conversation import Message, as_text, is_conversation
from spmdrl.data.images import ImageFile, image_file
from spmdrl.data.messages import PartReader, compared, is_message
from spmdrl.data.rows import open_rows
from spmdrl.data.tokenizer import texts_in
from spmdrl.types import UserError

Written = str | list[dict[str, Any]]  # a prompt: a string, the parts of a text with images, or chat messages


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages to the policy, and the answer that it is to imitate."""

    messages: tuple[Message, ...]  # none before the answer to the prompt itself
    response: str
    images: tuple[ImageFile, ...] = ()  # in the messages' places for them, in order


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row of a data set, before the tokenizer."""

    prompt: Written
    images: tuple[ImageFile, ...] = ()  # in the prompt's places for them, in order
    question: str  # the question alone, to recognize rows that ask the same
    answer: str | None
    response: str | None  # to imitate
    later: tuple[Exchange, ...] = ()  # of a conversation that continues after the response
    rejected: tuple[Exchange, ...] = ()  # what follows the prompt instead, and is worse; none without a comparison
    margin: float = 0.0  # by how much, in units of a score
    metadata: dict[str, Any]  # the other columns, or the entry that the verifier of a reasoning-gym item needs
    columns: tuple[str, ...] = ()  # of a file's row, as it has them
    where: str  # for messages: "train.jsonl line 12", "chain_sum item 17"

    @property
    def exchanges(self) -> tuple[Exchange, ...]:
        """The response to imitate and what comes after it; none where nothing is to be imitated."""
        return () if self.response is None else (Exchange((), self.response), *self.later)

    @property
    def later_images(self) -> tuple[ImageFile, ...]:
        """The images that are shown after the response, in order."""
        return tuple(image for exchange in self.later for image in exchange.images)


class Source(Protocol):
    """An endless sequence of rows."""

    task: str
    rule: str | None  # of an evaluation set

    @property
    def num_rows(self) -> int | None:
        """Rows before they repeat; None when they are generated."""
        ...

    def row(self, index: int, attempt: int = 0) -> Row:
        """Return row `index`. Where rows are generated, each `attempt` gives another row for the same index."""
        ...


RowTransform = Callable[[Row], Row]  # what a run makes of a file's row before anything else


def as_written(row: Row) -> Row:
    return row


def open_source(
    cfg: FileSettings | ReasoningGymData | SetData, *, seed: int, form: RowTransform = as_written
) -> Source:
    """Open the source that one entry of `sources` describes; `form` changes the rows of files."""
    if isinstance(cfg, SetData):
        source = open_source(cfg.rows, seed=seed, form=form)
        source.rule = cfg.rule
        return source
    if isinstance(cfg, FileSettings):
        return FileSource(cfg, seed=seed, form=form)
    return ReasoningGymSource(cfg, seed=seed)


def first_record(cfg: FileSettings) -> dict[str, Any]:
    """Return the columns of a file's first row. Raises UserError when it cannot be read or has no rows."""
    for _, record in open_rows(cfg.kind, cfg.path).scan():
        return record
    raise UserError(f"{cfg.path} has no rows")


class FileSource:
    """The rows of a file, in a new order in each epoch; the file stays on the disk."""

    rule: str | None = None

    def __init__(self, cfg: FileSettings, *, seed: int, form: RowTransform = as_written) -> None:
        """All rows are checked now. Raises UserError for the first that is wrong."""
        if isinstance(cfg, FileData) and cfg.answer_after is not None and not cfg.answer_column:
            raise UserError(
                f'{cfg.path}: answer_after = "{cfg.answer_after}" cuts the text of answer_column, which is ""; name a '
                "column, or remove answer_after"
            )
        self.task = cfg.task
        self.path = cfg.path
        self._cfg, self._form = cfg, form
        self._order_column = cfg.order_column if isinstance(cfg, FileData) else None
        self._seed = seed
        self._rows = open_rows(cfg.kind, cfg.path)
        self._select(lambda _: True)
        if not self._places:
            raise UserError(f"{cfg.path} has no rows")

    @property
    def num_rows(self) -> int:
        return len(self._places)

    def row(self, index: int, attempt: int = 0) -> Row:
        """Return the row at a place of all epochs laid end to end, each in an order of its own."""
        assert attempt == 0, "a file has no other row for an index: remove unwanted rows with `keep`"
        epoch, number = divmod(index, len(self._places))
        order = self._order(epoch)
        place = self._places[order[number]]
        soon = (self._places[order[later]] for later in range(number + 1, len(order)))
        return self._row(place, self._rows.read(place, soon))

    def keep(self, wanted: Callable[[Row], bool]) -> FileSource:
        """Return a source of those rows of the file that are wanted."""
        selected = copy.copy(self)
        selected._select(wanted)
        if not selected._places:
            raise UserError(f"{self.path} has {len(self._places)} rows, and every one of them is held out or too long")
        return selected

    def item(self, index: int) -> tuple[int, int]:
        """Return (which of the rows `index` is, the pass over the file that takes it)."""
        epoch, number = divmod(index, len(self._places))
        return self._order(epoch)[number], epoch

    def in_file_order(self) -> Iterator[Row]:
        """Yield every row once, each read when it is asked for."""
        return (row for _, row in self._scan())

    def _select(self, wanted: Callable[[Row], bool]) -> None:
        self._places, self._ranks = array("Q"), array("d")
        self._orders: dict[int, array[int]] = {}
        for place, row in self._scan():
            if wanted(row):
                self._places.append(place)
                if self._order_column is not None:
                    self._ranks.append(_rank(row, self._order_column))
        if len(self._ranks) > 1 and min(self._ranks) == max(self._ranks):
            raise UserError(
                f'{self.path}: order_column = "{self._order_column}" is {self._ranks[0]:g} in every row, which is no '
                "order; name another column, or remove it"
            )

    def _scan(self) -> Iterator[tuple[int, Row]]:
        """Yield all rows of the file with their places, in its order."""
        for place, record in self._rows.scan():
            yield place, self._row(place, record)

    def _row(self, place: int, record: dict[str, Any]) -> Row:
        where = self._rows.where(place)
        if isinstance(self._cfg, PreferenceFile):
            return _preference_row(record, where, self._cfg)
        assert isinstance(self._cfg, FileData), "there are two kinds of files"
        return self._form(_file_row(record, where, self._cfg))

    def _order(self, epoch: int) -> array[int]:
        if epoch not in self._orders:
            order = array("Q", range(len(self._places)))
            random.Random(mix(self._seed, epoch)).shuffle(order)
            if self._ranks:
                order = array("Q", sorted(order, key=self._ranks.__getitem__))  # stable: equal ones stay shuffled
            # A slice may cross from one epoch to the next; older orders are cheap to compute again.
            self._orders = {e: o for e, o in self._orders.items() if e == epoch - 1} | {epoch: order}
        return self._orders[epoch]


def _rank(row: Row, column: str) -> float:
    with in_row(row.where):
        return _number(_column(dict(row.metadata), "order_column", column, "it", remedy=""), column, "it")


def _file_row(record: dict[str, Any], where: str, cfg: FileData) -> Row:
    found = _column(record, "prompt_column", cfg.prompt_column, where, remedy="")
    written = _prompt(found, cfg.prompt_column, where)
    with in_row(where):
        prompt, images = _with_images(written, record, cfg)
    # A column setting of "" means that the data has no such column.
    answer, response = (
        _text(_column(record, setting, column, where), column, where) if column else None
        for setting, column in (("answer_column", cfg.answer_column), ("response_column", cfg.response_column))
    )
    if answer is not None and cfg.answer_after is not None:
        answer = _final(answer, cfg.answer_after, where, cfg.answer_column)
    _require_text(prompt, [written, answer, response], where, cfg)
    return _row(record, where, cfg, prompt=prompt, images=images, answer=answer, response=response)


def _preference_row(record: dict[str, Any], where: str, cfg: PreferenceFile) -> Row:
    found = None
    if cfg.prompt_column:
        remedy = '; set prompt_column = "" if both answers begin with the prompt'
        value = _column(record, "prompt_column", cfg.prompt_column, where, remedy=remedy)
        found = _prompt(value, cfg.prompt_column, where)
    named = {"chosen_column": cfg.chosen_column, "rejected_column": cfg.rejected_column}
    answers = [_column(record, setting, name, where, remedy="") for setting, name in named.items()]
    with in_row(where):
        written, chosen, rejected = compared(found, *answers)
        prompt, images = _with_images(written, record, cfg)
    _require_text(prompt, [written, answers], where, cfg)
    first, *later = (Exchange(said, text) for said, text in chosen)
    margin = 0.0
    if cfg.margin_column is not None:
        value = _column(record, "margin_column", cfg.margin_column, where, remedy="")
        margin = _number(value, cfg.margin_column, where)
    return _row(
        record,
        where,
        cfg,
        prompt=prompt,
        images=images,
        answer=None,
        response=first.response,
        later=tuple(later),
        rejected=tuple(Exchange(said, text) for said, text in rejected),
        margin=margin,
    )


def _row(record: dict[str, Any], where: str, cfg: FileSettings, *, prompt: Written, **others: Any) -> Row:
    """Make a row of a file's record, whose columns without a use of their own are its metadata."""
    settings = {name for name in type(cfg).model_fields if name.endswith("_column")} - {"order_column"}
    used = {getattr(cfg, name) for name in settings}
    return Row(
        prompt=prompt,
        question=question_in(prompt),
        metadata={name: value for name, value in record.items() if name not in used},
        columns=tuple(record),
        where=where,
        **others,
    )


def _require_text(prompt: Written, everything: Any, where: str, cfg: FileSettings) -> None:
    """Raise UserError when a prompt says nothing, or a text holds what no text has."""
    if not _has_text(prompt):
        raise UserError(f'{where}: "{cfg.prompt_column}" is empty or white space; write a prompt, or remove the row')
    if any("\0" in text for text in texts_in(everything)):
        raise UserError(f"{where} holds the character NUL, which no text has; write it without, or remove the row")


@contextmanager
def in_row(where: str) -> Iterator[None]:
    """Put a row's name before the sentence of a UserError."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error}") from error


def _with_images(prompt: Written, columns: dict[str, Any], cfg: FileSettings) -> tuple[Written, tuple[ImageFile, ...]]:
    """Return a prompt with places for its images, and the images."""

    def read(value: Any) -> ImageFile:
        return image_file(value, root=Path(cfg.image_root) if cfg.image_root else Path(cfg.path).parent)

    column = None
    if cfg.image_column:
        found = _column(columns, "image_column", cfg.image_column, "it")
        column = [read(value) for value in found] if isinstance(found, list) else [] if found is None else [read(found)]
    reader = PartReader(column, read)
    placed: Written = reader.content(prompt) if isinstance(prompt, str) else [reader.message(one) for one in prompt]
    reader.require_all_used()
    return placed, tuple(reader.images)


def _column(columns: dict[str, Any], setting: str, name: str, where: str, *, remedy: str | None = None) -> Any:
    if name not in columns:
        remedy = f'; set {setting} = "" if the data has none' if remedy is None else remedy
        raise UserError(
            f'{where} has no column "{name}" ({setting}); it has {", ".join(columns) or "none"}'
            f"{_did_you_mean(name, columns)}{remedy}"
        )
    return columns[name]


def _text(value: Any, column: str, where: str) -> str:
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise UserError(f'{where}: "{column}" must be a string or a whole number, not {type(value).__name__}')
    return value


def _final(text: str, after: str, where: str, column: str) -> str:
    _, found, answer = text.rpartition(after)
    if not found or not answer.strip():
        raise UserError(
            f'{where}: "{column}" has no answer after "{after}" (answer_after); correct the row, or remove answer_after'
        )
    return answer.strip()


def _number(value: Any, column: str, where: str) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST:
        return float(value)
    raise UserError(f'{where}: "{column}" must be a finite number, not {str(value)[:40]!r}')


def _prompt(value: Any, column: str, where: str) -> str | list[dict[str, Any]]:
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(is_message(message) for message in value):
        return value
    given = "empty" if value in ("", []) else f"{type(value).__name__}: {str(value)[:80]}"
    raise UserError(
        f'{where}: "{column}" must be a string or a list of chat messages '
        f'{{"role": ..., "content": ...}}, but it is {given}'
    )


def _has_text(prompt: Written) -> bool:
    if isinstance(prompt, str) or not is_conversation(prompt):
        return bool(as_text(prompt).strip())
    return any(as_text(message["content"]).strip() for message in prompt)


def question_in(prompt: Written) -> str:
    """Return what a prompt asks, without its system message."""
    if isinstance(prompt, str) or not is_conversation(prompt):
        return as_text(prompt)
    return "\n".join(as_text(message["content"]) for message in prompt if message["role"] != "system")


# Items of these tasks depend on the iteration order of Python sets. 40 items of every task of reasoning-gym 0.1.25 were
# generated with three values of PYTHONHASHSEED, and only these tasks gave different items.
_HASH_DEPENDENT = frozenset(
    (
        "codeio",
        "intermediate_integration",
        "isomorphic_strings",
        "knight_swap",
        "list_functions",
        "polynomial_multiplication",
        "ransom_note",
        "word_ladder",
    )
)


class ReasoningGymSource:
    """Procedurally generated items without end, each with a seed of its own.

    In reasoning-gym, item i of seed s equals item i - 1 of seed s + 1. So its indices are not used: every item here is
    the first one of a data set with a hashed seed.
    """

    num_rows: int | None = None
    rule: str | None = None

    def __init__(self, cfg: ReasoningGymData, *, seed: int) -> None:
        self.task = cfg.task
        self._cfg = cfg
        self._seed = seed
        _require_repeatable(cfg.task)
        self._items = _items_of(cfg)
        self.row(0)  # raises now if the template is wrong

    def __reduce__(self) -> tuple[Any, ...]:
        # Data sets hold lambdas and word lists, so a copy in another process makes its own.
        return functools.partial(ReasoningGymSource, seed=self._seed), (self._cfg,)

    def row(self, index: int, attempt: int = 0) -> Row:
        """Generate the item of a place by a hash of seed, place and attempt: the same on every rank."""
        # Some data sets pass their seed to numpy, which takes 32 bits.
        entry = self._items.entry(mix(self._seed, index, attempt) >> 31)
        return Row(
            prompt=self._fill_template(entry),
            question=entry["question"],
            answer=entry["answer"],
            response=entry["answer"],
            metadata={**entry, "params": self._cfg.params},
            where=f"{self.task} item {index}",
        )

    def _fill_template(self, entry: dict[str, Any]) -> str:
        try:
            return self._cfg.prompt_template.format(question=entry["question"], metadata=entry["metadata"])
        except (KeyError, IndexError, AttributeError, ValueError, TypeError) as error:
            raise UserError(
                f"prompt_template = {self._cfg.prompt_template!r} does not fit {self.task}: {type(error).__name__}: "
                f"{error}; it can use {{question}} and {', '.join(f'{{metadata[{key}]}}' for key in entry['metadata'])}"
            ) from error


class _Items:
    """The items of a reasoning-gym task with some parameters, by seed.

    Making a data set may read a word list (20 ms and more), so one is shared where possible. A few tasks use the seed
    already while they are made.
    """

    def __init__(self, cfg: ReasoningGymData) -> None:
        self._cfg = cfg
        self._shared = _make_data_set(cfg, 0)
        self.can_reseed = self._reseeding_is_faithful()

    def entry(self, seed: int) -> dict[str, Any]:
        """Return the item of a seed of 32 bits. Raises UserError when the parameters allow none."""
        return self._entry(seed, reseed=self.can_reseed)

    def _entry(self, seed: int, *, reseed: bool) -> dict[str, Any]:
        data_set = self._shared if reseed else _make_data_set(self._cfg, seed)
        data_set.seed = seed
        try:
            return data_set[0]
        except Exception as error:
            raise UserError(
                f"the reasoning-gym task {self._cfg.task} cannot generate an item with params {self._cfg.params}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _reseeding_is_faithful(self) -> bool:
        """Return True when changing a data set's seed gives the same items as making a new data set with that seed."""

        def question(seed: int, *, reseed: bool) -> str:
            return str(self._entry(seed, reseed=reseed)["question"])

        seeds = [mix(probe) >> 31 for probe in range(4)]
        return all(question(seed, reseed=True) == question(seed, reseed=False) for seed in seeds)


_ITEMS: dict[str, _Items] = {}  # by task and parameters, which a run's training and held-out sources mostly share


def _items_of(cfg: ReasoningGymData) -> _Items:
    key = f"{cfg.task} {cfg.params}"
    if key not in _ITEMS:
        _ITEMS[key] = _Items(cfg)
    return _ITEMS[key]


def _require_repeatable(task: str) -> None:
    if task in _HASH_DEPENDENT and os.environ.get("PYTHONHASHSEED", "random") == "random":
        raise UserError(
            f"the items of the reasoning-gym task {task} depend on the order of Python sets, which differs between "
            "ranks and runs; start with the environment variable PYTHONHASHSEED=0"
        )


def import_library(cfg: FileSettings | ReasoningGymData) -> None:
    """Import the library that generates a source's rows; there is none for files. Raises UserError without it."""
    if isinstance(cfg, ReasoningGymData):
        _data_sets()


def _data_sets() -> Mapping[str, Any]:
    """Return the tasks of reasoning-gym: by name, the classes of a data set and of its parameters."""
    try:
        from reasoning_gym.factory import DATASETS  # takes a second, so only when it is needed
    except ImportError as error:  # the package itself, or one of those that its many tasks need
        raise UserError(
            f'data of kind = "reasoning_gym" needs packages that cannot all be imported: {error}; install '
            "reasoning-gym with all that it requires, or give the prompts in a jsonl or parquet file"
        ) from error
    return DATASETS


def _make_data_set(cfg: ReasoningGymData, seed: int) -> Any:
    tasks = _data_sets()
    if cfg.task not in tasks:
        raise UserError(f'reasoning-gym has no task "{cfg.task}"{_did_you_mean(cfg.task, tasks)}')
    data_set_class, config_class = tasks[cfg.task]
    ours = ("seed", "size")
    known = [field.name for field in dataclasses.fields(config_class) if field.name not in ours]
    for name in cfg.params:
        if name in ours:
            raise UserError(f"params.{name} of the reasoning-gym task {cfg.task} is set by the run; leave it out")
        if name not in known:
            raise UserError(
                f"the reasoning-gym task {cfg.task} has no parameter {name}"
                f"{_did_you_mean(name, known)}; it has {', '.join(known)}"
            )
    try:
        config = config_class(**cfg.params, seed=seed, size=1)
        return data_set_class(config)  # validates
    except (AssertionError, TypeError, ValueError) as error:
        raise UserError(f"the reasoning-gym task {cfg.task} refuses params {cfg.params}: {error}") from error


def _did_you_mean(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""
