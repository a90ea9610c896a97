#!/usr/bin/env bash
# Sets everything up, then runs the tests. --slow adds those that take minutes; other arguments go to pytest.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
. "$root/examples/setup.sh"
areal_lite_setup "$root"
cd "$root"
select=(-m "not slow")
args=()
for arg in "$@"; do
  if [ "$arg" = --slow ]; then select=(); else args+=("$arg"); fi
done
# One thread per process: the tests start many.
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1
exec python -m pytest "${select[@]}" "${args[@]}"
