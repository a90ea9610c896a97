"""A judge without a model: an HTTP server that answers as a test says."""

import asyncio
import time
from collections.abc import Callable

from aiohttp import web


def said(text: object, tokens: int = 7) -> web.Response:
    choice = {"message": {"role": "assistant", "content": text}}
    return web.json_response({"choices": [choice], "usage": {"total_tokens": tokens}})


class FakeJudge:
    """Answers as a test says, and records requests with their headers and times."""

    def __init__(self, answer: Callable[[int], web.Response], latency_s: float = 0.0):
        self.answer, self.latency_s = answer, latency_s
        self.asked: list[tuple[float, dict, str]] = []
        self.running = self.most = 0

    async def _handle(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append((time.monotonic(), body, request.headers.get("Authorization", "")))
        number = len(self.asked)
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(self.latency_s)
        self.running -= 1
        return self.answer(number)

    async def __aenter__(self) -> "FakeJudge":
        app = web.Application()
        app.router.add_post("/v1/chat/completions", self._handle)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
