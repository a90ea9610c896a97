#!/usr/bin/env bash
# Train a small chat model to win a game of TextArena. Arguments are settings:
#   bash examples/game/run.sh trainer.steps=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
if ! command -v areal-lite >/dev/null; then
  # shellcheck source=examples/setup.sh
  . ../setup.sh
  areal_lite_setup ../..
fi
python -c "import textarena" 2>/dev/null ||
  python -m pip install --quiet --disable-pip-version-check textarena

#   CHAT_MODEL=/path/to/folder       puts the model there, or uses the one that is there
model=${CHAT_MODEL:-../models/SmolLM2-135M-Instruct}
[ -d "$model" ] || python ../chat_model/get_model.py "$model"

echo "this example runs in $PWD: what it names as runs/… is there" >&2
areal-lite train "model=$model" +task=games data.args.game=textarena:GuessTheNumber-v0 \
  'data.args.arguments={min_number: 1, max_number: 10, max_turns: 4}' \
  data.system_prompt="'Answer with one guess in square brackets, such as [7].'" \
  data.args.held_out=64 eval.problems=64 reward.workers=1 \
  rollout.workflow=my_game:Win 'rollout.workflow_args={max_turns: 5, max_answer_tokens: 8}' \
  rollout.group_size=8 rollout.max_new_tokens=128 'rollout.stop=["]"]' \
  trainer.batch_groups=8 trainer.lr=2e-5 trainer.lr_schedule=constant trainer.steps=16 "$@"
