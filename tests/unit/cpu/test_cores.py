"""A training step has the cores that others left idle, and only those."""

import os
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from areal_lite.cpu import cores
from areal_lite.cpu.cores import FreeCores, Usage, threads_left

SHARES = st.floats(0, 1)


@given(st.integers(1, 64), st.integers(1, 4), SHARES, SHARES, st.floats(0.01, 100))
def test_a_step_is_fastest_beside_what_others_used(count, ranks, own_share, others_share, elapsed):
    """Ranks are alike: what they use of the cores is not the others'."""
    own, others = own_share * count / ranks, others_share * count
    before = Usage(clock=5.0, own=1.0, busy=2.0)
    after = Usage(5.0 + elapsed, 1.0 + elapsed * own, 2.0 + elapsed * (ranks * own + others))

    def speed(threads: int) -> float:
        """Return the speed of an operator, whose threads wait for that on the others' core."""
        return threads * (1 - max(0.0, ranks * threads + others - count))

    threads = threads_left(before, after, count, ranks)
    every = range(1, max(1, count // ranks) + 1)
    assert threads in every
    assert speed(threads) >= max(map(speed, every)) - 1e-6 * count


def test_the_kernels_clock_counts_this_process() -> None:
    before = Usage.now()
    while time.process_time() - before.own < 0.3:
        pass
    after = Usage.now()
    assert after.own - before.own >= 0.3
    assert after.busy - before.busy >= 0.2, "ticks of 10 ms"


def test_only_the_cores_of_this_process_count(tmp_path: Path) -> None:
    mine = min(os.sched_getaffinity(0))
    other = max(os.sched_getaffinity(0)) + 1
    stat = tmp_path / "stat"
    stat.write_text(
        f"cpu  9 9 9 9 9 9 9 9 9 9\ncpu{mine} 100 20 3 1000 500 40 5 6 7 8\n"
        f"cpu{other} 900 0 0 0 0 0 0 0 0 0\nintr 5\n"
    )
    assert Usage.now(stat).busy == pytest.approx(154 / os.sysconf("SC_CLK_TCK"))


@pytest.fixture
def free(monkeypatch) -> FreeCores:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(cores, "_ranks_of_this_machine", lambda: 1)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    yield FreeCores()
    torch.set_num_threads(1)


def play(free: FreeCores, monkeypatch, used_by_others: float) -> int:
    """Take a step of a second in which others use so many cores; return its threads."""
    times = iter([Usage(0.0, 0.0, 0.0), Usage(1.0, 1.0, 1.0 + used_by_others)])
    monkeypatch.setattr(Usage, "now", lambda: next(times))
    with free():
        return torch.get_num_threads()


def test_threads_follow_the_idle_cores_of_the_step_before(free, monkeypatch) -> None:
    threads = [play(free, monkeypatch, others) for others in (0.0, 0.2, 0.3, 2.6, 4.0, 1.0)]
    assert threads == [1, 4, 4, 3, 1, 1]
    assert play(free, monkeypatch, 0.0) == 3
    assert torch.get_num_threads() == 1, "between steps others have the cores"


def test_a_failed_step_gives_the_cores_back(free, monkeypatch) -> None:
    play(free, monkeypatch, 0.0)
    times = iter([Usage(0.0, 0.0, 0.0), Usage(1.0, 1.0, 1.0)])
    monkeypatch.setattr(Usage, "now", lambda: next(times))
    with pytest.raises(KeyError), free():
        raise KeyError
    assert torch.get_num_threads() == 1


def test_ranks_whose_environments_differ_do_not_wait_for_each_other(free, monkeypatch) -> None:
    """All ranks tell each other where they are, also one whose environment decides."""
    asked: list[str | None] = []
    monkeypatch.setattr(
        cores,
        "_ranks_of_this_machine",
        lambda: asked.append(os.environ.get("OMP_NUM_THREADS")) or 1,
    )
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for _ in range(2):
        with free():
            pass
    assert asked == ["1"]


def test_the_environment_decides_if_it_says_so(free, monkeypatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(Usage, "now", None)
    for _ in range(2):
        with free():
            assert torch.get_num_threads() == 1
