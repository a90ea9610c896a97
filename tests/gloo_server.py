"""The weight group of a fake SGLang server: the plugin's hooks, with real gloo or `nccl_double`.

It does one thing at a time, as a scheduler does.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from types import SimpleNamespace

import torch
import torch.distributed as dist

from areal_lite.cpu.memory.server import NextWeights
from areal_lite.sglang_plugins import push as push_plugin
from areal_lite.sglang_plugins.weight_group import ADAPTERS, AHEAD
from tests import nccl_double

scheduler = threading.Lock()
next_weights = NextWeights()
# Here a push of adapters brings the sums.
push_plugin.formats[ADAPTERS] = lambda updater, bucket, take, scale: bucket.split(
    take(bucket.nbytes)
)
push_plugin.formats[AHEAD] = next_weights.take


class Model(torch.nn.Module):
    """The two weights that adapters change."""

    def __init__(self) -> None:
        super().__init__()
        for name in "ab":
            self.register_parameter(name, torch.nn.Parameter(torch.zeros(3)))

    def load_weights(self, weights) -> None:
        time.sleep(0.1)  # as long as a push lasts without a wait for it
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def stock(*_: object, **__: object) -> None:
    raise AssertionError("the plugin handles every request of the trainer's")


def join(body: dict) -> dict:
    first = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
    hooked = partial(push_plugin._join_group, stock)
    success, message = next_weights.receive(hooked, updater, *(body[name] for name in first))
    return {"success": success, "message": message}


model = Model()
updater = SimpleNamespace(
    tp_rank=0,
    device="cpu",
    _model_update_group={},
    get_model=lambda: model,
    receive_weights_from_distributed=lambda **request: push_plugin._receive_weights(
        stock, updater, **request
    ),
)


def receive_tensors(body: dict) -> list[tuple[str, torch.Tensor]]:
    names = ("names", "dtypes", "shapes", "group_name", "load_format")
    request = {name: body[name] for name in names}
    tensors = list(push_plugin._receive_weights(stock, updater, **request))
    return list(model.named_parameters()) if body["load_format"] == AHEAD else tensors


def receive(body: dict) -> dict:
    tensors = receive_tensors(body)
    data = b"".join(t.contiguous().view(-1).view(torch.uint8).numpy() for _, t in tensors)
    return {"success": True, "sha": hashlib.sha256(data).hexdigest()}


def leave(body: dict) -> dict:
    success, message = push_plugin._leave_group(stock, updater, **body)
    return {"success": success, "message": message}


PATHS = {
    "/init_weights_update_group": join,
    "/update_weights_from_distributed": receive,
    "/destroy_weights_update_group": leave,
}


class Handler(BaseHTTPRequestHandler):
    die_at: str | None = None

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == self.die_at:
            time.sleep(0.5)  # the others wait for it by now
            os._exit(1)
        with scheduler:
            try:
                self._answer(PATHS[self.path](body))
            except Exception as error:
                self._answer({"success": False, "message": str(error)})

    def _answer(self, content: dict) -> None:
        raw = json.dumps(content).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        pass


def serve(port: Connection, die_at: str | None, variables: dict[str, str]) -> None:
    """Send the port, then serve. Exit a moment after a request for `die_at`, as if killed."""
    os.environ.update(variables)
    Handler.die_at = die_at
    nccl_double.register()
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    port.send(server.server_port)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # torch describes every closed connection
    server.serve_forever()
