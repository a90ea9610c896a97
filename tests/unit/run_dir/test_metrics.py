"""The metrics log: any JSON parser reads it, also after a kill, and wandb is optional."""

import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch

from areal_lite.config import LoggerConfig
from areal_lite.run_dir.metrics import (
    STEP_KEYS,
    EventFollower,
    MetricsLog,
    append_event,
    read_events,
    read_metrics,
)
from areal_lite.system.files import write_json

RECORD = dict.fromkeys(STEP_KEYS, 0)


def test_a_line_per_step_readable_at_once_with_its_time(tmp_path):
    log = MetricsLog(tmp_path, LoggerConfig(), {})
    log.log({**RECORD, "step": 0})
    log.log({**RECORD, "step": 1, "logged_at": 5.0})
    first, second = read_metrics(tmp_path)  # before close: each line is flushed
    assert (first["step"], second["step"]) == (0, 1)
    assert first["logged_at"] > 1.6e9 and second["logged_at"] == 5.0
    log.close()


def test_numbers_of_numpy_and_torch_are_numbers_and_non_finite_ones_null(tmp_path):
    log = MetricsLog(tmp_path, LoggerConfig(), {})
    values = {
        "loss": torch.tensor(1.5),
        "tokens": np.int64(7),
        "grad_norm": np.float32("inf"),
        "ess": math.nan,
        "behave_kl": torch.tensor(math.nan),
        "extra": [1.0, -math.inf, {"a": np.array([1.0, np.nan])}],
    }
    log.log({**RECORD, **values})
    log.close()

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=refuse)
    expected = {
        "loss": 1.5,
        "tokens": 7,
        "grad_norm": None,
        "ess": None,
        "behave_kl": None,
        "extra": [1.0, None, {"a": [1.0, None]}],
    }
    assert {key: line[key] for key in values} == expected
    assert type(line["tokens"]) is int


@pytest.mark.parametrize("key", STEP_KEYS)
def test_every_fixed_key_is_required(tmp_path, key):
    log = MetricsLog(tmp_path, LoggerConfig(), {})
    with pytest.raises(ValueError, match=key):
        log.log({name: 0 for name in STEP_KEYS if name != key})
    log.close()


def test_an_incomplete_last_line_is_ignored_and_cut_off_by_the_next_writer(tmp_path):
    append_event(tmp_path, "evals", {"version": 0, "greedy": 0.5})
    with open(tmp_path / "evals.jsonl", "a") as file:
        file.write('{"version": 3, "gre')
    assert [e["version"] for e in read_events(tmp_path, "evals")] == [0]
    append_event(tmp_path, "evals", {"version": 4})
    assert [e["version"] for e in read_events(tmp_path, "evals")] == [0, 4]


def test_an_incomplete_first_line_leaves_nothing(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0')
    assert read_metrics(tmp_path) == []
    log = MetricsLog(tmp_path, LoggerConfig(), {})
    log.log({**RECORD, "step": 9})
    log.close()
    assert [m["step"] for m in read_metrics(tmp_path)] == [9]


@pytest.mark.parametrize("incomplete", ["", '{"step": 4'])
@pytest.mark.parametrize("newest", [None, 1, 2, 3, 4])
def test_only_the_newest_steps_are_read(tmp_path, newest, incomplete):
    lines = [json.dumps({"step": step}) + "\n" for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines) + incomplete)
    expected = [1, 2, 3][-(newest or 3) :]
    assert [m["step"] for m in read_metrics(tmp_path, newest)] == expected


def test_a_complete_line_that_is_not_json_is_an_error_that_names_the_file(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("hello\n{}\n")
    with pytest.raises(ValueError, match="metrics.jsonl"):
        read_metrics(tmp_path)


def test_without_a_file_there_are_no_metrics(tmp_path):
    assert read_metrics(tmp_path) == []


def test_write_json_replaces_whole_files_and_keeps_the_old_one_on_failure(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"a": math.nan, "path": tmp_path})
    assert json.loads(path.read_text()) == {"a": None, "path": str(tmp_path)}
    with pytest.raises(TypeError):
        write_json(path, {"b": 1, "c": object()})
    assert json.loads(path.read_text())["a"] is None
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"]


def test_logging_without_wandb_imports_neither_wandb_nor_torch(tmp_path):
    code = """
import sys
from pathlib import Path
from areal_lite.config import LoggerConfig
from areal_lite.run_dir.metrics import STEP_KEYS
from areal_lite.run_dir.metrics import MetricsLog
from areal_lite.tools.report import figure, panel, summary
log = MetricsLog(Path(sys.argv[1]), LoggerConfig(), {})
log.log(dict.fromkeys(STEP_KEYS, 0))
log.close()
print([name for name in ("wandb", "torch") if name in sys.modules])
"""
    output = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    ).stdout
    assert output.strip() == "[]"


def test_a_follower_reads_each_line_once_and_only_when_it_is_complete(tmp_path):
    follower = EventFollower(tmp_path, "evals")
    assert follower.read() == []
    append_event(tmp_path, "evals", {"version": 0})
    append_event(tmp_path, "evals", {"version": 1})
    assert follower.read() == [{"version": 0}, {"version": 1}]
    assert follower.read() == []
    with open(tmp_path / "evals.jsonl", "a") as file:
        file.write('{"vers')
        file.flush()
        assert follower.read() == []
        file.write('ion": 2}\nno JSON\n[3]\n\xff\n{"version": 4}\n')
    assert follower.read() == [{"version": 2}, {"version": 4}]


@pytest.mark.parametrize("length", [1, 2_000, 5_000, 8_191, 8_192, 20_000])
def test_the_newest_events_are_the_last_of_all_events(tmp_path, length):
    """The length of a line relative to the size of a read does not matter."""
    path = tmp_path / "events.jsonl"
    lines = [json.dumps({"number": n, "text": "x" * length}) + "\n" for n in range(4)]
    for text in (
        "",
        lines[0][:-1],
        *("".join(lines[:n]) for n in range(1, 5)),
        "".join(lines)[:-1],
        "".join(lines) + "{",
    ):
        path.write_text(text)
        for number in (1, 2, 9):
            newest = read_events(tmp_path, "events", number)
            assert newest == read_events(tmp_path, "events")[-number:]
    assert read_events(tmp_path, "nothing", 1) == []


def test_only_the_end_of_a_long_file_is_read(tmp_path):
    with open(tmp_path / "metrics.jsonl", "wb") as file:
        # A hole: the whole file would not fit in memory.
        file.truncate(2**40)
        file.seek(0, 2)
        file.write(b'\n{"step": 1}\n{"step": 2}\n')
    assert read_metrics(tmp_path, 1) == [{"step": 2}]
