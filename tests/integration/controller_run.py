"""A run directory with the real controller process, fake servers, and a scripted trainer."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from areal_lite.config import TrainConfig, save_config
from areal_lite.controller.protocol import ControllerClient, PushTargets
from areal_lite.run_dir.reader import RunReader
from areal_lite.servers.blocking import post
from areal_lite.system.processes import dying_with_me
from areal_lite.tools.audit.audit import audit
from areal_lite.train_batch import TrainBatch
from tests.fake_sglang import completion

ROOT = Path(__file__).parents[2]
GROUPS, MEMBERS, BUDGET = 4, 3, 40


class Run:
    """A run directory, its controller, its servers and a trainer's clients."""

    def __init__(
        self, path: Path, model: str, interrupt: str = "in_place", max_staleness: int = 1, **other
    ):
        self.path = path
        config = TrainConfig(model=model, run_dir=str(path))
        config.data.source = "addition"
        if "data__source" not in other:
            config.data.args["max_digits"] = 3
        config.reward.function = "areal_lite_quickstart.addition:addition_reward"
        config.rollout.group_size, config.rollout.max_new_tokens, config.rollout.interrupt = (
            MEMBERS,
            BUDGET,
            interrupt,
        )
        config.trainer.batch_groups, config.buffer.max_staleness = GROUPS, max_staleness
        config.buffer.freshness = "eager"  # the tests know how many groups start
        config.eval.problems = 5
        for key, value in other.items():
            part, name = key.split("__")
            setattr(getattr(config, part), name, value)
        path.mkdir(exist_ok=True)
        save_config(config, path)
        self.folders: list[Path] = []  # with more modules
        self.processes: dict[str, subprocess.Popen] = {}
        self.clients: list[ControllerClient] = []

    def start(self, name: str, *command: str) -> subprocess.Popen:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, (ROOT, *self.folders))),
            **dying_with_me(),
            "OMP_NUM_THREADS": "1",
        }
        with open(self.path / f"{name}.log", "wb") as log:
            argv = [sys.executable, *command]
            self.processes[name] = subprocess.Popen(
                argv, env=environment, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )
        return self.processes[name]

    def start_server(self, name: str = "s0", delay: float = 0.001, version: int | str = 0) -> None:
        self.start(
            name,
            "tests/fake_sglang.py",
            str(self.path),
            name,
            "--delay",
            str(delay),
            "--weight-version",
            str(version),
        )

    def start_controller(self) -> ControllerClient:
        self.start("controller", "-m", "areal_lite.controller.service", str(self.path))
        return self.client()

    def client(self, timeout_s: float = 120) -> ControllerClient:
        self.clients.append(ControllerClient(self.path, timeout_s))
        return self.clients[-1]

    def stop(self) -> None:
        for client in self.clients:
            client.close()  # an open one would keep this process from ending
        for process in self.processes.values():
            process.kill()
            process.wait()

    def log(self, name: str = "controller") -> str:
        return (self.path / f"{name}.log").read_text()

    def wait_for(self, text: str, limit_s: float = 10) -> None:
        """Wait until the controller's log has `text`.

        Raises:
            AssertionError: it does not have it within `limit_s` seconds.
        """
        deadline = time.monotonic() + limit_s
        while text not in (log := self.log()):
            assert time.monotonic() < deadline, f"{text!r} is not in the log:\n{log}"
            time.sleep(0.02)

    def store(self) -> RunReader:
        return RunReader(self.path / "trajectories.sqlite")


def push(client: ControllerClient, version: int, mode: str | None) -> PushTargets:
    """Make the calls of the real pusher, in the same order."""
    answer = client.begin_push(version)
    for server in answer.servers:
        if mode:
            post(server, "/pause_generation", {"mode": mode}, 10)
        post(
            server,
            "/update_weights_from_disk",
            {"model_path": "m", "weight_version": str(version)},
            10,
        )
        post(server, "/continue_generation", {}, 10)
    client.pushed(version)
    return answer


def end_step(client: ControllerClient, done: int, every: int, mode: str | None) -> int:
    """End a step as the trainer does with `sync.every`; return the requests that were drained."""
    if done % every:
        client.step_done(done)
        return 0
    return push(client, done, mode).drained


def assert_exact(batch: TrainBatch) -> None:
    """Every trajectory is what an undisturbed server would have made of its prompt."""
    for start, end, truncated in zip(batch.cu_seqlens, batch.cu_seqlens[1:], batch.truncated):
        tokens, versions = batch.tokens[start:end].tolist(), batch.versions[start:end]
        n_prompt = int(np.count_nonzero(versions == -1))
        expected = completion(tokens[:n_prompt], BUDGET)
        assert tokens[n_prompt:] == expected
        assert truncated == (expected[-1] != 1)
        assert (np.diff(versions[n_prompt:]) >= 0).all()


def wrong_with(run_dir: Path) -> dict[str, list[str]]:
    """Return what `areal-lite diagnose --audit` finds wrong with a run, by check.

    A scripted trainer logs no steps, and its checkpoints are empty.
    """
    scripted = () if (run_dir / "metrics.jsonl").exists() else ("batches", "checkpoints")
    checks = audit(run_dir, tokens=True)
    return {
        check.name: check.wrong for check in checks if check.wrong and check.name not in scripted
    }


def assert_store_matches(run: Run, totals: dict, used: dict[int, list[int]]) -> None:
    """`used`: step -> group ids that its batch had. Exactly those are used, at that step, once."""
    assert totals["trajectories_lost"] == 0
    assert wrong_with(run.path) == {}
    store = run.store()
    assert store.counts() == totals["groups"]
    by_step: dict[int, list[int]] = {}
    for group in store.groups():
        if group["state"] == "used":
            by_step.setdefault(group["step"], []).append(group["group_id"])
    assert by_step == used
    assert store.missing_trajectories() == 0
    store.close()
