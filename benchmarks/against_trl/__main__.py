"""Compare speed and learning with TRL's GRPOTrainer, on two cores without a GPU.

    python -m benchmarks.against_trl                 # both tasks, about an hour
    python -m benchmarks.against_trl --tasks short --seeds 1 --steps 10
    python -m benchmarks.against_trl --show          # table and picture of what there is

Both sides start from the same warmed-up model. They see prompts of the same file, the same reward,
and the same batches, updates, learning rate and clip range. They run in turn, each alone on the
machine. TRL generates and trains in one process with the machine's cores. Its best settings are
tried first: the microbatch, and transformers' continuous batching against its `generate`.

Writes <out>/against_trl.json, .md and .png.
"""

import argparse
import json
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

from benchmarks.against_trl import page
from benchmarks.against_trl.sides import COMMON, TRL, run_areal_lite, run_trl
from benchmarks.against_trl.tasks import TASKS, Task, write_prompts
from benchmarks.launch import ROOT, warm_up

MODEL = ["num_layers=3", "mlp_size=256"]
WARM_UP = (
    "batch_size=32 forget_carry=0.5 trainer.lr=4e-3 trainer.min_lr=8e-5"
    " trainer.lr_schedule=cosine trainer.lr_warmup_steps=20 trainer.weight_decay=0.01"
)
TRIED_STEPS = 3


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", default=[task.name for task in TASKS])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=2, help="threads of TRL's process")
    parser.add_argument("--show", action="store_true", help="table and picture only")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "against_trl")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    path = args.out / "against_trl.json"
    found = json.loads(path.read_text()) if path.exists() else {"tried": {}, "runs": []}
    if not args.show:
        for task in (task for task in TASKS if task.name in args.tasks):
            _measure(args, task, found)
            found["settings"] = COMMON
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
    settings = f"data.max_digits={task.max_digits} trainer.steps={task.warm_up_steps} {WARM_UP}"
    for seed in args.seeds:
        model = warm_up(work, seed, MODEL, settings.split())
        files = write_prompts(task, work, seed)
        if task.name not in found["tried"]:
            found["tried"][task.name] = _tried(args.threads, work, task, model, files)
        best = max(found["tried"][task.name], key=lambda row: row["trajectories_s"])
        own = {key: best[key] for key in ("micro_batch", "continuous_batching", "threads")}
        for side in ("areal_lite", "trl"):
            if side == "trl":
                record = run_trl(work, task, model, files, seed, args.steps, own)
            else:
                record = run_areal_lite(work, task, model, files, seed, task.own_steps * args.steps)
            made = {"task": task.name, "side": side, "seed": seed, "commit": _commit()}
            _add(found, made | record)
            print(page.row(record), flush=True)


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
        record = run_trl(work, task, model, files, 0, TRIED_STEPS, own, measure=False)
        rows.append({**own, "trajectories_s": round(page.rate(record, skipped=1), 2)})
        print(rows[-1], flush=True)

    for micro_batch in (32, 64, 128):
        add(micro_batch, continuous=False)
    add(max(rows, key=lambda row: row["trajectories_s"])["micro_batch"], continuous=True)
    return rows


if __name__ == "__main__":
    main()
