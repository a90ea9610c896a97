"""Which server a request goes to."""

from areal_lite.servers.registry import ServerInfo
from areal_lite.servers.router import Router, least_loaded


def info(name: str, pid: int = 1, tensor_parallel: int = 1) -> ServerInfo:
    return ServerInfo(name, f"http://{name}", None, tensor_parallel, pid)


def test_least_loaded_per_rank_then_by_name() -> None:
    a, b, wide = info("a"), info("b"), info("c", tensor_parallel=2)
    assert least_loaded([], {}) is None
    assert least_loaded([b, a], {"a": 1, "b": 1}) == a
    assert least_loaded([a, b, wide], {"a": 3, "b": 3, "c": 5}) == wide


def test_a_server_takes_requests_once_it_has_the_version() -> None:
    router = Router()
    router.version = 3
    assert router.announce([info("a")]) == [info("a")]
    assert router.announce([info("a")]) == [] and router.pick() is None and router.behind == []
    router.joined(info("a"), 2)
    assert router.pick() is None and router.behind == [info("a")]
    router.pushed(info("a"))
    assert router.pick() == info("a") and router.works(info("a")) and router.behind == []
    router.version = 4
    assert router.pick() is None and router.behind == [info("a")]


def test_what_a_push_brought_counts_more_than_an_answer_from_before_it() -> None:
    router = Router()
    router.announce([info("a")])
    router.version = 1
    router.pushed(info("a"))
    router.joined(info("a"), 0)
    assert router.ready == {"a"}


def test_a_failed_server_is_left_out_until_it_is_another_process() -> None:
    router = Router()
    router.announce([info("a")])
    router.joined(info("a"), 0)
    assert router.fail(info("a")) and not router.fail(info("a"))
    assert router.pick() is None and router.behind == []
    assert router.announce([info("a")]) == []
    assert router.announce([info("a", pid=2)]) == [info("a", pid=2)]
    router.joined(info("a"), 0)  # late news of the dead one
    router.pushed(info("a"))
    assert router.pick() is None and not router.works(info("a"))
    router.joined(info("a", pid=2), 0)
    assert router.pick() == info("a", pid=2) and not router.works(info("a"))


def test_one_that_was_withdrawn_or_replaced_is_no_longer_ready() -> None:
    router = Router()
    router.announce([info("a"), info("b")])
    router.joined(info("a"), 0), router.joined(info("b"), 0)
    router.announce([info("b", pid=2)])
    assert router.pick() is None and router.ready == set()


def test_a_server_that_holds_the_prefix_is_preferred_while_it_works() -> None:
    router = Router()
    a, b, c = (info(name) for name in "abc")
    router.announce([a, b, c])
    for server in (a, b, c):
        router.joined(server, 0)
    router.load.update(a=5, b=7, c=1)
    assert router.pick() == c and router.pick([a, b]) == a
    router.fail(a)
    assert router.pick([a, b]) == b and router.pick([a]) == c
