#!/usr/bin/env bash
# Run on this machine: check the settings once, then start one process per GPU (2 processes without a GPU).
#   usage: launch/local.sh CONFIG [section.key=value ...]
#   NPROC=4                 another number of processes
#   MODULE=spmdrl.sft       supervised fine-tuning instead of spmdrl.train
# SIGTERM, SIGUSR1 or `touch RUN/stop` make the run finish its phase, save and stop; the same command continues it.
# Exit codes are in docs/faults.md; 2: change a setting, 75: start it again.
set -euo pipefail

if (($# == 0)) || [[ $1 == -* ]]; then
    sed -n '2,7s/^# //p' "$0" >&2
    exit 2
fi
exec python -m spmdrl.tools.local "${MODULE:-spmdrl.train}" ${NPROC:+--nproc "$NPROC"} "$@"
