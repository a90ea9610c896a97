#!/usr/bin/env bash
# Train a small chat model on the verdicts of a judge. Arguments are settings:
#   bash examples/judge/run.sh trainer.steps=5
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

# The judge is the same model before training. The run serves it (rubric.md).
ln -sfn "$(realpath "$model")" data/judge

echo "this example runs in $PWD: what it names as runs/… is there" >&2
areal-lite train "model=$model" \
  data.source=jsonl data.path=data/train.jsonl data.eval_path=data/test.jsonl data.answer_key= \
  reward.function=areal_lite.workflows.judge:rubric.md reward.timeout_s=60 \
  rollout.group_size=8 rollout.max_new_tokens=24 \
  trainer.batch_groups=8 trainer.minibatches=2 trainer.lr=3e-5 trainer.steps=32 "$@"
