#!/usr/bin/env bash
# PPO with a critic: one answer per problem. Arguments are settings:
#   bash examples/critic/run.sh trainer.steps=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=examples/warm_model.sh
. ../warm_model.sh

areal-lite train "model=$warm" algo=ppo algo.critic.lr=1e-3 \
  +task=addition data.args.max_digits=3 rollout.group_size=1 rollout.max_new_tokens=64 \
  trainer.batch_groups=128 trainer.minibatches=4 trainer.steps=32 \
  trainer.lr=2e-4 trainer.lr_schedule=linear trainer.lr_warmup_steps=3 trainer.adam_eps=1e-5 "$@"
