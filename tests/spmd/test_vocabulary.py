"""A head split by vocabulary over N ranks gives every rank the scores and the gradients of the whole head."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import spmdrl.model.logprobs
from spmdrl.dist.mesh import build_meshes
from spmdrl.dist.session import spmd_session
from spmdrl.model.divergence import Divergence, TeacherHead, next_token_divergence
from spmdrl.model.logits_tile import Scale
from spmdrl.model.logprobs import HeadOptions, next_token_logprobs
from tests.helpers.ranks import run_ranks

TOKENS, HIDDEN, VOCABULARY = 70, 16, 24
KINDS = ("no bias", "bias", "forbidden tokens")
DIVERGENCES: tuple[Divergence, ...] = ("reverse", "forward", "jsd")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Of the whole head."""

    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]
    targets: Tensor  # [N]


def _inputs(kind: str) -> Inputs:
    draw = torch.Generator().manual_seed(0)
    bias = torch.randn(VOCABULARY, generator=draw)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=draw)
    if kind == "forbidden tokens":
        # Some of each rank's part, and all of the first.
        bias[:12] = bias[20] = -torch.inf
        targets = 13 + targets % 6
    hidden, weight = (torch.randn(rows, HIDDEN, generator=draw) for rows in (TOKENS, VOCABULARY))
    return Inputs(hidden, weight, None if kind == "no bias" else bias, targets)


def _scores_and_gradients(
    kind: str, num_ranks: int, rank: int, used: str, *, chunk: int, mesh: DeviceMesh | None = None
) -> list[Tensor]:
    """Logprobs, entropy, then the gradients of hidden, of this rank's weight and of its bias."""
    whole = _inputs(kind)
    mine = slice(rank * VOCABULARY // num_ranks, (rank + 1) * VOCABULARY // num_ranks)
    leaves = [whole.hidden, whole.weight[mine]] + ([] if whole.bias is None else [whole.bias[mine]])
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    hidden, weight, bias = (*leaves, None)[:3]
    logprobs, entropy = next_token_logprobs(hidden, weight, bias, whole.targets, HeadOptions(Scale(0.7), chunk, mesh))
    per_token = torch.linspace(-1, 1, TOKENS)
    loss = (per_token * logprobs).sum()
    if used == "both":
        loss = loss + 0.3 * (per_token.flip(0) * entropy).sum()
    return [logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, leaves)]


def _divergences(
    kind: str, num_ranks: int, rank: int, of: Divergence, *, chunk: int, mesh: DeviceMesh | None = None
) -> list[Tensor]:
    """Measure a divergence from a teacher with hidden states of another size, which comes third.

    Logits have a deviation of about 1, as differences of larger ones lose digits.
    """
    whole, draw = _inputs(kind), torch.Generator().manual_seed(1)
    mine = slice(rank * VOCABULARY // num_ranks, (rank + 1) * VOCABULARY // num_ranks)
    leaves = [whole.hidden, HIDDEN**-0.5 * whole.weight[mine]] + ([] if whole.bias is None else [whole.bias[mine]])
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    hidden, weight, bias = (*leaves, None)[:3]
    teacher_hidden, teacher_weight = (torch.randn(rows, 2 * HIDDEN, generator=draw) for rows in (TOKENS, VOCABULARY))
    teacher_weight *= (2 * HIDDEN) ** -0.5
    own_bias = None if whole.bias is None else whole.bias[mine]
    outputs = next_token_divergence(
        *(hidden, weight, bias, whole.targets, HeadOptions(Scale(0.7), chunk, mesh)),
        teacher_hidden=teacher_hidden,
        teacher=TeacherHead(weight=teacher_weight[mine], bias=own_bias, scale=Scale(1.3)),
        kind=of,
        beta=0.3,
    )
    slope = torch.linspace(-1, 1, TOKENS)
    loss = sum(factor * (slope * output).sum() for factor, output in zip((0.5, 0.3, 1.0), outputs, strict=True))
    return [*(output.detach() for output in outputs), *torch.autograd.grad(loss, leaves)]


def _split(num_ranks: int) -> list[list[Tensor]]:
    """Every kind on this rank, in tiles smaller than its part."""
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        mesh = build_meshes(world).world
        spmdrl.model.logprobs.TILE_ELEMENTS["cpu"] = 128
        return [
            _scores_and_gradients(kind, num_ranks, world.rank, used, chunk=32, mesh=mesh)
            for kind in KINDS
            for used in ("logprobs", "both")
        ] + [_divergences(kind, num_ranks, world.rank, of, chunk=32, mesh=mesh) for kind in KINDS for of in DIVERGENCES]


def _split_without_rows() -> list[Tensor]:
    """Gradients of hidden, weight and bias when no token is scored; the ranks meet all the same."""
    with spmd_session(threads_per_rank=1, deterministic=False) as world:
        leaves = [torch.ones(size).requires_grad_() for size in ((0, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,))]
        scores = next_token_logprobs(
            *leaves, torch.empty(0, dtype=torch.int64), HeadOptions(Scale(0.7), 4, build_meshes(world).world)
        )
        return [*torch.autograd.grad(scores[0].sum() + scores[1].sum(), leaves)]


def test_without_a_row_every_rank_has_gradients_of_zero() -> None:
    for hidden, weight, bias in run_ranks(2, _split_without_rows):
        assert hidden.shape == (0, HIDDEN)
        assert torch.equal(weight, torch.zeros(VOCABULARY, HIDDEN)) and torch.equal(bias, torch.zeros(VOCABULARY))


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_ranks_with_a_part_each_equal_one_with_all(num_ranks: int) -> None:
    wholes = {
        (kind, used): (_scores_and_gradients(kind, 1, 0, used, chunk=TOKENS), 3)
        for kind in KINDS
        for used in ("logprobs", "both")
    } | {(kind, of): (_divergences(kind, 1, 0, of, chunk=TOKENS), 4) for kind in KINDS for of in DIVERGENCES}
    everyones = run_ranks(num_ranks, _split, num_ranks)
    for (case, (whole, num_same)), *parts in zip(wholes.items(), *everyones, strict=True):
        for i, expected in enumerate(whole):
            found = [part[i] for part in parts]
            if i < num_same:  # scores and the gradient of hidden: whole on every rank, and the same to the bit
                assert all(torch.equal(found[0], other) for other in found), case
                found = found[:1]
            torch.testing.assert_close(torch.cat(found), expected, rtol=1e-5, atol=1e-5)
