"""A prompt group while it is being sampled and rewarded, and its form in a checkpoint."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from spmdrl.algo.seeds import rollout_seed
from spmdrl.rewards.client import Pending
from spmdrl.types import Prompt, Response, RewardOutcome, Rollout, Span

NOT_BEGUN = Response(token_ids=(), logprobs=(), finish_reason="abort", spans=())


@dataclass(slots=True, eq=False)
class PromptGroup:
    """The rollouts of one prompt, followed by its greedy response where rewards are compared with one.

    It may take several steps, and keeps the seeds it was opened with.
    """

    prompt: Prompt
    group_size: int  # rollouts to be trained on
    opened_in: int  # step
    seeds: tuple[int, ...]  # by sample_index
    responses: list[Response]  # by sample_index; finish reason "abort" means unfinished
    pending: dict[int, Pending] = field(
        default_factory=dict
    )  # the finished ones by sample_index, with their rewards to come

    @classmethod
    def opened(
        cls, prompt: Prompt, *, step: int, run_seed: int, group_size: int, with_baseline: bool = False
    ) -> PromptGroup:
        """Open a group of which nothing has been sampled."""
        count = group_size + with_baseline
        seeds = tuple(rollout_seed(run_seed, step, prompt.prompt_id, index) for index in range(count))
        return cls(prompt, group_size, step, seeds, [NOT_BEGUN] * count)

    def copy(self) -> PromptGroup:
        """Copy the group, so that the copy can go on without changing this one."""
        return dataclasses.replace(self, responses=list(self.responses), pending=dict(self.pending))

    def is_baseline(self, sample_index: int) -> bool:
        """Return True for the greedy response."""
        return sample_index >= self.group_size

    @property
    def trained(self) -> list[Response]:
        """The responses to be trained on, by sample_index."""
        return self.responses[: self.group_size]

    @property
    def unfinished(self) -> list[int]:
        """The sample indices without a finished response."""
        return [index for index in range(len(self.responses)) if index not in self.pending]

    @property
    def is_sampled(self) -> bool:
        """True when every response is finished."""
        return len(self.pending) == len(self.responses)

    @property
    def is_rewarded(self) -> bool:
        """True when every reward is known."""
        return self.is_sampled and all(future.done() for _, future in self.pending.values())

    @property
    def rewards(self) -> list[float]:
        """The rewards, when all are known, without that of the greedy response."""
        return [self._reward(index) for index in range(self.group_size)]

    @property
    def has_equal_rewards(self) -> bool:
        """True when the group teaches nothing: its rewards, with that of the greedy response, are all equal."""
        return len({self._reward(index) for index in range(len(self.responses))}) == 1

    @property
    def num_failed(self) -> int:
        """The number of rewards that could not be computed, when all are known."""
        return sum(future.result().failure is not None for _, future in self.pending.values())

    @property
    def num_tokens(self) -> int:
        """The response tokens sampled so far."""
        return sum(len(response.token_ids) for response in self.responses)

    @property
    def oldest_version(self) -> int | None:
        """The version of the oldest weights that sampled any of it; None when nothing is sampled."""
        return min((response.oldest_version for response in self.responses if response.spans), default=None)

    def add(self, sample_index: int, part: Response) -> Rollout | None:
        """Append what an engine sampled; return the rollout if that finished it."""
        response = self.responses[sample_index] = self.responses[sample_index].continued(part)
        return None if response.finish_reason == "abort" else self._rollout(sample_index)

    def pending_rollouts(self) -> list[Pending]:
        """List the rollouts of a finished group with their rewards to come, in order; the greedy one is the last."""
        return [self.pending[index] for index in range(len(self.responses))]

    def as_json(self) -> dict[str, Any]:
        """Convert the group to JSON's types; waits for the rewards that are being computed."""
        return {
            "prompt_id": self.prompt.prompt_id,
            "prompt_ids": list(self.prompt.token_ids),
            "opened_in": self.opened_in,
            "seeds": list(self.seeds),
            "responses": [
                {
                    "token_ids": list(response.token_ids),
                    "logprobs": list(response.logprobs),
                    "finish_reason": response.finish_reason,
                    "spans": [[span.version, span.num_tokens] for span in response.spans],
                }
                for response in self.responses
            ],
            "outcomes": {
                str(index): dataclasses.asdict(future.result()) for index, (_, future) in sorted(self.pending.items())
            },
        }

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], prompt: Prompt, *, group_size: int) -> PromptGroup:
        """Restore a saved group; the prompt itself comes from the stream again."""
        responses = [
            Response(
                token_ids=tuple(response["token_ids"]),
                logprobs=tuple(response["logprobs"]),
                finish_reason=response["finish_reason"],
                spans=tuple(Span(*span) for span in response["spans"]),
            )
            for response in saved["responses"]
        ]
        group = cls(prompt, group_size, saved["opened_in"], tuple(saved["seeds"]), responses)
        for index, outcome in saved["outcomes"].items():
            future: Future[RewardOutcome] = Future()
            future.set_result(RewardOutcome(**outcome))
            group.pending[int(index)] = (group._rollout(int(index)), future)
        return group

    def _rollout(self, index: int) -> Rollout:
        return Rollout(
            prompt=self.prompt,
            sample_index=index,
            seed=self.seeds[index],
            response=self.responses[index],
            is_baseline=self.is_baseline(index),
        )

    def _reward(self, index: int) -> float:
        return self.pending[index][1].result().reward
