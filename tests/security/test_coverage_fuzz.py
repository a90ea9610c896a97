"""No input that coverage-guided search finds in half a minute breaks a parser."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TARGETS = ["generation", "other_answers", "requests", "tool_calls", "completions"]
TARGETS += ["worker_frames", "data_rows", "manifest"]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("target", TARGETS)
def test_no_input_breaks(target: str, tmp_path: Path) -> None:
    pytest.importorskip("atheris", reason="atheris is in the extra dev")
    command = [sys.executable, "-m", "tests.security.coverage_fuzz", target, "--seconds", "30"]
    done = subprocess.run(
        [*command, "--work", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (executed,) = re.findall(r"number_of_executed_units: (\d+)", done.stderr)
    assert int(executed) > 1000
