"""Compare speed and learning with TRL's GRPOTrainer, on two cores without a GPU.

    python -m benchmarks.against_trl                 # all tasks, two to three hours
    python -m benchmarks.against_trl --tasks short --seeds 1 --steps 10
    python -m benchmarks.against_trl --show          # table and picture of what there is

Both sides start from the same model: a toy that was warmed up, or a chat model (task `chat`).
They see prompts of the same file, the same reward, and the same groups, updates and clip range.
They run in turn, each alone on the machine. TRL generates and trains in one process with the
machine's cores. Its fastest settings are sought first: the microbatch, and for toys transformers'
continuous batching against its `generate`. Then each side has the learning rate with which it was
the first at the higher reward, with the first seed.

Writes <out>/against_trl.json, .md and .png.
"""

import argparse
import json
import math
import platform
import subprocess
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from benchmarks.against_trl import page
from benchmarks.against_trl.sides import TRL, run_areal_lite, run_trl
from benchmarks.against_trl.tasks import TASKS, Task, warm_model, write_prompts
from benchmarks.launch import ROOT

TRIED_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=24, help="of TRL")
    parser.add_argument("--threads", type=int, default=2, help="threads of TRL's process")
    parser.add_argument("--show", action="store_true", help="table and picture only")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "against_trl")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    path = args.out / "against_trl.json"
    found = (
        json.loads(path.read_text()) if path.exists() else {"tried": {}, "rates": {}, "runs": []}
    )
    if not args.show:
        for task in map(TASKS.__getitem__, args.tasks):
            _measure(args, task, found)
            found["settings"] = {name: task.common for name, task in TASKS.items()}
            found["versions"] = {
                "trl": TRL.partition("==")[2],
                **{name: version(name) for name in ("torch", "transformers", "sglang")},
                "python": platform.python_version(),
            }
            path.write_text(json.dumps(found, indent=1) + "\n")
    (args.out / "against_trl.md").write_text(page.table(found))
    page.draw(found, args.out / "against_trl.png")
    print(page.table(found))


def _measure(args: argparse.Namespace, task: Task, found: dict) -> None:
    """Run both sides in turn for each seed, and add their records to `found`."""
    work = args.work / task.name
    for seed in args.seeds:
        model = warm_model(task, work, seed)
        files = write_prompts(task, work, seed)
        if task.name not in found["tried"]:
            found["tried"][task.name] = _tried(args.threads, work, task, model, files)
        fastest = max(found["tried"][task.name], key=lambda row: row["trajectories_s"])
        seeded = Seeded(work, task, model, files, seed, fastest)
        if task.name not in found["rates"]:
            found["rates"][task.name] = _rates(seeded)
        for side in task.rates:
            lr = _best_rate(task, found["rates"][task.name][side])
            made = {"task": task.name, "side": side, "seed": seed, "commit": _commit(), "lr": lr}
            record = made | seeded.run(side, lr, args.steps)
            _add(found, record)
            print(page.row(record), flush=True)


@dataclass(frozen=True)
class Seeded:
    """What both sides have in common for a seed, and TRL's fastest settings."""

    work: Path
    task: Task
    model: Path
    files: tuple[Path, Path]
    seed: int
    fastest: dict

    def run(self, side: str, lr: float, steps: int, measure: bool = True) -> dict:
        """Train one side for as long as `steps` of TRL's, and return its record."""
        common = (self.work, self.task, self.model, self.files, self.seed)
        if side == "trl":
            return run_trl(*common, steps, self.fastest | {"lr": lr}, measure)
        return run_areal_lite(*common, self.task.own_steps * steps, lr, measure)


def _rates(seeded: Seeded) -> dict[str, list[dict]]:
    """Return the seconds to a reward with each learning rate, by side."""
    task = seeded.task
    found = {side: [] for side in task.rates}
    for side, rates in task.rates.items():
        for lr in rates:
            record = seeded.run(side, lr, task.rate_steps, measure=False)
            seconds = {str(t): page.seconds_to(record, t) for t in task.thresholds}
            found[side].append({"lr": lr, "seconds": seconds})
            print(side, found[side][-1], flush=True)
    return found


def _best_rate(task: Task, rates: list[dict]) -> float:
    """Return the rate that was first at the highest reward, or else at the next one."""

    def seconds(row: dict) -> list[float]:
        return [row["seconds"][str(t)] or math.inf for t in reversed(task.thresholds)]

    return min(rates, key=seconds)["lr"]


def _commit() -> str:
    """Return the short name of the commit that is measured."""
    named = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return named.stdout.strip()


def _add(found: dict, record: dict) -> None:
    """Replace the record of the same task, side and seed."""
    key = ("task", "side", "seed")
    same = [r for r in found["runs"] if all(r[k] == record[k] for k in key)]
    found["runs"] = [r for r in found["runs"] if r not in same] + [record]


def _tried(
    threads: int, work: Path, task: Task, model: Path, files: tuple[Path, Path]
) -> list[dict]:
    """Return the speed of TRL's settings, in a few steps each."""
    rows: list[dict] = []

    def add(micro_batch: int, continuous: bool) -> None:
        own = {
            "micro_batch": micro_batch,
            "continuous_batching": continuous,
            "threads": threads,
        }
        settings = {**own, "lr": task.rates["trl"][0]}
        record = run_trl(work, task, model, files, 0, TRIED_STEPS, settings, measure=False)
        rate = page.rate(record | {"task": task.name}, skipped=1)
        rows.append({**own, "trajectories_s": round(rate, 2)})
        print(rows[-1], flush=True)

    for micro_batch in task.micro_batches:
        add(micro_batch, continuous=False)
    if not task.chat:  # it was slower in both toys, by 1.3 and 6 times
        add(max(rows, key=lambda row: row["trajectories_s"])["micro_batch"], continuous=True)
    return rows


if __name__ == "__main__":
    main()
