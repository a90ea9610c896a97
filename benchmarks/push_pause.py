r"""The pause of a push in place, by size of the weights, servers and transport, without a GPU.

    python -m benchmarks.push_pause [--sizes 2 100 600] [--servers 1 2] [--pushes 7]
    python -m benchmarks.push_pause --model CHAT_MODEL --transports delta distributed memory
    python -m benchmarks.push_pause --model CHAT_MODEL --dtype float32 --servers 1 --pushes 10 \
        --between-s 1 --transports adapters distributed memory

Real servers stream answers. The real pusher pushes the servers' own weights. `adapters` are
low-rank adapters alone, of which B is zero. The transports take turns, push by push. Before each
turn of `delta`, the weights make a step of `--lr` times a normal number, on their exact values: in
bfloat16, few of them change. A memory copy of all weights is timed after each push. The script
writes benchmarks/results/push_pause.json, or with a model push_delta.json, or push_adapters.json if
they are measured: what a push brings to a server, in MiB, and medians over the pushes, in
milliseconds:

    pause          the pause window as a run reports it: `pause_s`
    gap            the longest time between two tokens of a request during a push
    quiet_gap      the same between two pushes, in a time as long as the push or as long as there is
    step           the time between two tokens while nothing is pushed
    copy           a memory copy of all weights into memory that has been written before
    first_token    from the end of the training step to the first token under its weights
    push           the whole push
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_lite.config import ServerConfig, TrainConfig
from areal_lite.controller.protocol import PushTargets
from areal_lite.launch.server_pool import ServerProcess
from areal_lite.servers.registry import ServerInfo
from areal_lite.system.network import free_port
from areal_lite.weights.push import WeightPusher
from benchmarks.interrupt import PROMPT, become_trainer, copy_seconds, make_model

SHAPES = {2: (64, 4), 100: (512, 8), 600: (1408, 8)}
"""Hidden size and layers by size in MiB. SGLang pads no layer of these sizes on CPUs."""
TRANSPORTS = ("memory", "disk", "distributed", "adapters")
"""The transports that take turns, unless others are named."""
RANK = 8
OUT = Path(__file__).parent / "results"


@dataclass
class Stream:
    """The tokens of one request after another: their arrival times and weight versions."""

    arrivals: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    async def follow(self, session: aiohttp.ClientSession, url: str) -> None:
        body = {
            "input_ids": PROMPT.tolist(),
            "sampling_params": {"max_new_tokens": 1900, "ignore_eos": True},
            "stream": True,
        }
        while True:
            async with session.post(f"{url}/generate", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        version = json.loads(line[6:])["meta_info"]["weight_version"]
                        self.arrivals.append(time.time())
                        self.versions.append(int(version) if version.isdigit() else 0)

    def longest_gap(self, begin: float, end: float) -> float:
        """Return the longest time between two tokens of which one came between two times."""
        pairs = zip(self.arrivals, self.arrivals[1:], strict=False)
        return max(after - before for before, after in pairs if after >= begin and before <= end)

    def first(self, version: int) -> float:
        """Return when the first token under `version` came."""
        return self.arrivals[self.versions.index(version)]

    def step(self, begin: float, end: float) -> float:
        """Return the mean time between two tokens that came between two times."""
        found = [arrival for arrival in self.arrivals if begin <= arrival <= end]
        return (found[-1] - found[0]) / (len(found) - 1)


class Controller:
    """The controller's side of a push in place: it knows the servers."""

    def __init__(self, servers: list[ServerInfo]):
        self._servers = servers

    def begin_push(self, version: int) -> PushTargets:
        return PushTargets(self._servers)

    def pushed(self, version: int, failed: list[str]) -> None:
        if failed:
            raise RuntimeError(f"a push failed on {failed}")


class Training:
    """Trains weights in float32, and rounds them to their dtype after each step."""

    def __init__(self, weights: dict[str, torch.Tensor], lr: float):
        self._weights, self._lr = weights, lr
        self._exact = {}
        for name, tensor in weights.items():
            between = torch.finfo(tensor.dtype).eps * tensor.float().abs() / 2
            self._exact[name] = tensor + (torch.rand(tensor.shape) - 0.5) * between

    def step(self) -> None:
        for name, exact in self._exact.items():
            self._weights[name].copy_(exact.add_(torch.randn(exact.shape), alpha=self._lr))


def make_pushers(
    transports: list[str], servers: list[ServerInfo], model: Path, weights: dict
) -> dict[str, WeightPusher]:
    """Return a pusher of each transport."""
    device = torch.device("cpu")
    pushers = {}
    for transport in transports:
        config = TrainConfig(model=str(model))
        config.rollout.interrupt = "in_place"
        config.sync.transport = transport
        config.sync.disk_path = "/dev/shm/areal_lite-push-pause"
        pushed = weights
        if transport == "adapters":
            config.trainer.lora.rank = RANK
            pushed = adapters(weights)
        stream = SimpleNamespace(buckets=partial(buckets, pushed))
        pushers[transport] = WeightPusher(stream, device, Controller(servers), config, model)
    return pushers


def adapters(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return A and B of every projection, with B zero."""
    found = {}
    for name, weight in weights.items():
        stem = name.removesuffix(".weight")
        if stem.endswith("_proj"):
            out, into = weight.shape
            found[f"{stem}.lora_A.weight"] = torch.randn(RANK, into, dtype=weight.dtype)
            found[f"{stem}.lora_B.weight"] = torch.zeros(out, RANK, dtype=weight.dtype)
    return found


def buckets(weights: dict[str, torch.Tensor], size: int):
    """Yield the weights in buckets of about `size` bytes."""
    bucket, filled = [], 0
    for name, tensor in weights.items():
        bucket.append((name, tensor))
        filled += tensor.numel() * tensor.element_size()
        if filled >= size:
            yield bucket
            bucket, filled = [], 0
    if bucket:
        yield bucket


async def measure(arguments, model: Path, count: int) -> list[dict]:
    """Return the medians of each transport, with `count` servers of `model`."""
    weights = load_file(model / "model.safetensors")
    async with AsyncExitStack() as stack:
        servers = []
        for number in range(count):
            server = ServerProcess(
                ServerConfig(device="cpu"),
                str(model),
                name=f"server-{number}",
                port=free_port(),
                seed=1,
                log_path=model / f"server-{number}.log",
                environment={"GLOO_SOCKET_IFNAME": "lo"},
            )
            stack.callback(server.stop)
            server.start()
            await server.wait_ready()
            servers.append(server.info)
        session = await stack.enter_async_context(
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None))
        )
        streams = [Stream() for _ in servers for _ in range(arguments.requests)]
        async with asyncio.TaskGroup() as group:
            urls = [server.url for server in servers for _ in range(arguments.requests)]
            following = [
                group.create_task(stream.follow(session, url))
                for stream, url in zip(streams, urls, strict=True)
            ]
            await asyncio.sleep(arguments.between_s)
            pushers = make_pushers(arguments.transports, servers, model, weights)
            rows = await push_in_turn(arguments, pushers, streams, weights)
            for task in following:
                task.cancel()
    return [{"servers": count, **row} for row in rows]


async def push_in_turn(arguments, pushers, streams: list[Stream], weights: dict) -> list[dict]:
    """Push with each transport in turn, and return the medians of each."""
    found: dict[str, list[dict]] = {transport: [] for transport in pushers}
    version = 0
    training = Training(weights, arguments.lr) if "delta" in pushers else None
    for _ in range(arguments.pushes + 1):  # the first push of each makes files and groups
        for transport, pusher in pushers.items():
            version += 1
            if training and transport == "delta":
                await asyncio.to_thread(training.step)
            ended = time.time()
            report = await asyncio.to_thread(pusher.push_all, version)
            done = time.time()
            await asyncio.sleep(arguments.between_s)
            quiet = time.time()
            steps = [stream.step(done, quiet) for stream in streams]
            middle, half = (done + quiet) / 2, (done - ended) / 2
            # Not the tokens around the end of this push.
            as_long = max(done + (quiet - done) / 4, middle - half), middle + half
            found[transport].append(
                {
                    "pause": report.pause_s,
                    "gap": max(stream.longest_gap(ended, done) for stream in streams),
                    "quiet_gap": max(stream.longest_gap(*as_long) for stream in streams),
                    "first_token": max(stream.first(version) for stream in streams) - ended,
                    "push": report.total_s,
                    "step": statistics.mean(steps),
                    "copy": copy_seconds(weights),
                    "pushed_mib": report.megabytes,
                }
            )
            # No token was seen during the copies: the next push must not count that as a gap.
            await asyncio.sleep(arguments.between_s / 2)
    for pusher in pushers.values():
        await asyncio.to_thread(pusher.close)
    size = sum(tensor.numel() * tensor.element_size() for tensor in weights.values())
    return [
        {"transport": transport, "mib": round(size / 2**20, 1)} | medians(rows[1:])
        for transport, rows in found.items()
    ]


def medians(rows: list[dict]) -> dict:
    """Return the median of each time in ms, the range of the pause, and the size in MiB."""
    times = [key for key in rows[0] if key != "pushed_mib"]
    result = {key: round(1000 * statistics.median(row[key] for row in rows), 2) for key in times}
    pauses = [1000 * row["pause"] for row in rows]
    return result | {
        "pause_range": [round(min(pauses), 2), round(max(pauses), 2)],
        "pushed_mib": round(statistics.median(row["pushed_mib"] for row in rows), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", type=int, nargs="+", default=[2, 100, 600], choices=SHAPES)
    parser.add_argument("--servers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pushes", type=int, default=7)
    parser.add_argument("--requests", type=int, default=4, help="in flight on each server")
    parser.add_argument("--between-s", type=float, default=2.0)
    parser.add_argument("--transports", nargs="+", default=TRANSPORTS)
    parser.add_argument(
        "--model", type=Path, help="a folder with a model, which is used in --dtype"
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--lr", type=float, default=1e-6)
    arguments = parser.parse_args()
    become_trainer()
    rows: list[dict] = []

    def run(model: Path) -> None:
        for count in arguments.servers:
            for row in asyncio.run(measure(arguments, model, count)):
                rows.append(row)
                print(json.dumps(row), flush=True)

    for size in [0] if arguments.model else arguments.sizes:
        with tempfile.TemporaryDirectory() as folder:
            if arguments.model:
                own = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=arguments.dtype)
                own.save_pretrained(folder)
                del own
            else:
                make_model(Path(folder), *SHAPES[size])
            run(Path(folder))
    settings = {key: value for key, value in vars(arguments).items() if key != "model"}
    load = round(os.getloadavg()[0], 1)
    result = {"settings": settings, "load_average": load, "rows": rows}
    measured = "adapters" if "adapters" in arguments.transports else "delta"
    name = f"push_{measured}.json" if arguments.model else "push_pause.json"
    (OUT / name).write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
