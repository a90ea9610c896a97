"""The HTTP client of SGLang servers, and the errors that calls to servers raise.

`SGLangClient` is the only code that talks HTTP to a server (blocking.py: for threads without an
event loop). A server may be wrong: out of step, broken, or not ours. The parsers raise for anything
but the expected answer, mostly ValueError, and `SGLangClient` makes a ServerFailed of it.

Log-probs are in nats, of softmax(logits / temperature), at temperature 0 (greedy) of
softmax(logits). SGLang does not renormalize them for top-p or top-k, which only evaluations have.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, TypeVar

import aiohttp
import msgspec
import numpy as np

from areal_lite.config.sections import Sampling
from areal_lite.data.tokenizer import Tokenizer
from areal_lite.routes import ExpertLayout
from areal_lite.servers.registry import UNPUSHED, UNTRUSTED, ServerInfo

T = TypeVar("T")
# Room for a token's id, twice, its log-prob, and its text escaped as JSON.
_BYTES_PER_TOKEN = 1 << 10
_OTHER_BYTES = 1 << 16
MAX_ANSWER_BYTES = 64 << 20  # the limit of answers that are no completions, in bytes

_Int32 = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
# A float32 that is not infinite. A server may round a log-prob of 0 to a value slightly above.
_Logprob = Annotated[float, msgspec.Meta(ge=-3.4028235e38, le=1e-4)]
_Version = Annotated[str, msgspec.Meta(max_length=20)]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The parameters with which a completion is sampled."""

    max_new_tokens: int
    temperature: float  # 0 is greedy
    # The token that stops a sequence belongs to the sequence and has a log-probability.
    stop_token_ids: tuple[int, ...]
    vocab_size: int = 2**31  # every token id is below it
    seed: int | None = None  # of the request; None: the server's own
    experts: ExpertLayout | None = None  # of the model, if routes are asked for (routes.py)
    first_route: int = 0  # the first token whose route is asked for
    top_p: float = 1.0
    top_k: int = -1  # all
    evaluates: bool = False  # nobody trains on these tokens
    stop: tuple[str, ...] = ()  # texts that end an answer; a Transcript looks for them

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens={self.max_new_tokens}: must be at least 1")
        if self.temperature < 0:
            raise ValueError(f"temperature={self.temperature}: must be 0 (greedy) or more")


def sampling_params(
    sampling: Sampling, tokenizer: Tokenizer, evaluates: bool = False
) -> SamplingParams:
    """Return the parameters of completions, in training or to evaluate. Raises ValueError."""
    ids = [item for item in sampling.stop if isinstance(item, int)]
    if (largest := max(ids, default=0)) >= tokenizer.vocab_size:
        raise ValueError(f"stop={largest} is not a token id: the model has {tokenizer.vocab_size}")
    return SamplingParams(
        sampling.max_new_tokens,
        sampling.temperature,
        (*tokenizer.eos_ids, *ids),
        tokenizer.vocab_size,
        stop=tuple(item for item in sampling.stop if isinstance(item, str)),
        top_p=sampling.top_p,
        top_k=sampling.top_k or -1,
        evaluates=evaluates,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationChunk:
    """The tokens that one request generated."""

    tokens: np.ndarray  # int32 [n]
    logprobs: np.ndarray  # float32 [n], NaN where the server had none
    versions: np.ndarray  # int32 [n], the weight version that sampled each token
    finish_reason: str  # stop, length or abort
    # The version when the request was sent: the oldest whose cached prefixes it may have used.
    kv_version: int = -1
    # [r, layers, top_k] of the r tokens from `first_route` to the last but one of prompt and
    # answer. None if they were not asked for, or an abort came without them.
    routes: np.ndarray | None = None


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


class _ModelInfo(msgspec.Struct):
    weight_version: _Version


class _Load(msgspec.Struct):
    num_running_reqs: _Int32
    num_waiting_reqs: _Int32


class _Loads(msgspec.Struct):
    loads: list[_Load]  # of each data-parallel rank


_GENERATION = msgspec.json.Decoder(_Generation)
_MODEL_INFO = msgspec.json.Decoder(_ModelInfo)
_LOADS = msgspec.json.Decoder(_Loads)


class ServerError(RuntimeError):
    """A call to `server` did not succeed."""

    def __init__(self, server: ServerInfo, reason: str):
        # The reason may quote the server: no new line in a log, no command for a terminal.
        printable = "".join(c if c.isprintable() else " " for c in reason)
        super().__init__(f"{server}: {printable}")
        self.server = server


class ServerNotReady(ServerError):
    """The server takes no requests now, and nothing is wrong with it."""


class ServerRefused(ServerError):
    """The server rejected the call (status 4xx, or `success: false`), as another one would."""


class ServerFailed(ServerError):
    """The server cannot continue, or gave a wrong answer. Another server can continue."""


class ServerUnreachable(ServerFailed):
    """The server did not answer in time, or not at all."""


class ConnectionLost(ServerUnreachable):
    """The connection broke before the answer. The server may be as healthy as before."""


class ServersFailed(RuntimeError):
    """A collective operation of servers failed because of the servers in `errors`."""

    def __init__(self, errors: list[ServerError]):
        super().__init__("; ".join(str(error) for error in errors))
        self.errors = errors


class SGLangClient:
    """The client of all SGLang servers, over one aiohttp session: close it after use.

    A completion may take any time to begin. Other calls end within `timeout_s`, unless they are
    given another time-out. Calls raise ServerError. An answer has a limited size, comes from the
    server itself (no redirects), and is as it was sent (not compressed).
    """

    def __init__(self, timeout_s: float):
        self._timeout_s = timeout_s
        self._unbounded = aiohttp.ClientTimeout(total=None, sock_connect=timeout_s)
        # uvicorn closes a connection after 5 idle seconds, perhaps just as a request is sent on
        # it. The client closes idle connections earlier.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,  # proxies in the environment are for other traffic
            auto_decompress=False,
            headers={"Accept-Encoding": "identity"},
        )

    async def __aenter__(self) -> SGLangClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._session.close()

    async def generate(
        self,
        server: ServerInfo,
        input_ids: np.ndarray,
        params: SamplingParams,
        rid: str,
        cache_key: str,
    ) -> GenerationChunk:
        """Continue `input_ids` (int32 [n]), with cached prefixes only of the same `cache_key`."""
        body = {
            "rid": rid,
            "input_ids": input_ids.tolist(),
            "sampling_params": {
                "max_new_tokens": params.max_new_tokens,
                "temperature": params.temperature,
                "top_p": params.top_p,
                "top_k": params.top_k,
                "stop_token_ids": params.stop_token_ids,
                "skip_special_tokens": False,
                "sampling_seed": params.seed,
            },
            "return_logprob": True,
            "extra_key": cache_key,
        }
        if params.experts:
            body |= {"return_routed_experts": True, "routed_experts_start_len": params.first_route}
        max_bytes = max_generation_bytes(params, len(input_ids))
        raw = await self._request(server, "/generate", body, self._unbounded, max_bytes)
        parse = partial(parse_generation, params=params, num_input=len(input_ids))
        parsed = partial(_parsed, server, f"/generate ({rid})", raw, parse)
        # Routes are kilobytes for each token: a thread decodes them.
        return await asyncio.to_thread(parsed) if params.experts else parsed()

    async def weight_version(self, server: ServerInfo) -> int:
        return await self._get(server, "/model_info", parse_model_info)

    async def check_reachable(self, server: ServerInfo, timeout_s: float | None = None) -> None:
        """Check that the HTTP process of the server works."""
        await self._get(server, "/health", bytes, timeout_s)

    async def check_health(self, server: ServerInfo) -> None:
        """Check that every part of the server works, busy or idle."""
        # /health and /model_info are answered even when the scheduler hangs. /server_info is the
        # only call without side effects that the scheduler answers between any two steps.
        await self._get(server, "/server_info", parse_server_info)

    async def count_requests(self, server: ServerInfo) -> int:
        """Return how many requests run or wait on the server, as of its latest step."""
        found = await self._get(server, "/v1/loads?include=core", _LOADS.decode)
        return sum(one.num_running_reqs + one.num_waiting_reqs for one in found.loads)

    async def abort_all(self, server: ServerInfo) -> None:
        """End all requests of the server."""
        await self.post(server, "/abort_request", {"abort_all": True})

    async def reset(self, server: ServerInfo) -> None:
        """End all requests of the server, and a push that an earlier trainer left open."""
        await self.abort_all(server)
        with suppress(ServerRefused):  # no push is open
            await self.post(server, "/end_weight_update", {})
        await self.post(server, "/continue_generation", {"torch_empty_cache": False})

    async def post(
        self, server: ServerInfo, path: str, body: dict[str, Any], timeout_s: float | None = None
    ) -> Any:
        """POST `body` as JSON and return the decoded answer (None if it is empty)."""
        raw = await self._request(server, path, body, self._bounded(timeout_s))
        answer = _parsed(server, path, raw, parse_reply)
        if isinstance(answer, dict) and answer.get("success") is False:
            raise ServerRefused(server, f"{path}: {answer.get('message')!s:.500}")
        return answer

    def _bounded(self, timeout_s: float | None) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=timeout_s or self._timeout_s)

    async def _get(
        self,
        server: ServerInfo,
        path: str,
        parse: Callable[[bytes], T],
        timeout_s: float | None = None,
    ) -> T:
        """GET `path`, once more if the connection breaks, and return the parsed answer."""
        timeout = self._bounded(timeout_s)
        try:
            raw = await self._request(server, path, None, timeout)
        except ConnectionLost:
            raw = await self._request(server, path, None, timeout)
        return _parsed(server, path, raw, parse)

    async def _request(
        self,
        server: ServerInfo,
        path: str,
        body: dict[str, Any] | None,
        timeout: aiohttp.ClientTimeout,
        max_bytes: int = MAX_ANSWER_BYTES,
    ) -> bytes:
        """POST `body`, or GET without one, and return the body of a 200."""
        headers = {"Content-Type": "application/json"}
        limit_s = timeout.total or self._timeout_s
        if server.api_key:
            headers["Authorization"] = f"Bearer {server.api_key}"
        try:
            async with self._session.request(
                "GET" if body is None else "POST",
                server.url + path,
                data=None if body is None else msgspec.json.encode(body),
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                if response.content.is_eof():  # most answers come whole: no timer for them
                    raw = await _read(response, max_bytes)
                else:
                    # The rest of an answer that has begun does not depend on the scheduler.
                    async with asyncio.timeout(limit_s):
                        raw = await _read(response, max_bytes)
        except TimeoutError as error:
            reason = f"no answer to {path} within {limit_s:g} s"
            raise ServerUnreachable(server, reason) from error
        except (aiohttp.ClientError, OSError) as error:
            reason = f"{path}: {type(error).__name__} {error}"
            is_down = isinstance(error, aiohttp.ClientConnectorError)
            raise (ServerUnreachable if is_down else ConnectionLost)(server, reason) from error
        except ValueError as error:
            raise ServerFailed(server, f"{path}: {error}") from error
        if response.status == 200:
            return raw
        reason = f"{path} answered {response.status}: {raw.decode(errors='replace')}"
        raise (ServerRefused if 400 <= response.status < 500 else ServerFailed)(server, reason)


async def _read(response: aiohttp.ClientResponse, max_bytes: int) -> bytes:
    """Read a 200, or another answer's start. Raises ValueError if it is too large or no JSON."""
    if response.status != 200:
        return await response.content.read(500)
    chunks: list[bytes] = []
    left = max_bytes
    async for chunk in response.content.iter_any():
        left -= len(chunk)
        if left < 0:
            raise ValueError(f"the answer has more than {max_bytes} bytes")
        chunks.append(chunk)
    # aiohttp's own word for an answer that does not say what it is.
    expected = ("application/json", "application/octet-stream")
    if chunks and response.content_type not in expected:
        raise ValueError(f"the answer is {response.content_type!r:.100}, not JSON")
    return b"".join(chunks)


def _parsed(server: ServerInfo, what: str, raw: bytes, parse: Callable[[bytes], T]) -> T:
    """Return the parsed answer. Raises ServerFailed for whatever is not the expected one."""
    try:
        return parse(raw)
    except Exception as error:  # decoders raise more than ValueError, such as RecursionError
        kind = type(error).__name__
        reason = f"{what}: not the expected answer: {kind}: {error}; it begins with {raw[:200]!r}"
        raise ServerFailed(server, reason) from error


def max_generation_bytes(params: SamplingParams, num_input: int = 0) -> int:
    """Return the largest size of an answer to a request of `num_input` tokens with `params`."""
    choices = params.experts.choices if params.experts else 0
    routed = num_input + params.max_new_tokens - params.first_route
    # An expert is an int32, and base64 takes four bytes for three.
    routes = (4 * choices * routed * 4) // 3
    return _OTHER_BYTES + _BYTES_PER_TOKEN * params.max_new_tokens + routes


def parse_generation(raw: bytes, params: SamplingParams, num_input: int = 0) -> GenerationChunk:
    """Decode the answer to POST /generate, given the parameters and tokens of the request."""
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
    _check(chunk, params)
    if params.experts is None or (chunk.finish_reason == "abort" and meta.routed_experts is None):
        return chunk
    count = num_input + len(ids) - 1 - params.first_route
    return replace(chunk, routes=_routes(meta.routed_experts, params.experts, count))


def _routes(numbers: bytes | None, layout: ExpertLayout, count: int) -> np.ndarray:
    """Return the routes of `count` tokens from int32 [count, dense + layers, top_k].

    Dense layers have none. Raises ValueError.
    """
    if numbers is None:
        raise ValueError("no routed_experts: start the server with --enable-return-routed-experts")
    experts = np.frombuffer(numbers, "<i4")
    shape = (count, layout.dense + layout.layers, layout.top_k)
    if experts.size != math.prod(shape):
        raise ValueError(
            f"{experts.size} routed_experts, not those of {count} tokens in {shape[1]} layers"
            f" of top-{layout.top_k}"
        )
    experts = experts.reshape(shape)[:, layout.dense :]
    if experts.size and not 0 <= experts.min() <= experts.max() < layout.experts:
        raise ValueError(f"routed_experts outside of the {layout.experts} experts of a layer")
    routes = np.sort(experts.astype(layout.dtype), axis=-1)
    if np.count_nonzero(routes[..., 1:] == routes[..., :-1]):
        raise ValueError("routed_experts name an expert twice for a token")
    return routes


def _check(chunk: GenerationChunk, params: SamplingParams) -> None:
    """Raise ValueError for tokens that were not asked for, or that contradict the finish reason."""
    count, end = len(chunk.tokens), chunk.tokens[-1:]
    # An aborted request may have all tokens of its last step, which are several with speculation.
    if count > params.max_new_tokens and chunk.finish_reason != "abort":
        raise ValueError(f"{count} tokens, and at most {params.max_new_tokens} were asked for")
    if count and (largest := chunk.tokens.max()) >= params.vocab_size:
        raise ValueError(f"token {largest} is outside of the vocabulary of {params.vocab_size}")
    if chunk.finish_reason == "stop" and (not count or end[0] not in params.stop_token_ids):
        raise ValueError(f"stop without an end token: {end}, not in {params.stop_token_ids}")
    if chunk.finish_reason == "length" and count < params.max_new_tokens:
        raise ValueError(
            f"length after {count} of {params.max_new_tokens} tokens: if the server's context is "
            "too short for prompt and answer, raise server.args.context_length"
        )
    if chunk.finish_reason not in ("stop", "length", "abort"):
        raise ValueError(f"unknown finish reason {chunk.finish_reason!r:.100}")


def _token_versions(meta: _Meta) -> np.ndarray:
    """Return the weight version of each token, int32 [n]."""
    count = len(meta.output_token_logprobs)
    if (spans := meta.weight_versions) is None:
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


def parse_model_info(raw: bytes) -> int:
    """Return the weight version in the answer to GET /model_info; UNTRUSTED before a push."""
    version = _MODEL_INFO.decode(raw).weight_version
    return UNTRUSTED if version == UNPUSHED else _parse_version(version)


parse_server_info = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
"""Checks the answer to GET /server_info, which is any JSON object."""


def parse_reply(raw: bytes) -> Any:
    """Decode the answer to a POST that changes something; None if it is empty."""
    answer = msgspec.json.decode(raw) if raw else None
    if isinstance(answer, dict) and not isinstance(answer.get("success", True), bool):
        raise ValueError(f"success is {answer['success']!r:.100}, neither true nor false")
    return answer
