"""Measure what a slow judge with errors costs a run in trajectories a second.

    python -m benchmarks.judge --rounds 2    # 15 minutes on two cores

The controller, its store and its reward workers are real. The server of benchmarks.controller_load
answers without a model, and a judge of the same kind takes 30 s for a verdict. A tenth of its
answers are errors, and come after 0 to 30 s. Two controllers take turns, with the same settings but
for their rewards: a function, or the judge.

Writes <out>/judge.json. A reward that the judge did not give ends the benchmark.
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
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from aiohttp import web

from areal_lite.config import TrainConfig
from areal_lite.run_dir.paths import STORE_FILE
from areal_lite.run_dir.reader import RunReader
from areal_lite.system.processes import die_with_parent, dying_with_me
from benchmarks.controller_load.load import Load
from benchmarks.controller_load.measure import measure
from benchmarks.controller_load.server import fresh_server
from benchmarks.launch import ROOT

LATENCY_S, ERRORS = 30.0, 0.1
LOAD = Load(in_flight=256, mean_tokens=20, mean_s=4.0, batch_groups=32, max_staleness=31)
STEPS = 16
SCORE, REWARD = 7, 0.7
RUBRIC = """---
url: http://127.0.0.1:{port}/v1
model: judge
range: [0, 10]
concurrency: 10000
---
{{prompt}}
{{completion}}
"""


async def serve() -> None:
    """Be the judge, on a free port that is printed."""
    rng = random.Random(0)

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        if rng.random() < ERRORS:
            await asyncio.sleep(LATENCY_S * rng.random())
            return web.Response(status=500, text="overloaded")
        await asyncio.sleep(LATENCY_S)
        choice = {"message": {"role": "assistant", "content": f"It is a {SCORE}."}}
        return web.json_response({"choices": [choice], "usage": {"total_tokens": 100}})

    app = web.Application()
    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, backlog=4096)
    await site.start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


@contextlib.contextmanager
def judge(folder: Path, config: TrainConfig) -> Iterator[None]:
    """Start a judge, and have it give the rewards."""
    with subprocess.Popen(
        [sys.executable, "-m", "benchmarks.judge", "serve"],
        stdout=subprocess.PIPE,
        env=os.environ | dying_with_me(),
        text=True,
    ) as process:
        assert process.stdout is not None
        rubric = folder / "rubric.md"
        rubric.write_text(RUBRIC.format(port=process.stdout.readline().strip()))
        config.reward.function = f"areal_lite.workflows.judge:{rubric}"
        config.reward.timeout_s = 4 * LATENCY_S
        yield
        process.kill()


def run(judged: bool, steps: int) -> dict:
    """Measure a new controller, with or without the judge."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, run_dir = LOAD.config(folder), folder / "run"
        with judge(folder, config) if judged else contextlib.nullcontext():
            with fresh_server(run_dir, config, LOAD):
                found = measure(run_dir, LOAD, steps)
        given = {row["reward"] for row in RunReader(run_dir / STORE_FILE).trajectories()}
        assert not judged or given <= {REWARD, None}, (
            f"rewards that the judge did not give: {given}"
        )
    totals = found["totals"]
    print("judge" if judged else "function", found["per_s"], totals, flush=True)
    return {"judged": judged, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", nargs="?", choices=["compare", "serve"], default="compare")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    if args.what == "serve":
        die_with_parent()
        asyncio.run(serve())
        return
    rounds = [[run(judged, args.steps) for judged in (False, True)] for _ in range(args.rounds)]
    ratios = [judged["per_s"] / plain["per_s"] for plain, judged in rounds]
    print("trajectories a second with the judge, as a share:", *[f"{r:.3f}" for r in ratios])
    facts = {
        "cores": os.cpu_count(),
        "latency_s": LATENCY_S,
        "errors": ERRORS,
        "load": asdict(LOAD),
    }
    found = json.dumps({**facts, "ratios": ratios, "rounds": rounds}, indent=1, default=str)
    (args.out / "judge.json").write_text(found + "\n")


if __name__ == "__main__":
    main()
