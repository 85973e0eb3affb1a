#!/usr/bin/env bash
# Measure what benchmarks/results/ reports: spmdrl beside its peers, on this machine, in one run.
#   usage: benchmarks/run.sh [NAME ...] [--repeats N] [--steps N]    (benchmarks/bench.py --help)
#   PYTHON=python3.12       an interpreter that has spmdrl; default: .venv/bin/python
#   TORCH_INDEX=URL         the package index that the peer's torch comes from
# The first use installs TRL into .venv-trl, which the project's own environment knows nothing of.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then
    echo "there is no $python: run 'make setup'" >&2
    exit 2
fi

pins=benchmarks/requirements-trl.txt
installed=.venv-trl/.installed
if ! cmp -s "$pins" "$installed"; then
    [[ -x .venv-trl/bin/python ]] || "$python" -m venv .venv-trl
    pip=(.venv-trl/bin/python -m pip --disable-pip-version-check install)
    "${pip[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' "$pins")"
    "${pip[@]}" -r "$pins"
    cp "$pins" "$installed"
fi

exec "$python" benchmarks/bench.py "$@"
