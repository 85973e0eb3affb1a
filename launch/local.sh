#!/usr/bin/env bash
# Run on this machine: check the settings once, then start one process per GPU (2 processes without a GPU).
#   usage: launch/local.sh CONFIG [section.key=value ...]
#   NPROC=4                 another number of processes
#   MODULE=spmdrl.sft       supervised fine-tuning instead of spmdrl.train
# Ctrl-C, SIGTERM, SIGUSR1 or `touch RUN/stop` make the run finish its phase, save and stop; the same command continues
# it. A second Ctrl-C ends it at once.
# Exit codes are in docs/faults.md; 2: change a setting, 75: start it again.
set -euo pipefail

if (($# == 0)) || [[ $1 == -* ]]; then
    sed -n '2,8s/^# //p' "$0" >&2
    exit 2
fi
if ! command -v torchrun >/dev/null; then
    echo "torchrun is not on PATH: run 'make setup', then 'source .venv/bin/activate'" >&2
    exit 2
fi

count_gpus() {
    if [[ -n ${CUDA_VISIBLE_DEVICES+set} ]]; then
        local ids
        IFS=, read -ra ids <<<"$CUDA_VISIBLE_DEVICES"
        [[ ${ids[0]:-} == -1 ]] && ids=()
        echo "${#ids[@]}"
    elif command -v nvidia-smi >/dev/null; then
        nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true
    else
        echo 0
    fi
}

module=${MODULE:-spmdrl.train}
gpus=$(count_gpus)
ranks=${NPROC:-$((gpus > 0 ? gpus : 2))}

if ((gpus == 0)); then
    # nproc would print OMP_NUM_THREADS if that is set.
    cores=$(env -u OMP_NUM_THREADS nproc)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
fi

exec python -m spmdrl.faults.local "$ranks" "$module" "$@"
