"""The rate of one controller process against servers that cost nothing.

    python benchmarks/controller.py [--trajectories 20000] [--rounds 3] [--out FILE]

It measures trajectories per second next to a bare HTTP client, memory, and event-loop lag.

* The server answers POST /generate with prepared completions. Their lengths are log-normal, and
  each takes the time of its number of tokens. The server parses nothing.
* The bare client is aiohttp on uvloop. It keeps the same number of requests in flight, reads each
  answer and discards it.
* The controller is the real process with its store and a reward worker. A trainer that does not
  train pulls its batches and pushes versions.

Client and controller take turns on the same server, round by round. CPU seconds per trajectory are
those of the process of the client or of the controller, over all threads. They depend less on other
load of the machine.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import uvloop

from areal_lite.config import TrainConfig, save_config
from areal_lite.controller.client import ControllerClient
from areal_lite.controller.loop_lag import LoopLag
from areal_lite.quickstart.char_tokenizer import build_char_tokenizer
from areal_lite.servers.blocking import post
from areal_lite.servers.registry import ServerInfo, announce_server, announced_servers
from areal_lite.system.processes import die_with_parent, dying_with_me

MEAN_TOKENS, MAX_TOKENS, PROMPT_TOKENS = 100, 512, 40
SECONDS_PER_TOKEN = 0.001
GROUP_SIZE, BATCH_GROUPS, MAX_STALENESS = 8, 256, 3


# --- the server ---


# As long as its replacement, so that a push costs this server next to nothing.
VERSION = b"%04d"


def answer(length: int, rng: random.Random) -> bytes:
    """Return the bytes of an HTTP answer with `length` tokens of version VERSION.

    The numbers have as many digits as those of a real server.
    """
    version = VERSION.decode()
    logprobs = [[-rng.random() * 3, 2 + rng.randrange(90), None] for _ in range(length)]
    if length < MAX_TOKENS:
        logprobs[-1][1] = 1  # the end token
    meta = {
        "id": "0",
        "finish_reason": {"type": "stop", "matched": 1}
        if length < MAX_TOKENS
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
    def prepare(cls) -> None:
        rng = random.Random(0)
        lengths = [
            min(MAX_TOKENS, max(1, round(rng.lognormvariate(0, 0.8) * MEAN_TOKENS / 1.38)))
            for _ in range(256)
        ]
        cls.templates = [(length * SECONDS_PER_TOKEN, answer(length, rng)) for length in lengths]
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
    Server.prepare()
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0, backlog=4096)
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


# --- the two clients ---


async def bare(url: str, in_flight: int, count: int) -> dict[str, float]:
    """Send `count` requests, `in_flight` at a time, in the form of the controller's requests."""
    import aiohttp

    sampling = {
        "max_new_tokens": MAX_TOKENS,
        "temperature": 1.0,
        "stop_token_ids": [1],
        "skip_special_tokens": False,
    }
    request = {
        "rid": "0",
        "input_ids": list(range(PROMPT_TOKENS)),
        "return_logprob": True,
        "extra_key": "0",
        "sampling_params": sampling,
    }
    body = json.dumps(request).encode()
    left = iter(range(count))
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:

        async def worker() -> None:
            for _ in left:
                async with session.post(
                    url + "/generate", data=body, headers={"Content-Type": "application/json"}
                ) as response:
                    await response.read()

        async def all_of_them() -> None:
            await asyncio.gather(*(worker() for _ in range(in_flight)))

        left = iter(range(2 * in_flight))
        await all_of_them()  # connections are made
        left = iter(range(count))
        started, cpu = time.perf_counter(), time.process_time()
        await all_of_them()
    seconds = time.perf_counter() - started
    return {"per_s": count / seconds, "cpu_s_per_1000": 1000 * (time.process_time() - cpu) / count}


class IdleLag(threading.Thread):
    """The lag of an idle event loop in this process: the share of the machine itself."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.lag = LoopLag()
        self.start()

    def run(self) -> None:
        uvloop.run(self.lag.watch())


def through_controller(run_dir: Path, in_flight: int, count: int) -> dict:
    """Measure `count` trajectories of a new controller, after those that fill its buffers."""
    with open(run_dir / "controller.log", "wb") as errors:
        controller = subprocess.Popen(
            [sys.executable, "-m", "areal_lite.controller.service", str(run_dir)],
            env=os.environ | dying_with_me(),
            stderr=errors,
        )
    process, client = psutil.Process(controller.pid), ControllerClient(run_dir, 120)
    per_step = GROUP_SIZE * BATCH_GROUPS
    warm = MAX_STALENESS + 1 + in_flight // per_step
    steps = warm + -(-count // per_step)
    memory, lags, flying, idle = [], [], [], IdleLag()
    try:
        for step in range(steps):
            _, info = client.batch(step, 0, 1)
            if step == warm:
                idle.lag.take_p99()
                started, cpu = time.perf_counter(), sum(process.cpu_times()[:2])
            if step >= warm:
                lags.append(info["loop_lag_p99_s"])
                flying.append(info["in_flight"])
                memory.append(process.memory_info().rss / 2**20)
            for server in client.begin_push(step + 1).servers:
                post(
                    server,
                    "/update_weights_from_disk",
                    {"model_path": "-", "weight_version": str(step + 1)},
                    30,
                )
            client.pushed(step + 1)
        seconds, cpu = time.perf_counter() - started, sum(process.cpu_times()[:2]) - cpu
        done = per_step * (steps - warm)
        quarter = max(1, len(memory) // 4)
        return {
            "trajectories": done,
            "per_s": done / seconds,
            "cpu_s_per_1000": 1000 * cpu / done,
            "in_flight_mean": sum(flying) / len(flying),
            "loop_lag_p99_s": sorted(lags)[len(lags) // 2],
            "loop_lag_p99_s_worst_step": max(lags),
            "idle_loop_lag_p99_s": idle.lag.take_p99(),
            "memory_mib_first_quarter": max(memory[:quarter]),
            "memory_mib_last_quarter": max(memory[-quarter:]),
            "totals": client.finish(),
        }
    finally:
        client.close()
        controller.terminate()
        controller.wait()


# --- both ---


def prepare(folder: Path, in_flight: int) -> TrainConfig:
    build_char_tokenizer().save_pretrained(folder / "model")
    config = TrainConfig(model=str(folder / "model"))
    config.rollout.group_size, config.rollout.max_new_tokens, config.rollout.max_concurrent = (
        GROUP_SIZE,
        MAX_TOKENS,
        in_flight,
    )
    config.trainer.batch_groups, config.buffer.max_staleness, config.trainer.steps = (
        BATCH_GROUPS,
        MAX_STALENESS,
        10**6,
    )
    config.eval.problems = 0
    return config


@contextlib.contextmanager
def fresh_server(run_dir: Path, config: TrainConfig) -> Iterator[str]:
    """Start a server at version 0 for one run."""
    run_dir.mkdir()
    config.run_dir = str(run_dir)
    save_config(config, run_dir)
    server = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(run_dir)], env=os.environ | dying_with_me()
    )
    try:
        while not announced_servers(run_dir):
            time.sleep(0.05)
        yield announced_servers(run_dir)[0].url
    finally:
        server.terminate()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--trajectories",
        type=int,
        default=20_000,
        help="per round and client; 200000 shows whether memory is flat",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--in-flight", type=int, default=2000)
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results" / "controller.json"
    )
    parser.add_argument("--serve", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        die_with_parent()
        uvloop.run(serve(arguments.serve))
        return
    if arguments.bare:
        print(
            json.dumps(
                uvloop.run(bare(arguments.bare, arguments.in_flight, arguments.trajectories))
            )
        )
        return
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        config = prepare(Path(folder), arguments.in_flight)
        for number in range(arguments.rounds):
            run_dir = Path(folder) / f"run{number}"
            with fresh_server(run_dir, config) as url:
                numbers = [
                    "--trajectories",
                    str(arguments.trajectories),
                    "--in-flight",
                    str(arguments.in_flight),
                ]
                command = [sys.executable, __file__, "--bare", url, *numbers]
                client = json.loads(
                    subprocess.run(
                        command, check=True, capture_output=True, env=os.environ | dying_with_me()
                    ).stdout
                )
                rounds.append(
                    {
                        "bare": client,
                        "controller": through_controller(
                            run_dir, arguments.in_flight, arguments.trajectories
                        ),
                    }
                )
            print(json.dumps(rounds[-1], indent=1), flush=True)
    cpu = sorted(r["bare"]["cpu_s_per_1000"] / r["controller"]["cpu_s_per_1000"] for r in rounds)
    shares = sorted(r["controller"]["per_s"] / r["bare"]["per_s"] for r in rounds)
    result = {
        "share_of_bare_client_median": shares[len(shares) // 2],
        "shares": shares,
        "share_by_cpu_time_median": cpu[len(cpu) // 2],
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "settings": {
            "trajectories": arguments.trajectories,
            "in_flight": arguments.in_flight,
            "mean_tokens": MEAN_TOKENS,
        },
        "rounds": rounds,
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(result, indent=1, default=str) + "\n")
    share, by_cpu = shares[len(shares) // 2], cpu[len(cpu) // 2]
    print(f"share of the bare client's rate {share:.2f}, by CPU time {by_cpu:.2f}")
    print(arguments.out)


if __name__ == "__main__":
    main()
