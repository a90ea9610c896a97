"""The JSON answers of an SGLang server: checked against what was asked for, and decoded.

A server may be wrong: out of step, broken, or not ours. Nothing in its answers is taken on trust.
The parsers raise for whatever is not exactly the expected answer: mostly ValueError, and whatever
else a decoder raises (RecursionError, OverflowError). `SGLangClient` makes a ServerFailed of it.
"""

from dataclasses import replace
from typing import Annotated, Any

import msgspec
import numpy as np

from areal_lite.routes import ExpertLayout
from areal_lite.servers.completion import GenerationChunk, SamplingParams

# Room for a token's id, twice, its log-prob, and its text escaped as JSON.
_BYTES_PER_TOKEN = 1 << 10
_OTHER_BYTES = 1 << 16
MAX_ANSWER_BYTES = 64 << 20
"""The limit of answers that are no completions, in bytes."""

_Int32 = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
# A float32 that is not infinite. A server may round a log-prob of 0 to a value slightly above.
_Logprob = Annotated[float, msgspec.Meta(ge=-3.4028235e38, le=1e-4)]
_Version = Annotated[str, msgspec.Meta(max_length=20)]


class ServerLoad(msgspec.Struct, frozen=True):
    """Running requests, waiting requests, and the used share of the KV cache of a server."""

    running: _Int32 = msgspec.field(name="num_running_reqs")
    waiting: _Int32 = msgspec.field(name="num_waiting_reqs")
    cache_used: Annotated[float, msgspec.Meta(ge=0, le=2)] = msgspec.field(name="token_usage")


class _Span(msgspec.Struct):
    version: _Version
    start: _Int32
    end: _Int32


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    weight_version: _Version
    output_token_logprobs: list[tuple[_Logprob | None, _Int32, None]] = []
    weight_versions: list[_Span] | None = None
    routed_experts: bytes | None = None  # base64 in JSON


class _Generation(msgspec.Struct):
    output_ids: list[int]
    meta_info: _Meta


class _Loads(msgspec.Struct):
    loads: list[ServerLoad]


class _ModelInfo(msgspec.Struct):
    weight_version: _Version


_GENERATION = msgspec.json.Decoder(_Generation)
_LOADS = msgspec.json.Decoder(_Loads)
_MODEL_INFO = msgspec.json.Decoder(_ModelInfo)
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])


def max_generation_bytes(params: SamplingParams, num_input: int = 0) -> int:
    """Return the number of bytes that an answer to a request with `params` cannot exceed.

    num_input: tokens of the request.
    """
    choices = params.experts.choices if params.experts else 0
    routed = num_input + params.max_new_tokens - params.first_route
    # An expert is an int32, and base64 takes four bytes for three.
    routes = (4 * choices * routed * 4) // 3
    return _OTHER_BYTES + _BYTES_PER_TOKEN * params.max_new_tokens + routes


def parse_generation(raw: bytes, params: SamplingParams, num_input: int = 0) -> GenerationChunk:
    """Decode the answer to POST /generate with `return_logprob` and the sampling of `params`.

    num_input: tokens of the request.
    """
    answer = _GENERATION.decode(raw)
    meta = answer.meta_info
    ids = [token for _, token, _ in meta.output_token_logprobs]
    if answer.output_ids != ids:
        raise ValueError("output_ids differ from the tokens of output_token_logprobs")
    chunk = GenerationChunk(
        tokens=np.array(ids, np.int32),
        # JSON has no NaN: the server sends null.
        logprobs=np.array(
            [np.nan if p is None else p for p, _, _ in meta.output_token_logprobs], np.float32
        ),
        versions=_token_versions(meta),
        finish_reason=meta.finish_reason.type,
    )
    _check_tokens(chunk, params)
    _check_end(chunk, params)
    if params.experts is None or (chunk.finish_reason == "abort" and meta.routed_experts is None):
        return chunk
    count = num_input + len(ids) - 1 - params.first_route
    return replace(chunk, routes=_routes(meta.routed_experts, params.experts, count))


def _routes(numbers: bytes | None, layout: ExpertLayout, count: int) -> np.ndarray:
    """Return the routes of `count` tokens from int32 [count, layers, top_k]. Raises ValueError."""
    if numbers is None:
        raise ValueError("no routed_experts: start the server with --enable-return-routed-experts")
    experts = np.frombuffer(numbers, "<i4")
    if experts.size != count * layout.choices:
        raise ValueError(
            f"{experts.size} routed_experts, not those of {count} tokens in {layout.layers} layers"
            f" of top-{layout.top_k}"
        )
    if experts.size and not 0 <= experts.min() <= experts.max() < layout.experts:
        raise ValueError(f"routed_experts outside of the {layout.experts} experts of a layer")
    shape = (count, layout.layers, layout.top_k)
    routes = np.sort(experts.astype(layout.dtype).reshape(shape), axis=-1)
    if np.count_nonzero(routes[..., 1:] == routes[..., :-1]):
        raise ValueError("routed_experts name an expert twice for a token")
    return routes


def _check_tokens(chunk: GenerationChunk, params: SamplingParams) -> None:
    """Raise ValueError for tokens that were not asked for, or that the model does not have."""
    count = len(chunk.tokens)
    if count > params.max_new_tokens:
        raise ValueError(f"{count} tokens, and at most {params.max_new_tokens} were asked for")
    if count and (largest := chunk.tokens.max()) >= params.vocab_size:
        raise ValueError(f"token {largest} is outside of the vocabulary of {params.vocab_size}")


def _check_end(chunk: GenerationChunk, params: SamplingParams) -> None:
    """Raise ValueError if the finish reason and the tokens contradict each other."""
    count = len(chunk.tokens)
    match chunk.finish_reason:
        case "stop":
            if not count or chunk.tokens[-1] not in params.stop_token_ids:
                raise ValueError(
                    f"stop without an end token: {chunk.tokens[-1:]}, not in "
                    f"{params.stop_token_ids}"
                )
        case "length":
            if count < params.max_new_tokens:
                raise ValueError(
                    f"length after {count} of {params.max_new_tokens} tokens: if the server's "
                    "context is too short for prompt and answer, raise server.context_length"
                )
        case "abort":
            pass
        case other:
            raise ValueError(f"unknown finish reason {other!r:.100}")


def _token_versions(meta: _Meta) -> np.ndarray:
    """Return the weight version of each token, int32 [n]."""
    count = len(meta.output_token_logprobs)
    spans = meta.weight_versions
    if spans is None:
        # Servers before 0.5.19 report one version per request.
        spans = [_Span(meta.weight_version, 0, count)]
    versions = np.empty(count, np.int32)
    end = newest = 0
    for span in spans:
        version = _parse_version(span.version)
        if span.start != end or span.end < span.start or version < newest:
            found = [(s.version, s.start, s.end) for s in spans[:20]]
            raise ValueError(f"weight version spans with a gap, overlap or step back: {found}")
        versions[span.start : span.end] = version
        end, newest = span.end, version
    if end != count:
        raise ValueError(f"{count} log-probs but weight version spans over {end} tokens")
    return versions


def _parse_version(version: str) -> int:
    """Return a server's weight version as a step number below 2**31."""
    # Without isascii, digits of every script would do.
    if not (version.isascii() and version.isdecimal() and int(version) < 2**31):
        raise ValueError(
            f"weight version {version!r} is not a step number:"
            " start the server with --weight-version 0"
        )
    return int(version)


def check_versions(chunk: GenerationChunk, oldest: int, newest: int) -> None:
    """Raise ValueError if a token's version is not in [oldest, newest].

    `oldest` is the version when the request was sent, `newest` the last that was pushed.
    """
    if not len(chunk.versions):
        return
    first, last = int(chunk.versions[0]), int(chunk.versions[-1])  # they never decrease
    if first < oldest or last > newest:
        raise ValueError(
            f"tokens of weight versions {first} to {last}: only {oldest} to {newest} are possible"
        )


def parse_model_info(raw: bytes) -> int:
    """Return the weight version in the answer to GET /model_info."""
    return _parse_version(_MODEL_INFO.decode(raw).weight_version)


def parse_load(raw: bytes) -> ServerLoad:
    """Decode the answer to GET /v1/loads of a server with one data-parallel rank."""
    (load,) = _LOADS.decode(raw).loads
    return load


def parse_server_info(raw: bytes) -> None:
    """Check the answer to GET /server_info, which is any JSON object."""
    _OBJECT.decode(raw)


def parse_reply(raw: bytes) -> Any:
    """Decode the answer to a POST that changes something; None if it is empty."""
    answer = msgspec.json.decode(raw) if raw else None
    if isinstance(answer, dict) and not isinstance(answer.get("success", True), bool):
        raise ValueError(f"success is {answer['success']!r:.100}, neither true nor false")
    return answer
