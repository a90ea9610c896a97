"""Generation that survives interruption: one completion out of as many requests as it takes.

After an abort (a push in mode `abort`) and after the failure of a server, the prompt and the
tokens so far are sent again with the rest of the budget, until the sequence has really ended. In
the modes `in_place` and `retract` the server itself continues the request under the new weights.
Either way each token carries the version that the *server* reports for it
(`meta_info.weight_versions`, SGLang >= 0.5.19) and its log-probability under that version.

A token's route is that of the forward pass that sampled the next token. When a request is sent
again, the server computes its prefix once more, perhaps with newer weights and other routes. Only
the routes of tokens after the known ones are asked for. A request that was aborted in the queue
brings none: the next one asks for those, too.

Log-probs are in nats, of softmax(logits / temperature), at temperature 0 (greedy) of
softmax(logits). SGLang does not renormalize them for top-p or top-k, so those are not offered:
the log-probs would be of another distribution than the one sampled from.
"""

from dataclasses import replace

import numpy as np

from areal_lite.servers.client import ServerFailed
from areal_lite.servers.completion import Completion, GenerationChunk, SamplingParams
from areal_lite.servers.registry import ServerInfo
from areal_lite.servers.requests import RequestGate


async def generate(
    gate: RequestGate,
    server: ServerInfo,
    prompt: np.ndarray,
    params: SamplingParams,
    rid: str,
    completion: Completion,
) -> None:
    """Continue `completion` on `server` until it ends.

    A paused server holds requests, so sending again after an abort does not spin. A late abort
    without a token may come once after an interruption is over. A second one in a row is a
    failure.

    Args:
        prompt: int32 [n].
        params: the budget counts from the start of the completion.
        rid: the start of the requests' ids.
        completion: after an exception it holds what is known by then: call again with another
            server.
    """
    empty_aborts = 0
    while completion.finish_reason == "abort":
        sequence, left = prompt, params
        if completion.chunks:
            sequence, left = _rest(prompt, params, completion)
        completion.requests += 1
        chunk = await gate.send(server, sequence, left, f"{rid}-{completion.requests}")
        if len(chunk.tokens):
            completion.chunks.append(chunk)
        completion.finish_reason = _true_finish_reason(chunk, left)
        empty_aborts = empty_aborts + 1 if gate.is_open and not len(chunk.tokens) else 0
        if empty_aborts > 1:
            raise ServerFailed(
                server, "aborts requests before their first token although nothing is interrupted"
            )


def _rest(
    prompt: np.ndarray, params: SamplingParams, completion: Completion
) -> tuple[np.ndarray, SamplingParams]:
    """Return the tokens so far, prompt included, and the parameters of what is left to sample."""
    tokens, routes = completion.tokens, completion.routes
    left = replace(
        params,
        max_new_tokens=params.max_new_tokens - len(tokens),
        first_route=params.first_route + (0 if routes is None else len(routes)),
    )
    return np.concatenate([prompt, tokens]), left


def _true_finish_reason(chunk: GenerationChunk, params: SamplingParams) -> str:
    # An aborted request runs one more decoding step. The server does not check whether that step
    # ended the sequence.
    if chunk.finish_reason == "abort" and len(chunk.tokens):
        if chunk.tokens[-1] in params.stop_token_ids:
            return "stop"
        if len(chunk.tokens) == params.max_new_tokens:
            return "length"
    return chunk.finish_reason
