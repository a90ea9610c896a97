"""`areal-lite train` as a user runs it: real servers, a real trainer, pushes during requests."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import psutil
import pytest

from areal_lite.run_dir.metrics import read_metrics
from areal_lite.run_dir.reader import RunReader
from areal_lite.run_dir.resume import STOPPED, start_version
from areal_lite.tools.diagnose.diagnosis import diagnose
from areal_lite.tools.diagnose.history import read_history
from tests.integration.controller_run import wrong_with
from tests.processes import running
from tests.terminal import Terminal
from tests.unit.tools.report import dashboard

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> Path:
    """Make a random model. Its completions have all lengths up to the token limit."""
    out = tmp_path_factory.mktemp("model") / "random"
    sizes = [
        "hidden_size=64",
        "num_layers=2",
        "num_heads=4",
        "num_kv_heads=2",
        "head_dim=16",
        "mlp_size=128",
    ]
    subprocess.run(
        [sys.executable, "-m", "areal_lite_quickstart.make_model", f"out={out}", *sizes],
        cwd=ROOT,
        check=True,
        timeout=120,
    )
    return out


COMMON = [
    "+task=addition",
    "reward.function=tests.integration.toy_reward:share_of_letters",
    "rollout.group_size=8",
    "rollout.max_new_tokens=400",
    # A quarter of a batch: generation takes longer than a step, so each push meets requests.
    "rollout.max_concurrent=8",
    "trainer.steps=5",
    "trainer.batch_groups=4",
    "trainer.lr=0.003",
    "eval.problems=4",
    "sync.verify=true",
]


class Run:
    """The files of a finished run."""

    def __init__(self, folder: Path, console: str = ""):
        self.folder, self.console = folder, console
        self.summary = json.loads((folder / "summary.json").read_text())
        self.metrics = [
            json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
        ]
        self.db = sqlite3.connect(folder / "trajectories.sqlite")

    def used(self, columns: str) -> list[tuple]:
        return self.db.execute(
            f"SELECT {columns} FROM trajectories JOIN groups USING (group_id) WHERE state = 'used'"
        ).fetchall()


def train(model: Path, folder: Path, *overrides: str) -> Run:
    command = [
        sys.executable,
        "-m",
        "areal_lite",
        "train",
        f"model={model}",
        f"run_dir={folder}",
        *COMMON,
        *overrides,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(folder / "summary.json")
    assert processes_of(folder) == []
    return Run(folder, done.stderr)


def processes_of(folder: Path) -> list[str]:
    """Command lines and environments that name the run directory."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in part for part in process.cmdline()):
                found.append(" ".join(process.cmdline()))
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            pass
    return found


def check_common(
    run: Run, bound: int, pushes: tuple[int, ...] = (1, 2, 3, 4, 5), servers: int = 1
) -> None:
    """Check what every run of five steps shows. `pushes` are the steps that end with a push."""
    assert [m["step"] for m in run.metrics] == [1, 2, 3, 4, 5]
    newest = [max((p for p in pushes if p <= step), default=0) for step in range(6)]
    assert [m["version"] for m in run.metrics] == newest[1:]
    lags = [m["server_lag"] for m in run.metrics]
    resynced = [step for step in range(5) if lags[step] != step - newest[step]]
    assert all(lags[step] == 0 for step in resynced), lags
    assert len(resynced) < servers, "only a server that started late brings a push of its own"
    assert run.summary["pushes"] == len(pushes) and run.summary["trajectories_lost"] == 0
    assert run.summary["max_staleness"] <= run.summary["staleness_bound"] == bound
    assert all(m["grad_norm"] > 0 and m["skipped"] == 0 for m in run.metrics)
    assert all(dashboard.of_steps() <= set(m) for m in run.metrics), (
        "the dashboard that ships asks for nothing else"
    )
    assert all(m["verified"] > 0 for m in run.metrics if m["step"] in pushes), (
        "tensors read back from the server must equal the trainer's"
    )
    assert all(
        m["logprob_diff"] is None if m["server_lag"] else m["logprob_diff"] < 1e-4
        for m in run.metrics
    ), "server and trainer must agree on log-probs under the same weights"
    assert wrong_with(run.folder) == {}, "each batch is whole, and nothing is lost or used twice"
    assert len(run.used("DISTINCT group_id, sample_index")) == 5 * 4 * 8
    states = dict(run.db.execute("SELECT state, count(*) FROM groups GROUP BY state"))
    assert states == {"used": 20}, "admission ends with the run"
    with closing(RunReader(run.folder / "trajectories.sqlite")) as store:
        assert all(np.isfinite(t["logprobs"]).all() for t in store.trajectories(state="used"))


def test_async_in_place_push_in_flight(model, tmp_path, monkeypatch):
    """Push while requests are in flight and nothing is drained; segments prove it."""
    monkeypatch.setenv("AREAL_LITE_PROFILE", "3")
    run = train(model, tmp_path / "run", "buffer.max_staleness=2")
    check_common(run, bound=2)
    assert run.summary["requests_drained"] == 0
    assert run.summary["multi_segment_share"] > 0
    # One request gave a trajectory of two versions: the server kept it alive through the push.
    spans = [
        json.loads(s)
        for s, requests in run.used("segments, requests")
        if requests == 1 and len(json.loads(s)) > 1
    ]
    assert spans, "no request lived through a push"
    assert all(
        a[2] == b[1] and a[0] < b[0] for segments in spans for a, b in zip(segments, segments[1:])
    )
    for name in (
        "config.yaml",
        "metrics.jsonl",
        "evals.jsonl",
        "proximal.jsonl",
        "trajectories.sqlite",
        "report.png",
        "report.html",
        "checkpoints/hf/model.safetensors",
        "checkpoints/hf/manifest.json",
        "logs/trainer.log",
        "logs/controller.log",
        "logs/server-0.log",
        "profile/step-3-rank-0.json.gz",
    ):
        assert (run.folder / name).exists(), name
    assert f"steps [3] are profiled: {run.folder / 'profile'}" in run.console


def test_a_broken_transport_ends_a_run_before_its_first_episode(model, tmp_path):
    """Servers that cannot reach the trainer, as behind a firewall, refuse the first push."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "def unreachable(*_):\n"
        "    raise OSError('no route to host')\n"
        "if 'areal_lite.launch.serve' in sys.orig_argv:\n"
        "    from areal_lite.sglang_plugins import weight_group\n"
        "    weight_group.connect = unreachable\n"
    )
    folder, transport = tmp_path / "run", "sync.transport=distributed"
    where = [f"model={model}", f"run_dir={folder}", transport]
    command = [sys.executable, "-m", "areal_lite", "train", *where, *COMMON]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=350
    )
    assert done.returncode == 1
    assert re.search(f"{transport} cannot bring version 0 to server-0: .*no route", done.stderr)
    with closing(sqlite3.connect(folder / "trajectories.sqlite")) as store:
        assert store.execute("SELECT count(*) FROM trajectories").fetchone() == (0,)
    assert processes_of(folder) == []


@pytest.mark.slow  # test_push_points.py loses servers, tests/ranks/test_step_ranks.py has two ranks
def test_two_servers_two_ranks_retract_by_disk_every_second_step(model, tmp_path):
    two = ["server.count=2", "trainer.data_parallel=2"]
    run = train(
        model,
        tmp_path / "run",
        "buffer.max_staleness=2",
        "rollout.interrupt=retract",
        "sync.transport=disk",
        "sync.every=2",
        "eval.every=1",
        *two,
    )
    check_common(run, bound=2, pushes=(2, 4, 5), servers=2)
    evals = [json.loads(line) for line in (run.folder / "evals.jsonl").read_text().splitlines()]
    assert [e["version"] for e in evals] == [0, 2, 4, 5] and evals[-1]["versions"] == [5]
    assert run.summary["requests_drained"] == 0 and run.summary["multi_segment_share"] > 0


@pytest.mark.slow  # test_push_points.py aborts, test_sglang_server.py has what is left
def test_abort_resubmits_prompt_and_tokens_so_far(model, tmp_path):
    run = train(
        model,
        tmp_path / "run",
        "buffer.max_staleness=2",
        "rollout.interrupt=abort",
        "server.count=2",
    )
    check_common(run, bound=2)
    assert run.summary["multi_segment_share"] > 0
    assert max(requests for (requests,) in run.used("requests")) > 1


@pytest.mark.parametrize(
    "schedule, bound",
    [
        pytest.param("sync", 0, marks=pytest.mark.slow),
        pytest.param("one_step", 1, marks=pytest.mark.slow),
    ],
)
def test_schedules_without_interruption(model, tmp_path, schedule, bound):
    # No request has to last until a push.
    short = "rollout.max_new_tokens=100"
    run = train(model, tmp_path / "run", f"schedule={schedule}", short)
    check_common(run, bound)
    assert run.summary["multi_segment_share"] == 0, "a push waits until nothing is in flight"


@pytest.mark.slow  # test_openai_endpoint.py has the conversations, test_objective.py the losses
def test_an_agent_of_several_traces(model, tmp_path):
    """The traces of an episode share its reward, and a whole run trains on all of them."""
    workflow = "rollout.workflow=areal_lite.workflows.agent:Agent"
    agent = "rollout.workflow_args.agent=tests.integration.toy_agent:forgets"
    run = train(model, tmp_path / "run", workflow, agent, "buffer.max_staleness=2")
    check_common(run, bound=2)
    episodes: dict[tuple[int, int], dict[int, float]] = {}
    for group, sample, trace, reward in run.used("group_id, sample_index, trace_index, reward"):
        episodes.setdefault((group, sample), {})[trace] = reward
    assert {len(traces) for traces in episodes.values()} == {1, 2, 3}
    for traces in episodes.values():
        assert sorted(traces) == list(range(len(traces))) and len(set(traces.values())) == 1
    assert all(1 < m["traces_mean"] < 3 for m in run.metrics)


@pytest.mark.parametrize(
    ("sign", "status"),
    [
        (signal.SIGINT, STOPPED),
        pytest.param(signal.SIGHUP, STOPPED, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, -signal.SIGKILL, marks=pytest.mark.slow),
    ],
)
def test_an_ended_supervisor_leaves_nothing(model, tmp_path, sign, status):
    """Ctrl-C and a terminal that closes finish the step and save a checkpoint."""
    folder = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "areal_lite",
        "train",
        f"model={model}",
        f"run_dir={folder}",
        *COMMON,
        "trainer.steps=500",
    ]
    with Terminal(command, 100, 30) as terminal:
        pid = terminal.process.pid
        terminal.wait_for(lambda screen: re.search(r"step [1-9]\d* of 500 .*ETA", screen))
        panel = terminal.wait_for(lambda screen: "elapsed ─╯" in screen)
        assert "servers ready    1 of 1" in panel and "decoupled PPO" in panel, panel
        children = [child.pid for child in psutil.Process(pid).children(recursive=True)]
        assert len(children) >= 4
        if sign == signal.SIGINT:
            terminal.press(b"\x03")
        else:
            os.kill(pid, sign)
        assert terminal.finish() == status
        deadline = time.monotonic() + 20
        while alive := running(children):
            assert time.monotonic() < deadline, alive
            time.sleep(0.2)
    steps = len(read_metrics(folder))
    assert start_version(folder) == (steps if status == STOPPED else 0)
    if sign == signal.SIGINT:
        left = terminal.everything()
        assert "the run finishes its step, saves a checkpoint and stops" in " ".join(left.split())
        assert "Summary of the run" in left and "╭" not in left and "elapsed" not in left, left
        assert not terminal.screen.cursor.hidden


@pytest.mark.slow  # the chaos test kills servers, too
def test_training_goes_on_without_a_server_that_dies(model, tmp_path):
    """Continue the requests of a killed server on the other one, and push without it."""
    folder = tmp_path / "run"
    overrides = [
        *COMMON,
        "server.count=2",
        "buffer.max_staleness=2",
        "trainer.steps=20",
        "rollout.max_new_tokens=100",  # it learns ever longer answers
    ]
    command = [
        sys.executable,
        "-m",
        "areal_lite",
        "train",
        f"model={model}",
        f"run_dir={folder}",
        *overrides,
    ]
    with open(tmp_path / "output", "wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        other = folder / "servers" / "server-1.json"
        while not other.exists() or (folder / "metrics.jsonl").read_bytes().count(b"\n") < 4:
            assert process.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.1)
        os.killpg(json.loads(other.read_text())["pid"], signal.SIGKILL)
        assert process.wait(200) == 0, (tmp_path / "output").read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    run = Run(folder)
    assert run.summary["steps"] == 20 and run.summary["trajectories_lost"] == 0
    assert len(run.metrics) == 20 and all(
        m["logprob_diff"] is None or m["logprob_diff"] < 1e-4 for m in run.metrics
    )
    assert len(run.used("1")) == 20 * 4 * 8
    found = {finding.name: finding for finding in diagnose(read_history(folder))}
    assert "restarts: 1, given up: 0" in found["failed_servers"].evidence
    assert "truncated" in found, "the model learns ever longer answers"
    printed = (tmp_path / "output").read_text()
    assert f"areal-lite diagnose {folder} explains" in printed


@pytest.mark.slow  # with stand-ins for servers: test_server_faults.py
def test_servers_lost_after_the_last_step_cost_only_the_evaluation(model, tmp_path):
    """The weights are saved, and the run ends at once with an error."""
    folder = tmp_path / "run"
    overrides = [
        *COMMON,
        "trainer.steps=1",
        "eval.problems=32",
        "eval.samples=0",
        "restart.max=0",
    ]
    command = [
        sys.executable,
        "-m",
        "areal_lite",
        "train",
        f"model={model}",
        f"run_dir={folder}",
        *overrides,
    ]
    with open(tmp_path / "output", "wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
    try:
        while (
            not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").read_bytes()
        ):
            assert process.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.02)
        os.killpg(
            json.loads((folder / "servers" / "server-0.json").read_text())["pid"], signal.SIGKILL
        )
        assert process.wait(60) == 1, (tmp_path / "output").read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert "the evaluation at version 1 is lost: no server is left" in (
        text := (tmp_path / "output").read_text()
    ), text
    assert "Training is complete" in text and "server-0 is given up" in text
    assert (folder / "checkpoints" / "hf" / "model.safetensors").exists() and (
        folder / "checkpoints" / "step-1"
    ).exists()
    assert Run(folder).summary["steps"] == 1 and processes_of(folder) == []
