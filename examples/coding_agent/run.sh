#!/usr/bin/env bash
# Train a small chat model inside a coding agent. Arguments are settings:
#   bash examples/coding_agent/run.sh trainer.steps=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
if ! command -v areal-lite >/dev/null; then
  # shellcheck source=examples/setup.sh
  . ../setup.sh
  areal_lite_setup ../..
fi

#   CHAT_MODEL=/path/to/folder       puts the model there, or uses the one that is there
model=${CHAT_MODEL:-../models/SmolLM2-135M-Instruct}
[ -d "$model" ] || python ../chat_model/get_model.py "$model"
[ -d data ] || python make_data.py

echo "this example runs in $PWD: what it names as runs/… is there" >&2
areal-lite train "model=$model" \
  data.source=jsonl data.path=data/train.jsonl data.eval_path=data/test.jsonl data.answer_key= \
  rollout.workflow=areal_lite.workflows.agent:Agent rollout.workflow_args.agent=my_agent:agent \
  reward.function=areal_lite.rewards.exact:exact_reward \
  rollout.group_size=8 rollout.max_new_tokens=96 \
  trainer.batch_groups=8 trainer.minibatches=2 trainer.lr=3e-5 trainer.steps=24 "$@"
