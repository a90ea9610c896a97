"""The quickstart as users run it: it learns more than its teacher knows, and loses nothing."""

import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "overrides",
    [[], ["seed=2", "data.args.max_digits=4", "make_model.hidden_size=96"]],
    ids=["default", "smaller"],
)
def test_quickstart_learns(tmp_path, overrides):
    command = ["bash", "examples/quickstart.sh", f"run_dir={tmp_path / 'run'}", *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1100)
    assert done.returncode == 0, done.stderr
    summary = json.loads(Path(done.stdout.splitlines()[-1]).read_text())
    assert 0.3 <= summary["accuracy_before"] <= 0.7
    assert summary["accuracy_after"] >= 0.95
    assert summary["multi_segment_share"] >= 0.2
    assert summary["max_staleness"] <= summary["staleness_bound"]
    assert summary["requests_drained"] == summary["trajectories_lost"] == 0
    assert summary["pushes"] >= 20
