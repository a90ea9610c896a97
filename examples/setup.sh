# Sourced by quickstart.sh and tests/run.sh: makes .venv in the checkout, or reuses it, and activates it.
# Needs Python 3.11+ with venv and a C compiler. PYTHON=... picks an interpreter.

areal_lite_setup() {
  local root=$1 python=${PYTHON:-} candidate stamp extra
  if [ ! -x "$root/.venv/bin/python" ]; then
    for candidate in ${python:-python3 python3.12 python3.11 python3.13}; do
      if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then python=$candidate; break; fi
      python=
    done
    if [ -z "$python" ]; then
      echo "setup: Python 3.11 or newer was not found; install it, or name one with PYTHON=/path/to/python3" >&2
      return 1
    fi
    echo "setup: making $root/.venv with $("$python" --version)" >&2
    "$python" -m venv "$root/.venv" || { rm -rf "$root/.venv"; echo "setup: '$python -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; return 1; }
  fi
  # shellcheck disable=SC1091
  . "$root/.venv/bin/activate"
  extra=cpu
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then extra=gpu; fi
  stamp="$root/.venv/areal_lite-$(cksum <"$root/pyproject.toml" | cut -d' ' -f1)-$extra"
  if [ ! -e "$stamp" ]; then
    echo "setup: installing ($extra); a few minutes the first time" >&2
    python -m pip install --quiet --disable-pip-version-check -e "$root[$extra,test]" || return 1
    if [ "$extra" = cpu ]; then
      # Without its dependencies: most are CUDA kernels, gigabytes that a machine with no GPU cannot use.
      python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.21 || return 1
    fi
    rm -f "$root"/.venv/areal_lite-*
    touch "$stamp"
  fi
}
