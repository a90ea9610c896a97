#!/usr/bin/env bash
# For a machine with one GPU: set everything up, measure for at most half an hour, write one page.
#   bash benchmarks/prove.sh --name h100
# Arguments go to benchmarks/prove.py, which says more.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=examples/setup.sh
. "$root/examples/setup.sh"
areal_lite_setup "$root"
cd "$root"
exec python benchmarks/prove.py "$@"
