"""The Python interface: it takes every form of settings, and refuses what the command refuses."""

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import areal_lite
from areal_lite import api
from areal_lite.config import DataConfig, RewardConfig, RolloutConfig, TrainConfig, TrainerConfig
from areal_lite.config.command_line import as_overrides
from areal_lite.run_dir.metrics import append_event

SETTINGS = {
    "schedule": "sync",
    "+task": "gsm8k",
    "seed": 3,
    "trainer": {"lr": 1e-06, "steps": 2},
    "data.system_prompt": 'It\'s "one"\nof two, {or} [three]: \\ ',
    "data.eval_path": None,
    "data.chat": False,
    "rollout.filters": ["math:floor", "math:ceil"],
    "rollout.workflow": "areal_lite.workflows.tools:Tools",
    "rollout.workflow_args": {
        "tools": ["examples.custom_workflow.calculator:calculator", "python"],
        "max_turns": 6,
    },
    "server.args": {"nested": [{"name": "x y", "n": 1}]},
}


ADDITION: dict[str, Any] = {
    "data": DataConfig(source="addition"),
    "reward": RewardConfig("areal_lite_quickstart.addition:addition_reward"),
}


@pytest.fixture
def model(tmp_path: Path) -> str:
    """Make a folder that passes for a model until a process loads it."""
    for file in ("config.json", "tokenizer.json"):
        (tmp_path / file).write_text("{}")
    return str(tmp_path)


@pytest.fixture
def launched(monkeypatch) -> list[TrainConfig]:
    """Replace the processes of a run by one training step in its log."""
    configs = []

    def train(config: TrainConfig, run_dir: Path, on_step: Any) -> None:
        configs.append(config)
        on_step({"step": 1})

    monkeypatch.setattr("areal_lite.launch.local.train", train)
    monkeypatch.setattr("areal_lite.launch.local.check_model_folder", lambda _: None)
    monkeypatch.setattr("areal_lite.launch.local.check_numbers", lambda _: None)
    monkeypatch.setattr(
        "areal_lite.launch.local.finish",
        lambda config, run_dir, _: (run_dir / "summary.json").write_text('{"steps": 1}'),
    )
    return configs


def test_a_dictionary_means_what_its_overrides_mean(model: str, tmp_path: Path, launched) -> None:
    where = {"model": model, "run_dir": str(tmp_path / "run")}
    areal_lite.train(where | SETTINGS, on_step=print)
    config = launched[0]
    assert (config.seed, config.trainer.lr, config.trainer.steps) == (3, 1e-6, 2)
    assert config.buffer.max_staleness == 0, "schedule=sync names a file of conf/"
    assert config.data.path == "openai/gsm8k", "so does +task=gsm8k"
    assert config.data.system_prompt == SETTINGS["data.system_prompt"]
    assert config.data.eval_path is None and config.data.chat is False
    assert config.rollout.filters == ["math:floor", "math:ceil"]
    for section, key in (config.rollout, "workflow_args"), (config.server, "args"):
        assert getattr(section, key) in SETTINGS.values()


def test_a_list_and_a_dictionary_are_the_same(model: str, tmp_path: Path, launched) -> None:
    where = {"model": model, "run_dir": str(tmp_path / "run")}
    task = {"data.source": "addition", "reward.function": ADDITION["reward"].function}
    recipe = ["algo.correction.mode=cap", "algo.correction.low=null", "algo.advantage.whiten=false"]
    overrides = [f"{key}={value}" for key, value in (where | task).items()]
    areal_lite.train([*overrides, *recipe, "trainer.steps=2", "rollout.group_size=4"], print)
    areal_lite.train(
        where
        | task
        | {"algo": {"correction": {"mode": "cap", "low": None}, "advantage.whiten": False}}
        | {"trainer.steps": 2, "rollout": {"group_size": 4}},
        print,
    )
    whole = TrainConfig(
        **where,
        **ADDITION,
        trainer=TrainerConfig(steps=2),
        rollout=RolloutConfig(group_size=4),
    )
    assert launched[0] == launched[1] == whole


def test_an_empty_dictionary_is_a_value(model: str, tmp_path: Path, launched) -> None:
    """A source or a task that has no settings of its own exists all the same."""
    given = {"model": model, "run_dir": str(tmp_path / "run"), "+task": "addition", "trainer": {}}
    sources = {"sums": {}, "long": {"args": {"max_digits": 4}}}
    areal_lite.train(given | {"data.sources": sources, "server.args": {"a": {}}}, print)
    (config,) = launched
    assert config.data.sources == sources and config.server.args == {"a": {}}
    assert as_overrides({}) == []


def test_what_the_configuration_refers_to_is_resolved(
    model: str, launched, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = areal_lite.train({"model": model, "+task": "addition"}, print)
    assert "now:" not in str(result.run_dir) and result.run_dir.parent == Path("runs")


def test_the_result_has_the_summary_and_the_place_of_the_model(
    model: str, tmp_path: Path, launched
) -> None:
    seen = []
    result = areal_lite.train(
        ["+task=addition", f"model={model}", f"run_dir={tmp_path / 'run'}"], on_step=seen.append
    )
    assert seen == [{"step": 1}]
    assert result == areal_lite.TrainResult(run_dir=tmp_path / "run", summary={"steps": 1})
    assert result.model == tmp_path / "run" / "checkpoints" / "hf"


@pytest.mark.parametrize(
    "settings, says",
    [
        (["trainer.lr=0.1"], "model is not set"),
        (["model=nowhere"], "model=nowhere"),
        ({"model": "m", "trainer.step": 5}, "did you mean trainer.steps"),
        ({"model": "m", "trainer": {"lr": "fast"}}, "trainer.lr"),
        ({"model": "m", "trainer.lr": -1}, "trainer.lr"),
        ("model=m", "a list of overrides or a dictionary"),
    ],
)
def test_wrong_settings_are_refused_as_on_the_command_line(settings: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        areal_lite.train(settings)


def test_a_failure_of_the_run_is_an_exception(model: str, tmp_path: Path, monkeypatch) -> None:
    def fail(*_: object) -> None:
        append_event(tmp_path / "run", "metrics", {"step": 1})
        raise RuntimeError("the trainer exited")

    finished = []
    monkeypatch.setattr("areal_lite.launch.local.train", fail)
    monkeypatch.setattr("areal_lite.launch.local.check_model_folder", lambda _: None)
    monkeypatch.setattr("areal_lite.launch.local.check_numbers", lambda _: None)
    monkeypatch.setattr("areal_lite.launch.local.finish", lambda *_: finished.append(1))
    with pytest.raises(RuntimeError, match="the trainer exited"):
        areal_lite.train({"+task": "addition", "model": model, "run_dir": str(tmp_path / "run")})
    assert finished, "its steps are reported all the same"


def test_another_thread_is_refused() -> None:
    errors = []

    def call() -> None:
        try:
            areal_lite.train([])
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert "main thread" in errors[0]


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import sys, json, areal_lite; print(json.dumps(sorted(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    modules = json.loads(out)
    assert [name for name in modules if name.startswith("areal_lite")] == ["areal_lite"]
    assert not {"torch", "hydra", "omegaconf"}.intersection(modules)
    with pytest.raises(AttributeError, match="no attribute 'tarin'"):
        _ = areal_lite.tarin  # type: ignore


def test_everything_that_is_offered_exists() -> None:
    assert all(getattr(areal_lite, name) is getattr(api, name) for name in areal_lite.__all__)
