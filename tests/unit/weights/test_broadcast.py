"""A collective and its HTTP calls end together: a failing server cannot keep the trainer in it."""

from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from types import SimpleNamespace
from typing import Any

import pytest

from areal_lite.servers.client import ServerFailed, ServerRefused, ServersFailed, ServerUnreachable
from areal_lite.servers.registry import ServerInfo
from areal_lite.sglang_plugins.weight_group import CollectiveError
from areal_lite.weights import broadcast
from areal_lite.weights.broadcast import WeightGroup

SERVERS = [
    ServerInfo(name=name, url=f"http://{name}", api_key=None, tensor_parallel=1, pid=1)
    for name in "abc"
]


def future(result: object = None) -> Future:
    """Return a future that is done: with an exception, or with a result."""
    done: Future = Future()
    if isinstance(result, Exception):
        done.set_exception(result)
    else:
        done.set_result(result)
    return done


@pytest.fixture(autouse=True)
def reachable(monkeypatch) -> set[str]:
    """The names of the servers that answer a question about their health."""
    names = set("abc")
    monkeypatch.setattr(broadcast, "_GRACE_S", 0.02)
    monkeypatch.setattr(broadcast, "start_reaching", lambda server, _: future(server.name in names))
    return names


def wait(collective: Future, *calls: Future, timeout_s: float = 30.0) -> list[str]:
    """Wait, and return whether the collective was given up."""
    given_up: list[str] = []

    def give_up() -> None:
        given_up.append("given up")

    group: Any = SimpleNamespace(servers=SERVERS, _timeout_s=timeout_s, break_up=give_up)
    WeightGroup.wait_together(group, collective, list(calls), "broadcast")
    return given_up


def blamed(collective: Future, *calls: Future, timeout_s: float = 30.0) -> list[tuple[type, str]]:
    with pytest.raises(ServersFailed) as failed:
        wait(collective, *calls, timeout_s=timeout_s)
    return [(type(error), error.server.name) for error in failed.value.errors]


def test_a_collective_that_succeeds_everywhere_is_not_given_up() -> None:
    assert wait(future(), future(), future(), future()) == []


def test_a_server_that_refuses_does_not_leave_the_trainer_in_the_collective() -> None:
    """The collective and the other calls never end: the refusal alone ends the wait, at once."""
    refusal = ServerRefused(SERVERS[1], "no such group")
    assert blamed(Future(), Future(), future(refusal), Future()) == [(ServerRefused, "b")]


def test_a_server_that_gives_no_answer_is_blamed_before_those_that_failed_with_it(
    reachable,
) -> None:
    reachable.remove("c")
    broken = ServerFailed(SERVERS[0], "connection closed by peer")
    assert blamed(Future(), future(broken), future(), Future()) == [(ServerUnreachable, "c")]


def test_servers_that_answer_but_do_not_finish_in_time_are_blamed() -> None:
    calls = (Future(), future(), Future())
    assert blamed(Future(), *calls, timeout_s=0.02) == [(ServerFailed, "a"), (ServerFailed, "c")]


def test_servers_that_hang_are_asked_at_once_and_during_the_grace(monkeypatch) -> None:
    """Else each of them would cost the others a wait of its own."""
    events: list[str] = []
    asked: list[Future] = []

    def start_reaching(server: ServerInfo, _: float) -> Future:
        events.append(f"asked {server.name}")
        asked.append(Future())
        if len(asked) == 2:
            for one in asked:  # no answer comes before both are asked
                one.set_result(False)
        return asked[-1]

    def watched_wait(*arguments):
        events.append("waited")
        return wait_for_futures(*arguments)

    monkeypatch.setattr(broadcast, "start_reaching", start_reaching)
    monkeypatch.setattr(broadcast, "wait", watched_wait)
    calls = (Future(), future(), Future())
    assert blamed(Future(), *calls, timeout_s=0.02) == [
        (ServerUnreachable, "a"),
        (ServerUnreachable, "c"),
    ]
    assert events == ["waited", "asked a", "asked c", "waited"]


def consequence(name: str) -> ServerRefused:
    """Return the answer of a server that only saw the collective fail."""
    server = next(server for server in SERVERS if server.name == name)
    return ServerRefused(server, f"Failed to receive weights: {CollectiveError('given up')}")


def test_a_server_that_only_saw_the_collective_fail_is_not_to_blame() -> None:
    late = Future()
    calls = (future(consequence("a")), late, future(consequence("c")))
    assert blamed(future(OSError("connection reset")), *calls) == [(ServerFailed, "b")]


@pytest.mark.parametrize("answer", [None, "consequence"])
def test_a_collective_that_fails_by_itself_raises_its_own_error(answer) -> None:
    calls = [future(answer and consequence(name)) for name in "abc"]
    with pytest.raises(CollectiveError, match="every server answers: address in use"):
        wait(future(OSError("address in use")), *calls)


def test_servers_that_all_give_up_after_the_time_are_not_to_blame() -> None:
    calls = [future(consequence(name)) for name in "abc"]
    with pytest.raises(CollectiveError, match="longer than sync.timeout_s=0.02"):
        wait(Future(), *calls, timeout_s=0.02)
