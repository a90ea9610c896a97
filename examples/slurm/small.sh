#!/usr/bin/env bash
# Check that a cluster works: train a small model for five steps on two nodes without GPUs.
# One node trains, the other one generates.
#   bash examples/slurm/small.sh [key=value …]
set -euo pipefail
model=runs/slurm-model
[ -d "$model" ] || python -m areal_lite_quickstart.make_model out="$model"
exec areal-lite slurm model="$model" run_dir="runs/slurm-$(date +%Y%m%d-%H%M%S)" +task=addition \
  cluster.nodes=2 cluster.gpus_per_node=0 cluster.time=30 \
  rollout.max_new_tokens=64 rollout.max_concurrent=64 \
  trainer.steps=5 trainer.batch_groups=8 eval.problems=16 "$@"
