"""Build the stand-ins for CUDA's libraries, for the CUDA build of torch in this environment.

Each stand-in has every symbol of the library that it replaces: those of its C file, and for each other a function that
is counted and returns 0. They are preloaded, because torch's own search path comes before any other.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import tempfile
from pathlib import Path

SOURCES = Path(__file__).parent
# Library -> its C file.
LIBRARIES = {
    "libcuda.so.1": "driver.c",
    "libcudart.so.13": "runtime.c",
    "libcublas.so.13": "cublas.c",
    "libcublasLt.so.13": "cublas.c",
    "libcudnn.so.9": "cudnn.c",
    "libnccl.so.2": "nccl.c",
}
_CORE = "libfakecore.so"
# The library that kernels of CuTe DSL are loaded with, where that is installed; ours is asked before it.
_CUTE, _REAL_CUTE = "libfakecute.so", "nvidia_cutlass_dsl/cu13/lib/libcute_dsl_runtime.so"
_CUTE_NAMES = {"_cudaLaunchKernelEx": "cudaLaunchKernelExC"}  # the others have the runtime's name, after a "_"
_NO_ATTRIBUTES = """
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __builtin_align__(n) __attribute__((aligned(n)))
#define __align__(n) __attribute__((aligned(n)))
#define __cudart_builtin__
#define __host__
#define __device__
#define CUDARTAPI
"""


def missing() -> str:
    """Say what is missing for the stand-ins to be built; empty where nothing is."""
    if _site() is None:
        return "the CUDA build of torch and its nvidia packages are not installed"
    try:
        subprocess.run(["gcc", "--version"], capture_output=True, check=True)
    except OSError:
        return "gcc is not installed"
    return ""


def environment(folder: Path, *, devices: int = 1, memory_gib: float = 79.18) -> dict[str, str]:
    """Return the variables with which a process, and those that it starts, take `devices` stand-ins for GPUs.

    `folder` gets the table of what each process holds, and the counters of each process when it ends.
    """
    libraries = build()
    cute = {"CUTE_DSL_LIBS": f"{libraries / _CUTE}:{_cute()}"} if _cute() else {}
    return cute | {
        "LD_PRELOAD": ":".join(str(libraries / name) for name in (_CORE, *LIBRARIES)),
        "TRITON_LIBCUDA_PATH": str(libraries),
        "PYTORCH_SKIP_CUDNN_COMPATIBILITY_CHECK": "1",  # `cudnn.c` is older than what torch was built with
        "FAKE_CUDA_TABLE": str(folder / "table"),
        "FAKE_CUDA_LOG": str(folder),
        "FAKE_CUDA_DEVICES": str(devices),
        "FAKE_CUDA_MEMORY_MIB": str(int(memory_gib * 1024)),
    }


def build() -> Path:
    """Return the folder of the stand-ins, built at first use and again when a source or a library has changed."""
    site = _site()
    assert site is not None, missing()
    real = {name: next(iter(site.glob(f"nvidia/*/lib/{name}")), None) for name in LIBRARIES}
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(SOURCES.glob("*.[ch]"))))
    digest.update(Path(__file__).read_bytes())
    digest.update(repr([path and path.stat().st_size for path in (*real.values(), _cute())]).encode())
    cache = Path(os.environ.get("FAKE_CUDA_CACHE", Path(tempfile.gettempdir()) / f"fake-cuda-{os.getuid()}"))
    folder = cache / digest.hexdigest()[:16]
    if folder.exists():
        return folder
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as work:
        out = Path(work) / "libraries"
        out.mkdir()
        headers = site / "nvidia/cu13/include"
        for name in ("host_defines.h", "host_config.h"):  # they come with the compiler nvcc, and say nothing to gcc
            (out / "crt").mkdir(exist_ok=True)
            (out / "crt" / name).write_text(_NO_ATTRIBUTES)
        _compile(out / _CORE, SOURCES / "core.c")
        for name, path in real.items():
            names = _exported(path) if path else set(re.findall(r"\bcu[A-Z]\w+", (headers / "cuda.h").read_text()))
            _stand_in(out / name, names, headers=headers, has_versions=name != "libcuda.so.1")
        if cute := _cute():
            generated = out / "cute.c"
            jumps = [
                f'__asm__(".globl {name}\\n{name}: jmp {_CUTE_NAMES.get(name, name[1:])}@PLT");'
                for name in sorted(_exported(cute))
                if name.startswith("_cu")
            ]
            generated.write_text("\n".join([f'#include "{SOURCES / "cute.c"}"', *jumps]))
            _compile(out / _CUTE, generated, "-L", str(out), "-l:libcudart.so.13", "-l:libcuda.so.1", "-lfakecore")
        if not folder.exists():
            out.rename(folder)
    return folder


def _site() -> Path | None:
    """Return the folder of the installed packages, None where torch there is no CUDA build."""
    found = importlib.util.find_spec("torch")
    site = Path(found.origin).parents[1] if found and found.origin else None
    is_cuda = site and (site / "torch/lib/libtorch_cuda.so").exists() and (site / "nvidia/cu13/include/cuda.h").exists()
    return site if is_cuda else None


def _cute() -> Path | None:
    """Return the library with which kernels of CuTe DSL are loaded, None where it is not installed."""
    site = _site()
    return site / _REAL_CUTE if site and (site / _REAL_CUTE).exists() else None


def _stand_in(library: Path, names: set[str], *, headers: Path, has_versions: bool) -> None:
    """Compile a library with these symbols, and with all that its C file defines of them."""
    source = SOURCES / LIBRARIES[library.name]
    text = source.read_text()
    prefix = re.sub(r"\W.*|^lib", "", library.name)
    written = set(re.findall(r"^[A-Za-z_][\w ]*[ *]+(\w+)\([^;]*?\)\s*\{", text, re.M))
    left = sorted(names - written)
    generated = library.with_suffix(".c")
    lines = [f'#include "{source}"', *(f'int {name}(void) {{ return fk_default("{name}"); }}' for name in left)]
    generated.write_text("\n".join(lines))
    folders = (SOURCES, library.parent, headers)
    flags = [f"-Wl,-soname,{library.name}", "-Wl,-rpath,$ORIGIN", *(f"-I{folder}" for folder in folders)]
    if has_versions:
        versions = library.with_suffix(".map")
        versions.write_text(f"{library.name} {{ global: {prefix}*; __{prefix}*; cuda*; __cuda*; local: *; }};")
        flags.append(f"-Wl,--version-script={versions}")
    _compile(library, generated, *flags, "-L", str(library.parent), "-lfakecore")


def _compile(library: Path, source: Path, *flags: str) -> None:
    subprocess.run(["gcc", "-O1", "-w", "-fPIC", "-shared", "-o", library, source, *flags], check=True)


def _exported(library: Path) -> set[str]:
    """Read the names of a library's functions."""
    table = subprocess.run(["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True).stdout
    return {line.split()[2].partition("@")[0] for line in table.splitlines() if line.split()[1] in "TW"}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as example:
        for variable, value in environment(Path(example)).items():
            print(f"export {variable}={value}")
