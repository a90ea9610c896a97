"""A fake SGLang server that takes weights, and that fails at one point of a push.

Its weights are two tensors which hold their version, so a mixture of versions shows. It notes each
moment at which it generates (it is not paused) with weights that are not those of its version.
Weight groups are the plugin's, over real gloo (tests/gloo_server.py).
"""

import json
import os
import signal
import socket
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from areal_lite.cpu.memory.staged import ACTIVATE, CHECK, StagedFile
from areal_lite.sglang_plugins import weight_group
from tests import gloo_server

REFUSE, DIE, DIE_LATER, HANG = "refuse", "die", "die later", "hang"
LOSE_REQUEST, LOSE_ANSWER = "lose the request", "lose the answer"
LOSE_GROUP = "lose the group"
"""The connections of the weight group break, and the server is well."""

FAULTS = (REFUSE, DIE, DIE_LATER, HANG, LOSE_REQUEST, LOSE_ANSWER)
"""It refuses; it dies or hangs before it acts; it dies after; only the connection is lost."""


@dataclass(frozen=True)
class Point:
    """The `number`-th request for `path`."""

    path: str
    number: int


class Server:
    """The state of the server, and what each request does to it."""

    def __init__(self) -> None:
        self.weights = {"a": 0.0, "b": 0.0}
        self.version = "0"
        self.paused = self.updating = False
        self.calls: list[str] = []
        self.wrong: list[str] = []
        self.checked = ""
        self.loads_at_pause: list[bool] = []  # whether each has ended

    def state(self) -> dict:
        return vars(self) | {"whole": self.is_whole()}

    def is_whole(self) -> bool:
        return set(self.weights.values()) == {float(self.version)}

    def post(self, path: str, body: dict) -> dict:
        self.calls.append(path)
        answer = self._act(path, body)
        if not self.paused and not self.is_whole():
            self.wrong.append(f"{path}: it generates with {self.weights} as {self.version}")
        return answer

    def _act(self, path: str, body: dict) -> dict:
        match path:
            case "/pause_generation":
                self.paused = True
                loads = gloo_server.next_weights._loads.values()
                self.loads_at_pause = [load.done() for load in loads]
            case "/continue_generation":
                self.paused = False
            case "/begin_weight_update" | "/end_weight_update":
                begins = path.startswith("/begin")
                if self.updating == begins:
                    return {"success": False, "message": "a push is open, or none is"}
                self.updating = begins
            case "/update_weights_from_distributed":
                self._take(gloo_server.receive_tensors(body), body["weight_version"])
            case "/update_weights_from_disk":
                return self._load(body)
            case _ if path in gloo_server.PATHS:
                return gloo_server.PATHS[path](body)
        return {"success": True}

    def _load(self, body: dict) -> dict:
        door, _, digest = (body.get("load_format") or "").partition(":")
        if door not in (CHECK, ACTIVATE):
            files = Path(body["model_path"]).glob("*.safetensors")
            tensors = [pair for file in files for pair in load_file(file).items()]
            self._take(tensors, body["weight_version"])
            return {"success": True}
        file = StagedFile(body["model_path"])
        if door == CHECK:
            self.checked = file.check(digest).digest
        elif self.checked != digest:
            return {"success": False, "message": "it was not checked"}
        else:
            self._take(file.tensors(file.header(digest)), body["weight_version"])
        return {"success": True}

    def _take(self, tensors: list[tuple[str, torch.Tensor]], version: str | None) -> None:
        self.weights |= {name: tensor[0].item() for name, tensor in tensors}
        self.version = version or self.version


def break_connections(port: int) -> None:
    """Shut down every TCP connection of this process, except those to its own `port`."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError), socket.socket(fileno=os.dup(int(name))) as one:
            if one.getpeername() and one.getsockname()[1] != port:
                one.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    server_state: Server
    fault: tuple[Point, str] | None = None
    seen: Counter[str] = Counter()
    scheduler = threading.Lock()

    def do_GET(self) -> None:
        self._answer(self.server_state.state() if self.path == "/state" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen[self.path] += 1
        point, fault = self.fault or (None, None)
        if Point(self.path, self.seen[self.path]) != point:
            fault = None
        if fault in (DIE, DIE_LATER) and self.path in gloo_server.PATHS:
            time.sleep(0.1)  # the others wait for it by now
        if fault == DIE:
            os._exit(1)
        if fault == HANG:
            # Sent to the process, another thread would take it, and this one might still answer.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        if fault == LOSE_GROUP:
            break_connections(self.server.server_port)
        if fault == REFUSE:
            return self._answer({"success": False, "message": "refused"})
        if fault != LOSE_REQUEST:
            with self.scheduler:  # it does one thing at a time
                try:
                    answer = self.server_state.post(self.path, body)
                except Exception as error:
                    answer = {"success": False, "message": str(error)}
        if fault == DIE_LATER:
            os._exit(1)
        if fault in (LOSE_REQUEST, LOSE_ANSWER):
            self.close_connection = True
            return self.connection.close()
        self._answer(answer)

    def _answer(self, content: dict) -> None:
        raw = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


def serve(port: Connection, fault: tuple[Point, str] | None) -> None:
    """Send the port, then serve until killed, with one fault."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    # It may meet a store that closes: then it is free for the next group after this time.
    weight_group._CONNECT_S = 0.3
    Handler.server_state, Handler.fault = Server(), fault
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.send(server.server_port)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # broken connections are described there
    server.serve_forever()
