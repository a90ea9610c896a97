"""The examples as a newcomer runs them: the real command, a real server and a real trainer."""

import json
import os
import sqlite3
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = (
    "adapters",
    "chat_model",
    "coding_agent",
    "compaction",
    "critic",
    "custom_reward",
    "custom_dataset",
    "custom_workflow",
    "data_sources",
    "distillation",
    "environment",
    "game",
    "judge",
    "mixture_of_experts",
    "openai_agent",
    "program_verifier",
    "python_api",
)
# Smaller than what the examples choose, so that two steps take seconds.
SMALL = [
    "rollout.group_size=2",
    "rollout.max_new_tokens=48",
    "trainer.batch_groups=2",
    "trainer.minibatches=1",
    "trainer.lr_warmup_steps=0",
    "eval.problems=4",
]


@dataclass(frozen=True)
class Run:
    """The files of one command."""

    folder: Path
    output: str

    @property
    def summary(self) -> dict[str, Any]:
        return json.loads((self.folder / "summary.json").read_text())

    def used(self, columns: str) -> list[tuple]:
        db = sqlite3.connect(self.folder / "trajectories.sqlite")
        query = "SELECT {} FROM trajectories JOIN groups USING (group_id) WHERE state = 'used'"
        return db.execute(query.format(columns)).fetchall()


@pytest.fixture(scope="session")
def warm_model(tmp_path_factory) -> Path:
    """Make the examples' model as they make it, but with few steps of warm-up."""
    folder = tmp_path_factory.mktemp("examples") / "warm"
    shell("set -e; . examples/warm_model.sh", WARM_MODEL=str(folder), WARM_STEPS="40")
    return folder


def shell(command: str, **environment: str) -> str:
    """Run a command in the checkout and return what it wrote to both outputs."""
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=ROOT,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def run(name: str, folder: Path, model: Path | None, *settings: str) -> Run:
    """Run an example into `folder`."""
    environment = {}
    if model:
        environment = {"WARM_MODEL": str(model)}
        for other in ("teacher", "experts"):
            environment |= {
                f"{other.upper()}_MODEL": str(model.with_name(other)),
                f"{other.upper()}_STEPS": "40",
            }
    words = " ".join([f"bash examples/{name}/run.sh run_dir={folder}", *settings])
    return Run(folder, shell(words, **environment))


@pytest.mark.timeout(300)
@pytest.mark.slow  # other tests have their parts
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_runs(name: str, tmp_path: Path, warm_model: Path) -> None:
    if package := {"environment": "reasoning_gym", "game": "textarena"}.get(name):
        pytest.importorskip(package, reason=f"pip install {package}")
    result = run(name, tmp_path / "run", warm_model, *SMALL, "trainer.steps=2")
    assert result.summary["steps"] == result.summary["pushes"] == 2
    assert result.summary["trajectories_lost"] == 0
    assert len(result.used("DISTINCT group_id, sample_index")) == 8
    if name == "chat_model":
        table = result.output.partition("Greedy answers to held-out problems")[2]
        assert table.count("│ What is ") == 5
    if name == "python_api":
        assert [f"step   {number}  reward" in result.output for number in (1, 2, 3)] == [1, 1, 0]
        assert f"the trained model: {result.folder}/checkpoints/hf" in result.output
        assert (result.folder / "checkpoints" / "hf" / "model.safetensors").exists()


@pytest.mark.slow  # three starts; test_resume.py has the parts
@pytest.mark.timeout(300)
def test_a_run_continues_and_its_model_begins_another(tmp_path: Path, warm_model: Path) -> None:
    shell(
        f"bash examples/continue_training/run.sh {' '.join(SMALL)}",
        WARM_MODEL=str(warm_model),
        FOLDER=str(tmp_path),
        STEPS="1",
    )
    first, second = Run(tmp_path / "two-digits", ""), Run(tmp_path / "three-digits", "")
    assert [row["step"] for row in steps(first)] == [1, 2], "the second command made one step"
    assert first.summary["steps_planned"] == 2 and second.summary["steps"] == 1
    assert (first.folder / "config-1.yaml").exists(), "of the first command"
    config = (second.folder / "config.yaml").read_text()
    assert f"model: {first.folder}/checkpoints/hf" in config


def steps(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "compaction"])
def test_an_example_learns(name: str, tmp_path: Path) -> None:
    summary = run(name, tmp_path / "run", None).summary
    assert summary["greedy_after"] >= summary["greedy_before"] + 0.2
    # Sampled, a reward that also pays for parts has only a quarter to gain.
    assert summary["accuracy_after"] > summary["accuracy_before"]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_agent_that_compacts_learns_what_one_trace_cannot(tmp_path: Path) -> None:
    summary = run("compaction", tmp_path / "run", None).summary
    # The share of right digits begins at two thirds: only the digits after a carry are wrong.
    assert summary["greedy_after"] >= summary["greedy_before"] + 0.1
    one_trace = "rollout.workflow_args.agent=my_agent:one_trace"
    summary = run("compaction", tmp_path / "one", None, one_trace).summary
    assert summary["greedy_before"] == summary["accuracy_after"] == summary["greedy_after"] == 0
