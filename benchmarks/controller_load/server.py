"""A server that answers POST /generate with prepared completions, for no work of its own.

    python -m benchmarks.controller_load.server RUN_DIR MEAN_TOKENS MEAN_SECONDS

The lengths are log-normal. An answer takes a time in proportion to its length. The server parses
nothing. It announces itself in the run directory, as a real one does.
"""

import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop

from areal_lite.config import TrainConfig, save_config
from areal_lite.servers.registry import ServerInfo, announce_server, announced_servers
from areal_lite.system.processes import die_with_parent, dying_with_me
from benchmarks.controller_load.load import LONGEST, PROMPT_TOKENS, Load

# As long as its replacement, so that a push costs this server next to nothing.
VERSION = b"%04d"
END_TOKEN = 1
TEMPLATE_TOKENS = 2_000_000
SPREAD = 0.8
MEAN_OF_LOGNORMAL = 1.38


def answer(length: int, longest: int, rng: random.Random) -> bytes:
    """Return the bytes of an HTTP answer with `length` tokens of version VERSION.

    The numbers have as many digits as those of a real server.
    """
    version = VERSION.decode()
    logprobs = [[-rng.random() * 3, 2 + rng.randrange(90), None] for _ in range(length)]
    if length < longest:
        logprobs[-1][1] = END_TOKEN
    meta = {
        "id": "0",
        "finish_reason": {"type": "stop", "matched": END_TOKEN}
        if length < longest
        else {"type": "length", "length": length},
        "prompt_tokens": PROMPT_TOKENS,
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": length}],
        "output_token_logprobs": logprobs,
        "completion_tokens": length,
    }
    body = json.dumps(
        {"output_ids": [token for _, token, _ in logprobs], "meta_info": meta}
    ).encode()
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
        % len(body)
        + body
    )


class Server(asyncio.Protocol):
    """One connection. All connections share `answers`: (seconds, bytes)."""

    templates: list[tuple[float, bytes]] = []
    answers: list[tuple[float, bytes]] = []
    served = 0

    @classmethod
    def prepare(cls, mean_tokens: int, mean_s: float) -> None:
        rng, longest = random.Random(0), LONGEST * mean_tokens
        count = min(256, TEMPLATE_TOKENS // mean_tokens)
        draws = [rng.lognormvariate(0, SPREAD) / MEAN_OF_LOGNORMAL for _ in range(count)]
        lengths = [min(longest, max(1, round(draw * mean_tokens))) for draw in draws]
        cls.templates = [
            (length * mean_s / mean_tokens, answer(length, longest, rng)) for length in lengths
        ]
        cls.use_version(0)

    @classmethod
    def use_version(cls, version: int) -> None:
        cls.answers = [
            (seconds, raw.replace(VERSION, VERSION % version)) for seconds, raw in cls.templates
        ]

    def connection_made(self, transport) -> None:
        self._transport, self._buffer = transport, b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        at = head.lower().find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if not found or len(body) < length:
            return
        self._buffer = b""
        if head.startswith(b"POST /generate"):
            Server.served += 1
            seconds, raw = self.answers[Server.served % len(self.answers)]
            asyncio.get_running_loop().call_later(seconds, self._write, raw)
            return
        if head.startswith(b"POST /update_weights"):
            self.use_version(int(json.loads(body)["weight_version"]))
        reply = json.dumps(
            {"weight_version": "0", "internal_states": [], "success": True, "message": ""}
        ).encode()
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(reply) + reply)

    def _write(self, raw: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(raw)


async def serve(run_dir: Path) -> None:
    """Serve on a free port of loopback, and announce it."""
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0, backlog=16384)
    announce_server(
        run_dir,
        ServerInfo(
            name="server-0",
            url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}",
            api_key=None,
            tensor_parallel=1,
            pid=os.getpid(),
        ),
    )
    await server.serve_forever()


@contextlib.contextmanager
def fresh_server(run_dir: Path, config: TrainConfig, load: Load) -> Iterator[str]:
    """Start a server at version 0 for one run, and yield its address."""
    run_dir.mkdir()
    config.run_dir = str(run_dir)
    save_config(config, run_dir)
    command = [sys.executable, "-m", __spec__.name, str(run_dir), *load.arguments]
    server = subprocess.Popen(command, env=os.environ | dying_with_me())
    try:
        while not announced_servers(run_dir):
            assert server.poll() is None, "the server of the benchmark ended"
            time.sleep(0.05)
        yield announced_servers(run_dir)[0].url
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    die_with_parent()
    run_dir, mean_tokens, mean_s = sys.argv[1:]
    Server.prepare(int(mean_tokens), float(mean_s))
    uvloop.run(serve(Path(run_dir)))


if __name__ == "__main__":
    main()
