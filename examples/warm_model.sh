# shellcheck shell=bash
# Sourced by the run.sh of each example, in the example's folder. Sets everything up, unless the
# active environment has areal-lite, and makes the model that the examples start from, unless that
# was done before: about 40 seconds on two cores.
#
# It is a small Qwen3 with random weights, which demonstrations of addition then warm up. Their
# teacher forgets most carries, so reinforcement learning has something to improve.
#
#   WARM_MODEL=/path/to/folder       makes the model there, and uses it from there
examples=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if ! command -v areal-lite >/dev/null; then
  # shellcheck source=examples/setup.sh
  . "$examples/setup.sh"
  areal_lite_setup "$examples/.."
fi

# Make the folder of a model by a function, unless it exists: `make_once FOLDER FUNCTION`. Examples
# that start together make it once.
make_once() {
  [ ! -d "$1" ] || return 0
  mkdir -p "$(dirname "$1")"
  exec 9>"$1.lock"
  flock 9
  [ -d "$1" ] || "$2"
  exec 9>&-
}

warm=${WARM_MODEL:-$examples/models/warm}
make_warm() {
  echo "making the small model that the examples start from: $warm" >&2
  rm -rf "$warm-random" "$warm-sft" # of a start that was interrupted
  python -m areal_lite_quickstart.make_model "out=$warm-random" \
    num_layers=2 hidden_size=96 mlp_size=192 >&2
  OMP_NUM_THREADS=2 \
    python -m areal_lite_quickstart.sft "model=$warm-random" "out=$warm" "run_dir=$warm-sft" \
    max_digits=3 batch_size=32 forget_carry=0.65 \
    trainer.steps="${WARM_STEPS:-300}" trainer.lr=4e-3 trainer.min_lr=8e-5 \
    trainer.lr_schedule=cosine trainer.lr_warmup_steps=20 >&2
}
make_once "$warm" make_warm

echo "this example runs in $PWD: what it names as runs/… is there" >&2
