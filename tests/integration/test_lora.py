"""Adapters as a user trains them: a real server, a real trainer, pushes during requests."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from areal_lite.config import ServerConfig
from areal_lite.launch.server_pool import ServerProcess
from areal_lite.servers.client import SGLangClient
from areal_lite.servers.registry import ServerInfo
from areal_lite.system.network import free_port

ROOT = Path(__file__).resolve().parents[2]
# Whole weights are pushed by most other tests, so only adapters alone are in the quick ones.
STEPS = {"whole": 32, "alone": 8}
pytestmark = pytest.mark.timeout(400)


def areal_lite(*arguments: str) -> str:
    """Run a command or a module and return the last line of what it prints."""
    command = [sys.executable, "-m", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=350)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def alone(run: Path) -> bool:
    """Return whether the run pushed adapters alone."""
    return "transport: adapters" in (run / "config.yaml").read_text()


def steps_of(run: Path) -> int:
    """Return the steps of the run."""
    return STEPS["alone" if alone(run) else "whole"]


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# What a push brings: whole weights, which are read back, or the adapters alone.
PUSHES = {
    "whole": ["sync.verify=true"],
    "alone": ["sync.transport=adapters"],
}


@pytest.fixture(scope="module", params=[pytest.param("whole", marks=pytest.mark.slow), "alone"])
def run(request, tmp_path_factory) -> Path:
    """Train the adapters of a random model to write lower-case letters."""
    folder = tmp_path_factory.mktemp("lora")
    sizes = {"hidden_size": 64, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2}
    sizes |= {"head_dim": 16, "mlp_size": 128}
    model = folder / "model"
    written = [f"{key}={size}" for key, size in sizes.items()]
    areal_lite("areal_lite_quickstart.make_model", f"out={model}", *written)
    areal_lite(
        "areal_lite",
        "train",
        "+task=addition",
        f"model={model}",
        f"run_dir={folder / 'run'}",
        "reward.function=tests.integration.toy_reward:share_of_letters",
        # One group at a time: servers are the slower side on any machine, and pushes interrupt it.
        "rollout={group_size: 8, max_new_tokens: 64, max_concurrent: 8}",
        "buffer.max_staleness=2",
        "trainer.lora.rank=4",
        "trainer.lr=0.005",
        f"trainer.steps={STEPS[request.param]}",
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
    assert len(rewards) == (steps := steps_of(run))
    assert alone(run) or sum(rewards[-4:]) / 4 > sum(rewards[:4]) / 4 + 0.3
    summary = json.loads((run / "summary.json").read_text())
    assert summary["requests_drained"] == summary["trajectories_lost"] == 0
    assert summary["pushes"] == steps and summary["multi_segment_share"] > 0


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


# Slow, because tests/ranks/test_lora.py converts checkpoints, and PEFT loads the result there.
@pytest.fixture(scope="module")
def adapters(run: Path) -> Path:
    """The adapters of the last step, exported alone."""
    return Path(areal_lite("areal_lite", "export", f"run_dir={run}", "--adapter"))


@pytest.fixture
def in_peft(run: Path, adapters: Path) -> PeftModel:
    """The adapters in PEFT, on the model before training."""
    base = AutoModelForCausalLM.from_pretrained(run.parent / "model", dtype=torch.float32)
    return PeftModel.from_pretrained(base, adapters)


@pytest.mark.slow
def test_an_exported_model_is_what_peft_merges(run: Path, adapters: Path, in_peft) -> None:
    assert adapters == run / f"exports/step-{steps_of(run)}-adapter"
    config = json.loads((adapters / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(run.parent / "model")
    merged = in_peft.merge_and_unload().state_dict()
    trained = load_file(run / "checkpoints/hf/model.safetensors")
    whole = load_file(
        Path(areal_lite("areal_lite", "export", f"run_dir={run}")) / "model.safetensors"
    )
    for name, weight in trained.items():
        torch.testing.assert_close(merged[name], weight, rtol=0, atol=1e-6)
        torch.testing.assert_close(whole[name], weight, rtol=0, atol=1e-7)


@pytest.fixture
def with_adapters(
    run: Path, adapters: Path, current_entry_points, tmp_path
) -> Iterator[ServerInfo]:
    """A server of the model before training that has loaded the adapters by SGLang's own means."""
    info = tmp_path / "pageable-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: pageable\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[sglang.srt.plugins]\npageable = tests.integration.pageable_memory:install\n"
    )
    path = os.pathsep.join([str(tmp_path), current_entry_points["PYTHONPATH"]])
    own = {"lora_paths": [f"trained={adapters}"], "lora_backend": "torch_native"}
    server = ServerProcess(
        ServerConfig(args=own | {"disable_radix_cache": True}),
        str(run.parent / "model"),
        name="adapters",
        port=free_port(),
        seed=1,
        log_path=tmp_path / "server.log",
        environment={"PYTHONPATH": path},
    )
    try:
        server.start()
        asyncio.run(server.wait_ready())
        yield server.info
    finally:
        server.stop()


@pytest.mark.slow
def test_sglang_and_peft_compute_with_exported_adapters(
    run: Path, in_peft: PeftModel, with_adapters: ServerInfo
) -> None:
    models = {"trained": in_peft, None: in_peft.get_base_model()}
    trained = AutoModelForCausalLM.from_pretrained(run / "checkpoints/hf", dtype=torch.float32)
    for adapter, model in models.items():
        tokens, served = asyncio.run(sample(with_adapters, adapter))
        with nullcontext() if adapter else in_peft.disable_adapter():
            assert served == pytest.approx(logprobs(model, tokens), abs=1e-5)
        moved = np.abs(np.subtract(served, logprobs(trained, tokens))).max()
        assert moved < 1e-5 if adapter else moved > 0.1


async def sample(server: ServerInfo, adapter: str | None) -> tuple[list[int], list[float]]:
    """Sample with an adapter. Returns all tokens, and the log-probs of all but the first."""
    prompt = list(range(3, 43))
    request = {
        "input_ids": prompt,
        "sampling_params": {"max_new_tokens": 24, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
        "lora_path": adapter,
    }
    async with SGLangClient(timeout_s=60) as client:
        facts = (await client.post(server, "/generate", request))["meta_info"]
    sampled = facts["output_token_logprobs"]
    both = facts["input_token_logprobs"][1:] + sampled
    return prompt + [token for _, token, _ in sampled], [logprob for logprob, _, _ in both]


def logprobs(model: torch.nn.Module, tokens: list[int]) -> list[float]:
    """Return the log-prob of each token but the first."""
    with torch.no_grad():
        all_tokens = model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
    return all_tokens[range(len(tokens) - 1), tokens[1:]].tolist()
