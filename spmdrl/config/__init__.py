"""What the user wrote: typed, frozen, never corrected. What it implies is computed in `plan.py`.

The attribute docstrings below are the configuration reference (`docs/configuration.md` is generated from them).
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from spmdrl.algo.advantage import ESTIMATORS, UNKNOWN_ESTIMATOR
from spmdrl.algo.formula import Estimator, LossKind
from spmdrl.algo.policy_losses import POLICY_LOSSES
from spmdrl.types import UserError

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
BelowOne = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """A table of the TOML file: unknown keys are errors, values are not converted, nothing changes after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True)


SectionT = TypeVar("SectionT", bound=Section)


class RunConfig(Section):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
    """The run's folder is `dir/name`; letters, digits, `.`, `_` and `-`."""
    dir: str = "runs"
    """Where run folders are made."""
    num_steps: Count
    """Steps to train: rollout, reward, pack, update, refit, once around."""
    seed: int = 0
    """Every random number of the run follows from this one and from what it is for, never from a rank."""
    deterministic: bool = False
    """Deterministic kernels and a fixed assignment of prompts to engines and of work to batches."""
    patience_minutes: Count = 180
    """A rank that has waited so long for the others ends the run, although they get on: longer than the longest rollout
    phase or evaluation, in which ranks that share an engine wait for the one that leads it."""
    stop_before: Annotated[datetime, Field(strict=False)] | None = None
    """Save and stop in time for this, such as `"2026-11-21T08:00"`, in local time unless it names a zone: a step is
    not begun when one as long as the longest so far would end later, and one that has begun stops at the next edge
    between two phases when this time has come. See `docs/faults.md`."""
    threads_per_rank: Annotated[int, Field(ge=0)] = 0
    """CPU threads of each rank; 0 shares the machine's cores among its ranks."""


class ModelConfig(Section):
    path: str
    """A Hugging Face causal language model directory: config, safetensors weights, tokenizer."""
    compute_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Forward and backward; master weights stay float32. `auto` is float32 on a CPU, bfloat16 on CUDA.
    float16 scales the loss dynamically."""
    attention: Literal["auto", "sdpa", "varlen", "flash_attn_2", "flash_attn_3"] = "auto"
    """Packed attention: `sdpa` runs one call per run of equal lengths and works everywhere; `varlen` is torch's own
    CUDA kernel; `flash_attn_*` need that package. `auto` is `varlen` on CUDA, or under
    context parallelism ring_flash_attn where that is installed, and `sdpa` on a CPU."""
    gradient_checkpointing: Literal["none", "full", "selective"] = "none"
    """What the backward pass computes again instead of keeping it: nothing; whole decoder layers; or `selective`, of a
    layer only norms, rotary embeddings and activation functions, so that no matrix product runs twice."""
    checkpoint_every_layers: Count = 1
    """Apply `gradient_checkpointing` to the first of every so many layers; the others keep their activations."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after forward and gather them again in backward; `false` keeps all layers in
    between."""
    prefetch_layers: Count = 1
    """Layers that are gathered ahead of the one that computes. More hides slower links and holds more weights."""
    logits_chunk_tokens: Count = 2048
    """Most tokens whose logits exist at the same time; a tile of them covers less of the vocabulary the more tokens it
    has, so that its memory is bounded."""
    cpu_offload: bool = False
    """Keep parameters, gradients and optimizer state of the policy in host memory between uses."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model directory."""

    @model_validator(mode="after")
    def _something_is_checkpointed(self) -> ModelConfig:
        if self.gradient_checkpointing == "none" and self.checkpoint_every_layers > 1:
            raise ValueError(
                f"checkpoint_every_layers = {self.checkpoint_every_layers} has no meaning with "
                'gradient_checkpointing = "none", where no layer is recomputed; set that to "full" or "selective", or '
                "remove checkpoint_every_layers"
            )
        return self


class ParallelConfig(Section):
    dp_replicate: Count = 1
    """Copies of the policy, each sharded over the other ranks that train; gradients are summed over them (HSDP)."""
    dp_shard: Count | None = None
    """Ranks that share a copy and work on different sequences (FSDP). Unset: as many as there are, after the other
    settings."""
    cp: Count = 1
    """Context parallelism: neighbours that each compute a chunk of the same packed tokens. A copy is sharded over them
    too."""
    cp_style: Literal["all_gather", "ulysses"] = "all_gather"
    """`all_gather` gathers keys and values, a few heads at a time; `ulysses` exchanges tokens for heads, which cp must
    divide. See `docs/context.md`."""
    tp: Count = 1
    """Tensor parallelism: neighbours that each hold a part of every layer and compute the same tokens."""
    ep: Count = 1
    """Expert parallelism: the experts of a layer are dealt to so many neighbours, and tokens travel to them. It
    regroups the ranks of a copy and needs none of its own."""

    @model_validator(mode="after")
    def _style_belongs_to_context(self) -> ParallelConfig:
        if self.cp == 1 and self.cp_style != "all_gather":
            raise ValueError(f'cp_style = "{self.cp_style}" has no meaning with cp = 1; set cp above 1, or remove it')
        return self


class FileData(Section):
    kind: Literal["jsonl", "parquet"]
    """File format."""
    path: str
    """The file; relative paths are relative to the working directory."""
    prompt_column: str = "prompt"
    """A string, or a list of chat messages (`{"role": ..., "content": ...}`)."""
    answer_column: str = "answer"
    """The reference answer that rewards compare with; "" when the data has none."""
    response_column: str | None = None
    """The response to imitate, for supervised fine-tuning."""
    task: str = "default"
    """Name of this source in per-task metrics."""
    weight: Positive = 1.0
    """Share of prompts drawn from this source, relative to the other sources."""


class ReasoningGymData(Section):
    kind: Literal["reasoning_gym"]
    """Procedurally generated tasks of the reasoning-gym package."""
    task: str
    """Name of the reasoning-gym data set, such as `chain_sum`."""
    params: dict[str, Any] = {}
    """Parameters of that data set, such as `{ min_terms = 2, max_terms = 3 }`."""
    prompt_template: str = "{question}"
    """The prompt; `{question}` and every key of the item's metadata can be used, e.g. `{metadata[word]}`."""
    weight: Positive = 1.0
    """Share of prompts drawn from this source, relative to the other sources."""


DataSource = Annotated[FileData | ReasoningGymData, Field(discriminator="kind")]


class DataConfig(Section):
    sources: Annotated[tuple[DataSource, ...], Field(strict=False, min_length=1)]
    """Where training prompts come from."""
    system_prompt: str | None = None
    """Put before string prompts; needs a tokenizer with a chat template."""
    chat_template: Literal["auto", "never"] = "auto"
    """`auto` applies the tokenizer's chat template when it has one; `never` uses the prompt as it is."""
    max_prompt_tokens: Count
    """Longer prompts are an error that names the row, or are dropped and counted: see `overlong`."""
    overlong: Literal["error", "drop"] = "error"
    """What to do with a prompt longer than `max_prompt_tokens`."""


class RolloutConfig(Section):
    engine: Literal["torch", "sglang"] = "torch"
    """`torch` is the embedded continuous-batching engine; it runs wherever torch does. `sglang` is SGLang, started by
    the ranks on their own devices; `make setup-sglang` installs it."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """`colocated`: every rank trains and holds an engine, in turns. `disaggregated`: the last `num_ranks` ranks hold
    engines and the others train, at the same time. See `docs/disaggregated.md`."""
    num_ranks: Count | None = None
    """`disaggregated` only, and required there: ranks that hold engines."""
    prompts_per_step: Count
    """Prompts drawn each step, over all ranks."""
    group_size: Count
    """Rollouts per prompt. Estimators that compare a group's rewards with each other need 2 or more: see
    `advantage.estimator`."""
    max_response_tokens: Count
    """Sampling stops there with finish reason `length`."""
    temperature: Positive = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    stop_token_ids: Annotated[tuple[int, ...], Field(strict=False)] = ()
    """Tokens that end a response; empty means the tokenizer's and the generation config's end-of-sequence tokens."""
    max_running: Count = 256
    """Sequences decoded together by one engine."""
    tp_size: Count = 1
    """Ranks that share one SGLang engine, each with a part of its weights."""
    memory_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] = 0.7
    """Weights and KV cache of an SGLang engine, as a share of the device memory that is free when it starts. The
    `torch` engine takes what it needs."""
    max_kv_tokens: Count | None = None
    """Tokens that an SGLang engine's KV cache holds. Unset: what `memory_fraction` leaves room for on a GPU, and on a
    CPU `max_running` sequences of the greatest length."""
    chunked_prefill_tokens: Count | None = None
    """An SGLang engine cuts longer prompts into chunks of so many tokens. Unset: its own choice."""
    attention_backend: str | None = None
    """Attention kernels of an SGLang engine, such as `fa3` or `triton`. Unset: its own choice."""
    cuda_graphs: bool = True
    """Whether an SGLang engine captures its decode steps."""
    restart_engine: bool = False
    """Start an SGLang engine that has died again, give it the weights, and repeat what it was working on. Otherwise its
    death ends the run."""
    sglang: dict[str, Any] = {}
    """Other arguments of SGLang's engine, by their own names (`[rollout.sglang]`)."""

    dynamic_sampling: bool = False
    """Drop prompt groups whose rewards are all equal, which teach nothing, and draw others in their place."""
    max_draw_ratio: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 4.0
    """`dynamic_sampling` only: at most this times `prompts_per_step` groups are drawn in a step. A step that has not
    found enough by then trains on those it has, and says so."""
    oversample_fraction: Fraction = 0.0
    """Open up to this fraction more prompt groups than a step wants; it ends as soon as it has enough, without waiting
    for the slowest. What is not finished then is thrown away, or goes on in the next step: see `partial`."""
    partial: bool = False
    """`oversample_fraction` only: rollouts that a step has not finished go on in the next from the tokens they have."""
    max_staleness: Annotated[int, Field(ge=0)] = 1
    """`disaggregated` and `partial` only: steps, at most, between the weights that sampled a token and those that are
    updated with it. `disaggregated` engines may be so many steps ahead; with 0 the two sides wait for each other.
    Under `partial`, a group with older tokens is sampled again from its prompt."""

    @model_validator(mode="after")
    def _settings_belong_to_the_engine(self) -> RolloutConfig:
        for setting in _SGLANG_SETTINGS:
            if self.engine == "torch" and getattr(self, setting) != type(self).model_fields[setting].default:
                raise ValueError(f'{setting} has no meaning for engine = "torch"; remove it')
        return self

    @model_validator(mode="after")
    def _settings_belong_together(self) -> RolloutConfig:
        def is_set(name: str) -> bool:
            return getattr(self, name) != type(self).model_fields[name].default

        if is_set("max_draw_ratio") and not self.dynamic_sampling:
            raise ValueError("max_draw_ratio has no meaning without dynamic_sampling = true; set both or remove it")
        if self.partial and not self.oversample_fraction:
            raise ValueError(
                "partial = true has no meaning with oversample_fraction = 0, where every rollout is finished in its "
                "step; set oversample_fraction above 0 or remove partial"
            )
        if is_set("max_staleness") and not self.partial and self.placement == "colocated":
            raise ValueError(
                'max_staleness has no meaning without partial = true or placement = "disaggregated"; set one of them '
                "or remove it"
            )
        if (self.num_ranks is not None) != (self.placement == "disaggregated"):
            raise ValueError(
                f'placement = "{self.placement}" with num_ranks {self.num_ranks or "not set"}: num_ranks is the number '
                'of ranks that hold engines when placement = "disaggregated"; set both or neither'
            )
        if self.restart_engine and self.placement == "disaggregated":
            raise ValueError(
                'restart_engine = true needs placement = "colocated": disaggregated engines get their weights only '
                "between steps, so that the death of one ends the run; remove it"
            )
        if self.num_ranks is not None and self.num_ranks % self.tp_size:
            raise ValueError(
                f"num_ranks = {self.num_ranks} cannot be cut into engines of tp_size = {self.tp_size}; set num_ranks "
                f"to {math.ceil(self.num_ranks / self.tp_size) * self.tp_size}"
            )
        if self.dynamic_sampling and self.max_draw_ratio < 1 + self.oversample_fraction:
            raise ValueError(
                f"max_draw_ratio = {self.max_draw_ratio:g} does not allow the {1 + self.oversample_fraction:g} times "
                "prompts_per_step groups that oversample_fraction opens; raise it"
            )
        return self


EXACT_BACKENDS = ("fa3", "triton")  # attention of SGLang whose kernels the trainer can use; the first is the default
# Arguments of SGLang that have nothing to do with numbers.
_SGLANG_KEEPS_EXACT = {
    "disable_radix_cache",
    "grammar_backend",
    "log_level",
    "schedule_conservativeness",
    "schedule_policy",
}
_SGLANG_SETTINGS = (
    "tp_size",
    "memory_fraction",
    "max_kv_tokens",
    "chunked_prefill_tokens",
    "attention_backend",
    "cuda_graphs",
    "restart_engine",
    "sglang",
)


class RefitConfig(Section):
    bucket_bytes: Annotated[int, Field(ge=1024)] = 256 * 2**20
    """Weights that are gathered and handed to the engine together; there are two buffers of this size."""
    transport: Literal["auto", "cuda_ipc", "shared_memory"] = "auto"
    """How SGLang's processes get at the buckets: `cuda_ipc` leaves them on the device, `shared_memory` takes them
    through the host. `auto` is `cuda_ipc` where that works, and says so where it does not. `disaggregated` engines are
    sent the buckets instead, by NCCL, or by gloo on a CPU."""
    verify: Literal["every", "first"] | Count = "every"
    """After which refits the engine's weights are compared with the trainer's by digest: every one, the first of a
    launch, or every so many. A difference stops the run and names the tensors."""
    probe_prompts: Annotated[int, Field(ge=0)] = 2
    """Each engine also answers so many prompts, the same in every step, and the trainer scores the answers with the
    same weights: `refit/probe_...` is the mismatch that is left when nothing is stale."""


class OffloadConfig(Section):
    trainer: Literal["none", "optimizer", "all"] = "none"
    """What the trainer moves to pinned host memory while the engine samples: nothing, the optimizer's state, or that
    and the weights and gradients. See `docs/memory.md`."""
    engine: Annotated[tuple[Literal["kv_cache", "weights", "cuda_graph"], ...], Field(strict=False)] = ("kv_cache",)
    """What the engine gives back while the trainer works. Weights come back by a refit; the `torch` engine has no
    CUDA graphs."""


class ExactReward(Section):
    kind: Literal["exact"]
    """1 when the response, stripped of white space, is the reference answer."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of this term in the reward."""


class MathReward(Section):
    kind: Literal["math"]
    """1 when math-verify finds the response's final answer equal to the reference answer."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of this term in the reward."""


class ReasoningGymReward(Section):
    kind: Literal["reasoning_gym"]
    """The task's own scorer, usually between 0 and 1, of the last `<answer>` tag or else of the stripped response."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of this term in the reward."""


class FunctionReward(Section):
    kind: Literal["function"]
    """A function of yours, sync or async, called with the keywords prompt, response, answer and metadata."""
    function: str
    """`package.module:function` or `path/to/file.py:function`."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of this term in the reward."""


class CodeReward(Section):
    kind: Literal["code"]
    """The response's last fenced code block is a Python program that is run with the prompt's tests, in the sandbox.
    See `docs/data.md`."""
    tests: str = "tests"
    """The column that holds a prompt's tests."""
    score: Literal["share", "all"] = "share"
    """The share of tests that pass, or 1 when all of them do."""
    tests_timeout_s: Positive = 5.0
    """Time limit for all tests of a response; those that it leaves out have failed. Below `reward.timeout_s`."""
    weight: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Factor of this term in the reward."""


RewardTerm = Annotated[
    ExactReward | MathReward | ReasoningGymReward | FunctionReward | CodeReward, Field(discriminator="kind")
]


class SandboxConfig(Section):
    mode: Literal["auto", "strict", "off"] = "auto"
    """`auto`: no network, no environment variables, no files to write but in a directory of their own, no other
    processes in reach, nothing printed; what the machine cannot keep from them is told. `strict` refuses to start
    there. `off`: whatever you may do, for functions of yours that need it. See `docs/security.md`."""
    max_memory_gib: Positive = 8.0
    """Address space of each process."""
    max_processes: Count = 64
    """Processes and threads of one reward process, itself included. Linux does not hold root to it."""
    max_file_gib: Positive = 0.125
    """Size of each file, and of the directory of a reward process."""
    max_open_files: Annotated[int, Field(ge=16)] = 256
    """Files that a process has open."""

    @model_validator(mode="after")
    def _off_has_no_limits(self) -> SandboxConfig:
        for setting in ("max_memory_gib", "max_processes", "max_file_gib", "max_open_files"):
            if self.mode == "off" and getattr(self, setting) != type(self).model_fields[setting].default:
                raise ValueError(f'{setting} has no meaning with mode = "off"; remove one of them')
        return self


class RewardConfig(Section):
    terms: Annotated[tuple[RewardTerm, ...], Field(strict=False, min_length=1)]
    """The reward is the weighted sum of these; at least one weight is positive."""
    timeout_s: Positive = 10.0
    """Time limit for one rollout; past it the worker is killed, the reward is 0 and the failure is counted."""
    num_workers: Count = 1
    """Reward processes of each rank."""
    sandbox: SandboxConfig = SandboxConfig()
    """What these processes may do."""
    overlong_tokens: Annotated[int, Field(ge=0)] = 0
    """Training only: over the last so many tokens before `rollout.max_response_tokens` the reward falls linearly, by
    `overlong_penalty` at the limit (DAPO). 0: it does not."""
    overlong_penalty: Positive | None = None
    """`overlong_tokens` only: what a response that reaches the limit loses. Unset: 1."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence to the reference model in the reward, token by token; above 0 the reference model is
    loaded, and old log-probabilities are taken before every step's updates."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """Estimator of that divergence. In the reward it has no gradient, and k1 is the unbiased one."""
    kl_target_nats: Positive | None = None
    """`kl_coef` only: let it follow this mean divergence per response token. Unset: it is fixed."""
    kl_horizon: Count | None = None
    """`kl_target_nats` only: rollouts over which the coefficient adapts. Unset: 10000."""

    @model_validator(mode="after")
    def _settings_belong_to_each_other(self) -> RewardConfig:
        for setting, other, is_off in (
            ("overlong_penalty", "overlong_tokens", self.overlong_tokens == 0),
            ("kl_estimator", "kl_coef", self.kl_coef == 0),
            ("kl_target_nats", "kl_coef", self.kl_coef == 0),
            ("kl_horizon", "kl_target_nats", self.kl_target_nats is None),
        ):
            if is_off and getattr(self, setting) != type(self).model_fields[setting].default:
                raise ValueError(f"{setting} has no meaning without {other}; set both or remove it")
        return self

    @model_validator(mode="after")
    def _code_is_contained(self) -> RewardConfig:
        for term in self.terms:
            if isinstance(term, CodeReward) and self.sandbox.mode == "off":
                raise ValueError(
                    'the term of kind "code" runs what the model wrote, and sandbox.mode = "off" would let that do '
                    'anything; set it to "auto" or "strict"'
                )
            if isinstance(term, CodeReward) and term.tests_timeout_s >= self.timeout_s:
                raise ValueError(
                    f"tests_timeout_s = {term.tests_timeout_s:g} must be below timeout_s = {self.timeout_s:g}, which "
                    "also covers what is done before and after the tests; raise timeout_s or lower tests_timeout_s"
                )
        return self

    @model_validator(mode="after")
    def _something_is_rewarded(self) -> RewardConfig:
        if not any(term.weight > 0 for term in self.terms):
            raise ValueError("no term has a positive weight, so nothing would be rewarded")
        return self


class AdvantageConfig(Section):
    estimator: str = "grpo"
    """What a reward is compared with: `grpo`, `rloo`, `reinforce_plus_plus`, `reinforce_plus_plus_baseline`, `gae`,
    `opo`, `remax` (for which one more response a prompt is sampled, greedily) or `pass_at_k`, see `docs/algorithms.md`;
    or a function of yours, `package.module:function` or `path/file.py:function`, see `docs/extending.md`."""
    divide_by_std: bool | None = None
    """`grpo` only: divide by the group's standard deviation, as it does unless this is false (Dr.GRPO)."""
    discount: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    """`reinforce_plus_plus` and `gae` only: of a later token's reward, for each token in between. Unset: 1."""
    gae_lambda: Fraction | None = None
    """`gae` only: 1 trusts what was rewarded, 0 what the critic expects one token later. Unset: 0.95."""
    k: Count | None = None
    """`pass_at_k` only: how many rollouts may try, fewer than `rollout.group_size`. Unset: 4."""
    params: dict[str, Any] = {}
    """Keyword arguments for a function of yours."""
    whiten: bool | None = None
    """Make advantages (A - mean) / (std + 1e-6), mean and standard deviation (the population's) being those of the
    whole step, where a rollout counts once per response token. Unset: as the estimator's source does, which is for
    `gae` and the two `reinforce_plus_plus`."""

    @property
    def is_users(self) -> bool:
        """Whether the estimator is a function of the user's."""
        return ":" in self.estimator

    @property
    def formula(self) -> Estimator:
        """The estimator; of a function of the user's only what is known before it is loaded."""
        return ESTIMATORS.get(self.estimator, UNKNOWN_ESTIMATOR)

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments of the estimator's function."""
        return dict(self.params) if self.is_users else _with_defaults(self, self.formula.settings)

    @property
    def compares_with_greedy(self) -> bool:
        """Whether each prompt group has a greedy response besides, which is not trained on."""
        return "greedy_rewards" in self.formula.needs

    @property
    def whitens(self) -> bool:
        """Whether advantages are whitened over the global batch."""
        return self.formula.whiten if self.whiten is None else self.whiten

    @model_validator(mode="after")
    def _settings_belong_to_the_estimator(self) -> AdvantageConfig:
        if self.estimator not in ESTIMATORS and not self.is_users:
            known = ", ".join(f'"{name}"' for name in ESTIMATORS)
            raise ValueError(
                f'estimator = "{self.estimator}" is not known; use one of {known}, "package.module:function" or '
                '"path/file.py:function"'
            )
        settings = {name for estimator in ESTIMATORS.values() for name in estimator.settings}
        used = ["params"] if self.is_users else self.formula.settings
        _refuse_settings_of_others(self, settings | {"params"}, used, f'estimator = "{self.estimator}"')
        return self


class LossConfig(Section):
    kind: str = "ppo"
    """`ppo`, `gspo`, `cispo`, `gmpo`, `sapo`, `clip_cov` or `kl_cov`, see `docs/algorithms.md`; or a function of yours,
    `package.module:function` or `path/file.py:function`, see `docs/extending.md`."""
    clip_low: NonNegative | None = None
    """How far the ratio may fall: to 1 - clip_low, or by clip_low nats under `gmpo`. Unset: what `kind` has by
    default, as of all settings that belong to one."""
    clip_high: NonNegative | None = None
    """How far the ratio may rise: to 1 + clip_high, or by clip_high nats under `gmpo`."""
    dual_clip: Annotated[float, Field(gt=1.0, allow_inf_nan=False)] | None = None
    """`ppo` only: for negative advantages the loss is bounded by this times -advantage."""
    tau_positive: Positive | None = None
    """`sapo` only: how fast the gate closes for positive advantages."""
    tau_negative: Positive | None = None
    """`sapo` only: how fast it closes for the others."""
    cov_fraction: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """`clip_cov` and `kl_cov` only: share of the mini-batch's tokens that are treated apart, at least one."""
    cov_low: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """`clip_cov` only: the covariance above which tokens may be left out."""
    cov_high: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """`clip_cov` only: the covariance below which they may."""
    cov_kl_coef: Positive | None = None
    """`kl_cov` only: weight of the divergence from the policy that sampled, at those tokens."""
    params: dict[str, Any] = {}
    """Keyword arguments for a function of yours."""
    aggregation: Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant"] = "token_mean"
    """What the per-token losses are divided by, always over the global batch: see `docs/losses.md`."""
    kl_coef: NonNegative = 0.0
    """Weight of the KL divergence to the reference model in the loss; above 0 the reference model is loaded."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of that divergence. k1 has no expected gradient on-policy and also needs `allow_k1_loss`."""
    allow_k1_loss: bool = False
    """Use k1 as a loss although its expected on-policy gradient is zero."""
    entropy_coef: Annotated[float, Field(allow_inf_nan=False)] = 0.0
    """Weight of the entropy bonus; above 0 favours entropy."""
    entropy_target_nats: Positive | None = None
    """Raise `entropy_coef` after each step whose mean entropy was below this, and lower it, not below 0, after the
    others. Unset: it is fixed."""
    entropy_coef_change: Positive | None = None
    """`entropy_target_nats` only: by how much. Unset: 0.005."""
    updates_per_step: Count = 1
    """Optimizer steps on each step's rollouts, each on its own share of the prompts."""
    stop_kl_nats: Positive | None = None
    """`updates_per_step` above 1 only: leave out the rest of a step's updates once the mean k3 estimate of KL(policy
    that sampled || policy) over a mini-batch is above this. Unset: none is left out."""

    @property
    def settings(self) -> dict[str, Any]:
        """The keyword arguments of the loss function."""
        return dict(self.params) if self.formula is None else _with_defaults(self, self.formula.settings)

    @property
    def choice(self) -> dict[str, Any]:
        """How tokens are chosen over the whole mini-batch; empty when they are not."""
        return {} if self.formula is None else _with_defaults(self, self.formula.choice)

    @property
    def is_users(self) -> bool:
        """Whether the loss is a function of the user's."""
        return ":" in self.kind

    @property
    def formula(self) -> LossKind | None:
        """What is known of the loss; nothing when it is the user's."""
        return None if self.is_users else POLICY_LOSSES[self.kind]

    @model_validator(mode="after")
    def _settings_belong_to_the_kind(self) -> LossConfig:
        if self.kind not in POLICY_LOSSES and not self.is_users:
            known = ", ".join(f'"{name}"' for name in POLICY_LOSSES)
            raise ValueError(
                f'kind = "{self.kind}" is not known; use one of {known}, "package.module:function" or '
                '"path/file.py:function"'
            )
        settings = {name for kind in POLICY_LOSSES.values() for name in (*kind.settings, *kind.choice)}
        used = ["params"] if self.formula is None else [*self.formula.settings, *self.formula.choice]
        _refuse_settings_of_others(self, settings | {"params"}, used, f'kind = "{self.kind}"')
        return self

    @model_validator(mode="after")
    def _there_is_drift_to_look_at(self) -> LossConfig:
        if self.updates_per_step > 1:
            return self
        never = "the policy has not moved before a step's only update"
        if self.stop_kl_nats is not None:
            raise ValueError(f"stop_kl_nats has no meaning with updates_per_step = 1: {never}; remove it")
        if self.formula is not None and self.formula.off_policy_only:
            raise ValueError(
                f'kind = "{self.kind}" has nothing to hold back with updates_per_step = 1: {never}; raise '
                "updates_per_step or use another kind"
            )
        return self

    @model_validator(mode="after")
    def _entropy_has_a_target_to_follow(self) -> LossConfig:
        if self.entropy_coef_change is not None and self.entropy_target_nats is None:
            raise ValueError("entropy_coef_change has no meaning without entropy_target_nats; set both or remove it")
        if self.entropy_target_nats is not None and self.entropy_coef < 0:
            raise ValueError(
                f"entropy_coef = {self.entropy_coef} lowers the entropy and entropy_target_nats raises it; set "
                "entropy_coef to 0 or more, where the coefficient starts"
            )
        return self

    @model_validator(mode="after")
    def _covariances_have_room(self) -> LossConfig:
        if self.kind == "clip_cov" and self.choice["cov_low"] >= self.choice["cov_high"]:
            raise ValueError(
                f"cov_low = {self.choice['cov_low']:g} leaves no covariance below cov_high = "
                f"{self.choice['cov_high']:g}; set it lower"
            )
        return self

    @model_validator(mode="after")
    def _k1_is_asked_for_by_name(self) -> LossConfig:
        if self.kl_coef > 0 and self.kl_estimator == "k1" and not self.allow_k1_loss:
            raise ValueError(
                'kl_estimator = "k1" has zero expected gradient on-policy, so as a loss it only adds noise; '
                'set kl_estimator = "k3" (or "k2"), or allow_k1_loss = true if that is what you want'
            )
        return self

    @model_validator(mode="after")
    def _dual_clip_is_beyond_the_clip(self) -> LossConfig:
        if self.dual_clip is not None and self.dual_clip <= 1 + self.settings["clip_high"]:
            raise ValueError(
                f"dual_clip = {self.dual_clip} is not above 1 + clip_high = {1 + self.settings['clip_high']:g}, so it "
                "would undo the clip; set it higher (3 is usual)"
            )
        return self


class CorrectionConfig(Section):
    kind: Literal["none", "tis", "icepop", "mis"] = "none"
    """Weigh the policy loss by exp(o - b), bounded, where trainer and engine disagree: `tis` truncates the weight,
    `icepop` drops tokens whose weight is out of bounds, `mis` does what `mode` says. See `docs/agreement.md`."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Whose weight it is: the token's, the whole response's, or the geometric mean of its tokens'."""
    mode: Literal["truncate", "clip", "mask"] | None = None
    """`mis` only, and required there: weights beyond the bounds become the upper bound (`truncate`), the nearer bound
    (`clip`), or 0 (`mask`)."""
    low: Positive | None = None
    """Lower bound of the weight, where there is one. Unset: 0.5."""
    high: Positive | None = None
    """Upper bound of the weight. Unset: 2, and 5 for `icepop`."""
    batch_normalize: bool = False
    """Divide the weights by their mean over the global batch; takes a pass for the old log-probabilities."""
    reject: Literal["none", "token", "sequence", "geometric"] = "none"
    """Leave out what has a weight of that level beyond `reject_low` and `reject_high`, as if it had not been sampled;
    takes a pass for the old log-probabilities."""
    reject_low: Positive | None = None
    """Unset: 0.5."""
    reject_high: Positive | None = None
    """Unset: 2."""
    veto_below: Annotated[float, Field(gt=0.0, lt=1.0)] | None = None
    """Leave out a rollout when the trainer gives one of its tokens less than this times the engine's probability (1e-4
    is usual); takes a pass for the old log-probabilities."""
    opsm_delta_nats: NonNegative | None = None
    """Off-policy sequence masking: drop rollouts of negative advantage whose mean b - n is above this."""
    old: Literal["trainer", "rollout"] = "trainer"
    """Where the ratio's old log-probabilities are from. `rollout` takes the engine's for them, which saves the pass
    that would compute them; for engines that agree with the trainer."""

    @model_validator(mode="after")
    def _settings_belong_to_the_weights(self) -> CorrectionConfig:
        def refuse(names: Sequence[str], what: str) -> None:
            _refuse_settings_of_others(self, names, (), what)

        if self.kind == "none":
            refuse(("level", "mode", "low", "high", "batch_normalize"), 'kind = "none", which weighs nothing')
        if self.kind == "mis" and self.mode is None:
            raise ValueError('kind = "mis" needs a mode; set it to "truncate", "clip" or "mask"')
        if self.kind != "mis":
            refuse(("mode",), f'kind = "{self.kind}", which has one of its own')
        if self.kind == "icepop":
            refuse(("level",), 'kind = "icepop", which weighs tokens: set kind = "mis" with mode = "mask" instead')
        if self.kind == "tis" or self.mode == "truncate":
            refuse(("low",), "weights that are truncated, which have no lower bound")
        if self.reject == "none":
            refuse(("reject_low", "reject_high"), 'reject = "none"')
        return self

    @model_validator(mode="after")
    def _bounds_hold_one(self) -> CorrectionConfig:
        for name in ("low", "high", "reject_low", "reject_high"):
            bound = getattr(self, name)
            if bound is not None and (bound > 1 if name.endswith("low") else bound < 1):
                side = "1 or less" if name.endswith("low") else "1 or more"
                raise ValueError(
                    f"{name} = {bound:g} is beyond 1, the weight where engine and trainer agree, so it would bind "
                    f"everywhere; set it to {side}"
                )
        return self

    @model_validator(mode="after")
    def _there_is_a_mismatch_to_correct(self) -> CorrectionConfig:
        corrects = {"kind": self.kind != "none", "reject": self.reject != "none", "veto_below": bool(self.veto_below)}
        if self.old == "rollout" and any(corrects.values()):
            name = next(name for name, is_set in corrects.items() if is_set)
            raise ValueError(
                f'old = "rollout" takes what the engine says for what the trainer says, so there is no mismatch left '
                f'for {name} to correct; remove {name}, or set old = "trainer"'
            )
        return self


class MismatchLimits(Section):
    mean_abs_nats: Positive | None = None
    """Highest mean of |o - b| over the loss tokens."""
    max_abs_nats: Positive | None = None
    """Highest |o - b| of any token."""
    k3_nats: Positive | None = None
    """Highest estimate of KL(engine || trainer)."""
    beyond_fraction: Fraction | None = None
    """Highest share of tokens with |o - b| above `mismatch.threshold_nats`."""
    effective_fraction: Fraction | None = None
    """Lowest effective sample size, as a share of the tokens."""


class MismatchConfig(Section):
    threshold_nats: Positive = 0.1
    """Tokens with |o - b| above this are counted in `mismatch/beyond_fraction`."""
    warn: MismatchLimits = MismatchLimits()
    """Say so when a step is beyond one of these."""
    stop: MismatchLimits = MismatchLimits()
    """End the run, before weights change, when an update is beyond one of these."""


class DebugConfig(Section):
    assert_on_policy: bool = False
    """End the run unless, in each step's first update, every ratio is exactly 1 and the KL to the old policy exactly 0.
    With `correction.old = "rollout"` that says that engine and trainer agree to the last bit."""
    save_rollouts: Count | Literal["all"] | None = None
    """Write each step's scored rollouts, and what the step computed from them, to `rollouts/` in the run's folder, and
    keep those of the last so many steps, or `"all"`. `python -m spmdrl.tools.replay` computes a step again: see
    `docs/replay.md`."""
    load_rollouts: str | None = None
    """Train on the rollouts and rewards in this folder, the `rollouts/` of another run, instead of sampling: no engine
    is started."""

    @model_validator(mode="after")
    def _what_was_read_is_not_written_again(self) -> DebugConfig:
        if self.load_rollouts is not None and self.save_rollouts is not None:
            raise ValueError(
                "load_rollouts reads what save_rollouts would write, and it is on the disk already; remove one of them"
            )
        return self


def _with_defaults(section: Section, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The settings named in `defaults`, as they are set or else with their default."""
    given = {name: getattr(section, name) for name in defaults}
    return {name: defaults[name] if value is None else value for name, value in given.items()}


def _refuse_settings_of_others(section: Section, known: Iterable[str], used: Iterable[str], choice: str) -> None:
    """Raises ValueError when one of the `known` settings is set but not among those that `choice` has a use for."""
    for name in sorted(set(known) - set(used)):
        if getattr(section, name) != type(section).model_fields[name].default:
            raise ValueError(f"{name} has no meaning for {choice}; remove it")


class OptimConfig(Section):
    name: str = "adamw"
    """`adamw` (fused where it works), `sgd`, or a class of yours, `package.module:Class` or `path/file.py:Class`."""
    lr: Positive
    """Peak learning rate."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay; not applied to one-dimensional parameters."""
    betas: Annotated[tuple[BelowOne, BelowOne], Field(strict=False)] = (0.9, 0.999)
    """`adamw` only."""
    eps: Positive = 1e-8
    """`adamw` only."""
    momentum: BelowOne = 0.0
    """`sgd` only."""
    params: dict[str, Any] = {}
    """Keyword arguments for a class of yours."""
    max_grad_norm: Positive = 1.0
    """Gradients are scaled down to this global 2-norm."""
    schedule: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Learning rate after warm-up; `wsd` stays at the peak, then falls linearly over the last `decay_steps`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Optimizer steps from 0 to the peak."""
    decay_steps: Annotated[int, Field(ge=0)] = 0
    """`wsd` only: length of the fall."""
    min_lr_fraction: Fraction = 0.0
    """The schedule never goes below this times `lr` after warm-up."""
    state_on_host: bool = False
    """Keep the optimizer's state in pinned host memory and bring it to the device for a block of parameters at a time.
    The optimizer must treat each parameter by itself, as all of torch's but LBFGS do."""

    @model_validator(mode="after")
    def _settings_belong_to_the_optimizer(self) -> OptimConfig:
        used = {"adamw": {"betas", "eps"}, "sgd": {"momentum"}}.get(self.name, {"params"})
        for setting in ("betas", "eps", "momentum", "params"):
            if setting not in used and getattr(self, setting) != type(self).model_fields[setting].default:
                raise ValueError(f'{setting} has no meaning for name = "{self.name}"; remove it')
        return self

    @model_validator(mode="after")
    def _there_is_state_to_keep(self) -> OptimConfig:
        if self.state_on_host and self.name == "sgd" and self.momentum == 0:
            raise ValueError(
                'state_on_host = true has nothing to keep on the host: name = "sgd" with momentum = 0 has no state; '
                "remove it"
            )
        return self

    @model_validator(mode="after")
    def _decay_belongs_to_wsd(self) -> OptimConfig:
        if (self.schedule == "wsd") != (self.decay_steps > 0):
            raise ValueError(
                f'schedule = "{self.schedule}" with decay_steps = {self.decay_steps}: decay_steps is the length of the '
                'fall of schedule = "wsd"; set both or neither'
            )
        return self


class CriticConfig(Section):
    path: str | None = None
    """A directory as `model.path` takes one, of a model for the same tokens; its language head is replaced by a head of
    values, 0 at first. Unset: `model.path`. The other settings of `[model]` hold for both."""
    lr: Positive | None = None
    """Peak learning rate of the critic. Unset: `optim.lr`. Of `[optim]` all that is not set here holds for both."""
    weight_decay: NonNegative | None = None
    """Unset: `optim.weight_decay`."""
    max_grad_norm: Positive | None = None
    """Unset: `optim.max_grad_norm`."""
    clip_value: Annotated[float, Field(gt=0.0)] = 0.2
    """How far, in units of the reward, a step's updates may move a value before its loss stops falling; `inf` clips
    nothing."""
    gae_lambda: Fraction | None = None
    """That of the returns which the critic learns; 1 makes them what was rewarded. Unset: `advantage.gae_lambda`."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps at the start in which the critic learns and the policy stays what it is."""


class PackConfig(Section):
    max_tokens_per_micro_batch: Count | None = None
    """Token budget of one forward pass, never exceeded. With `parallel.cp` that of the ranks that share it: each
    computes 1/cp of it."""
    sequences_per_micro_batch: Count | None = None
    """Static mode: this many sequences a micro-batch, whatever their length."""
    balance: Literal["tokens", "flops"] = "tokens"
    """What ranks and micro-batches get alike: tokens, or the FLOPs of sequences, with attention's that grow by the
    square of their length. See `docs/packing.md`."""

    @model_validator(mode="after")
    def _one_of_two(self) -> PackConfig:
        if (self.max_tokens_per_micro_batch is None) == (self.sequences_per_micro_batch is None):
            raise ValueError(
                "set one of max_tokens_per_micro_batch and sequences_per_micro_batch, and not both; on the command "
                "line the whole table can be replaced: 'pack={ sequences_per_micro_batch = 4 }'"
            )
        return self


class HeldOutConfig(Section):
    sources: Annotated[tuple[DataSource, ...], Field(strict=False, min_length=1)]
    """Where held-out prompts come from. Those chosen are the same for every seed, and are never trained on."""
    num_prompts: Count
    """Held-out prompts, over all sources."""


class EvalConfig(HeldOutConfig):
    every: Annotated[int, Field(ge=0)] = 0
    """Evaluate after every so many steps; always before the first and after the last. 0: only then."""
    samples_per_prompt: Count = 1
    """Responses a prompt; accuracy is their mean."""
    temperature: NonNegative = 0.0
    """0 is greedy."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Nucleus sampling, for evaluation only: training samples come from the whole distribution."""
    max_response_tokens: Count | None = None
    """Unset: `rollout.max_response_tokens`."""


class CheckpointConfig(Section):
    every: Annotated[int, Field(ge=0)] = 0
    """Save after every so many steps, and after the last; 0 saves none, except when the run is told to stop."""
    keep_last: Count = 2
    """Older checkpoints are removed, but for those that the next two settings name."""
    keep_every: Annotated[int, Field(ge=0)] = 0
    """Checkpoints of every so many steps are kept for good; 0: none for that reason."""
    keep_best: Annotated[str, Field(pattern="^eval/")] | None = None
    """The checkpoint in whose step this metric of the evaluation was highest, such as `eval/accuracy`, is kept too."""


class ExportConfig(Section):
    at_end: bool = True
    """Write the final model as a Hugging Face directory, `hf/` in the run's folder."""
    every: Annotated[int, Field(ge=0)] = 0
    """Write the model after every so many steps too, to `hf-` and the step; 0: only at the end."""


class ResumeConfig(Section):
    checkpoint: str = "auto"
    """`auto` goes on from the newest checkpoint in the run's folder, and stops when that cannot be loaded. `never`
    refuses a folder that holds a run. The directory of a checkpoint, of any run: where this run starts while it has
    none of its own."""
    allow_older: bool = False
    """When the newest checkpoint cannot be loaded, go on from the newest one that can."""
    changed: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Settings, or whole tables of them, that may differ from those the checkpoint was saved with. Those that do not
    change what is computed always may: see `docs/checkpoints.md`."""


class WatchdogConfig(Section):
    timeout_s: NonNegative = 1800.0
    """A run in which no rank has entered a phase or finished a rollout for so long is stuck: it ends with every rank's
    stacks and the name of the one that holds up the others. 0: it waits. Not above `run.patience_minutes`."""


class ReportConfig(Section):
    samples_per_step: Annotated[int, Field(ge=0)] = 4
    """Rollouts written to samples.jsonl and TensorBoard each step."""
    console: Literal["auto", "live", "plain"] = "auto"
    """`auto` draws a live display on a terminal and prints a line a step elsewhere."""
    tensorboard: bool = True
    """Write TensorBoard files; metrics.jsonl is always written."""
    memory: bool = False
    """Print a table of the memory at each change between trainer and engine, and write it to memory.jsonl."""


def _refuse_host_state_twice(model: ModelConfig, optim: OptimConfig) -> None:
    """Raises ValueError when the optimizer's state is on the host already."""
    if model.cpu_offload and optim.state_on_host:
        raise ValueError(
            "model.cpu_offload = true runs the optimizer on the host, where its state is, so there is nothing for "
            "optim.state_on_host = true to bring to the device; remove one of them"
        )


def _refuse_unmeasured_best(checkpoint: CheckpointConfig, *, measures: bool) -> None:
    """Raises ValueError when checkpoints are to be compared by what no evaluation measures."""
    if checkpoint.keep_best is not None and not measures:
        raise ValueError(
            f'checkpoint.keep_best = "{checkpoint.keep_best}" is measured by evaluations, but there are none; remove it'
        )


def _refuse_unknown_changes(kind: type[Section], resume: ResumeConfig) -> None:
    """Raises ValueError when `resume.changed` names what is no setting."""
    known = set(_all_keys(kind))
    for name in resume.changed:
        # What is in a free table, such as rollout.sglang, has no name of its own.
        parts = name.split(".")
        longest = next((i for i in range(len(parts), 0, -1) if ".".join(parts[:i]) in known), 0)
        if longest < len(parts) and (not longest or _at(kind, tuple(parts[:longest]))):
            raise ValueError(f"resume.changed names {name}, which is no setting{_did_you_mean(kind, tuple(parts))}")


def _refuse_less_patience(run: RunConfig, watchdog: WatchdogConfig) -> None:
    """Raises ValueError when collectives would end a stuck run before the watchdog could say where."""
    if watchdog.timeout_s > run.patience_minutes * 60:
        raise ValueError(
            f"watchdog.timeout_s = {watchdog.timeout_s:g} is more than run.patience_minutes = {run.patience_minutes}, "
            f"which would end a stuck run first and without stacks; set it to {run.patience_minutes * 60} or less, or "
            "raise patience_minutes"
        )


def _broken_promises(cfg: Config) -> Iterator[str]:
    """What is set that engine and trainer could not compute alike."""
    yield from _broken_by_sglang(cfg) if cfg.rollout.engine == "sglang" else ()
    for setting in ("tp", "cp", "ep"):
        if (size := getattr(cfg.parallel, setting)) > 1:
            yield f"parallel.{setting} = {size} sums in another order than an engine on one rank"
    if cfg.model.attention != "auto":
        yield f'model.attention = "{cfg.model.attention}" is not exact, and "auto" is'
    if cfg.model.compute_dtype == "float16":
        yield 'model.compute_dtype = "float16" has no exact kernels, and "float32" and "bfloat16" have'
    may_be_stale = cfg.rollout.partial or cfg.rollout.placement == "disaggregated"
    if may_be_stale and cfg.rollout.max_staleness > 0:
        yield (
            f"rollout.max_staleness = {cfg.rollout.max_staleness} trains on tokens that other weights sampled, which 0 "
            "does not"
        )


def _broken_by_sglang(cfg: Config) -> Iterator[str]:
    """The same of what only SGLang's operators cannot do."""
    rollout = cfg.rollout
    if rollout.tp_size > 1:
        yield f"rollout.tp_size = {rollout.tp_size} sums in another order than a trainer, and 1 does not"
    if rollout.attention_backend not in (None, *EXACT_BACKENDS):
        yield (
            f'rollout.attention_backend = "{rollout.attention_backend}" is none that the trainer can use too, and '
            f"{' and '.join(map(repr, EXACT_BACKENDS))} are"
        )
    if rollout.attention_backend == "triton" and rollout.partial:
        yield (
            "rollout.partial = true gives sampled tokens to the kernel for prompts when a response goes on, which with "
            'rollout.attention_backend = "triton" is another than the one they were sampled by, and with "fa3" is not'
        )
    if risky := sorted(rollout.sglang.keys() - _SGLANG_KEEPS_EXACT):
        yield f"rollout.sglang sets {', '.join(risky)}, which may change what the engine computes"
    if cfg.model.compute_dtype == "float32":
        yield 'model.compute_dtype = "float32" is not what SGLang computes with then, and "bfloat16" is'
    if cfg.model.gradient_checkpointing == "selective":
        yield (
            'model.gradient_checkpointing = "selective" keeps rotary embeddings from being compiled as the engine\'s '
            'are, and "full" does not'
        )


class Config(Section):
    """One training run."""

    true_on_policy: bool = False
    """Engine and trainer compute log-probabilities with the same bits, so that the mismatch is exactly 0. See
    `docs/true-on-policy.md`."""
    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    rollout: RolloutConfig
    refit: RefitConfig = RefitConfig()
    offload: OffloadConfig = OffloadConfig()
    reward: RewardConfig
    advantage: AdvantageConfig = AdvantageConfig()
    loss: LossConfig = LossConfig()
    correction: CorrectionConfig = CorrectionConfig()
    mismatch: MismatchConfig = MismatchConfig()
    optim: OptimConfig
    critic: CriticConfig = CriticConfig()
    pack: PackConfig
    eval: EvalConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()
    resume: ResumeConfig = ResumeConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    report: ReportConfig = ReportConfig()
    debug: DebugConfig = DebugConfig()

    @property
    def has_reference(self) -> bool:
        """Whether a frozen reference model is loaded."""
        return self.loss.kl_coef > 0 or self.reward.kl_coef > 0

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy."""
        return "values" in self.advantage.formula.needs

    @property
    def critic_model(self) -> ModelConfig:
        """What `[model]` is for the critic."""
        return self.model.model_copy(update={"path": self.critic.path or self.model.path})

    @property
    def critic_optim(self) -> OptimConfig:
        """What `[optim]` is for the critic."""
        own = {name: getattr(self.critic, name) for name in ("lr", "weight_decay", "max_grad_norm")}
        return self.optim.model_copy(update={name: value for name, value in own.items() if value is not None})

    @property
    def critic_gae_lambda(self) -> float:
        """That of the returns which the critic learns."""
        own = self.critic.gae_lambda
        return self.advantage.settings["gae_lambda"] if own is None else own

    @model_validator(mode="after")
    def _what_has_changed_is_a_setting(self) -> Config:
        _refuse_unknown_changes(Config, self.resume)
        return self

    @model_validator(mode="after")
    def _somebody_asks_the_critic(self) -> Config:
        if not self.has_critic and self.critic != CriticConfig():
            raise ValueError(
                f'advantage.estimator = "{self.advantage.estimator}" asks no critic, so that [critic] has no meaning; '
                'set estimator = "gae", or remove [critic]'
            )
        if self.critic.warmup_steps >= self.run.num_steps:
            raise ValueError(
                f"critic.warmup_steps = {self.critic.warmup_steps} leaves no step of run.num_steps = "
                f"{self.run.num_steps} to train the policy in; lower it"
            )
        return self

    @model_validator(mode="after")
    def _a_reward_has_something_to_be_compared_with(self) -> Config:
        estimator, group_size = self.advantage.estimator, self.rollout.group_size
        if group_size < (smallest := self.advantage.formula.smallest_group):
            raise ValueError(
                f'rollout.group_size = {group_size} leaves advantage.estimator = "{estimator}" no other rollout of the '
                f'prompt to compare with; set group_size to {smallest} or more, or estimator = "remax" or "gae"'
            )
        return self

    @model_validator(mode="after")
    def _a_greedy_response_has_no_divergence(self) -> Config:
        if self.reward.kl_coef > 0 and self.advantage.compares_with_greedy:
            raise ValueError(
                f"reward.kl_coef = {self.reward.kl_coef:g} takes the divergence off every reward, but "
                f'advantage.estimator = "{self.advantage.estimator}" compares with a greedy response, which policy and '
                "reference do not score; set loss.kl_coef instead"
            )
        return self

    @model_validator(mode="after")
    def _the_watchdog_is_first(self) -> Config:
        _refuse_less_patience(self.run, self.watchdog)
        return self

    @model_validator(mode="after")
    def _some_are_left_out_of_k(self) -> Config:
        group_size = self.rollout.group_size
        if "k" in self.advantage.formula.settings and (k := self.advantage.settings["k"]) >= group_size:
            raise ValueError(
                f"advantage.k = {k} of rollout.group_size = {group_size} rollouts leaves nothing to compare the best "
                f"of k with; set k to {group_size - 1} or less, or raise group_size"
            )
        return self

    @model_validator(mode="after")
    def _a_sequence_has_the_advantages_its_loss_knows(self) -> Config:
        formula = self.loss.formula
        if formula is not None and formula.per_sequence and self.advantage.formula.per_token:
            raise ValueError(
                f'loss.kind = "{self.loss.kind}" knows one advantage for all tokens of a response, but '
                f'advantage.estimator = "{self.advantage.estimator}" gives each its own; change one of them'
            )
        return self

    @model_validator(mode="after")
    def _equal_groups_teach_nothing(self) -> Config:
        if self.rollout.dynamic_sampling and self.advantage.formula.per_token:
            raise ValueError(
                "rollout.dynamic_sampling = true drops groups of equal rewards, which do teach something with "
                f'advantage.estimator = "{self.advantage.estimator}", where no reward is compared with its group\'s; '
                "remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _kl_counts_once(self) -> Config:
        if self.loss.kl_coef > 0 and self.reward.kl_coef > 0:
            raise ValueError(
                f"loss.kl_coef = {self.loss.kl_coef:g} and reward.kl_coef = {self.reward.kl_coef:g} would count the "
                "divergence to the reference twice; remove one of them"
            )
        return self

    @model_validator(mode="after")
    def _not_every_response_is_overlong(self) -> Config:
        limit = self.rollout.max_response_tokens
        if self.reward.overlong_tokens >= limit:
            raise ValueError(
                f"reward.overlong_tokens = {self.reward.overlong_tokens} is not below rollout.max_response_tokens = "
                f"{limit}, so that every response would be punished for its length; lower it"
            )
        return self

    @model_validator(mode="after")
    def _true_on_policy_is_kept(self) -> Config:
        if self.true_on_policy and (problems := list(_broken_promises(self))):
            raise ValueError(f"true_on_policy = true, but {'; '.join(problems)}; change that, or remove true_on_policy")
        return self

    @model_validator(mode="after")
    def _the_best_is_measured(self) -> Config:
        _refuse_unmeasured_best(self.checkpoint, measures=self.eval is not None)
        return self

    @model_validator(mode="after")
    def _the_policy_is_offloaded_once(self) -> Config:
        if self.model.cpu_offload and self.offload.trainer != "none":
            raise ValueError(
                "model.cpu_offload = true keeps the policy in host memory at all times, so there is nothing for "
                f'offload.trainer = "{self.offload.trainer}" to move; set it to "none", or model.cpu_offload = false'
            )
        return self

    @model_validator(mode="after")
    def _the_optimizers_state_is_offloaded_once(self) -> Config:
        if self.optim.state_on_host and self.offload.trainer == "optimizer":
            raise ValueError(
                "optim.state_on_host = true keeps the optimizer's state on the host at all times, so there is nothing "
                'for offload.trainer = "optimizer" to move; set it to "all" or "none", or optim.state_on_host = false'
            )
        _refuse_host_state_twice(self.model, self.optim)
        return self

    @model_validator(mode="after")
    def _what_is_apart_takes_no_turns(self) -> Config:
        if self.rollout.placement == "colocated":
            return self
        for table, setting in ((self.offload, "trainer"), (self.offload, "engine"), (self.refit, "transport")):
            if getattr(table, setting) != type(table).model_fields[setting].default:
                name = "offload" if table is self.offload else "refit"
                raise ValueError(
                    f'{name}.{setting} has no meaning for rollout.placement = "disaggregated", where trainer and '
                    "engine share no device; remove it"
                )
        return self

    @model_validator(mode="after")
    def _the_engine_stands_for_the_trainer_only_on_policy(self) -> Config:
        rollout = self.rollout
        apart = rollout.placement == "disaggregated" and rollout.max_staleness > 0
        if self.correction.old == "rollout" and (rollout.partial or apart):
            why = "rollout.partial = true" if rollout.partial else f"rollout.max_staleness = {rollout.max_staleness}"
            raise ValueError(
                f'correction.old = "rollout" needs tokens that the weights before the update sampled, but with {why} '
                'older weights sample some of them; set correction.old = "trainer"'
            )
        return self

    @model_validator(mode="after")
    def _what_is_read_needs_no_engine(self) -> Config:
        if self.debug.load_rollouts is None:
            return self
        if self.eval is not None:
            raise ValueError(
                "debug.load_rollouts starts no engine, so nobody can answer the held-out prompts of [eval]; remove "
                "[eval], or evaluate the exported model"
            )
        if self.rollout.placement == "disaggregated":
            raise ValueError(
                'debug.load_rollouts starts no engine, so that the ranks which rollout.placement = "disaggregated" '
                'gives to engines would have nothing to do; set placement = "colocated"'
            )
        return self

    @model_validator(mode="after")
    def _weights_travel_where_there_is_a_way(self) -> Config:
        if self.rollout.engine == "torch" and self.refit.transport != "auto":
            raise ValueError(f'refit.transport = "{self.refit.transport}" has no meaning for rollout.engine = "torch"')
        return self

    @model_validator(mode="after")
    def _the_engine_has_what_it_gives_back(self) -> Config:
        if self.rollout.engine == "torch" and "cuda_graph" in self.offload.engine:
            raise ValueError(
                'offload.engine names "cuda_graph", but rollout.engine = "torch" has no CUDA graphs; leave it out'
            )
        if not self.rollout.cuda_graphs and "cuda_graph" in self.offload.engine:
            raise ValueError('offload.engine names "cuda_graph", but rollout.cuda_graphs = false; leave it out')
        return self


class PairsConfig(Section):
    sequences_per_step: Count
    """(prompt, response) pairs behind one optimizer step, over all ranks."""
    max_response_tokens: Count
    """Longer responses are an error that names the row."""


class SftConfig(Section):
    """One supervised fine-tuning run: the same update on (prompt, response) pairs."""

    run: RunConfig
    model: ModelConfig
    parallel: ParallelConfig = ParallelConfig()
    data: DataConfig
    sft: PairsConfig
    optim: OptimConfig
    pack: PackConfig
    held_out: HeldOutConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    export: ExportConfig = ExportConfig()
    resume: ResumeConfig = ResumeConfig()
    watchdog: WatchdogConfig = WatchdogConfig()
    report: ReportConfig = ReportConfig()

    @model_validator(mode="after")
    def _what_has_changed_is_a_setting(self) -> SftConfig:
        _refuse_unknown_changes(SftConfig, self.resume)
        return self

    @model_validator(mode="after")
    def _the_best_is_measured(self) -> SftConfig:
        _refuse_unmeasured_best(self.checkpoint, measures=False)
        return self

    @model_validator(mode="after")
    def _the_watchdog_is_first(self) -> SftConfig:
        _refuse_less_patience(self.run, self.watchdog)
        return self

    @model_validator(mode="after")
    def _memory_has_one_phase(self) -> SftConfig:
        if self.report.memory:
            raise ValueError("report.memory = true has nothing to show: fine-tuning has no engine to make room for")
        return self

    @model_validator(mode="after")
    def _the_optimizers_state_is_offloaded_once(self) -> SftConfig:
        _refuse_host_state_twice(self.model, self.optim)
        return self


def read_run_config(path: str, overrides: Sequence[str]) -> Config | SftConfig:
    """Read the configuration of a run of either kind: the one with [rollout] is of `spmdrl.train`, the one with [sft]
    of `spmdrl.sft`. Raises UserError as `read_config` does, and when the file has both tables or neither."""
    named = {override.partition("=")[0].strip().partition(".")[0] for override in overrides}
    tables = named | _parse(path, _read_text(path)).keys()
    if ("rollout" in tables) == ("sft" in tables):
        has = "both [rollout] and [sft]" if "sft" in tables else "neither [rollout] nor [sft]"
        raise UserError(
            f"{path} has {has}, so that it is not clear which program it is for; [rollout] belongs to a run of "
            "spmdrl.train, [sft] to one of spmdrl.sft: have one of them"
        )
    return read_config(SftConfig, path, overrides) if "sft" in tables else read_config(Config, path, overrides)


def read_config(kind: type[SectionT], path: str, overrides: Sequence[str]) -> SectionT:
    """Read a TOML file and `key.sub=value` overrides into `kind`.

    Override values are TOML; what is not TOML is taken as a string. Raises UserError with every problem found, each
    with its file and line where it has one.
    """
    text = _read_text(path)
    values = _parse(path, text)
    lines = _key_lines(text)
    overridden: set[str] = set()
    problems = [problem for override in overrides for problem in _override(values, override, overridden)]

    def where(location: tuple[str | int, ...]) -> str:
        # The innermost table or key that has a line of its own; an override has none.
        for end in range(len(location), 0, -1):
            key = ".".join(str(part) for part in location[:end])
            if key in overridden:
                return "on the command line: "
            if key in lines:
                return f"{path}:{lines[key]}: "
            if any(name.startswith(f"{key}.") for name in overridden):
                return "on the command line: "
        return f"{path}: "

    problems += [where(location) + sentence for location, sentence in _beyond_toml(values)]
    try:
        config = kind.model_validate(values)
    except ValidationError as error:
        problems += [where(location) + sentence for location, sentence in _sentences(kind, error)]
    if problems:
        raise UserError("\n".join(problems))
    return config


def _read_text(path: str) -> str:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UserError(f"cannot read the configuration {path}: {reason}") from error
    if text.startswith("\ufeff"):
        raise UserError(f"{path} begins with a byte order mark, which TOML does not know; save it as UTF-8 without one")
    return text


def _parse(path: str, text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{path} is not valid TOML: {error}") from error
    except RecursionError as error:
        raise UserError(f"{path} is not valid TOML: lists or tables are nested too deeply") from error


def _beyond_toml(value: Any, location: tuple[str | int, ...] = ()) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """What Python's reader of TOML and overrides let pass: whole numbers of more than 64 bits, NUL in text."""
    name = ".".join(map(str, location))
    match value:
        case dict() | list():
            entries = value.items() if isinstance(value, dict) else enumerate(value)
            for key, inner in entries:
                yield from _beyond_toml(inner, (*location, key))
        case int() if not -(2**63) <= value < 2**63:
            yield location, f"{name}: whole numbers have 64 bits, and this one needs {value.bit_length() + 1}"
        case str() if "\0" in value:
            yield location, f"{name}: text must not hold the character NUL"


def _override(values: dict[str, Any], override: str, overridden: set[str]) -> Iterator[str]:
    """Set one `a.b.c=value` in `values`; yields what is wrong with it."""
    dotted, equals, written = override.partition("=")
    keys = dotted.strip().split(".")
    if not equals or not all(keys):
        yield f"{override!r} on the command line is not of the form section.key=value"
        return
    try:
        value = tomllib.loads(f"value = {written}")["value"]
    except tomllib.TOMLDecodeError:
        value = written
    except RecursionError:
        yield f"{dotted} on the command line is nested too deeply"
        return
    table = values
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            yield f"{dotted}: {key} is a value, not a table of settings"
            return
    table[keys[-1]] = value
    overridden.add(dotted.strip())


def _key_lines(text: str) -> dict[str, int]:
    """The line of each table header and of each key at the start of a line, by dotted name (array tables by index)."""
    lines: dict[str, int] = {}
    table = ""
    counts: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if header := re.match(r"\s*(\[\[?)\s*([\w.\-]+)\s*\]", line):
            table = header[2]
            if header[1] == "[[":
                counts[table] = counts.get(table, -1) + 1
                table = f"{table}.{counts[table]}"
            lines.setdefault(table, number)
        elif key := re.match(r"\s*([\w.\-]+)\s*=", line):
            lines.setdefault(f"{table}.{key[1]}" if table else key[1], number)
    return lines


def _sentences(kind: type[Section], error: ValidationError) -> Iterator[tuple[tuple[str | int, ...], str]]:
    """Each problem that pydantic found, as (place in the file, sentence)."""
    for problem in error.errors(include_url=False):
        location = tuple(part for part, is_tag in _parts(problem["loc"]) if not is_tag)
        name = ".".join(str(part) for part in location)
        match problem["type"]:
            case "extra_forbidden":
                yield location, f"{name}: no such setting{_did_you_mean(kind, problem['loc'])}"
            case "missing":
                yield location, f"{name}: required, not set"
            case "value_error":
                yield location, f"{name}: {problem['ctx']['error']}" if name else str(problem["ctx"]["error"])
            case "too_short" if problem["input"]:
                pass  # its entries are wrong, and have sentences of their own
            case "too_short":
                yield location, f"{name} is empty; it needs at least one entry"
            case "model_type" | "model_attributes_type" | "dict_type":
                yield location, f"{name} = {_toml_like(problem['input'])}: must be a table of settings"
            case "union_tag_not_found" | "union_tag_invalid":
                known = ", ".join(_tags_at(kind, problem["loc"]))
                yield location, f"{name}.kind: must be one of {known}"
            case _:
                message = problem["msg"][0].lower() + problem["msg"][1:]
                yield location, f"{name} = {_toml_like(problem['input'])}: {message}"


def _parts(location: tuple[str | int, ...]) -> Iterator[tuple[str | int, bool]]:
    """(part, whether it is a tag): after a list index pydantic names the chosen `kind`, which is no key of the file."""
    for before, part in zip((None, *location), location, strict=False):
        yield part, isinstance(before, int) and isinstance(part, str)


def _toml_like(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)


def _did_you_mean(kind: type[Section], location: tuple[str | int, ...]) -> str:
    """A hint for an unknown key: the nearest key of the same table, else of any table."""
    siblings = _keys_of(_at(kind, location[:-1]))
    prefix = "".join(f"{part}." for part, is_tag in _parts(location[:-1]) if not is_tag)
    given = str(location[-1])
    if near := difflib.get_close_matches(given, siblings, n=1, cutoff=0.6):
        return f"; did you mean {prefix}{near[0]}?"
    # Of settings that are called the same, the first.
    everywhere = {name.rpartition(".")[2]: name for name in reversed([*_all_keys(kind)])}
    if near := difflib.get_close_matches(given, everywhere, n=1, cutoff=0.8):
        return f"; did you mean {everywhere[near[0]]}?"
    return f"; the settings there are {', '.join(siblings)}" if siblings else ""


def _sections_in(annotation: Any) -> list[type[Section]]:
    """The Section classes inside an annotation such as `Section | None` or `tuple[A | B, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return [annotation]
    if get_origin(annotation) is not None:
        return [section for part in get_args(annotation) for section in _sections_in(part)]
    return []


def _at(kind: type[Section], location: tuple[str | int, ...]) -> list[type[Section]]:
    """The Section classes that may stand at a pydantic location."""
    sections = [kind]
    for part, is_tag in _parts(location):
        if is_tag:
            sections = [section for section in sections if part in get_args(section.model_fields["kind"].annotation)]
        elif isinstance(part, str):
            fields = [section.model_fields[part] for section in sections if part in section.model_fields]
            sections = [inner for field in fields for inner in _sections_in(field.annotation)]
    return sections


def _keys_of(sections: list[type[Section]]) -> list[str]:
    return list(dict.fromkeys(key for section in sections for key in section.model_fields))


def _tags_at(kind: type[Section], location: tuple[str | int, ...]) -> list[str]:
    return [f'"{tag}"' for section in _at(kind, location) for tag in get_args(section.model_fields["kind"].annotation)]


def _all_keys(kind: type[Section], prefix: str = "") -> Iterator[str]:
    for key, field in kind.model_fields.items():
        yield prefix + key
        for section in _sections_in(field.annotation):
            yield from _all_keys(section, f"{prefix}{key}.")
