"""The weight group of a fake SGLang server: it joins and receives with real gloo.

It does one thing at a time, as a scheduler does.

    python tests/gloo_server.py --die-at PATH

prints its port, and exits a moment after a request for PATH, as if killed.
"""

import argparse
import hashlib
import json
import os
import sys
import threading
import time
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from areal_lite.system.processes import die_with_parent

groups: dict[str, dist.ProcessGroup] = {}
scheduler = threading.Lock()


def join(body: dict) -> dict:
    limit = timedelta(seconds=1800)  # torch's own, as SGLang leaves it
    store = dist.TCPStore(
        body["master_address"], body["master_port"], is_master=False, timeout=limit
    )
    prefixed = dist.PrefixStore(body["group_name"], store)
    world, rank = body["world_size"], body["rank_offset"]
    group, _ = c10d._new_process_group_helper(
        world,
        rank,
        [],
        c10d.Backend(body["backend"]),
        prefixed,
        group_name=body["group_name"],
        timeout=limit,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world)}
    groups[body["group_name"]] = group
    return {"success": True}


def receive(body: dict) -> dict:
    sizes = [
        torch.Size(shape).numel() * getattr(torch, dtype).itemsize
        for shape, dtype in zip(body["shapes"], body["dtypes"])
    ]
    flat = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.broadcast(flat, src=0, group=groups[body["group_name"]])
    return {"success": True, "sha": hashlib.sha256(flat.numpy().tobytes()).hexdigest()}


def leave(body: dict) -> dict:
    dist.destroy_process_group(groups.pop(body["group_name"]))
    return {"success": True}


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


def main() -> None:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--die-at")
    Handler.die_at = parser.parse_args().die_at
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    server.serve_forever()


if __name__ == "__main__":
    main()
