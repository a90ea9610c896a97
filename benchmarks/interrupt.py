"""The cost of interrupting generation for new weights, by mode, on one real server without a GPU.

    python benchmarks/interrupt.py [--hidden 512] [--requests 16] [--tokens 256] [--pushes 4]

The real fleet keeps requests of equal length in flight. The real pusher pushes the server's own
weights. Runs without pushes and runs of each mode take turns. The script writes
benchmarks/results/interrupt.json with these values for each mode and transport:

    pause_ms       the pause window, in which no token is produced: median over the pushes
    over_copy      that window / the time of a memory copy of the same bytes
    recomputed     tokens whose KV cache was computed again, per push
    lost_tokens    tokens that were requested and did not arrive
    cost_s         additional seconds of all requests together, per push, compared to no pushes
"""

import argparse
import asyncio
import json
import logging
import os
import statistics
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from areal_lite.config import ServerConfig, TrainConfig
from areal_lite.controller.protocol import PushTargets
from areal_lite.launch.server_pool import ServerProcess
from areal_lite.servers.client import SamplingParams, SGLangClient
from areal_lite.servers.fleet import Completion, Fleet, Session
from areal_lite.system.network import free_port
from areal_lite.weights.push import WeightPusher

PROMPT = np.arange(2, 66, dtype=np.int32)
RUNS = [
    ("none", "auto"),
    ("in_place", "memory"),
    ("in_place", "disk"),
    ("in_place", "distributed"),
    ("retract", "memory"),
    ("abort", "memory"),
]


def make_model(folder: Path, hidden: int, layers: int = 8) -> None:
    torch.manual_seed(0)
    shape = dict(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    )
    config = Qwen3Config(
        vocab_size=98,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=None,
        bos_token_id=None,
        **shape,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)


class Controller:
    """The controller's side of a push: pause dispatch in mode `abort`, then continue."""

    def __init__(self, fleet: Fleet, mode: str):
        self.fleet, self.mode, self.loop = fleet, mode, asyncio.get_running_loop()

    def begin_push(self, version: int) -> PushTargets:
        async def begin() -> list:
            if self.mode == "abort":
                self.fleet.gate.close()
            servers = list(self.fleet.router.servers.values())
            self.fleet.begin_push(version, servers)
            return servers

        return PushTargets(asyncio.run_coroutine_threadsafe(begin(), self.loop).result())

    def pushed(self, version: int, failed: list[str]) -> None:
        async def resume() -> None:
            self.fleet.finish_push(version, failed)

        asyncio.run_coroutine_threadsafe(resume(), self.loop).result()


async def measure(
    arguments,
    server: ServerProcess,
    weights: dict,
    folder: Path,
    mode: str,
    transport: str,
    version: int,
    every_s: float,
) -> tuple[dict, int]:
    client = SGLangClient(60)
    fleet = Fleet(client, lambda: [server.info], lambda: None)
    fleet.router.version = version
    watching = asyncio.create_task(fleet.watch())
    config = TrainConfig(model=server.model)
    config.rollout.interrupt = mode
    config.sync.transport = transport
    config.sync.disk_path = "/dev/shm"
    stream = SimpleNamespace(buckets=lambda size: iter([list(weights.items())]))
    device = torch.device("cpu")
    pusher = WeightPusher(stream, device, Controller(fleet, mode), config, folder)
    params = SamplingParams(arguments.tokens, 1.0, ())
    started = time.perf_counter()
    servers = [await fleet.reserve() for _ in range(arguments.requests)]
    tasks = [
        asyncio.create_task(
            fleet.complete(Session(f"{mode}-{transport}-{i}", server), PROMPT, params)
        )
        for i, server in enumerate(servers)
    ]
    pauses = []
    while every_s and len(pauses) < arguments.pushes:
        await asyncio.sleep(every_s)
        if all(task.done() for task in tasks):
            break
        version += 1
        pauses.append((await asyncio.to_thread(pusher.push_all, version)).pause_s)
    if every_s and len(pauses) < 2:
        raise RuntimeError("the requests were over before two pushes: give more --tokens")
    done: list[Completion] = await asyncio.gather(*tasks)
    seconds = time.perf_counter() - started
    pusher.close()
    watching.cancel()
    await client.close()
    recomputed = (
        sum(len(PROMPT) + i for c in done for i in starts(c)) if mode in ("retract", "abort") else 0
    )
    result = {
        "mode": mode,
        "transport": transport,
        "seconds": seconds,
        "requests": sum(c.requests for c in done),
    }
    if pauses:
        result |= {
            "pushes": len(pauses),
            "pause_ms": 1000 * statistics.median(pauses[1:]),
            "first_pause_ms": 1000 * pauses[0],
            "recomputed": recomputed / len(pauses),
        }
    return result | {"lost_tokens": sum(arguments.tokens - len(c.tokens) for c in done)}, version


def starts(completion: Completion) -> list[int]:
    """Return the token indices at which a new version begins within a completion."""
    return (np.flatnonzero(np.diff(completion.versions)) + 1).tolist()


def copy_seconds(weights: dict[str, torch.Tensor]) -> float:
    """Return the median time in seconds of a copy of all weights into allocated memory."""
    source = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in weights.values()])
    target = torch.empty_like(source).copy_(source)
    times = []
    for _ in range(15):
        started = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - started)
    return statistics.median(times)


async def run(arguments, folder: Path) -> dict:
    make_model(folder, arguments.hidden)
    weights = load_file(folder / "model.safetensors")
    config = ServerConfig(device="cpu")
    server = ServerProcess(
        config,
        str(folder),
        name="server",
        port=free_port(),
        seed=1,
        log_path=folder / "log",
        environment={"GLOO_SOCKET_IFNAME": "lo"},
    )
    results, copies, version = [], [], 0
    try:
        server.start()
        await server.wait_ready()
        for _ in range(arguments.rounds):
            every_s = 0.0
            for mode, transport in RUNS:
                result, version = await measure(
                    arguments, server, weights, folder, mode, transport, version, every_s
                )
                every_s = every_s or result["seconds"] / (arguments.pushes + 2)
                results.append(result)
                # In between, so that other load on the machine falls on both.
                copies.append(copy_seconds(weights))
                print(json.dumps(result), flush=True)
    finally:
        server.stop()
    copy_s = statistics.median(copies)
    megabytes = sum(t.numel() * t.element_size() for t in weights.values()) / 2**20
    return {
        "megabytes": megabytes,
        "load_average": os.getloadavg()[0],
        "copy_ms": 1000 * copy_s,
        "arguments": vars(arguments),
        "modes": summarise(arguments, results, copy_s),
    }


def summarise(arguments, results: list[dict], copy_s: float) -> list[dict]:
    """Return the medians over the rounds."""

    def median(run: tuple[str, str], key: str) -> float:
        return statistics.median(r[key] for r in results if (r["mode"], r["transport"]) == run)

    alone = median(RUNS[0], "seconds")
    return [
        {
            "mode": run[0],
            "transport": run[1],
            "pause_ms": median(run, "pause_ms"),
            "first_pause_ms": median(run, "first_pause_ms"),
            "over_copy": median(run, "pause_ms") / 1000 / copy_s,
            "recomputed": median(run, "recomputed"),
            "lost_tokens": median(run, "lost_tokens"),
            "cost_s": (median(run, "seconds") - alone) / median(run, "pushes"),
        }
        for run in RUNS[1:]
    ]


def become_trainer() -> None:
    """Set this process up as trainer rank 0, with one thread and gloo over loopback."""
    logging.basicConfig(level=logging.WARNING)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    torch.distributed.init_process_group(
        "gloo", rank=0, world_size=1, store=torch.distributed.HashStore()
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pushes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=1)
    arguments = parser.parse_args()
    become_trainer()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(run(arguments, Path(folder)))
    path = Path(__file__).parent / "results" / "interrupt.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
