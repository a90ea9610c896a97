"""Waiting requests compute the beginning that they share once, and none waits without need."""

import sys
from array import array
from itertools import takewhile
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_lite.sglang_plugins import prefill

LEAST = 3  # tokens, so that short sequences suffice
PROMPT = list(range(50))


def common(a, b) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


class Request:
    extra_key = cache_salt = None

    def __init__(self, prompt, sampled=(), logprob_start: int | None = None):
        self.origin_input_ids, self.output_ids = array("q", prompt), array("q", sampled)
        self._start = logprob_start

    @property
    def tokens(self) -> list[int]:
        return [*self.origin_input_ids, *self.output_ids]

    def _compute_max_prefix_len(self, length: int) -> int:
        return length - 1 if self._start is None else self._start


class Cache:
    """The sequences that are computed. With `remembers=False` none is found again."""

    disable = False

    def __init__(self, remembers: bool):
        self.known: list[list[int]] = []
        self.remembers = remembers

    def match_prefix(self, params):
        lengths = [common(params.key.tokens, known) for known in self.known]
        found = min(max(lengths, default=0), params.key.limit)
        # One release of SGLang has the first, and another the second.
        if found % 2:
            return SimpleNamespace(device_indices=range(found))
        return SimpleNamespace(device_prefix_len=found)


def key(tokens, *, limit: int, **_) -> SimpleNamespace:
    return SimpleNamespace(tokens=list(tokens), limit=limit)


class Scheduler:
    """Forms prefill batches, as SGLang's does. With `overlap`, a batch is known a pass later."""

    def __init__(self, overlap: bool = False, room: int = 10**6, remembers: bool = True):
        self.waiting_queue: list[Request] = []
        self.result_queue: list = []
        self.chunked_req = None
        self.enable_overlap, self.room = overlap, room
        self.tree_cache = Cache(remembers)
        self.computed = 0

    def step(self) -> list[Request]:
        """Run one pass of the scheduler and return the requests of its batch."""
        running = SimpleNamespace(batch_is_full=False)
        batch, same = prefill.compute_shared_once(Scheduler._form, self, None, running)
        assert same is running
        self.result_queue += [(batch, None)] if batch else []
        while len(self.result_queue) > (self.enable_overlap and batch is not None):
            done, _ = self.result_queue.pop(0)
            self.tree_cache.known += [r.tokens for r in done.reqs] * self.tree_cache.remembers
        return batch.reqs if batch else []

    def _form(self, _, running):
        chosen = self.waiting_queue[: self.room]
        for request in chosen:
            most = request._compute_max_prefix_len(len(request.tokens))
            cached = prefill._cached(request, most, self.tree_cache)
            self.computed += len(request.tokens) - cached
        self.waiting_queue = self.waiting_queue[self.room :]
        extend = SimpleNamespace(is_extend=lambda: True)
        return SimpleNamespace(reqs=chosen, forward_mode=extend) if chosen else None, running


@pytest.fixture(autouse=True)
def sglang(monkeypatch) -> None:
    cache = "sglang.srt.mem_cache"
    params = SimpleNamespace(MatchPrefixParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, f"{cache}.base_prefix_cache", params)
    monkeypatch.setitem(sys.modules, f"{cache}.radix_cache", SimpleNamespace(RadixKey=key))
    monkeypatch.setattr(prefill, "_LEAST", LEAST)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_group_computes_its_prompt_once(overlap: bool) -> None:
    scheduler = Scheduler(overlap)
    scheduler.waiting_queue = group = [Request(PROMPT) for _ in range(8)]
    assert scheduler.step() == group[:1]
    assert scheduler.waiting_queue == group[1:]
    if overlap:
        assert scheduler.step() == []
    assert scheduler.step() == group[1:]
    assert scheduler.computed == 50 + 7  # the last token is always computed


@pytest.mark.parametrize("overlap", [False, True])
def test_late_members_of_a_group_follow_the_one_that_is_being_computed(overlap: bool) -> None:
    scheduler = Scheduler(overlap)
    scheduler.waiting_queue = [Request(PROMPT)]
    scheduler.step()
    scheduler.waiting_queue = [Request(PROMPT), Request(PROMPT)]
    assert len(scheduler.step()) == (0 if overlap else 2)
    assert len(scheduler.step()) == (2 if overlap else 0)
    assert scheduler.computed == 50 + 2


def test_they_follow_a_long_prompt_that_is_computed_in_chunks() -> None:
    scheduler = Scheduler()
    scheduler.chunked_req = Request(PROMPT)
    scheduler.waiting_queue = [Request(PROMPT)]
    assert scheduler.step() == []
    scheduler.chunked_req = None
    scheduler.tree_cache.known = [PROMPT]
    scheduler.step()
    assert scheduler.computed == 1


def test_interrupted_requests_compute_their_prompt_once_more() -> None:
    scheduler = Scheduler()
    group = [Request(PROMPT) for _ in range(4)]
    scheduler.waiting_queue = list(group)
    scheduler.step(), scheduler.step()
    scheduler.tree_cache.known, scheduler.computed = [], 0  # new weights
    for i, request in enumerate(group):
        request.output_ids.extend([100 + i, 7])
    scheduler.waiting_queue = list(group)
    scheduler.step(), scheduler.step()
    assert scheduler.computed == 50 + 4 * 2


def test_a_request_that_is_scored_from_its_first_token_waits_for_nobody() -> None:
    scheduler = Scheduler()
    scheduler.waiting_queue = requests = [Request(PROMPT), Request(PROMPT, logprob_start=0)]
    assert scheduler.step() == requests


def test_a_cache_that_keeps_nothing_delays_a_group_by_one_batch() -> None:
    scheduler = Scheduler(remembers=False)
    scheduler.waiting_queue = [Request(PROMPT) for _ in range(8)]
    assert [len(scheduler.step()) for _ in range(2)] == [1, 7]
    scheduler.tree_cache.disable = True
    scheduler.waiting_queue = [Request(PROMPT) for _ in range(8)]
    assert len(scheduler.step()) == 8


def test_a_batch_is_chosen_from_the_front_of_a_long_queue(monkeypatch) -> None:
    monkeypatch.setattr(prefill, "_WINDOW", 4)
    scheduler = Scheduler()
    queue = [Request(PROMPT) for _ in range(4)] + [Request([i]) for i in range(60, 63)]
    scheduler.waiting_queue = list(queue)
    assert scheduler.step() == queue[:1]
    assert scheduler.waiting_queue == queue[1:]
    scheduler.step()
    assert scheduler.waiting_queue == []  # nobody waits, so the batch takes all


def test_requests_that_a_batch_puts_back_are_last() -> None:
    scheduler, running = Scheduler(), Request([1])
    scheduler.waiting_queue = group = [Request(PROMPT) for _ in range(3)]

    def form(self, *_):
        self.waiting_queue = [running]
        return SimpleNamespace(reqs=group[:1]), None

    prefill.compute_shared_once(form, scheduler, None, SimpleNamespace(batch_is_full=False))
    assert scheduler.waiting_queue == [*group[1:], running]


sequences = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9), max_size=12)


@given(sequences, st.booleans())
def test_waiting_saves_tokens(sequences, overlap: bool) -> None:
    """Each waiting request shares tokens with a request of the batch, and waiting saves work."""
    plain, ours = Scheduler(overlap), Scheduler(overlap)
    plain.waiting_queue = [Request(tokens) for tokens in sequences]
    ours.waiting_queue = queue = [Request(tokens) for tokens in sequences]
    Scheduler._form(plain, None, None)
    served = ours.step()
    for request in ours.waiting_queue:
        assert request.leader in served
        assert common(request.tokens[:-1], request.leader.tokens) >= LEAST
    served += ours.step() + ours.step()
    assert {*map(id, served)} == {*map(id, queue)} and len(served) == len(queue)
    assert ours.computed <= plain.computed


@given(st.lists(sequences, max_size=4), st.booleans(), st.integers(1, 5))
def test_every_request_is_served_once(arrivals, overlap: bool, room: int) -> None:
    scheduler, served, total = Scheduler(overlap, room), [], 0
    for sequences in arrivals:
        scheduler.waiting_queue += [Request(tokens) for tokens in sequences]
        total += len(sequences)
        served += scheduler.step()
    for _ in range(2 * total):
        served += scheduler.step()
    assert len(served) == len({*map(id, served)}) == total and not scheduler.waiting_queue
