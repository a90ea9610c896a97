"""The stages of the quickstart, and which of them an interrupted one repeats."""

import os
import signal
from pathlib import Path

import pytest

from areal_lite.cli import checked_config
from areal_lite.launch import local
from areal_lite.run_dir.resume import STOPPED
from areal_lite_quickstart import make_model, quickstart, sft


@pytest.fixture
def stages(monkeypatch) -> list[str]:
    """Replace the stages by stand-ins that make their folders; return the names of the calls."""
    calls: list[str] = []

    def stand_in(module, function: str, name: str, status: int = 0) -> None:
        def stage(config) -> int:
            calls.append(name)
            if hasattr(config, "out"):
                Path(config.out).mkdir()
            return status

        monkeypatch.setattr(module, function, stage)

    stand_in(make_model, "run", "model")
    stand_in(sft, "run", "warm-up")
    stand_in(local, "run_locked", "train", status=7)
    return calls


def start(run_dir: Path, *settings: str) -> int:
    return quickstart.run(checked_config("quickstart", [f"run_dir={run_dir}", *settings]))


def test_it_ends_with_the_status_of_its_last_stage(stages, tmp_path):
    assert start(tmp_path / "run") == 7
    assert stages == ["model", "warm-up", "train"]


@pytest.mark.parametrize(
    "there, repeated",
    [
        ([], ["model", "warm-up", "train"]),
        (["model"], ["warm-up", "train"]),
        (["model", "warm"], ["train"]),
    ],
)
def test_an_interrupted_one_repeats_only_what_is_not_there(
    stages, tmp_path, capsys, there, repeated
):
    for name in there:
        (tmp_path / name).mkdir()
    assert start(tmp_path, "resume=auto") == 7
    assert stages == repeated
    assert capsys.readouterr().err.count("done before") == len(there)


def test_one_that_was_begun_is_not_begun_again(stages, tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(ValueError, match="resume=auto"):
        start(tmp_path)
    assert stages == []


def test_a_stop_during_an_early_stage_ends_it_and_the_next_start_goes_on(
    stages, tmp_path, monkeypatch
):
    def interrupted(config) -> int:
        stages.append("interrupted")
        Path(config.out).mkdir()
        os.kill(os.getpid(), signal.SIGUSR1)
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(make_model, "run", interrupted)
        assert start(tmp_path) == STOPPED
    assert start(tmp_path, "resume=auto") == 7
    assert stages == ["interrupted", "warm-up", "train"]
