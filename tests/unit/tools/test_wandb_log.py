"""wandb gets the metrics in groups, without a network, and never ends a run."""

import json
import logging
import os
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from areal_lite.config import LoggerConfig
from areal_lite.run_dir.metrics import STEP_KEYS, MetricsLog, read_events, read_metrics
from areal_lite.tools import wandb_log
from areal_lite.tools.metric_table import GROUPS
from areal_lite.tools.wandb_log import WandbLog, wandb_name

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
from areal_lite.tools import wandb_log
from areal_lite.run_dir.metrics import STEP_KEYS
from areal_lite.run_dir.metrics import MetricsLog
wandb_log._INIT_TIMEOUT_S = wandb_log._FINISH_TIMEOUT_S = 3.0
config = {"seed": 1, "path": Path("model")}
log = MetricsLog(Path(sys.argv[1]), LoggerConfig(wandb="MODE"), config)
step = dict.fromkeys(STEP_KEYS, 0) | {"loss": float("nan"), "failed": ["server-1"], "mine": 3}
log.log({**step, "step": 1, "reward_mean": 0.25})
log.log({**step, "step": 2, "reward_mean": 0.5, "wait_s": 1.5})
log.log_evaluation(EVALUATION)
log.close()
""".replace("EVALUATION", repr(EVALUATION))


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
    in_process(LOG.replace("MODE", "offline"), tmp_path / "run")
    check_history(tmp_path / "run")


def test_the_environment_can_take_an_online_run_offline(tmp_path):
    in_process(LOG.replace("MODE", "online"), tmp_path / "run", WANDB_MODE="offline")
    check_history(tmp_path / "run")


def test_a_server_that_cannot_be_reached_costs_seconds_and_a_warning(tmp_path):
    unreachable = {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "0" * 40}
    stderr = in_process(LOG.replace("MODE", "online"), tmp_path / "run", **unreachable)
    assert stderr.count("which goes on without it") == 1
    assert len(read_metrics(tmp_path / "run")) == 2
    assert len(read_events(tmp_path / "run", "evals")) == 1


@pytest.mark.parametrize("broken", ["init", "define_metric", "log", "finish"])
def test_whatever_wandb_raises_the_run_goes_on(tmp_path, monkeypatch, caplog, broken):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("wandb is broken")

    calls = dict.fromkeys(("define_metric", "log", "finish"), lambda *_, **__: None)
    run = SimpleNamespace(**calls | {broken: fail})
    init = fail if broken == "init" else lambda **_: run
    fake = SimpleNamespace(init=init, Settings=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    log = MetricsLog(tmp_path, LoggerConfig(wandb="offline"), {})
    with caplog.at_level(logging.WARNING):
        for step in (1, 2):
            log.log(STEP | {"step": step})
        log.log_evaluation(EVALUATION)
        log.close()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == 1 and "goes on without it: RuntimeError: wandb is broken" in warnings[0]
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2]
    assert read_events(tmp_path, "evals") == [EVALUATION]


def test_all_starts_of_a_run_directory_are_one_run(tmp_path, monkeypatch):
    started: list[dict] = []
    run = SimpleNamespace(define_metric=lambda *_, **__: None)
    fake = SimpleNamespace(init=lambda **a: started.append(a) or run, Settings=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    args = {"entity": "me", "tags": ["a", "b"]}
    for config in (LoggerConfig(args=args), LoggerConfig(), LoggerConfig(args={"id": "own"})):
        WandbLog(tmp_path, config, {})
    first, second, third = started
    assert (first["entity"], first["tags"]) == ("me", ["a", "b"])
    assert first["id"] == second["id"] and len(first["id"]) == 8 and third["id"] == "own"
    assert {start["resume"] for start in started} == {"allow"}


def test_an_end_that_hangs_is_left(tmp_path, monkeypatch, caplog):
    run = SimpleNamespace(define_metric=lambda *_, **__: None, finish=threading.Event().wait)
    fake = SimpleNamespace(init=lambda **_: run, Settings=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(wandb_log, "_FINISH_TIMEOUT_S", 0.1)
    WandbLog(tmp_path, LoggerConfig(wandb="offline"), {}).finish()
    assert "could not end the run" in caplog.text


def test_a_metric_has_the_name_of_its_group_if_it_is_sent():
    assert wandb_name("reward_mean") == "reward/reward_mean" and wandb_name("step") is None
    assert wandb_name("mine") == "other/mine"
