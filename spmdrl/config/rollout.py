"""Tables about sampling: the engine, its weights, and the memory it shares with the trainer."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from spmdrl.config.base import Count, Fraction, NonNegativeInt, Section, Temperature, is_set, rule


class RolloutConfig(Section):
    engine: str = "torch"
    """`torch` is the embedded continuous-batching engine; it runs wherever torch does. `sglang` is SGLang, started by
    the ranks on their own devices; `make setup-sglang` installs it. `file.py:Class` or `package.module:Class` is an
    engine of yours: see `docs/extending.md`."""
    placement: Literal["colocated", "disaggregated"] = "colocated"
    """`colocated`: every rank trains and holds an engine, in turns. `disaggregated`: the last `num_ranks` ranks hold
    engines and the others train, at the same time. See `docs/disaggregated.md`."""
    num_ranks: Count | None = None
    """`disaggregated` only, and required there: ranks that hold engines."""
    prompts_per_step: Count
    """Prompts in each step, over all ranks."""
    group_size: Count
    """Rollouts per prompt. Estimators that compare a group's rewards with each other need 2 or more: see
    `advantage.estimator`."""
    max_response_tokens: Count
    """Longest response; sampling stops there with finish reason `length`."""
    temperature: Temperature = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    top_k: Annotated[int, Field(ge=1, le=1024)] | None = None
    """Sample from the `top_k` most probable tokens alone. The engine reports the tokens that it chose from, and all
    log-probabilities of training, of the policy and of the reference, are those among the same tokens. See
    `docs/losses.md`."""
    top_p: Annotated[float, Field(gt=0.0, le=1.0)] = 1.0
    """Sample from the fewest of the `top_k` tokens that have this share of their probability."""
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
    """Tokens in each chunk that an SGLang engine cuts a longer prompt into. Unset: its own choice."""
    allow_untested: bool = False
    """Start SGLang with a type of model whose log-probabilities were never compared there with the trainer's, or with
    weights cut over `tp_size` devices in a way that was not compared. The first refit compares every weight by digest,
    and `mismatch/max_abs_nats` says how far SGLang is from the trainer. See `docs/models.md`."""
    attention_backend: str | None = None
    """Attention kernels of an SGLang engine, such as `fa3` or `triton`. Unset: its own choice."""
    cuda_graphs: bool = True
    """Capture the decode steps of an SGLang engine in CUDA graphs. Prompts get none, unless `[rollout.sglang]` asks for
    them; colocated engines must then give them back: `cuda_graph_backend_prefill = "full"` there, and `"cuda_graph"` in
    `offload.engine`."""
    quantization: Literal["fp8"] | None = None
    """Projections of the engine's attention and MLPs in e4m3, with a float32 scale for each block of 128 x 128 and
    products in fp8; a refit moves half the bytes. Embeddings, the head, norms, routers, biases and towers stay in
    `model.compute_dtype`, and so does all of the trainer. The `torch` engine samples with the numbers that the e4m3
    weights encode, and saves no memory. Needs a `[correction]`. See `docs/fp8.md`."""
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "fp8_e5m2"] = "auto"
    """Keys and values in an SGLang engine's cache: `auto` is `model.compute_dtype`, the others take half the memory.
    Needs a `[correction]`. See `docs/fp8.md`."""
    restart_engine: bool = False
    """Restart an SGLang engine that has died, send it the weights, and repeat its unfinished requests. Otherwise its
    death ends the run."""
    sglang: dict[str, Any] = Field(default_factory=dict)
    """Other arguments of SGLang's engine, by their own names (`[rollout.sglang]`)."""

    dynamic_sampling: bool = False
    """Drop prompt groups whose rewards are all equal, which teach nothing, and open others in their place."""
    max_draw_ratio: Annotated[float, Field(ge=1.0, allow_inf_nan=False)] = 4.0
    """`dynamic_sampling` only: a step opens at most this times `prompts_per_step` groups. If too few of them teach
    something, it trains on those and prints a line."""
    oversample_fraction: Fraction = 0.0
    """Open up to this fraction more prompt groups than a step needs. The step ends when it has enough, without waiting
    for the slowest; unfinished groups are thrown away, or continue in the next step: see `partial`."""
    partial: bool = False
    """Unfinished rollouts continue in the next step from their tokens. Without `oversample_fraction`, engines have
    up to `(max_staleness + 1) * prompts_per_step` prompt groups open, and steps train on the oldest of them, in the
    order of the prompts: nothing that was sampled is thrown away. With it, steps train on those that are finished
    first. See `docs/collecting.md`."""
    max_staleness: NonNegativeInt = 1
    """`disaggregated` and `partial` only: most steps between the weights that sampled a token and the weights that it
    updates. `disaggregated` engines may run this many steps ahead; with 0 the two sides wait for each other. Under
    `partial`, a group whose tokens would be older is sampled again from its prompt."""

    cache_after_refit: Literal["recompute", "keep"] = "recompute"
    """`partial` only: keys, values and states of rollouts that continue. `recompute` reads their tokens again with new
    weights. `keep` continues from those of the weights that sampled them, which takes no time and adds to
    `mismatch/...`; they serve no request of newer weights but the rest of their own responses, and none once they are
    more than `max_staleness` versions old."""

    refit_in_flight: bool = False
    """`disaggregated` and `partial` only, without `oversample_fraction`: engines pause at a token when new weights are
    there, load them, and continue with the rollouts they have. Otherwise they first finish the step they sample."""
    refit_after_tokens: Count | None = None
    """`refit_in_flight` with `run.deterministic` only: tokens of each row that engines sample in a step before they
    pause for the weights, and then wait for them; rounded up to a multiple of 16. Set it to what an engine samples
    during an update. Unset: half of `max_response_tokens`."""

    @property
    def max_cache_age(self) -> int:
        """The age, in versions, of keys and values from which a rollout may continue; 0: they are read again."""
        return self.max_staleness if self.cache_after_refit == "keep" else 0

    @property
    def refit_after(self) -> int:
        """The tokens of each row before a refit in flight where these decide."""
        return self.refit_after_tokens or math.ceil(self.max_response_tokens / 2)

    @property
    def oldest_first(self) -> bool:
        """True when rollouts continue across training, and steps train on prompt groups in the order of the prompts."""
        return self.partial and not self.oversample_fraction

    @property
    def fewer_bits(self) -> str:
        """The setting by which engines compute with fewer bits than the trainer; "" without one."""
        settings = {"quantization": self.quantization or "", "kv_cache_dtype": self.kv_cache_dtype.removeprefix("auto")}
        return " and ".join(f'rollout.{name} = "{value}"' for name, value in settings.items() if value)


@rule(RolloutConfig)
def top_p_needs_top_k(rollout: RolloutConfig) -> Iterator[str]:
    if rollout.top_p < 1 and rollout.top_k is None:
        yield (
            f"top_p = {rollout.top_p:g} may leave any number of tokens, and the engine reports each of them; set top_k "
            "too, to 64 for example, or remove it"
        )


@rule(RolloutConfig)
def max_draw_ratio_needs_dynamic_sampling(rollout: RolloutConfig) -> Iterator[str]:
    if is_set(rollout, "max_draw_ratio") and not rollout.dynamic_sampling:
        yield "max_draw_ratio has no meaning without dynamic_sampling = true; set both or remove it"


@rule(RolloutConfig)
def max_draw_ratio_allows_oversampling(rollout: RolloutConfig) -> Iterator[str]:
    if rollout.dynamic_sampling and rollout.max_draw_ratio < 1 + rollout.oversample_fraction:
        yield (
            f"max_draw_ratio = {rollout.max_draw_ratio:g} does not allow the {1 + rollout.oversample_fraction:g} times "
            "prompts_per_step groups that oversample_fraction opens; raise it"
        )


@rule(RolloutConfig)
def prompts_in_order_are_not_replaced(rollout: RolloutConfig) -> Iterator[str]:
    if rollout.oldest_first and rollout.dynamic_sampling:
        yield (
            "partial = true with oversample_fraction = 0 trains on all prompts in their order, but dynamic_sampling = "
            "true replaces some; set oversample_fraction above 0, or dynamic_sampling = false"
        )


@rule(RolloutConfig)
def max_staleness_needs_stale_rollouts(rollout: RolloutConfig) -> Iterator[str]:
    if is_set(rollout, "max_staleness") and not rollout.partial and rollout.placement == "colocated":
        yield (
            'max_staleness has no meaning without partial = true or placement = "disaggregated"; set one of them '
            "or remove it"
        )


@rule(RolloutConfig)
def cache_after_refit_needs_partial(rollout: RolloutConfig) -> Iterator[str]:
    if is_set(rollout, "cache_after_refit") and not rollout.partial:
        yield "cache_after_refit has no meaning without partial = true, where no rollout outlasts its step; remove it"


@rule(RolloutConfig)
def refits_in_flight_need_engines_apart(rollout: RolloutConfig) -> Iterator[str]:
    if rollout.refit_in_flight and rollout.placement == "colocated":
        yield (
            'refit_in_flight = true needs placement = "disaggregated": colocated engines pause while the trainer '
            "works, and partial = true lets their rollouts go on with the new weights; remove it"
        )
    elif rollout.refit_in_flight and (not rollout.oldest_first or not rollout.max_staleness):
        yield (
            "refit_in_flight = true needs rollouts that may go on with newer weights; set partial = true, "
            "oversample_fraction = 0 and max_staleness above 0, or remove it"
        )


@rule(RolloutConfig)
def num_ranks_belongs_to_disaggregated(rollout: RolloutConfig) -> Iterator[str]:
    if (rollout.num_ranks is not None) != (rollout.placement == "disaggregated"):
        yield (
            f'placement = "{rollout.placement}" with num_ranks {rollout.num_ranks or "not set"}: num_ranks is the '
            'number of ranks that hold engines when placement = "disaggregated"; set both or neither'
        )


@rule(RolloutConfig)
def restart_engine_needs_colocated(rollout: RolloutConfig) -> Iterator[str]:
    if rollout.restart_engine and rollout.placement == "disaggregated":
        yield (
            'restart_engine = true needs placement = "colocated": disaggregated engines get their weights only '
            "between steps, so that the death of one ends the run; remove it"
        )


@rule(RolloutConfig)
def num_ranks_is_a_multiple_of_tp_size(rollout: RolloutConfig) -> Iterator[str]:
    if rollout.num_ranks is not None and rollout.num_ranks % rollout.tp_size:
        yield (
            f"num_ranks = {rollout.num_ranks} cannot be cut into engines of tp_size = {rollout.tp_size}; set num_ranks "
            f"to {math.ceil(rollout.num_ranks / rollout.tp_size) * rollout.tp_size}"
        )


class RefitConfig(Section):
    bucket_bytes: Annotated[int, Field(ge=1024)] | None = None
    """Weights that are gathered and handed to the engine together; there are two buffers of this size. If not set: on a
    GPU 1 GiB, or the power of 2 below 1/64 of its memory where that is less; in host memory 128 MiB."""
    transport: Literal["auto", "cuda_ipc", "shared_memory"] = "auto"
    """Path of the buckets to SGLang's processes: `cuda_ipc` leaves them on the device, `shared_memory` leads through
    the host. `auto` is `cuda_ipc` where that works, and prints a line where it does not. `disaggregated` engines get
    the buckets by NCCL instead, or by gloo on a CPU."""
    verify: Literal["every", "first"] | Count = "every"
    """Refits after which the engine's weights are compared with the trainer's by digest: every one, the first of a
    launch, or every N-th. A difference stops the run and names the tensors."""
    probe_prompts: NonNegativeInt | None = None
    """Prompts, the same in every step, that each engine also answers. The trainer computes the log-probabilities of the
    answers with the same weights: `refit/probe_...` is the mismatch that remains when nothing is stale. If not set: 2
    where tokens can be stale, else 0, because `mismatch/...` of the step's own rollouts then says the same."""


class OffloadConfig(Section):
    trainer: Literal["none", "optimizer", "all"] = "none"
    """State that the trainer moves to pinned host memory while the engine samples: none, the optimizer's, or also the
    weights and gradients. See `docs/memory.md`."""
    engine: Annotated[tuple[Literal["kv_cache", "weights", "cuda_graph"], ...], Field(strict=False)] = ("kv_cache",)
    """Memory that the engine frees while the trainer works. Weights come back by a refit; the `torch` engine has no
    CUDA graphs."""
