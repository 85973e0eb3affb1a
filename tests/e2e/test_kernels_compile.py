"""Triton's kernels compile for GPUs that are not there: Triton brings NVIDIA's assembler along."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


def test_the_head_compiles_and_reads_rows_16_bytes_at_a_time(tmp_path: Path) -> None:
    # In a process of its own: one that has begun with Triton's interpreter cannot compile.
    done = subprocess.run(
        [sys.executable, "-m", "tests.helpers.compile_head", "80", "90"],
        env=os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)},
        check=True,
        stdout=subprocess.PIPE,
        text=True,
        timeout=200,
    )
    found = json.loads(done.stdout)
    assert len(found) == 8
    for name, code in found.items():
        assert "ld.global.v4.b32" in code, name
