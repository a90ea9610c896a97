"""Tokens per second of a server without a GPU: SGLang's torch attention against this project's.

    python benchmarks/decode_attention.py [--model FOLDER] [--rounds 3]

Both servers run at once and take turns, so that other load of the machine falls on both. Everything
else is equal. Each workload prints two lines: tokens per second of wall-clock time, and of the
server's processor time. Trust the second one on a busy machine. Ratios are of medians over the
rounds. Without --model, the model is a random Qwen3 of 0.8 M parameters.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

import aiohttp
import psutil

from areal_lite.config import ServerConfig
from areal_lite.servers.process import ServerProcess
from areal_lite.system.network import free_port

WORKLOADS = [(64, 32), (256, 32), (128, 256)]  # requests at once, tokens each
STOCK = "--stock-attention"


def serve_with_stock_attention(argv: list[str]) -> None:
    """Serve as areal_lite.servers.serve does, but keep SGLang's own attention backends."""
    from areal_lite.servers import serve
    from areal_lite.servers.cpu.stand_ins import install_stand_ins

    install_stand_ins()
    import sglang  # noqa: F401  first: it loads the platform itself

    from areal_lite.servers.cpu.platform import CpuPlatform

    CpuPlatform.init_backend = lambda self: None
    serve.main(argv)


def make_model(folder: Path) -> str:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    shape = dict(
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
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


async def speed(server: ServerProcess, requests: int, tokens: int) -> tuple[float, float]:
    """Return tokens per second of wall-clock time and of processor time."""
    rng = random.Random(requests)

    async def one(session: aiohttp.ClientSession) -> None:
        prompt = [rng.randrange(2, 98) for _ in range(12)]
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
        await asyncio.gather(*(one(session) for _ in range(requests)))
        return requests * tokens / (time.perf_counter() - start), requests * tokens / (
            processor_seconds(server) - busy
        )


async def compare(servers: dict[str, ServerProcess], rounds: int) -> None:
    for name, server in servers.items():
        start = time.perf_counter()
        server.start()
        await server.wait_ready()
        print(f"{name:>6}: ready after {time.perf_counter() - start:.1f} s")
        await speed(server, 16, 8)
    for requests, tokens in WORKLOADS:
        speeds = {name: [] for name in servers}
        for _ in range(rounds):
            for name, server in servers.items():
                speeds[name].append(await speed(server, requests, tokens))
        for i, unit in enumerate(("tok/s", "tok/s of processor time")):
            stock, ours = (
                statistics.median(s[i] for s in speeds[name]) for name in ("stock", "ours")
            )
            print(
                f"{requests:4d} x {tokens:3d} tokens: stock {stock:6.0f}, ours {ours:6.0f} {unit}, "
                f"ratio {ours / stock:.2f}",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or make_model(Path(folder, "model"))
        config = ServerConfig(device="cpu")
        servers = {
            name: ServerProcess(
                config,
                model,
                name=name,
                port=free_port(),
                seed=1,
                log_path=Path(folder, f"{name}.log"),
            )
            for name in ("stock", "ours")
        }
        flags = servers["stock"].argv[servers["stock"].argv.index("--model-path") :]
        servers["stock"].argv = [sys.executable, os.path.abspath(__file__), STOCK, *flags]
        try:
            asyncio.run(compare(servers, options.rounds))
        finally:
            for server in servers.values():
                server.stop()


if __name__ == "__main__":
    if sys.argv[1:2] == [STOCK]:
        serve_with_stock_attention(sys.argv[2:])
    else:
        main()
