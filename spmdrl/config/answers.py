"""Tables of runs that learn from answers in files: responses to imitate, and pairs of which one is preferred."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from spmdrl.config.base import Count, NonNegative, Positive, Section, rule, unused_settings
from spmdrl.config.data import DataSource, FileSettings, HeldOutPromptsConfig, PromptsConfig


class AnswersConfig(Section):
    max_response_tokens: Count
    """Longest response; with `turns = "all"`, all that follows the prompt. What becomes of a row with a longer one,
    `data.overlong` says."""


class ResponsesConfig(AnswersConfig):
    sequences_per_step: Count
    """(prompt, response) pairs behind one optimizer step, over all ranks."""
    turns: Literal["last", "all"] = "last"
    """The assistant's messages that are imitated in a prompt that is a conversation and ends with one, where the source
    has no `response_column`: the last, or all. What is said between them is read and not trained."""
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
