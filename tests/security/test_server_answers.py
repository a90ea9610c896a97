"""A server that lies, stalls or sends rubbish is left out; the others and the run go on."""

import asyncio
import base64
import contextlib
import gzip
import json
import os
import random
import resource
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import numpy as np
import pytest
from aiohttp import web

from areal_lite.routes import ExpertLayout
from areal_lite.servers.client import (
    ConnectionLost,
    SamplingParams,
    ServerError,
    ServerFailed,
    ServerRefused,
    ServerUnreachable,
    SGLangClient,
    parse_generation,
)
from areal_lite.servers.fleet import Fleet, Session
from areal_lite.servers.registry import ServerInfo
from tests.fake_sglang import EOS, FakeSGLang
from tests.lying_sglang import LyingSGLang, as_json, body, forever
from tests.security.mutation import mutated

PROMPT = np.array([5, 6, 7], np.int32)
PARAMS = SamplingParams(4, 1.0, (EOS,), vocab_size=98)
DEEP = b"[" * 100_000


def generation(tokens=(5, EOS), finish="stop", version="0", spans=None, **changes) -> dict:
    """An answer as a real server gives it, with `changes` of its meta information."""
    meta = {
        "id": "r",
        "finish_reason": {"type": finish},
        "weight_version": version,
        "weight_versions": spans or [{"version": version, "start": 0, "end": len(tokens)}],
        "output_token_logprobs": [[-0.5, token, None] for token in tokens],
        "completion_tokens": len(tokens),
    }
    return {"output_ids": list(tokens), "meta_info": meta | changes}


def span(version: str, start: int, end: int) -> dict:
    return {"version": version, "start": start, "end": end}


def logprobs(*values: object) -> dict:
    """Log-probs of the tokens before the end token."""
    return {"output_token_logprobs": [*([value, 5, None] for value in values), [-1.0, EOS, None]]}


HONEST = {
    "stop": generation(),
    "length": generation((5, 5, 5, 5), "length"),
    "an abort without tokens": generation((), "abort", spans=[span("0", 0, 0)]),
    "a log-prob that JSON cannot carry": generation(**logprobs(None)),
    "two versions": generation(spans=[span("0", 0, 1), span("3", 1, 2)]),
    "no spans": generation(weight_versions=None),
    "new fields": {**generation(e2e_latency=0.1, cached=[1, {"a": None}]), "text": "x"},
}

LIES = {
    "a token outside of the vocabulary": generation((98, EOS)),
    "a token that no model has": generation((10**9, EOS)),
    "a negative token": generation((-7, EOS)),
    "a token of 2**31": generation((2**31, EOS)),
    "a token of 2**70": generation((2**70, EOS)),
    "half a token": generation((1.5, EOS)),
    "a token as text": generation(("5", EOS)),
    "more tokens than asked for": generation((5,) * 50, "length"),
    "stop without an end token": generation((5, 6)),
    "stop without a token": generation(()),
    "length while short": generation((5, 6), "length"),
    "an unknown end": generation(finish="tired"),
    "no end": generation(finish_reason=None),
    "other ids": {**generation(), "output_ids": [9, 9]},
    "no ids": {"meta_info": generation()["meta_info"]},
    "ids of null": {**generation(), "output_ids": None},
    "a log-prob above zero": generation(**logprobs(5.0)),
    "a log-prob that is infinite as float32": generation(**logprobs(-1e39)),
    "a log-prob as text": generation(**logprobs("x")),
    "a log-prob of true": generation(**logprobs(True)),
    "a version of 2**31": generation(version=str(2**31)),
    "a version of 2**40": generation(version=str(2**40)),
    "a version below zero": generation(version="-1"),
    "a version of nothing": generation(version=""),
    "a version with a space": generation(version=" 0"),
    "a version with an underscore": generation(version="0_0"),
    "an Arabic version": generation(version="\u0663"),
    "a superscript version": generation(version="\u00b2"),
    "a version with 5000 digits": generation(version="0" * 5000),
    "a version that was never pushed": generation(version="99"),
    "a version as number": generation(version=0),
    "versions that go backwards": generation(spans=[span("3", 0, 1), span("0", 1, 2)]),
    "spans with a gap": generation(spans=[span("0", 0, 0), span("0", 1, 2)]),
    "spans that overlap": generation(spans=[span("0", 0, 2), span("0", 1, 2)]),
    "spans over too much": generation(spans=[span("0", 0, 7)]),
    "spans over too little": generation(spans=[span("0", 0, 1)]),
    "a negative span": generation(spans=[span("0", 0, -1)]),
    "a span of 2**62": generation(spans=[span("0", 0, 2**62)]),
    "null": None,
    "a list": [],
    "a number": 7,
    "a text": "stop",
    "nothing": {},
    "no meta": {"output_ids": []},
}

BODIES = {
    "empty": b"",
    "HTML": b"<html>",
    "deep": DEEP,
    "deep in an unknown field": b'{"x": ' + DEEP + b"]" * 100_000 + b"}",
    "NaN": json.dumps(generation(**logprobs(float("nan")))).encode(),
    "infinity": json.dumps(generation(**logprobs(-1))).replace("-1,", "-1e400,").encode(),
    "not UTF-8": json.dumps(generation(finish="\u00e9")).encode("latin-1", "replace"),
    "half": json.dumps(generation()).encode()[:-9],
    "two answers": 2 * json.dumps(generation()).encode(),
    "a number of 5000 digits": b'{"output_ids": [' + b"9" * 5000 + b"]}",
}


@contextlib.asynccontextmanager
async def server_of(liar: FakeSGLang, name: str = "liar") -> AsyncIterator[ServerInfo]:
    url = await liar.start()
    try:
        yield ServerInfo(name=name, url=url, api_key="k", tensor_parallel=1, pid=os.getpid())
    finally:
        await liar.stop()


async def ask(client: SGLangClient, server: ServerInfo, params: SamplingParams = PARAMS):
    return await client.generate(server, PROMPT, params, "r", "0")


def with_liar(test: Callable, timeout_s: float = 5.0) -> None:
    async def main() -> None:
        liar = LyingSGLang({})
        async with server_of(liar) as server, SGLangClient(timeout_s) as client:
            await test(liar, server, client)

    asyncio.run(main())


@pytest.mark.parametrize("case", HONEST)
def test_what_a_real_server_answers_is_accepted(case: str) -> None:
    async def test(liar, server, client) -> None:
        liar.lies = {"/generate": as_json(HONEST[case])}
        chunk = await ask(client, server)
        assert chunk.tokens.tolist() == HONEST[case]["output_ids"]

    with_liar(test)


def test_every_lie_about_a_completion_is_the_servers_failure() -> None:
    async def test(liar, server, client) -> None:
        bodies = {**{k: json.dumps(v).encode() for k, v in LIES.items()}, **BODIES}
        # The parser does not know what was pushed; the next test asks the fleet.
        del bodies["a version that was never pushed"]
        for case, content in bodies.items():
            liar.lies = {"/generate": body(content)}
            with pytest.raises(ServerFailed, match="server liar .*") as failed:
                await ask(client, server)
            assert type(failed.value) is ServerFailed and len(str(failed.value)) < 4000, case

    with_liar(test)


def failing_transports() -> dict[str, tuple[object, type[ServerError]]]:
    async def cut(request: web.Request, _) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(b"{")
        request.transport.abort()
        return response

    good = json.dumps(generation()).encode()
    return {
        "500": (body(good, 500), ServerFailed),
        "201": (body(good, 201), ServerFailed),
        "a redirect": (body(b"", 307, Location="/model_info"), ServerFailed),
        "404": (body(b"x" * 10**6, 404), ServerRefused),
        "HTML": (body(good, kind="text/html"), ServerFailed),
        "compressed": (body(gzip.compress(good), **{"Content-Encoding": "gzip"}), ServerFailed),
        "cut": (cut, ConnectionLost),
    }


def test_transports_that_fail() -> None:
    async def test(liar, server, client) -> None:
        for case, (lie, error) in failing_transports().items():
            for path, call in (("/generate", ask), ("/model_info", SGLangClient.weight_version)):
                liar.lies = {path: lie}
                with pytest.raises(error) as failed:
                    await call(client, server)
                assert type(failed.value) is error and len(str(failed.value)) < 4000, case

    with_liar(test)


def test_an_answer_that_never_ends_takes_neither_memory_nor_time() -> None:
    async def test(liar, server, client) -> None:
        before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        liar.lies = {"/generate": forever(0, b" " * (1 << 16))}
        with pytest.raises(ServerFailed, match="more than 69632 bytes"):
            await ask(client, server)
        with pytest.raises(ServerFailed, match="more than 67108864 bytes"):
            await client.post(server, "/generate", {}, timeout_s=20)
        liar.lies = {path: forever(0.02, b" ") for path in ("/generate", "/server_info")}
        with pytest.raises(ServerUnreachable, match="no answer to /generate within 1 s"):
            await ask(client, server)
        with pytest.raises(ServerUnreachable, match="no answer to /server_info within 1 s"):
            await client.check_health(server)
        assert time.monotonic() - started < 10
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10

    with_liar(test, timeout_s=1.0)


def test_the_limit_has_room_for_the_longest_honest_answer() -> None:
    async def test(liar, server, client) -> None:
        params = SamplingParams(2000, 1.0, (EOS,))
        tokens = [2**31 - 1] * 2000
        answer = generation(tokens, "length", spans=[span("0", i, i + 1) for i in range(2000)])
        answer["meta_info"]["output_token_logprobs"] = [
            [-0.12345678901234567, t, None] for t in tokens
        ]
        answer["text"] = 2000 * 60 * "\u0001"
        liar.lies = {"/generate": as_json(answer)}
        assert len((await ask(client, server, params)).tokens) == 2000

    with_liar(test)


def test_a_server_writes_no_line_of_its_own_into_the_log() -> None:
    async def test(liar, server, client) -> None:
        liar.lies = {"/generate": body(b"no\n2026-01-01 INFO all is well\x1b[2J", 500)}
        with pytest.raises(ServerFailed, match="no 2026-01-01 INFO all is well") as failed:
            await ask(client, server)
        assert str(failed.value).isprintable()

    with_liar(test)


JOINS = [
    b'{"weight_version": 0}',
    b'{"weight_version": null}',
    b'{"weight_version": "default"}',
    b'{"weight_version": "\xc2\xb2"}',
    b'{"weight_version": "\xd9\xa3"}',
    b'{"weight_version": "-1"}',
    b'{"weight_version": "Unpushed"}',
    b'{"weight_version": "99999999999999999999"}',
    b"{}",
    b"[]",
    b"null",
    b"xx",
    b'"xx"',
    b"",
    b"\xff",
    DEEP,
]
FLEET_LIES = [
    *({"/model_info": body(content)} for content in JOINS),
    {"/model_info": body(b"{}", 404)},
    {"/model_info": body(b"{}", 401)},
    {"/server_info": body(b"[]")},
    {"/server_info": body(b"", 403)},
    {"/server_info": body(DEEP)},
    {"/generate": body(b"{}", 400)},
    {"/generate": body(b"{}", 429)},
    *({"/generate": as_json(LIES[case])} for case in ("null", "a version that was never pushed")),
]


@pytest.mark.parametrize("lies", FLEET_LIES, ids=range(len(FLEET_LIES)))
def test_the_fleet_leaves_the_liar_out_and_goes_on(lies: dict) -> None:
    async def main() -> None:
        unhealthy: list[str] = []
        async with (
            server_of(LyingSGLang(lies), "a-liar") as liar,
            server_of(FakeSGLang(), "honest") as honest,
            SGLangClient(5) as client,
        ):
            fleet = Fleet(
                client,
                lambda: [liar, honest],
                lambda: None,
                lambda server, reason: unhealthy.append(server.name),
                health_interval_s=0.01,
            )
            watching = asyncio.create_task(fleet.watch())
            async with asyncio.timeout(10):
                for number in range(3):
                    server = await fleet.reserve()
                    done = await fleet.complete(Session(str(number), server), PROMPT, PARAMS)
                    assert done.finish_reason in ("stop", "length")
                while not unhealthy:
                    await asyncio.sleep(0.01)
            assert unhealthy == ["a-liar"] and fleet.router.ready == {"honest"}
            assert not watching.done() and not any(fleet.router.load.values())
            watching.cancel()

    asyncio.run(main())


def test_what_every_server_refuses_is_no_failure_of_theirs() -> None:
    async def main() -> None:
        unhealthy: list[str] = []
        lies = {"/generate": body(b'{"error": "too long"}', 400)}
        async with (
            server_of(LyingSGLang(lies), "a") as first,
            server_of(LyingSGLang(lies), "b") as second,
            SGLangClient(5) as client,
        ):
            fleet = Fleet(
                client,
                lambda: [first, second],
                lambda: None,
                lambda server, reason: unhealthy.append(server.name),
            )
            watching = asyncio.create_task(fleet.watch())
            with pytest.raises(ServerRefused, match="too long"):
                await fleet.complete(Session("0", await fleet.reserve()), PROMPT, PARAMS)
            assert not unhealthy and not any(fleet.router.load.values())
            watching.cancel()

    asyncio.run(main())


WORDS = [b"null", b"[[[", b"1e999", b"-", b'"', b"{}", b"\xff", b"9", b"9" * 400, b"9" * 5000]
WORDS += [b"[" * 10, b"[" * 2000, b"[" * 100_000]


def fuzz(cases: int, seed: int) -> None:
    """Each mutated answer is a ServerFailed, or a chunk that keeps every promise."""
    from areal_lite.servers import client
    from areal_lite.servers.client import (
        parse_model_info,
        parse_reply,
        parse_server_info,
    )

    rng = random.Random(seed)
    server = ServerInfo(name="s", url="u", api_key=None, tensor_parallel=1, pid=1)
    honest = [json.dumps(answer).encode() for answer in HONEST.values()]
    others = [
        (parse_model_info, b'{"weight_version": "12", "model": "x"}'),
        (parse_server_info, b'{"version": "0.5.21", "internal": [{"a": 1}]}'),
        (parse_reply, b'{"success": true, "message": ""}'),
    ]
    slowest, accepted = 0.0, 0
    for _ in range(cases):
        parse, raw = rng.choice([*others, *((None, raw) for raw in honest)])
        raw = mutated(rng, raw, WORDS)
        started = time.perf_counter()
        with contextlib.suppress(ServerFailed):
            if parse:
                client._parsed(server, "x", raw, parse)
            else:
                chunk = client._parsed(server, "x", raw, lambda r: parse_generation(r, PARAMS))
                assert_promises(chunk)
                accepted += 1
        slowest = max(slowest, time.perf_counter() - started)
    assert accepted and slowest < 2


def assert_promises(chunk) -> None:
    count = len(chunk.tokens)
    assert count == len(chunk.logprobs) == len(chunk.versions)
    assert count <= PARAMS.max_new_tokens or chunk.finish_reason == "abort"
    assert all(0 <= token < PARAMS.vocab_size for token in chunk.tokens.tolist())
    assert not np.isinf(chunk.logprobs).any() and not (chunk.logprobs > 1e-3).any()
    assert (chunk.versions >= 0).all() and (np.diff(chunk.versions) >= 0).all()
    assert chunk.finish_reason in ("stop", "length", "abort")
    assert chunk.finish_reason != "stop" or chunk.tokens[-1] == EOS
    assert chunk.finish_reason != "length" or count == PARAMS.max_new_tokens


ROUTED = replace(PARAMS, experts=ExpertLayout(layers=1, experts=4, top_k=2), first_route=1)


def routed(*experts: int, finish: str = "stop", **changes) -> bytes:
    packed = base64.b64encode(np.array(experts, np.int32).tobytes()).decode()
    return json.dumps(generation(finish=finish, **({"routed_experts": packed} | changes))).encode()


def test_routes_are_of_the_tokens_that_were_asked_for() -> None:
    chunk = parse_generation(routed(0, 3, 2, 1, 3, 2), ROUTED, num_input=3)
    assert chunk.routes.tolist() == [[[0, 3]], [[1, 2]], [[2, 3]]]
    assert chunk.routes.dtype == np.uint8
    without = json.dumps(generation(finish="abort")).encode()
    assert parse_generation(without, ROUTED, num_input=3).routes is None


@pytest.mark.parametrize(
    "lie",
    [
        json.dumps(generation()).encode(),
        routed(),
        routed(0, 3, 2, 1),
        routed(0, 3, 2, 1, 3, 2, 0, 1),
        routed(0, 3, 2, 1, 3, 4),
        routed(0, 3, 2, 1, 3, -1),
        routed(0, 3, 2, 1, 3, 3),
        routed(0, 3, 2, 1, finish="abort"),
        routed(routed_experts="AAAA"),
        routed(routed_experts="?"),
        routed(routed_experts=[0, 3, 2, 1, 3, 2]),
    ],
)
def test_other_routes_are_refused(lie: bytes) -> None:
    with pytest.raises(ValueError, match="rout|buffer|base64"):
        parse_generation(lie, ROUTED, num_input=3)


def test_mutated_answers() -> None:
    fuzz(6_000, seed=1)


@pytest.mark.slow
def test_many_mutated_answers() -> None:
    for seed in range(2, 52):
        fuzz(6_000, seed)
