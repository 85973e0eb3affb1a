#!/usr/bin/env bash
# The demo, start to end, without a GPU: make a tiny model, fine-tune it a little, train it by reinforcement learning
# on 2 ranks, and ask the exported model the held-out questions again. Every call is a new run.
#   usage: launch/demo.sh [section.key=value ...]        (settings of configs/demo.toml)
set -euo pipefail
cd "$(dirname "$0")/.."

ranks=${NPROC:-2}
stamp=$(date +%Y%m%d-%H%M%S)
name=demo-$stamp
cores=$(nproc)
export OMP_NUM_THREADS=$((cores / ranks > 0 ? cores / ranks : 1)) HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

echo "== 1/3 a tiny model, warm-started by supervised fine-tuning"
python -m spmdrl.tools.tiny_model "runs/$name-base"
launch/ranks.sh "$ranks" spmdrl.sft configs/demo-sft.toml run.name="$name-sft" model.path="runs/$name-base"

echo "== 2/3 reinforcement learning on $ranks ranks"
launch/ranks.sh "$ranks" spmdrl.train configs/demo.toml run.name="$name" model.path="runs/$name-sft/hf" "$@"

echo "== 3/3 the exported model, loaded by transformers, on the same held-out questions"
python -m spmdrl.tools.evaluate "runs/$name"
echo "curves: runs/$name/curves.png    tensorboard --logdir runs/$name/tensorboard"
