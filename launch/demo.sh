#!/usr/bin/env bash
# The demo, start to end, without a GPU: make a tiny model, fine-tune it a little, train it by reinforcement learning
# on 2 ranks, and ask the exported model the held-out questions again. Every call is a new run.
#   usage: launch/demo.sh [section.key=value ...]        (settings of configs/demo.toml)
#   ENGINE=sglang           sample with SGLang, one engine for each rank; rollout.tp_size=2: one engine over both.
#                           Fewer steps then: on a CPU each of its requests costs more than the tokens it samples.
set -euo pipefail
cd "$(dirname "$0")/.."

name=demo-$(date +%Y%m%d-%H%M%S)
dir=runs
held_out=()
for setting in "$@"; do
    case $setting in
        run.name=*) name=${setting#run.name=} ;;
        run.dir=*) dir=${setting#run.dir=} ;;
        # The warm start must leave out the same questions.
        eval.num_prompts=* | eval.sources=*) held_out+=("held_out.${setting#eval.}") ;;
    esac
done
case ${ENGINE:-torch} in
    torch) engine=() ;;
    sglang) engine=(rollout.engine=sglang run.num_steps=230) ;;
    *)
        echo "ENGINE=$ENGINE: use ENGINE=torch or ENGINE=sglang" >&2
        exit 2
        ;;
esac
export NPROC=${NPROC:-2} CUDA_VISIBLE_DEVICES='' HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

echo "== 1/3 a tiny model, warm-started by supervised fine-tuning"
python -m spmdrl.tools.tiny_model "$dir/$name-base" --num-layers 2
MODULE=spmdrl.sft launch/local.sh configs/demo-sft.toml run.dir="$dir" run.name="$name-sft" model.path="$dir/$name-base" \
    "${held_out[@]}"

echo "== 2/3 reinforcement learning on $NPROC ranks"
launch/local.sh configs/demo.toml run.dir="$dir" run.name="$name" model.path="$dir/$name-sft/hf" "${engine[@]}" "$@"

echo "== 3/3 the exported model, loaded by transformers, on the same held-out questions"
python -m spmdrl.tools.evaluate "$dir/$name"
echo "curves: $dir/$name/curves.png    tensorboard --logdir $dir/$name/tensorboard"
