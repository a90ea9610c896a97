"""The cores that a process may use."""

import os
from pathlib import Path

import pytest

from areal_lite.system.processes import usable_cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [
        ("250000 100000\n", 2),
        ("50000 100000\n", 1),
        ("9900000 100000\n", 8),
        ("max 100000\n", 8),
        ("", 8),
        (None, 8),
    ],
)
def test_the_limit_of_a_container_counts(
    quota: str | None, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    file = tmp_path / "cpu.max"
    if quota is not None:
        file.write_text(quota)
    assert usable_cores(file) == cores
