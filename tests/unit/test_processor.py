"""The processor is described by one function, on x86 and on ARM, with the settings that lower what is used of it."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import pytest
import torch

from spmdrl.model import machine
from tests.helpers import levels

X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 1
model name\t: AMD EPYC 7763
flags\t\t: fpu avx2

processor\t: 1
model name\t: another
"""
GRACE = """processor\t: 0
BogoMIPS\t: 2000.00
Features\t: fp asimd sve2 bf16
CPU implementer\t: 0x41
CPU architecture: 8
CPU variant\t: 0x0
CPU part\t: 0xd4f
CPU revision\t: 0

processor\t: 1
"""


@pytest.mark.parametrize(
    ("cpuinfo", "called", "name", "instructions"),
    [
        (X86, "x86_64", "AMD EPYC 7763, cpu family 25, model 1", "fpu avx2"),
        (
            *(GRACE, "aarch64", "aarch64 processor, CPU implementer 0x41, CPU part 0xd4f, CPU variant 0x0"),
            "fp asimd sve2 bf16",
        ),
        (None, "arm64", "arm64 processor", ""),
    ],
    ids=["x86", "arm", "no Linux"],
)
def test_it_has_a_name_everywhere(
    cpuinfo: str | None,
    called: str,
    name: str,
    instructions: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(platform, "machine", lambda: called)
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    if cpuinfo is not None:
        machine.CPUINFO.write_text(cpuinfo)
    assert (machine.processor_name(), machine.instructions()) == (name, instructions)


@pytest.mark.parametrize("setting", ["ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS"])
def test_what_lowers_instructions_is_another_processor_to_the_calibration(
    setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"):
        monkeypatch.delenv(name, raising=False)
    before = machine.processor()
    monkeypatch.setenv(setting, "avx2")
    assert machine.processor() == f"{before}, {setting}=avx2"


def test_torch_and_onednn_are_lowered_to_the_level_of_this_run() -> None:
    """`make test-levels` sets one."""
    assert all((levels.ROOT / "tests" / file).is_file() for file in levels.FILES)
    is_exact = torch.bfloat16 in levels.exact_dtypes()
    assert is_exact <= torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if lowered := os.environ.get("ATEN_CPU_CAPABILITY"):
        assert torch.backends.cpu.get_cpu_capability().lower() == lowered


@pytest.mark.parametrize(
    ("vendor", "given", "found"),
    [
        ("GenuineIntel", None, "AUTO,STRICT"),
        ("GenuineIntel", "COMPATIBLE", "COMPATIBLE"),
        ("AuthenticAMD", None, None),
    ],
)
def test_mkl_has_its_strict_mode_on_intels_processors_alone(
    vendor: str, given: str | None, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "CPUINFO", tmp_path / "cpuinfo")
    machine.CPUINFO.write_text(f"processor : 0\nvendor_id : {vendor}\n")
    monkeypatch.setenv("MKL_CBWR", given or "")
    if given is None:
        monkeypatch.delenv("MKL_CBWR")
    machine.make_products_reproducible()
    assert os.environ.get("MKL_CBWR") == found
