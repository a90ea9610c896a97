#!/usr/bin/env bash
# Get a pretrained chat model and teach it to add. Arguments are settings:
#   bash examples/chat_model/run.sh trainer.steps=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
if ! command -v areal-lite >/dev/null; then
  # shellcheck source=examples/setup.sh
  . ../setup.sh
  areal_lite_setup ../..
fi

#   CHAT_MODEL=/path/to/folder       puts the model there, or uses the one that is there
model=${CHAT_MODEL:-../models/SmolLM2-135M-Instruct}
[ -d "$model" ] || python get_model.py "$model"
[ -d data ] || python make_data.py

run=runs/$(date +%Y%m%d-%H%M%S)
for setting in "$@"; do
  if [[ $setting = run_dir=* ]]; then run=${setting#*=}; fi
done
echo "this example runs in $PWD: what it names as runs/… is there" >&2
areal-lite train "model=$model" "run_dir=$run" \
  data.source=jsonl data.path=data/train.jsonl data.eval_path=data/test.jsonl \
  data.prompt_key=question data.answer_key=answer reward.function=my_reward:last_number \
  rollout.group_size=8 rollout.max_new_tokens=16 buffer.max_staleness=1 \
  trainer.batch_groups=8 trainer.lr=1e-5 trainer.steps=32 "$@"
python before_after.py "$model" "$run/checkpoints/hf"
