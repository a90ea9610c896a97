#!/usr/bin/env bash
# Learn from a larger model instead of a reward. Arguments are settings:
#   bash examples/distillation/run.sh trainer.steps=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=examples/warm_model.sh
. ../warm_model.sh

# The teacher has more than twice the parameters of the student. It learns once, in about a minute,
# from demonstrations that forget one carry in twenty. So it knows how to continue after a mistake.
#   TEACHER_MODEL=/path/to/folder    makes it there, and uses it from there
teacher=${TEACHER_MODEL:-$examples/models/teacher}
make_teacher() {
  echo "making the teacher: $teacher" >&2
  rm -rf "$teacher-random" "$teacher-sft" # of a start that was interrupted
  python -m areal_lite_quickstart.make_model "out=$teacher-random" \
    num_layers=3 hidden_size=128 mlp_size=256 >&2
  OMP_NUM_THREADS=2 \
    python -m areal_lite_quickstart.sft "model=$teacher-random" "out=$teacher" \
    "run_dir=$teacher-sft" max_digits=3 batch_size=32 forget_carry=0.05 \
    trainer.steps="${TEACHER_STEPS:-300}" trainer.lr=4e-3 trainer.min_lr=8e-5 \
    trainer.lr_schedule=cosine trainer.lr_warmup_steps=20 >&2
}
make_once "$teacher" make_teacher

areal-lite train "model=$warm" algo=distill "algo.reference=$teacher" \
  +task=addition data.args.max_digits=3 rollout.group_size=1 rollout.max_new_tokens=64 \
  trainer.batch_groups=128 trainer.minibatches=4 trainer.steps=40 \
  trainer.lr=2e-4 trainer.lr_schedule=linear trainer.lr_warmup_steps=3 trainer.adam_eps=1e-5 "$@"
