"""Rollouts in, rewards out: decodes responses and lets the scorer's processes work while others still generate."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from types import TracebackType

from transformers import PreTrainedTokenizerBase

from spmdrl.config import RewardConfig
from spmdrl.data.tokenizer import decode
from spmdrl.rewards.item import RewardItem
from spmdrl.rewards.scorer import Scorer
from spmdrl.types import Prompt, RewardOutcome, Rollout

Pending = tuple[Rollout, "Future[RewardOutcome]"]
Rewarded = tuple[Rollout, RewardOutcome]


class RewardClient:
    """This rank's reward processes. Use it in a `with` statement: they end with it."""

    def __init__(self, cfg: RewardConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self.cfg = cfg
        self._scorer = Scorer(cfg)
        self._tokenizer = tokenizer

    @property
    def unprotected(self) -> list[str]:
        """What the sandbox of the reward processes does not stop on this machine, in words."""
        return self._scorer.unprotected

    def submit(self, rollout: Rollout) -> Pending:
        """Start scoring a finished rollout."""
        return rollout, self._scorer.submit(_item(rollout.prompt, decode(self._tokenizer, rollout.response.token_ids)))

    def collect(self, pending: Iterable[Pending]) -> list[Rewarded]:
        """Wait for the rewards; one that cannot be computed is 0 and says why."""
        return [(rollout, future.result()) for rollout, future in pending]

    def check(self, prompt: Prompt) -> RewardOutcome:
        """The reward of the reference answer itself. Raises UserError when it cannot be computed."""
        return self._scorer.check(_item(prompt, prompt.answer or ""))

    def __enter__(self) -> RewardClient:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._scorer.close()


def already_rewarded(rollout: Rollout, outcome: RewardOutcome) -> Pending:
    """Wrap a rollout whose reward is known already."""
    future: Future[RewardOutcome] = Future()
    future.set_result(outcome)
    return rollout, future


def _item(prompt: Prompt, response: str) -> RewardItem:
    return RewardItem(
        prompt=prompt.text, response=response, answer=prompt.answer, metadata=prompt.metadata, task=prompt.task
    )
