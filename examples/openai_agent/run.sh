#!/usr/bin/env bash
# Train a model inside your own agent. Arguments are settings:
#   bash examples/openai_agent/run.sh trainer.steps=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=examples/warm_model.sh
. ../warm_model.sh

areal-lite train "model=$warm" \
  +task=addition data.args.max_digits=3 rollout.workflow=areal_lite.workflows.agent:Agent \
  rollout.workflow_args.agent=my_agent:agent algo=quickstart \
  rollout.group_size=8 rollout.max_new_tokens=140 \
  trainer.batch_groups=16 trainer.minibatches=4 \
  trainer.lr=3e-4 trainer.lr_schedule=linear trainer.lr_warmup_steps=4 trainer.steps=24 "$@"
