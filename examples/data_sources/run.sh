#!/usr/bin/env bash
# Train on two data sources, and see how each of them gets on. Arguments are settings:
#   bash examples/data_sources/run.sh trainer.steps=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=examples/warm_model.sh
. ../warm_model.sh

# Three of four prompts are from the first source.
areal-lite train "model=$warm" +task=addition algo=quickstart \
  data.sources.short.args.max_digits=2 data.sources.short.weight=3 \
  data.sources.long.args.max_digits=3 \
  server.count=2 eval.every=8 \
  rollout.group_size=8 rollout.max_new_tokens=64 \
  trainer.batch_groups=16 trainer.minibatches=4 trainer.lr=1.5e-4 trainer.steps=24 "$@"
