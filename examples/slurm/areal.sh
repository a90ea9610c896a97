#!/usr/bin/env bash
# Submit AReaL's 1.5B experiment to 16 nodes of 8 GPUs. With --print, only show the job.
#   bash examples/slurm/areal.sh MODEL [key=value …] [--print]
# Change the last lines for your site: partition, account, modules, network.
set -euo pipefail
model=$1
shift
exec areal-lite slurm +experiment=areal model="$model" run_dir=runs/areal resume=auto \
  cluster.nodes=16 cluster.time=24:00:00 \
  cluster.options.partition=gpu cluster.options.account=my_project \
  'cluster.setup=["module load cuda", "export NCCL_SOCKET_IFNAME=ib0 GLOO_SOCKET_IFNAME=ib0"]' "$@"
