"""A run whose workflow hangs, blocks, crashes and exits: it goes on, and says what happened."""

import json
import time
from pathlib import Path

import pytest

from tests.integration.controller_run import GROUPS, MEMBERS, Run, push, wrong_with

CODE = """
import asyncio, os, sys, time
from areal_lite.rollout.episode import Transcript

async def workflow(episode):
    transcript = Transcript(episode)
    await transcript.sample()
    match episode.prompt.answer:
        case "hang":
            await asyncio.Event().wait()
        case "block":
            time.sleep(3600)
        case "crash":
            os._exit(0)
        case "exit":
            sys.exit(0)
    return transcript.trajectory(float(episode.sample_index % 2))
"""
FAULTS = {3: "hang", 7: "block", 11: "crash", 13: "exit"}
PROMPTS = 16


@pytest.fixture
def hostile(tokenizer_only, tmp_path: Path):
    """hostile(**settings) makes a run with these prompts, as training and as held-out ones."""
    (tmp_path / "hostile.py").write_text(CODE)
    rows = [{"question": f"{n}+1=", "answer": FAULTS.get(n, "fine")} for n in range(PROMPTS)]
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    runs = []

    def make(**settings) -> Run:
        run = Run(
            tmp_path / "run",
            tokenizer_only,
            data__source="jsonl",
            data__args={},
            data__path=str(data),
            data__eval_path=str(data),
            data__chat=False,
            reward__function="areal_lite.rewards.exact:exact_reward",
            rollout__workflow="hostile:workflow",
            rollout__episode_timeout_s=2.0,
            rollout__workers=2,
            eval__problems=PROMPTS,
            **settings,
        )
        run.folders.append(tmp_path)
        runs.append(run)
        return run

    yield make
    for run in runs:
        run.stop()


@pytest.mark.parametrize("max_staleness", [pytest.param(0, marks=pytest.mark.slow), 4])
def test_training_and_evaluations_go_on(hostile, max_staleness: int) -> None:
    run = hostile(max_staleness=max_staleness, trainer__steps=6)
    run.start_server()
    client = run.start_controller()
    client._timeout_s = 60
    first = client.evaluate(0)
    # Each of the four faults costs the greedy answer and the sampled one.
    assert (first["failures"], first["problems"]) == (2 * len(FAULTS), PROMPTS)
    assert 2 <= first["timeouts"] <= 4
    for step in range(6):
        batch, _ = client.batch(step, 0, 1)
        assert batch.num_sequences == GROUPS * MEMBERS
        push(client, step + 1, "in_place")
    last = client.evaluate(6)
    assert last["failures"] == 2 * len(FAULTS)
    totals = client.finish()
    assert run.processes["controller"].wait(20) == 0
    held = json.loads((run.path / "quarantine.json").read_text())
    lasting = {name: of for name, of in held.items() if of["lasts"]}
    for line, fault in ((4, "hang"), (8, "block"), (12, "crash")):
        for name in (f"rows.jsonl:{line}", f"held out: rows.jsonl:{line}"):
            assert name in lasting, (name, fault)
    assert "hostile.py:10 in workflow" in held["rows.jsonl:4"]["failure"]
    assert "hostile.py:12 in workflow" in held["rows.jsonl:8"]["failure"]
    assert set(totals["quarantined"]) >= lasting.keys()
    assert totals["trajectories_lost"] == 0 and wrong_with(run.path) == {}


def test_a_new_controller_knows_the_quarantine(hostile) -> None:
    run = hostile(rollout__max_concurrent=64)
    run.start_server()
    run.start_controller()
    held = run.path / "quarantine.json"
    deadline = time.monotonic() + 60
    while not held.exists() or len(json.loads(held.read_text())) < 2:
        assert time.monotonic() < deadline, run.log()
        time.sleep(0.1)
    known = json.loads(held.read_text())
    run.processes["controller"].kill()
    run.processes["controller"].wait()
    (run.path / "controller.json").unlink()
    client = run.start_controller()
    client._timeout_s = 60
    client.batch(0, 0, 1, lambda: push(client, 0, "in_place"))
    groups = list(run.store().groups())
    again = {g["prompt_id"] for g in groups if g["state"] in ("in_flight", "finished", "used")}
    assert not again & {name for name, of in known.items() if of["lasts"]}
