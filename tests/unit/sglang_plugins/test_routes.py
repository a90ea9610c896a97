"""A retracted request returns the routes of the forward passes that sampled its tokens."""

import sys
from types import SimpleNamespace

import pytest
import torch

from areal_lite.sglang_plugins import push as routes_plugin

PROMPT = [5, 6, 7]


class Scheduler:
    """The parts of SGLang's that deal with routes: a row for each token, made by `compute`."""

    def __init__(self):
        self.rows = torch.zeros(20, 1, 1, dtype=torch.int32)
        self.released = 0

    def get_topk(self, req_pool_idx, seqlen, req_to_token_pool, start_len) -> torch.Tensor:
        assert (req_pool_idx, req_to_token_pool) == (4, "pool")
        return self.rows[min(start_len, seqlen - 1) : seqlen - 1].clone()

    def compute(self, req, count: int, weights: int) -> None:
        """Sample `count` tokens. What is not in the cache is computed first."""
        first, end = self.cached, len(PROMPT) + len(req.output_ids) + count - 1
        self.rows[first:end] = 100 * weights + torch.arange(first, end).view(-1, 1, 1)
        req.output_ids += [9] * count
        self.cached = end

    def retract(self, req) -> None:
        def original(**given) -> str:
            assert given == {"req": req, "req_to_token_pool": "pool", "offload_kv": False}
            self.released += 1
            return "released"

        result = routes_plugin._keep_routes(
            original, req=req, req_to_token_pool="pool", offload_kv=False
        )
        assert result == "released"
        self.cached = 0

    def finish(self, req) -> list[int]:
        def original(_, req) -> None:
            if req.return_routed_experts:
                length = len(PROMPT) + len(req.output_ids)
                start = req.routed_experts_start_len
                req.routed_experts = self.get_topk(4, length, "pool", start)

        routes_plugin._return_kept_routes(original, self, req)
        self.cached = 0
        return [] if req.routed_experts is None else req.routed_experts.flatten().tolist()

    cached = 0


@pytest.fixture
def scheduler(monkeypatch) -> Scheduler:
    made = Scheduler()
    module = SimpleNamespace(get_global_experts_capturer=lambda: made)
    monkeypatch.setitem(sys.modules, "sglang.srt.state_capturer.routed_experts", module)
    return made


def request(start: int = 0, asked: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        return_routed_experts=asked,
        routed_experts_start_len=start,
        origin_input_ids=PROMPT,
        output_ids=[],
        kv=SimpleNamespace(req_pool_idx=4),
        routed_experts=None,
    )


@pytest.mark.parametrize("start", [0, 2, 3])
def test_a_request_that_is_retracted_twice(scheduler, start) -> None:
    req = request(start)
    scheduler.retract(req)  # before its first token
    scheduler.compute(req, 2, weights=1)
    scheduler.retract(req)
    scheduler.retract(req)  # again before it was computed
    scheduler.compute(req, 3, weights=2)
    scheduler.retract(req)
    scheduler.compute(req, 1, weights=3)
    assert scheduler.released == 4
    assert scheduler.finish(req) == [100, 101, 102, 103, 204, 205, 206, 307][start:]


def test_other_requests_are_left_alone(scheduler) -> None:
    req = request()
    scheduler.compute(req, 4, weights=1)
    assert scheduler.finish(req) == [100, 101, 102, 103, 104, 105]
    silent = request(asked=False)
    scheduler.compute(silent, 2, weights=1)
    scheduler.retract(silent)
    assert not hasattr(silent, "kept_routes") and scheduler.finish(silent) == []
