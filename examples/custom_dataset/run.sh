#!/usr/bin/env bash
# Train on rows of your own. Arguments are settings:
#   bash examples/custom_dataset/run.sh trainer.steps=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=examples/warm_model.sh
. ../warm_model.sh

[ -d data ] || python make_data.py
areal-lite train "model=$warm" \
  data.source=jsonl data.path=data/train.jsonl data.eval_path=data/test.jsonl \
  data.prompt_key=problem data.answer_key=solution data.chat=false \
  reward.function=areal_lite_quickstart.addition:addition_reward algo=quickstart \
  rollout.group_size=8 rollout.max_new_tokens=64 \
  trainer.batch_groups=32 trainer.minibatches=4 \
  trainer.lr=3e-4 trainer.lr_schedule=linear trainer.lr_warmup_steps=4 trainer.steps=24 "$@"
