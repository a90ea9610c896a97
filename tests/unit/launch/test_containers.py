"""Dockerfile and compose file pass their linters. No container engine is needed."""

import subprocess
import sys
from pathlib import Path

import pytest

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
