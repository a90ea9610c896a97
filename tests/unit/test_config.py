"""Every shipped configuration composes and validates; every mistake is one clear line."""

import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from areal_lite.cli import config_dir, main
from areal_lite.config import SftConfig, TrainConfig, load_config, save_config


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (folder / file).write_text("{}")
    return folder


def complaint(capsys, *args: str) -> str:
    assert main(list(args)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("command", ["train", "quickstart", "make-model", "sft", "eval", "generate"])
def test_every_command_has_help_with_its_settings(command, capsys):
    assert main([command, "--help"]) == 0
    assert "seed" in (out := capsys.readouterr().out) or "prompts" in out


@pytest.mark.parametrize("schedule", sorted(p.stem for p in (config_dir() / "schedule").glob("*.yaml")))
def test_every_schedule_composes(schedule, capsys):
    assert main(["train", f"schedule={schedule}", "--cfg", "job"]) == 0
    assert "max_staleness" in capsys.readouterr().out


@pytest.mark.parametrize(
    "override, message",
    [
        ("trainer.batch_group=3", "unknown key trainer.batch_group; did you mean trainer.batch_groups?"),
        ("schedule=asink", "async"),
        ("trainer.batch_groups=x", "could not be converted to Integer"),
        ("buffer.max_staleness=-1", "buffer.max_staleness=-1: 0 is synchronous"),
        ("trainer.data_parallel=5", "trainer.batch_groups=32 cannot be dealt equally"),
        ("rollout.interrupt=later", "rollout.interrupt=later: choose one of in_place"),
        ("reward.function=no.such:thing", "no.such"),
        ("data.source=jsonl", "data.path is not set"),
        ("server.host=0.0.0.0", "set server.api_key"),
        ("trainer.lr=0", "trainer.lr=0.0: must be more than 0"),
        ("rollout.temperature=0", "rollout.temperature=0.0: must be more than 0"),
        ("rollout.group_size=1000", "less than one group"),
    ],
)
def test_a_mistake_is_one_line(model, tmp_path, capsys, override, message):
    line = complaint(capsys, "train", f"model={model}", f"run_dir={tmp_path / 'run'}", override)
    assert message in line
    assert not (tmp_path / "run").exists()


def test_reuse_needs_one_minibatch(model, tmp_path, capsys):
    line = complaint(capsys, "train", f"model={model}", f"run_dir={tmp_path / 'run'}", "algo.prox=reuse", "trainer.minibatches=2")
    assert "algo.prox=reuse is exact with one minibatch only" in line


def test_a_missing_model_is_named(tmp_path, capsys):
    assert "no config.json there" in complaint(capsys, "train", f"model={tmp_path / 'nowhere'}")
    assert "model is not set" in complaint(capsys, "train")


def test_a_port_in_use_is_named(model, tmp_path, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = complaint(capsys, "train", f"model={model}", f"run_dir={tmp_path / 'run'}", f"server.port={port}")
    assert f"port {port} cannot be used" in line


def test_unknown_command(capsys):
    assert "did you mean train?" in complaint(capsys, "trian")


def test_a_run_directory_is_not_overwritten(model, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert "holds a run already" in complaint(capsys, "train", f"model={model}", f"run_dir={tmp_path}")


def test_config_comes_back_from_a_run_directory(tmp_path):
    config = TrainConfig(model="m", run_dir="r", seed=7)
    config.server.args = {"chunked_prefill_size": 2048}
    save_config(config, tmp_path)
    assert load_config(tmp_path) == config
    with pytest.raises(ValueError, match="config.yaml"):
        load_config(tmp_path, SftConfig)


def test_a_mistake_shows_before_torch_is_imported():
    """The command line answers at once: nothing heavy is imported for it."""
    code = "import sys; from areal_lite.cli import main; status = main(['train', 'trainer.lr=x']); sys.exit(100 + ('torch' in sys.modules) + status)"
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 102, done.stderr
    assert time.monotonic() - started < 10
