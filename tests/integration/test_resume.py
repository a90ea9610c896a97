"""Runs that are killed or stopped, and resume in the same directory (run_dir/resume.py)."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import psutil
import pytest

from areal_lite.config import ReplayConfig
from areal_lite.run_dir.resume import STOPPED, checkpoint_steps
from tests.integration.controller_run import (
    GROUPS,
    MEMBERS,
    Run,
    assert_exact,
    assert_store_matches,
    end_step,
    push,
    wrong_with,
)
from tests.integration.test_train import COMMON, model, processes_of  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
ETA, SAVED, KILLED = 2, 2, 4


def kill(r: Run, saved: int) -> None:
    """Kill controller and server, with `saved` as the step of the newest checkpoint.

    Remove what a supervisor removes before it starts again.
    """
    checkpoint = r.path / "checkpoints" / f"step-{saved}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").touch()
    for process in r.processes.values():
        process.kill()
        process.wait()
    (r.path / "controller.json").unlink()
    (r.path / "servers" / "s0.json").unlink()


@pytest.fixture(name="start")
def _start(tmp_path, tokenizer_only):
    """start(**settings) -> Run with a server, ended with the test."""
    runs: list[Run] = []

    def make(**settings) -> Run:
        runs.append(Run(tmp_path / f"run{len(runs)}", tokenizer_only, **settings))
        return runs[-1]

    yield make
    for made in runs:
        made.stop()


@pytest.mark.parametrize("every", [1, 3])
def test_a_killed_controller_resumes_at_the_checkpoint(start, every: int) -> None:
    """With a push every third step, the checkpoint is between two pushes."""
    concurrent = {"rollout__max_concurrent": 4 * MEMBERS} if every > 1 else {}
    r = start(max_staleness=ETA, trainer__steps=20, sync__every=every, **concurrent)
    r.start_server(delay=0.003)
    client = r.start_controller()
    used: dict[int, list[int]] = {}
    for step in range(KILLED):
        used[step] = sorted(set(client.batch(step, 0, 1)[0].group_ids.tolist()))
        end_step(client, step + 1, every, "in_place")
    client.batch(KILLED, 0, 1)  # assigned, but never trained on
    assert r.store().counts()["in_flight"], "nothing was in flight: the test tests less"
    kill(r, SAVED)
    before = {t["group_id"]: t for t in r.store().groups()}

    r.start_server(delay=0.001)
    client, resyncs = r.start_controller(), []
    with pytest.raises(RuntimeError, match=f"{SAVED} steps are complete"):
        client.batch(SAVED - 1, 0, 1)
    again = {t["group_id"]: t["state"] for t in r.store().groups()}
    waiting = [g for g in before if again[g] == "finished"]
    assert (
        all(again[g] == "used" for step in range(SAVED) for g in used[step])
        and len(waiting) >= GROUPS
    )
    for step in range(SAVED, 8):
        batch, _ = client.batch(
            step, 0, 1, lambda step=step: resyncs.append(push(client, step, "in_place"))
        )
        assert_exact(batch)
        used[step] = sorted(set(batch.group_ids.tolist()))
        assert len(used[step]) == GROUPS and (step - batch.versions[batch.loss_mask] <= ETA).all()
        if step == SAVED:
            assert set(used[step]) <= set(waiting), "what was finished already is used first"
        if step > SAVED:
            room = (ETA + step + 1) * GROUPS
            counts = r.store().counts()
            assert counts["used"] + counts["finished"] + counts["in_flight"] <= room, (
                "more was admitted than staleness allows"
            )
        end_step(client, step + 1, every, "in_place")
    totals = client.finish()
    assert r.processes["controller"].wait(10) == 0, r.log()
    assert_store_matches(r, totals, used)
    everything = [group for groups in used.values() for group in groups]
    assert len(everything) == len(set(everything))
    groups = list(r.store().groups())
    held = sorted(t["prompt_index"] for t in groups if t["state"] != "dropped")
    assert held == list(range(len(held))), "each prompt has one group that counts"
    new = {t["group_id"] for t in groups} - set(before)
    assert all(
        t["min_version"] >= SAVED for t in r.store().trajectories() if t["group_id"] in new
    ), "a server worked with older weights"


def test_servers_are_resynced_when_nothing_waits(start) -> None:
    r = start(max_staleness=0, trainer__steps=9)
    r.start_server()
    client = r.start_controller()
    for step in range(3):
        client.batch(step, 0, 1)
        push(client, step + 1, "in_place")
    kill(r, 3)
    r.start_server()
    client, pushed = r.start_controller(), []
    batch, info = client.batch(
        3, 0, 1, lambda: pushed.extend(s.name for s in push(client, 3, "in_place").servers)
    )
    assert (
        pushed == ["s0"]
        and set(batch.versions[batch.loss_mask]) == {3}
        and info["staleness_max"] == 0
    )
    time.sleep(0.3)
    assert r.store().counts()["in_flight"] + r.store().counts()["finished"] == GROUPS, (
        "room is for the coming step alone"
    )


def test_a_replay_buffer_is_filled_again(start) -> None:
    settings = dict(
        reward__function="tests.integration.toy_reward:coin", max_staleness=0, trainer__steps=9
    )
    r = start(buffer__replay=ReplayConfig(capacity=8, recency_probability=0.0), **settings)
    fake = ("tests/fake_sglang.py", str(r.path), "s0", "--delay", "0.001", "--vary")
    r.start("s0", *fake)
    client = r.start_controller()
    for step in range(3):
        client.batch(step, 0, 1)
        push(client, step + 1, "in_place")
    kill(r, 2)
    batch, info = r.start_controller().batch(
        2, 0, 1
    )  # without a server: the content comes from the store
    store = r.store()
    held: dict[str, set[bytes]] = {}
    for trajectory in (
        t for state in ("finished", "used") for t in store.trajectories(state=state)
    ):
        held.setdefault(trajectory["prompt_id"], set()).add(trajectory["tokens"].tobytes())
    drawable = [
        distinct for distinct in held.values() if len(distinct) > 1
    ]  # with one trajectory there is nothing to balance
    assert (
        info["replay_prompts"] == len(drawable) >= GROUPS
        and GROUPS * 2 <= batch.num_sequences <= GROUPS * MEMBERS
    )
    assert (batch.versions <= 2).all()


def test_the_last_evaluation_is_made_again_on_the_same_servers(start) -> None:
    """The server has the last weights, but the new controller does not trust it."""
    r = start(max_staleness=ETA, trainer__steps=1, restart__max=0)
    r.start_server(delay=0.003)
    client = r.start_controller()
    client.batch(0, 0, 1)
    push(client, 1, "in_place")
    server = r.processes.pop("s0")
    announcement = r.path / "servers" / "s0.json"
    kept = announcement.read_text()
    kill(r, 1)
    announcement.write_text(kept)
    r.processes["s0"] = server
    client, evaluator, pushed = r.start_controller(), r.client(), []
    with ThreadPoolExecutor(1) as thread:
        evaluation = thread.submit(evaluator.evaluate, 1)
        client.await_evaluation(
            1, lambda: pushed.extend(s.name for s in push(client, 1, "in_place").servers)
        )
        assert evaluation.result(5)["versions"] == [1]
    assert pushed == ["s0"]
    assert client.finish()["trajectories_lost"] == 0


def test_counts_are_those_of_the_whole_run(start) -> None:
    r = start(
        reward__function="tests.integration.toy_reward:sometimes_fails",
        max_staleness=ETA,
        trainer__steps=20,
    )
    r.start_server()
    client = r.start_controller()
    for step in range(KILLED):
        _, before = client.batch(step, 0, 1)
        push(client, step + 1, "in_place")
    assert before["reward_failures"] > 0 and before["failed_rollouts"] > 0
    kill(r, KILLED)
    store = r.store()
    lost, saved = store.failures()["failed_rollouts"], store.totals()
    assert saved["reward_failures"] >= before["reward_failures"] and saved["requests"] > 0
    r.start_server()
    client = r.start_controller()
    # The first batches may be of groups that were finished before the kill.
    step = KILLED
    while store.totals()["requests"] == saved["requests"]:
        _, after = client.batch(step, 0, 1, partial(push, client, step, "in_place"))
        step += 1
        push(client, step, "in_place")
    totals = client.finish()
    assert after["failed_rollouts"] >= lost
    assert totals["failed_rollouts"] == store.failures()["failed_rollouts"] >= lost
    assert totals["reward_failures"] >= saved["reward_failures"]
    assert totals["requests"] > saved["requests"]


def write_rows(path: Path, count: int) -> dict:
    """A data set of `count` prompts, and the settings that name it."""
    path.write_text(
        "".join(json.dumps({"question": f"{i} + 1 =", "answer": ""}) + "\n" for i in range(count))
    )
    return {
        "data__source": "jsonl",
        "data__path": str(path),
        "data__chat": False,
        "eval__problems": 0,
    }


def test_retired_prompts_stay_retired(start, tmp_path) -> None:
    data = write_rows(tmp_path / "data.jsonl", 2 * GROUPS)
    r = start(
        reward__function="tests.integration.toy_reward:always", rollout__retire_above=0.9, **data
    )
    r.start_server()
    client = r.start_controller()
    for step in range(3):
        _, before = client.batch(step, 0, 1)
        push(client, step + 1, "in_place")
    kill(r, 3)
    groups = list(r.store().groups())
    solved = Counter(t["prompt_index"] for t in groups if t["state"] in ("finished", "used"))
    r.start_server()
    client = r.start_controller()
    _, after = client.batch(3, 0, 1, lambda: push(client, 3, "in_place"))
    assert after["retired_prompts"] >= before["retired_prompts"] >= GROUPS
    time.sleep(0.3)
    asked = {t["prompt_index"] for t in list(r.store().groups())[len(groups) :]}
    assert not asked & {index for index, groups in solved.items() if groups > 1}, (
        "a prompt that was solved twice was asked again"
    )
    assert wrong_with(r.path) == {}, "while it goes on"


def test_another_data_set_is_refused(start, tmp_path) -> None:
    data = tmp_path / "data.jsonl"
    r = start(**write_rows(data, 6))
    r.start_server()
    client = r.start_controller()
    client.batch(0, 0, 1)
    kill(r, 0)
    write_rows(data, 7)
    r.start("controller", "-m", "areal_lite.controller.service", str(r.path))
    assert r.processes["controller"].wait(20) == 1
    assert "cannot resume: prompt" in r.log().splitlines()[-1]


def command(folder: Path, model: Path, *overrides: str) -> list[str]:  # noqa: F811
    settings = [
        *COMMON,
        "trainer.steps=7",
        "trainer.save_every=2",
        "buffer.max_staleness=2",
        "sync.every=3",
        *overrides,
    ]
    return [
        sys.executable,
        "-m",
        "areal_lite",
        "train",
        f"model={model}",
        f"run_dir={folder}",
        "resume=auto",
        *settings,
    ]


def wait_for(process: subprocess.Popen, folder: Path, steps: int, saved: int) -> None:
    """Wait until `steps` steps are logged and the checkpoint of step `saved` is complete."""
    log = folder / "metrics.jsonl"
    while not (
        log.exists()
        and log.read_bytes().count(b"\n") >= steps
        and saved in checkpoint_steps(folder / "checkpoints")
    ):
        assert process.poll() is None, (folder.parent / "output").read_text()
        time.sleep(0.05)


def damage_weights(checkpoint: Path) -> None:
    """Flip one bit in the middle of the tensors."""
    path = checkpoint / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def check_whole_run(folder: Path) -> None:
    """Check that each of the seven steps, and each trajectory, counts once."""
    summary = json.loads((folder / "summary.json").read_text())
    metrics = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    evals = [
        json.loads(line)["version"] for line in (folder / "evals.jsonl").read_text().splitlines()
    ]
    assert [m["step"] for m in metrics] == list(range(1, 8)) and evals == [0, 7]
    versions = [m["version"] for m in metrics]
    assert versions == sorted(versions) and {3, 6, 7} <= set(versions)
    # The checkpoints of steps 2 and 4 are between two pushes.
    assert all(m["server_lag"] in (0, 1, 2) for m in metrics)
    assert (
        summary["steps"] == 7
        and summary["trajectories_lost"] == 0
        and summary["max_staleness"] <= 2
    )
    assert all(m["logprob_diff"] is None or m["logprob_diff"] < 1e-4 for m in metrics), (
        "servers and trainer must agree after going on too"
    )
    # A step may end before there is a server again. Its push then reaches none.
    assert metrics[-1]["verified"] > 0
    assert wrong_with(folder) == {}
    assert summary["groups"]["used"] == 7 * 4 and summary["groups"]["in_flight"] == 0
    assert checkpoint_steps(folder / "checkpoints")[-1] == 7 and processes_of(folder) == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_stopped_and_complete(model, tmp_path) -> None:  # noqa: F811
    """Kill a run after a checkpoint, stop the resumed run, and resume it to the end.

    A flipped bit in the newest checkpoint makes the last start continue from the one before.

    Another start finds nothing left to do.
    """
    folder = tmp_path / "run"
    process = None

    def start() -> subprocess.Popen:
        with open(tmp_path / "output", "wb") as output:
            return subprocess.Popen(
                command(folder, model), cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
            )

    try:
        process = start()
        wait_for(process, folder, 3, 2)
        supervisor = psutil.Process(process.pid)
        for one in (supervisor, *supervisor.children(recursive=True)):
            one.suspend()  # a second start can take longer than the steps that are left
        second = subprocess.run(
            command(folder, model), cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert second.returncode == 1 and "a run is going on there" in second.stderr
        process.kill()
        process.wait()
        saved = checkpoint_steps(folder / "checkpoints")[-1]
        process = start()
        while f"resumes from step {saved}" not in (tmp_path / "output").read_text():
            assert process.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.05)
        wait_for(process, folder, saved + 2, saved)
        roles = psutil.Process(process.pid).children(recursive=True)
        for role in roles:
            role.suspend()  # no step ends before the request is written
        process.send_signal(signal.SIGUSR1)
        while not (folder / "stop").exists():
            assert process.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.05)
        for role in roles:
            role.resume()
        assert process.wait(300) == STOPPED == os.EX_TEMPFAIL, (tmp_path / "output").read_text()
        stopped = checkpoint_steps(folder / "checkpoints")[-1]
        assert (
            saved + 2 <= stopped < 7
            and len((folder / "metrics.jsonl").read_text().splitlines()) == stopped
        )
        assert (
            (folder / "stop").exists()
            and not (folder / "checkpoints" / "hf").exists()
            and (folder / "summary.json").exists()
        )
        damage_weights(folder / "checkpoints" / f"step-{stopped}")
        process = start()
        assert process.wait(300) == 0, (tmp_path / "output").read_text()
        output = (tmp_path / "output").read_text()
        assert f"step-{stopped} is damaged: __0_0.distcp has a wrong checksum" in output
        before = re.search(r"the run resumes from step (\d+)", output)
        assert before and 0 < int(before[1]) < stopped
        assert (folder / "checkpoints" / f"step-{stopped}.damaged").is_dir()
        check_whole_run(folder)
        assert (folder / "checkpoints" / "hf" / "model.safetensors").exists() and not (
            folder / "stop"
        ).exists()
        last = subprocess.run(
            command(folder, model), cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert last.returncode == 0 and "the run is complete" in last.stderr, last.stderr
        assert last.stdout.splitlines()[-1] == str(folder / "summary.json")
        check_whole_run(folder)
    finally:
        if process and process.poll() is None:
            process.kill()
            process.wait()
