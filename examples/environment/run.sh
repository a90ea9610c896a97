#!/usr/bin/env bash
# Train a small chat model in environments of reasoning-gym. Arguments are settings:
#   bash examples/environment/run.sh trainer.steps=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
if ! command -v areal-lite >/dev/null; then
  # shellcheck source=examples/setup.sh
  . ../setup.sh
  areal_lite_setup ../..
fi
python -c "import reasoning_gym" 2>/dev/null ||
  python -m pip install --quiet --disable-pip-version-check reasoning-gym

#   CHAT_MODEL=/path/to/folder       puts the model there, or uses the one that is there
model=${CHAT_MODEL:-../models/SmolLM2-135M-Instruct}
[ -d "$model" ] || python ../chat_model/get_model.py "$model"

echo "this example runs in $PWD: what it names as runs/… is there" >&2
areal-lite train "model=$model" +task=reasoning_gym \
  'data.args.tasks={chain_sum: {min_terms: 2, max_terms: 2, max_digits: 1}, gcd: {max_value: 30}}' \
  data.args.held_out=128 eval.problems=128 data.system_prompt=null \
  reward.function=my_reward:last_number reward.workers=1 \
  rollout.group_size=8 rollout.max_new_tokens=24 \
  trainer.batch_groups=8 trainer.lr=1e-5 trainer.steps=32 "$@"
