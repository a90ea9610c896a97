"""`areal-lite train debug=train_only`: train twice without servers, on the batches of a run."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.test_train import ROOT, model  # noqa: F401  fixture

STEPS, GROUPS = 2, 4


def train(model: Path, folder: Path, *overrides: str) -> None:  # noqa: F811
    settings = [
        f"model={model}",
        f"run_dir={folder}",
        f"trainer.steps={STEPS}",
        f"trainer.batch_groups={GROUPS}",
        "trainer.lr=0.003",
        "trainer.dtype=float32",
        "rollout.group_size=4",
        "rollout.max_new_tokens=40",
        "reward.function=tests.integration.toy_reward:share_of_letters",
        "eval.problems=0",
    ]
    command = [sys.executable, "-m", "areal_lite", "train", "+task=addition", *settings, *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr


def losses(folder: Path) -> list[tuple]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        (line["loss"], line["grad_norm"], line["reward_mean"], line["staleness_max"])
        for line in lines
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_run_is_trained_again_twice(model: Path, tmp_path: Path) -> None:  # noqa: F811
    train(model, tmp_path / "stored")
    for name in ("one", "two"):
        train(model, tmp_path / name, f"debug=train_only:{tmp_path / 'stored'}")
    one, stored = losses(tmp_path / "one"), losses(tmp_path / "stored")
    assert one == losses(tmp_path / "two")
    assert [line[2:] for line in one] == [line[2:] for line in stored], "the same batches"
