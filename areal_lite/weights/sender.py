"""Sends staged weights to servers that cannot map the trainer's memory file.

These are on another machine or in another container. Each of them asks while it generates
(`areal_lite/servers/staged_copy.py`). So the network does not make a pause longer.
"""

from __future__ import annotations

import hmac
import logging
import os
import secrets
import socket
import socketserver
import sys
import threading
from functools import partial

from areal_lite.servers.staged_copy import LENGTH_BYTES, TOKEN_BYTES, Source, receive
from areal_lite.system.processes import process_namespace

log = logging.getLogger(__name__)
# Within this time a client must show the token, in seconds.
_TOKEN_WITHIN_S = 5.0
# The longest silence of a server within a transfer, in seconds.
_SILENCE_S = 30.0


class WeightSender:
    """Listens on a free port of `address`, and sends a file to those that show its token.

    Each connection has a thread. Only the kernel touches the bytes of the file.
    """

    def __init__(self, address: str, descriptor: int):
        self.address = address
        self._server = _Server(address, descriptor)
        port, token = self._server.server_address[1], self._server.token.hex()
        self.source = Source(process_namespace(), address, port, token)
        serve = partial(self._server.serve_forever, poll_interval=0.1)
        threading.Thread(target=serve, daemon=True, name="sender").start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False  # a server that hangs must not keep the trainer
    request_queue_size = 1024

    def __init__(self, address: str, descriptor: int):
        self.descriptor = descriptor
        self.token = secrets.token_bytes(TOKEN_BYTES)
        super().__init__((address, 0), _Handler)

    def handle_error(self, request: object, client_address: tuple[str, int]) -> None:
        log.warning("%s:%s got no weights: %s", *client_address, sys.exception())


class _Handler(socketserver.BaseRequestHandler):
    request: socket.socket

    def handle(self) -> None:
        assert isinstance(self.server, _Server)
        self.request.settimeout(_TOKEN_WITHIN_S)
        shown = receive(self.request, memoryview(bytearray(TOKEN_BYTES)))
        if not hmac.compare_digest(shown, self.server.token):
            log.warning("refused the weights to %s: a wrong token", self.client_address[0])
            return
        self.request.settimeout(_SILENCE_S)
        # Opened anew, because a descriptor has one position for all threads.
        with open(f"/proc/self/fd/{self.server.descriptor}", "rb") as file:
            length = os.fstat(file.fileno()).st_size
            self.request.sendall(length.to_bytes(LENGTH_BYTES, "little"))
            self.request.sendfile(file, count=length)
