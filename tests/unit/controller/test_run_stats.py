"""The status of the controller: its file, and its line in the log."""

import msgspec
import pytest

from areal_lite.controller.service import status_line
from areal_lite.run_dir.controller_status import read_status, write_status
from areal_lite.run_dir.paths import CONTROLLER_STATUS_FILE
from tests.unit.run_dir.sample_status import STATUS


@pytest.mark.parametrize(
    "changes, end",
    [
        (
            {},
            "capacity for 4; 15 requests on 1 servers; waiting for 3 more groups for the batch of",
        ),
        ({"servers_ready": 0}, "0 servers; waiting for a server (2 announced, none ready)"),
        ({"batch_step": None}, "waiting for trajectories in flight"),
        ({"missing_groups": 0, "held_by": 3}, "for group 3, which no more groups may pass"),
        ({"missing_groups": 0}, "waiting for trajectories in flight"),
        ({"batch_step": None, "capacity": 0}, "waiting for the trainer (step 7)"),
        ({"batch_step": None, "capacity": None}, "capacity for any number; 15 requests"),
    ],
)
def test_the_line_says_what_is_waited_for(changes, end) -> None:
    line = status_line(msgspec.structs.replace(STATUS, **changes))
    assert line.startswith("version 6: 5 groups queued, 2 running, ")
    assert end in line


def test_the_file_is_there_while_the_controller_runs(tmp_path) -> None:
    assert read_status(tmp_path) is None
    write_status(tmp_path, STATUS)
    assert read_status(tmp_path) == STATUS
    (tmp_path / CONTROLLER_STATUS_FILE).unlink()
    assert read_status(tmp_path) is None and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[]", b"{}", b"[" * 100_000, b'{"version": ""}']
)
def test_a_file_that_is_no_status_is_none(tmp_path, content) -> None:
    (tmp_path / "controller_status.json").write_bytes(content)
    assert read_status(tmp_path) is None
