"""transformers' Qwen3 with the forward pass of SGLang's under `rl_on_policy_target = "fsdp"`, equal to the bit.

SGLang keeps the residual stream in float32 and rounds the inputs of matrix products and of attention to bfloat16. Norms
have float32 weights and float32 results, rotary embeddings are float32, activation functions are bfloat16. Logits,
logits over the temperature, and log-probabilities are bfloat16 too, which is coarse: log-probabilities around -3 are
multiples of 1/64. Every sum uses SGLang's own kernels; elementwise operations are the same in torch. Weights are
bfloat16 in both; where SGLang needs them in float32 it converts them.

Only the forward pass is exact: gradients come from ordinary kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from spmdrl.families import FAMILIES
from spmdrl.model import divergence, fused_plain, logprobs
from spmdrl.model.attention_layer import Attend, AttentionLayer
from spmdrl.model.divergence import TeacherHead
from spmdrl.model.exact import sglang_kernels as kernels
from spmdrl.model.linear import linear_by, with_backward_of
from spmdrl.model.logprobs import HeadOptions
from spmdrl.types import TopTokens

# Those whose layers support `rl_on_policy_target`.
MODEL_TYPES = [name for name, family in FAMILIES.items() if "sglang" in family.exact_engines]
CAPABILITY = (9, 0)  # SGLang uses other kernels on newer devices, which were not compared
# For heads up to this size, FlashAttention 3 sums keys in tiles of 192 when there are few queries (decoding) and in
# tiles of 128 when there are many (prompts). For larger heads the tile does not depend on the number of queries.
_FA3_HEAD_DIM_WITH_TWO_TILES = 64

SWITCHES = (
    'engine: rl_on_policy_target = "fsdp": embedding and norms with float32 weights, a float32 stream between layers, '
    "bfloat16 into products and attention, SiLU and norms in plain torch, rotary embeddings compiled",
    "engine: enable_deterministic_inference = true: torch's mm, addmm, bmm, log_softmax, mean and rms_norm replaced by "
    "Triton kernels with fixed tiles",
    'engine: sampling_backend = "pytorch", bf16_gemm_backend = "torch"',
    *(f"engine: {name}={value} in its environment" for name, value in kernels.ENVIRONMENT.items()),
    "engine: log-probabilities by log_softmax of bfloat16 logits over the temperature, in bfloat16",
    "trainer: matrix products, means of squares and log_softmax by the same Triton kernels, with the same casts; "
    "torch's own operators are not replaced",
    "trainer: rotary embeddings by the engine's function, compiled as in the engine",
    "trainer: FSDP does not cast the inputs of layers",
    "trainer: backward passes are unchanged",
)


def switches(backend: str) -> tuple[str, ...]:
    """List all that `true_on_policy = true` changes with this attention backend, as lines for the user."""
    kernel = {
        "fa3": "FlashAttention 3 over pages of one token, one split",
        "triton": "Triton: one kernel for prompts, another for sampled tokens, each over all keys in one go",
    }[backend]
    return (*SWITCHES, f'attention of both: attention_backend = "{backend}": {kernel}')


def engine_layers(model: nn.Module) -> Iterator[tuple[nn.Module, type[nn.Module]]]:
    """Yield the model's layers, each with its class of this file."""
    replaced = _replaced()
    return ((module, replaced[type(module)]) for module in model.modules() if type(module) in replaced)


def next_token_logprobs(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: HeadOptions
) -> tuple[Tensor, Tensor]:
    """`logprobs.next_token_logprobs` with the engine's bits: (logprobs [N], entropy [N]).

    At most `chunk` rows of logits exist at a time, and fewer where these would exceed a tile: log_softmax needs whole
    rows.
    """
    temperature, softcap = options.scale
    is_plain = bias is None and softcap is None and options.vocabulary is None
    assert is_plain, "true_on_policy = true was not refused with a head of another kind"
    num_rows = max(1, min(options.chunk, logprobs.TILE_ELEMENTS[hidden.device.type] // len(weight)))

    def exact(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        chunks = zip(hidden.split(num_rows), targets.split(num_rows), strict=True)
        parts = [_logprobs(kernels.product(rows, weight, None), tokens, temperature) for rows, tokens in chunks]
        return torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])

    def differentiable(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return logprobs.next_token_logprobs(hidden, weight, None, targets, options)

    outputs: tuple[Tensor, Tensor] = with_backward_of(differentiable, exact, hidden.to(weight.dtype), weight)
    return outputs


def next_token_divergence(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    options: HeadOptions,
    *,
    teacher_hidden: Tensor | None = None,
    teacher: TeacherHead | TopTokens,
    **kind: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """`divergence.next_token_divergence` whose log-probabilities and entropy are those of `next_token_logprobs`.

    The divergence is that of ordinary kernels: an engine has none whose bits it could have.
    """
    scores = next_token_logprobs(hidden, weight, bias, targets, options)
    if teacher_hidden is not None and isinstance(teacher, TeacherHead):
        teacher_hidden = teacher_hidden.to(teacher.weight.dtype)
    student = (hidden.to(weight.dtype), weight, bias, targets, options)
    _, _, of_both = divergence.next_token_divergence(*student, teacher_hidden=teacher_hidden, teacher=teacher, **kind)
    return *scores, of_both


def _logprobs(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """(logprobs [N], entropy [N]) of logits [N, V], rounded as the engine rounds them."""
    # The divisor is a tensor, as in the engine: given a number, CUDA multiplies by its inverse.
    temperatures = torch.full((len(logits), 1), temperature, dtype=torch.float32, device=logits.device)
    log_p = kernels.log_softmax(logits.div(temperatures).to(logits.dtype))
    wide = log_p.float()
    return log_p.gather(-1, targets[:, None])[:, 0].float(), -wide.exp().mul_(wide).sum(-1)


class _Linear(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return linear_by(kernels.product, input.to(self.weight.dtype), self.weight, self.bias)


class _Embedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).float()


class _Norm(nn.Module):
    """x / sqrt(mean(x^2) + eps) in the dtype of x, times the weight in float32."""

    weight: nn.Parameter
    variance_epsilon: float

    def forward(self, hidden_states: Tensor) -> Tensor:
        out: Tensor = with_backward_of(
            functools.partial(self._normalized, lambda x: x.mean(-1, keepdim=True)),
            functools.partial(self._normalized, kernels.mean),
            hidden_states,
            self.weight,
        )
        return out

    def _normalized(self, mean: Any, x: Tensor, weight: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(mean(wide.pow(2)) + self.variance_epsilon)
        return weight.float() * wide.to(x.dtype)


def _head_dim(model_config: Any) -> int:
    return getattr(model_config, "head_dim", None) or int(model_config.hidden_size // model_config.num_attention_heads)


class _Angles(nn.Module):
    """cos and sin [T, D / 2] float32 of the rotary angles of each token."""

    config: Any

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        head_dim = _head_dim(self.config)
        base = self.config.rope_parameters["rope_theta"]
        # On the host, as in the engine: powers differ between devices.
        frequencies = 1.0 / (base ** (torch.arange(0, head_dim, 2, dtype=torch.float, device="cpu") / head_dim))
        angles = position_ids[0].float()[:, None] * frequencies.to(x.device)
        return angles.cos(), angles.sin()


class _Attention(nn.Module):
    """Qwen3's attention over the packed tokens [1, T, D] of a micro-batch, with the engine's casts."""

    head_dim: int
    layer_idx: int
    scaling: float
    q_proj: nn.Linear
    k_proj: nn.Linear
    v_proj: nn.Linear
    o_proj: nn.Module
    q_norm: nn.Module
    k_norm: nn.Module

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], *, attend: Attend, **_: Any
    ) -> tuple[Tensor, None]:
        narrow = hidden_states.to(self.v_proj.weight.dtype)
        q, k, v = (
            project(narrow)[0].unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = (_rotated(x, *position_embeddings).to(v.dtype) for x in (self.q_norm(q), self.k_norm(k)))
        query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = attend(query, key, value, AttentionLayer(index=self.layer_idx, scale=self.scaling))
        return self.o_proj(out.flatten(2)), None


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    out: Tensor = with_backward_of(fused_plain.rotated, kernels.rotate, x, cos, sin)
    return out


def _replaced() -> dict[type[nn.Module], type[nn.Module]]:
    from transformers.models.qwen3 import modeling_qwen3 as qwen3

    return {
        nn.Linear: _Linear,
        nn.Embedding: _Embedding,
        qwen3.Qwen3RMSNorm: _Norm,
        qwen3.Qwen3RotaryEmbedding: _Angles,
        qwen3.Qwen3Attention: _Attention,
    }


def model_problems(model_config: Any) -> Iterator[str]:
    """Yield a sentence for each property of a model that SGLang computes otherwise than this file."""
    if model_config.model_type not in MODEL_TYPES:
        yield (
            f"true_on_policy = true with SGLang supports {', '.join(MODEL_TYPES)}, not {model_config.model_type}; set "
            "it to false, or train one of those"
        )
        return
    if model_config.hidden_act != "silu":
        yield (
            "true_on_policy = true with SGLang supports SiLU as the only activation function, and this model uses "
            f"{model_config.hidden_act}; set it to false"
        )
    if (rope := (model_config.rope_parameters or {}).get("rope_type", "default")) != "default":
        yield (
            f'true_on_policy = true with SGLang needs rope_type = "default", and this model has "{rope}"; set it to '
            "false"
        )
    if "sliding_attention" in (model_config.layer_types or ()):
        yield (
            "true_on_policy = true with SGLang does not support sliding windows, and this model uses them; set it to "
            "false"
        )


def attention_problems(model_config: Any, backend: str) -> Iterator[str]:
    """Yield a sentence when the backend sums the keys of this model's prompts and decoded tokens differently."""
    if backend == "fa3" and (head_dim := _head_dim(model_config)) <= _FA3_HEAD_DIM_WITH_TWO_TILES:
        yield (
            'true_on_policy = true with rollout.attention_backend = "fa3" needs heads of more than '
            f"{_FA3_HEAD_DIM_WITH_TWO_TILES} channels, and this model's have {head_dim}: FlashAttention 3 sums the "
            'keys of such heads differently for decoded tokens than for prompts; set it to "triton"'
        )


def device_problems(backend: str) -> Iterator[str]:
    """Yield a sentence for each reason why the CUDA device at hand is not supported."""
    if (found := torch.cuda.get_device_capability()) != CAPABILITY:
        yield (
            "true_on_policy = true with SGLang supports devices of compute capability "
            f"{'.'.join(map(str, CAPABILITY))} (Hopper), and this one has {'.'.join(map(str, found))}, for which "
            "SGLang may use other kernels; set it to false"
        )
    if backend == "fa3":
        try:
            import sgl_kernel.flash_attn  # noqa: F401
        except ImportError as error:
            yield (
                'true_on_policy = true with rollout.attention_backend = "fa3" needs SGLang\'s FlashAttention 3, which '
                f'is not installed ({error}); set it to "triton"'
            )
