#!/usr/bin/env bash
# Prove on a GPU what no CPU can show, without network: one stage a command, each below ten minutes.
#   usage: launch/gpu_proof.sh STAGE [--at-once N] [--only STEP ...]      docs/gpu.md says what the stages 1 to 5 show
#   BUNDLE=bundle           what launch/make_bundle.sh wrote; where it is not, what is installed is used
#   OUT=runs/gpu-proof      where gpu-proof-STAGE.json and gpu-proof-STAGE.log go
#   PYTHON=python3          the interpreter
set -euo pipefail
cd "$(dirname "$0")/.."

bundle=${BUNDLE:-bundle}
damaged() {
    echo "BUNDLE=$bundle: it is damaged or cannot be unpacked here, as said above; copy it again" >&2
    exit 2
}
export PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1
# Each step imports torch and SGLang, twice or more; where Python cannot write next to them, each would compile them.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$PWD/runs/bytecode}
if [[ -e $bundle/SHA256SUMS ]]; then
    # By its contents, so that a new bundle is unpacked and an old one is not unpacked twice.
    digest=$(sha256sum <"$bundle/SHA256SUMS")
    site=$PWD/runs/site-${digest:0:12}
    if [[ ! -d $site ]]; then
        echo "unpacking $bundle into $site"
        (cd "$bundle" && sha256sum --check --quiet SHA256SUMS) || damaged
        unfinished=$PWD/runs/unpacking-${digest:0:12}
        rm -rf "$unfinished"
        mkdir -p "$unfinished"
        cat "$bundle"/site.tar.xz.* | tar xJ -C "$unfinished" || damaged
        mv "$unfinished" "$site"
    fi
    # The bundle has the newest kernels that torch 2.11 can load; SGLang asks for newer ones.
    export PYTHONPATH=$PYTHONPATH:$site SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
elif [[ -n ${BUNDLE:-} ]]; then
    echo "BUNDLE=$bundle: there is no $bundle/SHA256SUMS; make a bundle by launch/make_bundle.sh $bundle" >&2
    exit 2
fi
exec "${PYTHON:-python3}" -m tests.gpu.proof.gpu_proof "$@" --commit-file "$bundle/commit.json"
