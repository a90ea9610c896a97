"""The JSON answers of an SGLang server, checked and decoded."""

from typing import Any

import msgspec
import numpy as np

from areal_lite.servers.completion import GenerationChunk


class ServerLoad(msgspec.Struct, frozen=True):
    """Running requests, waiting requests, and the used share of the KV cache of a server."""

    running: int = msgspec.field(name="num_running_reqs")
    waiting: int = msgspec.field(name="num_waiting_reqs")
    cache_used: float = msgspec.field(name="token_usage")


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Finish(msgspec.Struct):
    type: str


class _Meta(msgspec.Struct):
    finish_reason: _Finish
    weight_version: str
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    weight_versions: list[_Span] | None = None


class _Generation(msgspec.Struct):
    meta_info: _Meta


class _Loads(msgspec.Struct):
    loads: list[ServerLoad]


_GENERATION = msgspec.json.Decoder(_Generation)
_LOADS = msgspec.json.Decoder(_Loads)


def parse_generation(raw: bytes) -> GenerationChunk:
    """Decode the answer to POST /generate with `return_logprob`."""
    meta = _GENERATION.decode(raw).meta_info
    logprobs = meta.output_token_logprobs
    if meta.finish_reason.type not in ("stop", "length", "abort"):
        raise ValueError(f"unknown finish reason {meta.finish_reason.type!r}")
    return GenerationChunk(
        tokens=np.array([token for _, token, _ in logprobs], np.int32),
        # JSON has no NaN: the server sends null.
        logprobs=np.array([np.nan if p is None else p for p, _, _ in logprobs], np.float32),
        versions=_token_versions(meta),
        finish_reason=meta.finish_reason.type,
    )


def _token_versions(meta: _Meta) -> np.ndarray:
    """int32 [n]: the weight version of each token."""
    count = len(meta.output_token_logprobs)
    spans = meta.weight_versions
    if spans is None:
        # Servers before 0.5.19 report one version per request.
        spans = [_Span(meta.weight_version, 0, count)]
    versions = np.empty(count, np.int32)
    end = 0
    for span in spans:
        if span.start != end or span.end < span.start:
            found = [(s.version, s.start, s.end) for s in spans]
            raise ValueError(f"weight version spans with a gap or overlap: {found}")
        versions[span.start : span.end] = parse_version(span.version)
        end = span.end
    if end != count:
        raise ValueError(f"{count} log-probs but weight version spans over {end} tokens")
    return versions


def parse_version(version: str) -> int:
    """Return a server's weight version as a step number. Raises ValueError if it is not one."""
    if not version.isdecimal():
        raise ValueError(
            f"weight version {version!r} is not a step number:"
            " start the server with --weight-version 0"
        )
    return int(version)


def parse_load(raw: bytes) -> ServerLoad:
    """Decode the answer to GET /v1/loads of a server with one data-parallel rank."""
    (load,) = _LOADS.decode(raw).loads
    return load
