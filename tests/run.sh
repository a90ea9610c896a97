#!/usr/bin/env bash
# Set everything up and run the tests.
#   bash tests/run.sh            the tests that take seconds
#   bash tests/run.sh --slow     also the tests that take minutes
# Other arguments go to pytest; `-n 0` runs all tests in one process.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=examples/setup.sh
. "$root/examples/setup.sh"
areal_lite_setup "$root" test
cd "$root"
select=(-m "not slow")
args=()
for arg in "$@"; do
  if [ "$arg" = --slow ]; then select=(); else args+=("$arg"); fi
done
# One thread per process: the tests start many processes.
export OMP_NUM_THREADS=1 TORCHDYNAMO_DISABLE=1
# Two processes: one for the integration tests, the other for all others (tests/conftest.py).
exec python -m pytest -n 2 --no-loadscope-reorder "${select[@]}" "${args[@]}"
