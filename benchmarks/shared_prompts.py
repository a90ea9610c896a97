"""Tokens per second of a server whose groups compute their prompt once, against once for each.

    CHAT_MODEL=FOLDER python -m benchmarks.shared_prompts [--rounds 5]

`each` is the server under SGLang's policy `lpm`, which is to share prompts among waiting requests.
`pages` has areal_lite/sglang_plugins/prefill.py as well: one of a group goes first, and the others
find its whole pages in the cache. `once` computes the rest of the prompt once, too (`find_alike` in
areal_lite/cpu/sglang/decoder.py). The servers run at once and take turns, so that other load of the
machine falls on all. A ratio to `each` is the median over the rounds, with the lowest and the
highest. Writes results/shared_prompts.json.
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
KINDS = ("each", "pages", "once")


def serve(kind: str, argv: list[str]) -> None:
    """Serve as areal_lite.launch.serve does, without what this kind lacks."""
    from areal_lite.launch import serve
    from areal_lite.sglang_plugins import push

    hooks = push.hooks
    if kind == "each":
        push.hooks = lambda: {k: hook for k, hook in hooks().items() if "_prefill_" not in k}
    os.register_at_fork(after_in_child=_compute_each_row)  # the scheduler is a fork
    serve.main(argv)


def _compute_each_row() -> None:
    from areal_lite.cpu.sglang import decoder

    decoder.find_alike = lambda *_: None


def server_process(kind: str, model: str, folder: Path) -> ServerProcess:
    server = ServerProcess(
        ServerConfig(device="cpu", args={"schedule_policy": "lpm"} if kind == "each" else {}),
        model,
        name=kind,
        port=free_port(),
        seed=1,
        log_path=folder / f"{kind}.log",
        environment={"OMP_NUM_THREADS": "1"},
    )
    if kind != "once":
        flags = server.argv[server.argv.index("--model-path") :]
        server.argv = [sys.executable, "-m", "benchmarks.shared_prompts", kind, *flags]
    return server


async def compare(model: str, workloads: list[Workload], rounds: int, folder: Path) -> list[dict]:
    servers = {kind: server_process(kind, model, folder) for kind in KINDS}
    rows = []
    try:
        for server in servers.values():
            server.start()
            await server.wait_ready()
            await speed(server, Workload(16, 8))
        for workload in workloads:
            taken = {kind: [] for kind in KINDS}
            for _ in range(rounds):
                for kind, server in servers.items():
                    taken[kind].append((await speed(server, workload))[0])
            row: dict[str, object] = workload._asdict()
            row |= {kind: round(statistics.median(found)) for kind, found in taken.items()}
            for kind in KINDS[1:]:
                ratios = [own / each for each, own in zip(taken["each"], taken[kind], strict=True)]
                shown = statistics.median(ratios), min(ratios), max(ratios)
                row[f"{kind} / each"] = [round(ratio, 2) for ratio in shown]
            rows.append(row)
            print(json.dumps(row), flush=True)
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
    if sys.argv[1:2] in [[kind] for kind in KINDS]:
        serve(sys.argv[1], sys.argv[2:])
    else:
        main()
