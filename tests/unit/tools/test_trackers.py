"""Trackers get the metrics in groups, without a network, and never end a run."""

import json
import logging
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_lite.config import LoggerConfig
from areal_lite.run_dir import metrics
from areal_lite.run_dir.metrics import (
    STEP_KEYS,
    MetricsLog,
    read_events,
    read_metrics,
    tracker_class,
)
from areal_lite.tools.metric_table import GROUPS
from areal_lite.tools.trackers import TensorBoard, Wandb, grouped_name

STEP = dict.fromkeys(STEP_KEYS, 0)
EVALUATION = {"name": "addition", "version": 1, "greedy": 0.5, "pass_at_k": {"1": 0.25, "4": 0.75}}
BLOCK, HEADER = 32768, 7


def records(path: Path) -> Iterator[bytes]:
    """Read the records of a .wandb file: chunks with headers, in blocks, as those of LevelDB."""
    data = path.read_bytes()
    place, record = HEADER, b""  # the file has a header of the same length
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:  # no chunk begins in the rest of a block
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        place += HEADER
        record += data[place : place + length]
        place += length
        if kind in (1, 4):  # a whole record, or its end
            yield record
            record = b""


def history(run_dir: Path) -> list[dict[str, float]]:
    """Return the lines that wandb recorded, with its own keys."""
    from wandb.proto import wandb_internal_pb2

    lines = []
    [file] = run_dir.glob("wandb/offline-run-*/run-*.wandb")
    for data in records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if items := record.history.item:
            keys = {item.key or ".".join(item.nested_key): item.value_json for item in items}
            lines.append({key: json.loads(value) for key, value in keys.items()})
    return lines


def in_process(code: str, run_dir: Path, **environment: str) -> str:
    """Run code in a process of its own, where wandb's service ends with it. Returns its stderr."""
    run_dir.mkdir()
    kept = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    kept |= {"HOME": str(run_dir.parent / "home"), "WANDB_SILENT": "true"} | environment
    command = [sys.executable, "-c", code, str(run_dir)]
    return subprocess.run(command, env=kept, check=True, capture_output=True, text=True).stderr


LOG = """
import sys
from pathlib import Path
from areal_lite.config import LoggerConfig
from areal_lite.run_dir import metrics
from areal_lite.tools import trackers
trackers._INIT_TIMEOUT_S, metrics._FINISH_TIMEOUT_S = 3.0, 30.0
config = {"seed": 1, "path": Path("model")}
log = metrics.MetricsLog(Path(sys.argv[1]), LoggerConfig(trackers=["NAME"], args=ARGS), config)
step = dict.fromkeys(metrics.STEP_KEYS, 0)
step |= {"loss": float("nan"), "failed": ["server-1"], "mine": 3}
for number in STEPS:
    log.log({**step, "step": number, "reward_mean": number / 4, "wait_s": 1.5})
log.log_evaluation(EVALUATION)
log.close()
""".replace("EVALUATION", repr(EVALUATION))


def log_of(name: str, steps: tuple[int, ...] = (1, 2), **args: object) -> str:
    """Return a program that logs steps and an evaluation to a tracker; args: its arguments."""
    code = LOG.replace("NAME", name).replace("ARGS", repr({name: args}))
    return code.replace("STEPS", repr(steps))


def check_history(run_dir: Path) -> None:
    first, second, evaluation = history(run_dir)
    assert (first["step"], first["reward/reward_mean"]) == (1, 0.25)
    assert (second["step"], second["reward/reward_mean"], second["time/wait_s"]) == (2, 0.5, 1.5)
    assert second["other/mine"] == 3 and "loss/grad_norm" in second
    assert "loss/loss" not in second  # it is not a number
    names = {name for line in (first, second) for name in line if not name.startswith("_")}
    names.remove("step")
    assert {name.partition("/")[0] for name in names} <= {*GROUPS, "other"}
    assert {key: value for key, value in evaluation.items() if key.startswith("eval/")} == {
        "eval/addition/greedy": 0.5,
        "eval/addition/pass_at_1": 0.25,
        "eval/addition/pass_at_4": 0.75,
        "eval/version": 1,
    }


def test_offline_wandb_has_the_metrics_in_groups(tmp_path):
    in_process(log_of("wandb", mode="offline"), tmp_path / "run")
    check_history(tmp_path / "run")


def test_the_environment_can_take_an_online_run_offline(tmp_path):
    in_process(log_of("wandb"), tmp_path / "run", WANDB_MODE="offline")
    check_history(tmp_path / "run")


def test_a_server_that_cannot_be_reached_costs_a_warning(tmp_path):
    unreachable = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    stderr = in_process(log_of("wandb"), tmp_path / "run", **unreachable)
    assert stderr.count("the run goes on without it") == 1
    assert len(read_metrics(tmp_path / "run")) == 2
    assert len(read_events(tmp_path / "run", "evals")) == 1


def test_tensorboard_shows_a_resumed_run_as_one_curve(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    in_process(log_of("tensorboard", (1, 2, 3)), tmp_path / "run")
    subprocess.run(
        [sys.executable, "-c", log_of("tensorboard", (2, 3)), tmp_path / "run"], check=True
    )
    found = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    rewards = found.Scalars("reward/reward_mean")
    assert [(event.step, event.value) for event in rewards] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert found.Scalars("eval/addition/pass_at_4")[-1].value == 0.75
    assert "loss/loss" not in found.Tags()["scalars"]


def test_mlflow_shows_a_resumed_run_as_one_run(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    in_process(log_of("mlflow", (1, 2), tracking_uri=uri), tmp_path / "run")
    again = log_of("mlflow", (3,), tracking_uri=uri)
    subprocess.run([sys.executable, "-c", again, tmp_path / "run"], check=True)
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("areal_lite")
    [run] = client.search_runs([experiment.experiment_id])
    rewards = client.get_metric_history(run.info.run_id, "reward/reward_mean")
    assert [(metric.step, metric.value) for metric in rewards] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert run.info.status == "FINISHED"
    assert run.data.metrics["eval/addition/greedy"] == 0.5


@pytest.mark.parametrize("name", ["trackio", "swanlab"])
def test_packages_like_wandb_accept_a_run_and_its_resumption(tmp_path, name):
    pytest.importorskip(name)
    args = {"mode": "offline"} if name == "swanlab" else {}
    folder = {"TRACKIO_DIR": str(tmp_path / "trackio")}
    stderr = in_process(log_of(name, (1, 2), **args), tmp_path / "run", **folder)
    assert "goes on without it" not in stderr
    again = subprocess.run(
        [sys.executable, "-c", log_of(name, (3,), **args), tmp_path / "run"],
        env=os.environ | folder,
        check=True,
        capture_output=True,
        text=True,
    )
    assert "goes on without it" not in again.stderr


class Broken:
    """A tracker that fails at one call."""

    at = ""

    def __init__(self, run_dir: Path, run_config: object):
        self.fail("start")

    def fail(self, call: str, *_: object) -> None:
        if call == self.at:
            raise SystemExit("broken")

    log_step = partialmethod(fail, "log_step")
    log_evaluation = partialmethod(fail, "log_evaluation")
    finish = partialmethod(fail, "finish")


@pytest.mark.parametrize("broken", ["start", "log_step", "log_evaluation", "finish"])
def test_whatever_a_tracker_raises_the_run_goes_on(tmp_path, monkeypatch, caplog, broken):
    monkeypatch.setattr(Broken, "at", broken)
    log = MetricsLog(tmp_path, LoggerConfig(trackers=[f"{__name__}:Broken"]), {})
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            log.log(STEP | {"step": step})
        log.log_evaluation(EVALUATION)
        log.close()
    [warning] = [record.getMessage() for record in caplog.records]
    assert f"could not {broken.replace('_', ' ')}, and the run goes on without it" in warning
    assert "SystemExit: broken" in warning
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert read_events(tmp_path, "evals") == [EVALUATION]


class Hanging(Broken):
    """A tracker whose first call never returns."""

    def log_step(self, record: object) -> None:
        threading.Event().wait()


def test_a_tracker_that_hangs_delays_no_step_and_is_left_at_the_end(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(metrics, "_FINISH_TIMEOUT_S", 0.1)
    log = MetricsLog(tmp_path, LoggerConfig(trackers=[f"{__name__}:Hanging"]), {})
    for step in (1, 2):
        log.log(STEP | {"step": step})
    log.close()
    assert "did not end" in caplog.text
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]


def test_all_starts_of_a_run_directory_are_one_run(tmp_path, monkeypatch):
    started: list[dict] = []
    fake = SimpleNamespace(
        init=lambda **arguments: started.append(arguments),
        Settings=SimpleNamespace,
        define_metric=lambda *_, **__: None,
    )
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    Wandb(tmp_path, {}, entity="me", tags=["a", "b"])
    Wandb(tmp_path, {})
    Wandb(tmp_path, {}, id="own")
    first, second, third = started
    assert (first["entity"], first["tags"]) == ("me", ["a", "b"])
    assert first["id"] == second["id"] and len(first["id"]) == 8 and third["id"] == "own"
    assert {start["resume"] for start in started} == {"allow"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandbb", "wandbb is unknown: choose from module:Class, mlflow, swanlab"),
        ("no.such:Class", "logger.trackers=no.such:Class: cannot import no.such"),
        ("absent", "absent is not installed: pip install no_such_package"),
    ],
)
def test_a_tracker_that_is_not_there_is_refused(monkeypatch, name, message):
    absent = SimpleNamespace(package="no_such_package")
    known = metrics.load
    monkeypatch.setattr(metrics, "load", lambda *a: absent if a[1] == "absent" else known(*a))
    with pytest.raises(ValueError, match=message):
        tracker_class(name)


def test_a_metric_has_the_name_of_its_group_if_it_is_sent():
    assert grouped_name("reward_mean") == "reward/reward_mean" and grouped_name("step") is None
    assert grouped_name("mine") == "other/mine"


def test_tensorboard_hides_only_what_is_trained_again(tmp_path, monkeypatch):
    """A run that resumes at step 10 may log an evaluation of version 10 before step 11."""
    hidden = []

    class Writer:
        def __init__(self, purge_step: int, log_dir: str):
            hidden.append(purge_step)

        def add_scalar(self, *_: object) -> None: ...

        def flush(self) -> None: ...

    module = SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    TensorBoard(tmp_path, {}).log_step({**STEP, "step": 11})
    TensorBoard(tmp_path, {}).log_evaluation({**EVALUATION, "version": 10})
    assert hidden == [11, 11]
