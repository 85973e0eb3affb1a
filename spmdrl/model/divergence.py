"""Divergences of a student from a teacher over the whole vocabulary, by tiles of both models' logits, never [T, V].

z are a model's logits over its temperature, p its softmax, and Z the sum of exp(z); s is the student, t the teacher.
The Kullback-Leibler divergences need one pass over the tiles, as all that they have of both models are differences of
z under one model's p and the two log Z. The Jensen-Shannon divergence needs a second one: the mixture of both models
is known only with their normalizers. Every term is a function of z_s - z_t, so that equal models are exactly 0 apart,
and exactly 0 is their gradient.

The arithmetic here is torch's on every device; what a tile says of the student alone, log-probabilities and entropy, is
computed as in `next_token_logprobs`, on CUDA by Triton.
`top_tokens` finds a teacher's most probable tokens by the same tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from spmdrl.algo.formula import Divergence
from spmdrl.algo.kl import merged_divergence
from spmdrl.model import logits_tile
from spmdrl.model.logits_tile import GradientTerms, Scale, Tile
from spmdrl.model.logprobs import (
    FAST_HEAD,
    Head,
    HeadOptions,
    Linear,
    merged_over,
    next_token_logprobs_of,
    over_slabs,
    part_of,
    scores_of,
    slices_of,
    summed_gradients,
)
from spmdrl.types import TopTokens

# Beyond it, the smaller of two probabilities is below float32's precision of the larger, and exp does not overflow.
_MAX_LOG_RATIO = 80.0
_INFINITE = -logits_tile.FORBIDDEN / 10  # a larger difference of two z is from a token that only one model forbids


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherHead:
    """The linear layer that turns a teacher's hidden states into logits; nothing here has a gradient."""

    weight: Tensor  # [V, Dt], or this rank's rows [V/R, Dt] with a vocabulary mesh
    bias: Tensor | None  # [V] or [V/R]
    scale: Scale  # with the model's own factor in its temperature, as in `Policy`


def next_token_divergence(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    options: HeadOptions,
    head: Head = FAST_HEAD,
    *,
    teacher_hidden: Tensor | None = None,
    teacher: TeacherHead | TopTokens,
    kind: Divergence,
    beta: float = 0.5,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (logprobs [N], entropy [N], divergence [N]), float32 nats.

    The first two are those of `next_token_logprobs`, whose arguments these are: to the bit, where a row of `head` does
    not depend on the rows next to it. The third is of the distributions that the student's hidden [N, D] and the
    teacher's teacher_hidden [N, Dt] predict over the same vocabulary:

        reverse    KL(student || teacher)
        forward    KL(teacher || student)
        jsd        beta KL(teacher || m) + (1 - beta) KL(student || m), with m = beta teacher + (1 - beta) student

    The last is the generalized Jensen-Shannon divergence of arXiv 2306.13649; for small beta it tends to beta times the
    forward one, for small 1 - beta to 1 - beta times the reverse one. Gradients reach hidden, weight and bias through
    each of the three results, and never the teacher. Where only the first model of a Kullback-Leibler divergence allows
    a token (the second has a logit of -inf), it is inf.

    With a teacher's `TopTokens` in the place of its head and hidden states, the divergence is that of
    `merged_divergence`, over these tokens and all others as one.

    Raises ValueError when the vocabularies differ in size, the hidden states in number, or beta is not between 0 and 1.
    """
    if not 0.0 < beta < 1.0:
        raise ValueError(f"beta = {beta} is not between 0 and 1; at the ends, kind is forward or reverse")
    if isinstance(teacher, TopTokens):
        logprobs, entropy, of_tokens = next_token_logprobs_of(
            hidden, weight, bias, targets, teacher.token_ids, options, head
        )
        return logprobs, entropy, merged_divergence(of_tokens, teacher.logprobs, kind=kind, beta=beta)
    assert teacher_hidden is not None, "a teacher's head needs its hidden states"
    if len(weight) != len(teacher.weight):
        raise ValueError(
            f"the student's head has {len(weight)} rows and the teacher's {len(teacher.weight)}; "
            "a divergence over the whole vocabulary needs the same vocabulary"
        )
    if len(hidden) != len(teacher_hidden):
        raise ValueError(f"{len(hidden)} hidden states of the student and {len(teacher_hidden)} of the teacher")
    return _TiledDivergence.apply(
        *(hidden, weight, bias, options.rows_of(targets, weight), teacher_hidden, teacher.weight, teacher.bias),
        *(teacher.scale, kind, beta, options, head),
    )


@dataclass(frozen=True, slots=True)
class _Model:
    """One of both models: its head, at its hidden states."""

    linear: Linear
    scale: Scale
    hidden: Tensor  # [N, D]
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]

    def logits(self, rows: slice, slab: slice) -> Tensor:
        """Compute a tile of logits."""
        return self.linear(self.hidden[rows], self.weight[slab], part_of(self.bias, slab))

    def z(self, rows: slice, slab: slice) -> Tensor:
        """Compute a tile of z in float32; forbidden tokens have `FORBIDDEN`."""
        return self.z_of(self.logits(rows, slab).float())

    def z_of(self, logits: Tensor) -> Tensor:
        """Compute the same of float32 logits, which it overwrites."""
        return self.scale.z(logits).clamp_min_(logits_tile.FORBIDDEN)


@dataclass(frozen=True, slots=True)
class _Normalizers:
    """Numbers of whole distributions, [N] each, once the sums over both models' tiles are complete."""

    student: Tensor  # log Z_s
    teacher: Tensor  # log Z_t
    log_ratio: Tensor  # log Z_s - log Z_t, without the cancellation of two large numbers

    @classmethod
    def of(cls, sums: Tensor) -> _Normalizers:
        """Take them from sums as `_extended` makes them."""
        largest, total, _, _, teacher_largest, teacher_total = sums[:6]
        log_ratio = (largest - teacher_largest) + (total / teacher_total).log()
        return cls(largest + total.log(), teacher_largest + teacher_total.log(), log_ratio)

    def part(self, rows: slice) -> _Normalizers:
        """Return those of some tokens, [n, 1] each, to be used with tiles."""
        return _Normalizers(self.student[rows, None], self.teacher[rows, None], self.log_ratio[rows, None])


class _TiledDivergence(torch.autograd.Function):
    """`next_token_divergence`, with targets counted from the first row of `weight`; they may lie outside of it."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        teacher_hidden: Tensor,
        teacher_weight: Tensor,
        teacher_bias: Tensor | None,
        teacher_scale: Scale,
        kind: Divergence,
        beta: float,
        options: HeadOptions,
        head: Head,
    ) -> tuple[Tensor, Tensor, Tensor]:
        student = _Model(head.linear, options.scale, hidden, weight, bias)
        teacher = _Model(head.linear, teacher_scale, teacher_hidden, teacher_weight, teacher_bias)
        vocabulary, chunk = options.vocabulary, max(1, min(options.chunk, len(hidden)))
        slabs, tile = head.slabs(len(weight), chunk, hidden.device.type), head.tile_on(hidden.device.type)
        # Both models' tiles share the room of one: half of the tokens, for columns decide how tiles are merged.
        chunks = slices_of(len(hidden), -(-chunk // 2))
        sums = torch.empty(8 if kind == "jsd" else 9, len(hidden), dtype=torch.float32, device=hidden.device)
        for rows in chunks:
            sums[:, rows] = over_slabs(slabs, partial(_extended, kind, tile, student, teacher, targets[rows], rows))
        if vocabulary is not None:
            sums = merged_over(vocabulary, partial(_merged, kind), sums)
        logprobs, entropy, _ = scores_of(sums[:4])
        normalizers = _Normalizers.of(sums)
        if kind == "jsd":
            of_mixture = sums.new_zeros(2, len(hidden))
            for rows in chunks:
                for slab in slabs:
                    of_mixture[:, rows] += _mixture_sums(student, teacher, rows, slab, normalizers.part(rows), beta)
            if vocabulary is not None:
                of_mixture = merged_over(vocabulary, torch.add, of_mixture)
            mean = of_mixture[0]
            divergence = (beta - 1.0) * mean - beta * of_mixture[1]
        else:
            mean = sums[8] / sums[_FIRST[kind] + 1]
            divergence = mean - normalizers.log_ratio if kind == "reverse" else mean + normalizers.log_ratio
        ctx.save_for_backward(
            *(hidden, weight, bias, targets, teacher_hidden, teacher_weight, teacher_bias),
            *(normalizers.student, normalizers.teacher, normalizers.log_ratio, entropy, mean),
        )
        ctx.set_materialize_grads(False)  # what is unused costs nothing in backward
        ctx.teacher_scale, ctx.kind, ctx.beta, ctx.options = teacher_scale, kind, beta, options
        ctx.chunks, ctx.slabs, ctx.head, ctx.tile = chunks, slabs, head, tile
        return logprobs, entropy, divergence

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_divergence: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, *of_teacher = ctx.saved_tensors[:7]
        *normalizers, entropy, mean = ctx.saved_tensors[7:]
        both = _Normalizers(*normalizers)
        scale: Scale = ctx.options.scale
        student = _Model(ctx.head.linear, scale, hidden, weight, bias)
        teacher = _Model(ctx.head.linear, ctx.teacher_scale, *of_teacher)
        has_scores = grad_logprobs is not None or grad_entropy is not None
        by_logprob = torch.zeros_like(entropy) if grad_logprobs is None else grad_logprobs / scale.temperature
        by_entropy = None if grad_entropy is None else grad_entropy / scale.temperature
        by_divergence = None if grad_divergence is None else grad_divergence / scale.temperature
        terms = GradientTerms(both.student, entropy, by_logprob, by_entropy)

        def of_tile(rows: slice, slab: slice) -> Tensor:
            logits, total = student.logits(rows, slab), None
            if by_divergence is not None:
                z = student.z_of(logits.to(torch.float32, copy=has_scores))
                slope = scale.slope(z)
                total = _gradient(ctx.kind, ctx.beta, z, teacher.z(rows, slab), both.part(rows), mean[rows, None])
                total.mul_(by_divergence[rows, None])
                total = total if slope is None else total.mul_(slope)
                if not has_scores:
                    return total.to(logits.dtype)
            of_scores: Tensor = ctx.tile.gradient(logits, targets[rows], slab.start, scale, terms.of(rows))
            return of_scores if total is None else of_scores.add_(total)

        tiles = (ctx.needs_input_grad[:3], ctx.chunks, ctx.slabs, ctx.options.vocabulary)
        return *summed_gradients(hidden, weight, bias, of_tile, *tiles), *(None,) * 9


# Sums over a part of the vocabulary are [9, N] float32: the student's and the teacher's summary (`logits_tile`), and
# the sum of exp(z - largest) (z - other z), where z is of the first model of a Kullback-Leibler divergence, other z of
# the second; KL is the mean of z - other z less that of the log Z. Of jsd there are only the summaries.
_FIRST = {"reverse": 0, "forward": 4}  # where the summary of the first model begins


def _extended(
    kind: Divergence,
    tile: Tile,
    student: _Model,
    teacher: _Model,
    targets: Tensor,
    rows: slice,
    before: Tensor | None,
    slab: slice,
) -> Tensor:
    """Add a tile to the sums over the parts of the vocabulary before it."""

    def summarised(model: _Model, before: Tensor | None) -> tuple[Tensor | None, Tensor]:
        """Return a copy of z, where that is needed, and the summary."""
        logits = model.logits(rows, slab)
        z = None if kind == "jsd" else model.z_of(logits.to(torch.float32, copy=True))
        return z, tile.summary(logits, targets, slab.start, model.scale, before)

    z, summary = summarised(student, part_of(before, slice(4)))
    teacher_z, teacher_summary = summarised(teacher, part_of(before, slice(4, 8)))
    summaries = torch.cat([summary, teacher_summary])
    if z is None or teacher_z is None:
        return summaries
    largest = summaries[_FIRST[kind]]
    of_gap = _gap_sum(*((z, teacher_z) if kind == "reverse" else (teacher_z, z)), largest)
    if before is not None:
        of_gap += _rescaled(before[8], before[_FIRST[kind]] - largest)
    return torch.cat([summaries, of_gap[None]])


def _merged(kind: Divergence, one: Tensor, other: Tensor) -> Tensor:
    """Merge the sums over two parts of the vocabulary."""
    summaries = torch.cat([logits_tile.merged(one[rows], other[rows]) for rows in (slice(4), slice(4, 8))])
    if kind == "jsd":
        return summaries
    i = _FIRST[kind]
    of_gap = torch.add(*(_rescaled(part[8], part[i] - summaries[i]) for part in (one, other)))
    return torch.cat([summaries, of_gap[None]])


def _gap_sum(z: Tensor, other: Tensor, largest: Tensor) -> Tensor:
    """Sum exp(z - largest) (z - other) over a tile: [n], inf where only `other` forbids a token. Overwrites both."""
    gap = torch.sub(z, other, out=other)
    is_infinite = gap.amax(-1) > _INFINITE
    return gap.mul_(z.sub_(largest[:, None]).exp_()).sum(-1).masked_fill_(is_infinite, torch.inf)


def _rescaled(total: Tensor, below: Tensor) -> Tensor:
    """Return exp(below) total, [N]; what is inf remains so."""
    return total.mul(below.exp()).masked_fill_(total == torch.inf, torch.inf)


def _mixture_sums(
    student: _Model, teacher: _Model, rows: slice, slab: slice, both: _Normalizers, beta: float
) -> Tensor:
    """Return a tile's part of the means of log m - log p, the student's and the teacher's under itself: [2, n]."""
    z, teacher_z = student.z(rows, slab), teacher.z(rows, slab)
    ratio = _bounded(teacher_z - z, both)
    of_student = _log_mixture(ratio.clone(), beta).mul_(z.sub_(both.student).exp_()).sum(-1)
    of_teacher = _log_mixture(ratio.neg_(), 1.0 - beta).mul_(teacher_z.sub_(both.teacher).exp_()).sum(-1)
    return torch.stack([of_student, of_teacher])


def _bounded(gap: Tensor, both: _Normalizers) -> Tensor:
    """Turn z_t - z_s into log p_t - log p_s, within bounds, in place."""
    return gap.add_(both.log_ratio).clamp_(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)


def _log_mixture(ratio: Tensor, fraction: float) -> Tensor:
    """Turn the log of another probability over a model's own into that of (1 - fraction) own + fraction other over the
    own, in place: 0 where both are equal."""
    return ratio.expm1_().mul_(fraction).log1p_()


def _gradient(kind: Divergence, beta: float, z: Tensor, teacher_z: Tensor, both: _Normalizers, mean: Tensor) -> Tensor:
    """Compute the gradient of a divergence by a tile of the student's z; overwrites z and teacher_z.

    With u = log(p_s / p_t), or (1 - beta) log(p_s / m), it is p_s (u - E_s[u]); for the forward one, p_s - p_t.
    """
    if kind == "forward":
        return z.sub_(both.student).exp_().sub_(teacher_z.sub_(both.teacher).exp_())
    if kind == "reverse":
        difference = torch.sub(z, teacher_z, out=teacher_z).sub_(mean)
    else:
        gap = torch.sub(teacher_z, z, out=teacher_z)
        difference = _log_mixture(_bounded(gap, both), beta).sub_(mean).mul_(beta - 1.0)
    return difference.mul_(z.sub_(both.student).exp_())


@torch.no_grad()
def top_tokens(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, options: HeadOptions, head: Head = FAST_HEAD, *, k: int
) -> TopTokens:
    """Find the k most probable next tokens after each of the N hidden states.

    The arguments are those of `next_token_logprobs`, and with these the log-probabilities have the bits of
    `next_token_logprobs_of`, but for a soft cap's rounding. k is at most V.
    """
    scale, chunk, start = options.scale, max(1, min(options.chunk, len(hidden))), options.start(weight)
    slabs, tile = head.slabs(len(weight), chunk, hidden.device.type), head.tile_on(hidden.device.type)
    summary = torch.empty(4, len(hidden), dtype=torch.float32, device=hidden.device)
    # z and token, [2, N, k]: float64 has both without loss.
    best = torch.full((2, len(hidden), k), -torch.inf, dtype=torch.float64, device=hidden.device)
    for rows in slices_of(len(hidden), chunk):
        outside = torch.full((rows.stop - rows.start,), -1, device=hidden.device)  # no target

        def extended(before: Tensor | None, slab: slice, rows: slice = rows, outside: Tensor = outside) -> Tensor:
            logits = head.linear(hidden[rows], weight[slab], part_of(bias, slab))
            values, columns = logits.topk(min(k, logits.shape[1]))
            z = scale.z(values.float())
            best[:, rows] = _better(best[:, rows], torch.stack([z.double(), (columns + slab.start + start).double()]))
            return tile.summary(logits, outside, 0, scale, before)

        summary[:, rows] = over_slabs(slabs, extended)
    if options.vocabulary is not None:
        summary = merged_over(options.vocabulary, logits_tile.merged, summary)
        best = merged_over(options.vocabulary, _better, best)
    z, token_ids = best[0].float(), best[1].long()
    return TopTokens(token_ids, (z - summary[0, :, None]) - summary[1, :, None].log())


def _better(one: Tensor, other: Tensor) -> Tensor:
    """Return the best of both, as many as in the first: [2, n, k] and [2, n, m] give [2, n, k]."""
    both = torch.cat([one, other], -1)
    order = both[0].topk(one.shape[2]).indices
    return both.gather(-1, order.expand(2, *order.shape))
