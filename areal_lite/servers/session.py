"""A rollout's turns on the servers."""

import bisect
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from areal_lite.data.tokenizer import Tokenizer
from areal_lite.servers.completion import Completion, GenerationChunk, SamplingParams
from areal_lite.servers.fleet import Fleet
from areal_lite.servers.registry import ServerInfo


class RolloutSession:
    """One episode on the servers.

    Its turns go to the server that holds their prefix, as long as that server is ready. A session
    starts with a reservation on `server`. Its attribute `server` is the server of its last
    turn. `rid` is the start of the requests' ids.
    """

    def __init__(
        self,
        fleet: Fleet,
        params: SamplingParams,
        tokenizer: Tokenizer,
        rid: str,
        server: ServerInfo,
    ):
        self._fleet = fleet
        self._params = params
        self._tokenizer = tokenizer
        self._rid = rid
        self.server = server
        self._reserved = True
        self._turns = 0

    async def complete(
        self,
        tokens: np.ndarray,
        max_new_tokens: int | None = None,
        stop: Sequence[str] = (),
        first_route: int = 0,
    ) -> Completion:
        """Sample one turn after `tokens` (int32 [n]). See Episode.complete."""
        # A server knows no text. A stop text of one token ends the sampling; one of several
        # tokens is cut off afterwards, exactly where sampling would have ended.
        encoded = [self._tokenizer.encode(text, add_special_tokens=False) for text in stop]
        single_tokens = tuple(ids[0] for ids in encoded if len(ids) == 1)
        params = self._params
        budget = params.max_new_tokens if max_new_tokens is None else max_new_tokens
        if single_tokens or first_route or budget != params.max_new_tokens:
            params = replace(
                params,
                max_new_tokens=budget,
                stop_token_ids=(*params.stop_token_ids, *single_tokens),
                first_route=first_route,
            )
        rid = f"{self._rid}-{self._turns}"
        self._turns += 1
        completion = await self._fleet.complete(tokens, params, rid, await self._reserve())
        return _cut_at_stop(completion, stop, self._tokenizer) if stop else completion

    async def _reserve(self) -> ServerInfo:
        """Return the server of the next turn, with a reservation on it."""
        if self._reserved:
            self._reserved = False
        else:
            self.server = await self._fleet.reserve(1, [self.server])
        return self.server

    def release(self) -> None:
        """Give back the reservation of a session without a turn."""
        if self._reserved:
            self._reserved = False
            self._fleet.release(self.server)


def _cut_at_stop(completion: Completion, stop: Sequence[str], tokenizer: Tokenizer) -> Completion:
    """Cut `completion` after the token with which its text first contains one of `stop`."""
    tokens = completion.tokens

    def has_stop(count: int) -> bool:
        text = tokenizer.decode(tokens[:count])
        return any(s in text for s in stop)

    if not has_stop(len(tokens)):
        return completion
    end = bisect.bisect_left(range(len(tokens)), True, key=has_stop)
    routes = completion.routes
    chunk = GenerationChunk(
        tokens=tokens[:end],
        logprobs=completion.logprobs[:end],
        versions=completion.versions[:end],
        finish_reason="stop",
        kv_version=min(chunk.kv_version for chunk in completion.chunks),
        routes=None if routes is None else routes[: len(routes) + end - len(tokens)],
    )
    return Completion([chunk], completion.requests, "stop")
