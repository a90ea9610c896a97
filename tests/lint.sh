#!/usr/bin/env bash
# Runs every check of the code that is not a test. Fails after the last one if any of them failed.
# Uses the tools of the active virtual environment, or sets up .venv with them.
#
#   bash tests/lint.sh           all checks, about a minute
#   bash tests/lint.sh --quick   without the type checker, a few seconds
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"

if [ -z "${VIRTUAL_ENV:-}" ] || [ ! -x "$VIRTUAL_ENV/bin/basedpyright" ]; then
  # shellcheck source=examples/setup.sh
  . "$root/examples/setup.sh"
  areal_lite_setup "$root" test
  stamp="$root/.venv/dev-tools-$(cksum <pyproject.toml | cut -d' ' -f1)"
  if [ ! -e "$stamp" ]; then
    echo "lint: installing the dev extra" >&2
    python -m pip install --quiet --disable-pip-version-check -e "${root}[dev]"
    rm -f "$root"/.venv/dev-tools-*
    touch "$stamp"
  fi
fi

# New files count before `git add`.
mapfile -t shell_files < <(git ls-files -co --exclude-standard '*.sh' '.ci/run')
mapfile -t text_files < <(git ls-files -co --exclude-standard)
failed=()

check() {
  local name=$1
  shift
  echo "== $name" >&2
  "$@" || failed+=("$name")
}

if [ "${1:-}" != --quick ]; then
  # The type checker takes most of the time, and runs beside the others.
  type_errors=$(mktemp)
  basedpyright >"$type_errors" 2>&1 &
  type_checker=$!
fi
check "ruff check" ruff check --quiet .
check "ruff format" ruff format --quiet --check .
check "import-linter" lint-imports --no-logo
check "shellcheck" shellcheck --external-sources "${shell_files[@]}"
check "codespell" codespell "${text_files[@]}"
check "house rules" python tests/house_rules.py
[ "${1:-}" = --quick ] || check "budgets" python tests/budgets.py
if [ "${1:-}" != --quick ]; then
  check "basedpyright" wait "$type_checker"
  cat "$type_errors"
  rm -f "$type_errors"
fi

if [ ${#failed[@]} -gt 0 ]; then
  printf 'lint: failed: %s\n' "${failed[@]}" >&2
  exit 1
fi
echo "lint: all checks passed" >&2
