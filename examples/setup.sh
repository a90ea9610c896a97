# shellcheck shell=bash
# Sourced by quickstart.sh, tests/run.sh and tests/lint.sh.
# Makes .venv in the checkout or reuses it, and activates it.
# Needs Python 3.11 or newer with venv, and a C compiler. PYTHON=... picks an interpreter.

areal_lite_setup() {
  local root=$1 stamp extra=cpu
  [ -x "$root/.venv/bin/python" ] || areal_lite_make_venv "$root" || return 1
  # shellcheck disable=SC1091 # the file does not exist before the first run
  . "$root/.venv/bin/activate"
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    extra=gpu
  fi
  stamp="$root/.venv/areal_lite-$(cksum <"$root/pyproject.toml" | cut -d' ' -f1)-$extra"
  if [ ! -e "$stamp" ]; then
    echo "setup: installing ($extra); a few minutes the first time" >&2
    python -m pip install --quiet --disable-pip-version-check -e "${root}[$extra,test]" || return 1
    if [ "$extra" = cpu ]; then
      # Most dependencies of SGLang are CUDA kernels: gigabytes without use on this machine.
      python -m pip install --quiet --disable-pip-version-check --no-deps sglang==0.5.21 || return 1
    fi
    rm -f "$root"/.venv/areal_lite-*
    touch "$stamp"
  fi
}

areal_lite_make_venv() {
  local root=$1 python=${PYTHON:-} candidate
  for candidate in ${python:-python3 python3.12 python3.11 python3.13}; do
    python=$candidate
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && break
    python=
  done
  if [ -z "$python" ]; then
    echo "setup: no Python 3.11 or newer: install it, or set PYTHON=/path/to/python3" >&2
    return 1
  fi
  echo "setup: making $root/.venv with $("$python" --version)" >&2
  "$python" -m venv "$root/.venv" || {
    rm -rf "$root/.venv"
    echo "setup: '$python -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2
    return 1
  }
}
