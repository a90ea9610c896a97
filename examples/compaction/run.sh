#!/usr/bin/env bash
# Train an agent whose context is shorter than its task. Arguments are settings:
#   bash examples/compaction/run.sh trainer.steps=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=examples/warm_model.sh
. ../warm_model.sh

areal-lite train "model=$warm" \
  +task=addition data.source=my_agent:long_sums data.args.max_digits=3 \
  rollout.workflow=areal_lite.workflows.agent:Agent \
  rollout.workflow_args.agent=my_agent:agent algo=quickstart \
  rollout.group_size=8 rollout.max_new_tokens=14 \
  trainer.batch_groups=16 trainer.minibatches=4 trainer.lr=3e-4 trainer.steps=32 \
  eval.problems=100 "$@"
