#!/usr/bin/env bash
# The whole demo, without a GPU: make a tiny model, fine-tune it a little, train it by reinforcement learning on 2 ranks,
# and evaluate the exported model on the held-out prompts. Every call starts a new run.
#   usage: launch/demo.sh [section.key=value ...]        (settings of configs/demo.toml)
#   TASK=tool               learn to look up what cannot be known (configs/demo-tool.toml)
#   TASK=game               learn to guess a number in four turns (configs/demo-game.toml)
#   TASK=vision             learn to answer questions about pictures (configs/demo-vision.toml)
#   TASK=notes              learn to write down what will be asked for (configs/demo-notes.toml)
#   TASK=pairs              the same task, rewarded by a model that has learned from pairs of answers (configs/demo-pairs.toml)
#   TASK=distill            learn from a teacher what the demo learns from rewards (configs/demo-distill.toml)
#   ENGINE=sglang           sample with SGLang, one engine per rank; with rollout.tp_size=2 one engine for both ranks.
#                           It runs fewer steps: on a CPU, SGLang's cost per request exceeds that of sampling.
#   NPROC=4                 another number of ranks
set -euo pipefail
cd "$(dirname "$0")/.."
exec python -m spmdrl.tools.demo ${TASK:+--task "$TASK"} ${ENGINE:+--engine "$ENGINE"} ${NPROC:+--nproc "$NPROC"} "$@"
