"""A TCP proxy on loopback whose connections can be cut and delayed."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress

Address = tuple[str, int]
RESET_AT_CLOSE = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards connections. It runs on a thread of its own until `close`.

    Args:
        target: the address to which a connection goes, by the one on which it was accepted.
        host: the address to listen on. Only loopback is served.
    """

    def __init__(self, target: Callable[[Address], Address], host: str = "127.0.0.1"):
        self._target = target
        self._delay_s = 0.0
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="proxy")
        self._thread.start()
        self._server = self._call(asyncio.start_server(self._accept, host, 0))
        self.port: int = self._server.sockets[0].getsockname()[1]

    def cut(self) -> int:
        """Reset every connection; data on its way is lost. Return how many there were."""
        return self._call(self._cut())

    def delay(self, seconds: float) -> None:
        """Let all data take so much longer from now on."""
        self._delay_s = seconds

    def close(self) -> None:
        """Reset every connection, and accept no others. A second call does nothing."""
        if self._loop.is_closed():
            return
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(30)

    async def _close(self) -> None:
        self._server.close()
        await self._cut()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def _cut(self) -> int:
        writers = list(self._writers)
        for writer in writers:
            with suppress(OSError):
                writer.get_extra_info("socket").setsockopt(
                    socket.SOL_SOCKET, socket.SO_LINGER, RESET_AT_CLOSE
                )
            writer.transport.abort()
        return len(writers) // 2

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        accepted_on = writer.get_extra_info("sockname")
        upstream = None
        if accepted_on[0].startswith("127."):
            with suppress(OSError):
                upstream = await asyncio.open_connection(*self._target(accepted_on[:2]))
        if upstream is None:
            writer.transport.abort()
            return
        pair = {writer, upstream[1]}
        self._writers |= pair
        try:
            await asyncio.gather(self._pump(reader, upstream[1]), self._pump(upstream[0], writer))
        finally:
            self._writers -= pair
            for one in pair:
                one.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward what comes, in order, until one side ends or resets the connection."""
        try:
            while data := await reader.read(1 << 16):
                if self._delay_s:
                    await asyncio.sleep(self._delay_s)
                writer.write(data)
                await writer.drain()
            writer.write_eof()
        except OSError:
            writer.transport.abort()  # a process that is killed resets its connections
