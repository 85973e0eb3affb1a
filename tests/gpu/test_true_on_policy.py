"""With SGLang on a CUDA device the mismatch is exactly 0: the test which decides, and its parts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from spmdrl.model.attention_layer import AttentionLayer
from spmdrl.model.exact import sglang_kernels, sglang_operators
from spmdrl.model.kernels import Kernel, SequenceLayout, causal_attention
from tests.helpers.device_sizes import needs_kernels
from tests.helpers.small_run import finished_torchrun, sums_from_files, write_small_run

PACKS = pytest.mark.claim(
    "SGLang on one device",
    "With `true_on_policy = true`, products, means, log-softmax and attention over a pack have the bits of each "
    "sequence alone.",
)

SEQLENS, PROMPTS = [5, 300, 1, 70, 513], [3, 1, 1, 70, 200]
NO_SGLANG = "SGLang is not installed"

needs_sglang = pytest.mark.skipif(find_spec("sglang") is None, reason=NO_SGLANG)


def skip_without(backend: str) -> None:
    if problems := list(sglang_operators.device_problems(backend)):
        pytest.skip("; ".join(problems))


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16().cuda()


def train(tmp_path: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """A run of 4 steps on one rank with `true_on_policy = true`, of a model whose sizes are those of kernels."""
    model = {"num_layers": 2, "hidden_size": 512, "head_dim": 128}
    write_small_run(tmp_path, model=model, run={"dir": f"{tmp_path}"}, **sums_from_files(tmp_path))
    # Kernels are compiled, and graphs recorded, at the first start.
    return finished_torchrun(1, str(tmp_path / "c.toml"), "true_on_policy=true", *overrides, timeout_s=580)


@pytest.mark.claim(
    "SGLang on one device", "With `true_on_policy = true`, the embedded engine is refused by name on a CUDA device."
)
@pytest.mark.timeout(300)
def test_the_embedded_engine_is_refused_by_name(tmp_path: Path) -> None:
    done = train(tmp_path)
    assert done.returncode != 0
    assert 'has no exact kernels for rollout.engine = "torch" on a CUDA device' in done.stderr


def rows_alone_and_together(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    together = function(x)
    for part in (slice(0, 1), slice(7, 24), slice(len(x) - 129, len(x))):
        assert torch.equal(function(x[part]), together[part]), part


@PACKS
@needs_sglang
@needs_kernels
def test_products_means_and_log_softmax_do_not_depend_on_other_rows() -> None:
    skip_without("triton")
    x, weight, bias = noise(700, 320), noise(1000, 320), noise(1000)
    for given in (None, bias):
        rows_alone_and_together(lambda rows, given=given: sglang_kernels.product(rows, weight, given), x)
        expected = torch.nn.functional.linear(x, weight, given)
        torch.testing.assert_close(sglang_kernels.product(x, weight, given), expected, atol=0.5, rtol=0.02)
    # Nor on how many columns are computed with a column, such as when an engine fuses projections.
    assert torch.equal(sglang_kernels.product(x, weight, None)[:, :77], sglang_kernels.product(x, weight[:77], None))
    rows_alone_and_together(sglang_kernels.mean, x.float())
    torch.testing.assert_close(sglang_kernels.mean(x.float()), x.float().mean(-1, keepdim=True))
    rows_alone_and_together(sglang_kernels.log_softmax, x)
    torch.testing.assert_close(sglang_kernels.log_softmax(x), x.float().log_softmax(-1).bfloat16())


@PACKS
@needs_sglang
@needs_kernels
@pytest.mark.parametrize(
    "backend, heads",
    [("fa3", (4, 4, 128)), ("fa3", (8, 2, 128)), ("fa3", (4, 2, 96)), ("triton", (4, 4, 64)), ("triton", (8, 2, 128))],
)
def test_attention_over_a_pack_has_the_bits_of_each_sequence_alone(
    backend: sglang_kernels.Backend, heads: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_without(backend)
    kernel: Kernel = "sglang_fa3" if backend == "fa3" else "sglang_triton"
    num_heads, kv_heads, head_dim = heads
    q, k, v = (noise(sum(SEQLENS), count, head_dim).requires_grad_() for count in (num_heads, kv_heads, kv_heads))
    sampled = torch.cat([torch.arange(n) >= prompt for n, prompt in zip(SEQLENS, PROMPTS, strict=True)]).cuda()

    def attended(seqlens: list[int], tokens: slice, name: Kernel = kernel) -> torch.Tensor:
        cu_seqlens = torch.tensor([0, *seqlens]).cumsum(0).int().cuda()
        layout = SequenceLayout(seqlens, cu_seqlens, sampled=sampled[tokens])
        return causal_attention(layout, name)(q[tokens], k[tokens], v[tokens], layer)

    layer = AttentionLayer(index=0, scale=head_dim**-0.5)
    everything = slice(0, sum(SEQLENS))
    together = attended(SEQLENS, everything)
    start = 0
    for length in SEQLENS:
        tokens = slice(start, start + length)
        assert torch.equal(attended([length], tokens), together[tokens])
        start += length
    monkeypatch.setattr(sglang_kernels, "_MAX_PAIRS", 1000)
    assert torch.equal(attended(SEQLENS, everything), together)
    plain = attended(SEQLENS, everything, "varlen")
    torch.testing.assert_close(together, plain, atol=0.02, rtol=0.02)
    slope = noise(*together.shape)
    for one, other in zip(*(torch.autograd.grad((x * slope).sum(), (q, k, v)) for x in (together, plain)), strict=True):
        torch.testing.assert_close(one, other, atol=0.02, rtol=0.02)


@PACKS
@needs_sglang
@needs_kernels
@pytest.mark.parametrize("heads", [(4, 4, 128), (8, 2, 128), (16, 1, 128), (4, 2, 96), (4, 2, 256)])
def test_fa3_gives_a_query_the_same_bits_alone_and_among_others(heads: tuple[int, int, int]) -> None:
    """An engine decodes with one query a sequence; the trainer has all of them."""
    skip_without("fa3")
    num_heads, kv_heads, head_dim = heads
    length, scale = 900, head_dim**-0.5
    q, k, v = (noise(length, count, head_dim) for count in (num_heads, kv_heads, kv_heads))
    q = q.flip(0).contiguous()  # otherwise queries would be their own keys
    pages = torch.arange(length, dtype=torch.int32, device="cuda")

    def attended(queries: slice) -> torch.Tensor:
        count, seen = queries.stop - queries.start, queries.stop
        return sglang_kernels.attend_paged(
            q[queries],
            k[:, None],
            v[:, None],
            page_table=pages[None, :seen].contiguous(),
            cache_seqlens=torch.tensor([seen], dtype=torch.int32, device="cuda"),
            cu_seqlens_q=torch.tensor([0, count], dtype=torch.int32, device="cuda"),
            max_seqlen_q=count,
            softmax_scale=scale,
        )

    together = attended(slice(0, length))
    for queries in (*(slice(i, i + 1) for i in (0, 127, 128, 191, 192, 500, 899)), slice(300, 303), slice(256, 700)):
        assert torch.equal(attended(queries), together[queries]), queries


@pytest.mark.claim(
    "SGLang on one device",
    'With `true_on_policy = true` and `"triton"`, the mismatch of a run is exactly 0.0.',
    case="triton",
)
@pytest.mark.claim(
    "SGLang on one device",
    'With `true_on_policy = true` and `"fa3"`, the mismatch of a run is exactly 0.0.',
    case="fa3",
)
@needs_sglang
@needs_kernels
@pytest.mark.timeout(600)
@pytest.mark.parametrize("backend", ["fa3", "triton"])
def test_sglang_and_the_trainer_agree_exactly(tmp_path: Path, backend: str) -> None:
    """A run ends when they do not; and it says so in every step."""
    skip_without(backend)
    done = train(
        tmp_path,
        "rollout.engine=sglang",
        "rollout.memory_fraction=0.3",
        f"rollout.attention_backend={backend}",
        "rollout.sglang.grammar_backend=none",
        "run.num_steps=4",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["mismatch/max_abs_nats"] for row in rows if row["step"]] == [0.0] * 4
