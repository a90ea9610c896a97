"""Evaluations that have servers to themselves."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from areal_lite.controller.protocol import ControllerClient
from areal_lite.servers.registry import announced_servers
from tests.integration.controller_run import Run, assert_exact, assert_store_matches, push
from tests.integration.test_server_faults import until
from tests.integration.test_train import check_common, model, train  # noqa: F401

SLOW_S = 0.05  # a token; so a completion lasts up to two seconds
# Seven rounds of completions.
KEPT = {"max_staleness": 2, "eval__servers": 1, "eval__problems": 40, "rollout__max_concurrent": 12}


@contextmanager
def evaluating(r: Run, servers: int) -> Iterator[tuple[ControllerClient, Future]]:
    """Train on one batch while version 0 is evaluated on a server of its own."""
    for i in range(servers):
        r.start_server(f"s{i}", delay=SLOW_S)
    while len(announced_servers(r.path)) < servers:
        time.sleep(0.02)
    client, other = r.start_controller(), r.client(60)
    client.batch(0, 0, 1)
    with ThreadPoolExecutor(1) as thread:
        evaluation = thread.submit(other.evaluate, 0)
        if servers > 1:
            until(lambda: "lent at version 0" in r.log())
        yield client, evaluation


@pytest.mark.parametrize("interrupt", ["in_place", "none"])
def test_a_server_keeps_the_version_of_an_evaluation_until_its_end(run, interrupt: str) -> None:
    r = run(interrupt=interrupt, **KEPT)
    mode = "in_place" if interrupt == "in_place" else None
    pushes: list[int] = []
    with evaluating(r, 2) as (client, evaluation):
        used = {}

        def train(step: int) -> int:
            """Train on the batch of `step`; return how many servers the push after it went to."""
            batch, _ = client.batch(step, 0, 1, lambda: push(client, step, mode))
            assert_exact(batch)
            used[step] = sorted(set(batch.group_ids.tolist()))
            return len(push(client, step + 1, mode).servers)

        while not evaluation.done():
            pushes.append(train(len(pushes)))
        record = evaluation.result()
        assert (record["versions"], record["servers"], record["failures"]) == ([0], 1, 0)
        assert pushes[0] == 1, "the server that keeps version 0 took a push"
        assert train(len(pushes)) == 2, "it does not take part again"
        totals = client.finish()
    assert totals["aborts"] > 0, "its requests did not move"
    assert_store_matches(r, totals, used)


def test_an_evaluation_begins_anew_if_its_servers_fail(run) -> None:
    r = run(**KEPT)
    with evaluating(r, 2) as (client, evaluation):
        (other,) = push(client, 1, "in_place").servers
        (kept,) = {server.name for server in announced_servers(r.path)} - {other.name}
        r.processes[kept].kill()
        record = evaluation.result(60)
    assert record["versions"] == [1] and "servers" not in record
    assert "the evaluation of version 0 lost its servers: once more" in r.log()


def test_without_another_server_an_evaluation_shares_the_only_one(run) -> None:
    r = run(**KEPT)
    with evaluating(r, 1) as (client, evaluation):
        time.sleep(1)
        assert not evaluation.done(), "a second server may still start"
        assert len(push(client, 1, "in_place").servers) == 1
        record = evaluation.result(30)
    assert record["versions"] == [1] and "servers" not in record
    assert "the evaluation of version 0 has no server of its own" in r.log()


def test_an_evaluation_waits_for_the_servers_of_the_one_before(run) -> None:
    r = run(**KEPT, eval__every=100)
    with evaluating(r, 2) as (client, first), ThreadPoolExecutor(1) as thread:
        assert len(push(client, 1, "in_place").servers) == 1
        second = thread.submit(r.client(60).evaluate, 1)
        step = 1
        while not (first.done() and second.done()):
            client.batch(step, 0, 1, lambda v=step: push(client, v, "in_place"))
            step += 1
            push(client, step, "in_place")
        (version,) = second.result()["versions"]
        assert first.result()["versions"] == [0] and 1 < version <= step
        assert second.result()["servers"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["distributed", "memory"])
def test_a_run_whose_evaluations_have_a_real_server_of_their_own(model, tmp_path, transport):  # noqa: F811
    """Each server leaves the pushes and comes back, with the weights that its version names."""
    run = train(
        model,
        tmp_path / "run",
        "buffer.max_staleness=2",
        "server.count=2",
        f"sync.transport={transport}",
        "eval.every=2",
        "eval.servers=1",
        "eval.problems=40",
    )
    check_common(run, bound=2)
    evals = [json.loads(line) for line in (run.folder / "evals.jsonl").read_text().splitlines()]
    assert [e["version"] for e in evals] == [0, 2, 4, 5]
    assert all(len(e["versions"]) == 1 and e["failures"] == 0 for e in evals if "servers" in e)
    assert evals[0]["versions"] == [0] and evals[-1]["versions"] == [5]
    assert "servers" in evals[0] and "servers" not in evals[-1]
