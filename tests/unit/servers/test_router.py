"""The server that a request goes to."""

from areal_lite.servers.registry import Router, ServerInfo, least_loaded


def info(name: str, pid: int = 1, tensor_parallel: int = 1) -> ServerInfo:
    return ServerInfo(
        name=name, url=f"http://{name}", api_key=None, tensor_parallel=tensor_parallel, pid=pid
    )


def with_ready(*names: str) -> Router:
    router = Router()
    servers = [info(name) for name in names]
    router.update_servers(servers)
    for server in servers:
        router.record_version(server, 0)
    return router


def test_least_loaded_per_rank_then_by_name() -> None:
    a, b, wide = info("a"), info("b"), info("c", tensor_parallel=2)
    assert least_loaded([], {}) is None
    assert least_loaded([b, a], {"a": 1, "b": 1}) == a
    assert least_loaded([a, b, wide], {"a": 3, "b": 3, "c": 5}) == wide


def test_a_server_takes_requests_once_it_has_the_version() -> None:
    router = Router()
    router.version = 3
    assert router.update_servers([info("a")]) == [info("a")]
    assert (
        router.update_servers([info("a")]) == [] and router.choose() is None and router.stale == []
    )
    router.record_version(info("a"), 2)
    assert router.choose() is None and router.stale == [info("a")]
    router.record_push(info("a"))
    assert router.choose() == info("a") and router.is_ready(info("a")) and router.stale == []
    router.version = 4
    assert router.choose() is None and router.stale == [info("a")]


def test_a_push_takes_precedence_over_an_answer_from_before_it() -> None:
    router = Router()
    router.update_servers([info("a")])
    router.version = 1
    router.record_push(info("a"))
    router.record_version(info("a"), 0)
    assert router.ready == {"a"}


def test_a_failed_server_is_left_out_until_it_is_another_process() -> None:
    router = Router()
    router.update_servers([info("a")])
    router.record_version(info("a"), 0)
    assert router.mark_failed(info("a")) and not router.mark_failed(info("a"))
    assert router.choose() is None and router.stale == []
    assert router.update_servers([info("a")]) == []
    assert router.update_servers([info("a", pid=2)]) == [info("a", pid=2)]
    router.record_version(info("a"), 0)  # late news of the dead one
    router.record_push(info("a"))
    assert router.choose() is None and not router.is_ready(info("a"))
    router.record_version(info("a", pid=2), 0)
    assert router.choose() == info("a", pid=2) and not router.is_ready(info("a"))


def test_a_server_that_was_withdrawn_or_replaced_is_no_longer_ready() -> None:
    router = with_ready(*"ab")
    router.update_servers([info("b", pid=2)])
    assert router.choose() is None and router.ready == set()


def test_a_server_that_holds_the_prefix_is_preferred_while_it_is_ready() -> None:
    router = with_ready(*"abc")
    a, b, c = (info(name) for name in "abc")
    router.load.update(a=5, b=7, c=1)
    assert router.choose() == c and router.choose([a, b]) == a
    router.mark_failed(a)
    assert router.choose([a, b]) == b and router.choose([a]) == c
