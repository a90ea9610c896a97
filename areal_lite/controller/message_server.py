"""TODO docstring."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from areal_lite.controller.messages import (
    ADDRESS_FILE,
    Address,
    Envelope,
    Finish,
    Handler,
    Reply,
    process_namespace,
)
from areal_lite.system.files import write_atomically

log = logging.getLogger(__name__)


class WireServer:
    """The controller's end: answers each request with what `handler` returns, many at a time.

    Whatever goes wrong over a request, its caller hears at once. What is not a ValueError or RuntimeError of the handler, such as an answer
    that cannot be encoded, also ends `serve`, for whoever runs it.
    """

    def __init__(self, run_dir: Path, handler: Handler, host: str = "127.0.0.1"):
        self._handler = handler
        self._token = secrets.token_hex(16)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._pending: set[tuple[bytes, int]] = set()
        self.finished = asyncio.Event()  # `finish` was answered
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self._file = run_dir / ADDRESS_FILE
        write_atomically(
            self._file,
            msgspec.json.encode(
                Address(f"tcp://{host}:{port}", self._token, os.getpid(), process_namespace())
            ),
            private=True,
        )

    async def serve(self) -> None:
        """Runs until cancelled."""
        async with asyncio.TaskGroup() as handlers:
            while True:
                identity, *frames = await self._socket.recv_multipart()
                try:
                    (raw,) = frames
                    envelope = msgspec.msgpack.decode(raw, type=Envelope)
                except (ValueError, msgspec.MsgspecError) as error:
                    log.warning("ignored a message that is not of our protocol: %s", error)
                    continue
                if not secrets.compare_digest(envelope.token.encode(), self._token.encode()):
                    await self._send(
                        identity,
                        Reply(
                            envelope.id, error=f"wrong token: read {ADDRESS_FILE} of this run again"
                        ),
                    )
                    continue
                self._pending.add((identity, envelope.id))
                handlers.create_task(
                    self._answer(identity, envelope), name=f"answer {envelope.request}"
                )

    async def _answer(self, identity: bytes, envelope: Envelope) -> None:
        request, number = envelope.request, envelope.id
        try:
            body, frames = await self._handler(request)
        except (ValueError, RuntimeError) as error:
            await self._refuse(identity, number, str(error))
            return
        except Exception as error:
            await self._refuse(
                identity,
                number,
                f"asked for {request}, the controller failed: {type(error).__name__}: {error}",
            )
            raise
        try:
            await self._send(identity, Reply(number, body=body), frames)
        except Exception as error:  # nothing of it was sent
            await self._refuse(
                identity,
                number,
                f"the controller cannot send {request}: {type(error).__name__}: {error}",
            )
            raise
        self._pending.discard((identity, number))
        if isinstance(request, Finish):
            self.finished.set()

    async def _refuse(self, identity: bytes, number: int, error: str) -> None:
        self._pending.discard((identity, number))
        await self._send(identity, Reply(number, error=error))

    async def _send(self, identity: bytes, reply: Reply, frames: Sequence[Any] = ()) -> None:
        await self._socket.send_multipart(
            [identity, msgspec.msgpack.encode(reply), *frames], copy=False
        )

    async def close(self, error: str | None = None) -> None:
        """Whoever still waits gets `error`; what was sent is delivered (within 5 s)."""
        self._file.unlink(missing_ok=True)
        for identity, request_id in self._pending:
            await self._send(
                identity, Reply(request_id, error=error or "the controller has stopped")
            )
        self._socket.close(linger=5000)
        await asyncio.get_running_loop().run_in_executor(None, self._context.term)


async def run_until(event: asyncio.Event, *coroutines: Coroutine[Any, Any, None]) -> None:
    """Run the coroutines side by side until `event`, then cancel them. If one fails, the others are cancelled and its error is raised, in
    an ExceptionGroup."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(c) for c in coroutines]
        await event.wait()
        for task in running:
            task.cancel()
