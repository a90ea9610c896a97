"""`areal-lite train` goes on after its real SGLang servers were killed or stopped."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing

import aiohttp
import psutil
import pytest

from areal_lite.run_dir.reader import RunReader
from tests.integration.test_train import COMMON, ROOT, Run, model, processes_of  # noqa: F401

STEPS = 8


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_killed_and_hung_servers_come_back_at_the_trainers_version(model, tmp_path):  # noqa: F811
    """Nothing can generate until a server is back, with version 0, and was resynced."""
    folder = tmp_path / "run"
    faults = [
        "server.count=2",
        "server.api_key=${oc.env:SERVERS_KEY}",
        "sync.timeout_s=20",
        "buffer.max_staleness=1",
        f"trainer.steps={STEPS}",
    ]
    command = [
        sys.executable,
        "-m",
        "areal_lite",
        "train",
        f"model={model}",
        f"run_dir={folder}",
        *COMMON,
        *faults,
    ]
    key = {"SERVERS_KEY": "hush-20fa7c"}
    with open(tmp_path / "output", "wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, env=os.environ | key
        )
    try:
        announcements = [folder / "servers" / f"server-{i}.json" for i in range(2)]
        metrics = folder / "metrics.jsonl"
        while (
            not all(a.exists() for a in announcements)
            or not metrics.exists()
            or metrics.read_bytes().count(b"\n") < 2
        ):
            assert process.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.05)
        lines = [
            " ".join(child.cmdline())
            for child in psutil.Process(process.pid).children(recursive=True)
        ]
        assert sum("areal_lite.launch.serve" in line for line in lines) >= 2 and not any(
            key["SERVERS_KEY"] in line for line in lines
        )
        killed, stopped = (json.loads(a.read_text())["pid"] for a in announcements)
        os.killpg(stopped, signal.SIGSTOP)
        os.killpg(killed, signal.SIGKILL)
        assert process.wait(400) == 0, (tmp_path / "output").read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
    assert processes_of(folder) == []
    run = Run(folder)
    assert (
        run.summary["steps"] == len(run.metrics) == STEPS and run.summary["trajectories_lost"] == 0
    )
    assert run.summary["max_staleness"] <= 1
    assert len(run.used("1")) == STEPS * 4 * 8, "every step trains on B whole groups, none twice"
    assert all(m["logprob_diff"] is None or m["logprob_diff"] < 1e-4 for m in run.metrics), (
        "weights are not those that the version names"
    )
    assert not any(key["SERVERS_KEY"] in log.read_text() for log in (folder / "logs").iterdir())
    supervision = (folder / "logs" / "servers.log").read_text()
    assert "server-0 was killed" in supervision and "server-1 is started again" in supervision
    assert "pushed to stale servers only: server-" in (folder / "logs" / "trainer.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_a_server_that_comes_back_drafts_at_once(model, tmp_path):  # noqa: F811
    """It has learned from the store before its first request."""
    folder = tmp_path / "run"
    settings = [
        "server.args={speculative_algorithm:history}",
        "server.count=1",
        "rollout.temperature=0.1",  # it repeats itself
        "rollout.max_new_tokens=40",
        "trainer.lr=1e-6",
        "trainer.steps=1000",
    ]
    command = [sys.executable, "-m", "areal_lite", "train", f"model={model}", f"run_dir={folder}"]
    with open(tmp_path / "output", "wb") as output:
        process = subprocess.Popen(
            [*command, *COMMON, *settings], cwd=ROOT, stdout=output, stderr=subprocess.STDOUT
        )
    announcement, metrics = folder / "servers" / "server-0.json", folder / "metrics.jsonl"

    def wait_for(condition) -> None:
        while not condition():
            assert process.poll() is None, (tmp_path / "output").read_text()
            time.sleep(0.01)

    try:
        wait_for(lambda: metrics.exists() and metrics.read_bytes().count(b"\n") >= 3)
        first = json.loads(announcement.read_text())
        os.killpg(first["pid"], signal.SIGKILL)
        wait_for(lambda: not announcement.exists())
        wait_for(announcement.exists)
        second = json.loads(announcement.read_text())
        assert second["pid"] != first["pid"]
        # With a history of these requests alone it would be 2.3.
        assert asyncio.run(_tokens_per_step(second["url"], folder)) >= 3
    finally:
        process.kill()
        process.wait()


async def _tokens_per_step(url: str, folder) -> float:
    """Ask for answers of eight tokens to stored prompts, each alone, and count decode steps."""
    with closing(RunReader(folder / "trajectories.sqlite")) as store:
        rows = list(store.trajectories(state="used", limit=64))
    params = {"max_new_tokens": 8, "temperature": 0.1, "ignore_eos": True}
    tokens = steps = 0
    async with aiohttp.ClientSession() as session:
        for number, row in enumerate(rows[::8]):
            prompt = row["tokens"][: row["n_prompt"]].tolist()
            body = {"rid": f"x-{number}-0-0-0", "input_ids": prompt, "sampling_params": params}
            async with session.post(f"{url}/generate", json=body) as response:
                answer = await response.json()
            tokens += len(answer["output_ids"])
            steps += answer["meta_info"]["spec_verify_ct"]
    return tokens / steps
