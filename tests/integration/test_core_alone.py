"""The core trains without the tools and the quickstart: the package is copied without them."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = ("clusters", "environments", "tools", "workflows")


@pytest.fixture
def core(tmp_path: Path) -> dict[str, str]:
    """The environment of a process that has the core and `cpu` alone, with their entry points."""
    folder = tmp_path / "core"
    ignore = shutil.ignore_patterns("__pycache__", *LEFT_OUT)
    shutil.copytree(ROOT / "areal_lite", folder / "areal_lite", ignore=ignore)
    shutil.copytree(ROOT / "conf", folder / "conf")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    info = folder / f"areal_lite-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    absent = ("areal_lite_quickstart", *(f"areal_lite.{part}" for part in LEFT_OUT))
    lines = []
    for group, entries in project["entry-points"].items():
        lines.append(f"[{group}]")
        for name, target in entries.items():
            if not target.startswith(absent):
                lines.append(f"{name} = {target}")
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT / "tests")])}


def run(core: dict[str, str], folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_lite", *words]
    return subprocess.run(
        command, cwd=folder, env=core, capture_output=True, text=True, timeout=280
    )


@pytest.mark.slow  # lint-imports keeps the core apart
@pytest.mark.timeout(300)
def test_the_core_trains_alone(core: dict[str, str], tmp_path: Path) -> None:
    model = tmp_path / "model"
    sizes = ["hidden_size=32", "num_layers=1", "num_heads=2", "num_kv_heads=1", "head_dim=16"]
    made = [sys.executable, "-m", "areal_lite_quickstart.make_model", f"out={model}", *sizes]
    subprocess.run(made, cwd=ROOT, check=True, timeout=120)
    rows = [json.dumps({"question": f"{n}+1=?", "answer": str(n + 1)}) for n in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    trained = run(
        core, tmp_path, "train", f"model={model}", "run_dir=run", "data.source=jsonl",
        "data.path=rows.jsonl", "reward.function=areal_lite.rewards.exact:exact_reward",
        "rollout.group_size=2", "rollout.max_new_tokens=8", "trainer.batch_groups=2",
        "trainer.steps=2", "eval.problems=0",
    )  # fmt: skip
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout == "run/summary.json\n"
    assert "step 1/2" in trained.stderr and "step 2/2" in trained.stderr
    files = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"config.yaml", "metrics.jsonl", "summary.json", "trajectories.sqlite"} <= files
    assert not {"report.html", "report.png"} & files
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 2
    assert (tmp_path / "run" / "checkpoints" / "hf" / "config.json").exists()


def test_it_names_what_is_not_installed(core: dict[str, str], tmp_path: Path) -> None:
    listed = run(core, tmp_path, "--help").stdout
    assert "train" in listed and "slurm" not in listed and "report" not in listed
    refused = run(core, tmp_path, "report", "run")
    assert refused.returncode == 2 and "unknown command 'report'" in refused.stderr
    plan = run(core, tmp_path, "train", "--dry-run", "model=m")
    assert plan.returncode == 2 and "areal_lite.tools" not in plan.stderr
