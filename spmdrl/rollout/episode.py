"""An episode while it is being sampled: responses of the policy, and what its environment answers to them.

    NEW -- begin --> RESETTING -- take_answer --> SAMPLING -- request, add --> STEPPING -- take_answer --> SAMPLING ...
                                                                                                    --> FINISHED

Without an environment an episode is one response: NEW, SAMPLING, FINISHED. `begin` also resumes an episode of an
earlier step or of a checkpoint, in the state that it has. Tokens are only ever appended: what the policy has read and
written is never decoded and encoded again, unless the conversation is rendered as a whole, which begins another
trajectory where that changes it. With `[environment.context]` the policy may be SAMPLING a summary, of which the
environment learns nothing.
"""

from __future__ import annotations

import dataclasses
import enum
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

from spmdrl.algo.seeds import turn_seed
from spmdrl.config.environment import ContextConfig, SummaryContext
from spmdrl.conversation import Action, Message, Observation, joined
from spmdrl.data.image_store import StoreFull
from spmdrl.data.turns import TurnEncoder
from spmdrl.data.vision import expanded
from spmdrl.envs.protocol import Answer, EnvironmentFailure, OpenEpisode
from spmdrl.faults.text import one_line
from spmdrl.rollout.context import asked, conversation, is_due, num_to_leave_out, without_thinking
from spmdrl.rollout.env_context import EnvContext, restore_shown, spans_of
from spmdrl.rollout.sampling import Sampling
from spmdrl.types import (
    EpisodeEnd,
    FinishReason,
    ImageSpan,
    Prompt,
    Request,
    Response,
    Rollout,
    Trajectory,
    Turn,
    UserError,
)

EncodedContext = tuple[tuple[int, ...], tuple[ImageSpan, ...]]  # tokens before a response, and the images among them

EMPTY_RESPONSE = Response(token_ids=(), logprobs=(), finish_reason="abort", spans=())


class EpisodeState(enum.Enum):
    """The state of an episode: who acts next."""

    NEW = enum.auto()  # its environment has not been reset
    RESETTING = enum.auto()  # the environment: it has been asked for its first observation
    SAMPLING = enum.auto()  # an engine: `request` has the next response, or the rest of it
    STEPPING = enum.auto()  # the environment: it has the policy's action, or gets it again from `begin`
    FINISHED = enum.auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedEpisode:
    """An episode in a checkpoint, as far as it is sampled."""

    trajectories: tuple[tuple[Turn, ...], ...]
    context_ids: tuple[int, ...] | None
    context_images: tuple[ImageSpan, ...]
    response: Response
    initial_observation: Observation | None
    end: EpisodeEnd
    failure: str | None
    num_left_out: int = 0
    replaced_tokens: int = 0
    is_summarizing: bool = False
    spent_s: float = 0.0

    @property
    def sampled(self) -> list[Response]:
        """The responses that have tokens; the last one may be unfinished."""
        responses = [*(turn.response for turns in self.trajectories for turn in turns), self.response]
        return [response for response in responses if response.token_ids]


@dataclass(slots=True, eq=False, kw_only=True)
class Episode:
    """One rollout of a prompt while it is being sampled."""

    prompt: Prompt
    sample_index: int
    seed: int
    sampling: Sampling
    env_context: EnvContext | None = None  # None: the episode is one response
    is_baseline: bool = False

    state: EpisodeState = EpisodeState.NEW
    trajectories: tuple[tuple[Turn, ...], ...] = ((),)  # the last one grows
    context_ids: tuple[int, ...] | None = None  # new since the turn before; None: the environment is asked
    context_images: tuple[ImageSpan, ...] = ()  # among context_ids, counted from the trajectory's first token
    response: Response = EMPTY_RESPONSE  # the one that is being sampled, as far as it is there
    initial_observation: Observation | None = None
    end: EpisodeEnd = "abort"
    failure: str | None = None
    num_left_out: int = 0  # turns, the first ones without summaries, that do not stand whole any more
    replaced_tokens: int = 0  # of the conversation before it was rewritten for the turn, or summary, that is sampled
    is_summarizing: bool = False  # `response` is a summary
    spent_s: float = 0.0  # in its environment's steps and in the engine, as far as counted; 0 without an environment
    env_future: Future[Answer] | None = None  # the environment's answer to the reset or to `response`
    _action: Action | None = None  # `response` as the environment reads it
    _environment: OpenEpisode | None = None
    _counted_s: float = 0.0  # the moment up to which `spent_s` counts, by the monotonic clock
    _answered_s: list[float] = field(default_factory=list)  # that of the environment's answer, once it is there

    @property
    def turns(self) -> tuple[Turn, ...]:
        """The finished turns of all trajectories."""
        return tuple(turn for trajectory in self.trajectories for turn in trajectory)

    @property
    def is_finished(self) -> bool:
        return self.state is EpisodeState.FINISHED

    @property
    def is_waiting(self) -> bool:
        """True while its environment computes an answer."""
        return self.env_future is not None

    @property
    def responses(self) -> list[Response]:
        """The responses so far; the last one may be unfinished."""
        unfinished = [self.response] if self.response.token_ids else []
        return [*(turn.response for turn in self.turns), *unfinished]

    def begin(self) -> None:
        """Begin the episode, or resume one that was interrupted."""
        now = time.monotonic()
        if self.env_future is not None:  # of a pause counts what its environment has worked on
            self.spent_s += max(0.0, min([*self._answered_s, now]) - self._counted_s)
        self._counted_s = now
        if self.env_context is None:
            self.context_ids, self.context_images = self.prompt.token_ids, self.prompt.images
            self.state = EpisodeState.SAMPLING
            return
        if self._environment is None:
            self._environment = self.env_context.open(self.prompt, self.turns, self.initial_observation)
        if self.state is EpisodeState.NEW:
            self._await(self._environment.reset())
            self.state = EpisodeState.RESETTING
        elif self.state is EpisodeState.STEPPING and self.env_future is None:
            self._act()

    def saved(self) -> SavedEpisode:
        """Return what a checkpoint needs to resume the episode."""
        return SavedEpisode(**{name: getattr(self, name) for name in _SAVED})

    def restore(self, saved: SavedEpisode) -> None:
        """Take the state of a checkpoint, in new environments."""
        for name in _SAVED:
            setattr(self, name, getattr(saved, name))
        # The state follows from what is saved: files of checkpoints have no name for it.
        if self.end != "abort":
            self.state = EpisodeState.FINISHED
        elif self.initial_observation is not None:
            is_sampled = self.response.finish_reason != "abort"
            self.state = EpisodeState.STEPPING if is_sampled else EpisodeState.SAMPLING

    def restore_images(self) -> None:
        """Put the images that the environment has shown into the node's store again, unless they are there."""
        if self.env_context is not None:
            shown = (self._images + self.context_images)[len(self.prompt.images) :]
            restore_shown(shown, self._observations, self.env_context.images)

    def request(self) -> Request:
        """Request the response that comes next, or the rest of it."""
        assert self.state is EpisodeState.SAMPLING and self.context_ids is not None
        return Request(
            prompt_ids=self._token_ids + self.context_ids,
            seed=turn_seed(self.seed, len(self.turns)),
            max_response_tokens=self._response_limit(self.context_ids),
            response_ids=self.response.token_ids,
            temperature=self.sampling.temperature,
            top_p=self.sampling.top_p,
            top_k=self.sampling.top_k,
            stop_token_ids=self.sampling.stop_token_ids,
            images=self._images + self.context_images,
            cache_on_finish=self._ends_before_another,
            routes_from=self._first_unrouted if self.sampling.reports_routes else None,
        )

    def add(self, sampled: Response) -> None:
        """Append what an engine sampled. A whole response finishes the episode, or its environment takes a step."""
        self._count_time()
        self.response = self.response.continued(sampled)
        reason = self.response.finish_reason
        if reason == "abort":
            return
        if self.is_summarizing:
            self._unless_refused(self._take_summary)
        elif self.env_context is None or (reason == "length" and not self._is_long_enough):
            self._finish_turn(None, None)
            self._finish("context" if self._fills_context(reason) else reason)
        else:
            self._act()

    def take_answer(self) -> None:
        """Take the environment's answer, which is there."""
        assert self.env_future is not None
        answer, self.env_future = self.env_future.result(), None
        if isinstance(answer, EnvironmentFailure):
            self._fail(answer.reason, "step_timeout" if answer.kind == "timeout" else "environment_error")
            return
        take = self._on_reset if self.state is EpisodeState.RESETTING else self._on_step
        self._unless_refused(lambda: take(answer))

    def _unless_refused(self, go_on: Callable[[], None]) -> None:
        """Continue, or fail where the messages cannot be rendered."""
        try:
            go_on()
        except StoreFull:  # for which the environment can do nothing
            raise
        except UserError as error:  # the template refuses these messages, or an image is none
            self._fail(str(error))

    def rollout(self) -> Rollout:
        """Return the finished episode."""
        assert self.is_finished
        trajectories = tuple(Trajectory(turns=turns) for turns in self.trajectories if turns)
        if not trajectories:  # it ended before its first response
            only = Turn(context_ids=self.prompt.token_ids, response=_NO_RESPONSE, images=self.prompt.images)
            trajectories = (Trajectory(turns=(only,)),)
        return Rollout(
            prompt=self.prompt,
            sample_index=self.sample_index,
            seed=self.seed,
            trajectories=trajectories,
            end=self.end,
            initial_observation=self.initial_observation,
            failure=self.failure,
            is_masked=self.env_context is not None and self.end in self.env_context.cfg.masked_ends,
            is_baseline=self.is_baseline,
        )

    def copy(self) -> Episode:
        """Copy the episode, so that the copy can be sampled without changing this one."""
        return dataclasses.replace(self)

    def close(self) -> None:
        """Give up the episode's environment."""
        if self._environment is not None:
            self._environment.close()
            self._environment = None

    @property
    def _token_ids(self) -> tuple[int, ...]:
        """The tokens of the trajectory that grows."""
        return Trajectory(turns=self.trajectories[-1]).token_ids

    @property
    def _images(self) -> tuple[ImageSpan, ...]:
        """The images of the trajectory that grows."""
        return Trajectory(turns=self.trajectories[-1]).images

    @property
    def _first_unrouted(self) -> int:
        """The first token of the trajectory that grows whose routes no engine has reported."""
        responses = [*(turn.response for turn in self.trajectories[-1]), self.response]
        return max((response.routes.end for response in responses if response.routes is not None), default=0)

    def _act(self) -> None:
        assert self._environment is not None
        self._action = self._read_response()
        self._await(self._environment.step(self._action))
        self.state = EpisodeState.STEPPING

    def _await(self, answer: Future[Answer]) -> None:
        answered_s: list[float] = []  # which copies of the episode share
        answer.add_done_callback(lambda _: answered_s.append(time.monotonic()))
        self.env_future, self._answered_s = answer, answered_s

    def _read_response(self) -> Action:
        """Read the response as its environment does."""
        assert self.env_context is not None and self.context_ids is not None
        return dataclasses.replace(
            self.env_context.action_of(self.response.token_ids),
            is_cut=self.response.finish_reason == "length",
            num_context_tokens=len(self._token_ids) + len(self.context_ids),
            num_tokens=len(self.response.token_ids),
        )

    def _on_reset(self, observation: Observation) -> None:
        reason, self.initial_observation = self._wrong_roles(observation), observation
        if reason is not None:
            self._fail(reason)
        elif observation.done:
            self._fail("the environment was over after its reset")
        elif observation.branch is not None:
            self._branch(observation.branch, observation)
        elif observation.messages:
            self._begin_turn(*self._prompt_with(observation))
        else:
            self._begin_turn(self.prompt.token_ids, self.prompt.images)

    def _prompt_with(self, observation: Observation) -> EncodedContext:
        """Return the prompt's tokens with what the environment says first."""
        assert self.env_context is not None
        if not self.prompt.messages:  # a raw prompt, which no template has rendered
            return self.prompt.token_ids + self.env_context.encoder.appended(observation.messages, after=()), ()
        return self._render(self._opening())

    def _wrong_roles(self, observation: Observation) -> str | None:
        """Return what is wrong about the roles that a new observation names."""
        assert self.env_context is not None
        if strange := sorted(observation.role_rewards.keys() - {one.role for one in self._observations}):
            return f"role_rewards has the role {strange[0]!r}, in which the policy has not acted"
        if self.env_context.needs_roles and observation.role is None and not observation.done:
            return "an observation has no role, and advantage.estimator compares each role with its own; name it"
        return None

    def _on_step(self, observation: Observation) -> None:
        if (reason := self._wrong_roles(observation)) is not None:
            self._fail(reason)
            return
        self._finish_turn(self._action, observation)
        if (end := self._end_after(observation)) is not None:
            self._finish(end)
        else:
            self._append_observation(observation)

    def _end_after(self, observation: Observation) -> EpisodeEnd | None:
        assert self.env_context is not None
        if observation.done:
            return "done"
        if self._num_acted >= self.env_context.cfg.max_turns:
            return "max_turns"
        self._count_time()
        if self.spent_s > self.env_context.cfg.episode_timeout_s:
            return "episode_timeout"
        return None

    def _count_time(self) -> None:
        if self.env_context is not None:
            now = time.monotonic()
            self.spent_s, self._counted_s = self.spent_s + now - self._counted_s, now

    def _append_observation(self, observation: Observation) -> None:
        """Begin a turn with what the policy reads of an observation."""
        assert self.env_context is not None
        if observation.branch is not None:
            self._branch(observation.branch, observation)
            return
        if self.env_context.cfg.history == "append" or not self.prompt.messages:
            self._begin_turn(*self._encode_observation(observation))
            return
        rendered, images = self._conversation()
        num_tokens, context = len(rendered) - len(self.prompt.token_ids), self._context
        if context is not None and is_due(context, self.turns, self.num_left_out, num_tokens):
            self._shorten(len(rendered))
        else:
            self._read(rendered, images)

    def _read(self, rendered: tuple[int, ...], images: tuple[ImageSpan, ...]) -> None:
        """Begin a turn with a rendered conversation, in another trajectory where it has been rewritten."""
        so_far = self._token_ids
        if rendered[: len(so_far)] == so_far:
            self._begin_turn(rendered[len(so_far) :], images[len(self._images) :])
        else:
            self.trajectories = (*self.trajectories, ())
            self._begin_turn(rendered, images)

    @property
    def _context(self) -> ContextConfig | None:
        return self.env_context.cfg.context if self.env_context is not None else None

    def _shorten(self, num_tokens: int) -> None:
        """Leave turns out of a conversation of this length, or ask for a summary first."""
        self.replaced_tokens = num_tokens
        if isinstance(self._context, SummaryContext):
            self.is_summarizing = True
            self._read(*self._conversation(self._context.request))
        else:
            self._leave_out()

    def _take_summary(self) -> None:
        """Continue from the summary that has been sampled."""
        assert self.env_context is not None
        response = self.response
        text = without_thinking(self.env_context.action_of(response.token_ids).text)
        self._finish_turn(Action(text=text), None)
        if response.finish_reason == "length":
            self._fail_summary(f"a summary was cut off after {len(response.token_ids)} tokens")
        else:
            self._leave_out()

    def _leave_out(self) -> None:
        """Begin a trajectory without the turns that are left out."""
        assert self._context is not None
        self.num_left_out = num_to_leave_out(self.turns, self._context)
        rendered, images = self._conversation()
        if isinstance(self._context, SummaryContext) and len(rendered) >= self.replaced_tokens:
            self._fail_summary(
                f"a summary makes {len(rendered)} tokens of a conversation of {self.replaced_tokens}, which is no less"
            )
            return
        self.trajectories = (*self.trajectories, ())
        self._begin_turn(rendered, images)

    def _fail_summary(self, reason: str) -> None:
        self.failure = reason
        self._finish("summary")

    def _branch(self, branch: tuple[int, int], observation: Observation) -> None:
        """Begin a trajectory with the first turns of another, as they are, or with none."""
        index, num_turns = branch
        turns = self.trajectories[index][:num_turns]
        encoder = self._encoder(observation)
        if turns:
            new_ids = encoder.appended(observation.messages, after=turns[-1].response.token_ids)
        else:
            new_ids = encoder.rendered(observation.messages)
        if self.trajectories[-1]:
            self.trajectories = (*self.trajectories, ())
        self._begin_turn(Trajectory(turns=turns).token_ids + new_ids)

    def _encoder(self, observation: Observation) -> TurnEncoder:
        assert self.env_context is not None
        encoder = self.env_context.encoder
        return encoder if observation.tools is None else encoder.with_tools(observation.tools)

    def _begin_turn(self, context_ids: tuple[int, ...], images: tuple[ImageSpan, ...] = ()) -> None:
        if not self.turns and self._room(context_ids) < 1:
            read, room = len(context_ids) - len(self.prompt.token_ids), self.sampling.max_response_tokens
            self._fail(
                f"what the policy reads first is {read} tokens longer than its prompt, and an episode has {room} "
                "(rollout.max_response_tokens): nothing was sampled"
            )
            return
        self.context_ids, self.context_images, self.state = context_ids, images, EpisodeState.SAMPLING
        if self._response_limit(context_ids) < 1:
            self._finish("context")

    def _conversation(self, request: str | None = None) -> EncodedContext:
        """Render the conversation so far, with a request of a summary if there is one."""
        assert self.env_context is not None
        messages = conversation(self._opening(), self.turns, self.num_left_out, self._context)
        if request is not None:
            messages = asked(messages, request)
        return self._render(messages)

    def _opening(self) -> list[Message]:
        """The messages before the first response; a user's from the environment continues the prompt's last message, as
        many templates refuse two messages of one role in a row."""
        own, read = [*self.prompt.messages], [*(self.initial_observation.messages if self.initial_observation else ())]
        if own and read and own[-1]["role"] == read[0]["role"]:
            last, first = own.pop(), read.pop(0)
            return [*own, last | {"content": joined(last["content"], first["content"])}, *read]
        return [*own, *read]

    @property
    def _observations(self) -> tuple[Observation, ...]:
        """All observations of the environment, in order."""
        answers = (self.initial_observation, *(turn.observation for turn in self.turns))
        return tuple(observation for observation in answers if observation is not None)

    def _encode_observation(self, observation: Observation) -> EncodedContext:
        """Return what the policy reads of an observation after its last response."""
        assert self.env_context is not None
        encoder, images = self._encoder(observation), self.env_context.images
        token_ids = encoder.appended(observation.messages, after=self.turns[-1].response.token_ids)
        return expanded(token_ids, spans_of(observation, images), images, start=len(self._token_ids))

    def _render(self, messages: Sequence[Message]) -> EncodedContext:
        """Return the tokens of the conversation, with the images of the prompt and of all observations."""
        assert self.env_context is not None
        images = self.env_context.images
        shown = [image for one in self._observations for image in spans_of(one, images)]
        return expanded(self.env_context.encoder.rendered(messages), [*self.prompt.images, *shown], images)

    def _room(self, context_ids: tuple[int, ...]) -> int:
        """Tokens that fit into the trajectory after these: everything after the prompt counts."""
        after_prompt = len(self._token_ids) + len(context_ids) - len(self.prompt.token_ids)
        return self.sampling.max_response_tokens - after_prompt

    def _response_limit(self, context_ids: tuple[int, ...]) -> int:
        limits = [self._room(context_ids), self._asked_tokens]
        if self.is_summarizing and isinstance(self._context, SummaryContext):
            limits.append(self._context.max_summary_tokens)
        elif self.env_context is not None:
            limits.append(self.env_context.cfg.max_turn_tokens)
        return min(limit for limit in limits if limit is not None)

    @property
    def _asked_tokens(self) -> int | None:
        """The limit of the next response that an agent has asked for."""
        last = self.turns[-1].observation if self.turns else self.initial_observation
        return last.max_tokens if last is not None else None

    @property
    def _num_acted(self) -> int:
        """The finished turns that are no summaries."""
        return sum(not turn.is_summary for turn in self.turns)

    @property
    def _ends_before_another(self) -> frozenset[FinishReason]:
        """The ends of the next response after which there may be another."""
        if self.env_context is None or self.is_summarizing or self._num_acted + 1 >= self.env_context.cfg.max_turns:
            return frozenset()
        return frozenset({"stop"} if self._asked_tokens is None else {"stop", "length"})

    @property
    def _is_long_enough(self) -> bool:
        """True when the response was cut where an agent wanted it: that does not end the episode."""
        return self._asked_tokens is not None and len(self.response.token_ids) >= self._asked_tokens

    def _fills_context(self, reason: str) -> bool:
        """Return True when a response was cut short because the trajectory is full, and not by its own limit."""
        return reason == "length" and self.env_context is not None and self._room(()) < 1

    def _finish_turn(self, action: Action | None, observation: Observation | None) -> None:
        assert self.context_ids is not None
        is_summary, context = self.is_summarizing, self._context
        turn = Turn(
            context_ids=self.context_ids,
            response=self.response,
            action=action,
            observation=observation,
            images=self.context_images,
            is_summary=is_summary,
            is_trained=not is_summary or (isinstance(context, SummaryContext) and context.train_summaries),
            replaced_tokens=0 if is_summary else self.replaced_tokens,
        )
        self.is_summarizing, self.replaced_tokens = False, self.replaced_tokens if is_summary else 0
        self.trajectories = (*self.trajectories[:-1], (*self.trajectories[-1], turn))
        self.context_ids, self.context_images, self.response, self._action = None, (), EMPTY_RESPONSE, None

    def _fail(self, reason: str, end: EpisodeEnd = "environment_error") -> None:
        if self.context_ids is not None:  # the policy has acted
            self._finish_turn(self._action, None)
        self.failure = one_line(reason)
        self._finish(end)

    def _finish(self, end: EpisodeEnd) -> None:
        self.end, self.state = end, EpisodeState.FINISHED
        self.close()


_SAVED = [one.name for one in dataclasses.fields(SavedEpisode)]  # an episode has them too
_NO_RESPONSE = dataclasses.replace(EMPTY_RESPONSE, finish_reason="length")
