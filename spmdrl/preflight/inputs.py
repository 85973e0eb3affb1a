"""Everything a run reads besides weights, opened and checked before the first process group or GPU is touched."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from spmdrl.config import Config, HeldOutConfig, ModelConfig, ParallelConfig, SftConfig
from spmdrl.config.plan import Plan, plan_run
from spmdrl.data.stream import PromptStream, make_held_out, make_training_stream
from spmdrl.data.tokenizer import load_tokenizer, stop_token_ids
from spmdrl.learn.optim import optimizer_problems
from spmdrl.learn.policy_loss import policy_loss_problems
from spmdrl.memory.device import MemoryPlan
from spmdrl.memory.phases import PhaseMemory
from spmdrl.model import invariant, sglang_operators
from spmdrl.model.attention import choose_kernel
from spmdrl.model.load import (
    check_weight_files,
    compute_dtype,
    load_critic_config,
    load_model_config,
    model_without_memory,
    parallel_model_problems,
)
from spmdrl.model.operators import kernel_of_run
from spmdrl.preflight.flops import with_costs
from spmdrl.preflight.forecast import Model, Prediction, predict_here
from spmdrl.rollout.start import check_engine
from spmdrl.step.advantages import advantage_problems
from spmdrl.step.export import refuse_overwriting
from spmdrl.types import Prompt, UserError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What the user's settings point at."""

    plan: Plan
    model_config: Any  # transformers' config of the model directory
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: frozenset[int]
    prompts: PromptStream
    held_out: list[Prompt]  # of all ranks
    # Of the device of a rank that trains; None for a run without an engine, and where there is no device.
    memory: MemoryPlan | None
    phases: list[PhaseMemory]  # what they will hold


class _Problems:
    """Collects what is wrong, so that the user reads all of it at once."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def attempt(self, step: Callable[[], T]) -> T | None:
        """The step's result, or None when it had a problem."""
        try:
            return step()
        except UserError as error:
            self.found += str(error).splitlines()
            return None

    def refuse(self) -> None:
        """Raise UserError if there were any."""
        if self.found:
            raise UserError("\n".join(dict.fromkeys(self.found)))


def open_inputs(cfg: Config | SftConfig, *, num_ranks: int) -> Inputs:
    """Open model config, tokenizer and data, and derive the plan. Raises UserError with every problem found."""
    problems = _Problems()
    plan = problems.attempt(lambda: plan_run(cfg, num_ranks=num_ranks))
    model_config = problems.attempt(lambda: load_model_config(cfg.model))
    problems.attempt(lambda: check_weight_files(cfg.model.path))
    critic_config = problems.attempt(lambda: _critic_config(cfg, model_config))
    problems.found += optimizer_problems(cfg.optim)
    if isinstance(cfg, Config):
        problems.found += [*policy_loss_problems(cfg), *advantage_problems(cfg)]
    problems.attempt(lambda: _check_attention(cfg.model))
    problems.attempt(lambda: refuse_overwriting(cfg.model.path, Path(cfg.run.dir, cfg.run.name, "hf")))
    if model_config is None:
        problems.refuse()
    if plan is not None:
        plan = planned = with_costs(plan, cfg.pack, cfg.model, model_config)
        problems.attempt(lambda: _check_length(planned, model_config))
        if critic_config is not None:
            problems.attempt(lambda: _check_length(planned, critic_config))
    problems.attempt(lambda: _check_parallel(cfg.model, model_config, cfg.parallel))
    if isinstance(cfg, Config) and critic_config is not None:
        critic_model = cfg.critic_model
        problems.attempt(lambda: _check_parallel(critic_model, critic_config, cfg.parallel))
    problems.attempt(lambda: _check_true_on_policy(cfg, model_config))
    tokenizer = problems.attempt(lambda: load_tokenizer(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code))
    if tokenizer is None:
        problems.refuse()
    prediction = problems.attempt(lambda: _predict(cfg, model_config, critic_config, num_ranks))
    problems.attempt(lambda: _check_vocabulary(f'model.path = "{cfg.model.path}"', model_config, tokenizer))
    if isinstance(cfg, Config) and critic_config is not None:
        of_critic = f'critic.path = "{cfg.critic_model.path}"'
        problems.attempt(lambda: _check_vocabulary(of_critic, critic_config, tokenizer))
    stops = problems.attempt(lambda: _stop_tokens(cfg, tokenizer))
    problems.attempt(lambda: _check_engine(cfg, model_config, stops, num_ranks))
    kept_apart = cfg.held_out if isinstance(cfg, SftConfig) else cfg.eval
    prompts = problems.attempt(
        lambda: make_training_stream(cfg.data, kept_apart, seed=cfg.run.seed, tokenizer=tokenizer)
    )
    held_out = problems.attempt(lambda: _held_out(cfg, kept_apart, tokenizer))
    if prompts is not None:
        problems.attempt(lambda: prompts.take(0, 1))
    problems.refuse()
    assert plan and stops and prompts and held_out is not None and prediction
    memory = prediction.plan if prediction.rank.on_gpu else None
    return Inputs(plan, model_config, tokenizer, stops, prompts, held_out, memory, prediction.phases)


@dataclass(frozen=True, slots=True)
class HeldOut:
    """What an evaluation needs, without a plan to train."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: frozenset[int]
    prompts: list[Prompt]


def open_held_out(cfg: Config) -> HeldOut:
    """Open what the evaluation of a run's model reads. Raises UserError when something is not there."""
    tokenizer = load_tokenizer(cfg.model.path, trust_remote_code=cfg.model.trust_remote_code)
    return HeldOut(tokenizer, _stop_tokens(cfg, tokenizer), _held_out(cfg, cfg.eval, tokenizer))


def _critic_config(cfg: Config | SftConfig, model_config: Any) -> Any:
    """transformers' config of the critic, if one is trained."""
    if isinstance(cfg, SftConfig) or not cfg.has_critic:
        return None
    return load_critic_config(cfg.critic_model) if cfg.critic.path else model_config


def _check_parallel(cfg: ModelConfig, model_config: Any, parallel: ParallelConfig) -> None:
    if sentences := list(parallel_model_problems(model_config, cfg, parallel)):
        raise UserError("\n".join(sentences))


def _check_attention(cfg: ModelConfig) -> None:
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    choose_kernel(cfg.attention, device_type, compute_dtype(cfg.compute_dtype, device_type))


def _check_engine(cfg: Config | SftConfig, model_config: Any, stops: frozenset[int] | None, num_ranks: int) -> None:
    if isinstance(cfg, Config):
        device_type = "cuda" if torch.cuda.is_available() else "cpu"
        check_engine(cfg, model_config, stops, num_ranks=num_ranks, device_type=device_type)


def _check_true_on_policy(cfg: Config | SftConfig, model_config: Any) -> None:
    """Raise UserError when engine and trainer were asked for the same bits and could not have them here."""
    if isinstance(cfg, SftConfig) or not cfg.true_on_policy:
        return
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = compute_dtype(cfg.model.compute_dtype, device_type)
    kernel = kernel_of_run(cfg, device_type, dtype)
    if kernel == "invariant":
        sentences = list(invariant.model_problems(model_config))
        if not sentences:
            sentences = list(invariant.machine_problems(model_without_memory(model_config, cfg.model), dtype))
    else:
        backend = kernel.removeprefix("sglang_")
        sentences = [
            *sglang_operators.model_problems(model_config),
            *sglang_operators.attention_problems(model_config, backend),
            *sglang_operators.device_problems(backend),
        ]
    if sentences:
        raise UserError("\n".join(sentences))


def _check_length(plan: Plan, model_config: Any) -> None:
    limit = getattr(model_config, "max_position_embeddings", None)
    longest = max(plan.max_sequence_tokens, plan.max_eval_sequence_tokens)
    if limit is not None and longest > limit:
        raise UserError(
            f"a prompt and its response may have {longest} tokens, but the model was made for {limit} "
            "(max_position_embeddings); lower data.max_prompt_tokens or max_response_tokens"
        )


def _predict(cfg: Config | SftConfig, model_config: Any, critic_config: Any, num_ranks: int) -> Prediction:
    """What each phase will hold. Raises UserError where that is more than the device has, whatever it computes."""
    critic = None
    if isinstance(cfg, Config) and critic_config is not None:
        critic = Model.read_critic(critic_config, cfg.critic_model)
    prediction = predict_here(cfg, Model.read(model_config, cfg.model, critic=critic), num_ranks=num_ranks)
    if prediction.rank.on_gpu and prediction.problems:
        raise UserError("\n".join(prediction.problems))
    return prediction


def _check_vocabulary(setting: str, model_config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if largest >= model_config.vocab_size:
        raise UserError(
            f"{setting}: the tokenizer makes token ids up to {largest}, but the model has only "
            f"{model_config.vocab_size} of them (vocab_size); the tokenizer belongs to another model"
        )


def _stop_tokens(cfg: Config | SftConfig, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    if isinstance(cfg, Config) and cfg.rollout.stop_token_ids:
        unknown = [token for token in cfg.rollout.stop_token_ids if not 0 <= token < len(tokenizer)]
        if unknown:
            raise UserError(
                f"rollout.stop_token_ids: the tokenizer has ids 0 to {len(tokenizer) - 1}, not {unknown[0]}"
            )
        return frozenset(cfg.rollout.stop_token_ids)
    return stop_token_ids(tokenizer, cfg.model.path)


def _held_out(
    cfg: Config | SftConfig, kept_apart: HeldOutConfig | None, tokenizer: PreTrainedTokenizerBase
) -> list[Prompt]:
    if kept_apart is None:
        return []
    return make_held_out(cfg.data, kept_apart, tokenizer=tokenizer)
