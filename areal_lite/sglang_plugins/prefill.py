"""Compute the beginning that waiting requests share once, inside an SGLang server.

The samples of a group arrive together with one prompt, agents share their instructions, and a push
sends all running requests back to the queue. A request can use the KV cache of an earlier prefill
batch, not that of its own batch. So one request, the leader, goes first, and those that would
compute the same tokens follow when it is computed. SGLang's policy `lpm` only sorts them behind all
others: they join the leader's batch if it has room, and are not sorted in a queue above 128.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from areal_lite.trajectory import shared_length

_LEAST = 32  # tokens that waiting must save: the threshold of SGLang's own policy
_WINDOW = 256  # requests at the front of the queue that a batch is chosen from if some of them wait


def compute_shared_once(
    original: Callable, self: Any, prefill_delayer_single_pass: Any, running_batch: Any
) -> tuple[Any, Any]:
    """Form a prefill batch without the requests whose leader is not computed yet."""
    queue = self.waiting_queue
    waiting = set() if running_batch.batch_is_full else find_followers(self)
    if waiting:
        waiting.update(queue[_WINDOW:])
        self.waiting_queue = [request for request in queue if request not in waiting]
    batch, running_batch = original(self, prefill_delayer_single_pass, running_batch)
    if waiting:
        left = dict.fromkeys(self.waiting_queue)
        self.waiting_queue = [r for r in queue if r in waiting or left.pop(r, r) is None]
        self.waiting_queue += left  # running requests that this batch has put back
    for request in batch.reqs if batch else ():
        vars(request).pop("leader", None)  # it may come back to the queue
    return batch, running_batch


def find_followers(scheduler: Any) -> set[Any]:
    """Return the requests of the queue whose leader is not computed yet.

    A request has one leader at most. With a cache that keeps less than its beginning, such as that
    of recurrent states, a group would otherwise pass one by one.
    """
    waiting = scheduler.waiting_queue[:_WINDOW]
    if scheduler.tree_cache.disable:
        return set()
    computed = [scheduler.chunked_req] if scheduler.chunked_req else []
    if scheduler.enable_overlap:  # the batch before this one is launched, and not processed
        for batch, _ in scheduler.result_queue:
            computed += batch.reqs if batch.forward_mode.is_extend() else ()
    if not all(hasattr(request, "leader") for request in waiting):
        _choose_leaders(waiting, computed, scheduler.tree_cache)
    unfinished = {*waiting, *computed}
    return {request for request in waiting if request.leader in unfinished}


def _choose_leaders(waiting: list[Any], computed: list[Any], tree_cache: Any) -> None:
    """Set `leader` of each new request of `waiting`: who computes its beginning, or None."""
    # Among sorted sequences, the nearest leader before a sequence shares the most tokens with it.
    # The order of arrival decides between equal ones: all ranks of a server must choose alike.
    begun = set(computed)
    sequences = [(_tokens(request), request) for request in (*computed, *waiting)]
    sequences.sort(key=lambda sequence: sequence[0].tobytes())
    leader, shared, previous = None, 0, np.empty(0, np.int64)
    for tokens, request in sequences:
        shared = min(shared, shared_length(previous, tokens))
        if request not in begun and not hasattr(request, "leader"):
            request.leader = None
            usable = min(shared, request._compute_max_prefix_len(len(tokens)))
            if usable >= _LEAST and usable - _cached(request, usable, tree_cache) >= _LEAST:
                request.leader = leader
        if request in begun or request.leader is None:
            leader, shared = request, len(tokens)
        previous = tokens


def _cached(request: Any, most: int, tree_cache: Any) -> int:
    """Return how many of the first `most` tokens of a request the cache has."""
    from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
    from sglang.srt.mem_cache.radix_cache import RadixKey

    tokens, own = request.origin_input_ids + request.output_ids, request.extra_key
    key = RadixKey(tokens, extra_key=own, cache_salt=request.cache_salt, limit=most)
    found = tree_cache.match_prefix(MatchPrefixParams(key=key))
    # SGLang 0.5.21 has the places of the tokens, and 0.5.23 their number.
    places = getattr(found, "device_indices", None)
    return found.device_prefix_len if places is None else len(places)


def _tokens(request: Any) -> np.ndarray:
    return np.frombuffer(request.origin_input_ids + request.output_ids, np.int64)
