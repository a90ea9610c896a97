"""Tokens per second of a server whose groups compute their prompt once, against once for each.

    CHAT_MODEL=FOLDER python -m benchmarks.shared_prompts [--rounds 5]

`each` is the server without areal_lite/sglang_plugins/prefill.py, under SGLang's policy `lpm`,
which is to share prompts among waiting requests. Both servers run at once and take turns, so that
other load of the machine falls on both. A ratio is the median over the rounds, with the lowest
and the highest. Writes results/shared_prompts.json.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

from areal_lite.config import ServerConfig
from areal_lite.launch.server_pool import ServerProcess
from areal_lite.system.network import free_port
from benchmarks.server_speed import MODELS, Workload, make_model, speed

RESULTS = Path(__file__).with_name("results") / "shared_prompts.json"
WORKLOADS = {
    "0.8 M": [
        Workload(256, 32, prompt=45, group=8),
        Workload(128, 60, prompt=203, group=8),
        Workload(64, 32, prompt=600, group=16),
        Workload(64, 32),
    ],
    "chat": [
        Workload(64, 16, prompt=45, group=8),
        Workload(64, 64, prompt=45, group=8),
        Workload(64, 16, prompt=150, group=8),
    ],
}
EACH = "--each"


def serve_each(argv: list[str]) -> None:
    """Serve as areal_lite.launch.serve does, but let every request compute its prompt."""
    from areal_lite.launch import serve
    from areal_lite.sglang_plugins import push

    hooks = push.hooks
    push.hooks = lambda: {k: hook for k, hook in hooks().items() if "_prefill_" not in k}
    serve.main(argv)


def server_process(name: str, model: str, folder: Path) -> ServerProcess:
    server = ServerProcess(
        ServerConfig(device="cpu", args={"schedule_policy": "lpm"} if name == "each" else {}),
        model,
        name=name,
        port=free_port(),
        seed=1,
        log_path=folder / f"{name}.log",
        environment={"OMP_NUM_THREADS": "1"},
    )
    if name == "each":
        flags = server.argv[server.argv.index("--model-path") :]
        server.argv = [sys.executable, "-m", "benchmarks.shared_prompts", EACH, *flags]
    return server


async def compare(model: str, workloads: list[Workload], rounds: int, folder: Path) -> list[dict]:
    servers = {name: server_process(name, model, folder) for name in ("each", "once")}
    rows = []
    try:
        for server in servers.values():
            server.start()
            await server.wait_ready()
            await speed(server, Workload(16, 8))
        for workload in workloads:
            taken = {name: [] for name in servers}
            for _ in range(rounds):
                for name, server in servers.items():
                    taken[name].append((await speed(server, workload))[0])
            ratios = [once / each for each, once in zip(*taken.values(), strict=True)]
            shown = statistics.median(ratios), min(ratios), max(ratios)
            row = {name: round(statistics.median(found)) for name, found in taken.items()}
            rows.append(workload._asdict() | row | {"ratio": [round(r, 2) for r in shown]})
            print(json.dumps(rows[-1]), flush=True)
    finally:
        for server in servers.values():
            server.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models = {"0.8 M": make_model(folder / "model", *MODELS["0.8 M"])}
        if "CHAT_MODEL" in os.environ:
            models["chat"] = os.environ["CHAT_MODEL"]
        rows = []
        for size, model in models.items():
            found = asyncio.run(compare(model, WORKLOADS[size], options.rounds, folder))
            rows += [{"model": size} | row for row in found]
    RESULTS.write_text(json.dumps({"rounds": options.rounds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == [EACH]:
        serve_each(sys.argv[2:])
    else:
        main()
