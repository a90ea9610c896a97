"""A Docker Engine for tests: its program, the base of the target `cpu`, and what an image has."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def docker(*command: str, text: str | None = None, timeout_s: float = 60) -> str:
    """Run `docker` and return what it wrote to its standard output."""
    done = subprocess.run(
        ["docker", *command], input=text, capture_output=True, text=True, timeout=timeout_s
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


def base_image() -> str:
    """Return the name of the base of the target `cpu`; skip the test if the engine lacks it."""
    if shutil.which("docker") is None:
        pytest.skip("docker is not installed")
    engine = subprocess.run(["docker", "version"], capture_output=True, text=True, timeout=60)
    if engine.returncode:
        pytest.skip(f"no Docker Engine answers: {engine.stderr.strip()}")
    (name,) = re.findall("^ARG CPU_BASE=(.*)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    here = subprocess.run(["docker", "image", "inspect", name], capture_output=True)
    if here.returncode and subprocess.run(["docker", "pull", "-q", name]).returncode:
        pytest.skip(f"{name} is neither here nor at a registry that can be reached")
    return name


def run_in(image: str, command: str) -> str:
    """Run a shell command in a new container and return what it wrote."""
    return docker("run", "--rm", "--entrypoint", "sh", image, "-ec", command).strip()


def packages(image: str) -> dict[str, str]:
    """Return the versions of the Python packages in an image."""
    listed = json.loads(run_in(image, "python3 -m pip list --format=json"))
    return {plain(item["name"]): item["version"] for item in listed}


def pinned_versions() -> dict[str, str]:
    """Return the versions in constraints.txt."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = (line.split("==") for line in lines if "==" in line)
    return {plain(name): version for name, version in pins}


def plain(name: str) -> str:
    """Write the name of a package in the way that is the same for all its spellings."""
    return re.sub("[-_.]+", "_", name).lower()
