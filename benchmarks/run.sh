#!/usr/bin/env bash
# Measure what benchmarks/results/ reports: spmdrl beside its peers, on this machine, in one run.
#   usage: benchmarks/run.sh [NAME ...] [--repeats N] [--steps N]    (benchmarks/bench.py --help)
#   PYTHON=python3.12       an interpreter that has spmdrl; default: .venv/bin/python
#   TORCH_INDEX=URL         the package index that the peer's torch comes from
# The first use installs the peers into .venv-trl and .venv-verl, which the project's own environment knows nothing of.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-.venv/bin/python}
if ! command -v "$python" >/dev/null; then
    echo "there is no $python: run 'make setup'" >&2
    exit 2
fi

# installs NAME [PIP OPTION ...]: benchmarks/requirements-NAME.txt into .venv-NAME, unless it is there already
installs() {
    local venv=.venv-$1 pins=benchmarks/requirements-$1.txt
    local pip=("$venv/bin/python" -m pip --disable-pip-version-check install)
    cmp -s "$pins" "$venv/.installed" && return
    [[ -x $venv/bin/python ]] || "$python" -m venv "$venv"
    if grep -q '^torch==' "$pins"; then
        "${pip[@]}" ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' "$pins")"
    fi
    "${pip[@]}" "${@:2}" -r "$pins"
    cp "$pins" "$venv/.installed"
}

installs trl
installs verl --no-deps

exec "$python" benchmarks/bench.py "$@"
