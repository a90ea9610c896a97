"""Generation that survives interruption: one completion out of as many requests as it takes.

A request ends with `stop`, `length` or `abort`. After an abort (a weight push in mode `abort`) and after the failure of a server, prompt
and tokens so far are sent again with what is left of the budget, until the sequence has really ended. In modes `in_place` and `retract`
the server keeps the request and goes on under the new weights by itself. Either way each token carries the version that the *server* says
it was sampled from (`meta_info.weight_versions`, SGLang >= 0.5.19), and the log-probability under that version.

Log-probs are of the distribution softmax(logits / temperature), in nats: what SGLang reports at any temperature. It does not renormalise
them for top-p or top-k, so those are not offered: their log-probs would be of another distribution than the one sampled from.
At temperature 0 (greedy) they are those of softmax(logits).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import numpy as np

from areal_lite.servers.client import ServerFailed
from areal_lite.servers.completion import Completion, GenerationChunk, SamplingParams
from areal_lite.servers.registry import ServerInfo

Request = Callable[[ServerInfo, np.ndarray, SamplingParams, str], Awaitable[GenerationChunk]]


async def generate(
    request: Request,
    server: ServerInfo,
    prompt: np.ndarray,
    params: SamplingParams,
    rid: str,
    so_far: Completion,
    resume: asyncio.Event,
) -> Completion:
    """Continue `so_far` on `server` to its end, and return it. On ServerFailed it holds what is known: call again with another server.

    Nothing is sent while `resume` is clear. A paused server holds requests by itself, so sending again after an abort cannot spin. An
    abort without a token while nothing is interrupted may come once, late, from an interruption that is over; a second one in a row is a
    failure.
    """
    barren = 0
    while so_far.finish_reason == "abort":
        while (
            not resume.is_set()
        ):  # again: it may have been cleared between our being woken and our turn
            await resume.wait()
        tokens = so_far.tokens
        left = SamplingParams(
            params.max_new_tokens - len(tokens), params.temperature, params.stop_token_ids
        )
        so_far.requests += 1
        chunk = await request(
            server, np.concatenate([prompt, tokens]), left, f"{rid}-{so_far.requests}"
        )
        if len(chunk.tokens):
            so_far.chunks.append(chunk)
        so_far.finish_reason = _true_finish(chunk, params.stop_token_ids, left.max_new_tokens)
        barren = barren + 1 if resume.is_set() and not len(chunk.tokens) else 0
        if barren > 1:
            raise ServerFailed(
                server, "aborts requests before their first token although nothing is interrupted"
            )
    return so_far


def _true_finish(chunk: GenerationChunk, stop_token_ids: tuple[int, ...], budget: int) -> str:
    """An aborted request runs one more decoding step, and the server does not look whether that one ended the sequence."""
    if chunk.finish_reason == "abort" and len(chunk.tokens):
        if chunk.tokens[-1] in stop_token_ids:
            return "stop"
        if len(chunk.tokens) == budget:
            return "length"
    return chunk.finish_reason
