"""Tokens per second of a server without a GPU: SGLang's own torch code against this project's.

    python benchmarks/server_speed.py [--model FOLDER] [--rounds 5]

`stock` has SGLang's layers and attention, `ours` those of areal_lite/cpu/sglang, and
`ours_threads` the same with two threads. Everything else is equal.

The servers run at once and take turns, so that other load of the machine falls on all. Speeds are
tokens per second of wall-clock time, and of the server's processor time. Trust the second one on a
busy machine. A ratio is the median of those of the rounds, with the lowest and the highest.

Without --model, the models are random Qwen3 models of 0.8 M and 42.6 M parameters, and the script
writes results/server_speed.json.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import aiohttp
import psutil

from areal_lite.config import ServerConfig
from areal_lite.launch.server_pool import ServerProcess
from areal_lite.system.network import free_port


class Workload(NamedTuple):
    """Requests at once, the tokens of each, and those of the prompt that each group shares."""

    requests: int
    tokens: int
    prompt: int = 12
    group: int = 1


WORKLOADS = [
    Workload(64, 32),
    Workload(256, 32),
    Workload(128, 256),
    Workload(384, 64),
    Workload(128, 60, prompt=203, group=8),
]
MODELS = {"0.8 M": (128, 4, 32), "42.6 M": (768, 6, 64)}  # hidden size, layers, size of a head
SERVERS = ("stock", "ours", "ours_threads")
RESULTS = Path(__file__).with_name("results") / "server_speed.json"
STOCK = "--stock-operators"


def serve_with_stock_operators(argv: list[str]) -> None:
    """Serve as areal_lite.launch.serve does, but keep SGLang's own layers and attention."""
    from areal_lite.cpu import sglang as cpu
    from areal_lite.cpu.sglang.stand_ins import install_stand_ins
    from areal_lite.launch import serve

    install_stand_ins()
    # SGLang's platform registers hooks around these as soon as it is known.
    cpu._DENSE_MODELS = ()
    cpu._lm_head = lambda original, *args, **named: original(*args, **named)
    import sglang  # noqa: F401  first: it loads the platform itself

    from areal_lite.cpu.sglang.platform import CpuPlatform

    CpuPlatform.init_backend = lambda self: None
    serve.main(argv)


def make_model(folder: Path, hidden: int, layers: int, head: int) -> str:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = dict(
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // head,
        num_key_value_heads=hidden // head // 2,
        head_dim=head,
    )
    config = Qwen3Config(
        vocab_size=98,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        eos_token_id=1,
        bos_token_id=None,
        **shape,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return str(folder)


def processor_seconds(server: ServerProcess) -> float:
    root = psutil.Process(server.info.pid)
    return sum(
        t.user + t.system for t in (p.cpu_times() for p in (root, *root.children(recursive=True)))
    )


async def speed(server: ServerProcess, workload: Workload) -> tuple[float, float]:
    """Return tokens per second of wall-clock time and of processor time."""
    requests, tokens, length, group = workload
    # Prompts that no earlier call had: the server keeps those.
    prompts = [[random.randrange(2, 98) for _ in range(length)] for _ in range(requests // group)]

    async def one(session: aiohttp.ClientSession, prompt: list[int]) -> None:
        params = {"max_new_tokens": tokens, "ignore_eos": True}
        body = {"input_ids": prompt, "sampling_params": params, "return_logprob": True}
        async with session.post(f"{server.url}/generate", json=body) as response:
            answer = await response.json()
        if len(answer["output_ids"]) != tokens:
            raise RuntimeError(f"asked for {tokens} tokens, got {answer}")

    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(600)
    ) as session:
        start, busy = time.perf_counter(), processor_seconds(server)
        await asyncio.gather(*(one(session, prompts[i // group]) for i in range(requests)))
        return requests * tokens / (time.perf_counter() - start), requests * tokens / (
            processor_seconds(server) - busy
        )


async def compare(
    servers: dict[str, ServerProcess], workloads: list[Workload], rounds: int
) -> list[dict]:
    for name, server in servers.items():
        start = time.perf_counter()
        server.start()
        await server.wait_ready()
        print(f"{name}: ready after {time.perf_counter() - start:.1f} s", flush=True)
        await speed(server, Workload(16, 8))
    rows = []
    for workload in workloads:
        speeds = {name: [] for name in servers}
        for _ in range(rounds):
            for name, server in servers.items():
                speeds[name].append(await speed(server, workload))
        row = workload._asdict() | {
            name: summary(taken, speeds["stock"]) for name, taken in speeds.items()
        }
        rows.append(row)
        print(json.dumps(row), flush=True)
    return rows


def summary(taken: list[tuple[float, float]], stock: list[tuple[float, float]]) -> dict:
    """Return medians of both speeds, and their ratios to `stock`: median, lowest, highest."""
    found = {}
    for i, unit in enumerate(("per_s", "per_processor_s")):
        ratios = sorted(own[i] / other[i] for own, other in zip(taken, stock, strict=True))
        found[unit] = round(statistics.median(own[i] for own in taken))
        found[f"{unit}_ratio"] = [
            round(value, 2) for value in (statistics.median(ratios), ratios[0], ratios[-1])
        ]
    return found


def server_process(name: str, model: str, folder: Path) -> ServerProcess:
    server = ServerProcess(
        ServerConfig(device="cpu"),
        model,
        name=name,
        port=free_port(),
        seed=1,
        log_path=folder / f"{name}.log",
        environment={"OMP_NUM_THREADS": "2" if name == "ours_threads" else "1"},
    )
    if name == "stock":
        flags = server.argv[server.argv.index("--model-path") :]
        server.argv = [sys.executable, os.path.abspath(__file__), STOCK, *flags]
    return server


def measure(model: str, workloads: list[Workload], rounds: int, folder: Path) -> list[dict]:
    servers = {name: server_process(name, model, folder) for name in SERVERS}
    try:
        return asyncio.run(compare(servers, workloads, rounds))
    finally:
        for server in servers.values():
            server.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.model:
            measure(options.model, WORKLOADS, options.rounds, folder)
            return
        rows = []
        for size, shape in MODELS.items():
            model = make_model(folder / size, *shape)
            workloads = WORKLOADS if size == "0.8 M" else [Workload(128, 64)]
            found = measure(model, workloads, options.rounds, folder)
            rows += [{"parameters": size} | row for row in found]
    result = {"cores": os.cpu_count(), "rounds": options.rounds, "rows": rows}
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == [STOCK]:
        serve_with_stock_operators(sys.argv[2:])
    else:
        main()
