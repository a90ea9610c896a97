"""The command of the acceptance on GPUs, on a machine that may have none."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*args: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu.py"), *args]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def test_a_dry_run_shows_every_part() -> None:
    done = run("--dry-run", "--name", "nowhere")
    assert done.returncode == 0, done.stderr
    parts = [line.split()[1] for line in done.stdout.splitlines()]
    assert parts[:3] == ["machine", "attention", "head"] and len(parts) >= 9
    assert not (ROOT / "benchmarks" / "results" / "gpu-nowhere.json").exists()


def test_results_are_a_table_and_a_failed_check_is_the_exit_status(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu

    results = {
        "head": {"seconds": 3.0, "numbers": {"a": 1}, "checks": {"exact": True}},
        "order": {"seconds": 4.0, "numbers": {}, "checks": {"the same cache": False}},
    }
    lines = gpu.table(results).splitlines()
    assert "ok    head        3 s" in [line.rstrip() for line in lines]
    assert f"{'':<18}a: 1" in lines
    assert any(line.startswith("FAIL  order") and "the same cache" in line for line in lines)
    monkeypatch.setattr(gpu, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--dry-run", "--name", "x"])
    (tmp_path / "gpu-x.json").write_text(json.dumps(results))
    assert gpu.main() == 1


def test_an_unknown_part_is_refused() -> None:
    done = run("hed")
    assert done.returncode == 2 and "no part hed: choose from machine" in done.stderr
