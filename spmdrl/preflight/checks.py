"""Checks of what a run would start besides the policy: an environment, a tower for images, other models, judges."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config, JudgeReward, ModelConfig, Section, SftConfig, TuningConfig
from spmdrl.config.distill import REFERENCE
from spmdrl.config.environment import SummaryContext
from spmdrl.config.plan import Plan, layouts
from spmdrl.config.rewards import EnvironmentReward
from spmdrl.data.stream import PromptStream
from spmdrl.data.tokenizer import ScoredText, load_tokenizer
from spmdrl.data.turns import TurnEncoder
from spmdrl.data.vision import ImageIntake, load_processor
from spmdrl.envs.client import open_environments
from spmdrl.envs.protocol import Environments
from spmdrl.families import vision_family
from spmdrl.faults.text import one_line
from spmdrl.model.frozen import settings_of
from spmdrl.model.load import errors_about, load_model_config, parallel_model_problems, read_model_config
from spmdrl.model.reward_model import num_labels_of, reward_model_problems
from spmdrl.preflight.forecast import Model
from spmdrl.rewards.client import item_of
from spmdrl.rewards.judge import Judges, question_about, scores_in
from spmdrl.rollout.env_context import parser_problems, spans_of, start_of
from spmdrl.rollout.policy_judge import question_ids
from spmdrl.run import Inputs
from spmdrl.step.hints import Lessons
from spmdrl.types import UserError

# Try the environment before anything expensive: can it be started, reset with the first prompt, and appended to?


@dataclass(frozen=True, slots=True)
class TriedEnvironment:
    """The environment of a run, open as long as it is being checked."""

    client: Environments | None = None  # None: the run has none
    tools: Sequence[dict[str, Any]] = ()  # schemas of what the policy can call


def open_environment(cfg: Config | TuningConfig, exits: ExitStack) -> TriedEnvironment:
    """Start the environment's processes until `exits` closes. Raises UserError when it cannot be loaded."""
    if isinstance(cfg, TuningConfig) or cfg.environment is None or cfg.debug.load_rollouts is not None:
        return TriedEnvironment()
    _require_settings(cfg.environment)
    client = exits.enter_context(open_environments(cfg.environment))
    return TriedEnvironment(client, client.tools)


def _require_settings(section: Section) -> None:
    """Read every setting: one that is missing, which the user is warned of, must not surprise a process."""
    for name in type(section).model_fields:
        value = getattr(section, name)
        for inner in value if isinstance(value, tuple) else (value,):
            if isinstance(inner, Section):
                _require_settings(inner)


def environment_problems(
    cfg: Config | TuningConfig,
    environment: TriedEnvironment,
    tokenizer: PreTrainedTokenizerBase,
    stop_token_ids: frozenset[int],
    prompts: PromptStream,
    images: ImageIntake,
) -> Iterator[str]:
    """Yield a sentence for each reason why episodes cannot continue after a response.

    Raises UserError when the reset with the first prompt fails, or shows an image that cannot be read.
    """
    if isinstance(cfg, TuningConfig) or cfg.environment is None or environment.client is None:
        return
    yield from parser_problems(cfg)
    if not environment.client.gives_rewards and any(isinstance(one, EnvironmentReward) for one in cfg.reward.terms):
        yield (
            'reward.terms has kind = "environment", and the class of environment.source has neither get_reward() nor '
            "an attribute reward, so that every reward would be 0; give it one of them (a reward_func of TRL's "
            'is not called here), or reward its text by a term of kind = "function"'
        )
    (prompt,) = prompts.take(0, 1)
    first = environment.client.check(start_of(prompt, cfg.run.seed))
    try:
        spans_of(first, images)
    except UserError as error:
        raise UserError(f"the environment's first reset shows an image: {error}") from error
    if cfg.environment.context is not None and not prompt.messages:
        yield (
            f'environment.context.kind = "{cfg.environment.context.kind}" rewrites messages, but the prompts are texts '
            "that no chat template has rendered; put a chat_template.jinja into model.path, or remove "
            "[environment.context]"
        )
    by_role = [one.advantage.estimator for one in cfg.algorithms if one.advantage.compares_roles]
    if by_role and first.role is None:
        yield (
            f'advantage.estimator = "{by_role[0]}" compares each role with its own, but what the '
            "environment says first names none; let it return Observation(role=...), or an agent call the model "
            "policy/NAME"
        )
    roles = {message["role"] for message in (*prompt.messages, *first.messages)} - {"assistant"}
    tools = environment.tools if first.tools is None else first.tools
    answers = {"tool" if tools else "user"}
    if isinstance(cfg.environment.context, SummaryContext):
        answers.add("user")  # asks for it
    encoder = TurnEncoder(tokenizer, chat_template=cfg.data.chat_template, tools=tools, stop_token_ids=stop_token_ids)
    yield from encoder.problems(answers | (roles & {"system"}), history=cfg.environment.history)


# Checks of what a model that reads images can be trained with.


def vision_problems(cfg: Config | TuningConfig, model_config: Any) -> Iterator[str]:
    """Yield a sentence for each setting that a model with a tower does not support."""
    family = vision_family(model_config)
    if family is None:
        return
    if family.sees_whole_images and cfg.parallel.cp > 1 and cfg.parallel.cp_style != "ulysses":
        yield (
            f'parallel.cp_style = "{cfg.parallel.cp_style}", but the tokens of an image of {family.model_type} see '
            'each other, and chunks could divide them; set it to "ulysses", or cp = 1'
        )
    if isinstance(cfg, TuningConfig):
        return
    if cfg.environment is not None and cfg.environment.context is not None:
        yield (
            f'environment.context.kind = "{cfg.environment.context.kind}" leaves out observations, and with '
            f"{family.model_type} those may be images, which an episode that goes on would look for in vain; remove "
            "[environment.context]"
        )
    if cfg.true_on_policy:
        yield (
            f"true_on_policy = true, but the tower of {family.model_type} does not compute the same bits for images "
            "alone and together; set it to false"
        )
    if cfg.has_critic and cfg.critic.path not in (None, cfg.model.path):
        yield (
            f'critic.path = "{cfg.critic.path}", but the critic sees images as the tower of model.path does; remove '
            "critic.path"
        )


def decoded_lines(cfg: Config | TuningConfig, inputs: Inputs) -> Iterator[str]:
    """Decode the images of the first step, for --dry-run, and yield a line that counts those that differ.

    Before, only the beginning of a training image's file is read. Raises UserError with the row of one that is damaged.
    """
    if inputs.images.store is None:
        return
    stream, num_prompts = inputs.prompts, inputs.plan.prompts_per_step
    if isinstance(cfg, TuningConfig):
        shown = [(*pair.prompt.images, *pair.images) for pair in stream.pairs(0, num_prompts)]
    else:
        shown = [prompt.images for prompt in stream.take(0, num_prompts)]
    num_images = len({image.digest for images in shown for image in images})
    yield f"images of the first step, all decoded: {num_images}"


# Checks of the models besides the policy, before weights are read: frozen ones, those that reward, and judges.


@dataclass(frozen=True, slots=True)
class OpenedModel:
    """A model of a run, before its weights are read."""

    setting: str  # that names its directory
    cfg: ModelConfig
    config: Any  # transformers'
    drops_head: bool = False  # for one number instead of a distribution over tokens
    name: str = ""  # of one besides the policy

    @property
    def table(self) -> str:
        """The table of its settings, of one besides the policy."""
        return self.name if self.drops_head else f"models.{self.name}"

    def read(self) -> Model:
        """Read the shapes of its parameters, without memory."""
        return (Model.read_critic if self.drops_head else Model.read)(self.config, self.cfg)


def frozen_directories(cfg: Config | TuningConfig) -> dict[str, ModelConfig]:
    """The settings of the frozen models that have a directory other than the policy's, by name."""
    return {
        name: settings_of(one, cfg.model)
        for name, one in cfg.frozen_models.items()
        if one.path is not None and one.path != cfg.model.path
    }


def open_frozen(name: str, cfg: ModelConfig) -> OpenedModel:
    """Read the config of a frozen model. Raises UserError like `load_model_config`."""
    with errors_about(f"models.{name}"):
        return OpenedModel(f'models.{name}.path = "{cfg.path}"', cfg, load_model_config(cfg), name=name)


def frozen_layout_problems(
    cfg: Config | TuningConfig, policy: OpenedModel, beside: Sequence[OpenedModel]
) -> Iterator[str]:
    """Yield a sentence for each setting of its layout that a model besides the policy does not support."""
    own, opened = layouts(cfg), {one.table: one for one in beside}
    of_policy = {f"models.{name}" for name, one in cfg.frozen_models.items() if one.path == cfg.model.path}
    for table, model in (opened | dict.fromkeys(of_policy & own.keys(), policy)).items():
        layout, needs_experts = own.get(table, cfg.parallel), cfg.beside[table].parallel.ep is not None
        for sentence in parallel_model_problems(model.config, model.cfg, layout, needs_experts=needs_experts):
            if not sentence.startswith("parallel.ep "):
                yield f"{table}: {sentence}"
            elif needs_experts:
                yield f"{table}.{sentence}"
            else:
                yield f"{table}: {sentence}; for this model alone set {table}.parallel.ep"


def read_beside(cfg: Config | TuningConfig) -> list[OpenedModel]:
    """Read the configs of the models besides the policy that are of other directories; needs no weights. Raises
    UserError."""
    found = [_read(f"models.{name}", one, name=name) for name, one in frozen_directories(cfg).items()]
    if isinstance(cfg, Config):
        scorers = {_name(place): cfg.scorer_model(place) for place in model_terms(cfg)}
        found += [_read(name, one, drops_head=True, name=name) for name, one in scorers.items()]
    return found


def _read(table: str, cfg: ModelConfig, **kind: Any) -> OpenedModel:
    with errors_about(table):
        return OpenedModel(f'{table}.path = "{cfg.path}"', cfg, read_model_config(cfg), **kind)


def frozen_problems(
    cfg: Config | TuningConfig, policy: OpenedModel, model: OpenedModel, tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """Yield a sentence for each reason why a frozen model cannot say anything about the policy's tokens."""
    if problem := _image_problem(cfg, policy, model):
        yield f"{model.setting}: {problem}"
        return
    with errors_about(f"models.{model.name}"):
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


# What decides which pixels a processor makes of an image.
_PIXELS = ("image_mean", "image_std", "rescale_factor", "do_normalize", "do_rescale", "temporal_patch_size")


def _image_problem(cfg: Config | TuningConfig, policy: OpenedModel, model: OpenedModel) -> str | None:
    """Return why the model cannot look at the policy's images; None where it can, or where there are none."""
    own, its = vision_family(policy.config), vision_family(model.config)
    if own is None:
        return None
    if model.name == REFERENCE:
        return (
            f"{policy.setting} looks at images, and a reference would see what the policy's own tower makes of them; "
            f'remove models.{REFERENCE}, or set models.{REFERENCE}.adapters = "off" with [lora]'
        )
    if its is None or replace(its, model_type=own.model_type, num_levels=own.num_levels) != own:
        return (
            f"{policy.setting} looks at images, and the other model does not, or has others in their places; name a "
            "model with the same patches and placeholders"
        )
    with errors_about(f"models.{model.name}"):
        processors = [load_processor(one.cfg.path, cfg.data) for one in (policy, model)]
    for name in _PIXELS:
        first, second = (getattr(one, name, None) for one in processors)
        if first != second:
            return (
                f"its processor has {name} = {second} and that of {policy.setting} {first}, so that it would see other "
                "images; name a model with the same"
            )
    return None


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


# Checks of the models that reward, before weights are read: can they be loaded, and do judges answer?


def model_terms(cfg: Config | TuningConfig) -> list[int]:
    """The places in `reward.terms` of those that are scores of models."""
    return [*cfg.reward.model_terms] if isinstance(cfg, Config) else []


def open_reward_model(cfg: Config, place: int) -> OpenedModel:
    """Read the config of the reward model of a term. Raises UserError when it is none, or its label is not known."""
    term, settings = cfg.reward.model_terms[place], cfg.scorer_model(place)
    with errors_about(_name(place)):
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
    with errors_about(model.name):
        return load_tokenizer(model.cfg.path, trust_remote_code=model.cfg.trust_remote_code)


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


def _name(place: int) -> str:
    return f"reward.terms.{place}"
