"""Seconds to recover: how long a run takes to train on after each of twelve faults.

    python -m benchmarks.recovery [--rounds 5] [--seed 1] [--name now]    # two cores

One run of `areal-lite train`, with two real SGLang servers and a real Megatron trainer, has each
fault once a round, in an order that the seed draws. Before a fault, the run makes ten steps with
both servers; then it comes at a random moment of a step. `nothing` leaves the run alone, as a
lower bound. tests/chaos makes the faults and the world of the run.

    usual        the median time of those ten steps
    next_step    from the fault until the next training step completes, a repeated one included
    full_speed   from the fault to the end of the first five steps in a row that complete after it
                 and take at most 1.2 times their usual time on average; 60 s stands for more
    servers      from the fault until both servers are announced, if one was gone

A step ends at its `logged_at` in metrics.jsonl, and a server is announced when its file is written.
How soon a fault is noticed is part of the numbers: LIMITS has the settings for it. The benchmark
fails if `areal-lite diagnose --audit` finds that anything was lost or used twice, or if a process
is left.

Writes <out>/recovery.json and the table <out>/recovery.md.
"""

import argparse
import json
import os
import random
import shutil
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from areal_lite.launch.roles import interruptible
from areal_lite.rollout.episode import Episode, Transcript
from areal_lite.run_dir import resume
from areal_lite.run_dir.controller_status import read_status
from areal_lite.run_dir.metrics import read_metrics
from areal_lite.run_dir.paths import CHECKPOINTS_DIR, STOP_FILE
from areal_lite.servers.registry import announcements
from areal_lite.trajectory import Trajectory
from benchmarks.launch import ROOT, warm_up
from tests.chaos.chaos_run import ChaosRun
from tests.chaos.schedule import (
    CONTROLLER,
    CUT,
    KILL,
    NETWORK,
    SERVER,
    STOP,
    SUPERVISOR,
    TRAINER,
    WORKER,
    Fault,
    Kind,
)
from tests.integration.controller_run import wrong_with

MODEL = ["num_layers=3", "mlp_size=256"]
WARM_UP = "max_digits=3 batch_size=32 forget_carry=0.65 trainer.steps=200 trainer.lr=4e-3"
LIMITS = {
    "restart.hang_timeout_s": 240,  # a process that is stopped is replaced after a sixtieth of it
    "sync.timeout_s": 30,  # a server that is silent for half of it has failed
    "rollout.episode_timeout_s": 30,
}
# The learning rate is so small that the answers keep their lengths.
SETTINGS = (
    "data.args.max_digits=3 algo=quickstart reward.function=areal_lite_quickstart.addition:"
    "addition_reward rollout.workflow=benchmarks.recovery:workflow rollout.group_size=8"
    " rollout.max_new_tokens=64 rollout.max_concurrent=64 trainer.batch_groups=8 trainer.lr=1e-7"
    " trainer.save_every=5 eval.problems=0 sync.verify=false"
)
STEPS = 1_000_000  # more than any run makes
USUAL_STEPS, WINDOW, SLOWER = 10, 5, 1.2
LONGEST_S = 60.0
ENV_BLOCK = "RECOVERY_BLOCK"
LOOK_EVERY_S = 0.1


async def workflow(episode: Episode) -> Trajectory:
    """Answer once. The first episode to find the file of ENV_BLOCK blocks its process."""
    transcript = Transcript(episode)
    await transcript.sample()
    trap = Path(os.environ[ENV_BLOCK])
    if trap.exists():
        trap.unlink(missing_ok=True)
        time.sleep(1e6)
    return transcript.trajectory()


def fault(action: str, target: str, in_push: bool = False) -> Callable[[ChaosRun, int], float]:
    """Return a function that lets a fault happen to a run, and returns its wall-clock time.

    Its second argument is the number of the server. What is stopped continues after
    `LONGEST_S`, unless it was replaced before.
    """
    kind = Kind(action, target)

    def strike(run: ChaosRun, server: int) -> float:
        return run.strike(
            Fault(step=0, in_push=in_push, kind=kind, server=server, seconds=LONGEST_S)
        )

    return strike


def block(run: ChaosRun, server: int) -> float:
    """Let an episode block its process."""
    Path(os.environ[ENV_BLOCK]).touch()
    return time.time()


def damage(run: ChaosRun, server: int) -> float:
    """Damage the newest checkpoint, and kill the trainer."""
    newest = resume.latest_checkpoint(run.folder / CHECKPOINTS_DIR)
    assert newest
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return fault(KILL, TRAINER)(run, server)


FAULTS: dict[str, Callable[[ChaosRun, int], float]] = {
    "nothing": lambda run, server: time.time(),
    "a server is killed": fault(KILL, SERVER),
    "a server is killed in a push": fault(KILL, SERVER, in_push=True),
    "a server is stopped": fault(STOP, SERVER),
    "connections are reset": fault(CUT, NETWORK),
    "the controller is killed": fault(KILL, CONTROLLER),
    "the controller is stopped": fault(STOP, CONTROLLER),
    "a trainer rank is killed": fault(KILL, TRAINER),
    "a trainer rank is stopped": fault(STOP, TRAINER),
    "a rank is killed, the newest checkpoint damaged": damage,
    "a worker is killed": fault(KILL, WORKER),
    "an episode blocks its worker": block,
    "the command is killed, and started again": fault(KILL, SUPERVISOR),
}


class Steps:
    """The ends of a run's steps in wall-clock seconds, also of those that a resume forgets."""

    def __init__(self, folder: Path):
        self._folder = folder
        self.ends: list[float] = []

    def look(self) -> None:
        """Read the newest steps."""
        newest = {record["logged_at"] for record in read_metrics(self._folder, newest=USUAL_STEPS)}
        self.ends = sorted(newest.union(self.ends))


def next_step(ends: Iterable[float], at: float) -> float | None:
    """Return the seconds from `at` to the first end of a step after it; None without one."""
    return next((end - at for end in ends if end > at), None)


def full_speed(ends: list[float], at: float, usual: float) -> float | None:
    """Return the seconds from `at` to the end of the first `WINDOW` fast steps after it, or None.

    ends: of all steps, ascending; usual: the time of a step, in seconds.
    """
    for begin, first, end in zip(ends, ends[1:], ends[WINDOW:]):
        if first > at and end - begin <= WINDOW * SLOWER * usual:
            return end - at
    return None


def announced_at(folder: Path) -> list[float]:
    """Return when each announced server was announced, in wall-clock seconds."""
    try:
        return [path.stat().st_mtime for path in announcements(folder)]
    except FileNotFoundError:  # withdrawn after it was listed
        return []


def is_whole(folder: Path) -> bool:
    """Return whether both servers take requests, and a resume has a checkpoint to spare."""
    status = read_status(folder)
    checkpoints = resume.checkpoint_steps(folder / CHECKPOINTS_DIR)
    return bool(status) and status.servers_ready == 2 and len(checkpoints) > 1


def usual_time(run: ChaosRun, steps: Steps) -> float:
    """Wait for `USUAL_STEPS` steps of a run that is whole; return their median time in seconds."""
    calm = len(steps.ends)
    while len(steps.ends) <= calm + USUAL_STEPS:
        run.pause(LOOK_EVERY_S)
        steps.look()
    ends = steps.ends[-1 - USUAL_STEPS :]
    return median(end - begin for begin, end in pairwise(ends))


def recover(run: ChaosRun, steps: Steps, at: float, usual: float) -> dict[str, float | None]:
    """Wait until a run is whole again after a fault at `at`, and return what it took in seconds."""
    following = full = servers = None
    while not (following and (full or time.time() - at > LONGEST_S) and is_whole(run.folder)):
        run.pause(LOOK_EVERY_S)
        steps.look()
        following, full = next_step(steps.ends, at), full_speed(steps.ends, at, usual)
        announced = announced_at(run.folder)
        if len(announced) == 2 and max(announced) > at:
            servers = max(announced) - at
    return {
        "next_step": following,
        "full_speed": min(full or LONGEST_S, LONGEST_S),
        "servers": servers,
    }


def measure(run: ChaosRun, rounds: int, seed: int) -> list[dict]:
    """Let every fault happen once a round, and return a record of each."""
    draw = random.Random(seed)
    steps, records = Steps(run.folder), []
    recover(run, steps, time.time() - LONGEST_S, 0.0)
    for number in range(rounds):
        for name in draw.sample(list(FAULTS), len(FAULTS)):
            usual = usual_time(run, steps)
            run.pause(draw.uniform(0, usual))
            at = FAULTS[name](run, draw.randrange(2))
            taken = recover(run, steps, at, usual)
            records.append({"fault": name, "round": number + 1, "usual": usual, **taken})
            print(json.dumps(records[-1]), flush=True)
    return records


def summary(records: list[dict]) -> dict[str, dict[str, list[float]]]:
    """Return [median, 95th percentile] of each number by fault, in seconds."""
    rows: dict[str, dict[str, list[float]]] = {}
    for name in FAULTS:
        rows[name] = {}
        for key in ("next_step", "full_speed", "servers"):
            found = [r[key] for r in records if r["fault"] == name and r[key] is not None]
            if found:
                rows[name][key] = np.percentile(found, [50, 95]).round(1).tolist()
    return rows


def table(results: dict[str, dict]) -> str:
    """Write the results as a page of Markdown, one table for each name."""
    limits = ", ".join(f"`{key}={value}`" for key, value in LIMITS.items())
    lines = [
        "# Seconds to recover",
        "",
        "From the fault until the next training step has ended, until five steps have taken their",
        "usual time, and until both servers are announced: median / 95th percentile.",
        "`benchmarks/recovery.py` has the exact definitions. 60 s of full speed stand for more. A",
        f"hang is noticed within the limits {limits}.",
        "",
    ]
    for name, result in results.items():
        usual = median(record["usual"] for record in result["records"])
        lines += [
            f"## {name}",
            "",
            f"Rounds: {result['rounds']}, on {result['cores']} cores. Load before: "
            f"{result['load_before']:.1f}. A step usually took {usual:.2f} s.",
            "",
            "| fault | next step | full speed | both servers |",
            "|---|---|---|---|",
        ]
        for fault_name, row in result["summary"].items():
            keys = ("next_step", "full_speed", "servers")
            cells = [" / ".join(map(str, row[key])) if key in row else "" for key in keys]
            lines.append(f"| {fault_name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="now", help="of the result in recovery.json")
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "recovery")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    load = os.getloadavg()[0]
    for folder in (options.work, options.out):
        folder.mkdir(parents=True, exist_ok=True)
    model = warm_up(options.work, 1, MODEL, WARM_UP.split())
    folder = options.work / "run"
    shutil.rmtree(folder, ignore_errors=True)
    os.environ[ENV_BLOCK] = str(options.work / "block")
    own = [*SETTINGS.split(), *(f"{key}={value}" for key, value in LIMITS.items())]
    with interruptible(), closing(ChaosRun(folder, str(model), STEPS, "memory", own)) as run:
        records = measure(run, options.rounds, options.seed)
        (folder / STOP_FILE).touch()
        status = run.wait(LONGEST_S)
    assert status == resume.STOPPED, run.output()
    assert not (left := run.processes()), left
    assert not (wrong := wrong_with(folder)), wrong
    path = options.out / "recovery.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    results[options.name] = {
        "rounds": options.rounds,
        "seed": options.seed,
        "cores": os.cpu_count(),
        "load_before": round(load, 2),
        "limits": LIMITS,
        "summary": summary(records),
        "records": records,
    }
    path.write_text(json.dumps(results, indent=1) + "\n")
    path.with_suffix(".md").write_text(table(results))
    print(table({options.name: results[options.name]}))


if __name__ == "__main__":
    main()
