#!/usr/bin/env bash
# Set everything up, train a small model with reinforcement learning, and show a summary.
# Arguments are settings:
#   bash examples/quickstart.sh seed=2 data.args.max_digits=4 make_model.hidden_size=96
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# shellcheck source=examples/setup.sh
. "$root/examples/setup.sh"
areal_lite_setup "$root"
cd "$root"
exec areal-lite quickstart "$@"
