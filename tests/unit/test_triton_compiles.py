"""Triton's kernels compile for GPUs that are not there: Triton brings NVIDIA's assembler along."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

PACKAGE = Path(__file__).parents[2] / "spmdrl"


@pytest.fixture(scope="module")
def assembly(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """By kernel and compute capability."""
    # In a process of its own: one that has begun with Triton's interpreter cannot compile.
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.compile_kernels", "80", "90"],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("cache"))},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
    )
    found: dict[str, str] = json.loads(done.stdout)
    return found


def test_every_kernel_compiles(assembly: dict[str, str]) -> None:
    written = [
        name
        for path in PACKAGE.rglob("*_triton.py")
        for name in re.findall(r"^@triton\.jit\ndef (\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    compiled = {name for code in assembly.values() for name in re.findall(r"\.entry (\w+)", code)}
    assert compiled == {*written} - {"_scaled", "_tanh"}  # which others call
    assert len(assembly) == 2 * (4 + 14 + 1)


def test_the_head_reads_rows_16_bytes_at_a_time(assembly: dict[str, str]) -> None:
    of_head = {name: code for name, code in assembly.items() if name.startswith(("summary", "gradient"))}
    assert len(of_head) == 8
    for name, code in of_head.items():
        assert "ld.global.v4.b32" in code, name


def test_digests_add_to_whole_words_whatever_the_order(assembly: dict[str, str]) -> None:
    for capability in (80, 90):
        assert {"atom.global.gpu.acq_rel.add.u64"} == {*re.findall(r"atom[\w.]+", assembly[f"digest {capability}"])}
