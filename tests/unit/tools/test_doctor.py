"""The checks of this machine: each says what it found, or what to do."""

import fcntl
import re
import sqlite3
import tomllib
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from areal_lite.cli import checked_config, main
from areal_lite.tools import doctor

ROOT = Path(__file__).resolve().parents[3]


def lines(output: str) -> dict[str, str]:
    """Return the result of each check by its name: ok or FAIL."""
    return {line.split()[1]: line.split()[0] for line in output.splitlines()}


def test_every_check_has_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A folder that does not exist yet is checked where it would be made.
    status = main(["doctor", f"folder={tmp_path}/not/yet", "--quick"])
    found = lines(capsys.readouterr().out)
    names = ["machine", "GPU", "versions", "plugins", "ports", "locks", "store", "clock", "run"]
    assert list(found) == names and found["run"] == "skip"
    # The machine that runs the tests may be small.
    assert status == int("FAIL" in found.values())
    assert {found[name] for name in ("ports", "locks", "store", "clock", "plugins")} == {"ok"}
    assert list(tmp_path.iterdir()) == [], "nothing is left"


def test_a_folder_that_cannot_be_used_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "folder=/proc/self"]) == 1
    found = lines(capsys.readouterr().out)
    assert found["locks"] == found["store"] == "FAIL" and found["ports"] == "ok"
    assert found["run"] == "skip"  # it could not work


def test_the_pins_are_those_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = [*project["dependencies"], *project["optional-dependencies"]["gpu"]]
    groups = project["entry-points"].items()
    plugins = {name for group, entries in groups if group.startswith("sglang") for name in entries}
    assert plugins == doctor.PLUGINS
    pinned = dict(doctor._PIN.findall("\n".join(pins)))
    assert set(doctor.PINNED) <= pinned.keys() and pinned["sglang"] == "0.5.21"


def test_another_version_is_named_with_the_tested_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if name == "sglang":
            raise metadata.PackageNotFoundError
        return "2.9.0+cpu" if name == "torch" else real(name)

    real = metadata.version
    monkeypatch.setattr(metadata, "version", version)
    with pytest.raises(ValueError, match=r"torch 2\.9\.0, sglang missing: .*tested: torch 2\.13"):
        doctor.check_versions()


def test_an_old_installation_lacks_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PLUGINS", {*doctor.PLUGINS, "areal_lite_new"})
    with pytest.raises(ValueError, match="would not find areal_lite_new: install again"):
        doctor.check_plugins()


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    with pytest.raises(ValueError, match="two can lock one file: choose a run directory on a loc"):
        doctor.check_locks(tmp_path)

    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ValueError, match=r"no file can be locked \(Operation not supported\)"):
        doctor.check_locks(tmp_path)


def test_a_file_system_without_a_write_ahead_log_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class WithoutLog(sqlite3.Connection):
        def execute(self, statement: str, *values: Any) -> sqlite3.Cursor:
            return super().execute(statement.replace("= WAL", "= DELETE"), *values)

    monkeypatch.setattr(sqlite3, "connect", partial(sqlite3.connect, factory=WithoutLog))
    with pytest.raises(ValueError, match="SQLite"):
        doctor.check_store(tmp_path)


def test_a_wrong_clock_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = doctor.time.time()
    monkeypatch.setattr(doctor.time, "time", lambda: now + 90)
    with pytest.raises(ValueError, match=re.compile(r"(89|90) s off .*NTP")):
        doctor.check_clock(tmp_path)


def test_a_run_that_fails_shows_why_and_leaves_nothing(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(doctor, "RUN_SETTINGS", ("trainer.steps=none",))
    with pytest.raises(ValueError, match=r"(?s)exited with status 2.*trainer\.steps.*quickstart"):
        doctor.check_run(tmp_path)
    monkeypatch.setattr(doctor, "RUN_TIMEOUT_S", 0.0)
    with pytest.raises(ValueError, match="not done after 0 s"):
        doctor.check_run(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_settings_of_the_run_are_valid(tmp_path) -> None:
    config = checked_config("quickstart", [f"run_dir={tmp_path}", *doctor.RUN_SETTINGS])
    assert config.trainer.steps == 2 and config.reward.function.endswith(":share_of_digits")
    assert doctor.share_of_digits("a1b2", "") == 0.5 and doctor.share_of_digits("", "") == 0.0


@pytest.mark.parametrize(
    ("difference", "verified"), [(0.2, 8), (None, 8), (float("nan"), 8), (1e-7, 0)]
)
def test_a_server_that_did_not_take_the_weights_fails(difference, verified) -> None:
    good = {"logprob_diff": 1e-7, "pause_s": 0.03, "verified": 8}
    assert "paused for 30 ms" in doctor._agreement([good, good])
    with pytest.raises(ValueError, match="differ by"):
        doctor._agreement([good | {"verified": verified}, good | {"logprob_diff": difference}])
