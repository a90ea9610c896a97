#!/usr/bin/env bash
# Train with a workflow of your own. Arguments are settings:
#   bash examples/custom_workflow/run.sh rollout.workflow_args.all_or_nothing=true
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=examples/warm_model.sh
. ../warm_model.sh

areal-lite train "model=$warm" \
  +task=addition data.args.max_digits=3 rollout.workflow=my_workflow:Referee algo=quickstart \
  rollout.group_size=8 rollout.max_new_tokens=64 \
  trainer.batch_groups=32 trainer.minibatches=4 \
  trainer.lr=3e-4 trainer.lr_schedule=linear trainer.lr_warmup_steps=4 trainer.steps=32 "$@"
