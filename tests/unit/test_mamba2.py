"""Mamba 2 and short convolutions on packed sequences: packed = alone = transformers, with gradients, from any state."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, Zamba2Config

from spmdrl.config import ParallelConfig
from spmdrl.model import ssd
from spmdrl.model.layer_kinds import attending_layers, recurrent_layers
from spmdrl.model.layers import set_classes
from spmdrl.model.load import load_model_config, parallel_model_problems
from spmdrl.model.recurrent import packed_layers
from spmdrl.model.ssd import state_space_rule
from spmdrl.types import UserError
from tests.helpers.configs import model_config
from tests.helpers.models import SIZES, config_of, save_other

SEQLENS = [5, 1, 48, 49, 200, 33, 7, 7, 97, 2, 1, 16, 17]
FAMILIES = ("bamba", "falcon_h1", "granitemoehybrid", "lfm2", "nemotron_h")
DECAYS = torch.tensor([0.05, 1.0, 6.0, 60.0, 0.5, 3.0])  # of each head, times a number from 0 to 1


def relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def by_definition(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
    """A token after the other."""
    heads = v.shape[1] // k.shape[1]
    q, k = (x.repeat_interleave(heads, dim=1) for x in (q, k))
    outputs, left, token = [], [], 0
    for length, state in zip(SEQLENS, states, strict=True):
        for _ in range(length):
            state = state * decay[token].exp()[:, None, None] + k[token][:, :, None] * v[token][:, None, :]
            outputs.append(torch.einsum("hn,hnp->hp", q[token], state))
            token += 1
        left.append(state)
    return torch.stack(outputs), torch.stack(left)


@pytest.mark.parametrize(("groups", "heads", "block_bytes"), [(2, 4, 1), (1, 6, 2**30), (2, 6, 30_000), (1, 5, 60_000)])
def test_the_rule_is_its_definition(monkeypatch: pytest.MonkeyPatch, groups: int, heads: int, block_bytes: int) -> None:
    """From any state, with gradients of it and of the state that is left; heads in blocks of all sizes."""
    monkeypatch.setattr(ssd, "_CPU_BLOCK_BYTES", block_bytes)
    torch.manual_seed(0)
    tokens = sum(SEQLENS)
    shapes = [(tokens, groups, 8), (tokens, groups, 8), (tokens, heads, 12)]
    leaves = [torch.randn(shape) for shape in shapes]
    leaves += [-DECAYS[:heads] * torch.rand(tokens, heads), torch.randn(len(SEQLENS), heads, 8, 12)]
    found_leaves, exact_leaves = ([x.to(dtype).requires_grad_() for x in leaves] for dtype in (None, torch.float64))
    found = state_space_rule(*found_leaves[:4], SEQLENS, found_leaves[4])
    exact = by_definition(*exact_leaves)
    slopes = [torch.randn_like(x) for x in found]
    gradients = torch.autograd.grad(found, found_leaves, slopes)
    exact_gradients = torch.autograd.grad(exact, exact_leaves, [x.double() for x in slopes])
    for one, other in zip([*found, *gradients], [*exact, *exact_gradients], strict=True):
        assert relative(one, other) < 3e-6
    # Where sequences begin without a state and leave none, less is computed.
    found, left = state_space_rule(*found_leaves[:4], SEQLENS, keeps_state=False)
    exact, _ = by_definition(*exact_leaves[:4], torch.zeros_like(exact_leaves[4]))
    gradients = torch.autograd.grad(found, found_leaves[:4], slopes[0])
    exact_gradients = torch.autograd.grad(exact, exact_leaves[:4], slopes[0].double())
    assert left.numel() == 0
    for one, other in zip([found, *gradients], [exact, *exact_gradients], strict=True):
        assert relative(one, other) < 3e-6
    short = [seqlen for seqlen in SEQLENS if seqlen <= ssd._CHUNK_TOKENS]
    tokens = [x[: sum(short)].detach() for x in leaves[:4]]
    alone, whole = (state_space_rule(*tokens, short, keeps_state=keeps)[0] for keeps in (False, True))
    assert relative(alone, whole) < 1e-6


class States:
    """The states that one call leaves for the next."""

    def __init__(self) -> None:
        self.left: tuple[Tensor, Tensor] | None = None

    def take(self, layer: int) -> tuple[Tensor, Tensor] | None:
        return self.left

    def keep(self, layer: int, conv: Tensor, state: Tensor) -> None:
        self.left = conv, state


def pair(family: str) -> tuple[nn.Module, nn.Module]:
    """transformers' recurrent layer with random parameters, and the same layer for packed sequences."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config_of(family))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    (plain, *_) = [layer for layer, kind in packed_layers(model) if not kind.__name__.endswith("DecoderLayer")]
    packed = copy.deepcopy(plain)
    set_classes(packed_layers(packed))
    return plain, packed


def with_gradients(layer: nn.Module, run: Any, hidden: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    leaf = hidden.clone().requires_grad_()
    out = run(leaf)
    (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(1))).sum().backward()
    assert leaf.grad is not None
    return out.detach(), {"input": leaf.grad, **{name: p.grad for name, p in layer.named_parameters()}}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_layer_is_that_of_transformers(family: str) -> None:
    plain, packed = pair(family)
    hidden = torch.randn(1, sum(SEQLENS), SIZES["hidden_size"])
    found, gradients = with_gradients(packed, lambda x: packed(x, seqlens=SEQLENS), hidden)
    expected, wanted = with_gradients(
        plain, lambda x: torch.cat([plain(part) for part in x.split(SEQLENS, dim=1)], dim=1), hidden
    )
    assert relative(found, expected) < 2e-6
    for name, gradient in gradients.items():
        assert relative(gradient, wanted[name]) < 1e-5, name


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sequence_that_is_cut_anywhere_and_goes_on_is_whole(family: str) -> None:
    _, packed = pair(family)
    hidden = torch.randn(1, 70, SIZES["hidden_size"])
    with torch.inference_mode():
        whole = packed(hidden, seqlens=[70])
        for cut in (1, 2, 3, 40, 69):
            states = States()
            parts = [packed(part, seqlens=[part.shape[1]], states=states) for part in hidden.split([cut, 70 - cut], 1)]
            assert relative(torch.cat(parts, dim=1), whole) < 2e-6
        states = States()
        one_by_one = [packed(token, seqlens=[1], states=states) for token in hidden.split(1, dim=1)]
        assert relative(torch.cat(one_by_one, dim=1), whole) < 2e-6


def test_layers_that_attend_and_those_that_do_not(tmp_path: Any) -> None:
    kinds = {
        "nemotron_h": ([2], [0, 4]),  # the others are experts and an MLP
        "falcon_h1": ([0, 1], [0, 1]),  # side by side
        "lfm2": ([1], [0]),
    }
    for family, expected in kinds.items():
        config = load_model_config(model_config(save_other(family, tmp_path / family)))
        assert (attending_layers(config), recurrent_layers(config)) == expected


def test_ranks_that_cannot_share_the_heads_are_refused(tmp_path: Any) -> None:
    path = save_other("nemotron_h", tmp_path)
    cfg = model_config(path)
    (problem,) = parallel_model_problems(load_model_config(cfg), cfg, ParallelConfig(cp=3))
    assert problem.startswith("parallel.cp = 3, but the recurrent layers of nemotron_h have 4 heads in 2 groups")
    assert problem.endswith("possible: 1, 2, 4")


def test_blocks_that_layers_share_are_refused(tmp_path: Any) -> None:
    Zamba2Config(num_hidden_layers=2, layers_block_type=["linear_attention", "hybrid"]).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(UserError, match="Zamba2ForCausalLM has layers that share their weights"):
        load_model_config(model_config(str(tmp_path)))
