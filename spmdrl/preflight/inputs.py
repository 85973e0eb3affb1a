"""Open and check everything a run reads besides weights, before the first process group or GPU is touched."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from spmdrl.config import (
    Config,
    FunctionReward,
    HeldOutPromptsConfig,
    MissingSetting,
    PreferencesConfig,
    SftConfig,
    TuningConfig,
)
from spmdrl.config.engines import ENGINES
from spmdrl.config.plan import Plan, plan_problems, plan_run
from spmdrl.config.strict import shown
from spmdrl.data.conversations import asked, imitated
from spmdrl.data.image_store import open_image_store
from spmdrl.data.sources import RowTransform, open_source
from spmdrl.data.stream import (
    AnswerLimit,
    HeldOutPrompts,
    PromptStream,
    TrainingPair,
    make_held_out,
    make_training_stream,
)
from spmdrl.data.tokenizer import load_tokenizer, stop_token_ids
from spmdrl.data.turns import TurnEncoder
from spmdrl.data.vision import ImageIntake, ImageReader, NoImages
from spmdrl.dist.session import default_device_type
from spmdrl.engine.start import engine_class
from spmdrl.families import sglang_window, vision_family
from spmdrl.learn.objective import policy_loss_problems
from spmdrl.learn.optim import optimizer_problems
from spmdrl.model import rotary
from spmdrl.model.attention import choose_kernel
from spmdrl.model.exact import invariant, sglang_operators
from spmdrl.model.load import (
    compute_dtype,
    critic_shapes,
    errors_about,
    load_model_config,
    model_without_memory,
    parallel_model_problems,
)
from spmdrl.model.lora.policy import adapter_problems
from spmdrl.model.param_groups import freeze_problems, rate_problems
from spmdrl.model.reward_model import reward_model_problems
from spmdrl.model.routes import balance_refusal, routes_refusal
from spmdrl.model.tree_attention import tree_problems
from spmdrl.model.weight_files import missing_weight_problems, weight_file_problems
from spmdrl.preflight.checks import (
    OpenedModel,
    TriedEnvironment,
    environment_problems,
    frozen_directories,
    frozen_layout_problems,
    frozen_problems,
    hint_problems,
    judge_problems,
    model_terms,
    open_environment,
    open_frozen,
    open_reward_model,
    open_reward_tokenizer,
    text_problems,
    top_token_problems,
    vision_problems,
)
from spmdrl.preflight.forecast import Model, Prediction, predict_here, with_costs
from spmdrl.report import RunFolder
from spmdrl.report.sinks import sink_problems
from spmdrl.rollout.curriculum import curriculum_problems
from spmdrl.rollout.files import held_out_before
from spmdrl.rollout.start import sampling_problems
from spmdrl.run import Inputs, kernel_of_run
from spmdrl.step.advantages import advantage_problems
from spmdrl.step.export import refuse_overwriting
from spmdrl.step.tuning_data import PairEncoder, answer_limit, comparison_limit
from spmdrl.types import UserError

T = TypeVar("T")


def raise_all(sentences: Sequence[str]) -> None:
    """Raise UserError when there are sentences."""
    if sentences:
        raise UserError("\n".join(dict.fromkeys(sentences)))


def open_inputs(
    cfg: Config | TuningConfig, *, num_ranks: int, refuse: Callable[[Sequence[str]], None] = raise_all
) -> Inputs:
    """Open model config, tokenizer and data, and derive the plan.

    `cfg` may lack settings: checks that need one of them are left out. `refuse` gets a sentence for each problem found;
    it must raise UserError when there are any, or when `cfg` lacks a setting.
    """
    found = _Findings()
    for problems in (
        _time_problems,
        lambda cfg: optimizer_problems(cfg.optim),
        _loss_problems,
        _attention_problems,
        _folder_problems,
        _reward_file_problems,
        lambda cfg: sink_problems(cfg.report.sinks.by_kind),
        lambda cfg: curriculum_problems(cfg.data.curriculum) if isinstance(cfg, Config) else (),
        _engine_class_problems,
    ):
        found.ask(problems, cfg)
    found.ask(plan_problems, cfg, num_ranks)
    policy = found.get(_open_policy, cfg)
    critic = found.get(_open_critic, cfg, policy)
    plan = found.get(
        lambda model: with_costs(plan_run(cfg, num_ranks=num_ranks), cfg.pack, cfg.model, model.config), policy
    )
    tokenizer = found.get(lambda _: load_tokenizer(cfg.model.path, cfg.model.trust_remote_code), policy)
    others = [found.get(open_frozen, *one) for one in (found.get(frozen_directories, cfg) or {}).items()]
    scorers = {place: found.get(open_reward_model, cfg, place) for place in found.get(model_terms, cfg) or ()}
    readers = {place: found.get(open_reward_tokenizer, model) for place, model in scorers.items()}
    beside = [*others, *scorers.values()]
    for model in (policy, critic, *beside) if critic and critic.cfg.path != cfg.model.path else (policy, *beside):
        found.ask(_weight_problems, model, model is policy)
    found.ask(lambda model: adapter_problems(model.config, model.cfg, cfg.lora), policy)
    found.ask(lambda model: reward_model_problems(model.config, model.cfg) if model.drops_head else (), policy)
    found.ask(_vision_problems, cfg, policy)
    found.ask(_routing_problems, cfg, policy)
    found.ask(_rate_problems, cfg, policy)
    found.ask(top_token_problems, cfg, policy)
    for model in others:
        found.ask(frozen_problems, cfg, policy, model, tokenizer)
    for model in (policy, critic, *others):
        found.ask(_length_problems, plan, model)
        found.ask(_vocabulary_problems, tokenizer, model)
    for place, model in scorers.items():
        found.ask(_vocabulary_problems, readers[place], model)
    for model in (policy, critic):
        found.ask(lambda one: parallel_model_problems(one.config, one.cfg, cfg.parallel), model)
    found.ask(frozen_layout_problems, cfg, policy, list(filter(None, beside)))
    found.ask(_judged_problems, plan, policy)
    found.ask(_rotary_problems, cfg, plan, policy)
    found.ask(_window_problems, cfg, plan, policy)
    for model in (policy, critic, *beside):
        found.ask(_tree_problems, cfg, plan, model)
    found.ask(_true_on_policy_problems, cfg, policy)
    prediction = found.get(_predict, cfg, num_ranks, policy, critic=critic, frozen=list(filter(None, beside)))
    stops = found.get(_stop_tokens, cfg, tokenizer)
    images = found.get(_open_images, cfg, policy, tokenizer)
    found.ask(_engine_problems, cfg, num_ranks, policy, stops=stops)
    with ExitStack() as exits:
        environment = found.get(open_environment, cfg, exits)
        answers = found.get(_open_answer_limit, cfg, tokenizer, stops, images)
        prompts = found.get(_open_prompts, cfg, tokenizer, environment, images, answers=answers)
        held_out = found.get(_open_held_out, cfg, tokenizer, environment, images, answers=answers)
        pairs = found.get(_open_held_out_pairs, cfg, held_out)
        found.ask(_conversation_problems, cfg, tokenizer, stops)
        for place, reader in readers.items():
            found.ask(text_problems, cfg, place, reader, prompts)
        found.ask(judge_problems, cfg, tokenizer, prompts)
        found.ask(hint_problems, cfg, plan, policy, tokenizer, prompts)
        found.ask(environment_problems, cfg, environment, tokenizer, stops, prompts, images)
    if prompts is None:
        found.ask(_source_problems, cfg)
    refuse(found.sentences)
    assert policy and plan and tokenizer and stops and prompts and prediction
    assert held_out is not None and pairs is not None
    memory = prediction.plan if prediction.rank.on_gpu else None
    assert images is not None
    return Inputs(
        plan=plan,
        model_config=policy.config,
        tokenizer=tokenizer,
        stop_token_ids=stops,
        prompts=prompts,
        images=images,
        held_out=held_out,
        held_out_pairs=pairs,
        memory=memory,
        phases=prediction.phases,
    )


class _Findings:
    """Sentences about everything that is wrong, so that the user reads all of them at once."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def get(self, open: Callable[..., T], *needed: Any, **others: Any) -> T | None:
        """The result of `open`; None where it fails, or where something it needs is None or not set."""
        if any(one is None for one in needed):
            return None
        try:
            return open(*needed, **others)
        except UserError as error:
            self.sentences += str(error).splitlines()
        except OSError as error:  # a folder without rights, a loop of links, a path that is too long
            self.sentences.append(f"{shown(error.filename or 'a file')}: {error.strerror or error}")
        except MissingSetting:
            pass
        return None

    def ask(self, problems: Callable[..., Iterable[str]], *needed: Any, **others: Any) -> None:
        """Collect the sentences of `problems`, unless something it needs is None or not set."""
        self.get(partial(self._collect, problems), *needed, **others)

    def _collect(self, problems: Callable[..., Iterable[str]], *about: Any, **others: Any) -> None:
        for sentence in problems(*about, **others):
            self.sentences.append(sentence)


def _open_policy(cfg: Config | TuningConfig) -> OpenedModel:
    config = load_model_config(cfg.model)
    drops_head = isinstance(cfg, PreferencesConfig) and cfg.pairs.trains_reward_model
    return OpenedModel(f'model.path = "{cfg.model.path}"', cfg.model, config, drops_head=drops_head)


def _open_critic(cfg: Config | TuningConfig, policy: OpenedModel) -> OpenedModel | None:
    if isinstance(cfg, TuningConfig) or not cfg.has_critic:
        return None
    with errors_about("critic"):
        config = load_model_config(cfg.critic_model) if cfg.critic.path else policy.config
    return OpenedModel(f'critic.path = "{cfg.critic_model.path}"', cfg.critic_model, config, drops_head=True)


def _open_images(cfg: Config | TuningConfig, policy: OpenedModel, tokenizer: PreTrainedTokenizerBase) -> ImageIntake:
    """Return what becomes of the images of prompts and environments."""
    family = vision_family(policy.config)
    if family is None:
        return NoImages(
            f"there are images, and {policy.setting} ({policy.config.model_type}) reads text only; set it to a model "
            "that reads images"
        )
    if isinstance(cfg, Config) and cfg.environment is not None and cfg.environment.has_agents:
        return NoImages(
            "there are images, and agents show the policy text only: their prompts are what they ask; remove the "
            'images, or set another environment.source than one of the kinds "agent" and "verifiers"'
        )
    store = open_image_store(Path(cfg.run.dir, cfg.run.name), max_gib=cfg.data.image_store_gib)
    return ImageReader(family, cfg.model.path, cfg.data, tokenizer=tokenizer, store=store)


def _open_answer_limit(
    cfg: Config | TuningConfig, tokenizer: PreTrainedTokenizerBase, stops: frozenset[int], images: ImageIntake
) -> AnswerLimit | None:
    if isinstance(cfg, Config):
        return None
    encode = PairEncoder(cfg, tokenizer, stops, images)
    if isinstance(cfg, PreferencesConfig):
        return comparison_limit(cfg, encode)
    assert isinstance(cfg, SftConfig), "there are two kinds"
    return answer_limit(cfg, encode, images)


def _open_prompts(
    cfg: Config | TuningConfig,
    tokenizer: PreTrainedTokenizerBase,
    environment: TriedEnvironment,
    images: ImageIntake,
    *,
    answers: AnswerLimit | None = None,
) -> PromptStream:
    held_out = _held_out_table(cfg)
    if isinstance(cfg, Config) and cfg.debug.load_rollouts is not None and isinstance(images, ImageReader):
        held_out = held_out_before(cfg)  # so that its prompts are those that were recorded, whose images are read again
    prompts = make_training_stream(
        cfg.data,
        held_out,
        seed=cfg.run.seed,
        tokenizer=tokenizer,
        tools=environment.tools,
        form=_form(cfg),
        images=images,
        answers=answers,
    )
    prompts.take(0, 1)
    return prompts


def _open_held_out(
    cfg: Config | TuningConfig,
    tokenizer: PreTrainedTokenizerBase,
    environment: TriedEnvironment,
    images: ImageIntake,
    *,
    answers: AnswerLimit | None = None,
) -> HeldOutPrompts:
    table = _held_out_table(cfg)
    if table is None:
        return HeldOutPrompts()
    return make_held_out(
        cfg.data,
        table,
        tokenizer=tokenizer,
        tools=environment.tools,
        form=_form(cfg),
        images=images,
        answers=answers,
    )


def _open_held_out_pairs(cfg: Config | TuningConfig, held_out: HeldOutPrompts) -> list[TrainingPair]:
    if isinstance(cfg, Config) or cfg.held_out is None or cfg.held_out.every == "never":
        return []
    return held_out.pairs()


def _form(cfg: Config | TuningConfig) -> RowTransform:
    return partial(imitated, turns=cfg.sft.turns) if isinstance(cfg, SftConfig) else asked


def _conversation_problems(
    cfg: Config | TuningConfig, tokenizer: PreTrainedTokenizerBase, stops: frozenset[int]
) -> Iterator[str]:
    """Yield a sentence for each reason why a conversation cannot continue after a response that is imitated."""
    if isinstance(cfg, SftConfig) and cfg.sft.turns == "all":
        turns = TurnEncoder(tokenizer, chat_template=cfg.data.chat_template, tools=(), stop_token_ids=stops)
        yield from turns.problems({"user"})


def _held_out_table(cfg: Config | TuningConfig) -> HeldOutPromptsConfig | None:
    return cfg.held_out if isinstance(cfg, TuningConfig) else cfg.eval


def _stop_tokens(cfg: Config | TuningConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    if isinstance(cfg, Config) and cfg.rollout.stop_token_ids:
        unknown = [token for token in cfg.rollout.stop_token_ids if not 0 <= token < len(tokenizer)]
        if unknown:
            raise UserError(
                f"rollout.stop_token_ids: the tokenizer has ids 0 to {len(tokenizer) - 1}, not {unknown[0]}"
            )
        return frozenset(cfg.rollout.stop_token_ids)
    return stop_token_ids(tokenizer, cfg.model.path)


def _predict(
    cfg: Config | TuningConfig,
    num_ranks: int,
    policy: OpenedModel,
    *,
    critic: OpenedModel | None,
    frozen: Sequence[OpenedModel],
) -> Prediction:
    """Predict the memory of each phase. Raises UserError where the device is too small, whatever it computes."""
    second = Model.read_critic(critic.config, critic.cfg) if critic else None
    if policy.drops_head:
        model = Model.read_critic(policy.config, policy.cfg)
    else:
        beside = {one.name: one.read() for one in frozen}
        model = Model.read(policy.config, policy.cfg, critic=second, lora=cfg.lora, frozen_models=beside)
    prediction = predict_here(cfg, model, num_ranks=num_ranks)
    raise_all(prediction.problems if prediction.rank.on_gpu else ())
    return prediction


def _time_problems(cfg: Config | TuningConfig) -> Iterator[str]:
    end = cfg.run.stop_before
    if end is None:
        return
    try:
        is_past = end.timestamp() <= time.time()
    except (OverflowError, OSError, ValueError):  # a year that no clock shows
        is_past = True
    if is_past:
        yield f"run.stop_before = {end.isoformat(timespec='minutes')} is in the past; set it later, or remove it"


def _loss_problems(cfg: Config | TuningConfig) -> Iterator[str]:
    tried: list[object] = []
    for one in map(cfg.under, cfg.algorithms) if isinstance(cfg, Config) else ():
        yield from () if one.loss in tried else policy_loss_problems(one)
        yield from () if (one.advantage, one.loss) in tried else advantage_problems(one)
        tried += [one.loss, (one.advantage, one.loss)]


def _reward_file_problems(cfg: Config | TuningConfig) -> Iterator[str]:
    """Yield a sentence for each file of a reward that is missing; a sandboxed process tries the functions later."""
    for place, term in enumerate(cfg.reward.terms if isinstance(cfg, Config) else ()):
        if isinstance(term, FunctionReward):
            file = term.function.rpartition(":")[0]
            if file.endswith(".py") and not Path(file).is_file():
                yield f'reward.terms.{place}.function = "{term.function}": there is no file {file}'


def _engine_class_problems(cfg: Config | TuningConfig) -> Iterator[str]:
    if isinstance(cfg, Config) and cfg.rollout.engine not in ENGINES and ":" in cfg.rollout.engine:
        yield from _refusals(engine_class, cfg.rollout.engine)


def _attention_problems(cfg: Config | TuningConfig) -> Iterator[str]:
    device_type = default_device_type()
    dtype = compute_dtype(cfg.model.compute_dtype, device_type)
    return _refusals(choose_kernel, cfg.model.attention, device_type, dtype)


def _folder_problems(cfg: Config | TuningConfig) -> Iterator[str]:
    folder = RunFolder(Path(cfg.run.dir, cfg.run.name))
    problems = [*folder.problems()]
    if not problems and os.environ.get("RANK", "0") == "0":  # the rank that will write them; they may be long
        problems = [*folder.content_problems()]
    yield from problems
    yield from _refusals(refuse_overwriting, cfg.model.path, folder.hf)


def _weight_problems(model: OpenedModel, is_policy: bool) -> Iterator[str]:
    whole = model_without_memory(model.config, model.cfg)
    shapes = {name: parameter.shape for name, parameter in whole.named_parameters()}
    needed = critic_shapes(model.config, model.cfg)[0] if model.drops_head else shapes
    sentences = [*weight_file_problems(model.cfg.path, parameters=shapes)]
    for sentence in sentences or missing_weight_problems(
        model.cfg.path, whole, needed, may_have_others=model.drops_head or not is_policy
    ):
        yield sentence.replace(f'model.path = "{model.cfg.path}"', model.setting)


def _source_problems(cfg: Config | TuningConfig) -> Iterator[str]:
    """Problems of the training data that show without a tokenizer."""
    for source in cfg.data.sources:
        yield from _refusals(partial(open_source, seed=0), source)


def _length_problems(plan: Plan, model: OpenedModel) -> Iterator[str]:
    limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    longest = max(plan.max_sequence_tokens, plan.max_eval_sequence_tokens)
    if limit is not None and longest > limit:
        yield (
            f"a prompt and its response may have {longest} tokens, but the model was made for {limit} "
            "(max_position_embeddings); lower data.max_prompt_tokens or max_response_tokens"
        )


_OF_JUDGES = "max_question_tokens and max_answer_tokens"


def _judged_problems(plan: Plan, policy: OpenedModel) -> Iterator[str]:
    limit, longest = getattr(policy.config.get_text_config(), "max_position_embeddings", None), plan.max_judged_tokens
    if limit is not None and longest > limit:
        yield (
            f"a question to the policy as its own judge may have {longest} tokens with its answer, but the model was "
            f"made for {limit} (max_position_embeddings); lower {_OF_JUDGES} of reward.terms"
        )


def _rotary_problems(cfg: Config | TuningConfig, plan: Plan, policy: OpenedModel) -> Iterator[str]:
    longest = max(plan.max_sequence_tokens, plan.max_eval_sequence_tokens)
    yield from rotary.length_problems(policy.config, longest, are_sampled=isinstance(cfg, Config))
    yield from rotary.length_problems(
        policy.config, plan.max_judged_tokens, are_sampled=True, allowed_by=f"{_OF_JUDGES} of reward.terms"
    )


def _window_problems(cfg: Config | TuningConfig, plan: Plan, policy: OpenedModel) -> Iterator[str]:
    text = policy.config.get_text_config()
    is_asked = isinstance(cfg, Config) and cfg.rollout.engine == "sglang"
    window = sglang_window(text) if is_asked else None
    longest = max(plan.max_sequence_tokens, plan.max_eval_sequence_tokens)
    if window is not None and longest > window:
        yield (
            f'rollout.engine = "sglang" with {text.model_type}: SGLang computes other windows than its {window} tokens '
            f'(sliding_window), and a prompt and its response may have {longest}; set it to "torch", or lower '
            "data.max_prompt_tokens or max_response_tokens"
        )


def _tree_problems(cfg: Config | TuningConfig, plan: Plan, model: OpenedModel) -> Iterator[str]:
    if plan.shares_prefixes:
        distill = cfg.distill if isinstance(cfg, Config | SftConfig) else None
        hint = distill.max_hint_tokens if distill is not None and distill.hints else 0
        yield from tree_problems(model.config, plan.max_sequence_tokens + hint)


def _vision_problems(cfg: Config | TuningConfig, policy: OpenedModel) -> Iterator[str]:
    yield from freeze_problems(model_without_memory(policy.config, policy.cfg), policy.cfg.freeze)
    yield from vision_problems(cfg, policy.config)


def _routing_problems(cfg: Config | TuningConfig, policy: OpenedModel) -> Iterator[str]:
    if isinstance(cfg, TuningConfig):
        return
    replay, rate = cfg.correction.router_replay, cfg.optim.expert_bias_rate
    coef = max(one.loss.expert_balance_coef for one in cfg.algorithms)
    if (replay, rate, coef) == ("none", None, 0):
        return
    model, kind = model_without_memory(policy.config, policy.cfg), policy.config.model_type
    if rate is not None and (refusal := balance_refusal(model)):
        yield (
            f"optim.expert_bias_rate = {rate:g} moves the biases by which experts are chosen, but {kind} {refusal}; "
            "remove it"
        )
    if (refusal := routes_refusal(model)) and replay != "none":
        yield f'correction.router_replay = "{replay}", but {kind} {refusal}; set it to "none"'
    if refusal and coef:
        yield f"loss.expert_balance_coef = {coef:g} balances the experts of a mixture, but {kind} {refusal}; remove it"


def _rate_problems(cfg: Config | TuningConfig, policy: OpenedModel) -> Iterator[str]:
    if cfg.lora is None and (rates := cfg.optim.rates):
        yield from rate_problems(model_without_memory(policy.config, policy.cfg), rates, policy.cfg.freeze)


def _vocabulary_problems(tokenizer: PreTrainedTokenizerBase, model: OpenedModel) -> Iterator[str]:
    largest = max(tokenizer.get_vocab().values(), default=-1)
    vocabulary = model.config.get_text_config().vocab_size
    if largest >= vocabulary:
        yield (
            f"{model.setting}: the tokenizer makes token ids up to {largest}, but the model has only "
            f"{vocabulary} of them (vocab_size); the tokenizer belongs to another model"
        )


def _true_on_policy_problems(cfg: Config | TuningConfig, policy: OpenedModel) -> Iterator[str]:
    """Reasons why engine and trainer could not compute the same bits here."""
    if isinstance(cfg, TuningConfig) or not cfg.true_on_policy:
        return
    device_type = default_device_type()
    dtype = compute_dtype(cfg.model.compute_dtype, device_type)
    kernel = kernel_of_run(cfg, device_type, dtype)
    if kernel == "invariant":
        sentences = list(invariant.model_problems(policy.config))
        yield from sentences or invariant.machine_problems(model_without_memory(policy.config, cfg.model), dtype)
        return
    backend = kernel.removeprefix("sglang_")
    yield from sglang_operators.model_problems(policy.config)
    yield from sglang_operators.attention_problems(policy.config, backend)
    yield from sglang_operators.device_problems(backend)


def _engine_problems(
    cfg: Config | TuningConfig, num_ranks: int, policy: OpenedModel, *, stops: frozenset[int] | None
) -> Iterator[str]:
    if isinstance(cfg, Config):
        yield from sampling_problems(cfg, policy.config, stops, num_ranks=num_ranks, device_type=default_device_type())


def _refusals(check: Callable[..., object], *about: Any) -> Iterator[str]:
    """The sentences of the UserError that a function raises, if it does."""
    try:
        check(*about)
    except UserError as error:
        yield from str(error).splitlines()


@dataclass(frozen=True, slots=True)
class HeldOut:
    """The inputs of an evaluation: those of a run without a plan to train."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: frozenset[int]
    prompts: HeldOutPrompts
    images: ImageIntake


def open_held_out(cfg: Config) -> HeldOut:
    """Open what the evaluation of a run's model reads. Raises UserError when something is not there."""
    tokenizer = load_tokenizer(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code)
    images = _open_images(cfg, _open_policy(cfg), tokenizer)
    with ExitStack() as exits:
        prompts = _open_held_out(cfg, tokenizer, open_environment(cfg, exits), images)
    return HeldOut(tokenizer, _stop_tokens(cfg, tokenizer), prompts, images)


def open_training_prompts(cfg: Config) -> tuple[PromptStream, ImageIntake]:
    """Open the stream of a run's prompts, and what reads their images. Raises UserError."""
    tokenizer = load_tokenizer(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code)
    images = _open_images(cfg, _open_policy(cfg), tokenizer)
    with ExitStack() as exits:
        return _open_prompts(cfg, tokenizer, open_environment(cfg, exits), images), images
