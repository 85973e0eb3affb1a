"""Rollouts in, rewards out: decode responses, and compute rewards in other processes while sampling continues."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future, wait
from types import TracebackType

from transformers import PreTrainedTokenizerBase

from spmdrl.config import RewardConfig
from spmdrl.data.tokenizer import decode
from spmdrl.rewards.item import RewardItem
from spmdrl.rewards.pool import RewardPool
from spmdrl.types import Prompt, RewardOutcome, Rollout

Pending = tuple[Rollout, "Future[RewardOutcome]"]
Rewarded = tuple[Rollout, RewardOutcome]


class RewardClient:
    """This rank's reward processes. Use it in a `with` statement, which ends them."""

    def __init__(self, cfg: RewardConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.cfg = cfg
        self._pool = RewardPool(cfg)
        self._tokenizer = tokenizer

    @property
    def unprotected(self) -> list[str]:
        """Sentences about what the sandbox of the reward processes cannot stop on this machine."""
        return self._pool.unprotected

    def submit(self, rollout: Rollout) -> Pending:
        """Start to compute the reward of a finished rollout."""
        if rollout.failure is not None:
            return known_reward(rollout, RewardOutcome(reward=0.0, parts={}, failure=rollout.failure))
        response = decode(self._tokenizer, rollout.turns[-1].response.token_ids)
        return rollout, self._pool.submit(_item(rollout.prompt, response, rollout))

    def collect(self, pending: Iterable[Pending]) -> list[Rewarded]:
        """Wait for the rewards. One that cannot be computed is 0, with the reason in `failure`."""
        pending = list(pending)
        wait([future for _, future in pending])  # all at once: each wait of its own would wake this thread
        return [(rollout, future.result()) for rollout, future in pending]

    def check(self, prompt: Prompt) -> RewardOutcome:
        """Compute the reward of the reference answer itself. Raises UserError if that fails."""
        return self._pool.check(_item(prompt, prompt.answer or ""))

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.close()


def known_reward(rollout: Rollout, outcome: RewardOutcome) -> Pending:
    """Wrap a rollout whose reward has been computed elsewhere."""
    future: Future[RewardOutcome] = Future()
    future.set_result(outcome)
    return rollout, future


def _item(prompt: Prompt, response: str, rollout: Rollout | None = None) -> RewardItem:
    return RewardItem(
        prompt=prompt.text,
        response=response,
        answer=prompt.answer,
        metadata=prompt.metadata,
        task=prompt.task,
        turns=() if rollout is None else tuple((turn.action, turn.observation) for turn in rollout.turns),
        environment_reward=0.0 if rollout is None else rollout.environment_reward,
    )
