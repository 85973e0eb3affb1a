#!/usr/bin/env bash
# One run on this machine: check the settings once, then start a process per GPU (2 processes without a GPU).
#   usage: launch/local.sh CONFIG [section.key=value ...]
#   NPROC=4                 another number of processes
#   MODULE=spmdrl.sft       supervised fine-tuning instead of spmdrl.train
# SIGTERM, SIGUSR1 or `touch RUN/stop`: the run finishes its phase, saves and stops; the same command goes on.
# Exit codes: docs/faults.md. 2: a setting must be changed, 75: start it again.
set -euo pipefail

if (($# == 0)) || [[ $1 == -* ]]; then
    sed -n '2,7s/^# //p' "$0" >&2
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
    # nproc would repeat an OMP_NUM_THREADS that is already set.
    cores=$(env -u OMP_NUM_THREADS nproc)
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > ranks ? cores / ranks : 1))}
    export GLOO_SOCKET_IFNAME=${GLOO_SOCKET_IFNAME:-lo}
fi

# Checked here, so that a mistake is told once and without torchrun's report of it.
folder=$(python -m "$module" "$@" --dry-run --ranks "$ranks" | sed -n '/^# run folder$/{n;p;}')

# A signal that reaches torchrun itself: 30 seconds, its default, are too short for a step and a checkpoint.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
# Without --local-addr the ranks would meet at this machine's host name, which need not resolve.
exec python -m spmdrl.faults.supervise "$folder" \
    torchrun --standalone --local-addr 127.0.0.1 --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 \
    --nproc-per-node "$ranks" -m "$module" "$@"
