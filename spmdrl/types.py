"""The nouns: what flows from one phase of a step to the next.

A step moves `Prompt -> Rollout -> RewardedRollout -> Sequence -> MicroBatch`. Everything is frozen; a phase makes new
values and never edits the ones it was given.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

FinishReason = Literal["stop", "length", "abort"]


class UserError(ValueError):
    """A user's request that cannot be met. The message says what was set, what is true, and what to set instead."""


class TrainingDiverged(RuntimeError):
    """A number that must be finite is not. No weights were changed by the update that raised it."""


class StopRequested(Exception):
    """All ranks that train have agreed to stop; each of them raises it at the same place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The tokens a rollout starts from, and what its reward needs to know."""

    prompt_id: int  # index in the stream of its data set; with the run seed it decides every random number
    token_ids: tuple[int, ...]  # after the chat template
    text: str  # the same, readable
    answer: str | None  # the reference answer, when the data has one
    task: str  # the data source it came from, for per-task metrics and rewards
    metadata: dict[str, Any]  # the row's other columns, handed to the reward unchanged


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One response to sample. Everything random about it follows from `seed` and the token's place."""

    prompt_ids: tuple[int, ...]
    seed: int  # 63 bits, see `algo.seeds.rollout_seed`
    max_response_tokens: int  # with those in response_ids
    response_ids: tuple[int, ...] = ()  # sampled before, by a request that was aborted; the engine goes on after them
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring tokens of a response that the same weights sampled."""

    version: int  # the step after which those weights were sent to the engine
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The tokens that the engine sampled for one request."""

    token_ids: tuple[int, ...]  # includes the stop token when finish_reason is "stop"
    logprobs: tuple[float, ...]  # nats, of the temperature-scaled distribution before top-p; greedy: unscaled
    finish_reason: FinishReason
    spans: tuple[Span, ...]  # in order; their lengths add up to the response's

    @property
    def oldest_version(self) -> int:
        """Version of the oldest weights that sampled any of it. An empty response has none: ValueError."""
        return min(span.version for span in self.spans)

    def continued(self, rest: Response) -> Response:
        """This response, which was aborted, and what was sampled after it, as one."""
        spans = list(self.spans)
        for span in rest.spans:
            if spans and spans[-1].version == span.version:
                spans[-1] = Span(span.version, spans[-1].num_tokens + span.num_tokens)
            else:
                spans.append(span)
        return Response(
            token_ids=self.token_ids + rest.token_ids,
            logprobs=self.logprobs + rest.logprobs,
            finish_reason=rest.finish_reason,
            spans=tuple(spans),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One prompt with one response."""

    prompt: Prompt
    sample_index: int  # 0 to group_size - 1, and group_size of a baseline
    seed: int
    response: Response
    is_baseline: bool = False  # sampled greedily, for comparison with the others of its group; not trained on


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardOutcome:
    """The verifier's answer for one rollout. `failure` names what went wrong when there is no number."""

    reward: float  # 0.0 when `failure` is set
    parts: dict[str, float]  # each term before weighting, by its name
    failure: str | None = None  # e.g. "timeout", "ValueError: ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedRollout:
    """A rollout with its reward."""

    index: int  # place in the step's global order, whole prompt groups by prompt_id; whatever rank sampled it
    rollout: Rollout
    outcome: RewardOutcome
    baseline: RewardOutcome | None = None  # of its prompt's greedy response, where rewards are compared with that


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One rollout as training sees it: prompt then response, n tokens; every list has n entries."""

    index: int  # place in the step's global order
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # True where the policy chose the token and it is to be trained
    rollout_logprobs: tuple[float, ...]  # nats, 0 outside loss_mask
    reward: float
    baseline_reward: float = math.nan  # of its prompt's greedy response; nan where there is none


FILLING = -1  # the index of a sequence that only fills up a micro-batch


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The input of one forward pass on one rank: S sequences laid end to end, T tokens in all."""

    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, restarts at 0 in every sequence
    cu_seqlens: Tensor  # [S+1] int32, token offsets, last entry == T
    loss_mask: Tensor  # [T] bool, True where the policy chose the token and it is to be trained
    loss_weights: Tensor  # [T] float32, what a token's loss counts in the global loss; 0 outside loss_mask
    rollout_logprobs: Tensor  # [T] float32, nats
    rewards: Tensor  # [T] float64, its rollout's on every token
    baseline_rewards: Tensor  # [T] float64, of the prompt's greedy response; nan where there is none
    advantages: Tensor | None = None  # [T] float32, 0 outside loss_mask; None until `step/advantages.py` has run
    old_logprobs: Tensor | None = None  # [T] float32, nats; None means: the policy has not moved in this step
    ref_logprobs: Tensor | None = None  # [T] float32, nats; None when no KL term needs them
    values: Tensor | None = None  # [T] float32, the critic's before it moves in this step, in units of the reward
    returns: Tensor | None = None  # [T] float32, what the critic learns; both are None without one
    mismatch_scale: float = 1.0  # makes the mean of the mismatch weights over the mini-batch 1
    chosen: Tensor | None = None  # [T] bool, the tokens that clip_cov and kl_cov treat apart; None for other losses
    sequence_index: tuple[int, ...] = ()  # [S] place of each sequence in the step's global order, or FILLING

    def __post_init__(self) -> None:
        tokens = self.token_ids.shape
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and field.name != "cu_seqlens" and value.shape != tokens:
                raise ValueError(f"{field.name} is {list(value.shape)} but token_ids is {list(tokens)}")

    @property
    def seqlens(self) -> list[int]:
        """Tokens in each sequence, [S]."""
        return self.cu_seqlens.diff().tolist()

    @property
    def columns(self) -> dict[str, Tensor]:
        """The tensors it has, by name; `cu_seqlens` is among them."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}

    def with_columns(self, columns: Mapping[str, Tensor]) -> MicroBatch:
        """Return the micro-batch with these tensors added or replaced."""
        return dataclasses.replace(self, **columns)  # type: ignore[arg-type]

    def to(self, device: torch.device) -> MicroBatch:
        """Return the micro-batch with its tensors on `device`."""
        return self.with_columns({name: x.to(device, non_blocking=True) for name, x in self.columns.items()})


MiniBatch = list[MicroBatch]  # one rank's share of the rollouts behind one optimizer step
