"""The connections of an HTTP server: a limited number, and none without a request.

aiohttp ends a connection that is idle after a request. It keeps one for ever whose first request
does not begin, or begins and does not continue. Here such a connection ends, too, and the number of
all connections is at most half of the descriptors that this process may open.
"""

import asyncio
import resource
import time

from aiohttp import web
from aiohttp.typedefs import Handler

# Between two requests of a connection, and for the headers of one.
_IDLE_S = 15.0
_CHECK_S = 1.0


class Connections:
    """Serves an aiohttp application, and ends connections without a request."""

    def __init__(self, app: web.Application, idle_s: float = _IDLE_S):
        self._idle_s = idle_s
        app.middlewares.append(self._mark_busy)
        self._runner = web.AppRunner(
            app, access_log=None, shutdown_timeout=1.0, auto_decompress=False
        )
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._most = soft // 2
        # The transports of running requests, and when the others became idle.
        self._busy: set[asyncio.Transport | None] = set()
        self._idle_since: dict[asyncio.Transport | None, float] = {}

    async def listen(self, host: str, port: int) -> int:
        """Serve, and return the port (a free one for 0)."""
        await self._runner.setup()
        self._listener = await asyncio.get_running_loop().create_server(
            self._accept, host, port, backlog=self._most
        )
        self._watching = asyncio.create_task(self._watch())
        return self._listener.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self._watching.cancel()
        self._listener.close()
        await self._runner.cleanup()

    def _accept(self) -> asyncio.BaseProtocol:
        server = self._runner.server
        assert server is not None
        return server() if len(server.connections) < self._most else _Refused()

    @web.middleware
    async def _mark_busy(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        transport = request.transport
        self._busy.add(transport)
        try:
            return await handler(request)
        finally:
            self._busy.discard(transport)
            self._idle_since[transport] = time.monotonic()

    async def _watch(self) -> None:
        """End idle connections. Runs until cancelled."""
        while True:
            await asyncio.sleep(min(_CHECK_S, self._idle_s))
            now = time.monotonic()
            server = self._runner.server
            assert server is not None
            idle = {connection.transport for connection in server.connections} - self._busy
            self._idle_since = {t: self._idle_since.get(t, now) for t in idle}
            for transport, since in self._idle_since.items():
                if now - since > self._idle_s and transport is not None:
                    transport.abort()


class _Refused(asyncio.Protocol):
    """A connection beyond the limit."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport.close()
