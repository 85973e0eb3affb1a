"""Tables about data: its order, prompts, held-out ones, how sequences are packed, and answers in files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from spmdrl.config.algorithm import SourceAlgorithm
from spmdrl.config.base import (
    Coefficient,
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    PathText,
    Positive,
    Section,
    rule,
    unused_settings,
)
from spmdrl.config.sets import GENERATED, known_sets, set_name

# The table of a curriculum, and the rules that give it a signal.


class GateConfig(Section):
    opens: str
    """Source of `[[data.sources]]`, by its `task`, whose prompts are left out until the gate opens."""
    after: str
    """Source whose success opens it."""
    success: Fraction
    """Mean success rate of the latest groups of `after` from which the gate is open; then it stays open."""
    groups: Count = 32
    """How many groups of `after` the mean is taken over; with fewer the gate is shut."""


class CurriculumConfig(Section):
    kind: Literal["all", "band", "learnability", "function"] = "all"
    """The chance that a prompt is taken when its turn comes, from the fraction p of right responses when it was last
    sampled; prompts that never were are taken. `all`: 1. `band`: 1 where `low` <= p <= `high`, and `explore` elsewhere.
    `learnability`: 4p(1 - p), at least `explore` (arXiv 2502.12272). `function`: what a function of yours returns."""
    low: Fraction = 0.1
    """Smallest p of a band."""
    high: Fraction = 0.9
    """Largest p of a band."""
    explore: Annotated[float, Field(ge=1e-3, le=1.0)] = 0.1
    """Smallest chance of a prompt, so that those that were too easy or too hard are sampled again."""
    function: Annotated[str, Field(pattern=":")] | None = None
    """`package.module:function` or `path/file.py:function`. It returns a chance from 0 to 1, and is called with those
    of `task`, `success` (p, or None), `visits` (times sampled), `epoch` and `metadata` that it has a parameter for."""
    gates: Annotated[tuple[GateConfig, ...], Field(strict=False)] = ()
    """Sources that come later, each as a table `[[data.curriculum.gates]]`."""

    @property
    def needs_repeats(self) -> bool:
        """True when it only knows prompts that come again."""
        return self.kind in ("band", "learnability")


@rule(CurriculumConfig)
def curricula_say_something(curriculum: CurriculumConfig) -> Iterator[str]:
    kind = f'kind = "{curriculum.kind}"'
    if curriculum.kind != "band":
        yield from unused_settings(curriculum, ("low", "high"), kind)
    if not curriculum.needs_repeats:
        yield from unused_settings(curriculum, ("explore",), kind)
    if curriculum.kind != "function":
        yield from unused_settings(curriculum, ("function",), kind)
    elif curriculum.function is None:
        yield 'function is not set, which kind = "function" calls; set it to "path/file.py:function"'
    if curriculum.low > curriculum.high:
        yield f"low = {curriculum.low:g} is above high = {curriculum.high:g}, so that no rate lies between; swap them"
    if curriculum.kind == "all" and not curriculum.gates:
        yield 'kind = "all" without gates takes every prompt, as a run without a curriculum does; remove the table'


@rule(CurriculumConfig)
def gates_lead_somewhere(curriculum: CurriculumConfig) -> Iterator[str]:
    before = {gate.opens: gate.after for gate in curriculum.gates}
    for place, gate in enumerate(curriculum.gates):
        if gate.opens in [other.opens for other in curriculum.gates[:place]]:
            yield f'gates.{place}.opens = "{gate.opens}" is opened by another gate already; remove one of them'
        behind, steps = gate.after, 0
        while behind in before and behind != gate.opens and steps < len(before):
            behind, steps = before[behind], steps + 1
        if behind == gate.opens:
            yield f'gates.{place}: "{gate.opens}" waits for itself, so that it never opens; name another source'


# Tables about prompts, the held-out ones among them, and how sequences are packed.


def _on_one_line(name: str) -> str:
    if not name.isprintable():
        raise ValueError("is a name in tables and charts, and holds what cannot be printed, such as a line break")
    return name


class FileSettings(Section):
    kind: Literal["jsonl", "parquet"]
    """File format."""
    path: PathText
    """The file, relative to the working directory; or a file of a data set on a hub, by its name
    `hf:ORGANISATION/NAME@REVISION:FILE`, in huggingface_hub's cache."""
    prompt_column: str = "prompt"
    """A string, or a list of chat messages (`{"role": ..., "content": ...}`); a content is a string, or a list of
    parts."""
    image_column: str | None = None
    """The images of a row: one or a list of paths, of bytes, or of `{"bytes": ..., "path": ...}`. Each has a place in
    the prompt: the text `<image>`, or a part `{"type": "image"}` of a message. See `docs/data.md`."""
    image_root: PathText | None = None
    """Folder to which paths of images are relative, and in which all of them lie. Unset: that of the data file."""
    task: Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_on_one_line)] = "default"
    """Name of this source in per-task metrics."""
    weight: Positive = 1.0
    """Share of prompts from this source, relative to the other sources."""


class FileData(FileSettings):
    algorithm: SourceAlgorithm | None = None
    """How its rollouts are trained on, where that is other than the run's; `data.sources` of `spmdrl.train` only. See
    `docs/distillation.md`."""
    answer_column: str = "answer"
    """The reference answer that rewards compare with; "" when the data has none."""
    answer_after: Annotated[str, Field(min_length=1)] | None = None
    """The reference answer is what follows the last occurrence of this text in its column: `####` in GSM8K. A row
    without it is an error. Unset: the whole text."""
    response_column: str | None = None
    """The response to imitate, for supervised fine-tuning."""
    order_column: str | None = None
    """A column with numbers, such as a difficulty: every pass takes the rows from the smallest number to the largest,
    and shuffles those that are equal. Unset: every pass shuffles all of them."""


def _bounded_widths(template: str) -> str:
    if re.search(r"\{[^{}]*:[^{}]*[0-9]{5}", template):
        raise ValueError("pads a field to more than 9999 characters")
    return template


class ReasoningGymData(Section):
    kind: Literal["reasoning_gym"]
    """Procedurally generated tasks of the reasoning-gym package."""
    algorithm: SourceAlgorithm | None = None
    """How its rollouts are trained on, where that is other than the run's; `data.sources` of `spmdrl.train` only. See
    `docs/distillation.md`."""
    task: str
    """Name of the reasoning-gym data set, such as `chain_sum`."""
    params: dict[str, Any] = Field(default_factory=dict)
    """Parameters of that data set, such as `{ min_terms = 2, max_terms = 3 }`."""
    prompt_template: Annotated[str, AfterValidator(_bounded_widths)] = "{question}"
    """The prompt; `{question}` and every key of the item's metadata can be used, e.g. `{metadata[word]}`."""
    weight: Positive = 1.0
    """Share of prompts from this source, relative to the other sources."""


class SetData(Section):
    kind: Literal["set"]
    """An evaluation set by its name, in `[eval]` only. Its answers are rewarded by its own rule, and not by `[reward]`;
    right are those with a reward of 1. See `docs/seeing.md`."""
    name: Annotated[str, AfterValidator(set_name)]
    """One of those that `spmdrl evaluate --set` knows, such as `math500`, or `reasoning_gym/TASK`."""
    path: PathText | None = None
    """Its file. Unset: in huggingface_hub's cache, as `config.toml` in the run's folder has it."""
    weight: Positive = 1.0
    """Share of prompts from this source, relative to the other sources, where `num_prompts` is set."""

    @property
    def is_generated(self) -> bool:
        """True when it has no file."""
        return self.name.startswith(GENERATED)

    @property
    def task(self) -> str:
        """Its name in per-task metrics."""
        return self.name.removeprefix(GENERATED)

    @property
    def rule(self) -> Literal["math", "reasoning_gym"]:
        """The kind of the one reward of its answers."""
        return "reasoning_gym" if self.is_generated else "math"

    @property
    def rows(self) -> FileData | ReasoningGymData:
        """The source that has its rows."""
        if self.is_generated:
            return ReasoningGymData(kind="reasoning_gym", task=self.task)
        found = known_sets()[self.name]
        assert self.path is not None, "the start has found its file"
        return FileData(
            kind="jsonl" if self.path.endswith(".jsonl") else "parquet",
            path=self.path,
            prompt_column=found.prompt_column,
            answer_column=found.answer_column,
            answer_after=found.answer_after,
            task=self.task,
        )


MAX_IMAGE_PIXELS = 2**26 + 2**24  # Pillow warns of more than 89 million

ChatTemplate = Literal["auto", "never", "rendered"]
DataSource = Annotated[FileData | ReasoningGymData, Field(discriminator="kind")]
EvalSource = Annotated[FileData | ReasoningGymData | SetData, Field(discriminator="kind")]


class PromptsConfig(Section):
    sources: Annotated[tuple[FileSettings | ReasoningGymData, ...], Field(strict=False, min_length=1)]
    """Sources of the training prompts."""
    system_prompt: str | None = None
    """Put before string prompts; needs a tokenizer with a chat template."""
    chat_template: ChatTemplate = "auto"
    """`auto` applies the tokenizer's chat template when it has one; `never` uses the prompt as it is, and the texts of
    control tokens in it stay text; `rendered` takes them as control tokens: prompts are conversations that a template
    has rendered already."""
    max_prompt_tokens: Count
    """Longest prompt; see `overlong` for longer ones."""
    overlong: Literal["error", "drop"] = "error"
    """Prompts longer than `max_prompt_tokens` are an error that names the row, or are dropped and counted."""
    min_pixels: Count | None = None
    """Smaller images are enlarged to this number of pixels, for models that take images of different sizes. Unset: as
    the model's processor says."""
    max_pixels: Count | None = None
    """Larger images are shrunk to this number of pixels, for models that take images of different sizes; a token shows
    784 to 1024 of them. Unset: as the model's processor says."""
    max_image_pixels: Annotated[int, Field(ge=1, le=MAX_IMAGE_PIXELS)] = 2**26
    """Pixels of an image in the data; one that has more is an error that names the row, and is not decoded."""
    image_store_gib: Positive | None = None
    """Shared memory of a node for the pixels of images. Beyond it those that were not used the longest are removed, and
    read from the data again when they are needed. Unset: half of what is free in `/dev/shm` at the start."""


class DataConfig(PromptsConfig):
    sources: Annotated[tuple[DataSource, ...], Field(strict=False, min_length=1)]
    """Sources of the training prompts."""
    curriculum: CurriculumConfig | None = None
    """Which of the training prompts are taken. Unset: all, in turn. See `docs/data.md`."""


class HeldOutPromptsConfig(Section):
    sources: Annotated[tuple[FileSettings | ReasoningGymData | SetData, ...], Field(strict=False, min_length=1)]
    """Sources of the held-out prompts. The chosen prompts are the same for every seed, and are never trained on."""
    num_prompts: Count
    """Held-out prompts, over all sources."""


class HeldOutConfig(HeldOutPromptsConfig):
    sources: Annotated[tuple[EvalSource, ...], Field(strict=False, min_length=1)]
    """Sources of the held-out prompts. The chosen prompts are the same for every seed, and are never trained on."""


def _greedy_or_sampled(temperature: float) -> float:
    if 0 < temperature < 1e-3:
        raise ValueError("is so low that engines may sample greedily; set 0, which is greedy, or at least 0.001")
    return temperature


class EvalConfig(HeldOutConfig):
    num_prompts: NonNegativeInt = 0
    """Held-out prompts, over all sources. Unset, where all sources are of kind `set`: all that they have, of generated
    ones 100."""
    every: NonNegativeInt = 0
    """Steps between two evaluations; there is always one before the first step and after the last. 0: only these."""
    samples_per_prompt: Count = 1
    """Responses for each prompt; accuracy is their mean."""
    temperature: Annotated[float, Field(ge=0.0, le=1e3), AfterValidator(_greedy_or_sampled)] = 0.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling, for evaluation only: training samples come from the whole distribution."""
    max_response_tokens: Count | None = None
    """Longest response. Unset: `rollout.max_response_tokens`."""
    success_at: Coefficient | None = None
    """The reward from which a response counts as right in `eval/accuracy`. Unset: full marks, which is a reward of 1
    from every term with a positive weight."""


@rule(EvalConfig)
def only_sets_have_an_end(held_out: EvalConfig) -> Iterator[str]:
    if not held_out.num_prompts and not all(isinstance(source, SetData) for source in held_out.sources):
        yield 'num_prompts is not set, and only sources of kind = "set" are asked whole; set it to at least 1'


class PackConfig(Section):
    max_tokens_per_micro_batch: Count | None = None
    """Token budget of one forward pass, never exceeded. With `parallel.cp` the ranks that share a micro-batch share the
    budget: each computes 1/cp of it."""
    sequences_per_micro_batch: Count | None = None
    """Static mode: the sequences in each micro-batch, whatever their length."""
    balance: Literal["tokens", "flops"] = "tokens"
    """Quantity that is balanced over ranks and micro-batches: tokens, or FLOPs, where those of attention grow with the
    square of a sequence's length. See `docs/packing.md`."""
    prefix_tree: Literal["off", "auto"] = "off"
    """`auto` computes tokens that sequences of a micro-batch begin with alike once: the prompt of a group, the history
    of an episode's turns, a system prompt. Budget and balance count them once, too. Where this would not save a tenth
    of a mini-batch's cost, it is packed as with `off`. See `docs/packing.md`."""
    max_patches_per_pass: Count = 16384
    """Most patches of images that a frozen tower, or the torch engine's, encodes in one pass, unless one image has
    more by itself."""


@rule(PackConfig)
def one_size_of_micro_batches(pack: PackConfig) -> Iterator[str]:
    if (pack.max_tokens_per_micro_batch is None) == (pack.sequences_per_micro_batch is None):
        yield (
            "set one of max_tokens_per_micro_batch and sequences_per_micro_batch, and not both; on the command "
            "line the whole table can be replaced: 'pack={ sequences_per_micro_batch = 4 }'"
        )


@rule(PackConfig)
def prefix_trees_need_a_budget(pack: PackConfig) -> Iterator[str]:
    if pack.prefix_tree != "off" and pack.sequences_per_micro_batch is not None:
        yield (
            f'prefix_tree = "{pack.prefix_tree}" counts shared tokens in a token budget, but sequences_per_micro_batch '
            f"= {pack.sequences_per_micro_batch} counts sequences; set max_tokens_per_micro_batch in its place"
        )


# Tables of runs that learn from answers in files: responses to imitate, and pairs of which one is preferred.


class AnswersConfig(Section):
    max_response_tokens: Count
    """Longest response; with `turns = "all"`, all that follows the prompt. What becomes of a row with a longer one,
    `data.overlong` says."""


class ResponsesConfig(AnswersConfig):
    sequences_per_step: Count
    """(prompt, response) pairs behind one optimizer step, over all ranks."""
    turns: Literal["last", "all"] = "last"
    """The assistant's messages that are imitated in a prompt that is a conversation and ends with one, where the source
    has no `response_column`: the last, or all. What stands between them is read and not trained."""
    loss_coef: NonNegative = 1.0
    """Weight of the cross entropy of the responses; 0 learns from `[distill]` alone."""


class PairsConfig(AnswersConfig):
    pairs_per_step: Count
    """Pairs behind one optimizer step, over all ranks."""
    max_response_tokens: Count
    """Longest answer: all that follows the prompt. What becomes of a row with a longer one, `data.overlong` says."""
    loss: Literal["sigmoid", "ipo", "bradley_terry"] = "sigmoid"
    """`sigmoid` is DPO's, `ipo` a squared distance from a margin; with `bradley_terry` the run trains a reward model,
    which gives an answer one number. See `docs/preferences.md`."""
    beta: Positive = 0.1
    """How much a step away from the reference costs: a larger one stays nearer to it. `ipo` calls it tau."""
    label_smoothing: Annotated[float, Field(ge=0.0, lt=0.5)] = 0.0
    """Share of the pairs whose label is supposed to be wrong, for `sigmoid`."""
    length_normalized: bool | None = None
    """Divide an answer's log-ratio by its tokens. Unset: true for `ipo`, as its authors do, false for `sigmoid`."""
    sft_coef: NonNegative = 0.0
    """Coefficient of the chosen answer's cross-entropy, a mean over its tokens, which is added to the loss."""

    center_coef: NonNegative = 0.0
    """Coefficient of the squared sum of a pair's two scores, which keeps them around 0, for `bradley_terry`."""

    @property
    def trains_reward_model(self) -> bool:
        """True when scores are trained, and no policy."""
        return self.loss == "bradley_terry"

    @property
    def preference(self) -> Literal["sigmoid", "ipo"]:
        """The loss of a policy."""
        assert self.loss != "bradley_terry", "a reward model has no preferences"
        return self.loss

    @property
    def divides_by_length(self) -> bool:
        """True where log-ratios are divided by lengths: `length_normalized`, or the default of the loss."""
        return self.loss == "ipo" if self.length_normalized is None else self.length_normalized


@rule(PairsConfig)
def smoothing_belongs_to_sigmoid(pairs: PairsConfig) -> Iterator[str]:
    if pairs.loss != "sigmoid" and pairs.label_smoothing:
        yield f'label_smoothing has no meaning for loss = "{pairs.loss}"; remove it, or set loss = "sigmoid"'


@rule(PairsConfig)
def settings_belong_to_the_loss(pairs: PairsConfig) -> Iterator[str]:
    of_policy = ("beta", "length_normalized", "sft_coef")
    unused = of_policy if pairs.trains_reward_model else ("center_coef",)
    yield from unused_settings(pairs, unused, f'loss = "{pairs.loss}"')


class PreferenceFile(FileSettings):
    prompt_column: str = "prompt"
    """A string, or a list of chat messages (`{"role": ..., "content": ...}`). "" when the data has none: the prompt is
    what both answers begin with."""
    chosen_column: str = "chosen"
    """The answer that is preferred: a string, a list of the messages that follow the prompt, or of the whole
    conversation."""
    rejected_column: str = "rejected"
    """The other answer, in the same form."""
    margin_column: str | None = None
    """A number by which the score of the chosen answer has to be higher, for `pairs.loss = "bradley_terry"`."""


class PreferenceDataConfig(PromptsConfig):
    sources: Annotated[tuple[PreferenceFile, ...], Field(strict=False, min_length=1)]
    """Sources of the pairs."""


class HeldOutRowsConfig(HeldOutPromptsConfig):
    every: Annotated[int, Field(ge=0)] | Literal["never"] = 0
    """Steps between two evaluations of the loss of their responses; there is always one before the first step and after
    the last. 0: only these. `"never"` only keeps their questions out of training, and needs no responses."""


class HeldOutResponsesConfig(HeldOutRowsConfig):
    sources: Annotated[tuple[DataSource, ...], Field(strict=False, min_length=1)]
    """Sources of the held-out prompts. The chosen prompts are the same for every seed, and are never trained on."""


class HeldOutPairsConfig(HeldOutRowsConfig):
    sources: Annotated[tuple[PreferenceFile, ...], Field(strict=False, min_length=1)]
    """Sources of the held-out pairs. They are the same for every seed, and their prompts are never trained on."""
