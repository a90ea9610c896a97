"""Adapters as a user trains them: a real server, a real trainer, pushes during requests."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parents[2]
STEPS = 24
pytestmark = pytest.mark.timeout(400)


def areal_lite(*arguments: str) -> str:
    """Run a command and return the last line of what it prints."""
    command = [sys.executable, "-m", "areal_lite", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def alone(run: Path) -> bool:
    """Return whether the run pushed adapters alone."""
    return "adapters_only: true" in (run / "config.yaml").read_text()


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# What a push brings: whole weights, which are read back, or the adapters alone.
PUSHES = {
    "whole": ["sync.verify=true"],
    "alone": ["sync.adapters_only=true", "sync.bucket_mb=1"],
}


@pytest.fixture(scope="module", params=PUSHES)
def run(request, tmp_path_factory) -> Path:
    """Train the adapters of a random model to write lower-case letters."""
    folder = tmp_path_factory.mktemp("lora")
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    sizes |= {"head_dim": 16, "mlp_size": 128}
    model = folder / "model"
    areal_lite("make-model", f"out={model}", *(f"{key}={size}" for key, size in sizes.items()))
    areal_lite(
        "train",
        f"model={model}",
        f"run_dir={folder / 'run'}",
        "reward.function=tests.integration.toy_reward:share_of_letters",
        "rollout={group_size: 8, max_new_tokens: 64, max_concurrent: 64}",
        "buffer.max_staleness=2",
        "trainer.lora.rank=4",
        "trainer.lr=0.01",
        f"trainer.steps={STEPS}",
        "trainer.batch_groups=4",
        "trainer.save_every=8",
        "trainer.keep_checkpoints=0",
        "algo.reference=${model}",
        "algo.kl.coef=0.001",
        "eval.problems=4",
        *PUSHES[request.param],
    )
    return folder / "run"


def test_it_learns(run: Path) -> None:
    rewards = [step["reward_mean"] for step in lines(run / "metrics.jsonl")]
    assert len(rewards) == STEPS
    assert sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.3
    summary = json.loads((run / "summary.json").read_text())
    assert summary["requests_drained"] == summary["trajectories_lost"] == 0
    assert summary["pushes"] == STEPS and summary["multi_segment_share"] > 0


def test_servers_compute_what_the_trainer_computes(run: Path) -> None:
    for step in lines(run / "metrics.jsonl"):
        assert alone(run) or step["verified"] > 0
        assert step["logprob_diff"] < 1e-5


def test_adapters_alone_are_smaller_than_weights(run: Path) -> None:
    weights = (run.parent / "model/model.safetensors").stat().st_size / 2**20
    for step in lines(run / "metrics.jsonl"):
        if alone(run):
            assert 0 < step["megabytes"] < 0.2 * weights
        else:
            assert step["megabytes"] == pytest.approx(weights, rel=0.05)


def test_the_reference_is_the_model_before_training(run: Path) -> None:
    distances = [step["reference_kl"] for step in lines(run / "metrics.jsonl")]
    assert distances[0] == pytest.approx(0, abs=1e-6) and distances[-1] > 0.01


def test_only_adapted_weights_have_changed(run: Path) -> None:
    before = load_file(run.parent / "model/model.safetensors")
    after = load_file(run / "checkpoints/hf/model.safetensors")
    for name, weight in after.items():
        assert torch.equal(weight, before[name]) != name.endswith("_proj.weight"), name


@pytest.mark.slow  # tests/ranks/test_lora.py converts checkpoints
def test_adapters_are_exported_alone_and_merged(run: Path) -> None:
    alone = Path(areal_lite("export", f"run_dir={run}", "--adapter"))
    assert alone == run / f"exports/step-{STEPS}-adapter"
    config = json.loads((alone / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(run.parent / "model")
    tensors = load_file(alone / "adapter_model.safetensors")
    before = load_file(run.parent / "model/model.safetensors")
    after = load_file(run / "checkpoints/hf/model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    for name, weight in before.items():
        if name.endswith("_proj.weight"):
            stem = f"base_model.model.{name.removesuffix('.weight')}"
            product = tensors[f"{stem}.lora_B.weight"] @ tensors[f"{stem}.lora_A.weight"]
            torch.testing.assert_close(after[name], weight + scale * product, rtol=0, atol=1e-6)
    merged = Path(areal_lite("export", f"run_dir={run}"))
    whole = load_file(merged / "model.safetensors")
    for name, weight in after.items():
        torch.testing.assert_close(whole[name], weight, rtol=0, atol=1e-7)
