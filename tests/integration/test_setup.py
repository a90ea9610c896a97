"""A new checkout is set up with the real uv. It downloads packages, 0.4 GB without a cache."""

import os
import shutil
import subprocess
import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path

import pytest

from tests.unit.test_setup import ROOT

# uv is not in the extra `test`: the setup would then use it for each update of this checkout.
UV = "uv==0.13.9"
CHECKOUT = (
    "areal_lite",
    "conf",
    "examples/setup.sh",
    "pyproject.toml",
    "constraints.txt",
    "README.md",
    "LICENSE",
)


def installed(checkout: Path) -> dict[str, Distribution]:
    """Return the packages of a checkout's environment by name."""
    (packages,) = checkout.glob(".venv/lib/python3.*/site-packages")
    return {found.metadata["Name"].lower(): found for found in distributions(path=[str(packages)])}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_uv_installs_the_tested_versions_and_keeps_torch(tmp_path: Path) -> None:
    tools, checkout = tmp_path / "tools", tmp_path / "checkout"
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--target", str(tools), UV]
    subprocess.run(pip, check=True)
    for name in CHECKOUT:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / name, checkout / name)
    environment = os.environ | {
        "PATH": f"{tools}/bin:{os.environ['PATH']}",
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "CUDA_VISIBLE_DEVICES": "",
    }
    environment.pop("PYTHONPATH", None)
    command = '. examples/setup.sh && areal_lite_setup "$PWD" && areal-lite doctor --quick'
    done = subprocess.run(
        ["bash", "-c", command], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and "uv failed" not in done.stderr, done.stdout + done.stderr
    found = installed(checkout)
    by_pip = {name for name, package in found.items() if package.read_text("INSTALLER") != "uv"}
    assert "torch" in by_pip and not by_pip & {"sglang", "xgrammar", "transformers", "areal-lite"}
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    for name in ("torch", "sglang", "transformers", "megatron-core", "numpy"):
        assert found[name].version.partition("+")[0] == pins[name]
