"""The nouns: what flows from one phase of a step to the next.

A step moves `Prompt -> Rollout -> RewardedRollout -> Sequence -> MicroBatch`; a rollout is made of turns, each of which
is a `Request` to the engine and its `Response`. Everything is frozen: a phase makes new values and edits none.
"""

from __future__ import annotations

import base64
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor

from spmdrl.conversation import NO_TEACHER as NO_TEACHER
from spmdrl.conversation import Action, Message, Observation, as_text
from spmdrl.conversation import UserError as UserError

FinishReason = Literal["stop", "length", "abort"]
# Of an episode. The first three end a response too: an episode without an environment is one response.
EpisodeEnd = Literal[
    "stop",  # the policy ended its only response
    "length",  # a response reached the limit of its tokens
    "abort",  # unfinished
    "done",  # the environment ended it
    "context",  # there is no room for another response
    "max_turns",
    "episode_timeout",
    "step_timeout",  # the environment took too long over one step
    "environment_error",  # the environment failed, or its process died
    "summary",  # a summary was cut off, or no shorter than what it was to replace
]


class TrainingDiverged(RuntimeError):
    """A number that must be finite is not. No weights were changed by the update that raised it."""


class StopRequested(Exception):
    """All ranks that train have agreed to stop; each of them raises it at the same place."""


Grid = tuple[int, int, int]  # patches of an image: frames, rows, columns


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSpan:
    """An image among tokens: its placeholders, and the name under which the run keeps its pixels."""

    digest: str  # 32 hexadecimal digits, of what the model's processor made of the image
    start: int  # its first placeholder
    num_tokens: int  # placeholders, which are neighbours
    grid: Grid

    @property
    def name(self) -> str:
        """The text that replaces it where an episode is shown."""
        return f"<image {self.digest[:8]}>"

    @property
    def end(self) -> int:
        """The first token after its placeholders."""
        return self.start + self.num_tokens

    def moved(self, by: int) -> ImageSpan:
        """Return the same image, `by` tokens further on."""
        return dataclasses.replace(self, start=self.start + by)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """The tokens a rollout starts from, and what its reward needs to know."""

    prompt_id: int  # index in the stream of its data set; with the run seed it decides every random number
    token_ids: tuple[int, ...]  # after the chat template
    text: str  # the same, readable
    answer: str | None  # the reference answer, when the data has one
    task: str  # the data source it came from, for per-task metrics and rewards
    metadata: dict[str, Any]  # the row's other columns, handed to the reward unchanged
    messages: tuple[Message, ...] = ()  # of the chat that the template rendered; empty without a template
    images: tuple[ImageSpan, ...] = ()  # among token_ids, in order
    rule: str | None = None  # by which answers to its evaluation set are rewarded; None: by the run's rewards

    @property
    def question(self) -> str:
        """The text without the template: the last message of a chat."""
        return as_text(self.messages[-1]["content"]) if self.messages else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One response to sample. Everything random about it follows from `seed` and the token's place."""

    prompt_ids: tuple[int, ...]
    seed: int  # 63 bits, see `algo.seeds.rollout_seed`
    max_response_tokens: int  # with those in response_ids
    response_ids: tuple[int, ...] = ()  # sampled before, by a request that was aborted; the engine continues after them
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int | None = None  # then the response reports its candidates
    stop_token_ids: frozenset[int] = frozenset()
    images: tuple[ImageSpan, ...] = ()  # among prompt_ids, in order
    cache_on_finish: frozenset[FinishReason] = frozenset()  # ends after which another may begin with these tokens
    routes_from: int | None = None  # report the routes of the tokens from this one on, all but the last; None: of none


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A report of an engine about n neighbouring tokens."""

    start: int  # the first of these tokens, counted from the first of the prompt
    shape: tuple[int, ...]  # n first
    content: str  # in base64: text, because checkpoints are JSON
    dtype: ClassVar[torch.dtype]

    @classmethod
    def of(cls, start: int, content: Tensor) -> Self:
        """Take the record of the tokens from `start` on."""
        data = content.to(cls.dtype).contiguous().numpy().tobytes()
        return cls(start, tuple(content.shape), base64.b64encode(data).decode())

    @property
    def end(self) -> int:
        """The first token after these."""
        return self.start + self.shape[0]

    @property
    def tensor(self) -> Tensor:
        """The record as a tensor of its shape."""
        data = bytearray(base64.b64decode(self.content))
        flat = torch.frombuffer(data, dtype=self.dtype) if data else torch.empty(0, dtype=self.dtype)
        return flat.view(self.shape)

    def continued(self, rest: Self | None) -> Self:
        """This record, and that of the tokens that follow."""
        if rest is None:
            return self
        assert rest.start == self.end, f"records of tokens up to {self.end} go on with token {rest.start}"
        return self.of(self.start, torch.cat([self.tensor, rest.tensor]))


class Routes(TokenRecord):
    """The experts that tokens went to, k of them in each of L layers that have experts: [n, L, k] int16."""

    dtype = torch.int16


class Candidates(TokenRecord):
    """The tokens that top-k and top-p left for each sampled token, itself among them: [n, K] int32, -1 for fewer."""

    dtype = torch.int32


class Span(NamedTuple):
    """Neighbouring tokens of a response that the same weights sampled."""

    version: int  # the step after which those weights were sent to the engine
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """The tokens that the engine sampled for one request."""

    token_ids: tuple[int, ...]  # includes the stop token when finish_reason is "stop"
    logprobs: tuple[float, ...]  # nats, at the temperature: among its candidates, else before top-p; greedy: unscaled
    finish_reason: FinishReason
    spans: tuple[Span, ...]  # in order; their lengths add up to the response's
    routes: Routes | None = None  # where the request asked for them
    candidates: Candidates | None = None  # where the request has a top_k
    # Tokens before it that the engine had read for other requests: they depend on those, and are not saved.
    num_cached: int = dataclasses.field(default=0, compare=False)

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
            routes=rest.routes if self.routes is None else self.routes.continued(rest.routes),
            candidates=rest.candidates if self.candidates is None else self.candidates.continued(rest.candidates),
            num_cached=self.num_cached if self.token_ids else rest.num_cached,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Tokens that the policy was given, then its response to them: it sampled the response and nothing else."""

    context_ids: tuple[int, ...]  # since the turn before; of a trajectory's first turn, its prompt
    response: Response
    action: Action | None = None  # the response as the environment read it; None without an environment
    observation: Observation | None = None  # what the environment answered; None where nothing did
    images: tuple[ImageSpan, ...] = ()  # among context_ids, counted from the trajectory's first token
    is_summary: bool = False  # the response is a summary of the conversation, which the environment has not seen
    is_trained: bool = True  # unless the whole rollout is masked
    replaced_tokens: int = 0  # of the conversation before it was rewritten for this turn; 0: it was not


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """One growing list of tokens: the turns, laid end to end. Nothing is ever decoded and encoded again."""

    turns: tuple[Turn, ...]  # at least one

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens, n of them."""
        parts = (part for turn in self.turns for part in (turn.context_ids, turn.response.token_ids))
        return tuple(itertools.chain.from_iterable(parts))

    @property
    def starts(self) -> tuple[int, ...]:
        """The first token of each turn, and the number of all tokens."""
        lengths = (len(turn.context_ids) + len(turn.response.token_ids) for turn in self.turns)
        return tuple(itertools.accumulate(lengths, initial=0))

    @property
    def images(self) -> tuple[ImageSpan, ...]:
        """The images among its tokens, in order."""
        return tuple(image for turn in self.turns for image in turn.images)

    @property
    def trained(self) -> tuple[bool, ...]:
        """True for the tokens that the policy sampled and is trained on, n entries."""
        parts = (
            ((False,) * len(turn.context_ids), (turn.is_trained,) * len(turn.response.token_ids)) for turn in self.turns
        )
        return tuple(itertools.chain.from_iterable(itertools.chain.from_iterable(parts)))

    @property
    def logprobs(self) -> tuple[float, ...]:
        """Log-probabilities in nats, n entries; 0 for tokens that the policy did not sample."""
        parts = (((0.0,) * len(turn.context_ids), turn.response.logprobs) for turn in self.turns)
        return tuple(itertools.chain.from_iterable(itertools.chain.from_iterable(parts)))

    @property
    def routes(self) -> Tensor | None:
        """The routes of its tokens, [n, L, k] int16, -1 where there is no record; None where there is none at all."""
        return self._recorded([turn.response.routes for turn in self.turns])

    @property
    def candidates(self) -> Tensor | None:
        """The candidates of its tokens, [n, K] int32, likewise."""
        return self._recorded([turn.response.candidates for turn in self.turns])

    def _recorded(self, of_turns: Iterable[TokenRecord | None]) -> Tensor | None:
        """Where two requests report a token, that counts with which the tokens after it were sampled first."""
        reported = [record for record in of_turns if record is not None]
        if not reported:
            return None
        found = torch.full((len(self.token_ids), *reported[0].shape[1:]), -1, dtype=reported[0].dtype)
        for record in reversed(reported):
            found[record.start : record.end] = record.tensor
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """One episode: what follows from one prompt. Without an environment that is one response.

    It has one trajectory, and one more for each time that what came before was rewritten, by the chat template or by
    `[environment.context]`.
    """

    prompt: Prompt
    sample_index: int  # 0 to group_size - 1, and group_size of a baseline
    seed: int
    trajectories: tuple[Trajectory, ...]
    end: EpisodeEnd
    initial_observation: Observation | None = None  # the environment's first observation
    failure: str | None = None  # why the environment failed, where `end` says that it did
    is_masked: bool = False  # not trained on: see `environment.masked_ends`
    is_baseline: bool = False  # sampled greedily, for comparison with the others of its group; not trained on

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The turns of all trajectories, in order."""
        return tuple(turn for trajectory in self.trajectories for turn in trajectory.turns)

    @property
    def responses(self) -> tuple[Response, ...]:
        """The response of each turn."""
        return tuple(turn.response for turn in self.turns)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled."""
        return sum(len(response.token_ids) for response in self.responses)

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest weights that sampled any of it; None where nothing was sampled."""
        return min((span.version for response in self.responses for span in response.spans), default=None)

    @property
    def is_truncated(self) -> bool:
        """True when the policy did not come to an end by itself: its tokens were used up."""
        return self.end in ("length", "context")

    @property
    def observations(self) -> tuple[Observation, ...]:
        """All observations of the environment, in order."""
        said = (self.initial_observation, *(turn.observation for turn in self.turns))
        return tuple(observation for observation in said if observation is not None)

    @property
    def environment_reward(self) -> float:
        """The sum of what the environment gave for each turn and to each role."""
        answers = [turn.observation for turn in self.turns if turn.observation is not None]
        return sum(answer.reward + sum(answer.role_rewards.values()) for answer in answers)


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
    normalized: float | None = None  # the sum of its terms, each normalized in its group, where those are compared

    @property
    def compared(self) -> float:
        """The number that training compares in a group: the reward, or its normalized terms."""
        return self.outcome.reward if self.normalized is None else self.normalized


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnSpan:
    """The tokens of a sequence that the policy sampled in one turn, start to end."""

    number: int  # of the turn in its rollout, from 0
    start: int
    end: int  # the first token after them; equal to start where nothing was sampled
    reward: float = 0.0  # what the environment gave for it, as it counts in the rollout's reward
    state: int = 0  # 52-bit hash of what the policy read before it; equal states of a prompt group can be compared
    role: int = 0  # 52-bit hash of the role in which the policy acted; 0 without one
    team: int = 0  # 52-bit hash of what stands before the last slash of its name; 0 where none does
    newest: int = (
        0  # the first token of its newest weights, where older ones began the response; 0 where one version did
    )


class Hint(NamedTuple):
    """The prompt that a sequence's teacher reads in place of the sequence's own; nothing where that is the same."""

    num_replaced: int = 0  # tokens of the sequence's own prompt, its first ones
    token_ids: tuple[int, ...] = ()


NO_HINT = Hint()

Place = tuple[int, int]  # of a sequence: its rollout's in the step's global order, its own among the rollout's


@dataclass(frozen=True, slots=True, kw_only=True)
class Sequence:
    """One trajectory as training sees it, n tokens; every list has n entries, except for the turns."""

    index: int  # place of its rollout in the step's global order
    segment: int = 0  # place among the trajectories of its rollout
    token_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]  # True where the policy chose the token and it is to be trained
    rollout_logprobs: tuple[float, ...]  # nats, 0 outside loss_mask
    reward: float  # of the whole rollout
    baseline_reward: float = math.nan  # of its prompt's greedy response; nan where there is none
    turns: tuple[TurnSpan, ...] = ()  # in order; none in fine-tuning
    prior_turn_rewards: float = 0.0  # the rewards of the turns of the segments before this one
    images: tuple[ImageSpan, ...] = ()  # among its tokens, in order
    teacher: int = NO_TEACHER  # place of its teacher in the settings
    algorithm: int = 0  # place of its data source's algorithm in `Config.algorithms`
    hint: Hint = NO_HINT
    routes: Tensor | None = dataclasses.field(default=None, compare=False)  # [n, L, k] int16, as a trajectory has them
    candidates: Tensor | None = dataclasses.field(default=None, compare=False)  # [n, K] int32, likewise

    @property
    def place(self) -> Place:
        """The place of its rollout, and its own among the rollout's."""
        return self.index, self.segment

    @property
    def observation_spans(self) -> list[tuple[int, int]]:
        """Where the tokens of text are, start to end, that followed one turn and came before the next: what the
        environment returned. None where nothing is trained."""
        if not any(self.loss_mask):
            return []
        between = [(before.end, after.start) for before, after in itertools.pairwise(self.turns)]
        return [span for start, end in between for span in self._around_images(start, end)]

    def _around_images(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of a span that are text."""
        for image in self.images:
            if start <= image.start < end:
                yield start, image.start
                start = image.end
        yield start, end


PADDING_INDEX = -1  # the index of a sequence that only fills up a micro-batch


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The K tokens that a teacher finds most probable after each of N hidden states."""

    token_ids: Tensor  # [N, K] int64
    logprobs: Tensor  # [N, K] float32, nats

    def to(self, device: torch.device) -> TopTokens:
        """Copy both to a device, or wait for them on the host."""
        waits = device.type == "cpu"
        return TopTokens(*(x.to(device, non_blocking=not waits) for x in (self.token_ids, self.logprobs)))


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """The U tokens of a micro-batch that are computed where sequences begin alike: each once, by node, depth first.

    A sequence is a path of nodes from a root. A node's descendants follow it without a gap.
    """

    tokens: Tensor  # [U] int64, their places in the micro-batch; of a token that is shared, one of them
    rows: Tensor  # [T] int64, the place of each token of the micro-batch among the U
    lengths: tuple[int, ...]  # [N] tokens of each node
    parents: tuple[int, ...]  # [N], each before its children; -1 for a root


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """The input of one forward pass on one rank: S sequences laid end to end, T tokens in all.

    With a `tree` a forward pass computes fewer than T. All columns are about the T: who reads them knows of no tree.
    Each phase of a step fills its own columns, in the order below; before that they are None or empty.
    """

    # batch: `step/batch.py`
    token_ids: Tensor  # [T] int64
    positions: Tensor  # [T] int64, restarts at 0 in every sequence
    cu_seqlens: Tensor  # [S+1] int32, token offsets, last entry == T
    loss_mask: Tensor  # [T] bool, True where the policy chose the token and it is to be trained
    # [T] float32, how much a token's loss counts in the global loss; 0 outside loss_mask. Replaced by the corrections
    # where they reject tokens.
    loss_weights: Tensor
    rollout_logprobs: Tensor  # [T] float32, nats
    rewards: Tensor  # [T] float64, its rollout's on every token
    baseline_rewards: Tensor  # [T] float64, of the prompt's greedy response; nan where there is none
    # [T] float32, how much the cross entropy of a token that the environment put in counts in the global loss, 0
    # elsewhere; None where the policy does not learn to predict its environment.
    environment_weights: Tensor | None = None
    # [T] float32, how much a token's divergence from its teacher counts, in the global loss or in its advantage; 0 for
    # a token that is not distilled. None where there is no teacher.
    distill_weights: Tensor | None = None
    after_refit: Tensor | None = None  # [T] bool, sampled by newer weights than their response's beginning; None: none
    sequence_index: tuple[int, ...] = ()  # [S] each rollout's place in the step's global order, or PADDING_INDEX
    sequence_segment: tuple[int, ...] = ()  # [S] place of each sequence among those of its rollout
    turns: tuple[tuple[TurnSpan, ...], ...] = ()  # [S] each sequence's, counted from its own first token
    prior_turn_rewards: tuple[float, ...] = ()  # [S] the rewards of the turns of the segments before
    images: tuple[ImageSpan, ...] = ()  # among its tokens, in order
    sequence_teacher: tuple[int, ...] = ()  # [S] place of each sequence's teacher in the settings, or NO_TEACHER
    sequence_algorithm: tuple[int, ...] = ()  # [S] place of each sequence's algorithm in `Config.algorithms`
    hints: tuple[Hint, ...] = ()  # [S]
    # [T, L, k] int16, on the host: the experts that the policy has to take, -1 where it takes its own; None everywhere.
    # With `router_replay = "R2"`, `step/logprobs.py` fills them in: those that the policy took for old_logprobs.
    routes: Tensor | None = None
    # [T, K] int32, on the host: what a token's distribution is over, or -1; the whole vocabulary where it has none.
    candidates: Tensor | None = None
    tree: PrefixTree | None = None  # where sequences that begin alike are computed once; None: all T tokens are

    # images: `step/images.py`, where there are some
    # The features of each distinct image by a frozen tower, in the order of their first places: [num_tokens, L, D],
    # where the first of L levels takes the place of a placeholder's embedding and the others are added after the first
    # layers. Micro-batches share them, on the host. None where the model itself encodes `pixels`.
    image_features: tuple[Tensor, ...] | None = None
    # The pixels of the images in the same order, as the model's processor left them; in a micro-batch without images
    # those of a blank one, which the model encodes in step with other ranks.
    pixels: tuple[Tensor, ...] | None = None

    # logprobs: `step/logprobs.py`
    old_logprobs: Tensor | None = None  # [T] float32, nats; None where the policy has not moved in this step
    ref_logprobs: Tensor | None = None  # [T] float32, nats; None when no KL term needs them
    teacher_logprobs: Tensor | None = None  # [T] float32, nats, 0 for a token that is not distilled; None likewise
    # Of each teacher: [N, D], its hidden states from which the N tokens that it teaches are predicted, those of this
    # rank's chunk, or what it finds most probable there; on the host. None where it teaches nothing here; () without a
    # divergence over the vocabulary.
    teacher_outputs: tuple[Tensor | TopTokens | None, ...] = ()
    values: Tensor | None = None  # [T] float32, the critic's before it moves in this step, in units of the reward

    # advantages: `step/advantages.py`
    advantages: Tensor | None = None  # [T] float32, 0 outside loss_mask
    returns: Tensor | None = None  # [T] float32, what the critic learns; None without one

    # corrections: `step/correction.py` and `learn/correction.py`
    cov_selected: Tensor | None = None  # [T] bool, the tokens that clip_cov and kl_cov treat apart; None for others
    # [T] float64, makes the mean of the mismatch weights over the mini-batch 1; None where none is asked for.
    mismatch_scale: Tensor | None = None

    def __post_init__(self) -> None:
        tokens = self.token_ids.shape
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and field.name != "cu_seqlens" and value.shape[:1] != tokens:
                raise ValueError(f"{field.name} is {list(value.shape)} but token_ids is {list(tokens)}")

    @property
    def places(self) -> list[Place]:
        """Places of its sequences, [S]; the index of padding is PADDING_INDEX."""
        return list(zip(self.sequence_index, self.sequence_segment, strict=True))

    @property
    def predicted(self) -> Tensor:
        """[T] bool: the tokens whose log-probabilities are computed."""
        return self.loss_mask if self.environment_weights is None else self.loss_mask | (self.environment_weights != 0)

    def taught_by(self, place: int) -> Tensor:
        """[T] bool: the distilled tokens of the sequences that this teacher teaches."""
        assert self.distill_weights is not None, "no token of this micro-batch is distilled"
        is_its = torch.tensor([teacher == place for teacher in self.sequence_teacher])
        return is_its.repeat_interleave(torch.tensor(self.seqlens)) & (self.distill_weights.cpu() != 0)

    def owned_by(self, algorithm: int) -> MicroBatch:
        """Return the micro-batch as the algorithm at this place sees it: tokens of other sequences are not trained."""
        if all(one == algorithm for one in self.sequence_algorithm):
            return self
        of_each = torch.tensor([one == algorithm for one in self.sequence_algorithm], device=self.loss_mask.device)
        is_own = of_each.repeat_interleave(self.cu_seqlens.diff(), output_size=len(self.token_ids))
        weights = {
            name: torch.where(is_own, column, 0.0)
            for name in ("loss_weights", "environment_weights", "distill_weights")
            if isinstance(column := getattr(self, name), Tensor)
        }
        return self.with_columns({"loss_mask": self.loss_mask & is_own, **weights})

    @property
    def num_computed(self) -> int:
        """Tokens of a forward pass, on all ranks that share it."""
        return len(self.token_ids if self.tree is None else self.tree.tokens)

    @property
    def seqlens(self) -> list[int]:
        """Tokens in each sequence, [S]."""
        return self.cu_seqlens.diff().tolist()

    @property
    def distinct_images(self) -> dict[str, ImageSpan]:
        """The first place of each image, by digest, in order."""
        found: dict[str, ImageSpan] = {}
        for image in self.images:
            found.setdefault(image.digest, image)
        return found

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
        stay = ("routes", "candidates")
        columns = {name: x.to(device, non_blocking=True) for name, x in self.columns.items() if name not in stay}
        return self.with_columns(columns)


MiniBatch = list[MicroBatch]  # one rank's share of the rollouts behind one optimizer step
