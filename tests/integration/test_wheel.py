"""A wheel has all that the commands need: configurations, templates, pages, stored runs."""

import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.tools.report.recorded_run import unpack

ROOT = Path(__file__).parents[2]
Command = Callable[..., str]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Run a command of the package as a wheel installs it, away from the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    build = ["-m", "pip", "wheel", "-qq", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([sys.executable, *build, str(ROOT)], check=True)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder / "site")
    environment = {**os.environ, "PYTHONPATH": str(folder / "site")}

    def run(*args: str) -> str:
        command = [sys.executable, "-P", *args]
        return subprocess.run(
            command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, check=True
        ).stdout

    assert run("-c", "import areal_lite; print(areal_lite.__file__)").startswith(str(folder))
    return run


def test_a_run_is_planned(installed: Command, tmp_path: Path):
    model = tmp_path / "model"
    installed("-m", "areal_lite_quickstart.make_model", f"out={model}")
    plan = installed("-m", "areal_lite", "train", "--dry-run", f"model={model}", "+task=addition")
    assert "data" in plan
    nodes = ("cluster.nodes=2", "cluster.gpus_per_node=0")
    job = installed(
        "-m", "areal_lite", "slurm", "--print", f"model={model}", "+task=addition", *nodes
    )
    assert job.startswith("#!/bin/bash")


def test_a_stored_run_is_shown(installed: Command, tmp_path: Path):
    run_dir = unpack("async", tmp_path)
    assert "report.html" in installed("-m", "areal_lite", "report", str(run_dir))
