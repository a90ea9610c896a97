"""The supervisor on one machine: a run without servers, and its progress line."""

import json

import pytest

from areal_lite.launch.local import check_servers, step_fields
from areal_lite.launch.roles import RoleFailed
from areal_lite.launch.server_pool import ServerPool


@pytest.fixture
def pool(tmp_path) -> ServerPool:
    """Return a pool without any server left."""
    (tmp_path / "logs").mkdir()
    with ServerPool(tmp_path, {}, max_restarts=0) as pool:
        pool._thread.join()
    return pool


def trained(folder, steps: int) -> None:
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"step": step + 1}) + "\n" for step in range(steps))
    )


def test_without_servers_training_ends(pool, tmp_path) -> None:
    with pytest.raises(RoleFailed, match="no server is left"):
        check_servers(pool, tmp_path, steps=3)
    trained(tmp_path, 2)
    with pytest.raises(RoleFailed, match="no server is left"):
        check_servers(pool, tmp_path, steps=3)


def test_without_servers_a_run_that_has_all_its_steps_goes_on(pool, tmp_path) -> None:
    trained(tmp_path, 3)
    check_servers(pool, tmp_path, steps=3)


def test_a_server_that_never_came_up_always_ends_the_run(pool, tmp_path) -> None:
    trained(tmp_path, 3)
    pool._failure = TimeoutError("no answer")
    with pytest.raises(TimeoutError):
        check_servers(pool, tmp_path, steps=3)


def test_the_progress_line_of_a_step_without_a_push() -> None:
    step = {"reward_mean": 0.5, "staleness_mean": None, "tokens": 300, "time_s": 1.5}
    fields = {"reward": 0.5, "staleness": None, "tok_per_s": 200.0}
    assert step_fields(step | {"pause_s": None}) == fields | {"pause": None}
    assert step_fields(step | {"pause_s": 0.04}) == fields | {"pause": "40 ms"}
