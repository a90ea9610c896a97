"""TODO docstring."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from areal_lite.data.tokenizer import Tokenizer
from areal_lite.servers.completion import Completion, GenerationChunk, SamplingParams
from areal_lite.servers.fleet import Fleet
from areal_lite.servers.registry import ServerInfo


class RolloutSession:
    """A trajectory's place on the servers: its turns go to the server that holds their prefix, as long as that one works.

    It begins with a place reserved on `server`; `release()` gives back one that was never used.
    """

    def __init__(
        self,
        fleet: Fleet,
        params: SamplingParams,
        tokenizer: Tokenizer,
        rid: str,
        server: ServerInfo,
    ):
        self._fleet, self._params, self._tokenizer, self._rid, self._server = (
            fleet,
            params,
            tokenizer,
            rid,
            server,
        )
        self._reserved = True
        self._turns = 0

    async def complete(
        self, tokens: np.ndarray, max_new_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> Completion:
        """See Episode."""
        params = (
            self._params
            if max_new_tokens is None
            else replace(self._params, max_new_tokens=max_new_tokens)
        )
        # A server knows no text: a stop of several tokens is cut off afterwards, exactly where sampling would have ended.
        ids = [self._tokenizer.encode(text, add_special_tokens=False) for text in stop]
        singles = tuple(i[0] for i in ids if len(i) == 1)
        params = replace(params, stop_token_ids=(*params.stop_token_ids, *singles))
        rid = f"{self._rid}-{self._turns}"
        self._turns += 1
        completion = await self._fleet.complete(tokens, params, rid, await self._take())
        return _cut(completion, stop, self._tokenizer) if stop else completion

    async def _take(self) -> ServerInfo:
        if self._reserved:
            self._reserved = False
        else:
            self._server = await self._fleet.reserve(1, [self._server])
        return self._server

    def release(self) -> None:
        if self._reserved:
            self._reserved = False
            self._fleet.router.load[self._server.name] -= 1


def _cut(completion: Completion, stop: Sequence[str], tokenizer: Tokenizer) -> Completion:
    """The completion up to the token with which it first holds one of the texts `stop`."""
    tokens = completion.tokens

    def holds(count: int) -> bool:
        text = tokenizer.decode(tokens[:count])
        return any(s in text for s in stop)

    if not holds(len(tokens)):
        return completion
    end = bisect.bisect_left(range(len(tokens)), True, key=holds)
    kv_version = min(chunk.kv_version for chunk in completion.chunks)
    chunk = GenerationChunk(
        tokens=tokens[:end],
        logprobs=completion.logprobs[:end],
        versions=completion.versions[:end],
        finish_reason="stop",
        kv_version=kv_version,
    )
    return Completion([chunk], completion.requests, "stop")
