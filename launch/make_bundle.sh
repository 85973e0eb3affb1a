#!/usr/bin/env bash
# Bundle SGLang and its imports for a GPU machine without network: one archive, in pieces of 64 MiB.
#   usage: launch/make_bundle.sh OUT [PACKAGE==VERSION ...]    other packages that the GPU machine lacks, as wheels
#   PYTHON=python3.11    an interpreter with pip; its version may differ from the GPU machine's
#   MACHINE=aarch64      what `uname -m` prints on the GPU machine, if it is not x86_64: aarch64 on a GH200
# For Linux, CPython 3.12, a Hopper GPU and torch 2.11. docs/gpu.md lists what else the GPU machine needs, and how to
# install the pieces.
set -euo pipefail

out=${1:?usage: launch/make_bundle.sh OUT [PACKAGE==VERSION ...]}
shift
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
machine=${MACHINE:-x86_64}
mkdir -p "$out"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=$work/site
mkdir "$site"

# sglang-kernel 0.4.5 is the newest one built for torch 2.11; SGLang requires a newer one, but its check can be disabled.
needed=(sglang==0.5.23 sglang-kernel==0.4.5 torch_memory_saver==0.0.10)
imported=(
    annotated-doc annotated-types apache-tvm-ffi==0.1.11 compressed-tensors==0.18.0 dill distro fastapi gguf httpcore2
    httpx httpx2 jiter loguru msgspec openai opentelemetry-api orjson partial_json_parser pybase64 pydantic==2.14.3
    pydantic_core==2.50.4 pyzmq setproctitle sniffio starlette truststore typing-inspection uvicorn xgrammar==0.2.7
)
ours=(
    antlr4-python3-runtime==4.13.2 bitsandbytes==0.50.2 docstring-parser==0.18.0 iniconfig latex2sympy2_extended
    math-verify==0.9.0 pluggy pytest==9.2.0 pytest-timeout==2.4.0 tomlkit==0.15.2
)

platforms=()
for glibc in 2_34 2_31 2_28 2_27 2_26 2_24 2_17; do platforms+=(--platform "manylinux_${glibc}_$machine"); done
platforms+=(--platform "manylinux2014_$machine" --platform "manylinux1_$machine")

wheel() {
    "$python" -m pip --disable-pip-version-check download --quiet --no-deps --only-binary=:all: \
        --implementation cp --python-version 3.12 "${platforms[@]}" --dest "$work/wheels" "$1"
}

for package in "${needed[@]}" "$@"; do wheel "$package"; done
# One at a time, to name each missing wheel; the GPU machine may have the package already.
for package in "${imported[@]}" "${ours[@]}"; do
    wheel "$package" 2>/dev/null || echo "no wheel of $package; install it on the GPU machine if it is missing there" >&2
done

for file in "$work"/wheels/*.whl; do "$python" -m zipfile -e "$file" "$site"; done
# Three quarters of the size are kernels for other GPUs, fa3, and parts of SGLang that rollouts do not use.
rm -rf "$site"/sglang/{benchmark,multimodal_gen,test} "$site"/sglang/srt/rust_extensions/*.so "$site/triton_kernels"
find "$site/sgl_kernel" -name '*.so' ! -path '*/sm90/common_ops*' -delete
find "$site" -name 'libbitsandbytes_*.so' ! -name '*_cuda130.so' ! -name '*_cpu.so' -delete
# The prefix cache in Rust is built for a later torch, and reads tensors of 2.11 wrongly. Without it SGLang takes its own
# in Python.
rm -f "$site"/sglang/srt/mem_cache/rust_tree_core/*.so
# Every CUDA device imports this kernel of Blackwell, and with it a compiler (nvidia-cutlass-dsl) larger than the rest.
mkdir -p "$site/sglang/kernels/ops/gemm"
cat >"$site/sglang/kernels/ops/gemm/cutedsl_dual_gemm.py" <<'END'
"""Stands for a kernel of Blackwell that this bundle leaves out: no layer can use it."""

from enum import Enum

MAX_DUAL_GEMM_DECODE_TOKENS = 0
DualGemmQuantMode = Enum(
    "DualGemmQuantMode", "STATIC_PER_TENSOR STATIC_PER_TOKEN DYNAMIC_PER_TENSOR DYNAMIC_PER_TOKEN UNQUANT"
)


def can_use_dual_gemm(*_arguments: object) -> bool:
    return False
END
cp -r "$here/spmdrl_sglang_cpu/stubs/IPython" "$site"
find "$site" -name __pycache__ -prune -exec rm -rf {} +

rm -f "$out"/site.tar.xz.*
tar cJ -C "$site" . | split --bytes=64M --numeric-suffixes - "$out/site.tar.xz."
(cd "$out" && sha256sum site.tar.xz.* >SHA256SUMS)
# A copy of the checkout may come without git; launch/gpu_proof.sh reads here which commit it is.
(cd "$here" && "$python" -m benchmarks.commit) >"$out/commit.json"
ls -lh "$out"
