#!/usr/bin/env bash
# The whole demo, without a GPU: make a tiny model, fine-tune it a little, train it by reinforcement learning on 2 ranks,
# and evaluate the exported model on the held-out prompts. Every call starts a new run.
#   usage: launch/demo.sh [section.key=value ...]        (settings of configs/demo.toml)
#   TASK=tool               learn to look up what cannot be known (configs/demo-tool.toml)
#   TASK=game               learn to guess a number in four turns (configs/demo-game.toml)
#   ENGINE=sglang           sample with SGLang, one engine per rank; with rollout.tp_size=2 one engine for both ranks.
#                           It runs fewer steps: on a CPU, SGLang's cost per request exceeds that of sampling.
set -euo pipefail
cd "$(dirname "$0")/.."

config=demo${TASK:+-$TASK}
model=(--num-layers 2)
sglang_steps=230
case ${TASK:-} in
    '') ;;
    tool)
        model+=(--chat --words 'colour of ' lookup key red orange yellow green blue purple black white)
        sglang_steps=40
        ;;
    game)
        model+=(--chat --words 'game ' 10 higher lower 'no number')
        sglang_steps=120
        ;;
    *)
        echo "TASK=$TASK: set TASK=tool or TASK=game, or leave it out" >&2
        exit 2
        ;;
esac

name=$config-$(date +%Y%m%d-%H%M%S)
dir=runs
held_out=()
for setting in "$@"; do
    case $setting in
        run.name=*) name=${setting#run.name=} ;;
        run.dir=*) dir=${setting#run.dir=} ;;
        # The warm start must hold out the same prompts; with a task they are in a file of their own.
        eval.num_prompts=* | eval.sources=*) held_out+=("held_out.${setting#eval.}") ;;
    esac
done
if [[ -n ${TASK:-} ]]; then held_out=(); fi
case ${ENGINE:-torch} in
    torch) engine=() ;;
    sglang) engine=(rollout.engine=sglang "run.num_steps=$sglang_steps") ;;
    *)
        echo "ENGINE=$ENGINE: set ENGINE=torch or ENGINE=sglang" >&2
        exit 2
        ;;
esac
export NPROC=${NPROC:-2} CUDA_VISIBLE_DEVICES='' HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

echo "== 1/3 a tiny model, warm-started by supervised fine-tuning"
if [[ -n ${TASK:-} ]]; then python launch/demo_data.py "$TASK" "runs/$config-data"; fi
[[ -e $dir/$name-base ]] || python -m spmdrl.tools.tiny_model "$dir/$name-base" "${model[@]}"
MODULE=spmdrl.sft launch/local.sh "configs/$config-sft.toml" run.dir="$dir" run.name="$name-sft" \
    model.path="$dir/$name-base" "${held_out[@]}"

echo "== 2/3 reinforcement learning on $NPROC ranks"
launch/local.sh "configs/$config.toml" run.dir="$dir" run.name="$name" model.path="$dir/$name-sft/hf" "${engine[@]}" "$@"

echo "== 3/3 the exported model, loaded by transformers, on the same held-out prompts"
python -m spmdrl.tools.evaluate "$dir/$name"
echo "curves: $dir/$name/curves.png    tensorboard --logdir $dir/$name/tensorboard"
