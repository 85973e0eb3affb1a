"""Divergences by tiles equal those of whole distributions in float64, forward and backward."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from spmdrl.model import logits_tile
from spmdrl.model.divergence import Divergence, TeacherHead, next_token_divergence, top_tokens
from spmdrl.model.kernels import Kernel
from spmdrl.model.linear import linear
from spmdrl.model.logits_tile import Scale
from spmdrl.model.logprobs import Head, HeadOptions, next_token_logprobs
from spmdrl.model.operators import operators_of
from spmdrl.model.policy import Teaching
from spmdrl.step.batch import lay_end_to_end
from spmdrl.types import TopTokens
from tests.helpers import kernels_on_cpu
from tests.helpers.policies import policy_of
from tests.helpers.sequences import random_sequences

TOKENS, HIDDEN, TEACHER_HIDDEN, VOCABULARY = 37, 16, 24, 101
EXACT = 1e-6  # of a norm, in float32
SMALL_TILES = Head(linear, columns=30)
# Each with its beta.
KINDS: list[tuple[Divergence, float]] = [("reverse", 0.5), ("forward", 0.5), ("jsd", 0.1), ("jsd", 0.5), ("jsd", 0.9)]
SCALES = {  # the student's and the teacher's
    "plain": (Scale(), Scale()),
    "temperatures": (Scale(0.7), Scale(1.3)),
    "caps": (Scale(0.7, softcap=2.5), Scale(1.0, softcap=3.0)),
}

each_kind = pytest.mark.parametrize(("kind", "beta"), KINDS)


@dataclass(frozen=True, slots=True)
class Case:
    """Both models' heads and hidden states."""

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    teacher_hidden: Tensor
    teacher: TeacherHead
    scale: Scale = SCALES["plain"][0]

    @property
    def leaves(self) -> list[Tensor]:
        return [leaf for leaf in (self.hidden, self.weight, self.bias) if leaf is not None]

    def with_leaves(self, leaves: list[Tensor]) -> Case:
        hidden, weight, bias = (*leaves, None)[:3]
        return replace(self, hidden=hidden, weight=weight, bias=bias)


def case(
    scale: str = "plain",
    *,
    with_bias: bool = True,
    tokens: int = TOKENS,
    vocabulary: int = VOCABULARY,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """Logits with a deviation of about 1 on both sides."""
    draw = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw).to(dtype)

    of_student, of_teacher = SCALES[scale]
    return Case(
        random(tokens, HIDDEN),
        random(vocabulary, HIDDEN) / HIDDEN**0.5,
        random(vocabulary) if with_bias else None,
        torch.randint(0, vocabulary, (tokens,), generator=draw),
        random(tokens, TEACHER_HIDDEN),
        TeacherHead(
            weight=random(vocabulary, TEACHER_HIDDEN) / TEACHER_HIDDEN**0.5,
            bias=random(vocabulary) if with_bias else None,
            scale=of_teacher,
        ),
        of_student,
    )


def tiled(of: Case, kind: Divergence, beta: float, chunk: int = 16, head: Head = SMALL_TILES) -> tuple[Tensor, ...]:
    return next_token_divergence(
        *(of.hidden, of.weight, of.bias, of.targets, HeadOptions(of.scale, chunk), head),
        teacher_hidden=of.teacher_hidden,
        teacher=of.teacher,
        kind=kind,
        beta=beta,
    )


def log_p(hidden: Tensor, weight: Tensor, bias: Tensor | None, scale: Scale) -> Tensor:
    temperature, softcap = scale
    logits = torch.nn.functional.linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * (logits / softcap).tanh()
    return (logits / temperature).log_softmax(-1)


def whole(of: Case, kind: Divergence, beta: float, k: int | None = None) -> tuple[Tensor, ...]:
    """All of [T, V] in float64, by the definitions; with `k`, all but the teacher's k most probable tokens are one."""
    student = log_p(*(None if x is None else x.double() for x in (of.hidden, of.weight, of.bias)), of.scale)
    head = of.teacher
    teacher = log_p(
        *(None if x is None else x.double() for x in (of.teacher_hidden, head.weight, head.bias)),
        head.scale,
    )

    scores = student.gather(-1, of.targets[:, None])[:, 0], -(student.exp() * student).sum(-1)
    if k is not None:
        order = teacher.sort(descending=True).indices
        student, teacher = (x.gather(-1, order) for x in (student, teacher))
        student, teacher = (torch.cat([x[:, :k], x[:, k:].logsumexp(-1, keepdim=True)], -1) for x in (student, teacher))

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one.exp() * (one - other)).sum(-1)

    mixture = (beta * teacher.exp() + (1 - beta) * student.exp()).log()
    divergence = {
        "reverse": lambda: kl(student, teacher),
        "forward": lambda: kl(teacher, student),
        "jsd": lambda: beta * kl(teacher, mixture) + (1 - beta) * kl(student, mixture),
    }[kind]()
    return *scores, divergence


def merged(of: Case, kind: Divergence, beta: float, top: TopTokens, num_rows: int = 16) -> tuple[Tensor, ...]:
    return next_token_divergence(
        *(of.hidden, of.weight, of.bias, of.targets, HeadOptions(of.scale, num_rows), SMALL_TILES),
        teacher=top,
        kind=kind,
        beta=beta,
    )


def top_of(of: Case, k: int) -> TopTokens:
    head = of.teacher
    return top_tokens(of.teacher_hidden, head.weight, head.bias, HeadOptions(head.scale, 16), SMALL_TILES, k=k)


def results(of: Case, function: Any, used: str = "all") -> list[Tensor]:
    """Each result, then the gradients of a loss of those that are used."""
    leaves = [leaf.detach().clone().requires_grad_() for leaf in of.leaves]
    outputs = function(of.with_leaves(leaves))
    slope = torch.linspace(-1, 1, len(of.targets))
    factors = {"all": (0.7, 0.3, 1.0), "divergence": (0.0, 0.0, 1.0), "entropy": (0.0, 0.3, 1.0)}[used]
    loss = sum(factor * (slope * output).sum() for factor, output in zip(factors, outputs, strict=True) if factor)
    return [*(output.detach() for output in outputs), *torch.autograd.grad(loss, leaves)]


def apart(ours: list[Tensor], true: list[Tensor]) -> list[float]:
    """How far each tensor is from the true one, over its norm."""
    return [
        float((one.double() - other.double()).norm() / other.double().norm().clamp_min(1e-30))
        for one, other in zip(ours, true, strict=True)
    ]


@each_kind
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("used", ["all", "divergence", "entropy"])
def test_tiles_equal_the_definition_in_float64(kind: Divergence, beta: float, scale: str, used: str) -> None:
    for with_bias in (True, False):
        of = case(scale, with_bias=with_bias)
        for chunk, head in ((16, SMALL_TILES), (1000, Head(linear))):
            ours = results(of, lambda of, c=chunk, h=head: tiled(of, kind, beta, c, h), used)
            assert max(apart(ours, results(of, lambda of: whole(of, kind, beta), used))) < EXACT


@each_kind
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("used", ["all", "divergence"])
def test_the_teachers_top_tokens_equal_the_definition_in_float64(
    kind: Divergence, beta: float, scale: str, used: str
) -> None:
    of = case(scale)
    for k in (1, 7, 50):
        top = top_of(of, k)
        ours = results(of, lambda of, top=top: merged(of, kind, beta, top), used)
        true = results(of, lambda of, k=k: whole(of, kind, beta, k), used)
        assert max(apart(ours, true)) < 3 * EXACT
        assert (true[2] <= whole(of, kind, beta)[2]).all()


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_top_tokens_of_the_student_itself_are_exactly_no_divergence(
    kind: Divergence, beta: float, dtype: torch.dtype
) -> None:
    """Without a soft cap: torch's tanh depends on where in memory a number is."""
    of = replace(case(dtype=dtype), scale=Scale(0.7))
    same = TeacherHead(weight=of.weight, bias=of.bias, scale=of.scale)
    top = top_of(replace(of, teacher=same, teacher_hidden=of.hidden), 9)
    assert len(top.token_ids.unique(dim=1)[0]) == 9 and (top.logprobs.diff(dim=1) <= 0).all()
    _, _, divergence, *gradients = results(of, lambda of: merged(of, kind, beta, top), "divergence")
    assert all(torch.equal(x, torch.zeros_like(x)) for x in (divergence, *gradients))


@each_kind
def test_top_tokens_in_bfloat16_and_of_no_hidden_states(kind: Divergence, beta: float) -> None:
    for tokens in (TOKENS, 0):
        of = case("temperatures", dtype=torch.bfloat16, tokens=tokens)
        top = top_of(of, 20)
        ours, true = (
            results(of, lambda of, top=top: merged(of, kind, beta, top)),
            results(of, lambda of: whole(of, kind, beta, 20)),
        )
        assert max(apart(ours, true)) < 2e-2


def test_all_tokens_but_one_are_the_whole_vocabulary() -> None:
    of = case()
    top = top_of(of, VOCABULARY - 1)
    for kind, beta in KINDS:
        torch.testing.assert_close(merged(of, kind, beta, top), tiled(of, kind, beta), rtol=1e-4, atol=1e-5)


@each_kind
@settings(max_examples=15, deadline=None)
@given(
    tokens=st.integers(0, 5),
    vocabulary=st.integers(1, 70),
    columns=st.integers(1, 70),
    chunk=st.integers(1, 6),
)
def test_any_size_of_tiles(
    kind: Divergence, beta: float, tokens: int, vocabulary: int, columns: int, chunk: int
) -> None:
    of = case("temperatures", tokens=tokens, vocabulary=vocabulary)
    ours = results(of, lambda of: tiled(of, kind, beta, chunk, Head(linear, columns=columns)))
    true = results(of, lambda of: whole(of, kind, beta))
    for one, other in zip(ours, true, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-5, atol=1e-5)


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", SCALES)
def test_of_a_teacher_that_is_the_student_all_is_exactly_zero(
    kind: Divergence, beta: float, dtype: torch.dtype, scale: str
) -> None:
    of = case(scale, dtype=dtype)
    same = TeacherHead(weight=of.weight, bias=of.bias, scale=of.scale)
    of = replace(of, teacher=same, teacher_hidden=of.hidden)
    _, _, divergence, *gradients = results(of, lambda of: tiled(of, kind, beta), "divergence")
    assert all(torch.equal(x, torch.zeros_like(x)) for x in (divergence, *gradients))


@each_kind
def test_a_teacher_near_the_student_is_measured(kind: Divergence, beta: float) -> None:
    """A divergence that is a millionth of the terms that it is summed from."""
    of = case()
    near = TeacherHead(weight=of.weight + 2e-3 * of.teacher.weight[:, :HIDDEN], bias=of.bias, scale=Scale())
    of = replace(of, teacher=near, teacher_hidden=of.hidden)
    ours, true = (results(of, lambda of, f=f: f(of, kind, beta), "divergence") for f in (tiled, whole))
    assert true[2].mean() < 1e-5
    assert (ours[2] - true[2]).abs().max() < 5e-7
    assert max(apart(ours[3:], true[3:])) < 1e-3


@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_and_entropy_are_those_of_the_plain_head_to_the_bit(
    kind: Divergence, beta: float, dtype: torch.dtype
) -> None:
    """With tiles of as many tokens; both models' share the room of one."""

    def plain(of: Case) -> tuple[Tensor, ...]:
        scores = next_token_logprobs(
            *(of.hidden, of.weight, of.bias, of.targets, HeadOptions(of.scale, 8), SMALL_TILES)
        )
        return *scores, torch.zeros(TOKENS)

    of = case("caps", dtype=dtype)
    ours = results(of, lambda of: (*tiled(of, kind, beta)[:2], torch.zeros(TOKENS)))
    assert all(torch.equal(one, other) for one, other in zip(ours, results(of, plain), strict=True))


@each_kind
def test_bfloat16_is_as_near_as_its_logits_are(kind: Divergence, beta: float) -> None:
    of = case("temperatures", dtype=torch.bfloat16)
    ours, true = (results(of, lambda of, f=f: f(of, kind, beta)) for f in (tiled, whole))
    assert [grad.dtype for grad in ours[3:]] == [torch.bfloat16] * 3
    assert max(apart(ours, true)) < 2e-2


@each_kind
def test_what_both_forbid_counts_as_if_it_was_not_there(kind: Divergence, beta: float) -> None:
    of = case("temperatures")
    allowed = torch.arange(VOCABULARY) % 3 != 1
    allowed[:33] = False  # a whole tile
    numbers = allowed.cumsum(0) - 1
    targets = torch.nonzero(allowed).flatten()[of.targets % int(allowed.sum())]
    head = of.teacher
    assert of.bias is not None and head.bias is not None
    forbidden, forbidden_of_teacher = (torch.where(allowed, bias, -torch.inf) for bias in (of.bias, head.bias))
    with_forbidden = replace(of, bias=forbidden, targets=targets, teacher=replace(head, bias=forbidden_of_teacher))
    without = replace(
        of,
        weight=of.weight[allowed],
        bias=of.bias[allowed],
        targets=numbers[targets],
        teacher=replace(head, weight=head.weight[allowed], bias=head.bias[allowed]),
    )
    ours, true = (results(x, lambda x: tiled(x, kind, beta)) for x in (with_forbidden, without))
    ours[4], ours[5] = ours[4][allowed], ours[5][allowed]
    assert max(apart(ours, true)) < EXACT


def test_what_only_one_allows_is_infinitely_far() -> None:
    of = case()
    assert of.bias is not None and of.teacher.bias is not None
    at_5 = torch.arange(VOCABULARY) == 5
    of_student = replace(of, bias=of.bias.masked_fill(at_5, -torch.inf))
    of_teacher = replace(of, teacher=replace(of.teacher, bias=of.teacher.bias.masked_fill(at_5, -torch.inf)))
    assert tiled(of_teacher, "reverse", 0.5)[2].isinf().all() and tiled(of_student, "reverse", 0.5)[2].isfinite().all()
    assert tiled(of_student, "forward", 0.5)[2].isinf().all() and tiled(of_teacher, "forward", 0.5)[2].isfinite().all()
    for x in (of_student, of_teacher):
        found = results(x, lambda x: tiled(x, "jsd", 0.3), "divergence")
        assert all(tensor.isfinite().all() for tensor in found[2:])
        assert apart(found[2:3], [whole_of_allowed(x)]) < [EXACT]


def whole_of_allowed(of: Case) -> Tensor:
    """The Jensen-Shannon divergence with beta 0.3 where one model forbids a token, in float64."""
    head = of.teacher
    student = log_p(of.hidden.double(), of.weight.double(), of.bias.double(), Scale())
    teacher = log_p(of.teacher_hidden.double(), head.weight.double(), head.bias.double(), Scale())
    mixture = 0.3 * teacher.exp() + 0.7 * student.exp()
    entropies = [torch.special.entr(p).sum(-1) for p in (mixture, teacher.exp(), student.exp())]
    return entropies[0] - 0.3 * entropies[1] - 0.7 * entropies[2]


@each_kind
def test_probabilities_that_are_far_apart_have_finite_gradients(kind: Divergence, beta: float) -> None:
    """Each model gives nearly all to one token; these differ by 200 nats."""
    shift = torch.tensor([200.0, 0.0, 0.0, 0.0])
    teacher = TeacherHead(weight=torch.zeros(4, 3), bias=shift.flip(0), scale=Scale())
    of = Case(torch.ones(2, 2), torch.zeros(4, 2), shift, torch.tensor([0, 3]), torch.ones(2, 3), teacher)
    ours, true = (results(of, lambda of, f=f: f(of, kind, beta), "divergence") for f in (tiled, whole))
    for one, other in zip(ours[2:], true[2:], strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-6, atol=1e-6)


def test_gradients_never_reach_the_teacher() -> None:
    of = case()
    weight, teacher_hidden = (x.clone().requires_grad_() for x in (of.teacher.weight, of.teacher_hidden))
    hidden = of.hidden.clone().requires_grad_()
    of = replace(of, hidden=hidden, teacher_hidden=teacher_hidden, teacher=replace(of.teacher, weight=weight))
    tiled(of, "reverse", 0.5)[2].sum().backward()
    assert hidden.grad is not None and weight.grad is None and teacher_hidden.grad is None


def test_what_cannot_be_compared_is_refused() -> None:
    of = case()
    with pytest.raises(ValueError, match="101 rows and the teacher's 100"):
        tiled(replace(of, teacher=replace(of.teacher, weight=of.teacher.weight[1:])), "reverse", 0.5)
    with pytest.raises(ValueError, match="37 hidden states of the student and 36"):
        tiled(replace(of, teacher_hidden=of.teacher_hidden[1:]), "reverse", 0.5)
    with pytest.raises(ValueError, match=r"beta = 1\.0 is not between"):
        tiled(of, "jsd", 1.0)


def test_no_tile_is_larger_than_asked_and_the_head_is_computed_once_each_way() -> None:
    """Twice in the forward pass for the Jensen-Shannon divergence."""
    for kind, passes in (("reverse", 2), ("forward", 2), ("jsd", 3)):
        seen: list[tuple[int, int, int]] = []

        def watched(rows: Tensor, head: Tensor, bias: Tensor | None, seen: list[Any] = seen) -> Tensor:
            seen.append((len(rows), *head.shape))
            return torch.nn.functional.linear(rows, head, bias)

        of = case()
        results(of, lambda of, k=kind, w=watched: tiled(of, k, 0.5, 16, Head(w, columns=30)))
        assert max(rows for rows, _, _ in seen) == 8 and max(columns for _, columns, _ in seen) == 30
        for width in (HIDDEN, TEACHER_HIDDEN):
            assert sum(n * columns for n, columns, d in seen if d == width) == passes * TOKENS * VOCABULARY


def test_the_heads_own_tiles_reduce_what_is_of_one_model_alone() -> None:
    calls: list[str] = []

    class Watched:
        def summary(self, *args: Any, **options: Any) -> Tensor:
            calls.append("summary")
            return logits_tile.summary(*args, **options)

        def gradient(self, *args: Any, **options: Any) -> Tensor:
            calls.append("gradient")
            return logits_tile.gradient(*args, **options)

    of = case(with_bias=False)
    head = Head(linear, tile=Watched())
    for used, expected in (("all", ["summary"] * 4 + ["gradient"] * 2), ("divergence", ["summary"] * 4)):
        calls.clear()
        results(of, lambda of: tiled(of, "reverse", 0.5, 1000, head), used)
        assert calls == expected


def test_each_kernels_operators_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its log-probabilities have the bits of the kernel's own head."""
    kernels_on_cpu.use(monkeypatch)
    of = case(with_bias=False)
    compared: dict[str, Any] = {"teacher_hidden": of.teacher_hidden, "teacher": of.teacher, "kind": "reverse"}
    plain = tiled(replace(of, scale=Scale(0.7)), "reverse", 0.5)
    for kernel in ("sdpa", "invariant", "sglang_fa3"):
        operators = operators_of(kernel)
        inputs = (of.hidden, of.weight, None, of.targets, HeadOptions(Scale(0.7), 16))
        *scores, divergence = operators.next_token_divergence(*inputs, **compared)
        expected = operators.next_token_logprobs(*inputs)
        limit = 1e-6 if kernel == "sdpa" else 0.0
        torch.testing.assert_close(scores, list(expected), rtol=limit, atol=limit, msg=kernel)
        torch.testing.assert_close(divergence, plain[2], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kernel", ["sdpa", "invariant"])
def test_a_policy_that_is_taught_scores_its_tokens_as_without_a_teacher(kernel: Kernel) -> None:
    taught = [replace(one, teacher=0) for one in random_sequences(4)]
    micro_batch = lay_end_to_end(taught, {}, multiple=7, distill={(0, 0): 0.5})
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    policy, teacher = (policy_of("none", kernel=kernel, num_hidden_layers=layers, **sizes) for layers in (2, 1))
    with torch.no_grad():
        micro_batch = replace(micro_batch, teacher_outputs=(teacher.hidden(micro_batch, 0),))
        alone = policy(micro_batch)
        policy.teaching = Teaching(kinds=["reverse"], beta=0.5, heads=[teacher.copied_head(97)])
        both = policy(micro_batch)
    limit = 1e-6 if kernel == "sdpa" else 0.0
    for one, other in ((alone.logprobs, both.logprobs), (alone.entropy, both.entropy)):
        torch.testing.assert_close(one, other, rtol=limit, atol=limit)
    assert both.divergence is not None and torch.equal(both.divergence > 0, micro_batch.taught_by(0))
