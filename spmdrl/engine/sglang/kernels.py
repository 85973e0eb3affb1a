"""SGLang's kernels for CUDA: a package of its own, each release of which loads with one version of torch.

Standard library only, but for the package itself: the doctor calls this where torch may be broken.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os

DISTRIBUTION = "sglang-kernel"
_MODULE = "sgl_kernel"
# The release of the kernels that says in its metadata or description that it is built for this torch.
_BUILT_FOR = {"2.11": "0.4.5", "2.13": "0.4.7", "2.14": "0.4.10"}
_OLDEST = "0.4.9"  # that SGLang 0.5.23 starts with, unless it is told not to look
_SKIP_VARIABLE = "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK"
# For those who have a checkout, and those who have the package alone.
SETUP = "run: make setup-sglang, or pip install 'spmdrl[sglang]'"


def kernel_problem(torch_version: str) -> str | None:
    """Explain why SGLang could not use its kernels in this process, with this version of torch; None when it could."""
    try:
        installed = importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return f"{DISTRIBUTION}, its kernels for CUDA, is not installed; {SETUP}"
    try:
        importlib.import_module(_MODULE)
    except Exception as error:  # the package tries several files and raises what it likes
        torch_release = ".".join(torch_version.split(".")[:2])
        fitting = _BUILT_FOR.get(torch_release)
        remedy = (
            SETUP
            if fitting in (None, installed)
            else f"install {DISTRIBUTION}=={fitting}, which is built for torch {torch_release}, or {SETUP}"
        )
        return f"{DISTRIBUTION} {installed} cannot be loaded with torch {torch_version} ({_cause(error)}); {remedy}"
    if _numbers(installed) < _numbers(_OLDEST) and os.environ.get(_SKIP_VARIABLE, "").lower() not in ("1", "true"):
        return (
            f"{DISTRIBUTION} {installed} is installed, and SGLang starts with {_OLDEST} or newer unless "
            f"{_SKIP_VARIABLE}=1 is in the environment; set that, or {SETUP}"
        )
    return None


def attention_problem(backend: str | None, capability: tuple[int, int]) -> str | None:
    """Explain why the attention kernels that SGLang would use on a device of this compute capability are not there.

    None when they are. `backend` is `rollout.attention_backend`; unset, SGLang chooses FlashAttention 3 on Hopper.
    """
    by_default = backend is None and capability[0] == 9
    if not (backend == "fa3" or by_default) or importlib.util.find_spec(f"{_MODULE}.flash_ops") is not None:
        return None
    set_to = 'is not set, and SGLang\'s own choice for this device is "fa3"' if by_default else '= "fa3"'
    return f'rollout.attention_backend {set_to}, but {DISTRIBUTION} is here without those kernels; set it to "triton"'


def _cause(error: Exception) -> str:
    """Find the loader's line in the page that the package makes of it."""
    lines = [line.strip(" -") for line in str(error).splitlines() if line.strip()]
    telling = (line for line in lines if "undefined symbol" in line or "cannot open shared object" in line)
    return next(telling, lines[0] if lines else type(error).__name__)


def _numbers(version: str) -> tuple[int, ...]:
    """0.4.6.post1 as (0, 4, 6)."""
    return tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
