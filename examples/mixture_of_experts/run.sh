#!/usr/bin/env bash
# Train a mixture of experts with the routes that its servers took. Arguments are settings:
#   bash examples/mixture_of_experts/run.sh trainer.steps=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=examples/warm_model.sh
. ../warm_model.sh

# A small mixture: 8 experts in each layer, 2 of them for a token. It learns once, in two minutes.
#   EXPERTS_MODEL=/path/to/folder    makes it there, and uses it from there
experts=${EXPERTS_MODEL:-$examples/models/experts}
make_experts() {
  echo "making the mixture of experts: $experts" >&2
  rm -rf "$experts-random" "$experts-sft" # of a start that was interrupted
  python -m areal_lite_quickstart.make_model "out=$experts-random" architecture=qwen3_moe \
    num_layers=2 hidden_size=96 mlp_size=96 num_experts=8 experts_per_token=2 \
    tie_embeddings=false >&2
  OMP_NUM_THREADS=2 \
    python -m areal_lite_quickstart.sft "model=$experts-random" "out=$experts" \
    "run_dir=$experts-sft" max_digits=3 batch_size=32 forget_carry=0.65 \
    trainer.steps="${EXPERTS_STEPS:-300}" trainer.lr=4e-3 trainer.min_lr=8e-5 \
    trainer.lr_schedule=cosine trainer.lr_warmup_steps=20 >&2
}
make_once "$experts" make_experts

areal-lite train "model=$experts" algo=quickstart algo.routing_replay=true \
  +task=addition data.args.max_digits=3 rollout.group_size=8 rollout.max_new_tokens=64 \
  trainer.batch_groups=16 trainer.minibatches=4 trainer.lr=1.5e-4 trainer.steps=24 "$@"
