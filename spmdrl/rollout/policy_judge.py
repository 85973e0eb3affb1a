"""The policy as the judge of its own responses: more requests to the engine, while it is awake.

    question -> chat template -> request -> response -> text, which `rewards/judge.py` reads

What it says is a number in a reward and nothing else: no token of it is trained on. Answers are cached by the content
of their requests, by the version of the weights and by the run's settings, so that a resumed run has the same rewards,
and one that is resumed with other settings, whose versions have other weights, asks again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.algo.seeds import mix
from spmdrl.config import Config, JudgeReward
from spmdrl.config.rewards import POLICY
from spmdrl.data.tokenizer import encode_prompt
from spmdrl.engine.protocol import RolloutEngine
from spmdrl.rewards.judge import Cache
from spmdrl.types import Request, UserError


class PolicyJudge:
    """Asks an engine that this rank leads."""

    def __init__(
        self,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        stop_token_ids: frozenset[int],
        cfg: Config,
        said: Cache | None,
        read: Callable[[tuple[int, ...]], str],
    ) -> None:
        """`said` has the answers of before; None: they are not cached. `read` decodes the tokens of an answer."""
        self._engine, self._tokenizer, self._stops, self._cfg = engine, tokenizer, stop_token_ids, cfg
        self._said, self._read = said or Cache(None), read
        self._settings = self._said.key({"settings": repr(cfg)})

    def __call__(self, term: JudgeReward, questions: Sequence[str]) -> list[str | ValueError]:
        """Answer questions; an error, with a sentence, for one that cannot be asked. Equal ones are asked once."""
        keys: list[str | ValueError] = []
        asked: dict[str, Request] = {}
        for question in questions:
            try:
                key, request = self._request(term, question)
                keys.append(key)
                if self._said.find(key) is None:
                    asked.setdefault(key, request)
            except ValueError as error:
                keys.append(error)
        if asked:
            names = list(asked)
            for place, response in self._engine.generate(asked.values()):
                self._said.add(names[place], self._read(response.token_ids))
        return [key if isinstance(key, ValueError) else self._answer(key) for key in keys]

    def _answer(self, key: str) -> str | ValueError:
        answer = self._said.find(key)
        return ValueError("the engine has given no answer") if answer is None else answer

    def _request(self, term: JudgeReward, question: str) -> tuple[str, Request]:
        """Return the name of a question in the cache, and the request that asks it. Raises ValueError."""
        token_ids = question_ids(self._tokenizer, term, question, self._cfg)
        content: dict[str, Any] = {
            "url": POLICY,
            "version": self._engine.version,
            "run_seed": self._cfg.run.seed,
            "prompt_ids": token_ids,
            "max_tokens": term.max_answer_tokens,
            "temperature": term.temperature,
            "stop_token_ids": sorted(self._stops),
        }
        return self._said.key(content | {"settings": self._settings}), Request(
            prompt_ids=token_ids,
            seed=mix(int(self._said.key(content)[:16], 16)),
            max_response_tokens=term.max_answer_tokens,
            temperature=term.temperature,
            stop_token_ids=self._stops,
        )


def question_ids(tokenizer: PreTrainedTokenizerBase, term: JudgeReward, question: str, cfg: Config) -> tuple[int, ...]:
    """Return the tokens of a question to the policy. Raises UserError where it cannot be asked, or is too long."""
    token_ids, _ = encode_prompt(
        tokenizer, question, system_prompt=term.system_prompt, chat_template=cfg.data.chat_template
    )
    if len(token_ids) > term.max_question_tokens:
        raise UserError(
            f"the question has {len(token_ids)} tokens, beyond max_question_tokens = {term.max_question_tokens}"
        )
    return token_ids
