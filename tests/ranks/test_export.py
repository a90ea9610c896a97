"""An exported checkpoint is the trainer's model: the same logits, the same bits, or no folder."""

import errno
import json
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from areal_lite.cli import main
from areal_lite.config import TrainConfig, TrainerConfig, save_config
from areal_lite.megatron.checkpoint import Checkpoints
from areal_lite.megatron.packing import make_microbatches
from areal_lite.megatron.parallel import shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.run_dir.resume import damage
from areal_lite.tools.export import model_of_run
from areal_lite_quickstart.command import MakeModelConfig
from areal_lite_quickstart.make_model import run as make_model
from tests.ranks.engine_worker import SETTINGS, TEMPERATURE, random_batch
from tests.ranks.test_engine import reference

BATCH = random_batch(8, 98, seed=100)


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> dict[str, torch.Tensor]:
    """A run with checkpoints of steps 2 and 4; returns the log-probs after each, by folder name."""
    run_dir = tmp_path_factory.mktemp("export") / "run"
    model = run_dir / "model"
    make_model(
        MakeModelConfig(out=str(model), hidden_size=32, num_layers=2, head_dim=8, mlp_size=64)
    )
    save_config(TrainConfig(model=str(model)), run_dir)
    policy = Policy(TrainerConfig(**SETTINGS), model, seed=1)
    checkpoints = Checkpoints(run_dir / "checkpoints", {"policy": policy})
    logprobs = {}
    microbatches = make_microbatches(BATCH, 64)
    for step in (2, 4):
        for _ in range(2):
            policy.update(microbatches, lambda logp, *_: (logp.square().mean(), {}))
        checkpoints.save(step, {"step": step})
        checkpoints.wait()
        logprobs[str(run_dir / f"exports/step-{step}")] = policy.logprobs(microbatches, TEMPERATURE)
    shutdown()
    return logprobs


@pytest.fixture
def run_dir(trained: dict[str, torch.Tensor], tmp_path: Path) -> Path:
    """A copy of the run without exports, whose files a test may change."""
    original = Path(next(iter(trained))).parents[1]
    return copytree(original, tmp_path / "run", ignore=ignore_patterns("exports"))


def test_transformers_computes_what_the_trainer_computed(trained, capsys):
    newest, older = sorted(trained, reverse=True)
    run_dir = Path(newest).parents[1]
    assert main(["export", f"run_dir={run_dir}"]) == 0
    assert main(["export", f"run_dir={run_dir}", "step=2"]) == 0
    assert capsys.readouterr().out.split() == [newest, older]
    assert not torch.equal(trained[newest], trained[older])
    for folder, expected in trained.items():
        with torch.no_grad():
            got, _ = reference(AutoModelForCausalLM.from_pretrained(folder), BATCH)
        assert (got - expected).abs().max() <= 5e-6
        assert damage(Path(folder)) == ""
        assert AutoTokenizer.from_pretrained(folder).encode("1+1") == [20, 14, 20]


def test_who_may_read_the_settings_may_read_the_weights(trained):
    for folder in map(Path, trained):
        assert len({file.stat().st_mode for file in folder.iterdir()}) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_another_dtype_is_the_rounded_one(run_dir, tmp_path, dtype):
    outs = {name: tmp_path / name for name in ("auto", dtype)}
    outs[dtype].mkdir()  # an empty folder is as good as none
    for name, out in outs.items():
        assert main(["export", f"run_dir={run_dir}", f"out={out}", f"dtype={name}"]) == 0
    full, rounded = (load_file(outs[name] / "model.safetensors") for name in outs)
    assert all(torch.equal(full[name].to(getattr(torch, dtype)), rounded[name]) for name in full)
    assert json.loads((outs[dtype] / "config.json").read_text())["dtype"] == dtype
    assert AutoModelForCausalLM.from_pretrained(outs[dtype]).dtype == getattr(torch, dtype)


def test_a_large_model_has_an_index_over_its_files(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("areal_lite.tools.convert.SHARD_BYTES", 20_000)
    assert main(["export", f"run_dir={run_dir}", f"out={tmp_path}/many"]) == 0
    files = sorted((tmp_path / "many").glob("*.safetensors"))
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert len(files) > 2 and set(index["weight_map"].values()) == {file.name for file in files}
    assert main(["export", f"run_dir={run_dir}", f"out={tmp_path}/one"]) == 0
    many, one = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("many", "one"))
    assert all(torch.equal(a, b) for a, b in zip(many.parameters(), one.parameters(), strict=True))


def test_a_damaged_checkpoint_is_passed_over(run_dir, tmp_path, trained, capsys):
    newest = run_dir / "checkpoints/step-4"
    data = next(newest.glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    assert main(["export", f"run_dir={run_dir}", "step=4"]) == 1
    assert "is damaged: " in capsys.readouterr().err
    assert main(["export", f"run_dir={run_dir}"]) == 0
    out, err = capsys.readouterr()
    assert Path(out.strip()) == run_dir / "exports/step-2" and f"{newest} is damaged" in err
    assert newest.is_dir()  # only a run that continues puts it aside


def test_a_failure_leaves_no_folder(run_dir, tmp_path, monkeypatch, capsys):
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "model-00001.safetensors")

    monkeypatch.setattr("areal_lite.megatron.hf.save_file", full)
    assert main(["export", f"run_dir={run_dir}", f"out={tmp_path}/out"]) == 1
    assert "No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_what_cannot_be_exported_is_refused(run_dir, tmp_path, capsys):
    def refusal(*overrides: str) -> str:
        assert main(["export", f"run_dir={run_dir}", *overrides]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1
        return lines[0]

    (tmp_path / "mine").write_text("text")
    assert f"out={tmp_path} is not an empty folder" in refusal(f"out={tmp_path}")
    assert "is not an empty folder" in refusal(f"out={tmp_path}/mine")
    assert "step=3: no such checkpoint in " in refusal("step=3")
    assert "has no adapters, so leave out adapter=true" in refusal("--adapter")
    assert "model=…" in refusal(f"model={tmp_path}/gone")
    other = tmp_path / "other"
    make_model(MakeModelConfig(out=str(other), hidden_size=64, num_layers=1))
    assert "cannot be loaded" in refusal(f"model={other}")
    assert "is not a run directory" in refusal(f"run_dir={tmp_path}/other")
    save_config(TrainConfig(model="model"), tmp_path / "new")
    assert "has no checkpoint yet" in refusal(f"run_dir={tmp_path}/new")
    assert not (run_dir / "exports").exists() and (tmp_path / "mine").read_text() == "text"


def test_a_chat_takes_the_newest_weights_that_there_are(run_dir):
    newest = run_dir / "exports/step-4"
    assert model_of_run(run_dir) == newest and damage(newest) == ""
    marker = newest / "kept"
    marker.touch()
    assert model_of_run(run_dir) == newest and marker.exists()  # it is not written again
    (run_dir / "checkpoints/hf").mkdir()
    assert model_of_run(run_dir) == newest  # hf is of an earlier end: the run continued to step 4
    config = TrainConfig(model=str(run_dir / "model"), trainer=TrainerConfig(steps=4))
    save_config(config, run_dir)
    assert model_of_run(run_dir) == run_dir / "checkpoints/hf"
