"""A stored run in the controller's place."""

import sqlite3

import pytest

from areal_lite.config import ReplayConfig
from areal_lite.run_dir.store import Store
from tests.integration.controller_run import GROUPS, MEMBERS, push

STEPS = 4


def frames(batch) -> list[bytes]:
    return [bytes(frame) for frame in batch.to_frames()]


def recorded(run, source, **settings):
    r = run(eval__problems=0, **settings)
    text = (
        (r.path / "config.yaml")
        .read_text()
        .replace("debug: 'off'", f"debug: train_only:{source.path}")
    )
    (r.path / "config.yaml").write_text(text)
    r.start("controller", "-m", "areal_lite.tools.stored_run", str(r.path))
    return r, r.client()


def test_a_run_that_trained_gives_the_same_bytes_again(run) -> None:
    first = run(max_staleness=1, rollout__max_concurrent=GROUPS * MEMBERS)
    first.start_server()
    client, other = first.start_controller(), first.client()
    batches, infos = [], []
    for step in range(STEPS):
        batch, info = client.batch(step, 0, 2)
        batches.append([frames(batch), frames(other.batch(step, 1, 2)[0])])
        infos.append(info)
        push(client, step + 1, "in_place")
    client.finish()
    for _ in range(2):
        r, client = recorded(
            run, first, max_staleness=7
        )  # the bound that counts is that of the stored run
        for step in range(STEPS):
            got = [client.batch(step, rank, 2) for rank in (0, 1)]
            assert [frames(batch) for batch, _ in got] == batches[step]
            assert all(value == infos[step][key] for key, value in got[0][1].items())
            assert client.begin_push(step + 1).servers == []
            client.pushed(step + 1)
        with pytest.raises(RuntimeError, match=f"has 0 groups for step {STEPS}"):
            client.batch(STEPS, 0, 2)
        assert client.finish()["groups"]["used"] == STEPS * GROUPS
        assert r.processes["controller"].wait(10) == 0, r.log()
    store = Store(first.path / "trajectories.sqlite")
    store.trim(1, since=1)
    store.close()
    _, client = recorded(run, first)
    with pytest.raises(RuntimeError, match=r"tokens not kept \(store.max_gib\)"):
        client.batch(0, 0, 2)
    assert frames(client.batch(1, 0, 2)[0]) == batches[1][0]


def test_draws_from_a_replay_buffer_are_made_again(run) -> None:
    first = run(
        max_staleness=0,
        reward__function="tests.integration.toy_reward:coin",
        buffer__replay=ReplayConfig(capacity=8, recency_probability=0.5),
    )
    first.start("s0", "tests/fake_sglang.py", str(first.path), "s0", "--delay", "0.001", "--vary")
    client = first.start_controller()
    batches = []
    for step in range(STEPS):
        batches.append(frames(client.batch(step, 0, 1)[0]))
        push(client, step + 1, "in_place")
    client.finish()
    r, client = recorded(run, first)
    assert [frames(client.batch(step, 0, 1)[0]) for step in range(STEPS)] == batches
    client.finish()
    assert r.processes["controller"].wait(10) == 0, r.log()


def test_an_error_is_reported_and_ends_the_process(run) -> None:
    first = run(trainer__steps=1)
    first.start_server()
    client = first.start_controller()
    client.batch(0, 0, 1)
    push(client, 1, "in_place")
    client.finish()
    r, client = recorded(run, first)
    client.batch(0, 0, 1)
    # The store breaks: no request can be answered any more.
    with sqlite3.connect(first.path / "trajectories.sqlite") as books:
        books.execute("ALTER TABLE groups RENAME TO other")
    with pytest.raises(RuntimeError, match="no such table: groups: restore the file"):
        client.batch(1, 0, 1)
    assert r.processes["controller"].wait(10) == 1, r.log()
