"""Measure what workflows that hang, block, crash, leak and exit cost a run.

    python benchmarks/hostile.py --seeds 3    # about an hour on two cores

The controller and its worker processes are real; the tests' doubles serve and train. Each
of 1,000 prompts is healthy, or one of the FAULTS, each with a share of 1 %. A healthy run has the
same prompts without faults. Both run in turn under each schedule, for `--seeds` seeds, with up to
1,000 episodes in flight, and are evaluated before, in the middle and at the end.

Writes <out>/hostile.json: one record per run, with its trajectories a second, and the ratio of the
hostile to the healthy run for each schedule. The last steps of a run do not count in `per_second`,
as many as may be in flight: no more groups start then than the run needs, so that its last batch
waits for each of them, once. They count in `per_second_to_the_end`. A run that stops, or in which
`areal-lite diagnose --audit` finds a fault, ends the benchmark.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

from areal_lite.rollout.episode import Episode, Transcript
from areal_lite.trajectory import Trajectory
from areal_lite_quickstart.make_model import build_char_tokenizer
from tests.integration.controller_run import Run, push, wrong_with

ROOT = Path(__file__).resolve().parents[1]
FAULTS = ("hang", "block", "crash", "leak", "exit")
PROMPTS, SHARE, GROUP_SIZE, BATCH = 1000, 0.01, 4, 32
TRAIN_S, TOKEN_S, TIMEOUT_S = 3.0, 0.5, 30.0
SCHEDULES = {
    "sync": {"buffer__max_staleness": 0, "rollout__interrupt": "none"},
    "one_step": {"buffer__max_staleness": 1, "rollout__interrupt": "none"},
    "async": {"buffer__max_staleness": 7},
    "window": {"buffer__max_staleness": 7, "buffer__window": 4 * BATCH},
}
STEPS = {"sync": 8, "one_step": 12, "async": 32, "window": 32}
LEAKED = []


async def workflow(episode: Episode) -> Trajectory:
    """Sample, use a slow tool, and sample again; or do what the answer of the prompt says."""
    transcript = Transcript(episode)
    await transcript.sample(12)
    await asyncio.sleep(random.uniform(0.5, 1.5))
    match episode.prompt.answer:
        case "hang":
            await asyncio.Event().wait()
        case "block":
            time.sleep(1e6)
        case "crash":
            os._exit(1)
        case "leak":
            while True:
                LEAKED.append(bytearray(1 << 28))
        case "exit":
            sys.exit()
    if transcript.remaining_tokens > 0 and transcript.finish_reason != "length":
        await transcript.sample(12)
    return transcript.trajectory(float(episode.sample_index % 2))


def write_prompts(path: Path, seed: int, share: float) -> None:
    """Write prompts, a `share` of them with each fault."""
    draw = random.Random(seed)
    with path.open("w") as file:
        for number in range(PROMPTS):
            place = draw.random()
            fault = FAULTS[int(place / share)] if share and place < len(FAULTS) * share else "fine"
            file.write(json.dumps({"question": f"{number}+1=", "answer": fault}) + "\n")


def measure(folder: Path, schedule: str, seed: int, steps: int, share: float) -> dict:
    """Run a scripted trainer for `steps` steps and the last ones, and return what it got."""
    total = steps + SCHEDULES[schedule]["buffer__max_staleness"] + 1
    folder.mkdir()
    build_char_tokenizer().save_pretrained(folder)
    described = {"model_type": "qwen3", "eos_token_id": 1, "vocab_size": 100}
    (folder / "config.json").write_text(json.dumps(described))
    write_prompts(folder / "train.jsonl", seed, share)
    run = Run(
        folder / "run",
        str(folder),
        data__source="jsonl",
        data__args={},
        data__path=f"{folder}/train.jsonl",
        data__eval_path=f"{folder}/train.jsonl",
        data__chat=False,
        reward__function="areal_lite.rewards.exact:exact_reward",
        rollout__workflow="benchmarks.hostile:workflow",
        rollout__group_size=GROUP_SIZE,
        rollout__max_concurrent=1000,
        rollout__episode_timeout_s=TIMEOUT_S,
        trainer__batch_groups=BATCH,
        trainer__steps=total,
        eval__problems=100,
        **SCHEDULES[schedule],
    )
    try:
        run.start_server("s0", TOKEN_S)
        run.start_server("s1", TOKEN_S)
        run.start_controller()
        client = run.client(600)
        evaluations: list[dict] = []
        evaluator = run.client(60)

        def evaluate(version: int) -> None:
            evaluations.append(evaluator.evaluate(version))

        evaluate(0)
        began, ends, trajectories = time.monotonic(), [], [0]
        middle = threading.Thread(target=evaluate, args=[steps // 2])
        for step in range(total):
            batch, _ = client.batch(step, 0, 1)
            trajectories.append(trajectories[-1] + batch.num_sequences)
            time.sleep(TRAIN_S)
            push(client, step + 1, run_mode(schedule))
            ends.append(time.monotonic() - began)
            if step + 1 == steps // 2:
                middle.start()
        middle.join()
        evaluate(total)
        totals = client.finish()
    finally:
        run.stop()
    assert not (wrong := wrong_with(run.path)), wrong
    return {
        "schedule": schedule,
        "seed": seed,
        "hostile": bool(share),
        "trajectories": trajectories[steps],
        "seconds": ends[steps - 1],
        "per_second": trajectories[steps] / ends[steps - 1],
        "per_second_to_the_end": trajectories[-1] / ends[-1],
        "load": os.getloadavg()[0],  # of other processes, too
        "failed_rollouts": totals["failed_rollouts"],
        "quarantined": len(totals["quarantined"]),
        "evaluations": [
            {key: line[key] for key in ("version", "failures", "timeouts")} for line in evaluations
        ],
    }


def run_mode(schedule: str) -> str | None:
    return None if SCHEDULES[schedule].get("rollout__interrupt") == "none" else "in_place"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    options = parser.parse_args()
    runs = []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in range(options.seeds):
            for schedule in options.schedules:
                for share in (0.0, SHARE):
                    folder = Path(scratch, f"{schedule}-{seed}-{share}")
                    runs.append(measure(folder, schedule, seed, STEPS[schedule], share))
                    print(runs[-1], flush=True)
    ratios = {key: ratios_of(runs, key) for key in ("per_second", "per_second_to_the_end")}
    result = {"ratios": ratios, "cores": os.cpu_count(), "runs": runs}
    (options.out / "hostile.json").write_text(json.dumps(result, indent=1) + "\n")
    print(ratios)


def ratios_of(runs: list[dict], key: str) -> dict[str, list[float]]:
    """Return `key` of each hostile run as a share of the healthy run before it, by schedule."""
    ratios: dict[str, list[float]] = {}
    for healthy, hostile in zip(runs[::2], runs[1::2]):
        ratios.setdefault(healthy["schedule"], []).append(hostile[key] / healthy[key])
    return ratios


if __name__ == "__main__":
    main()
