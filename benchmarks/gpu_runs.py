"""The parts of gpu.py that start servers or whole runs.

Each part returns its numbers and its checks, both by name.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import seams
import speculation
import torch
from gpu_parts import CUDA, GIB, Result, random_batch, reference_logprobs, save_model

from areal_lite.config import ServerConfig, TrainerConfig
from areal_lite.launch.server_pool import ServerProcess, fraction_of_free
from areal_lite.megatron.parallel import shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.servers.blocking import post
from areal_lite.servers.registry import ServerInfo, announced_servers
from areal_lite.system.gpus import gpu_memory, visible_gpus
from areal_lite.system.network import free_port

SERVER_ARGS: dict[str, str | bool] = {}  # more options of SGLang for every server
SHARED = ["+experiment=one_gpu"] if CUDA else []
QUICKSTART = [
    "trainer.steps=8",
    "sft.trainer.steps=100",
    "eval.problems=64",
    "make_model.head_dim=64",
]
DISTRIBUTED = ["sync.transport=distributed", "sync.verify=true"]
TRAIN = [
    "+task=addition",
    "trainer.steps=30",
    "trainer.batch_groups=8",
    "trainer.save_every=1",
    "rollout.max_new_tokens=64",
    "rollout.max_concurrent=64",
    "eval.problems=0",
]


@contextlib.contextmanager
def serving(model: Path, log: Path, dtype: str = "bfloat16", **args: Any) -> Iterator[ServerInfo]:
    """Run one server; `args` are options of SGLang."""
    server = ServerProcess(
        ServerConfig(args={**SERVER_ARGS, "dtype": dtype, **args}),
        str(model),
        name="server",
        port=free_port(),
        seed=1,
        log_path=log,
        environment={"GLOO_SOCKET_IFNAME": "lo"},
    )
    server.start()
    try:
        asyncio.run(server.wait_ready())
        yield server.info
    finally:
        server.stop()


def generate(server: ServerInfo, count: int, length: int, vocab: int) -> list[dict]:
    """Complete `count` random prompts of 32 tokens and return tokens and log-probs of each."""
    prompts = np.random.default_rng(0).integers(0, vocab, (count, 32)).tolist()
    sampling = {"max_new_tokens": length, "temperature": 1.0, "ignore_eos": True}

    def one(prompt: list[int]) -> dict:
        body = {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True}
        sampled = post(server, "/generate", body, 500)["meta_info"]["output_token_logprobs"]
        logprobs, tokens = zip(*((p, t) for p, t, _ in sampled))
        return {"tokens": [*prompt, *tokens], "logprobs": np.array(logprobs, np.float32)}

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, prompts))


def tags(tiny: bool) -> Result:
    """Push new weights into running requests, and count tokens with the wrong version.

    Without a GPU, overlapped scheduling is forced on, as it is with one.
    """
    folder = Path(tempfile.mkdtemp())
    models = seams.save_models(folder, head_dim=64 if CUDA else 16)
    settings: dict[str, Any] = {"disable_overlap_schedule": False, "dtype": "float32"}
    if CUDA:
        settings = {"mem_fraction_static": 0.3}
    versions = range(1, (2 if tiny else seams.PUSHES) + 1)
    with serving(models[0], folder / "server.log", **settings) as server:
        answers = seams.generate_across_pushes(server, models, seams.push_disk, versions)
    wrong, count = seams.wrong_tags(models, answers, noise=0.3 if CUDA else 0.01)
    return {"seams": count, "wrong tags": wrong}, {
        "requests are interrupted": count >= seams.REQUESTS,
        "no token has the wrong version": wrong == 0,
    }


def agree(tiny: bool) -> Result:
    """Compare the log-probs of what a server sampled with the trainer's."""
    folder = Path(tempfile.mkdtemp())
    model = save_model(folder / "model", tiny)
    count, length, vocab = (4, 40, 500) if tiny else (256, 512, 150000)
    numbers, checks = {}, {}
    for fp32 in (False, True):
        name = "float32 head" if fp32 else "bfloat16 head"
        args = {"enable_fp32_lm_head": True} if fp32 else {}
        start = time.perf_counter()
        fraction = {"mem_fraction_static": 0.3} if CUDA else {}
        with serving(model, folder / f"{name}.log", **args, **fraction) as server:
            numbers[f"{name}: start_s"] = round(time.perf_counter() - start)
            generate(server, count, 16, vocab)
            start = time.perf_counter()
            done = generate(server, count, length, vocab)
            numbers[f"{name}: tokens a second"] = round(
                count * length / (time.perf_counter() - start)
            )
        few = done[:8]
        differences = _difference(model, few, fp32)
        numbers[f"{name}: mean difference, nats"] = round(float(differences.mean()), 5)
        rounding = _rounding(model, few)
        numbers["error of bfloat16 in transformers, nats"] = round(rounding, 5)
        # Both sides round as transformers does, and independently.
        checks[f"{name}: server and trainer agree"] = bool(differences.mean() < 1.6 * rounding)
    shutdown()
    return numbers, checks


def _difference(model: Path, done: list[dict], fp32: bool) -> np.ndarray:
    """Return |log-prob of the server - of the trainer| of the sampled tokens, in nats."""
    policy = Policy(TrainerConfig(dtype="bfloat16", fp32_head=fp32), model, 1)
    batch = random_batch(np.array([len(one["tokens"]) for one in done]), 2)
    batch.tokens[:] = np.concatenate([one["tokens"] for one in done])
    own = policy.logprobs(policy.microbatches(batch)).float().cpu().numpy()
    parts = np.split(own, batch.cu_seqlens[1:-1])
    return np.concatenate([abs(x[32:] - one["logprobs"]) for x, one in zip(parts, done)])


def _rounding(model: Path, done: list[dict]) -> float:
    """Return the mean error of transformers' log-probs in bfloat16, in nats."""
    sequences = [one["tokens"] for one in done]
    exact, rounded = (
        torch.cat([x[32:] for x in reference_logprobs(model, dtype, sequences)])
        for dtype in (torch.float32, torch.bfloat16)
    )
    return (exact - rounded).abs().mean().item()


def drafts(tiny: bool) -> Result:
    """Decode with drafts and without, in turn, and compare the log-probs with the trainer's.

    The model is that of $CHAT_MODEL, or a random one. Prompts are random, and come again.
    """
    folder = Path(tempfile.mkdtemp())
    model = Path(os.environ.get("CHAT_MODEL") or save_model(folder / "model", tiny))
    algorithm, length, vocab = ("NGRAM", 256, 40_000) if CUDA else ("history", 16, 500)
    args = {"mem_fraction_static": 0.3, "dtype": "bfloat16", "max_total_tokens": 65_536}
    numbers: dict[str, Any] = {}
    with speculation.servers(
        str(model), None, algorithm, device="cuda" if CUDA else "cpu", **SERVER_ARGS, **args
    ) as both:
        for at_once in (1,) if tiny else (1, 8, 32):
            asked = np.random.default_rng(at_once).integers(0, vocab, (4, 32)).tolist()
            row = speculation.ratios(both, at_once, asked, -1, length)
            numbers[f"{at_once} at once: tokens a pass"] = row["tokens_per_step"]
            numbers[f"{at_once} at once: speed, lowest and highest"] = row["per_second_ratio"]
        done = {name: generate(s.info, 8, 64, vocab) for name, s in zip(("plain", "drafts"), both)}
    rounding = _rounding(model, done["plain"])
    differences = {
        name: float(_difference(model, some, False).mean()) for name, some in done.items()
    }
    shutdown()
    numbers |= {f"{name}: mean difference, nats": round(x, 5) for name, x in differences.items()}
    numbers["error of bfloat16 in transformers, nats"] = round(rounding, 5)
    return numbers, {"log-probs of drafts are right": differences["drafts"] < 1.6 * rounding}


def order(tiny: bool) -> Result:
    """Start a server beside an empty and beside a full GPU, and read the size of its cache."""
    folder = Path(tempfile.mkdtemp())
    model = save_model(folder / "model", tiny)
    numbers: dict[str, Any] = {}
    held: list[torch.Tensor] = []
    for name, share in (("empty", 0.0), ("full", 0.55)):
        memory = gpu_memory(visible_gpus()[0])
        assert memory is not None, "nvidia-smi does not know the GPU"
        if share:
            held.append(torch.empty(int(share * memory.total), dtype=torch.uint8, device="cuda"))
            memory = gpu_memory(visible_gpus()[0]) or memory
        log = folder / f"{name}.log"
        with serving(model, log, mem_fraction_static=fraction_of_free(0.2, memory)):
            found = re.findall(r"max_total_num_tokens=(\d+)", log.read_text(errors="replace"))
        numbers[f"KV tokens beside an {name} GPU"] = int(found[-1]) if found else 0
        numbers[f"GiB free, {name}"] = round(memory.free / GIB, 1)
    empty, full = (numbers[f"KV tokens beside an {name} GPU"] for name in ("empty", "full"))
    return numbers, {"the same cache within 2 %": bool(abs(full - empty) < 0.02 * empty)}


def command(name: str, *overrides: str) -> list[str]:
    """Return the command line of a command of areal-lite."""
    extra = [f"server.args.{key}={value}" for key, value in SERVER_ARGS.items()]
    with_servers = extra if name in ("quickstart", "train") else []
    return [sys.executable, "-m", "areal_lite", name, *overrides, *with_servers]


def quickstart(tiny: bool) -> Result:
    """Run the quickstart on one GPU, from its model to its last step."""
    folder = Path(tempfile.mkdtemp()) / "run"
    overrides = [*QUICKSTART, f"run_dir={folder}"]
    return _summary(folder, subprocess.run(command("quickstart", *overrides)).returncode)


def _summary(folder: Path, status: int) -> Result:
    """Return the numbers of a run, and whether it did its steps and server and trainer agree."""
    steps = [json.loads(line) for line in _lines(folder)]
    pauses = [step["pause_s"] for step in steps if step.get("pause_s")]
    if len(pauses) < 2:
        return {"steps": len(steps)}, {"the run ends well": False}
    differences = _logprob_diffs(steps)
    numbers = {
        "steps": len(steps),
        "first and later pause, ms": [
            round(1e3 * pauses[0]),
            round(1e3 * statistics.median(pauses[1:])),
        ],
        "logprob_diff": round(max(differences), 5) if differences else None,
    }
    checks = {"the run ends well": status == 0, "all steps": len(steps) == 8}
    checks["server and trainer agree"] = bool(differences) and max(differences) < 0.05
    return numbers, checks


def _logprob_diffs(steps: list[dict]) -> list[float]:
    return [step["logprob_diff"] for step in steps if step.get("logprob_diff")]


def killed(tiny: bool) -> Result:
    """Kill the server, then the supervisor with its trainer, and resume the run."""
    run = Path(tempfile.mkdtemp()) / "run"
    train = command("train", *SHARED, *TRAIN, *_new_model(run.parent), f"run_dir={run}")
    process = subprocess.Popen(train)
    _wait_for_steps(run, 3, process)
    server = announced_servers(run)[0]
    os.kill(server.pid, signal.SIGKILL)
    _wait_for_steps(run, 8, process)
    again = announced_servers(run)
    process.kill()
    process.wait()
    before = _steps(run)
    status = subprocess.run([*train, "resume=auto"]).returncode
    numbers = {"steps before the kill": before, "steps in the end": _steps(run)}
    return numbers, {
        "the server came back": bool(again) and again[0].pid != server.pid,
        "the run resumes and ends": status == 0 and _steps(run) == 30,
    }


def _new_model(folder: Path) -> list[str]:
    """Make a small model in `folder` and return the setting that names it."""
    model = folder / "model"
    stage = [
        sys.executable,
        "-m",
        "areal_lite_quickstart.make_model",
        f"out={model}",
        "head_dim=64",
    ]
    subprocess.run(stage, check=True)
    return [f"model={model}"]


def _lines(folder: Path) -> list[str]:
    path = folder / "metrics.jsonl"
    return path.read_text().splitlines() if path.exists() else []


def _steps(folder: Path) -> int:
    return len(_lines(folder))


def _wait_for_steps(folder: Path, steps: int, process: subprocess.Popen) -> None:
    _wait(lambda: _steps(folder) >= steps, process)


def _wait(condition: Callable[[], bool], process: subprocess.Popen) -> None:
    """Wait for a condition of a run."""
    while not condition():
        assert process.poll() is None, f"the run ended with status {process.returncode}"
        time.sleep(0.5)


def broadcast(tiny: bool) -> Result:
    """Push by NCCL between two GPUs of a node, and compare what arrived."""
    folder = Path(tempfile.mkdtemp()) / "run"
    overrides = [*QUICKSTART, *DISTRIBUTED, f"run_dir={folder}"]
    environment = os.environ | {"NCCL_DEBUG": "INFO"}
    status = subprocess.run(command("quickstart", *overrides), env=environment).returncode
    numbers, checks = _summary(folder, status)
    log = (folder / "logs" / "trainer.log").read_text(errors="replace")
    ways = sorted(set(re.findall(r"via (\S+)", log)))
    numbers["NCCL connects via"] = ways
    return numbers, checks | {"by P2P": any(way.startswith("P2P") for way in ways)}


def servers(tiny: bool) -> Result:
    """Push by NCCL to two servers, kill one after the other, and wait until each is back."""
    run = Path(tempfile.mkdtemp()) / "run"
    settings = [*TRAIN, *DISTRIBUTED, "server.count=2", "sync.timeout_s=30", "trainer.steps=100000"]
    model = _new_model(run.parent)
    process = subprocess.Popen(command("train", *settings, *model, f"run_dir={run}"))
    numbers: dict[str, Any] = {}
    _wait_for_steps(run, 4, process)
    for name in ("server-0", "server-1"):
        old = _pids(run)
        started, steps = time.monotonic(), _steps(run)
        os.killpg(old[name], signal.SIGKILL)
        _wait(lambda old=old, name=name: _pids(run).get(name, old[name]) != old[name], process)
        numbers[f"{name} is back"] = (
            f"after {time.monotonic() - started:.0f} s, {_steps(run) - steps} steps went on"
        )
        _wait_for_steps(run, _steps(run) + 6, process)
    process.kill()
    process.wait()
    lines = [json.loads(line) for line in _lines(run)]
    compared = [line["verified"] for line in lines]  # tensors, over all servers of a push
    lost = sum(bool(line["failed"]) for line in lines)
    numbers |= {"steps": len(lines), "pushes that lost a server": lost, "compared": compared[-3:]}
    return numbers, {
        "pushes to one server go on": min(compared) * 2 == max(compared) > 0,
        "both servers are back in the end": set(compared[-3:]) == {max(compared)},
        "server and trainer agree": max(_logprob_diffs(lines)) < 0.05,
    }


def _pids(run: Path) -> dict[str, int]:
    return {server.name: server.pid for server in announced_servers(run)}
