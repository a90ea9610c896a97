"""The modelled server against closed forms, and what it does with its cache and at a push."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate.decoding import DecodingServer, Generation, ServerSpeed

SPEED = ServerSpeed(step_s=0.01, per_sequence_s=1e-4, per_context_s=1e-7, prefill_s=1e-5)


def request(target: int, context: int = 100) -> Generation:
    return Generation(context=context, target=target, prefill=context)


def drain(server: DecodingServer) -> list[tuple[float, Generation]]:
    """Advance from event to event until nothing runs; return what finished when."""
    done = []
    while (event := server.next_event()) is not None:
        done += [(server.now, one) for one in server.advance(event)]
    return done


def token_by_token(speed: ServerSpeed, contexts: list[int], steps: int) -> float:
    """Add up the time of single steps."""
    return sum(
        speed.step_s + speed.per_sequence_s * len(contexts)
        + speed.per_context_s * (sum(contexts) + step * len(contexts))
        for step in range(steps)
    )  # fmt: skip


def test_a_single_request_takes_its_prompt_and_its_steps() -> None:
    server = DecodingServer(SPEED)
    server.add(request(500))
    ((end, _),) = drain(server)
    assert end == pytest.approx(100 * 1e-5 + token_by_token(SPEED, [100], 500))


def test_a_full_batch_ends_together() -> None:
    server = DecodingServer(SPEED)
    for _ in range(64):
        server.add(request(300))
    done = drain(server)
    expected = 64 * 100 * 1e-5 + token_by_token(SPEED, [100] * 64, 300)
    assert [end for end, _ in done] == pytest.approx([expected] * 64)
    assert server.usage.tokens == pytest.approx(64 * 300)


def test_the_batch_shrinks_as_requests_end() -> None:
    server = DecodingServer(SPEED)
    short, long = request(100), request(250)
    server.add(short)
    server.add(long)
    ends = {one: end for end, one in drain(server)}
    first = 200 * 1e-5 + token_by_token(SPEED, [100, 100], 100)
    assert ends[short] == pytest.approx(first)
    assert ends[long] == pytest.approx(first + token_by_token(SPEED, [200], 150))


@given(st.lists(st.floats(0.001, 5), min_size=1, max_size=20))
@settings(deadline=None)
def test_looking_at_a_server_changes_nothing(pauses: list[float]) -> None:
    watched, alone = DecodingServer(SPEED), DecodingServer(SPEED)
    for server in (watched, alone):
        for target in (50, 300, 301, 900):
            server.add(request(target))
    ends, now = [], 0.0
    for pause in pauses:
        now += pause
        ends += [one.target for one in watched.advance(now)]
    ends += [one.target for _, one in drain(watched)]
    assert ends == [one.target for _, one in drain(alone)]
    assert watched.now == pytest.approx(max(alone.now, now), abs=1e-5)


def test_slots_are_taken_in_order_of_arrival() -> None:
    server = DecodingServer(ServerSpeed(step_s=0.01, max_running=2))
    requests = [request(n) for n in (10, 20, 30)]
    for one in requests:
        server.add(one)
    assert len(server.running) == 2 and list(server.waiting) == requests[2:]
    assert [round(end, 6) for end, _ in drain(server)] == [0.1, 0.2, 0.4]


def test_littles_law_in_steady_state() -> None:
    """Requests in the server = arrivals per second * mean time in the server."""
    server, rng = DecodingServer(SPEED), np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1.5, 4000))
    sojourns, began = [], {}

    def leave(finished: list[Generation]) -> None:
        sojourns.extend(server.now - began.pop(one) for one in finished)

    for arrival in arrivals:
        while (event := server.next_event()) is not None and event < arrival:
            leave(server.advance(event))
        leave(server.advance(arrival))
        one = request(int(rng.exponential(400)) + 1)
        began[one] = arrival
        server.add(one)
    in_system = server.usage.sequence_s + sum(1e-3 * 100 * 1e-5 for _ in sojourns)
    rate, mean = len(sojourns) / arrivals[-1], float(np.mean(sojourns))
    assert in_system / arrivals[-1] == pytest.approx(rate * mean, rel=0.02)


def test_a_full_cache_preempts_the_youngest_which_loses_no_token() -> None:
    server = DecodingServer(ServerSpeed(step_s=0.01, prefill_s=1e-3, kv_tokens=1000))
    old, young = request(700), request(600)
    server.add(old)
    server.add(young)
    assert [one for _, one in drain(server)] == [old, young]
    assert server.usage.preempted == 1
    assert (old.done, young.done) == (700, 600)
    assert old.spans == [(0, 700)] and sum(tokens for _, tokens in young.spans) == 600
    # The context of the preempted request is computed again.
    assert server.usage.prefill_s == pytest.approx(1e-3 * (200 + young.prefill))
    assert young.prefill > 100


def test_a_sequence_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="does not fit a KV cache of 1000"):
        DecodingServer(ServerSpeed(step_s=0.01, kv_tokens=1000)).add(request(901))


def test_a_push_in_place_pauses_and_splits_the_versions() -> None:
    server = DecodingServer(ServerSpeed(step_s=0.01))
    one = request(100, context=10)
    server.add(one)
    server.advance(0.405)
    assert server.pause("in_place") == [] and server.next_event() is None
    server.advance(2.0)
    server.resume(3)
    ((end, _),) = drain(server)
    assert end == pytest.approx(1.0 + 2.0 - 0.405)
    assert one.spans == [(0, 40), (3, 60)]
    assert server.usage.paused_s == pytest.approx(2.0 - 0.405)


def test_a_push_that_retracts_computes_the_context_again() -> None:
    server = DecodingServer(ServerSpeed(step_s=0.01, prefill_s=1e-3))
    one = request(100, context=10)
    server.add(one)
    server.advance(0.01 + 0.40)
    server.pause("retract")
    server.resume(1)
    ((end, _),) = drain(server)
    assert one.spans == [(0, 40), (1, 60)] and one.prefill == 50
    assert end == pytest.approx(0.01 + 0.40 + 0.05 + 0.60)


def test_an_abort_ends_requests_with_what_they_have() -> None:
    server = DecodingServer(ServerSpeed(step_s=0.01, max_running=1))
    running, waiting = request(100, context=10), request(50)
    server.add(running)
    server.add(waiting)
    server.advance(0.305)
    assert server.pause("abort") == [running, waiting]
    assert (running.done, running.spans, waiting.done) == (30, [(0, 30)], 0)
    assert not server.running and not server.waiting and server.context == 0


@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 400)), min_size=1, max_size=30),
    st.lists(st.tuples(st.floats(0.1, 3), st.sampled_from(["in_place", "retract"])), max_size=6),
)
@settings(deadline=None, max_examples=60)
def test_every_request_ends_with_all_its_tokens(arrivals, pushes) -> None:
    server = DecodingServer(
        ServerSpeed(step_s=0.004, per_context_s=1e-6, prefill_s=1e-5, kv_tokens=900, max_running=8)
    )
    requests = [request(target, context=50) for _, target in arrivals]
    events = [(t, "add", one) for (t, _), one in zip(arrivals, requests)]
    times = itertools.accumulate(gap for gap, _ in pushes)
    events += [(t, mode, None) for t, (_, mode) in zip(times, pushes)]
    finished = []
    for at, kind, one in sorted(events, key=lambda event: event[0]):
        finished += server.advance(max(at, server.now))
        if kind == "add":
            server.add(one)
        else:
            server.pause(kind)
            finished += server.advance(server.now + 0.1)
            server.resume(server.version + 1)
    finished += [one for _, one in drain(server)]
    assert sorted(map(id, finished)) == sorted(map(id, requests))
    for one in requests:
        versions = [version for version, _ in one.spans]
        assert one.done == one.target == sum(tokens for _, tokens in one.spans)
        assert versions == sorted(versions)
    assert server.context == 0 and not server.waiting
