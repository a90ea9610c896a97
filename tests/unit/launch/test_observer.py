"""A run without the tools prints a line a step; with them, it has the panel and the report."""

import json
from pathlib import Path

from areal_lite.config import TrainConfig, TrainerConfig
from areal_lite.launch.local import Observer, observer


def log_step(run_dir: Path, step: int, reward: float | None) -> None:
    with open(run_dir / "metrics.jsonl", "a") as file:
        print(json.dumps({"step": step, "reward_mean": reward}), file=file)


def test_steps_are_printed_once(tmp_path: Path, capsys) -> None:
    config = TrainConfig(model="m", trainer=TrainerConfig(steps=3))
    log_step(tmp_path, 1, 0.25)
    with Observer().watch(config, tmp_path) as poll:
        poll()
        log_step(tmp_path, 2, 0.5)
        poll()
        poll()
        log_step(tmp_path, 3, None)
    assert capsys.readouterr().err == "step 2/3 · reward 0.5\nstep 3/3\n"
    summary = Observer().summarize(config, tmp_path, 10.0, 25.0)
    assert summary["steps"] == summary["steps_planned"] == 3 and summary["wall_s"] == 15.0
    assert summary["reward_first"] == 0.25 and summary["reward_last"] is None


def test_this_environment_has_the_tools() -> None:
    assert type(observer()).__module__.startswith("areal_lite.tools.")
