"""`areal-lite doctor` trains for real, and leaves neither files nor processes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_machine_that_works_passes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "areal_lite", "doctor", f"folder={tmp_path}/runs"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    *checks, run = done.stdout.splitlines()
    assert run.startswith("ok    run ") and "made 2 steps" in run, done.stdout
    assert done.returncode == 0 and all(line.startswith("ok ") for line in checks), done.stdout
    assert list(tmp_path.iterdir()) == []
    left = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.is_file()]
    assert not [command for command in left if str(tmp_path).encode() in command]
