"""Compare training steps that take the idle cores with steps of one thread.

    CHAT_MODEL=FOLDER python -m benchmarks.free_cores [--rounds 2] [--steps 8]

Without a GPU, `schedule=sync` leaves a core idle during each training step, and `schedule=async`
does not. Each round trains SmolLM2-135M-Instruct by both schedules, in turn with and without
OMP_NUM_THREADS=1. The learning rate is next to nothing, so that all steps have equal work. Ratios
are of the median seconds of a training step. The first steps are left out: a rank has measured
nothing before its second one. Needs a quiet machine. Writes results/free_cores.json.
"""

import argparse
import json
import shutil
from pathlib import Path
from statistics import median

from benchmarks.against_trl.tasks import CHAT, warm_model, write_prompts
from benchmarks.launch import ROOT, areal_lite

RESULTS = Path(__file__).with_name("results") / "free_cores.json"
THREADS = {"idle cores": {}, "one thread": {"OMP_NUM_THREADS": "1"}}
SKIPPED = 2  # steps


def run(work: Path, schedule: str, threads: str, steps: int) -> list[float]:
    """Train so many steps, and return the seconds of each."""
    model, (prompts, _) = warm_model(CHAT, work, 1), write_prompts(CHAT, work, 1)
    run_dir = work / f"{schedule}-{threads.replace(' ', '-')}"
    shutil.rmtree(run_dir, ignore_errors=True)
    areal_lite(
        work / f"{run_dir.name}.log",
        "train",
        *[f"run_dir={run_dir}", f"model={model}", f"schedule={schedule}", "seed=1"],
        *["data.source=jsonl", f"data.path={prompts}", f"reward.function={CHAT.reward}"],
        *["eval.problems=0", f"trainer.batch_groups={CHAT.groups}", "rollout.group_size=8"],
        *[f"rollout.max_new_tokens={CHAT.max_new_tokens}", "trainer.lr=1e-12"],
        f"trainer.steps={steps}",
        **THREADS[threads],
    )
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [round(json.loads(line)["train_s"], 2) for line in lines[SKIPPED:]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "free_cores")
    args = parser.parse_args()
    found = []
    for number in range(args.rounds):
        for schedule in ("sync", "async"):
            taken = {name: run(args.work, schedule, name, args.steps) for name in THREADS}
            idle, one = (median(seconds) for seconds in taken.values())
            found.append({"round": number, "schedule": schedule, "speedup": one / idle, **taken})
            print(f"{schedule}: {idle:.2f} s a step, {one:.2f} s with one thread", flush=True)
            RESULTS.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
