"""A fake SGLang server for tests, with a "model" whose tokens prove their position.

Token i is a function of all tokens before it (`next_token`), so a token that is lost, doubled or
made from another prefix shows at once. The behavior was measured on the real server:

* /generate returns log-probs and weight version spans, and there are the pause modes;
* an aborted request runs one more step, and does not check whether that ended the sequence;
* requests that arrive during a pause wait;
* an update without a pause waits for the running requests;
* a server can die at any moment.

    python tests/fake_sglang.py RUN_DIR NAME --delay 0.001

announces itself in RUN_DIR, unless it is given a --port.
"""

import argparse
import asyncio
import base64
import os
import zlib
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from aiohttp import web

from areal_lite.routes import ExpertLayout

EOS = 1


def next_token(prefix: list[int]) -> int:
    """Return the token after `prefix`. About one in 25 is the end token."""
    value = zlib.crc32(np.asarray(prefix, np.int32).tobytes())
    return EOS if value % 25 == 0 else 2 + (value >> 8) % 96


def logprob(prefix: list[int]) -> float:
    return -((zlib.crc32(np.asarray(prefix, np.int32).tobytes()) >> 16) % 1000) / 100 - 0.01


EXPERTS = ExpertLayout(layers=2, experts=300, top_k=2)


def route(prefix: list[int], version: str) -> list[list[int]]:
    """Return the experts in each layer for the last token of `prefix`, under the weights."""
    value = zlib.crc32(np.asarray(prefix, np.int32).tobytes() + version.encode())
    pairs = [(value >> shift) % 150 for shift in (0, 12)]
    return [[150 + expert, expert] for expert in pairs]


def completion(prompt: list[int], max_new_tokens: int) -> list[int]:
    """Return what an uninterrupted request generates."""
    tokens: list[int] = []
    while len(tokens) < max_new_tokens and (not tokens or tokens[-1] != EOS):
        tokens.append(next_token([*prompt, *tokens]))
    return tokens


@dataclass(eq=False)
class _Running:
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict] = field(default_factory=list)
    routes: list[list[list[int]]] = field(default_factory=list)
    routed: bool = False
    aborted: bool = False


class FakeSGLang:
    """The server: `await start()` returns its URL; `await stop()` ends it.

    Args:
        delay_s: seconds per token; at 0 other requests still get their turn.
        weight_version: the version at the start.
        die_at: the path of the request that kills the process.
        vary: completions of one prompt differ, by the request's id up to its last dash.
    """

    def __init__(
        self,
        delay_s: float = 0.0,
        weight_version: str = "0",
        die_at: str | None = None,
        vary: bool = False,
    ):
        self.delay_s, self.weight_version, self.die_at = delay_s, weight_version, die_at
        self.vary = vary
        self.abort_mode = False
        self.requests: list[dict] = []
        self.running: list[_Running] = []
        self._transports: set[asyncio.Transport] = set()
        self._go = asyncio.Event()
        self._go.set()
        app = web.Application(middlewares=[self._perhaps_die])
        app.router.add_get("/health", self._health)
        app.router.add_get("/model_info", self._model_info)
        app.router.add_get("/server_info", self._server_info)
        app.router.add_get("/v1/loads", self._loads)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/pause_generation", self._pause)
        app.router.add_post("/continue_generation", self._continue)
        app.router.add_post("/update_weights_from_disk", self._update)
        app.router.add_post("/abort_request", self._abort)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)

    async def start(self, port: int = 0) -> str:
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def die(self) -> None:
        """Cut every connection where it is, as if killed."""
        for transport in self._transports:
            transport.abort()
        await self.stop()

    @web.middleware
    async def _perhaps_die(self, request: web.Request, handler) -> web.StreamResponse:
        if request.path == self.die_at:
            os._exit(1)
        return await handler(request)

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def _server_info(self, _: web.Request) -> web.Response:
        return web.json_response({"version": "0.5.21"})

    async def _loads(self, _: web.Request) -> web.Response:
        load = {"num_running_reqs": len(self.running), "num_waiting_reqs": 0}
        return web.json_response({"loads": [load]})

    async def _model_info(self, _: web.Request) -> web.Response:
        return web.json_response(
            {"weight_version": self.weight_version, "running": len(self.running)}
        )

    async def _generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        self._transports.add(request.transport)
        await self._go.wait()
        run = _Running(routed=body.get("return_routed_experts", False))
        self.running.append(run)
        try:
            finish = await self._decode(
                run, self._salt(body["rid"]) + body["input_ids"], body["sampling_params"]
            )
        finally:
            self.running.remove(run)
        answer = self._answer(body["rid"], run, finish)
        if run.routed and run.tokens:
            routes = run.routes[body["routed_experts_start_len"] :]
            packed = base64.b64encode(np.array(routes, np.int32).tobytes())
            answer["meta_info"]["routed_experts"] = packed.decode()
        return web.json_response(answer)

    def _salt(self, rid: str) -> list[int]:
        return [zlib.crc32(rid.rpartition("-")[0].encode()) & 0x7FFFFFFF] if self.vary else []

    async def _decode(self, run: _Running, prompt: list[int], params: dict) -> dict:
        while True:
            await asyncio.sleep(self.delay_s)
            if not self.abort_mode:
                await self._go.wait()
            prefix = [*prompt, *run.tokens]
            token = next_token(prefix)
            if run.aborted and not run.tokens:
                return {"type": "abort", "message": "Abort in waiting queue"}
            if run.routed:
                run.routes += [
                    route(prefix[: end + 1], self.weight_version)
                    for end in range(len(run.routes), len(prefix))
                ]
            run.tokens.append(token)
            run.logprobs.append(logprob(prefix))
            if run.aborted:
                return {
                    "type": "abort",
                    "message": "Aborted",
                    "status_code": None,
                    "err_type": None,
                }
            if token in params["stop_token_ids"]:
                return {"type": "stop", "matched": token}
            if len(run.tokens) == params["max_new_tokens"]:
                return {"type": "length", "length": len(run.tokens)}

    def _answer(self, rid: str, run: _Running, finish: dict) -> dict:
        start = run.spans[-1]["end"] if run.spans else 0
        spans = [
            *run.spans,
            {"version": self.weight_version, "start": start, "end": len(run.tokens)},
        ]
        spans = [span for span in spans if span["end"] > span["start"]] or spans[:1]
        meta = {
            "id": rid,
            "finish_reason": finish,
            "weight_version": self.weight_version,
            "weight_versions": spans,
            "output_token_logprobs": [[p, t, None] for p, t in zip(run.logprobs, run.tokens)],
            "completion_tokens": len(run.tokens),
        }
        return {"output_ids": run.tokens, "meta_info": meta}

    async def _pause(self, request: web.Request) -> web.Response:
        mode = (await request.json()).get("mode", "abort")
        self._go.clear()
        self.abort_mode = mode == "abort"
        if self.abort_mode:
            for run in self.running:
                run.aborted = True
            while self.running:
                await asyncio.sleep(0.001)
        return web.json_response({"status": "ok"})

    async def _continue(self, _: web.Request) -> web.Response:
        self.abort_mode = False
        self._go.set()
        return web.json_response({"status": "ok"})

    async def _update(self, request: web.Request) -> web.Response:
        body = await request.json()
        while self._go.is_set() and self.running:
            await asyncio.sleep(0.001)
        for run in self.running:
            start = run.spans[-1]["end"] if run.spans else 0
            if len(run.tokens) > start:
                run.spans.append(
                    {"version": self.weight_version, "start": start, "end": len(run.tokens)}
                )
        self.weight_version = body["weight_version"]
        return web.json_response({"success": True, "message": ""})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        for run in self.running if body.get("abort_all") else []:
            run.aborted = True
        return web.Response()


async def _main() -> None:
    from areal_lite.servers.registry import ServerInfo, announce_server
    from areal_lite.system.processes import die_with_parent

    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("name")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--weight-version", default="0")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--die-at", help="the path of the request that kills it")
    parser.add_argument("--vary", action="store_true", help="completions of the same prompt differ")
    arguments = parser.parse_args()
    server = FakeSGLang(
        arguments.delay,
        arguments.weight_version,
        arguments.die_at,
        arguments.vary,
    )
    url = await server.start(arguments.port)
    if not arguments.port:
        announce_server(
            arguments.run_dir,
            ServerInfo(
                name=arguments.name, url=url, api_key=None, tensor_parallel=1, pid=os.getpid()
            ),
        )
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
