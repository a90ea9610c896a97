"""Headless Chromium for tests: one call that loads a page, and a session that uses it."""

import asyncio
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--hide-scrollbars", "--enable-logging=stderr",
)  # fmt: skip


def load(page: Path, profile: Path, *flags: str) -> subprocess.CompletedProcess:
    """Load a page, give its scripts eight seconds of virtual time, and return the output."""
    command = [BROWSER, *_FLAGS, f"--user-data-dir={profile}", "--virtual-time-budget=8000"]
    return subprocess.run(
        [*command, *flags, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )


class Session:
    """A page that is open in a browser, by the DevTools protocol."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse):
        self._socket = socket
        self._calls = 0
        self.errors: list[Any] = []

    async def call(self, method: str, **parameters: Any) -> dict:
        self._calls += 1
        call = self._calls
        await self._socket.send_json({"id": call, "method": method, "params": parameters})
        while (answer := await self._socket.receive_json()).get("id") != call:
            if answer["method"] in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(answer["params"])
        return answer["result"]

    async def value(self, expression: str) -> Any:
        """Evaluate JavaScript."""
        answer = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    async def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            await self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    async def until(self, expression: str) -> None:
        """Wait until JavaScript is true. Raises TimeoutError after 60 seconds."""
        deadline = time.monotonic() + 60
        while not await self.value(expression):
            if time.monotonic() > deadline:
                raise TimeoutError(expression)
            await asyncio.sleep(0.1)


@asynccontextmanager
async def opened(url: str, profile: Path) -> AsyncIterator[Session]:
    """Open `url` in a browser of its own and yield the session when the page has been drawn."""
    process = await asyncio.create_subprocess_exec(
        BROWSER, *_FLAGS, f"--user-data-dir={profile}", "--remote-debugging-port=0", "about:blank",
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr
    try:
        async with aiohttp.ClientSession() as client:
            port = ""
            while not port:
                line = (await process.stderr.readline()).decode()
                port = line.partition("ws://127.0.0.1:")[2].partition("/")[0]
            targets: list[dict] = []
            while not targets:
                async with client.get(f"http://127.0.0.1:{port}/json") as answer:
                    targets = [t for t in await answer.json() if t["type"] == "page"]
            async with client.ws_connect(targets[0]["webSocketDebuggerUrl"], max_msg_size=0) as ws:
                session = Session(ws)
                for domain in ("Runtime", "Log", "Page"):
                    await session.call(f"{domain}.enable")
                await session.call("Page.navigate", url=url)
                await session.until("document.documentElement?.dataset.ready === ''")
                yield session
    finally:
        process.kill()
        await process.wait()


def browse(url: str, profile: Path, use: Callable[[Session], Awaitable[None]]) -> None:
    """Open `url`, run `use` on its session, and check that the page had no errors."""

    async def run() -> None:
        async with opened(url, profile) as session:
            await use(session)
            assert not session.errors

    asyncio.run(run())
