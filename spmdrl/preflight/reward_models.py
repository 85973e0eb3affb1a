"""Checks of the models that reward, before weights are read: can they be loaded, and do judges answer?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config, JudgeReward, TuningConfig
from spmdrl.data.scored_text import ScoredText
from spmdrl.data.stream import PromptStream
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.faults.text import one_line
from spmdrl.model.load import load_model_config, read_model_config
from spmdrl.model.reward_model import num_labels_of, reward_model_problems
from spmdrl.preflight.forecast import Model
from spmdrl.preflight.frozen import OpenedModel
from spmdrl.rewards.client import item_of
from spmdrl.rewards.judge import Judges, question_about, scores_in
from spmdrl.rollout.policy_judge import question_ids
from spmdrl.types import UserError


def model_terms(cfg: Config | TuningConfig) -> list[int]:
    """The places in `reward.terms` of those that are scores of models."""
    return [*cfg.reward.model_terms] if isinstance(cfg, Config) else []


def open_reward_model(cfg: Config, place: int) -> OpenedModel:
    """Read the config of the reward model of a term. Raises UserError when it is none, or its label is not known."""
    term, settings = cfg.reward.model_terms[place], cfg.scorer_model(place)
    with _errors_about(place):
        config = load_model_config(settings)
        num_labels = num_labels_of(settings.path)
        if problems := [*reward_model_problems(config, settings)]:
            raise UserError("\n".join(problems))
        if term.label is None and num_labels > 1:
            raise UserError(
                f'model.path = "{settings.path}" has {num_labels} labels, and the reward is the score of one of them; '
                f"set reward.terms.{place}.label to 0 to {num_labels - 1}, or name a model of one label"
            )
        if term.label is not None and term.label >= num_labels:
            raise UserError(
                f'reward.terms.{place}.label = {term.label}, but model.path = "{settings.path}" has {num_labels} '
                "labels, counted from 0"
            )
    setting = f'reward.terms.{place}.path = "{settings.path}"'
    return OpenedModel(setting, settings, config, drops_head=True, name=_name(place))


def open_reward_tokenizer(model: OpenedModel) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a reward model. Raises UserError."""
    try:
        return load_tokenizer(model.cfg.path, trust_remote_code=model.cfg.trust_remote_code)
    except UserError as error:
        raise UserError(str(error).replace("model.path", f"{model.name}.path")) from error


def text_problems(cfg: Config, place: int, tokenizer: PreTrainedTokenizerBase, prompts: PromptStream) -> Iterator[str]:
    """Yield a sentence when a reward model cannot read the first prompt and its answer."""
    (prompt,) = prompts.take(0, 1)
    try:
        ScoredText(tokenizer, cfg.reward.model_terms[place].template)(prompt, prompt.answer or "answer")
    except UserError as error:
        yield f"{_name(place)}: {error}"


def judge_problems(
    cfg: Config | TuningConfig, tokenizer: PreTrainedTokenizerBase, prompts: PromptStream
) -> Iterator[str]:
    """Ask each judge about the first prompt and its reference answer, and yield a sentence where that gives no score.

    The first rank asks, and only for a run that samples. Of the policy, which has no engine yet, only the question is
    checked."""
    if not isinstance(cfg, Config) or cfg.debug.load_rollouts is not None or os.environ.get("RANK", "0") != "0":
        return
    terms = {
        _name(place): term.model_copy(update={"max_retries": min(1, term.max_retries)})
        for place, term in enumerate(cfg.reward.terms)
        if isinstance(term, JudgeReward)
    }
    if not terms:
        return
    (prompt,) = prompts.take(0, 1)
    item = item_of(prompt, prompt.answer or "answer")
    with Judges({name: term for name, term in terms.items() if not term.is_policy}) as judges:
        for name, term in terms.items():
            items = [item] * (1 if term.group is None else 2)
            try:
                question = question_about(items, term)
                if term.is_policy:
                    question_ids(tokenizer, term, question, cfg)
                    continue
                (answer,) = judges.answers(name, [question])
                if isinstance(answer, ValueError):
                    raise answer
                scores_in(answer, term, len(items))
            except ValueError as error:
                reason = f"{name}: {one_line(str(error))}"
                yield f"{reason}; a first question, about the first prompt, must get a score"


def read_reward_models(cfg: Config | TuningConfig) -> dict[str, Model]:
    """Read the shapes of the reward models by the names of their terms; needs no weights. Raises UserError."""
    found = {}
    for place in model_terms(cfg):
        assert isinstance(cfg, Config), "only these have rewards"
        settings = cfg.scorer_model(place)
        with _errors_about(place):
            found[_name(place)] = Model.read_critic(read_model_config(settings), settings)
    return found


def _name(place: int) -> str:
    return f"reward.terms.{place}"


@contextmanager
def _errors_about(place: int) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("model.path", f"{_name(place)}.path")) from error
