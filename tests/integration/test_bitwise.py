"""A synchronous run with `server.deterministic`: killed and resumed = never killed, bit for bit."""

import hashlib
import json
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from areal_lite.launch.local import RESTARTS_LOG as LOG
from tests.integration.test_restarts import CONTROLLER, strike
from tests.integration.test_train import model  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = [
    "+task=addition",
    "schedule=sync",
    "server.deterministic=true",
    "reward.function=tests.integration.toy_reward:share_of_letters",
    "rollout.group_size=8",
    "rollout.max_new_tokens=60",
    "trainer.steps=7",
    "trainer.batch_groups=4",
    "trainer.lr=0.003",
    "trainer.save_every=2",
    "eval.problems=4",
    "eval.every=2",
]
# Where a trajectory was sampled, in how many requests, and when. A checksum is over times, too.
LOOSE = {"admitted_at", "finished_at", "started_at", "checksum", "server", "requests"}


def start(folder: Path, model: Path, ranks: int) -> subprocess.Popen:  # noqa: F811
    command = [sys.executable, "-m", "areal_lite", "train", f"model={model}", f"run_dir={folder}"]
    settings = [*SETTINGS, f"trainer.data_parallel={ranks}", "resume=auto"]
    with open(folder.with_suffix(".output"), "ab") as output:
        return subprocess.Popen(
            [*command, *settings], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )


def finish(folder: Path, process: subprocess.Popen) -> dict[str, Any]:
    """Wait for the end of a run and return what must be the same in the next one."""
    assert process.wait(400) == 0, folder.with_suffix(".output").read_text()
    store = sqlite3.connect(folder / "trajectories.sqlite")
    store.row_factory = sqlite3.Row
    weights = (folder / "checkpoints" / "hf" / "model.safetensors").read_bytes()
    content = {
        "weights": hashlib.sha256(weights).hexdigest(),
        "metrics": [_without_times(line) for line in _lines(folder / "metrics.jsonl")],
        "evals": [_without_times(line) for line in _lines(folder / "evals.jsonl")],
        # A step that a kill undid has a line of each time.
        "proximal": sorted({str(line) for line in _lines(folder / "proximal.jsonl")}),
    }
    for table in ("groups", "trajectories", "sequences"):
        key = "group_id" if table == "groups" else "group_id, sample_index"
        rows = store.execute(f"SELECT * FROM {table} ORDER BY {key}")
        content[table] = [{k: row[k] for k in row.keys() if k not in LOOSE} for row in rows]
    store.close()
    return content


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _num_steps(folder: Path) -> int:
    log = folder / "metrics.jsonl"
    return log.read_bytes().count(b"\n") if log.exists() else 0


def _without_times(record: dict[str, Any]) -> dict[str, Any]:
    timed = ("_s", "_at", "seconds")
    return {
        key: value
        for key, value in record.items()
        # The size of the store is known some time after a step.
        if not key.endswith(timed) and not key.startswith("store_")
    }


def assert_same(content: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare the smallest things first: the first difference says most."""
    for name in ("groups", "trajectories", "sequences", "metrics", "evals"):
        got, want = content[name], expected[name]
        assert len(got) == len(want), name
        for row, (one, other) in enumerate(zip(got, want)):
            differing = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
            if None in (one.get("logprob_diff_scored"), other.get("logprob_diff_scored")):
                differing -= {"logprob_diff", "logprob_diff_scored"}  # no server scored in time
            assert not differing, f"{name}, row {row}: {differing}"
    assert content["proximal"] == expected["proximal"]
    assert content["weights"] == expected["weights"]


@pytest.fixture(scope="module")
def unkilled(model, tmp_path_factory):  # noqa: F811
    """unkilled(ranks) -> the content of a run that nothing disturbed."""
    known: dict[int, dict[str, Any]] = {}

    def content(ranks: int) -> dict[str, Any]:
        if ranks not in known:
            folder = tmp_path_factory.mktemp("unkilled") / f"ranks-{ranks}"
            process = start(folder, model, ranks)
            try:
                known[ranks] = finish(folder, process)
            finally:
                process.kill()
                process.wait()
        return known[ranks]

    return content


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks, kills", [(1, 0), (1, 3), (2, 3)])
def test_a_run_is_the_same_again(model, unkilled, tmp_path, ranks: int, kills: int) -> None:  # noqa: F811
    expected = unkilled(ranks)
    assert len(expected["metrics"]) == 7 and len(expected["evals"]) == 5
    rng = random.Random(10 * ranks + kills)
    folder = tmp_path / "run"
    process = start(folder, model, ranks)
    try:
        # Checkpoints are those of steps 2, 4 and 6: each kill loses steps, or an evaluation.
        for steps in sorted(rng.sample(range(1, 6), kills)):
            while process.poll() is None and _num_steps(folder) < steps:
                time.sleep(0.02)
            time.sleep(rng.random())  # into the next step, or the one after
            process.send_signal(signal.SIGKILL)
            process.wait()
            process = start(folder, model, ranks)
        assert_same(finish(folder, process), expected)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_controller_changes_nothing(model, unkilled, tmp_path) -> None:  # noqa: F811
    """Two ranks go on under the next controller: in a step, between two steps, in a push."""
    expected = unkilled(2)
    rng = random.Random(5)
    folder = tmp_path / "run"
    process = start(folder, model, ranks=2)
    try:
        for steps in (1, 3, 5):
            while process.poll() is None and _num_steps(folder) < steps:
                time.sleep(0.02)
            time.sleep(rng.random() / 4)
            strike(folder, CONTROLLER, signal.SIGKILL)
        assert_same(finish(folder, process), expected)
    finally:
        process.kill()
        process.wait()
    restarts = (folder / "logs" / LOG).read_text()
    assert restarts.count("the controller starts again under the running trainer") == 3
