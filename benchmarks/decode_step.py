"""Divide the time of a decode step of a server without a GPU, and compare it with two limits.

    python -m benchmarks.decode_step --model FOLDER [--requests 1 4 8 16 32 64] [--threads 1]

Clocks stand around the functions of real servers: the matrix products of the layers and of the
head, attention, norms with what writes to the cache, sampling with its log-probs, and the whole
batch. What is left of a step is the scheduler's: receiving, planning, and sending tokens. Only
decode steps that follow one another count. Two servers take turns: `packed` keeps copies of weights
in the order in which oneDNN reads them (areal_lite/cpu/kernels/products.py), `plain` does not.

The limits are measured with as many threads while the servers are idle: the bandwidth of
a product with a vector, and the operations a second of a large product. A step reads each weight
of a product once, and multiplies it with the row of each request.

Writes results/decode_step.json and prints a table.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import torch

from areal_lite.config import ServerConfig
from areal_lite.cpu.kernels.products import linear
from areal_lite.launch.server_pool import ServerProcess
from areal_lite.system.files import write_atomically
from areal_lite.system.network import free_port

RESULTS = Path(__file__).with_name("results") / "decode_step.json"
CLOCKED, OUT, KIND = "--clocked", "DECODE_CLOCKS", "DECODE_KIND"
KINDS = ("plain", "packed")
PROMPT, ANSWER, VOCABULARY = 45, 64, 40_000
PARTS = ("products", "attention", "norms", "sampling", "rest of the batch", "scheduler")


class Clocks:
    """Seconds of each part over all decode steps of this process."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.decodes = self.changed = False
        self.began: float | None = None  # of the last batch, if it was a decode step

    def around(self, part: str, function: Callable) -> Callable:
        """Return `function` with a clock for its calls in decode steps."""

        def timed(*args: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **named)
            if self.decodes:
                self.seconds[part] += time.perf_counter() - began
            return result

        return timed

    def batch(self, function: Callable) -> Callable:
        """Return SGLang's `run_batch` with a clock; steps are from one to the next."""

        def timed(scheduler: Any, batch: Any, *args: Any) -> Any:
            began = time.perf_counter()
            self.decodes = batch.forward_mode.is_decode()
            if self.began is not None and self.decodes:
                self.seconds["step"] += began - self.began
                self.seconds["steps"] += 1
            result = function(scheduler, batch, *args)
            if self.decodes:
                self.seconds["batch"] += time.perf_counter() - began
                self.seconds["batches"] += 1
            self.began = began if self.decodes else None
            self.decodes, self.changed = False, True
            return result

        return timed

    def idle(self, function: Callable) -> Callable:
        """Return SGLang's `on_idle`, which then writes the seconds for the benchmark to read."""

        def written(scheduler: Any) -> None:
            self.began = None
            if self.changed:
                write_atomically(Path(os.environ[OUT]), json.dumps(self.seconds))
                self.changed = False
            function(scheduler)

        return written


def serve_with_clocks(argv: list[str]) -> None:
    """Serve as areal_lite.launch.serve does. Workers are forked and inherit the clocks."""
    from areal_lite.cpu import device
    from areal_lite.launch import serve

    prepare_server = device.prepare_server

    def prepare() -> None:
        prepare_server()
        import sglang.launch_server

        sglang.launch_server.run_server = with_clocks(sglang.launch_server.run_server)

    device.prepare_server = prepare
    serve.main(argv)


def with_clocks(run_server: Callable) -> Callable:
    """Return SGLang's `run_server`, which first puts the clocks in place."""

    def run(arguments: Any) -> None:
        from sglang.srt.layers.sampler import Sampler
        from sglang.srt.managers.scheduler import Scheduler

        from areal_lite.cpu.kernels import products
        from areal_lite.cpu.sglang import decoder
        from areal_lite.cpu.sglang.attention import PagedCpuAttention

        clocks, packed = Clocks(), decoder.packed
        product = packed.linear if os.environ[KIND] == "packed" else products.linear
        packed.linear = clocks.around("products", product)
        decoder.place_heads = clocks.around("norms", decoder.place_heads)
        decoder._add_and_norm = clocks.around("norms", decoder._add_and_norm)
        PagedCpuAttention.attend = clocks.around("attention", PagedCpuAttention.attend)
        Sampler.forward = clocks.around("sampling", Sampler.forward)
        Scheduler.run_batch = clocks.batch(Scheduler.run_batch)
        Scheduler.on_idle = clocks.idle(Scheduler.on_idle)
        run_server(arguments)

    return run


async def generate(url: str, requests: int) -> None:
    """Ask for as many answers at once, of prompts that no earlier call had."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(1200)) as session:

        async def one() -> None:
            prompt = [random.randrange(100, VOCABULARY) for _ in range(PROMPT)]
            params = {"max_new_tokens": ANSWER, "ignore_eos": True}
            body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
            async with session.post(f"{url}/generate", json=body) as response:
                response.raise_for_status()
                await response.read()

        await asyncio.gather(*(one() for _ in range(requests)))


def clocked(path: Path) -> Counter[str]:
    """Return the seconds that the server wrote when it last became idle."""
    return Counter(json.loads(path.read_text())) if path.exists() else Counter()


async def new_seconds(path: Path, before: Counter[str]) -> Counter[str]:
    """Return the seconds since `before`, as soon as the server is idle and writes no more."""
    last = before
    while (after := clocked(path)) == before or after != last:
        last = after
        await asyncio.sleep(0.5)
    return Counter({part: value - before[part] for part, value in after.items()})


def limits(threads: int) -> dict[str, float]:
    """Measure bytes a second of a matrix times a vector, and operations a second of a product."""
    torch.set_num_threads(threads)

    def fastest(rows: int, width: int, height: int) -> float:
        x, weight, seconds = torch.randn(rows, width), torch.randn(height, width), []
        for _ in range(7):
            began = time.perf_counter()
            linear(x, weight)
            seconds.append(time.perf_counter() - began)
        return min(seconds)

    return {
        "bytes_s": 4 * 2**27 / fastest(1, 2**13, 2**14),
        "operations_s": 2 * 2**33 / fastest(2**11, 2**11, 2**11),
    }


def row(requests: int, threads: int, took: Counter[str], weights: int, machine: dict) -> dict:
    """Return the milliseconds of a step, their shares by part, and shares of the limits."""
    batches = took["batches"]
    parts = {name: took[name] / batches for name in PARTS[:4]}
    batch, step = took["batch"] / batches, took["step"] / took["steps"]
    parts["rest of the batch"] = batch - sum(parts.values())
    parts["scheduler"] = step - batch
    products = parts["products"]
    return {
        "requests": requests,
        "threads": threads,
        "step_ms": round(1000 * step, 2),
        "share": {name: round(value / step, 3) for name, value in parts.items()},
        "of_bandwidth": round(4 * weights / products / machine["bytes_s"], 2),
        "of_peak": round(2 * weights * requests / products / machine["operations_s"], 2),
        "steps": took["steps"],
    }


def weights_of_products(model: str) -> int:
    """Count the weights that a decode step multiplies: all matrices but a separate embedding."""
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model)
    head, embedding = (
        layer.weight for layer in (loaded.get_output_embeddings(), loaded.get_input_embeddings())
    )
    matrices = [weight for weight in loaded.parameters() if weight.ndim == 2]
    return sum(each.numel() for each in matrices if each is head or each is not embedding)


def clocked_server(kind: str, model: str, threads: int, folder: Path) -> ServerProcess:
    """Make a server that writes its seconds to <folder>/<kind>.json."""
    environment = {"OMP_NUM_THREADS": str(threads), OUT: str(folder / f"{kind}.json"), KIND: kind}
    server = ServerProcess(
        ServerConfig(device="cpu"),
        model,
        name=kind,
        port=free_port(),
        seed=1,
        log_path=folder / f"{kind}.log",
        environment=environment,
    )
    flags = server.argv[server.argv.index("--model-path") :]
    server.argv = [sys.executable, os.path.abspath(__file__), CLOCKED, *flags]
    return server


async def measure(model: str, requests: list[int], threads: int, folder: Path) -> list[dict]:
    """Run both servers, and return a row of each for each number of requests."""
    weights, rows = weights_of_products(model), []
    servers = {kind: clocked_server(kind, model, threads, folder) for kind in KINDS}
    try:
        for server in servers.values():
            server.start()
            await server.wait_ready()
            await generate(server.url, max(requests))  # oneDNN compiles its kernels
        for number in requests:
            machine = limits(threads)
            for kind, server in servers.items():
                path = folder / f"{kind}.json"
                before = clocked(path)
                await generate(server.url, number)
                took = await new_seconds(path, before)
                rows.append({"kind": kind} | row(number, threads, took, weights, machine))
                print(line(rows[-1]), flush=True)
        return rows
    finally:
        for server in servers.values():
            server.stop()


def line(found: dict) -> str:
    cells = [found["requests"], found["threads"], found["kind"], f"{found['step_ms']:.1f}"]
    cells += [f"{found['share'][name]:.1%}" for name in PARTS]
    cells += [f"{found['of_bandwidth']:.2f}", f"{found['of_peak']:.2f}"]
    return f"| {' | '.join(map(str, cells))} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", required=True, help="the folder of a chat model")
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 8, 16, 32, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    args = parser.parse_args()
    head = ["requests", "threads", "weights", "ms a step", *PARTS, "of bandwidth", "of peak"]
    print(f"| {' | '.join(head)} |\n|{'---|' * len(head)}")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for threads in args.threads:
            rows += asyncio.run(measure(args.model, args.requests, threads, Path(name)))
    RESULTS.write_text(json.dumps({"cores": os.cpu_count(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == [CLOCKED]:
        serve_with_clocks(sys.argv[2:])
    else:
        main()
