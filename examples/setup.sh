# shellcheck shell=bash
# Sourced by quickstart.sh, tests/run.sh, tests/lint.sh and the Dockerfile.
# Makes .venv in the checkout or reuses it, and activates it.
#
#   PYTHON=/path/to/python3          picks the interpreter
#   AREAL_LITE_TORCH_INDEX=https://… picks the index of CPU builds of torch (a mirror)

# Install the package with the extras `areal_lite_setup ROOT [EXTRA]`, unless that was done before.
areal_lite_setup() {
  local root=$1 extras=cpu stamp
  # `venv` writes `activate` last.
  [[ -x $root/.venv/bin/python && -e $root/.venv/bin/activate ]] ||
    areal_lite_make_venv "$root" || return 1
  # shellcheck disable=SC1091 # the file does not exist before the first run
  . "$root/.venv/bin/activate"
  if command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; then
    extras=gpu
  fi
  extras=$extras${2:+,$2}
  stamp=$(cat "$root"/{pyproject.toml,constraints.txt} | cksum | cut -d' ' -f1)
  stamp=$root/.venv/installed-$stamp
  if [ ! -e "$stamp-$extras" ] && [ ! -e "$stamp-$extras,test" ]; then
    areal_lite_install "$root" "$extras" || return 1
    rm -f "$root"/.venv/installed-*
    touch "$stamp-$extras"
  fi
}

areal_lite_install() {
  local root=$1 extras=$2
  if [[ $extras = gpu* ]]; then
    echo "setup: installing for GPUs: about 5 GB to download" >&2
    areal_lite_pip -e "${root}[$extras]"
    return
  fi
  areal_lite_install_cpu_torch || return 1
  echo "setup: 2/3 areal_lite and what it needs" >&2
  areal_lite_pip -c "$root/constraints.txt" -e "${root}[$extras]" || return 1
  echo "setup: 3/3 SGLang" >&2
  areal_lite_pip --no-deps sglang==0.5.21 xgrammar==0.2.7
}

# Install the CPU build of torch. PyPI has only the CUDA build, gigabytes that no CPU uses, so the
# index of torch's own project comes first. Where it does not answer, pip takes what it finds.
areal_lite_install_cpu_torch() {
  local index=${AREAL_LITE_TORCH_INDEX:-https://download.pytorch.org/whl/cpu} from=()
  local answers='import sys, urllib.request as r; r.urlopen(sys.argv[1], timeout=5)'
  if python3 -c "$answers" "$index/torch/" >/dev/null 2>&1; then
    echo "setup: installing for CPUs: 0.4 GB to download, 1.8 GB on disk, a few minutes" >&2
    from=(--no-deps --index-url "$index")
  else
    echo "setup: $index does not answer, so pip looks for torch where it looks for everything." \
      "PyPI has only the CUDA build, which works without a GPU: 3 GB to download," \
      "6 GB on disk. AREAL_LITE_TORCH_INDEX names another index of CPU builds." >&2
  fi
  echo "setup: 1/3 torch" >&2
  python3 -m pip install -qq --disable-pip-version-check "${from[@]}" torch==2.13.0
}

# Install packages with uv where there is one, else (or if uv fails) with pip.
areal_lite_pip() {
  if command -v uv >/dev/null 2>&1; then
    uv pip install --quiet "$@" && return
    echo "setup: uv failed; trying pip" >&2
  fi
  python3 -m pip install -qq --disable-pip-version-check "$@"
}

areal_lite_make_venv() {
  local root=$1 python candidates=(python3 python3.12 python3.11 python3.13)
  [ -z "${PYTHON:-}" ] || candidates=("$PYTHON")
  for python in "${candidates[@]}"; do
    "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null &&
      break
    python=
  done
  if [ -z "$python" ]; then
    echo "setup: no Python 3.11, 3.12 or 3.13: install one, or set PYTHON=/path/to/python3" >&2
    return 1
  fi
  "$python" "$root/areal_lite/tools/machine.py" "$root" || return 1
  echo "setup: making $root/.venv with $("$python" --version)" >&2
  "$python" -m venv "$root/.venv" || {
    rm -rf "$root/.venv"
    echo "setup: '$python -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2
    return 1
  }
}
