"""The supervisor on one machine: a run without servers."""

import json
from concurrent.futures import Future
from contextlib import nullcontext
from unittest.mock import Mock

import pytest

from areal_lite.config import TrainConfig
from areal_lite.launch import local
from areal_lite.launch.local import _run_roles, _step_reporter, check_servers, how_to_continue
from areal_lite.launch.roles import Placement, ProcessFailed, Role, RoleFailed
from areal_lite.launch.server_pool import ServerPool


@pytest.fixture
def pool(tmp_path) -> ServerPool:
    """Return a pool without any server left."""
    (tmp_path / "logs").mkdir()
    with ServerPool(tmp_path, {}, max_restarts=0) as pool:
        pool._thread.shutdown()
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
    pool._ended = Future()
    pool._ended.set_exception(TimeoutError("no answer"))
    with pytest.raises(TimeoutError):
        check_servers(pool, tmp_path, steps=3)


def test_a_run_that_ended_early_says_how_it_continues(tmp_path) -> None:
    config = TrainConfig(model="m", run_dir=str(tmp_path))
    config.trainer.save_every = 10
    assert "every N steps (it is 10; 0 is one" in how_to_continue(config)
    checkpoint = tmp_path / "checkpoints" / "step-20"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    text = how_to_continue(config)
    assert f"run_dir={tmp_path} resume=auto" in text and text.endswith("from step 20")


def test_each_new_step_is_reported_once(tmp_path) -> None:
    trained(tmp_path, 2)  # by an earlier start
    seen: list[dict] = []
    report = _step_reporter(tmp_path, seen.append)
    report()
    assert seen == []
    trained(tmp_path, 4)
    report()
    report()
    assert seen == [{"step": 3}, {"step": 4}]
    _step_reporter(tmp_path, None)()


def test_steps_just_before_a_failure_are_reported(tmp_path, monkeypatch) -> None:
    """A later start does not train steps again that a checkpoint keeps."""

    class FailingRoles:
        def start_module(self, name, _):
            return name

        def start_ranks(self, *_):
            return []

        def wait(self, *_, **__):
            trained(tmp_path, 2)
            raise failed

    failed = ProcessFailed(Role("trainer", Mock(), tmp_path / "log", 0, tmp_path / "beat"), "it")
    monkeypatch.setattr(local, "Roles", lambda _: nullcontext(FailingRoles()))
    monkeypatch.setattr(local, "observer", shown := Mock())
    shown().watch.return_value = nullcontext(lambda: None)
    config, restarts = TrainConfig(model="m"), Mock()
    restarts.replace_controller.side_effect = failed
    seen: list[dict] = []
    with pytest.raises(ProcessFailed):
        _run_roles(config, tmp_path, Placement([], []), Mock(), restarts, seen.append)
    assert seen == [{"step": 1}, {"step": 2}]
