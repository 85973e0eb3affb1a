"""The stream of training prompts, and the held-out prompts that it never contains.

Prompt i is a pure function of (seed, i). Every rank gets the same prompt, and a resumed run continues at its index.
"""

from __future__ import annotations

import functools
import math
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from transformers import PreTrainedTokenizerBase

from spmdrl.algo.seeds import mix
from spmdrl.config import HeldOutPromptsConfig, PromptsConfig, SetData
from spmdrl.conversation import Message, is_conversation
from spmdrl.data.conversations import asked
from spmdrl.data.images import ImageFile
from spmdrl.data.sources import Exchange, FileSource, Row, RowTransform, Source, Written, in_row, open_source
from spmdrl.data.tokenizer import chat_messages, encode_prompt, raw_control_text, uses_template
from spmdrl.data.vision import NO_IMAGES, ImageIntake, expanded
from spmdrl.types import ImageSpan, Prompt, UserError

ToolSchema = dict[str, Any]  # of a tool, in JSON

MAX_ATTEMPTS = 1000  # rows tried in place of one unwanted prompt
_TRAINING, _HELD_OUT = 0, 1  # hashed into seeds, so that the two never share one


def question_key(row: Row) -> str:
    """Return the question in the form in which questions are compared: without a template, white space normalized.

    Questions about other images are others: images are the same when their bytes or paths are.
    """
    words = unicodedata.normalize("NFC", row.question).split()
    return " ".join([*words, *(image.identity for image in row.images)])


class Turns:
    """Smooth weighted round-robin over sources.

    It computes with whole numbers, so the order repeats exactly after a period.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        written = [Fraction(str(weight)) for weight in weights]
        unit = math.lcm(*(weight.denominator for weight in written))
        whole = [int(weight * unit) for weight in written]
        self._weights = [weight // math.gcd(*whole) for weight in whole]
        self._period = sum(self._weights)
        self._credit = [0] * len(whole)
        self._served = [0] * len(whole)
        self._turns: list[tuple[int, int]] = []  # simulated as far as needed until now

    def at(self, index: int) -> tuple[int, int]:
        """Return (the source whose turn `index` is, the number of its earlier turns)."""
        cycle, place = divmod(index, self._period)
        while len(self._turns) <= place:
            self._credit = [credit + weight for credit, weight in zip(self._credit, self._weights, strict=True)]
            source = self._credit.index(max(self._credit))
            self._turns.append((source, self._served[source]))
            self._credit[source] -= self._period
            self._served[source] += 1
        source, earlier = self._turns[place]
        return source, cycle * self._weights[source] + earlier

    def covering(self, numbers: Sequence[int]) -> int:
        """Return how many turns give each source at least its number."""
        cycles = max(-(-number // weight) for number, weight in zip(numbers, self._weights, strict=True))
        return cycles * self._period


@dataclass(frozen=True, slots=True)
class Item:
    """A prompt of the stream before it is read."""

    source: int  # its place in the settings
    task: str
    row: int | None  # of a file; None for one that is generated, and never comes again
    epoch: int  # passes over the file before this one


@dataclass(frozen=True, slots=True)
class Encoded:
    """A prompt as the policy reads it."""

    token_ids: tuple[int, ...]
    images: tuple[ImageSpan, ...]
    text: str


@dataclass(frozen=True, slots=True)
class AnswerLimit:
    """The longest answer of a row."""

    num_tokens: Callable[[Row], int]  # of its answer, or the longer of two. Raises UserError where it has none
    most: int
    setting: str  # that says so
    holds_for_held_out: bool  # False where their choice must not depend on answers, so that other runs make it too


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEncoder:
    """Turns rows into token ids, under the length limit."""

    encode: Callable[..., tuple[tuple[int, ...], str]]  # a prompt and the `place` of its images
    images: ImageIntake
    messages: Callable[[Written], tuple[Message, ...]]  # those that a template renders
    raw_control_text: Callable[[Written], str | None]  # in a prompt that no template renders
    max_prompt_tokens: int
    overlong: Literal["error", "drop"]
    answers: AnswerLimit | None = None  # None: nothing but prompts is limited here

    def __call__(self, row: Row) -> Encoded | None:
        """Return the prompt, whose images are stored, or None when it is too long and `overlong` is "drop"."""
        with in_row(row.where):
            token_ids, text = self._tokens(row)
            if not self._fits(row, token_ids):
                return None
            return Encoded(*expanded(token_ids, self.spans(row.images), self.images), text)

    def fits(self, row: Row) -> bool:
        """Return what decides whether there is a prompt, without decoding its images: only their sizes are read."""
        with in_row(row.where):
            for image in row.later_images:  # which must be such that they can be shown, whatever their size
                self.images.num_tokens(image)
            return self._fits(row, self._tokens(row)[0]) and self._answers_fit(row)

    def spans(self, images: Iterable[ImageFile]) -> tuple[ImageSpan, ...]:
        """Keep the pixels of images, and return the placeholders of each, the first of which is token 0."""
        return tuple(map(self.images.span, images))

    def _tokens(self, row: Row) -> tuple[tuple[int, ...], str]:
        """Return token ids, one for each image, and their text."""
        return self.encode(row.prompt, place=self.images.placeholder if row.images else None)

    def _answers_fit(self, row: Row) -> bool:
        limit = self.answers
        if limit is None or (num_tokens := limit.num_tokens(row)) <= limit.most:
            return True
        if self.overlong == "drop":
            return False
        raise UserError(
            f"an answer has {num_tokens} tokens, more than {limit.setting} = {limit.most}; raise it, or set "
            'data.overlong = "drop"'
        )

    def _fits(self, row: Row, token_ids: Sequence[int]) -> bool:
        num_tokens = len(token_ids) + sum(self.images.num_tokens(image) - 1 for image in row.images)
        if num_tokens <= self.max_prompt_tokens:
            return True
        if self.overlong == "drop":
            return False
        with_images = f" with its {len(row.images)} images" if row.images else ""
        raise UserError(
            f"the prompt has {num_tokens} tokens{with_images}, more than data.max_prompt_tokens = "
            f'{self.max_prompt_tokens}; raise it, or set data.overlong = "drop"'
        )


@dataclass(frozen=True, slots=True)
class TrainingPair:
    """A prompt and what is to be imitated: the response to it, and perhaps more of the conversation. In a comparison
    that is preferred to something else."""

    prompt: Prompt
    where: str  # for messages: "train.jsonl line 12"
    exchanges: tuple[Exchange, ...]  # the first has no messages
    images: tuple[ImageSpan, ...] = ()  # of the exchanges, in order; the first placeholder of each is token 0
    rejected: tuple[Exchange, ...] = ()  # what would be worse
    margin: float = 0.0  # by how much


class PromptStream:
    """Training prompts without end, from weighted sources."""

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        weights: Sequence[float],
        encoder: PromptEncoder,
        exclude: frozenset[str] = frozenset(),
    ) -> None:
        """`exclude` holds the keys of questions to leave out. All rows of files are read and checked now."""
        self._exclude = exclude
        self._encoder = encoder
        self._turns = Turns(weights)
        self._dropped: Counter[str] = Counter()
        self._spelt: tuple[str, str] | None = None  # the first row of a file with the text of a control token, the text
        self._sources = [source.keep(self._keeps) if isinstance(source, FileSource) else source for source in sources]

    @property
    def dropped(self) -> dict[str, int]:
        """Counts of what was left out, by reason: rows of files (equal on all ranks), and items this rank generated."""
        return dict(self._dropped)

    def remarks(self) -> Iterator[str]:
        """Yield a warning where a raw prompt has the text of a control token: it may have been rendered already."""
        if self._spelt is not None:
            where, text = self._spelt
            yield (
                f"warning: {where} has the text of the control token {text!r}, which stays text; if the prompts are "
                'conversations that a chat template has rendered already, set data.chat_template = "rendered"'
            )

    def take(self, start: int, count: int) -> list[Prompt]:
        """Return prompts `start` to `start + count - 1` of the stream, whose images are then in the run's store."""
        return [self._prompt_and_row(index)[0] for index in range(start, start + count)]

    def item(self, index: int) -> Item:
        """Return what prompt `index` is, without reading it."""
        place, number = self._turns.at(index)
        source = self._sources[place]
        row, epoch = source.item(number) if isinstance(source, FileSource) else (None, 0)
        return Item(place, source.task, row, epoch)

    def metadata(self, index: int) -> dict[str, Any]:
        """Return the columns of prompt `index` that have no other use."""
        place, number = self._turns.at(index)
        source = self._sources[place]
        if isinstance(source, FileSource):
            return source.row(number).metadata
        dropped = self._dropped.copy()  # what is passed over counts when the prompt is taken
        try:
            return self._prompt_and_row(index)[1].metadata
        finally:
            self._dropped = dropped

    @property
    def num_rows(self) -> list[int | None]:
        """The rows of each source before they repeat; None for one that generates them."""
        return [source.num_rows for source in self._sources]

    @property
    def lap(self) -> int:
        """Prompts of the stream in which every row of every file comes at least once."""
        return self._turns.covering([rows or 1 for rows in self.num_rows])

    def restore(self, prompt: Prompt) -> None:
        """Put the images of a prompt of this stream into the node's store again, unless they are there.

        Raises UserError when they are others now.
        """
        if not self._encoder.images.has(prompt.images):
            _require_same(prompt, prompt.images, self.take(prompt.prompt_id, 1)[0].images)

    def pairs(self, start: int, count: int) -> list[TrainingPair]:
        """Return prompts `start` to `start + count - 1`, each with what is to be imitated."""
        return [_pair(*self._prompt_and_row(index), self._encoder) for index in range(start, start + count)]

    def _prompt_and_row(self, index: int) -> tuple[Prompt, Row]:
        place, number = self._turns.at(index)
        source = self._sources[place]
        for attempt in range(MAX_ATTEMPTS):
            row = source.row(number, attempt)
            if self._is_held_out(row, "items"):
                continue
            encoded = self._encoder(row)
            if encoded is not None:
                return _prompt(index, source.task, row, encoded, self._encoder), row
            self._dropped["overlong_items"] += 1
        raise UserError(
            f"{row.where}: {MAX_ATTEMPTS} items in a row were held out or too long, so the task {source.task} has too "
            "few distinct questions for training; hold out fewer (num_prompts) or widen its params"
        )

    def _keeps(self, row: Row) -> bool:
        if self._spelt is None and (text := self._encoder.raw_control_text(row.prompt)):
            self._spelt = row.where, text
        if self._is_held_out(row, "rows"):
            return False
        if not self._encoder.fits(row):
            self._dropped["overlong_rows"] += 1
            return False
        return True

    def _is_held_out(self, row: Row, unit: str) -> bool:
        """Return True for a row that must not be trained on, which is counted."""
        if question_key(row) not in self._exclude:
            return False
        self._dropped[f"held_out_{unit}"] += 1
        return True


def _prompt(
    prompt_id: int, task: str, row: Row, encoded: Encoded, encoder: PromptEncoder, rule: str | None = None
) -> Prompt:
    return Prompt(
        prompt_id=prompt_id,
        token_ids=encoded.token_ids,
        images=encoded.images,
        text=encoded.text,
        answer=row.answer,
        task=task,
        metadata=row.metadata,
        messages=encoder.messages(row.prompt),
        rule=rule,
    )


def _require_same(prompt: Prompt, before: tuple[ImageSpan, ...], now: tuple[ImageSpan, ...]) -> None:
    if now != before:
        raise UserError(
            f"the images of prompt {prompt.prompt_id} ({prompt.text[:60]!r}) are not those that it had before: the "
            "data has changed since, or [data] or run.seed have; set them back"
        )


def require_response(row: Row) -> None:
    """Raise UserError for a row without anything to imitate."""
    if row.response is None:
        raise UserError(
            f"there is no response to imitate: no response_column is set, and the prompt {_last_said(row)}; the row "
            f"has the columns {', '.join(row.columns)}; set response_column to the one with the response, give "
            'conversations that end with an assistant\'s message, or set held_out.every = "never" if it is held out'
        )


def _pair(prompt: Prompt, row: Row, encoder: PromptEncoder) -> TrainingPair:
    with in_row(row.where):
        require_response(row)
        images = encoder.spans(row.later_images)
    return TrainingPair(prompt, row.where, row.exchanges, images, row.rejected, row.margin)


def _last_said(row: Row) -> str:
    if is_conversation(row.prompt):
        return f'is a conversation that ends with a message of role "{row.prompt[-1]["role"]}"'
    return "is a text"


class HeldOutPrompts(list[Prompt]):
    """Held-out prompts, with what it takes to read their images again. The place of each is its `prompt_id`."""

    def __init__(self, rows: Iterable[HeldOutRow] = (), encoder: PromptEncoder | None = None) -> None:
        """Without rows there are none. The images are then in the run's store."""
        self._encoder = encoder
        self._rows = list(rows)
        super().__init__(self._read(prompt_id) for prompt_id in range(len(self._rows)))

    def pairs(self) -> list[TrainingPair]:
        """Return each prompt with what would be imitated."""
        return list(map(self._pair, self))

    def restore(self, prompt: Prompt) -> None:
        """Put the images of one of the prompts into the node's store again, unless they are there.

        Raises UserError when they are others now.
        """
        if self._encoder is not None and not self._encoder.images.has(prompt.images):
            _require_same(prompt, prompt.images, self._read(prompt.prompt_id).images)

    def restore_pair(self, pair: TrainingPair) -> None:
        """Do the same for a prompt and what would be imitated."""
        self.restore(pair.prompt)
        if self._encoder is not None and not self._encoder.images.has(pair.images):
            _require_same(pair.prompt, pair.images, self._pair(pair.prompt).images)

    def _pair(self, prompt: Prompt) -> TrainingPair:
        assert self._encoder is not None, "rows come with an encoder"
        return _pair(prompt, self._rows[prompt.prompt_id].row, self._encoder)

    def _read(self, prompt_id: int) -> Prompt:
        held_out = self._rows[prompt_id]
        assert self._encoder is not None, "rows come with an encoder"
        encoded = self._encoder(held_out.row)
        assert encoded is not None, "it fits"
        source = held_out.source
        return _prompt(prompt_id, source.task, held_out.row, encoded, self._encoder, source.rule)


@dataclass(frozen=True, slots=True)
class HeldOutRow:
    """A row of a source, by its number."""

    source: Source
    number: int

    @property
    def row(self) -> Row:
        """The row itself, read from the file."""
        return self.source.row(self.number)


def held_out_rows(
    sources: Sequence[Source], *, weights: Sequence[float], encoder: PromptEncoder, count: int
) -> Iterator[HeldOutRow]:
    """Yield `count` rows with distinct questions, divided over the sources by weight; no image is decoded."""
    turns = Turns(weights)
    seen: set[str] = set()
    candidates = [_distinct(source, encoder, seen) for source in sources]
    for place, number in map(turns.at, range(count)):
        found = next(candidates[place], None)
        if found is None:
            raise UserError(
                f"held out: num_prompts = {count}, but the source {sources[place].task} has only {number} distinct "
                "questions that fit; lower num_prompts"
            )
        yield found


def _distinct(source: Source, encoder: PromptEncoder, seen: set[str]) -> Iterator[HeldOutRow]:
    """Yield the source's rows whose question is not in `seen`, and add them to it; stop after too many misses."""
    index = misses = 0
    while misses < MAX_ATTEMPTS if source.num_rows is None else index < source.num_rows:
        row = source.row(index)
        key = question_key(row)
        is_new = key not in seen and _fits(row, source, encoder)
        if is_new:
            seen.add(key)
            yield HeldOutRow(source, index)
        index += 1
        misses = 0 if is_new else misses + 1


def _fits(row: Row, source: Source, encoder: PromptEncoder) -> bool:
    """Return whether a row fits. Raises UserError where it is wrong, about the first such row of its file."""
    try:
        return encoder.fits(row)
    except UserError:
        for other in source.in_file_order() if isinstance(source, FileSource) else ():
            encoder.fits(other)
        raise


def make_training_stream(
    cfg: PromptsConfig,
    held_out_cfg: HeldOutPromptsConfig | None,
    *,
    seed: int,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[ToolSchema] = (),
    form: RowTransform = asked,
    images: ImageIntake = NO_IMAGES,
    answers: AnswerLimit | None = None,
) -> PromptStream:
    """Make the stream of training prompts, without the questions that `make_held_out` gives for the same settings.

    `tools` are the schemas that chat templates show, `images` what becomes of images, `answers` limits rows' answers.
    """
    encoder = _encoder_of(cfg, tokenizer, tools, images, answers)
    chooser = _encoder_of(cfg, tokenizer, tools, images, _for_held_out(answers))
    held_outs = _held_out_of(held_out_cfg, form, chooser) if held_out_cfg else ()
    return PromptStream(
        [open_source(source, seed=mix(seed, _TRAINING, place), form=form) for place, source in enumerate(cfg.sources)],
        weights=[source.weight for source in cfg.sources],
        encoder=encoder,
        exclude=frozenset(question_key(held_out.row) for held_out in held_outs),
    )


def make_held_out(
    cfg: PromptsConfig,
    held_out_cfg: HeldOutPromptsConfig,
    *,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[ToolSchema] = (),
    form: RowTransform = asked,
    images: ImageIntake = NO_IMAGES,
    answers: AnswerLimit | None = None,
) -> HeldOutPrompts:
    """Make the held-out prompts; `prompt_id` counts from 0.

    They do not depend on the run's seed, so runs can be compared, and stages of training leave out the same questions.
    """
    encoder = _encoder_of(cfg, tokenizer, tools, images, _for_held_out(answers))
    return HeldOutPrompts(_held_out_of(held_out_cfg, form, encoder), encoder)


def _for_held_out(answers: AnswerLimit | None) -> AnswerLimit | None:
    return answers if answers is not None and answers.holds_for_held_out else None


def _held_out_of(cfg: HeldOutPromptsConfig, form: RowTransform, encoder: PromptEncoder) -> Iterator[HeldOutRow]:
    entries = cfg.sources
    # Sets have the same items wherever they are named.
    places = [0 if isinstance(source, SetData) else place for place, source in enumerate(entries)]
    return held_out_rows(
        [
            open_source(source, seed=mix(_HELD_OUT, place), form=form)
            for place, source in zip(places, entries, strict=True)
        ],
        weights=[source.weight for source in entries],
        encoder=encoder,
        count=cfg.num_prompts,
    )


def _encoder_of(
    cfg: PromptsConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Sequence[ToolSchema],
    images: ImageIntake,
    answers: AnswerLimit | None = None,
) -> PromptEncoder:
    has_template = uses_template(tokenizer, cfg.chat_template)
    return PromptEncoder(
        encode=functools.partial(
            encode_prompt, tokenizer, system_prompt=cfg.system_prompt, chat_template=cfg.chat_template, tools=tools
        ),
        images=images,
        messages=lambda prompt: tuple(chat_messages(prompt, cfg.system_prompt)) if has_template else (),
        raw_control_text=functools.partial(raw_control_text, tokenizer, chat_template=cfg.chat_template),
        max_prompt_tokens=cfg.max_prompt_tokens,
        overlong=cfg.overlong,
        answers=answers,
    )
