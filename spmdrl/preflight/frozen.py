"""Checks of the models beside the policy, before weights are read: are they there, and do they know its tokens?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config, ModelConfig, SftConfig, TuningConfig
from spmdrl.config.distill import REFERENCE
from spmdrl.config.plan import Plan
from spmdrl.data.stream import PromptStream
from spmdrl.data.tokenizer import load_tokenizer
from spmdrl.families import vision_family
from spmdrl.model.frozen import settings_of
from spmdrl.model.load import load_model_config, read_model_config
from spmdrl.preflight.forecast import Model
from spmdrl.step.hints import Lessons
from spmdrl.types import UserError


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model of a run, before its weights are read."""

    setting: str  # that names its directory
    cfg: ModelConfig
    config: Any  # transformers'
    drops_head: bool = False  # for one number instead of a distribution over tokens
    name: str = ""  # of one beside the policy


def frozen_directories(cfg: Config | TuningConfig) -> dict[str, ModelConfig]:
    """The settings of the frozen models that have a directory other than the policy's, by name."""
    return {
        name: settings_of(one, cfg.model)
        for name, one in cfg.frozen_models.items()
        if one.path is not None and one.path != cfg.model.path
    }


def open_frozen(name: str, cfg: ModelConfig) -> OpenedModel:
    """Read the config of a frozen model. Raises UserError like `load_model_config`."""
    with _errors_about(name):
        return OpenedModel(f'models.{name}.path = "{cfg.path}"', cfg, load_model_config(cfg), name=name)


def read_frozen(cfg: Config | TuningConfig) -> dict[str, Model]:
    """Read the shapes of the frozen models of other directories, by name; needs no weights. Raises UserError."""
    found = {}
    for name, settings in frozen_directories(cfg).items():
        with _errors_about(name):
            found[name] = Model.read(read_model_config(settings), settings)
    return found


@contextmanager
def _errors_about(name: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        raise UserError(str(error).replace("model.path", f"models.{name}.path")) from error


def frozen_problems(
    cfg: Config | TuningConfig, policy: OpenedModel, model: OpenedModel, tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """Yield a sentence for each reason why a frozen model cannot say anything about the policy's tokens."""
    if vision_family(policy.config) is not None:
        yield (
            f"{model.setting}: {policy.setting} looks at images, and would show the other model what its own tower "
            f'makes of them; set models.{model.name}.adapters = "off" with [lora], or train a model of text'
        )
        return
    with _errors_about(model.name):
        other = load_tokenizer(model.cfg.path, trust_remote_code=model.cfg.trust_remote_code)
    if difference := first_difference(tokenizer.get_vocab(), other.get_vocab()):
        yield (
            f"{model.setting}: its vocabulary is another than that of {policy.setting}: {difference}; a model beside "
            "the policy must have the same tokens"
        )
        return
    own, its = (one.config.get_text_config().vocab_size for one in (policy, model))
    distill = cfg.distill if isinstance(cfg, Config | SftConfig) else None
    if own == its or model.name == REFERENCE or distill is None or not distill.over_vocabulary:
        return
    # Rows beyond the tokenizer's tokens only fill up a head, and sizes of one family may have more or fewer of them.
    if its < own and distill.needs_heads:
        yield (
            f"{model.setting}: its head has {its} rows, fewer than the {own} of {policy.setting}, so that it says "
            'nothing about some that the policy has; set distill.divergence = "sampled_kl", or distill.top_k'
        )
    elif cfg.parallel.tp > 1:
        yield (
            f"{model.setting}: its head has {its} rows and that of {policy.setting} {own}, which parallel.tp = "
            f'{cfg.parallel.tp} would divide unequally; set tp = 1, or distill.divergence = "sampled_kl"'
        )


def top_token_problems(cfg: Config | TuningConfig, policy: OpenedModel) -> Iterator[str]:
    """Yield a sentence when all tokens would be among the most probable ones."""
    distill = cfg.distill if isinstance(cfg, Config | SftConfig) else None
    tokens = policy.config.get_text_config().vocab_size
    if distill is not None and distill.top_k is not None and distill.top_k >= tokens:
        yield f"distill.top_k = {distill.top_k} is not below the {tokens} tokens of {policy.setting}; remove it"


def hint_problems(
    cfg: Config | TuningConfig,
    plan: Plan,
    policy: OpenedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: PromptStream,
) -> Iterator[str]:
    """Yield a sentence for each reason why teachers cannot see hints. Raises UserError for a first prompt without its
    hint."""
    if not isinstance(cfg, Config | SftConfig) or cfg.distill is None or not cfg.distill.hints:
        return
    if vision_family(policy.config) is not None:
        yield f"distill.hint_column is for models of text, and {policy.setting} looks at images; remove it"
        return
    limit = getattr(policy.config.get_text_config(), "max_position_embeddings", None)
    longest = plan.max_sequence_tokens + cfg.distill.max_hint_tokens
    if limit is not None and longest > limit:
        yield (
            f"a prompt with its hint and a response may have {longest} tokens, but the model was made for {limit} "
            "(max_position_embeddings); lower distill.max_hint_tokens"
        )
    Lessons(cfg.distill, cfg.data, tokenizer)(prompts.take(0, 1)[0])


def first_difference(own: Mapping[str, int], other: Mapping[str, int]) -> str:
    """Describe the first token, by number, that two vocabularies do not share; nothing when they are the same."""
    own_tokens, other_tokens = ({number: token for token, number in one.items()} for one in (own, other))
    for number in sorted(own_tokens.keys() | other_tokens.keys()):
        mine, its = own_tokens.get(number), other_tokens.get(number)
        if mine != its:
            says = ["none" if token is None else repr(token) for token in (mine, its)]
            return f"token {number} is {says[0]} of the policy and {says[1]} of the other"
    return ""
