"""The two sides: one run of areal_lite, and one of TRL in an environment of its own."""

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import sysconfig
from contextlib import closing
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.against_trl.tasks import Task
from benchmarks.launch import ROOT, areal_lite

TRL = "trl==1.16.0"


def trl_python(work: Path) -> Path:
    """Return the interpreter of an environment that adds TRL to the packages of this one."""
    folder = work / "trl-env"
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        shutil.rmtree(folder, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        own = sysconfig.get_paths()["purelib"]
        target = next(folder.glob("lib/python*/site-packages"))
        (target / "parent.pth").write_text(own + "\n")  # the same torch and transformers
        install = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-warn-conflicts",
            TRL,
            "accelerate",
            "pandas",
        ]
        subprocess.run(install, check=True)
        (folder / "complete").touch()
    return python


def run_areal_lite(
    work: Path,
    task: Task,
    model: Path,
    files: tuple[Path, Path],
    seed: int,
    steps: int,
    lr: float,
    measure: bool = True,
) -> dict:
    """Train with areal_lite and return its record, with the held-out accuracy if `measure`."""
    run_dir, common = work / f"areal_lite-{task.name}-{seed}", task.common
    shutil.rmtree(run_dir, ignore_errors=True)
    # Each update of a toy is a step of its own, and a push follows: so the data is the least stale.
    # A chat model learns more from fresher data, as it moves further in a step.
    size = ["rollout.max_concurrent=256", "buffer.max_staleness=3"]
    size = ["buffer.max_staleness=1"] if task.chat else size
    areal_lite(
        work / f"{run_dir.name}.log",
        "train",
        *[f"run_dir={run_dir}", f"model={model}", f"seed={seed}", "algo=quickstart"],
        *["data.source=jsonl", f"data.path={files[0]}", f"data.eval_path={files[1]}"],
        *[f"data.chat={str(task.chat).lower()}", "eval.problems=0"],
        *[f"reward.function={task.reward}", *size],
        *[f"trainer.batch_groups={task.groups // task.minibatches}", "trainer.minibatches=1"],
        f"rollout.group_size={common['group_size']}",
        f"rollout.max_new_tokens={task.max_new_tokens}",
        *[f"trainer.steps={task.minibatches * steps}", f"trainer.lr={lr}"],
        *["trainer.lr_schedule=constant", "trainer.lr_warmup_steps=0", "trainer.save_every=0"],
        *[f"trainer.adam_eps={common['adam_eps']}", f"trainer.adam_beta2={common['adam_beta2']}"],
        *[f"algo.eps_low={common['eps_low']}", f"algo.eps_high={common['eps_high']}"],
    )
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    # TRL's clock starts with the model loaded: ours starts when the server takes its first request.
    with closing(sqlite3.connect(run_dir / "trajectories.sqlite")) as store:
        (started,) = store.execute("SELECT min(started_at) FROM trajectories").fetchone()
    parts = list(zip(*[iter(rows)] * task.minibatches, strict=True))
    record: dict[str, Any] = {
        "seconds": [round(part[-1]["logged_at"] - started, 3) for part in parts],
        "rewards": [round(mean(row["reward_mean"] for row in part), 4) for part in parts],
        "tokens": [sum(row["tokens"] for row in part) for part in parts],
        "staleness": round(mean(row["staleness_mean"] for row in rows), 2),
    }
    if measure:
        record["accuracy"] = _accuracy(run_dir, run_dir / "checkpoints" / "hf", files[1], task)
    return record


def run_trl(
    work: Path,
    task: Task,
    model: Path,
    files: tuple[Path, Path],
    seed: int,
    steps: int,
    settings: dict[str, Any],
    measure: bool = True,
) -> dict:
    """Train with TRL and return its record, with the held-out accuracy if `measure`."""
    name = f"trl-{task.name}-{seed}"
    folder = work / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    own = {
        "model": str(model),
        "prompts": str(files[0]),
        "record": str(folder / "record.json"),
        "save": str(folder / "model") if measure else "",
        "work": str(folder),
        "max_new_tokens": task.max_new_tokens,
        "reward": task.reward,
        "chat": task.chat,
        "seed": seed,
        "steps": steps,
    }
    (folder / "settings.json").write_text(json.dumps({**task.common, **settings, **own}))
    environment = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    environment |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    script = Path(__file__).with_name("trl_run.py")
    with open(work / f"{name}.log", "w") as log:
        subprocess.run(
            [trl_python(work), script, folder / "settings.json"],
            env=environment,
            stdout=log,
            stderr=log,
            check=True,
        )
    record = json.loads((folder / "record.json").read_text())
    record["seconds"] = [round(value, 3) for value in record["seconds"]]
    record["rewards"] = [round(value, 4) for value in record["rewards"]]
    if measure:
        record["accuracy"] = _accuracy(folder, folder / "model", files[1], task)
    return record


def _accuracy(folder: Path, model: Path, held_out: Path, task: Task) -> float:
    """Return the sampled accuracy of a trained model on the held-out problems."""
    areal_lite(
        folder / "eval.log",
        "eval",
        *[f"run_dir={folder / 'eval'}", f"model={model}", "problems=512", "samples=1"],
        *["data.source=jsonl", f"data.path={held_out}", f"data.eval_path={held_out}"],
        *[f"data.chat={str(task.chat).lower()}", f"reward.function={task.reward}"],
        f"rollout.max_new_tokens={task.max_new_tokens}",
    )
    return json.loads((folder / "eval" / "summary.json").read_text())["pass_at_k"]["1"]
