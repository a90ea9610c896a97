#!/usr/bin/env bash
# Train low-rank adapters (LoRA) in place of the model's weights. Arguments are settings:
#   bash examples/adapters/run.sh trainer.steps=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=examples/warm_model.sh
. ../warm_model.sh

areal-lite train "model=$warm" trainer.lora.rank=8 \
  +task=addition data.args.max_digits=3 algo=quickstart \
  rollout.group_size=8 rollout.max_new_tokens=64 \
  trainer.batch_groups=16 trainer.minibatches=4 trainer.lr=1e-3 trainer.steps=24 "$@"
