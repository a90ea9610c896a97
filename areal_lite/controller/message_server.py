"""The controller's message server: receives requests, calls the handler, sends the replies."""

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
    Address,
    Envelope,
    Failed,
    Finish,
    Handler,
    Reply,
    Response,
    process_namespace,
)
from areal_lite.run_dir.paths import CONTROLLER_FILE
from areal_lite.system.files import write_atomically

log = logging.getLogger(__name__)

_LINGER_MS = 5000


class MessageServer:
    """Answers each request with what `handler` returns; many requests run at the same time.

    * The caller hears of every error at once.
    * A ValueError or RuntimeError of the handler only fails its request.
    * Any other error also ends `serve`, for example a response that cannot be encoded.
    """

    def __init__(self, run_dir: Path, handler: Handler, host: str = "127.0.0.1"):
        self._handler = handler
        self._token = secrets.token_hex(16)
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        # (client, request id) of the requests without a reply
        self._pending: set[tuple[bytes, int]] = set()
        # set once `Finish` was answered
        self.finished = asyncio.Event()
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self._file = run_dir / CONTROLLER_FILE
        address = Address(
            url=f"tcp://{host}:{port}",
            token=self._token,
            pid=os.getpid(),
            namespace=process_namespace(),
        )
        write_atomically(self._file, msgspec.json.encode(address), private=True)

    async def serve(self) -> None:
        """Receive requests and start a task for each. Runs until cancelled."""
        async with asyncio.TaskGroup() as handlers:
            while True:
                client, *frames = await self._socket.recv_multipart()
                envelope = _decode(frames)
                if envelope is None:
                    continue
                if not secrets.compare_digest(envelope.token.encode(), self._token.encode()):
                    error = f"wrong token: read {CONTROLLER_FILE} of this run again"
                    await self._send(client, envelope.id, Failed(error))
                    continue
                self._pending.add((client, envelope.id))
                handlers.create_task(
                    self._answer(client, envelope), name=f"answer {envelope.request}"
                )

    async def _answer(self, client: bytes, envelope: Envelope) -> None:
        """Handle one request and send its reply. Raises errors that must end the server."""
        request, number = envelope.request, envelope.id
        try:
            response, frames = await self._handler(request)
        except (ValueError, RuntimeError) as error:
            await self._refuse(client, number, str(error))
            return
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            await self._refuse(
                client, number, f"asked for {request}, the controller failed: {reason}"
            )
            raise
        try:
            await self._send(client, number, response, frames)
        except Exception as error:  # raised while encoding: nothing was sent
            reason = f"{type(error).__name__}: {error}"
            await self._refuse(client, number, f"the controller cannot send {request}: {reason}")
            raise
        self._pending.discard((client, number))
        if isinstance(request, Finish):
            self.finished.set()

    async def _refuse(self, client: bytes, number: int, error: str) -> None:
        self._pending.discard((client, number))
        await self._send(client, number, Failed(error))

    async def _send(
        self, client: bytes, number: int, response: Response, frames: Sequence[Any] = ()
    ) -> None:
        head = msgspec.msgpack.encode(Reply(number, response))
        await self._socket.send_multipart([client, head, *frames], copy=False)

    async def close(self, error: str | None = None) -> None:
        """Answer every open request with `error`, and deliver what was sent (within 5 s)."""
        self._file.unlink(missing_ok=True)
        for client, number in self._pending:
            await self._send(client, number, Failed(error or "the controller has stopped"))
        self._socket.close(linger=_LINGER_MS)
        await asyncio.get_running_loop().run_in_executor(None, self._context.term)


def _decode(frames: list[bytes]) -> Envelope | None:
    """Return the request in `frames`, or None (and log it) if they hold none."""
    try:
        (raw,) = frames
        return msgspec.msgpack.decode(raw, type=Envelope)
    except (ValueError, msgspec.MsgspecError) as error:
        log.warning("ignored a malformed message: %s", error)
        return None


async def run_until(event: asyncio.Event, *coroutines: Coroutine[Any, Any, None]) -> None:
    """Run the coroutines concurrently until `event` is set, then cancel them.

    If one fails, the others are cancelled and its error is raised in an ExceptionGroup.
    """
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(coroutine) for coroutine in coroutines]
        await event.wait()
        for task in running:
            task.cancel()
