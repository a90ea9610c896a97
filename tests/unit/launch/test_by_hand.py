"""Commands that start the roles of a run by hand."""

import json
import os
import time
from pathlib import Path

import pytest

from areal_lite.config import TrainConfig, save_config
from areal_lite.launch import local, prepare, server_pool
from areal_lite.run_dir.paths import SUMMARY_FILE


@pytest.mark.parametrize(
    ("module", "words"),
    [
        (server_pool, ["run", "0"]),
        (server_pool, ["run", "0", "two"]),
        (server_pool, ["run", "0", "2", "until_end"]),
        (prepare, []),
        (prepare, ["begin"]),
        (prepare, ["start", "run"]),
    ],
)
def test_wrong_words_are_refused(module, words, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["module", *words])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 2 and "usage: " in capsys.readouterr().err


def test_a_run_that_was_not_prepared_gets_no_folder(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("sys.argv", ["prepare", "begin", str(tmp_path / "run")])
    assert prepare.main() == 1 and "config.yaml cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_the_time_of_a_start_begins_with_it(tmp_path: Path, monkeypatch) -> None:
    """A job may have waited in a queue for hours, or have run before."""
    path = save_config(TrainConfig(model="m", run_dir=str(tmp_path)), tmp_path)
    os.utime(path, (prepared := time.time() - 7200, prepared))
    assert prepare.begin(tmp_path) == 0
    monkeypatch.setattr(local, "observer", local.Observer)
    assert prepare.end(tmp_path) == 0
    assert json.loads((tmp_path / SUMMARY_FILE).read_text())["wall_s"] < 60


def test_a_run_that_was_stopped_before_its_end_gets_a_summary(tmp_path: Path, monkeypatch) -> None:
    """The job was killed between the last checkpoint and `end`."""
    config = TrainConfig(model="m", run_dir=str(tmp_path))
    save_config(config, tmp_path)
    monkeypatch.setattr(prepare.resume, "start_version", lambda folder: config.trainer.steps)
    monkeypatch.setattr(local, "observer", local.Observer)
    assert prepare.begin(tmp_path) == prepare.COMPLETE
    assert (tmp_path / SUMMARY_FILE).exists()
