"""The machine: its processor, as Linux describes it, the settings by which libraries use less of it, and the user's
cache on it, which outlives every run. To import it needs no torch."""

from __future__ import annotations

import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_NUMBERS = (
    "cpu family",
    "model",
    "CPU implementer",
    "CPU part",
    "CPU variant",
)  # x86 has the first two, ARM the others
# They decide which kernels torch, oneDNN and MKL take, and so both speed and last bits.
_SETTINGS = (
    *("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ONEDNN_DEFAULT_FPMATH_MODE"),
    *("MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"),
)


def processor_name() -> str:
    """Name the processor, with what tells apart those that call themselves the same."""
    known = _described()
    numbers = [f"{name} {known[name]}" for name in _NUMBERS if name in known]
    return ", ".join([known.get("model name", f"{platform.machine()} processor"), *numbers])


def instructions() -> str:
    """Return the instructions that the processor has, in Linux's names."""
    known = _described()
    return known.get("flags") or known.get("Features", "")


def limits() -> str:
    """Return the settings that are set, as NAME=VALUE."""
    return ", ".join(f"{name}={os.environ[name]}" for name in _SETTINGS if os.environ.get(name))


def processor() -> str:
    """Name the processor, and what decides which kernels torch takes on it."""
    from torch.backends import cpu

    described = [processor_name(), cpu.get_cpu_capability(), limits()]
    return ", ".join(part for part in described if part)


def _described() -> dict[str, str]:
    """Return what Linux says of the first core; nothing on another system."""
    try:
        lines = CPUINFO.read_text(encoding="utf-8").split("\n\n", 1)[0].splitlines()
    except OSError:
        return {}
    facts = (line.split(":", 1) for line in lines if ":" in line)
    return {name.strip(): value.strip() for name, value in facts}


def users_cache() -> Path:
    """Return the folder, which need not be there. A user whom the system does not know has the home /."""
    home = Path(os.path.expanduser("~"))
    return Path(os.environ.get("XDG_CACHE_HOME") or (home if home.is_absolute() else Path("/")) / ".cache") / "spmdrl"


def place_torchs_cache() -> None:
    """Let torch keep what its compiler makes in the user's cache, where that can be written; variables win.

    As it is imported, the compiler makes a folder of a name that everybody knows in the folder for temporary files,
    where it stays, and where another user may have made it first.
    """
    folder = users_cache().absolute() / "torch"
    made = next(place for place in (folder, *folder.parents) if os.path.lexists(place))
    if made.is_dir() and os.access(made, os.W_OK | os.X_OK):
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))


def make_products_reproducible() -> None:
    """Ask MKL for its strict mode, in which neither alignment nor the number of threads changes a product's sums.

    Without it, MKL's kernels for AVX2 also sum the edges of a matrix in another order than the rest (measured). MKL
    reads the variable at a process's first product, and has this mode on Intel's processors alone; a variable that is
    set wins. Source: oneMKL's developer guide, "Strict CNR Mode".
    """
    if _described().get("vendor_id") == "GenuineIntel":
        os.environ.setdefault("MKL_CBWR", "AUTO,STRICT")
