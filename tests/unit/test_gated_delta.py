"""Gated delta nets on packed sequences: packed = alone = transformers, forward and backward, from any state."""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import Qwen3_5MoeTextConfig, Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet, torch_chunk_gated_delta_rule

from spmdrl.config import ParallelConfig
from spmdrl.model import chunks, gated_delta, gated_delta_cuda, mixer
from spmdrl.model.layers import set_classes
from spmdrl.model.load import load_model_config, parallel_model_problems
from spmdrl.model.recurrent import packed_layers
from tests.helpers.configs import model_config
from tests.helpers.models import save_qwen3_next

HIDDEN = 24
KINDS: dict[str, tuple[type[nn.Module], Any]] = {
    "Qwen3-Next": (Qwen3NextGatedDeltaNet, Qwen3NextConfig),
    "Qwen3.5": (Qwen3_5GatedDeltaNet, Qwen3_5TextConfig),
    "Qwen3.5-MoE": (Qwen3_5MoeGatedDeltaNet, Qwen3_5MoeTextConfig),
}
SEQLENS = {
    "mixed": [5, 1, 64, 65, 200, 33, 7, 7, 130, 2, 1, 16, 17],
    "up to 200": random.Random(0).sample(range(1, 201), 20),
    "short": [3, 1, 2, 5, 3],
    "one token each": [1, 1, 1, 1],
    "one": [97],
    "whole chunks": [32, 64, 32],
}
DECAYING = {"A_log", "dt_bias", "in_proj_a.weight", "in_proj_ba.weight"}
Gradients = dict[str, Tensor]


def pair(kind: str, *, key_heads: int = 2, value_heads: int = 4, head_dim: int = 8) -> tuple[nn.Module, nn.Module]:
    """transformers' layer with random parameters, and the same layer for packed sequences."""
    torch.manual_seed(0)
    layer, config = KINDS[kind]
    plain = layer(
        config(
            hidden_size=HIDDEN,
            num_hidden_layers=1,
            layer_types=["linear_attention"],
            linear_num_key_heads=key_heads,
            linear_num_value_heads=value_heads,
            linear_key_head_dim=head_dim,
            linear_value_head_dim=head_dim + 4,
        ),
        0,
    )
    with torch.no_grad():
        for parameter in plain.parameters():
            if parameter.std() == 0:
                parameter += 0.1 * torch.randn_like(parameter)
    packed = copy.deepcopy(plain)
    set_classes(packed_layers(packed))
    return plain, packed


def alone(layer: nn.Module, hidden: Tensor, seqlens: list[int]) -> Tensor:
    """The layer of transformers, a sequence at a time."""
    return torch.cat([layer(part) for part in hidden.split(seqlens, dim=1)], dim=1)


def with_gradients(layer: nn.Module, run: Callable[[Tensor], Tensor], hidden: Tensor) -> tuple[Tensor, Gradients]:
    """The result, and the gradients of the input and every parameter for a random one of the result."""
    leaf = hidden.clone().requires_grad_()
    layer.zero_grad()
    out = run(leaf)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    (out.float() * slope).sum().backward()
    assert leaf.grad is not None
    return out.detach(), {"input": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


# --- the rule --------------------------------------------------------------------------------------------------------

DECAYS = torch.tensor([0.05, 1.0, 6.0, 60.0])  # of each head, times softplus(normal)


def leaves(seqlens: list[int], *, head_dim: int = 16) -> list[Tensor]:
    """Query, key, value, decay, beta and state of two key heads and four value heads."""
    torch.manual_seed(0)
    tokens = sum(seqlens)
    return [
        torch.randn(tokens, 2, head_dim),
        torch.randn(tokens, 2, head_dim),
        torch.randn(tokens, 4, head_dim + 4),
        -DECAYS * F.softplus(torch.randn(tokens, 4)),
        torch.rand(tokens, 4),
        torch.randn(len(seqlens), 4, head_dim, head_dim + 4),
    ]


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, seqlens: list[int], states: Tensor
) -> tuple[Tensor, Tensor]:
    """A token after the other, in float64."""
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(2, dim=1) for x in (q * q.shape[-1] ** -0.5, k))
    outputs, left, token = [], [], 0
    for length, state in zip(seqlens, states, strict=True):
        for _ in range(length):
            state = state * decay[token].exp()[:, None, None]
            error = v[token] - torch.einsum("hkv,hk->hv", state, k[token])
            state = state + torch.einsum("hk,hv->hkv", k[token], error * beta[token][:, None])
            outputs.append(torch.einsum("hkv,hk->hv", state, q[token]))
            token += 1
        left.append(state)
    return torch.stack(outputs), torch.stack(left)


def exact_rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, **_: Any) -> tuple[Tensor, None]:
    """In the place of transformers' function, for one sequence; before 5.24 its key heads are already repeated."""
    if q.shape[2] == v.shape[2]:
        q, k = q[:, :, ::2], k[:, :, ::2]
    inputs = (q[0], k[0], v[0], g[0], beta[0])
    none = v.new_zeros(1, v.shape[2], k.shape[3], v.shape[3])
    return by_definition(*inputs, [q.shape[1]], none)[0].unsqueeze(0), None


def rule_with_gradients(rule: Callable[..., tuple[Tensor, Tensor]], inputs: list[Tensor], seqlens: list[int]) -> Any:
    inputs = [x.clone().requires_grad_() for x in inputs]
    out, state = rule(*inputs[:5], seqlens, inputs[5])
    generator = torch.Generator().manual_seed(1)
    slopes = [torch.randn(x.shape, generator=generator).to(x.dtype) for x in (out, state)]
    return [out, state, *torch.autograd.grad([out, state], inputs, slopes)]


@pytest.mark.parametrize(("head_dim", "block_bytes"), [(16, 1), (16, 2**30), (128, 2**16)])
def test_the_rule_is_its_definition(monkeypatch: pytest.MonkeyPatch, head_dim: int, block_bytes: int) -> None:
    """From any state, with gradients of it and of the state that is left; also where decay is so fast that the gradient
    of it is next to nothing."""
    monkeypatch.setattr(gated_delta, "_CPU_BLOCK_BYTES", block_bytes)
    seqlens = [40, 1, 75, 33, 8]
    inputs = leaves(seqlens, head_dim=head_dim)
    expected = rule_with_gradients(by_definition, [x.double() for x in inputs], seqlens)
    found = rule_with_gradients(gated_delta.gated_delta_rule, inputs, seqlens)
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) < 5e-6
    for head in range(3):  # the last one's is too small for float32
        assert relative(found[5][:, head], expected[5][:, head]) < 1e-4


class NoSumThatVaries(TorchDispatchMode):
    """Refuses what a deterministic run refuses on CUDA: cumulative sums of floating-point numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten.cumsum.default or not args[0].is_floating_point()
        return func(*args, **(kwargs or {}))


def test_a_deterministic_run_on_cuda_needs_no_sum_that_varies(monkeypatch: pytest.MonkeyPatch) -> None:
    seqlens = [40, 1, 75, 33, 8]
    inputs = leaves(seqlens)
    expected = rule_with_gradients(gated_delta.gated_delta_rule, inputs, seqlens)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    with NoSumThatVaries():
        found = rule_with_gradients(gated_delta.gated_delta_rule, inputs, seqlens)
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) < 5e-6


def test_tokens_that_are_equal_and_never_forgotten_stay_finite() -> None:
    """The triangular systems of such tokens are as far from the identity as they can be."""
    seqlens = [200, 3]
    inputs = leaves(seqlens)
    _, key, _, decay, beta, _ = inputs
    key[:], decay[:], beta[:] = key[0], 0.0, 1.0
    expected = rule_with_gradients(by_definition, [x.double() for x in inputs], seqlens)
    found = rule_with_gradients(gated_delta.gated_delta_rule, inputs, seqlens)
    for one, other in zip(found, expected, strict=True):
        assert relative(one, other) < 1e-4


# --- layers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", SEQLENS)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_is_alone_is_transformers(monkeypatch: pytest.MonkeyPatch, kind: str, lengths: str) -> None:
    seqlens = SEQLENS[lengths]
    plain, packed = pair(kind)
    hidden = torch.randn(1, sum(seqlens), HIDDEN)
    found, of_packed = with_gradients(packed, lambda x: packed(x, seqlens=seqlens), hidden)
    each = torch.cat([packed(part, seqlens=[part.shape[1]]) for part in hidden.split(seqlens, dim=1)], dim=1)
    assert relative(found, each) < 2e-6
    theirs, of_theirs = with_gradients(plain, lambda x: alone(plain, x, seqlens), hidden)
    # The same in float64, where their gradient of the decay is not the difference of two larger numbers.
    monkeypatch.setattr(sys.modules[type(plain).__module__], "torch_chunk_gated_delta_rule", exact_rule)
    exact, of_exact = with_gradients(plain.double(), lambda x: alone(plain, x, seqlens), hidden.double())
    assert relative(found, theirs) < 2e-6 and relative(found, exact) < 2e-6
    assert of_packed.keys() == of_theirs.keys() == of_exact.keys()
    for name, gradient in of_exact.items():
        if gradient.any():
            # The logarithm of the decay is of the order of 10, and rounded before exp.
            assert relative(of_packed[name], gradient) < (3e-5 if name in DECAYING else 1e-5), name
            assert relative(of_packed[name], of_theirs[name]) < (2e-4 if name in DECAYING else 1e-5), name
        else:  # a sequence of one token has nothing that could decay
            assert lengths == "one token each" and name in DECAYING and not of_packed[name].any()


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_no_further_from_float32_than_transformers(kind: str) -> None:
    seqlens = SEQLENS["mixed"]
    plain, packed = pair(kind)
    hidden = torch.randn(1, sum(seqlens), HIDDEN).bfloat16().float()
    plain, packed = (layer.bfloat16().float() for layer in (plain, packed))
    expected, gradients = with_gradients(plain, lambda x: alone(plain, x, seqlens), hidden)
    half = hidden.bfloat16()
    plain, packed = plain.bfloat16(), packed.bfloat16()
    theirs, of_theirs = with_gradients(plain, lambda x: alone(plain, x, seqlens), half)
    ours, of_ours = with_gradients(packed, lambda x: packed(x, seqlens=seqlens), half)
    assert ours.dtype == torch.bfloat16
    assert relative(ours, expected) < 1.1 * relative(theirs, expected) < 0.02
    for name, gradient in gradients.items():
        assert relative(of_ours[name], gradient) < 1.2 * relative(of_theirs[name], gradient) + 1e-3, name


# --- states ----------------------------------------------------------------------------------------------------------


class States:
    """The states of sequences between calls."""

    def __init__(self) -> None:
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def take(self, layer: int) -> tuple[Tensor, Tensor] | None:
        return self.kept.get(layer)

    def keep(self, layer: int, conv: Tensor, state: Tensor) -> None:
        self.kept[layer] = (conv, state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["Qwen3-Next", "Qwen3.5"])
def test_sequences_that_are_cut_anywhere_and_go_on_are_whole(kind: str, dtype: torch.dtype) -> None:
    _, packed = pair(kind)
    packed = packed.to(dtype)
    seqlens = [70, 5, 40, 6]
    parts = torch.randn(1, sum(seqlens), HIDDEN).to(dtype).split(seqlens, dim=1)
    whole = packed(torch.cat(parts, dim=1), seqlens=seqlens).split(seqlens, dim=1)
    for cuts in ([1, 1, 1, 1], [2, 1, 3, 2], [32, 2, 16, 5], [69, 4, 39, 1]):
        states, found = States(), []
        starts = [0] * len(seqlens)
        # A first stretch up to the cuts, a second to three tokens before the shortest rest's end, and single tokens.
        rest = min(length - cut for length, cut in zip(seqlens, cuts, strict=True))
        for stops in (cuts, [length - min(rest - 1, 3) for length in seqlens], *([None] * min(rest - 1, 3))):
            ends = [start + 1 for start in starts] if stops is None else stops
            now = [part[:, a:b] for part, a, b in zip(parts, starts, ends, strict=True)]
            lengths = [x.shape[1] for x in now]
            with torch.no_grad():
                out = packed(torch.cat(now, dim=1), seqlens=lengths, states=states)
            found.append(out.split(lengths, dim=1))
            starts = ends
        conv, state = states.kept[0]
        assert starts == seqlens
        assert conv.shape == (4, packed.conv_dim, 3) and conv.dtype == dtype
        assert state.shape == (4, 4, 8, 12) and state.dtype == torch.float32
        for joined, expected in zip(zip(*found, strict=True), whole, strict=True):
            assert relative(torch.cat(joined, dim=1), expected.detach()) < (2e-6 if dtype == torch.float32 else 0.02)


def test_an_engine_and_a_trainer_may_ask_for_the_same_lengths() -> None:
    seqlens = [3, 19]
    _, packed = pair("Qwen3.5")
    hidden = torch.randn(1, sum(seqlens), HIDDEN)
    for cached in (chunks.cut, mixer._places):
        cached.cache_clear()
    with torch.inference_mode():
        expected = packed(hidden, seqlens=seqlens, states=States())
    found, _ = with_gradients(packed, lambda x: packed(x, seqlens=seqlens), hidden)
    assert torch.equal(found, expected)


# --- kernels of other packages ---------------------------------------------------------------------------------------


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Packages with the functions and demands of flash-linear-attention and causal-conv1d; the names of calls."""
    calls = []

    def chunk_gated_delta_rule(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        scale: float | None = None,
        initial_state: Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        calls.append("rule")
        assert q.dtype == k.dtype == v.dtype != torch.float32 and g.dtype == torch.float32
        assert cu_seqlens is not None and cu_seqlens.dtype == torch.int64 and len(q) == 1 and q.shape == k.shape
        assert q.shape[2] == v.shape[2] and scale is None and use_qk_l2norm_in_kernel and output_final_state
        lengths = cu_seqlens.diff().tolist()
        assert initial_state is None or initial_state.shape == (len(lengths), *v.shape[2:3], k.shape[3], v.shape[3])
        outputs = []
        for index, part in enumerate(zip(*(x.split(lengths, dim=1) for x in (q, k, v, g, beta)), strict=True)):
            start = None if initial_state is None else initial_state[index : index + 1]
            outputs.append(
                torch_chunk_gated_delta_rule(
                    *part, initial_state=start, output_final_state=True, use_qk_l2norm_in_kernel=True
                )
            )
        return torch.cat([out for out, _ in outputs], dim=1), torch.cat([state for _, state in outputs])

    def causal_conv1d_fn(
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        seq_idx: Tensor | None = None,
        initial_states: Tensor | None = None,
        return_final_states: bool = False,
        final_states_out: Tensor | None = None,
        activation: str | None = None,
    ) -> Tensor:
        calls.append("conv")
        _, channels, tokens = x.shape
        assert x.stride(1) == 1 and x.stride(2) % 8 == x.stride(0) % 8 == channels % 8 == 0
        assert seq_idx is not None and seq_idx.dtype == torch.int32 and seq_idx.shape == (1, tokens)
        assert initial_states is None and not return_final_states and final_states_out is None
        assert weight.shape == (channels, 4) and activation in ("silu", "swish")
        outputs = []
        for index in range(int(seq_idx.max()) + 1):
            own = x[:, :, seq_idx[0] == index]
            outputs.append(F.conv1d(F.pad(own, (3, 0)), weight.unsqueeze(1), bias, groups=channels))
        return F.silu(torch.cat(outputs, dim=2))

    modules: dict[str, dict[str, Any]] = {
        "fla": {},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
        "causal_conv1d": {"causal_conv1d_fn": causal_conv1d_fn},
    }
    for name, functions in modules.items():
        module = ModuleType(name)
        module.__dict__.update(functions)
        monkeypatch.setitem(sys.modules, name, module)
    cached = (gated_delta_cuda._fla, gated_delta_cuda._causal_conv1d, gated_delta_cuda._is_refused)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    for load in cached:
        load.cache_clear()
    yield calls
    for load in cached:
        load.cache_clear()


def test_packages_are_for_cuda_and_what_they_can_do() -> None:
    assert not gated_delta_cuda.has_rule("cuda", torch.bfloat16), "fla is installed; its stand-in proves nothing"
    assert not gated_delta_cuda.has_conv("cuda", torch.zeros(16, 4), "silu")


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("capability", "triton", "refuses"),
    [((9, 0), "3.6.0", True), ((9, 0), "3.7.1", False), ((9, 0), "3.3.1", False), ((10, 0), "3.6.0", False)],
)
def test_the_rule_is_not_asked_of_fla_where_it_refuses_triton(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], triton: str, refuses: bool
) -> None:
    gated_delta_cuda._is_refused.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setitem(sys.modules, "triton", SimpleNamespace(__version__=triton))
    assert gated_delta_cuda.has_rule("cuda", torch.bfloat16) != refuses


@pytest.mark.usefixtures("stand_ins")
def test_packages_that_are_there_are_for_cuda_and_what_they_can_do() -> None:
    assert gated_delta_cuda.has_rule("cuda", torch.bfloat16)
    assert not gated_delta_cuda.has_rule("cpu", torch.bfloat16)
    assert not gated_delta_cuda.has_rule("cuda", torch.float32)
    weight = torch.zeros(16, 4)
    assert gated_delta_cuda.has_conv("cuda", weight, "silu")
    assert not gated_delta_cuda.has_conv("cpu", weight, "silu")
    for other in (torch.zeros(16, 5), torch.zeros(12, 4)):
        assert not gated_delta_cuda.has_conv("cuda", other, "silu")
    assert not gated_delta_cuda.has_conv("cuda", weight, "gelu")


@pytest.mark.parametrize("kind", KINDS)
def test_packages_are_told_where_sequences_begin(
    monkeypatch: pytest.MonkeyPatch, stand_ins: list[str], kind: str
) -> None:
    seqlens = SEQLENS["mixed"]
    _, packed = pair(kind)
    packed = packed.bfloat16()
    hidden = torch.randn(1, sum(seqlens), HIDDEN).bfloat16()
    expected, gradients = with_gradients(packed, lambda x: packed(x, seqlens=seqlens), hidden)
    assert not stand_ins
    states = States()
    first = packed(hidden, seqlens=seqlens, states=states)
    second = packed(hidden, seqlens=seqlens, states=states)
    assert not torch.equal(first, second)
    # Their tensors are on the host here, and the choice is the one of a CUDA device: of the convolution alone, of both.
    for name, calls in (("has_conv", ["conv"]), ("has_rule", ["conv", "rule"])):
        choose = getattr(gated_delta_cuda, name)
        monkeypatch.setattr(gated_delta_cuda, name, lambda _, *others, choose=choose: choose("cuda", *others))
        stand_ins.clear()
        found, of_packages = with_gradients(packed, lambda x: packed(x, seqlens=seqlens), hidden)
        assert stand_ins == calls
        assert relative(found, expected) < 0.01
        for weight, gradient in gradients.items():
            assert relative(of_packages[weight], gradient) < 0.02, weight
    # The convolution of sequences that go on is not the package's, which takes no inputs from before them.
    states = States()
    for expected in (first, second):
        assert relative(packed(hidden, seqlens=seqlens, states=states), expected) < 0.01
    assert stand_ins == ["conv", "rule", "rule", "rule"]


# --- refused ---------------------------------------------------------------------------------------------------------


def test_heads_that_cannot_be_split_over_cp_are_refused(tmp_path: Path) -> None:
    settings = model_config(save_qwen3_next(tmp_path))
    config = load_model_config(settings)

    def problems(cp: int) -> list[str]:
        return list(parallel_model_problems(config, settings, ParallelConfig(cp=cp)))

    assert not problems(2)
    (problem,) = problems(3)
    assert problem == (
        "parallel.cp = 3, but the recurrent layers of qwen3_next have 2 key heads, which cannot be split over 3 ranks; "
        "possible: 1, 2"
    )
