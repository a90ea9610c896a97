"""List, add and drain servers of a real run by `areal-lite servers`."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import psutil
import pytest

from areal_lite.run_dir.metrics import read_metrics
from areal_lite.run_dir.paths import STOP_FILE
from areal_lite.run_dir.resume import STOPPED
from areal_lite.servers.registry import announced_servers
from tests.integration.controller_run import wrong_with
from tests.integration.test_train import COMMON, ROOT, model, processes_of  # noqa: F401


class Shell:
    """Commands of `areal-lite`, whose outputs are files in `folder`."""

    def __init__(self, folder: Path, entry_points: dict[str, str]):
        self.folder = folder
        self.environment = os.environ | entry_points | {"CUDA_VISIBLE_DEVICES": ""}
        self.started: list[subprocess.Popen] = []

    def start(self, name: str, *words: str) -> subprocess.Popen:
        argv = [sys.executable, "-m", "areal_lite", *words]
        with open(self.folder / name, "wb") as output:
            self.started.append(
                subprocess.Popen(
                    argv, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=self.environment
                )
            )
        return self.started[-1]

    def run(self, *words: str) -> str:
        """Run a command to its end and return its output."""
        assert self.start("last", *words).wait(120) == 0, (self.folder / "last").read_text()
        return (self.folder / "last").read_text()

    def until(self, happened: Callable[[], object], seconds: float = 120) -> None:
        """Wait until something happens, while the commands run."""
        deadline = time.monotonic() + seconds
        while not happened():
            outputs = {path.name: path.read_text()[-2000:] for path in self.folder.iterdir()}
            assert time.monotonic() < deadline, outputs
            assert all(process.poll() in (None, 0) for process in self.started), outputs
            time.sleep(0.1)

    def close(self) -> None:
        for process in self.started:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
                process.wait()


def newest_answer(run_dir: Path, server: str) -> float:
    """Return when the newest trajectory of a server began, in wall-clock seconds; 0 without one."""
    with closing(sqlite3.connect(run_dir / "trajectories.sqlite")) as store:
        query = "SELECT max(started_at) FROM trajectories WHERE server = ?"
        return store.execute(query, (server,)).fetchone()[0] or 0.0


@pytest.mark.timeout(400)
@pytest.mark.slow  # test_server_faults.py drains stand-ins
def test_a_run_goes_on_while_servers_come_and_go(
    model,  # noqa: F811
    tmp_path,
    current_entry_points,
):
    run_dir, outputs = tmp_path / "run", tmp_path / "outputs"
    outputs.mkdir()
    shell = Shell(outputs, current_entry_points)
    settings = [*COMMON, "trainer.steps=1000", "buffer.max_staleness=2"]
    try:
        train = shell.start("train", "train", f"model={model}", f"run_dir={run_dir}", *settings)
        shell.until(lambda: (run_dir / "metrics.jsonl").exists() and read_metrics(run_dir))
        (first,) = announced_servers(run_dir)

        added = shell.start("added", "servers", str(run_dir), "add=1")
        shell.until(lambda: newest_answer(run_dir, "server-1"))
        header, *rows = shell.run("servers", str(run_dir)).splitlines()
        assert header.split() == ["name", "address", "state", "version", "requests"]
        addresses = [(server.name, server.url) for server in announced_servers(run_dir)]
        assert [tuple(row.split()[:2]) for row in rows] == addresses
        assert [server for server, _ in addresses] == ["server-0", "server-1"]

        said = shell.run("servers", str(run_dir), "drain=server-0")
        assert "server-0 has ended" in said
        shell.until(lambda: not psutil.pid_exists(first.pid), 10)
        step = read_metrics(run_dir)[-1]["step"]
        drained_at = time.time()
        shell.until(lambda: read_metrics(run_dir)[-1]["step"] >= step + 4)
        (run_dir / STOP_FILE).touch()
        assert train.wait(60) == STOPPED and added.wait(60) == 0
    finally:
        shell.close()
    assert processes_of(run_dir) == []
    assert newest_answer(run_dir, "server-0") < drained_at < newest_answer(run_dir, "server-1")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["trajectories_lost"] == 0 and summary["max_staleness"] <= 2
    assert all(
        line["logprob_diff"] is None or line["logprob_diff"] < 1e-4
        for line in read_metrics(run_dir)
    )
    assert wrong_with(run_dir) == {}
    log = (run_dir / "logs" / "servers.log").read_text()
    assert "server-0 was drained and has ended" in log and "started again" not in log
