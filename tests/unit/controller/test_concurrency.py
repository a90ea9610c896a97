"""Concurrency that follows what servers can run, against servers that are simulated in rounds."""

from hypothesis import given
from hypothesis import strategies as st

from areal_lite.controller.buffer import Concurrency
from areal_lite.servers.client import ServerLoad

GROUP = 4


def settle(concurrency: Concurrency, slots: list[int], rounds: int = 60) -> tuple[int, int]:
    """Send as many requests as allowed to servers with so many slots.

    Returns (running, waiting) at the end.
    """
    for _ in range(rounds):
        in_flight = concurrency.limit // GROUP * GROUP
        each = [in_flight * p // sum(slots) for p in slots]
        loads = [ServerLoad(min(n, p), max(0, n - p), 0.5) for n, p in zip(each, slots)]
        concurrency.observe(loads, in_flight)
    return sum(load.running for load in loads), sum(load.waiting for load in loads)


@given(
    st.lists(st.integers(8, 400), min_size=1, max_size=4),
    st.lists(st.integers(8, 400), min_size=1, max_size=4),
)
def test_servers_are_full_and_their_queues_short(before: list[int], after: list[int]) -> None:
    concurrency = Concurrency(2000, GROUP)
    for slots in (before, after):  # also after what they can run has changed
        running, waiting = settle(concurrency, slots)
        assert running >= 0.9 * sum(slots) - GROUP * len(slots)
        assert waiting <= 0.25 * sum(slots) + 2 * GROUP


def test_the_cap_is_hard_and_reached() -> None:
    concurrency = Concurrency(100, GROUP)
    concurrency.observe([ServerLoad(50, 50, 0.5)], 100)
    assert concurrency.limit == 55
    assert settle(concurrency, [1000]) == (100, 0) and concurrency.limit == 100


def test_a_short_queue_keeps_the_limit() -> None:
    concurrency = Concurrency(100, GROUP)
    concurrency.observe([ServerLoad(30, 30, 0.5)], 60)
    limit = concurrency.limit
    concurrency.observe([ServerLoad(30, 3, 0.5)], limit)
    assert concurrency.limit == limit


def test_a_full_cache_lowers_the_limit_to_what_runs() -> None:
    concurrency = Concurrency(100, GROUP)
    concurrency.observe([ServerLoad(30, 0, 0.97), ServerLoad(20, 0, 0.5)], 50)
    assert concurrency.limit == 55
    concurrency.observe([ServerLoad(30, 0, 0.97), ServerLoad(30, 0, 0.5)], 60)
    assert concurrency.limit == 55, "being full is no reason to send more"


def test_the_limit_stays_when_something_else_holds_generation_back() -> None:
    concurrency = Concurrency(100, GROUP)
    concurrency.observe([ServerLoad(20, 10, 0.1)], 30)
    limit = concurrency.limit
    concurrency.observe(
        [ServerLoad(4, 0, 0.1)], 4
    )  # admission has no capacity: nothing is learned about the servers
    assert concurrency.limit == limit


def test_one_group_may_always_run() -> None:
    concurrency = Concurrency(100, GROUP)
    concurrency.observe([ServerLoad(0, 50, 0.0)], 50)
    assert concurrency.limit == GROUP
    concurrency.observe([], 0)
    assert concurrency.limit == GROUP
