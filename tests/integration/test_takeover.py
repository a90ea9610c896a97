"""A controller or a trainer that is killed while the other one goes on.

The controllers are real, the servers are fake and the trainer's two ranks are scripted.
"""

import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from areal_lite.config import load_config, save_config
from areal_lite.run_dir.paths import CHECKPOINT_MARKER, CHECKPOINTS_DIR, TOTALS_FILE
from areal_lite.system.files import write_json
from areal_lite.train_batch import TrainBatch
from tests.integration.controller_run import (
    GROUPS,
    Run,
    assert_exact,
    assert_store_matches,
    end_step,
    push,
)

ETA = 2


@pytest.fixture
def start(tiny_model: str, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def make(**settings) -> Run:
        runs.append(Run(tmp_path / f"run{len(runs)}", tiny_model, **settings))
        return runs[-1]

    yield make
    for made in runs:
        made.stop()


def replace_controller(run: Run) -> None:
    """Kill the controller, and start the one that takes its place."""
    controller = run.processes["controller"]
    controller.send_signal(signal.SIGKILL)
    controller.wait()
    run.start("controller", "-m", "areal_lite.controller.service", str(run.path))


class Ranks:
    """Two ranks of a trainer. Rank 0 pushes; the other one only takes part in a resync."""

    def __init__(self, run: Run):
        run.start_controller()
        self.used: dict[int, list[int]] = {}
        self.begin(run, 0)

    def begin(self, run: Run, step: int) -> None:
        """Start at `step`, as new processes do."""
        self.clients = [run.client()]
        self.clients[0].begin(step)
        self.clients.append(run.client())
        self.resyncs: list[list[int]] = [[], []]
        self.used = {before: groups for before, groups in self.used.items() if before < step}

    def pull(self, step: int, rank: int) -> TrainBatch:
        def resync() -> None:
            self.resyncs[rank].append(step)
            if rank == 0:
                push(self.clients[0], step, "in_place")

        return self.clients[rank].batch(step, rank, 2, resync)[0]

    def pull_both(self, step: int) -> list[TrainBatch]:
        with ThreadPoolExecutor(2) as threads:
            batches = list(threads.map(lambda rank: self.pull(step, rank), range(2)))
        self.check(step, batches)
        return batches

    def check(self, step: int, batches: list[TrainBatch]) -> None:
        """Check that the shards are one batch, and that both ranks made the same resyncs."""
        for batch in batches:
            assert_exact(batch)
            assert (step - batch.versions[batch.loss_mask] <= ETA).all()
        groups = [set(batch.group_ids.tolist()) for batch in batches]
        assert not groups[0] & groups[1] and len(groups[0] | groups[1]) == GROUPS
        self.used[step] = sorted(groups[0] | groups[1])
        assert self.resyncs[0] == self.resyncs[1]

    def finish(self, run: Run) -> None:
        """End the run, and check that every group was used once and nothing is lost."""
        totals = self.clients[0].finish()
        assert run.processes["controller"].wait(10) == 0, run.log()
        assert_store_matches(run, totals, self.used)
        everything = [group for groups in self.used.values() for group in groups]
        assert len(everything) == len(set(everything))
        groups = list(run.store().groups())
        held = sorted(g["prompt_index"] for g in groups if g["state"] != "dropped")
        assert held == list(range(len(held))), "each prompt has one group that counts"


def frames(batch: TrainBatch) -> list[bytes]:
    return [bytes(frame) for frame in batch.to_frames()]


@pytest.mark.parametrize("every", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.timeout(180)
def test_a_trainer_loses_no_step_wherever_the_controller_is_killed(start, every: int) -> None:
    run = start(max_staleness=ETA, trainer__steps=20, sync__every=every)
    run.start_server(delay=0.003)
    ranks = Ranks(run)

    def end(step: int) -> None:
        end_step(ranks.clients[0], step + 1, every, "in_place")

    ranks.pull_both(0), end(0)

    replace_controller(run)  # between two steps
    ranks.pull_both(1), end(1)

    first = ranks.pull(2, 0)
    replace_controller(run)  # one rank has its shard, the other has not
    assert frames(ranks.pull(2, 0)) == frames(first)
    ranks.check(2, [first, ranks.pull(2, 1)])
    end(2)

    ranks.pull_both(3)
    replace_controller(run)  # during the step
    end(3)

    ranks.pull_both(4), end(4)
    ranks.pull_both(5)
    ranks.clients[0].begin_push(6)
    replace_controller(run)  # during the push
    ranks.clients[0].pushed(6)
    replace_controller(run)
    ranks.clients[0].pushed(6)  # the first reply was lost
    ranks.pull_both(6), end(6)
    ranks.pull_both(7)
    replace_controller(run)
    ranks.clients[0].step_done(8), ranks.clients[0].step_done(8)  # the first reply was lost
    ranks.pull_both(8), end(8)
    ranks.finish(run)


def test_a_controller_that_is_killed_after_the_end_keeps_no_run_alive(start) -> None:
    """The trainer has the totals. No call of it will ever end the next controller."""
    run = start(max_staleness=ETA, trainer__steps=20)
    run.start_server(delay=0.003)
    ranks = Ranks(run)
    ranks.pull_both(0), end_step(ranks.clients[0], 1, 1, "in_place")
    write_json(run.path / TOTALS_FILE, ranks.clients[0].finish())
    replace_controller(run)
    assert run.processes["controller"].wait(30) == 0, run.log()


def test_servers_are_pushed_to_again_if_a_push_was_going_on(start) -> None:
    """The push may have ended in its middle. Without one, a server has what it reports."""
    run = start(max_staleness=0, trainer__steps=20)
    run.start_server(delay=0.003)
    ranks = Ranks(run)
    ranks.pull_both(0), end_step(ranks.clients[0], 1, 1, "in_place")
    replace_controller(run)
    ranks.pull_both(1)
    assert ranks.resyncs == [[], []]
    ranks.clients[0].begin_push(2)
    replace_controller(run)
    ranks.clients[0].pushed(2)
    ranks.pull_both(2)
    assert ranks.resyncs == [[2], [2]]


@pytest.mark.timeout(120)
def test_a_resync_that_one_rank_has_begun_comes_first_for_the_other(start) -> None:
    """Both ranks take part in a push. A rank that got its batch first would wait for ever."""
    run = start(max_staleness=0, trainer__steps=20)
    run.start_server(delay=0.02)
    ranks = Ranks(run)
    for step in range(2):
        ranks.pull_both(step), end_step(ranks.clients[0], step + 1, 1, "in_place")
    run.processes["s0"].kill(), run.processes["s0"].wait()
    run.start_server(version=0)  # it comes back with other weights
    asked: list[int] = []

    def first() -> None:
        asked.append(0)
        if len(asked) == 1:
            replace_controller(run)
        push(ranks.clients[0], 2, "in_place")

    with ThreadPoolExecutor(1) as thread:
        batch = thread.submit(lambda: ranks.clients[0].batch(2, 0, 2, first)[0])
        while not asked:
            assert not batch.done()
        other: list[int] = []
        second = ranks.clients[1].batch(2, 1, 2, lambda: other.append(0))[0]
        ranks.check(2, [batch.result(), second])
    assert len(other) == len(asked) >= 1


@pytest.mark.timeout(120)
def test_an_evaluation_that_was_running_is_made_again(start) -> None:
    run = start(max_staleness=ETA, trainer__steps=20, eval__problems=40)
    run.start_server(delay=0.01)
    client = run.start_controller()
    client.begin(0)
    client.batch(0, 0, 1), push(client, 1, "in_place")
    with ThreadPoolExecutor(1) as thread:
        evaluation = thread.submit(run.client().evaluate, 1)
        client.batch(1, 0, 1)
        assert not evaluation.done(), "too late to kill"
        replace_controller(run)
        assert evaluation.result(60)["problems"] == 40


def test_a_controller_that_starts_anew_does_not_answer_this_trainer(start) -> None:
    """It cannot take over: a replay buffer's batches are not recorded before their step ends."""
    run = start(max_staleness=ETA, trainer__steps=20)
    run.start_server()
    ranks = Ranks(run)
    ranks.pull(0, 0)
    config = load_config(run.path)
    config.buffer.replay.capacity = 10
    save_config(config, run.path)
    replace_controller(run)
    with pytest.raises(RuntimeError, match="started anew while the trainer waited for"):
        ranks.clients[0].begin_push(1)
    ranks.begin(run, 0)


@pytest.mark.parametrize("dies", ["the trainer", "both", "the trainer in a push"])
@pytest.mark.parametrize("saved", [0, 2])
@pytest.mark.timeout(120)
def test_a_trainer_that_is_started_again_goes_on_from_its_checkpoint(start, dies, saved) -> None:
    run = start(max_staleness=ETA, trainer__steps=20)
    run.start_server(delay=0.003)
    ranks = Ranks(run)
    for step in range(4):
        if saved and step == saved:
            marker = run.path / CHECKPOINTS_DIR / f"step-{saved}" / CHECKPOINT_MARKER
            marker.parent.mkdir(parents=True), marker.touch()
        ranks.pull_both(step), end_step(ranks.clients[0], step + 1, 1, "in_place")
    ranks.pull(4, 1)
    if dies == "the trainer in a push":
        ranks.clients[0].begin_push(5)
    if dies == "both":
        replace_controller(run)
    ranks.begin(run, saved)
    for step in range(saved, 6):
        ranks.pull_both(step), end_step(ranks.clients[0], step + 1, 1, "in_place")
    ranks.finish(run)
    assert f"a trainer began again at step {saved}" in run.log()


def test_a_trainer_whose_checkpoint_is_older_than_the_controllers_is_refused(start) -> None:
    run = start(max_staleness=ETA, trainer__steps=20)
    marker = run.path / CHECKPOINTS_DIR / "step-2" / CHECKPOINT_MARKER
    marker.parent.mkdir(parents=True), marker.touch()
    with pytest.raises(RuntimeError, match="trainer begins at step 1 and the controller at step 2"):
        run.start_controller().begin(1)
