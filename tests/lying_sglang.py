"""Servers that lie, each in its own way, for tests: a real process that announces all of them.

    python tests/lying_sglang.py RUN_DIR

They begin as honest servers (tests/fake_sglang.py), so that the controller gives them requests.
"""

import argparse
import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

from aiohttp import web

from areal_lite.servers.registry import ServerInfo, announce_server
from areal_lite.system.processes import die_with_parent
from tests.fake_sglang import FakeSGLang

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class LyingSGLang(FakeSGLang):
    """A fake server whose answers to the paths in `lies` are replaced.

    A lie takes the request and the honest handler.
    """

    def __init__(
        self, lies: dict[str, Callable[[web.Request, Handler], Awaitable[web.StreamResponse]]]
    ):
        super().__init__(delay_s=0.001)
        self.lies = lies

    @web.middleware
    async def _perhaps_die(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if lie := self.lies.get(request.path):
            return await lie(request, handler)
        return await handler(request)


def body(content: bytes, status: int = 200, kind: str = "application/json", **headers: str):
    """A lie that answers with `content`."""

    async def lie(request: web.Request, _: Handler) -> web.Response:
        await request.read()
        return web.Response(body=content, status=status, content_type=kind, headers=headers)

    return lie


def as_json(value: object):
    return body(json.dumps(value).encode())


def changed(change: Callable[[dict], object]):
    """A lie that changes the honest answer."""

    async def lie(request: web.Request, handler: Handler) -> web.Response:
        answer = json.loads((await handler(request)).body)
        change(answer)
        return web.json_response(answer)

    return lie


def forever(pause_s: float, data: bytes):
    """A lie that sends `data` again and again."""

    async def lie(request: web.Request, _: Handler) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        try:
            while True:
                await response.write(data)
                await asyncio.sleep(pause_s)
        except ConnectionError:
            return response

    return lie


def _wrong_token(answer: dict) -> None:
    answer["output_ids"][0] = answer["meta_info"]["output_token_logprobs"][0][1] = 10**6


def _wrong_version(answer: dict) -> None:
    for span in answer["meta_info"]["weight_versions"]:
        span["version"] = "99"


LIARS = {
    "token": {"/generate": changed(_wrong_token)},
    "version": {"/generate": changed(_wrong_version)},
    "ids": {"/generate": changed(lambda answer: answer["output_ids"].append(5))},
    "refusal": {"/generate": body(b"{}", 400)},
    "endless": {"/generate": forever(0, b" " * (1 << 16))},
    "deep": {"/generate": body(b"[" * 100_000)},
    "null": {"/generate": body(b"null")},
    "join": {"/model_info": body(b'{"weight_version": 0}')},
    "gone": {"/model_info": body(b"{}", 404)},
    "health": {"/server_info": body(b"[]")},
    "update": {"/update_weights_from_disk": as_json({"success": "perhaps"})},
}


async def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("run_dir", type=Path)
    run_dir = parser.parse_args().run_dir
    for name, lies in LIARS.items():
        url = await LyingSGLang(lies).start()
        info = ServerInfo(name=name, url=url, api_key=None, tensor_parallel=1, pid=os.getpid())
        announce_server(run_dir, info)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
