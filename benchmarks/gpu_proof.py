"""The parts of gpu.py that a page of proof needs (prove.py): plain programs beside this project's.

Each part returns its numbers and its checks, both by name.
"""

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu_runs
import numpy as np
import torch
from gpu_parts import CUDA, DEVICE, SMALL, TINY, Result, save_model, seconds
from gpu_runs import SHARED, command, serving

from areal_lite.servers.client import SamplingParams, SGLangClient
from areal_lite.servers.registry import ServerInfo
from areal_lite_quickstart.make_model import build_char_tokenizer

SERVER_ARGS: dict[str, str | bool] = gpu_runs.SERVER_ARGS
ROOT = Path(__file__).resolve().parents[1]
# SGLang's own benchmark imports kernels that only a machine with a GPU has.
STAND_INS = """
import runpy
from areal_lite.cpu.sglang.stand_ins import install_stand_ins
install_stand_ins()
runpy.run_module("sglang.benchmark.serving", run_name="__main__")
"""


def product(tiny: bool) -> Result:
    """Multiply two square matrices in bfloat16, and copy memory: what the machine can do."""
    size = 512 if tiny else 8192
    a, b = (torch.randn(size, size, device=DEVICE).bfloat16() for _ in range(2))
    product_s = seconds(lambda: a @ b, 20)
    memory = torch.zeros(2**24 if tiny else 2**30, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(memory)
    copy_s = seconds(lambda: target.copy_(memory))
    return {
        "matrix product, TFLOP/s": round(2 * size**3 / product_s / 1e12, 3),
        "memory copy, GB/s": round(len(memory) / copy_s / 1e9, 1),
    }, {}


def sampling(tiny: bool) -> Result:
    """Sample from one server by SGLang's own benchmark and by this project's client, in turn."""
    if not find_spec("datasets"):
        raise ModuleNotFoundError("sglang.benchmark.serving imports datasets: install it")
    folder = Path(tempfile.mkdtemp())
    model = save_model(folder / "model", tiny)
    count, length, vocab = (4, 16, TINY["vocab_size"]) if tiny else (256, 512, SMALL["vocab_size"])
    numbers: dict[str, Any] = {"requests and their tokens": [count, length]}
    fraction = {"mem_fraction_static": 0.6} if CUDA else {}
    own: list[float] = []
    plain: list[float] = []
    with serving(model, folder / "server.log", **fraction) as server:
        asyncio.run(_sample(server, count, 4, vocab))  # warms up
        for _ in range(1 if tiny else 3):
            plain.append(_bench_serving(server, model, count, length, folder))
            start = time.perf_counter()
            asyncio.run(_sample(server, count, length, vocab))
            own.append(count * length / (time.perf_counter() - start))
    numbers["sglang.benchmark.serving, tokens a second"] = round(statistics.median(plain))
    numbers["areal_lite's client, tokens a second"] = round(statistics.median(own))
    return numbers, {"as fast as SGLang's own benchmark": tiny or max(own) > 0.9 * max(plain)}


async def _sample(server: ServerInfo, count: int, length: int, vocab: int) -> None:
    """Complete `count` random prompts of 32 tokens at once, with log-probs and versions."""
    rng = np.random.default_rng()
    async with SGLangClient(500) as client:
        params = SamplingParams(length, 1.0, ())
        prompts = rng.integers(0, vocab, (count, 32)).astype(np.int32)
        asked = (client.generate(server, p, params, f"r{i}", "") for i, p in enumerate(prompts))
        answers = await asyncio.gather(*asked)
    assert all(len(answer.tokens) == length for answer in answers)


def _bench_serving(server: ServerInfo, model: Path, count: int, length: int, out: Path) -> float:
    """Return the tokens a second that SGLang's own benchmark reports."""
    build_char_tokenizer().save_pretrained(out / "tokenizer")  # which ids it may send
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    start = ["-m", "sglang.benchmark.serving"] if CUDA else ["-c", STAND_INS]
    done = subprocess.run(
        [sys.executable, *start, "--backend", "sglang", "--host", host, "--port", port]
        + ["--dataset-name", "random-ids", "--tokenize-prompt", "--random-range-ratio", "1"]
        + ["--num-prompts", str(count), "--random-input-len", "32", "--model", str(model)]
        + ["--tokenizer", str(out / "tokenizer")]
        + ["--random-output-len", str(length), "--output-file", str(out / "bench.jsonl")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    found = re.search(r"Output token throughput \(tok/s\):\s*([\d.]+)", done.stdout)
    if done.returncode or not found:
        raise RuntimeError(f"sglang.benchmark.serving failed:\n{done.stdout[-3000:]}")
    return float(found[1])


def learns(tiny: bool) -> Result:
    """Train a real chat model by examples/chat_model; tiny: run the quickstart with little."""
    folder = Path(tempfile.mkdtemp()) / "run"
    server_args = [f"server.args.{key}={value}" for key, value in SERVER_ARGS.items()]
    if tiny:
        small = ["sft.trainer.steps=20", "trainer.steps=4", "eval.problems=4", f"run_dir={folder}"]
        status = subprocess.run(command("quickstart", *small)).returncode
    else:
        words = ["bash", "examples/chat_model/run.sh", f"run_dir={folder}", *SHARED, *server_args]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        status = subprocess.run(
            [*words, "trainer.steps=100"], cwd=ROOT, env=os.environ | {"PATH": path}
        ).returncode
    if status:
        return {}, {"the run ends well": False}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    pauses = [line["pause_s"] for line in lines[1:]]
    numbers = {
        "rewards": [round(line["reward_mean"], 3) for line in lines],
        "held-out accuracy before and after": [
            summary.get("accuracy_before"),
            summary.get("accuracy_after"),
        ],
        "pause of a push, ms": round(1e3 * statistics.median(pauses), 1),
        "a push, MiB": round(statistics.median(line["megabytes"] for line in lines), 1),
        "mfu": statistics.median(x for line in lines if (x := line.get("mfu"))) if CUDA else None,
        "seconds a step": round(statistics.median(line["time_s"] for line in lines), 2),
    }
    return numbers, {"the run ends well": len(lines) == (4 if tiny else 100)}
