#!/usr/bin/env bash
# Train from Python. Arguments are settings: bash examples/python_api/run.sh trainer.steps=5
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
# shellcheck source=examples/warm_model.sh
. ../warm_model.sh

python train.py "model=$warm" "$@"
