"""Everything that a machine lacks is named with its remedy, before anything is installed."""

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_lite.tools import machine


def test_a_machine_that_runs_the_tests_lacks_nothing(tmp_path: Path):
    assert list(machine.problems(tmp_path)) == []


def test_the_script_needs_only_the_standard_library(tmp_path: Path):
    command = [sys.executable, "-I", "-S", machine.__file__, str(tmp_path)]
    assert subprocess.run(command, capture_output=True, text=True).stderr == ""


@pytest.mark.parametrize(
    ("name", "value", "line"),
    [
        ("sys.platform", "darwin", "system darwin: SGLang needs Linux"),
        ("sys.version_info", (3, 14, 0), ": install Python 3.11 to 3.13"),
        ("shutil.which", lambda name: None, "no C compiler: install gcc"),
        ("shutil.disk_usage", lambda path: SimpleNamespace(free=2e9, total=1e7), "3 GB are needed"),
        ("available_memory", lambda: 10**9, "available memory: 1 GB, and 6 GB are needed"),
    ],
)
def test_what_is_missing_is_named(
    name: str, value: object, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(f"areal_lite.tools.machine.{name}", value)
    assert any(line in problem for problem in machine.problems(tmp_path))


def test_small_shared_memory_has_a_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    small = SimpleNamespace(free=1e12, total=1e7)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: small)
    (problem,) = machine.problems(tmp_path)
    assert problem == "/dev/shm: 0.01 GB, and 0.06 GB are needed; in a container: --shm-size=1g"
