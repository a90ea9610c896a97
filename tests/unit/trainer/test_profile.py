"""Profiles of the steps that the environment names, and of no others."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from areal_lite.trainer.profile import profiled, profiled_steps

ENV_PROFILE = "AREAL_LITE_PROFILE"


def product() -> torch.Tensor:
    return torch.ones(3, 3) @ torch.ones(3, 3)


def names_of(trace: Path) -> set[str]:
    with gzip.open(trace) as file:
        return {event["name"] for event in json.load(file)["traceEvents"] if "name" in event}


def test_the_steps_that_are_named_leave_a_trace(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv(ENV_PROFILE, "4,2")
    for step in range(1, 6):
        with profiled(step, 1, tmp_path):
            product()
    found = sorted((tmp_path / "profile").iterdir())
    assert [path.name for path in found] == ["step-2-rank-1.json.gz", "step-4-rank-1.json.gz"]
    assert all("aten::mm" in names_of(path) for path in found)


def test_nothing_is_profiled_unless_asked_for(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.delenv(ENV_PROFILE, raising=False)
    with profiled(1, 0, tmp_path):
        product()
    assert profiled_steps() == [] and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("named", ["0", "-1", "last", "2;3", "²"])
def test_names_of_no_step_are_refused(monkeypatch, named: str) -> None:
    monkeypatch.setenv(ENV_PROFILE, named)
    with pytest.raises(ValueError, match=f"{ENV_PROFILE}={named}: name training steps"):
        profiled_steps()


def test_a_gpu_leaves_its_memory_also_when_that_is_full(monkeypatch, tmp_path: Path) -> None:
    calls = []
    monkeypatch.setenv(ENV_PROFILE, "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda.memory, "_record_memory_history", lambda **options: calls.append(options)
    )
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: calls.append(path))
    with pytest.raises(torch.OutOfMemoryError), profiled(1, 0, tmp_path):
        raise torch.OutOfMemoryError("full")
    assert calls == [
        {"max_entries": 1_000_000},
        str(tmp_path / "profile" / "step-1-rank-0.pickle"),
        {"enabled": None},
    ]
