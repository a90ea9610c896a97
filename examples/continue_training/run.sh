#!/usr/bin/env bash
# Continue a run, and start a new one from what it learned. Arguments are settings of all three
# commands: bash examples/continue_training/run.sh trainer.lr=1e-4
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=examples/warm_model.sh
. ../warm_model.sh

folder=${FOLDER:-runs/$(date +%Y%m%d-%H%M%S)} # of the two runs
steps=${STEPS:-10}

settings=(+task=addition algo=quickstart rollout.group_size=8 rollout.max_new_tokens=64
  trainer.batch_groups=32 trainer.minibatches=4 trainer.lr=3e-4 trainer.lr_warmup_steps=4 "$@")

echo "1/3 a run on numbers of up to two digits" >&2
first=("${settings[@]}" "model=$warm" data.args.max_digits=2 "run_dir=$folder/two-digits")
areal-lite train "${first[@]}" "trainer.steps=$steps"

echo "2/3 the same run, with more steps: weights, optimizer and data continue" >&2
areal-lite train "${first[@]}" "trainer.steps=$((2 * steps))" resume=auto

echo "3/3 a new run on three digits, from the weights of the first" >&2
areal-lite train trainer.lr_schedule=linear "${settings[@]}" \
  "model=$folder/two-digits/checkpoints/hf" data.args.max_digits=3 \
  "run_dir=$folder/three-digits" "trainer.steps=$steps"
