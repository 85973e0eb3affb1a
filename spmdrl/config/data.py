"""Tables about prompts, the held-out ones among them, and how sequences are packed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from spmdrl.config.base import Coefficient, Count, NonNegativeInt, PathText, Positive, Section, rule
from spmdrl.config.curriculum import CurriculumConfig
from spmdrl.config.source_algorithm import SourceAlgorithm


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


MAX_IMAGE_PIXELS = 2**26 + 2**24  # Pillow warns of more than 89 million

ChatTemplate = Literal["auto", "never", "rendered"]
DataSource = Annotated[FileData | ReasoningGymData, Field(discriminator="kind")]


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
    """Smaller images are enlarged to so many pixels, for models that take images of different sizes. Unset: as the
    model's processor says."""
    max_pixels: Count | None = None
    """Larger images are shrunk to so many pixels, for models that take images of different sizes; a token shows 784 to
    1024 of them. Unset: as the model's processor says."""
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
    sources: Annotated[tuple[FileSettings | ReasoningGymData, ...], Field(strict=False, min_length=1)]
    """Sources of the held-out prompts. The chosen prompts are the same for every seed, and are never trained on."""
    num_prompts: Count
    """Held-out prompts, over all sources."""


class HeldOutConfig(HeldOutPromptsConfig):
    sources: Annotated[tuple[DataSource, ...], Field(strict=False, min_length=1)]
    """Sources of the held-out prompts. The chosen prompts are the same for every seed, and are never trained on."""


def _greedy_or_sampled(temperature: float) -> float:
    if 0 < temperature < 1e-3:
        raise ValueError("is so low that engines may sample greedily; set 0, which is greedy, or at least 0.001")
    return temperature


class EvalConfig(HeldOutConfig):
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
    """Most patches of images that a frozen tower, or the torch engine's, looks at in one pass, unless one image has
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
