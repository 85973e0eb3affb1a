"""Layers in C compute what layers in torch compute, with any number of threads; without a compiler there are none."""

from __future__ import annotations

import _ctypes
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spmdrl.cpu import kernels_c
from spmdrl.cpu.kernels_c import CannotCompile, attend_short
from spmdrl.model import fused, fused_plain
from spmdrl.model.attention_layer import SeenKeys
from tests.helpers.fused_cases import CASES, EMPTY, Case, gradients, inputs_of
from tests.helpers.layers import layers_in_c
from tests.helpers.rounding import assert_within, causal_attention_bounds

SEQLENS = [1, 17, 2, 128, 33, 16]
HEADS = [(4, 2, 32), (3, 3, 8), (6, 2, 40), (8, 1, 16)]  # query heads, key heads, width


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A library as it was compiled; from then on, compiling it is a copy of what was made."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        kernels_c.library.__wrapped__("fused")
        (made,) = (folder / "spmdrl" / "compiled").iterdir()
        content, run = made.read_bytes()[: -kernels_c._DIGEST_BYTES], kernels_c._run

        def copied(command: list[str]) -> str:
            if "-o" not in command:
                return run(command)
            Path(command[command.index("-o") + 1]).write_bytes(content)
            return ""

        patch.setattr(kernels_c, "_run", copied)
        yield made


@pytest.fixture
def any_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("case", [*CASES, *EMPTY], ids=str)
def test_c_equals_torch(case: Case) -> None:
    given = inputs_of(case, torch.float64)
    exact = gradients(case.fused, given)
    with layers_in_c():
        assert fused.kernels_for(given[0].float()) is kernels_c and fused.kernels_for(given[0]) is fused_plain
        ours = gradients(case.fused, [x.float() for x in given])
    for one, other in zip(ours, exact, strict=True):
        assert (one - other).norm() <= 2e-6 * other.norm().clamp(min=1)


def test_a_gate_is_right_however_large_it_is() -> None:
    gate = torch.cat([torch.linspace(-200, 200, 4001), torch.tensor([-torch.inf, torch.inf, torch.nan])])
    ours, exact = kernels_c.swiglu(gate, torch.ones_like(gate)), F.silu(gate.double())
    assert torch.isnan(ours[-1]) and ours[-2] == torch.inf
    torch.testing.assert_close(ours[:-3], exact[:-3].float(), rtol=1e-6, atol=1e-35)


@pytest.mark.usefixtures("any_threads")
def test_the_number_of_threads_changes_no_bit() -> None:
    x, weight = torch.randn(1500, 4, 32), torch.rand(32)
    angles = torch.randn(1500, 16).repeat(1, 2)
    q, k = (torch.randn(sum(SEQLENS) * 8, heads, 32) for heads in (4, 2))

    def results() -> list[Tensor | None]:
        _, rstd = kernels_c.rms_norm(x, weight, 1e-6)
        return [
            *kernels_c.rms_norm_backward(x, x, weight, rstd),
            *kernels_c.rotate_backward(x, x, weight, angles.cos(), angles.sin(), 1e-6),
            *kernels_c.attend_backward(q, q, k, k, SEQLENS * 8, 0.2),
        ]

    by_threads = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        by_threads.append(results())
    for others in by_threads[1:]:
        assert all(torch.equal(one, other) for one, other in zip(by_threads[0], others, strict=True))


@pytest.mark.parametrize(("heads", "kv_heads", "width"), HEADS)
def test_attention_equals_torch_and_knows_no_neighbours(heads: int, kv_heads: int, width: int) -> None:
    torch.manual_seed(0)
    # Heads before tokens in memory, as a model hands them over.
    q, k, v = (
        torch.randn(n, sum(SEQLENS), width).transpose(0, 1).requires_grad_() for n in (heads, kv_heads, kv_heads)
    )
    upstream = torch.randn(sum(SEQLENS), heads, width)
    with layers_in_c():
        ours = attend_short(q, k, v, SEQLENS, 0.3)
        found = torch.autograd.grad(ours, (q, k, v), upstream)
        alone = attend_short(q[18:20], k[18:20], v[18:20], SEQLENS[2:3], 0.3)
    for one, (exact, bound) in zip(
        [ours, *found], causal_attention_bounds(q, k, v, upstream, SEQLENS, 0.3), strict=True
    ):
        assert_within(one, exact, bound)
    assert torch.equal(alone, ours[18:20])


@pytest.mark.parametrize("window", [None, 1, 6, 100])
def test_attention_to_a_cache_sees_what_it_should(window: int | None) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([5, 1, 40, 17])
    whole = torch.randn(2, 4, 3, 64, 24)  # with room for more tokens than there are
    keys, values = whole[0, :, :, :40], whole[1, :, :, :40]
    q = torch.randn(4, 6, 24)
    seen = SeenKeys(lengths=lengths, shortest=1, longest=40, window=window)
    found = kernels_c.attend_to_cache(q, keys, values, seen, 0.2)
    hidden = seen.hidden
    assert hidden is not None
    exact = F.scaled_dot_product_attention(
        q[:, :, None].double(),
        keys.double(),
        values.double(),
        attn_mask=~hidden[:, None, None],
        scale=0.2,
        enable_gqa=True,
    )
    torch.testing.assert_close(found, exact[:, :, 0].float(), rtol=0, atol=2e-6)


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("is_normed", [False, True])
def test_the_newest_tokens_are_rotated_stored_and_attend_in_one_pass(window: int | None, is_normed: bool) -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([5, 1, 40, 17])
    cache = torch.randn(2, 6, 3, 64, 24)  # more rows than are in use, and room for more tokens than there are
    qkv = torch.randn(4, 6 + 3 + 3, 24)
    cos, sin = torch.randn(2, 4, 24)
    norms = (torch.randn(24), torch.randn(24)) if is_normed else (None, None)
    seen = SeenKeys(lengths=lengths, shortest=1, longest=40, window=window)
    expected = cache.clone()
    q, k, v = qkv.split((6, 3, 3), dim=1)
    q, k = (kernels_c.rotate(x, norm, cos, sin, 1e-6) for x, norm in zip((q, k), norms, strict=True))
    for row, length in enumerate(lengths.tolist()):
        expected[:, row, :, length - 1] = torch.stack([k[row], v[row]])
    attended = kernels_c.attend_to_cache(q, *expected[:, :4, :, :40], seen, 0.2)
    found = kernels_c.attend_newest(qkv, norms, cos, sin, 1e-6, *cache, seen, 0.2)
    torch.testing.assert_close(cache, expected, rtol=0, atol=1e-6)
    torch.testing.assert_close(found, attended, rtol=0, atol=2e-6)


def test_the_last_tokens_of_rows_attend_to_all_of_them() -> None:
    """Rows with tokens before, without, and with more new tokens than fit into a vector; strided queries."""
    torch.manual_seed(0)
    seqlens, earlier = [3, 20, 1], [37, 0, 5]
    keys, values = torch.randn(2, 6, 2, 64, 24)
    q = torch.randn(24, 10, 24)[:, :6]
    found = kernels_c.attend_to_rows(q, keys, values, 2, seqlens, earlier, 0.2)
    for row, (part, before) in enumerate(zip(q.split(seqlens), earlier, strict=True), start=2):
        end = before + len(part)
        seen = torch.arange(end) <= torch.arange(before, end)[:, None]
        exact = F.scaled_dot_product_attention(
            part.transpose(0, 1).double(),
            *(cells[row, :, :end].double() for cells in (keys, values)),
            attn_mask=seen,
            scale=0.2,
            enable_gqa=True,
        )
        own, found = found[: len(part)], found[len(part) :]
        torch.testing.assert_close(own, exact.transpose(0, 1).float(), rtol=0, atol=2e-6)


def test_what_was_compiled_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    kernels_c.library.__wrapped__("fused")
    (made,) = (tmp_path / "spmdrl" / "compiled").iterdir()
    assert made.parent.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(kernels_c, "_compile", None)  # is not called again
    kernels_c.library.__wrapped__("fused")
    # What others can write is not run.
    made.parent.chmod(0o777)
    with pytest.raises(TypeError):
        kernels_c.library.__wrapped__("fused")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda made: os.truncate(made, 4096),
    "empty": lambda made: made.write_bytes(b""),
    "garbage": lambda made: made.write_bytes(bytes(range(256)) * 99),
    "a bit": lambda made: made.write_bytes(made.read_bytes()[:9000] + b"x" + made.read_bytes()[9001:]),
    "without the functions": lambda made: (made.unlink(), shutil.copy(_ctypes.__file__, made)),
    "a link": lambda made: (made.rename(made.with_name("other")), made.symlink_to("other")),
    "another user's": lambda made: os.chown(made, 65534, 65534),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_library_is_compiled_again_and_a_sentence_says_so(
    damage: str, fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if damage == "another user's" and os.getuid():
        pytest.skip("only root gives files away")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = tmp_path / "spmdrl" / "compiled" / fresh.name
    made.parent.mkdir(parents=True, mode=0o700)
    shutil.copy(fresh, made)
    DAMAGES[damage](made)
    found = kernels_c.library.__wrapped__("fused")
    assert found.functions.rms_norm and made.read_bytes() == fresh.read_bytes()
    assert re.fullmatch(rf"{made} cannot be used: it.*; it was compiled again", found.note)
    assert kernels_c.library.__wrapped__("fused").note == ""


def test_where_a_library_cannot_be_replaced_it_is_compiled_at_each_start(
    fresh: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "spmdrl" / "compiled" / fresh.name / "file").mkdir(parents=True)
    (tmp_path / "spmdrl" / "compiled").chmod(0o700)
    found = kernels_c.library.__wrapped__("fused")
    assert found.functions.rms_norm and "they are compiled at each start" in found.note


def test_a_folder_that_cannot_be_written_is_no_reason_not_to_compile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    found = kernels_c.library.__wrapped__("fused")
    assert found.functions.rms_norm and "they are compiled at each start" in found.note


@pytest.mark.parametrize(
    ("compiler", "said"),
    [(None, "there is no C compiler: install gcc"), ("exit 3", "exit code 3"), ("echo oh no >&2; exit 1", "oh no")],
)
def test_without_a_compiler_there_are_no_functions(
    compiler: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if compiler:
        (tmp_path / "cc").write_text(f"#!/bin/sh\n{compiler}\n")
        (tmp_path / "cc").chmod(0o755)
    with pytest.raises(CannotCompile, match=said):
        kernels_c.library.__wrapped__("fused")


def test_the_sources_have_no_warnings(tmp_path: Path) -> None:
    sources = sorted((Path(kernels_c.__file__).parent / "c").glob("*.c"))
    assert sources
    for source in sources:
        command = ["gcc", "-O3", "-fopenmp", "-Wall", "-Wextra", "-Werror", "-c", str(source), "-o", os.devnull]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
