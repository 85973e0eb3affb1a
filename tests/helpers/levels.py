"""Levels of a processor's instructions, and what only some of them can run; each is tried on one machine.

    python -m tests.helpers.levels [ARGUMENTS OF PYTEST]

runs FILES at every level that this machine has. A level lowers torch, oneDNN, MKL and the C compiler of layers in C.
Tests skip by what they need, never by the name of a processor: what a level must run fails there instead.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from spmdrl.model.machine import instructions

ROOT = Path(__file__).parents[2]
_NAME = "SPMDRL_TEST_LEVEL"


@dataclass(frozen=True, slots=True)
class Level:
    """What a processor of this level has, and how a library is kept to it."""

    needs: frozenset[str]  # of the machine: instructions as Linux names them
    onednn: str
    torch: str
    mkl: str
    compiler: str  # the value of -march
    exact_dtypes: tuple[torch.dtype, ...]  # in which `true_on_policy` must be kept


# oneDNN computes products in bfloat16 from AVX-512 on, with instructions for them or without. Nothing else differs in
# what can be run: AVX2 lacks `true_on_policy` in bfloat16 alone.
LEVELS = {
    "avx2": Level(frozenset({"avx2", "fma"}), "AVX2", "avx2", "AVX2", "x86-64-v3", (torch.float32,)),
    "avx512": Level(
        frozenset({"avx512f", "avx512bw", "avx512vl", "avx512dq"}),
        *("AVX512_CORE", "avx512", "AVX512", "x86-64-v4"),
        (torch.float32, torch.bfloat16),
    ),
}

# Their numbers depend on which kernels the processor gets.
_UNIT = (
    *("attention", "block_attention", "checkpointing", "collect", "compiled", "correction", "engine_adapters", "fused"),
    *("gated_delta", "head_rows", "invariant", "linear", "logprobs", "one_token", "processor", "unused_weights"),
    *("sglang_operators", "torch_engine", "trunk"),
)
FILES = (*(f"unit/test_{name}.py" for name in _UNIT), "spmd/test_parity.py", "spmd/test_true_on_policy.py")


def exact_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes in which this process must be able to keep `true_on_policy`; none outside a level."""
    level = LEVELS.get(os.environ.get(_NAME, ""))
    return level.exact_dtypes if level else ()


def settings(name: str, folder: Path) -> dict[str, str]:
    """Return the variables that keep a process to a level; the folder gets a compiler for it."""
    level = LEVELS[name]
    compiler = folder / f"cc-{name}"
    compiler.write_text(f'#!/bin/sh\nexec cc "$@" -march={level.compiler}\n', encoding="utf-8")  # the last one counts
    compiler.chmod(0o755)
    return {
        _NAME: name,
        "ONEDNN_MAX_CPU_ISA": level.onednn,
        "ATEN_CPU_CAPABILITY": level.torch,
        "MKL_ENABLE_INSTRUCTIONS": level.mkl,
        "CC": str(compiler),
    }


def main(arguments: list[str]) -> int:
    """Run every level, and this processor as it is; returns 1 when one of them fails."""
    failed = []
    has = frozenset(instructions().split())
    with tempfile.TemporaryDirectory() as folder:
        for name in (*LEVELS, "native"):
            if name in LEVELS and not (platform.machine() == "x86_64" and LEVELS[name].needs <= has):
                print(f"== level {name} is skipped: this processor lacks it", flush=True)
                continue
            print(f"== level {name}", flush=True)
            lowered = settings(name, Path(folder)) if name in LEVELS else {}
            files = [str(ROOT / "tests" / file) for file in FILES]
            command = [sys.executable, "-m", "pytest", "-m", "not slow", *arguments, *files]
            if subprocess.run(command, cwd=ROOT, env=os.environ | lowered).returncode:
                failed.append(name)
    print(f"== failed: {', '.join(failed) or 'none'}")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
