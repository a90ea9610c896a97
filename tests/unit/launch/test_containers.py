"""Dockerfile and compose file pass their linters. No container engine is needed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[3]
TOOLS = Path(sys.executable).parent


def run(*command: str | Path) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_the_dockerfile_passes_hadolint() -> None:
    done = run(TOOLS / "hadolint", "Dockerfile")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_compose_file_follows_the_schema() -> None:
    done = run(
        TOOLS / "check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker-compose.yaml"
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    "tool, text",
    [
        (["hadolint"], "FROM python\nRUN cd /tmp\n"),
        (
            ["check-jsonschema", "--builtin-schema", "vendor.compose-spec"],
            "services: {a: {imagine: b}}\n",
        ),
    ],
)
def test_the_linters_find_mistakes(tmp_path, tool, text) -> None:
    (tmp_path / "file").write_text(text)
    assert run(TOOLS / tool[0], *tool[1:], tmp_path / "file").returncode == 1


STAND_IN = """#!/bin/sh
case "$*" in
*trainer.loop*)
  touch "$RUN_DIR/started"
  while [ ! -e "$RUN_DIR/stop" ]; do sleep 0.05; done
  exit "$STATUS" ;;
*"prepare end"*) touch "$RUN_DIR/ended" ;;
esac
"""


@pytest.mark.parametrize("status", [0, 3])
def test_sigterm_asks_the_trainer_in_a_container_to_stop(tmp_path, status: int) -> None:
    """The shell of the service runs with a program that stands for Python."""
    service = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())["services"]["trainer"]
    program = tmp_path / "python3"
    program.write_text(STAND_IN)
    program.chmod(0o755)
    environment = os.environ | {"RUN_DIR": str(tmp_path), "STATUS": str(status)}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    script = service["command"][0].replace("$$", "$").replace("${TRAINER_RANKS:-2}", "2")
    shell = subprocess.Popen([*service["entrypoint"], script], env=environment)
    while not (tmp_path / "started").exists():
        assert shell.poll() is None
        time.sleep(0.02)
    shell.terminate()
    assert shell.wait(20) == status
    assert (tmp_path / "ended").exists() == (status == 0), "only a run that ends well is reported"
