"""Every kernel computes what the plain linear layer does, forward and backward, for any number of rows."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import Qwen3Config

from spmdrl.cpu import linear_layers
from spmdrl.cpu.linear_layers import LinearKernels, kernels_in_use, linear, outer, row_step, use_kernels
from tests.helpers.rounding import assert_within, sum_bound

Product = Callable[..., Tensor]
ALL = [LinearKernels(*kernels) for kernels in itertools.product(["mkl", "onednn"], repeat=3)]
SHAPES = [(24, 40), (40, 24)]


@pytest.fixture(autouse=True)
def _kernels_as_before() -> Iterator[None]:
    before = kernels_in_use()
    yield
    use_kernels(before)


@pytest.mark.parametrize("rows", [1, 31, 32, 63, 65, 256, 300, 1000, 4111])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("kernels", ALL[1:], ids=lambda kernels: "-".join(asdict(kernels).values()))
def test_it_equals_the_plain_one(rows: int, with_bias: bool, kernels: LinearKernels) -> None:
    use_kernels(kernels)
    torch.manual_seed(0)
    bias = torch.randn(24, requires_grad=True) if with_bias else None
    leaves = [torch.randn(1, rows, 40, requires_grad=True), torch.randn(24, 40, requires_grad=True)]
    leaves += [] if bias is None else [bias]
    weights = torch.randn(1, rows, 24)

    def forward_and_backward(function: Product, leaves: list[Tensor], weights: Tensor) -> list[Tensor]:
        y = function(*leaves)
        return [y.detach(), *torch.autograd.grad((y * weights).sum(), leaves)]

    found = forward_and_backward(linear, leaves, weights)
    expected = forward_and_backward(F.linear, [x.double() for x in leaves], weights.double())
    magnitudes = forward_and_backward(F.linear, [x.double().abs() for x in leaves], weights.double().abs())
    bounds = [sum_bound(*one) for one in zip(magnitudes, (41, 24, rows, rows), strict=False)]
    for one in zip(found, expected, bounds, strict=True):
        assert_within(*one)
    with torch.no_grad():
        assert_within(linear(*leaves), expected[0], bounds[0])
        assert_within(outer(weights[0], leaves[0][0]), expected[2], bounds[2])


def test_rows_are_padded_to_few_sizes_by_little() -> None:
    sizes = {rows: rows + -rows % row_step(rows) for rows in range(32, 2**16)}
    assert all(size <= rows + max(31, rows / 16) for rows, size in sizes.items())
    assert len(set(sizes.values())) <= 16 * 11
    assert all(size % row_step(size) == 0 for size in set(sizes.values()))


def test_measuring_takes_a_fifth_of_a_second_at_most_and_names_a_kernel_of_each_kind() -> None:
    config = Qwen3Config(hidden_size=4096, intermediate_size=12288)
    shapes = linear_layers.shapes_of(config)
    assert shapes == [(512, 512)]  # the widest that are tried
    assert linear_layers.kernels_of(linear_layers.measure(shapes)) in ALL


def test_a_choice_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = [asdict(LinearKernels("onednn", "mkl", "onednn")), asdict(LinearKernels())]
    monkeypatch.setattr(linear_layers, "measure", lambda shapes: measured.pop(0))
    assert linear_layers.choose_kernels(SHAPES, tmp_path) == LinearKernels("onednn", "mkl", "onednn")
    assert linear_layers.choose_kernels(SHAPES, tmp_path) == LinearKernels("onednn", "mkl", "onednn")
    assert linear_layers.choose_kernels(SHAPES[:1], tmp_path) == LinearKernels()  # other shapes are another choice
    assert len(json.loads((tmp_path / linear_layers.CACHE).read_text())) == 2


@pytest.mark.parametrize("content", [b"", b"[]", b'{"a": {"few_rows": "fast"}}', b'{"a"', b"\xff" * 99, None])
def test_what_cannot_be_read_is_measured_again_and_a_line_says_so(
    tmp_path: Path, content: bytes | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(linear_layers, "measure", lambda shapes: asdict(LinearKernels()))
    fresh, damaged = (tmp_path / name / linear_layers.CACHE for name in ("fresh", "damaged"))
    damaged.parent.mkdir()
    damaged.symlink_to("nowhere") if content is None else damaged.write_bytes(content)
    chosen = [linear_layers.choose_kernels(SHAPES, file.parent) for file in (fresh, damaged)]
    assert chosen == [LinearKernels()] * 2 and damaged.read_bytes() == fresh.read_bytes()
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and str(damaged) in said and "is measured again" in said


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(linear_layers, "measure", lambda shapes: asdict(LinearKernels()))
    assert linear_layers.choose_kernels(SHAPES, tmp_path / "file") == LinearKernels()
