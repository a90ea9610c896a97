"""Which server a request goes to."""

from areal_lite.rollout.router import Router, least_loaded
from areal_lite.rollout.server import ServerInfo


def info(name: str, pid: int = 1, tensor_parallel: int = 1) -> ServerInfo:
    return ServerInfo(name, f"http://{name}", None, tensor_parallel, pid)


def test_least_loaded_per_rank_then_by_name() -> None:
    a, b, wide = info("a"), info("b"), info("c", tensor_parallel=2)
    assert least_loaded([], {}) is None
    assert least_loaded([b, a], {"a": 1, "b": 1}) == a
    assert least_loaded([a, b, wide], {"a": 3, "b": 3, "c": 5}) == wide


def test_a_server_takes_requests_once_it_is_ready() -> None:
    router = Router()
    assert router.announce([info("a")]) == [info("a")]
    assert router.announce([info("a")]) == [] and router.pick() is None
    router.mark_ready(info("a"))
    assert router.pick() == info("a")


def test_a_failed_server_is_left_out_until_it_is_another_process() -> None:
    router = Router()
    router.announce([info("a")])
    router.mark_ready(info("a"))
    assert router.fail(info("a")) and not router.fail(info("a"))
    assert router.all_failed and router.pick() is None
    assert router.announce([info("a")]) == []
    assert router.announce([info("a", pid=2)]) == [info("a", pid=2)]
    router.mark_ready(info("a"))  # late news of the dead one
    assert router.pick() is None and router.all_failed
    router.mark_ready(info("a", pid=2))
    assert router.pick() == info("a", pid=2) and not router.all_failed


def test_one_that_was_withdrawn_or_replaced_is_no_longer_ready() -> None:
    router = Router()
    router.announce([info("a"), info("b")])
    router.mark_ready(info("a")), router.mark_ready(info("b"))
    router.announce([info("b", pid=2)])
    assert router.pick() is None and not router.all_failed
