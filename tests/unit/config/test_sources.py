"""Settings of several data sources: what each has, and what is said of a mistake."""

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from areal_lite.cli import main
from areal_lite.config import (
    TrainConfig,
    find_command,
    load_config,
    longest_sequence,
    reference_folders,
    save_config,
    source_configs,
)
from areal_lite.config.data import shares
from areal_lite.config.rules import check_rules
from areal_lite.launch.preflight import check_config

MULTI_TURN = "areal_lite.workflows.multi_turn:MultiTurn"


def with_sources(**sources: Any) -> TrainConfig:
    config = TrainConfig(model="m", run_dir="r")
    config.data.source, config.data.sources = "addition", sources
    config.reward.function = "areal_lite_quickstart.addition:addition_reward"
    return config


def test_a_source_has_the_settings_of_the_run_with_its_own_on_top() -> None:
    config = with_sources(
        files={"source": "jsonl", "path": "x", "weight": 3, "reward": {"timeout_s": 2}},
        talk={"workflow": MULTI_TURN, "workflow_args": {"max_turns": 2}, "max_prompt_tokens": 4},
    )
    config.data.chat, config.data.prompt_key, config.reward.function = False, "q", "my:reward"
    config.rollout.workflow, config.rollout.workflow_args = "my:Own", {"speed": 3}
    files, talk = source_configs(config).values()
    assert (files.data.source, files.data.path, files.data.chat) == ("jsonl", "x", False)
    assert (files.reward.function, files.reward.timeout_s) == ("my:reward", 2)
    assert (files.rollout.workflow, files.rollout.workflow_args) == ("my:Own", {"speed": 3})
    assert (talk.data.source, talk.data.prompt_key, talk.reward) == ("addition", "q", config.reward)
    assert talk.rollout.workflow_args == {"max_turns": 2}, "those of another workflow do not fit"
    assert shares(source_configs(config)) == {"files": 0.75, "talk": 0.25}
    assert longest_sequence(config) == 1024 + config.rollout.max_new_tokens


def test_a_source_may_have_a_teacher_of_its_own() -> None:
    config = with_sources(a={"reference": "x"}, b={})
    config.algo.kl.coef = 0.1
    message = "set algo.reference or data.sources.NAME.reference to a checkpoint folder"
    with pytest.raises(ValueError, match=message):
        check_rules(config)
    config.algo.reference = "y"
    check_rules(config)
    assert reference_folders(config) == {"a": "x", "b": "y"}
    config.data.sources = {}
    assert reference_folders(config) == {"": "y"}


def test_a_single_source_is_the_run_itself() -> None:
    config = with_sources()
    assert source_configs(config) == {"": config} and shares({"": config}) == {"": 1.0}


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"weight": 0}, "data.sources.a: weight=0: must be at least 1 and at most 1000"),
        ({"weight": "much"}, "data.sources.a: weight: Value 'much'"),
        ({"pth": "x"}, "data.sources.a: unknown key pth; did you mean path?"),
        ({"reward": {"fun": "x"}}, "unknown key reward.fun; did you mean reward.function?"),
        ({"reward": {"workers": 0}}, "data.sources.a: reward.workers=0: must be at least 1"),
        ({"reward": "my:f"}, "data.sources.a: reward=my:f: set its keys, such as reward.function="),
        ({"sources": {}}, "data.sources.a: a source has no sources of its own"),
        ("x", "data.sources.a: x is not a set of keys and values"),
    ],
)
def test_a_mistake_names_the_source_and_the_key(own: Any, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        check_rules(with_sources(good={}, a=own))
    assert str(raised.value).startswith("data.sources.a: ") and message in str(raised.value)


def test_a_name_is_short_and_plain() -> None:
    with pytest.raises(ValueError, match="data.sources.a/b: a name has 1 to 64 letters"):
        check_rules(with_sources(**{"a/b": {}}))


def test_sets_for_evaluation_belong_to_sources() -> None:
    config = with_sources(a={})
    config.eval.sets = ["x.jsonl"]
    with pytest.raises(ValueError, match="set data.sources.NAME.eval_path instead"):
        check_rules(config)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (folder / file).write_text("{}")
    return folder


def test_the_command_line_says_what_is_wrong_with_a_source(model, tmp_path, capsys) -> None:
    """Composed by Hydra, and checked with the files, the functions and the rules."""
    (tmp_path / "x.jsonl").write_text("")
    jsonl = ["data.sources.x.source=jsonl", f"data.sources.x.path={tmp_path}/x.jsonl"]
    for overrides, message in (
        (["data.sources.x.path=nowhere", "data.sources.x.source=jsonl"], "data.path=nowhere: no"),
        (["data.sources.x.source=jsonl"], "data.path is not set"),
        (jsonl, "data.eval_path=null: no such file; give held-out"),
        ([*jsonl, "data.sources.x.reward.function=no.such:f"], "reward.function=no.such:f: cannot"),
        (["data.sources.x.workflow_args.a=1"], "rollout.workflow_args={'a': 1}"),
        (["data.sources.x=3"], "3 is not a set of keys"),
        (["data.sources.x.source=csv"], "data.source=csv: choose one of jsonl, hf, addition"),
        (
            ["data.sources.x.args.digits=3"],
            "data.args={'seed': 1, 'digits': 3} do not fit data.source=add",
        ),
    ):
        assert (
            main(
                [
                    "train",
                    "+task=addition",
                    f"model={model}",
                    f"run_dir={tmp_path / 'run'}",
                    *overrides,
                ]
            )
            == 2
        )
        line = capsys.readouterr().err
        assert f"data.sources.x: {message}" in line and line.count("\n") == 1, line


def test_retired_prompts_need_one_source_that_comes_again(model, tmp_path) -> None:
    config = with_sources(a={}, b={})
    config.model, config.run_dir, config.rollout.retire_above = str(model), str(tmp_path / "r"), 0.9
    config.eval.problems = 0
    with pytest.raises(ValueError, match="data.source=addition always makes new ones"):
        check_config(find_command("train"), config)
    (tmp_path / "x.jsonl").write_text("")
    config.data.sources["b"] = {"source": "jsonl", "path": f"{tmp_path}/x.jsonl"}
    check_config(find_command("train"), config)


def test_a_run_continues_with_the_same_sources(model, tmp_path) -> None:
    def config(**sources: Any) -> TrainConfig:
        made = with_sources(**sources)
        made.model, made.run_dir, made.resume = str(model), str(tmp_path / "run"), "auto"
        return made

    first = {"a": {"weight": 2, "args": {"max_digits": 3}}, "b": {"eval_path": "x"}}
    save_config(config(**first), tmp_path / "run")
    assert load_config(tmp_path / "run").data.sources == first
    exact = "areal_lite.rewards.exact:exact_reward"
    free = {"reward": {"function": exact}, "workflow_args": {}, "eval_path": "y"}
    free |= {"reference": str(model)}  # a teacher may have been moved
    check_config(find_command("train"), config(a={**first["a"], **free}, b={}))
    for sources, message in (
        ({"b": first["b"], "a": first["a"]}, r"data.sources=\['b', 'a'\]: .* with \['a', 'b'\]"),
        ({"a": {**first["a"], "weight": 1}, "b": {}}, "data.sources.a.weight=1: .* with 2"),
        ({"a": {"weight": 2}, "b": {}}, "data.sources.a.args.max_digits=None: .* with 3"),
        ({}, r"data.sources=\[\]: the run in run_dir"),
    ):
        with pytest.raises(ValueError, match=message):
            check_config(find_command("train"), config(**sources))


def test_sources_of_a_file_and_of_the_command_line_are_joined(model, tmp_path, capsys) -> None:
    where = [f"model={model}", "data.sources={a: {weight: 2}, b: {}}"]
    assert main(["train", *where, "data.sources.b.args.max_digits=3", "--cfg", "job"]) == 0
    composed = OmegaConf.create(capsys.readouterr().out)
    assert composed.data.sources == {"a": {"weight": 2}, "b": {"args": {"max_digits": 3}}}


@pytest.mark.parametrize("eval_path", [None, "nowhere"])
def test_eval_refuses_a_source_without_held_out_problems(model, tmp_path, capsys, eval_path):
    """The training prompts may be missing: the command does not read them."""
    overrides = [
        "data.source=jsonl",
        "data.path=not_read.jsonl",
        f"model={model}",
        f"run_dir={tmp_path / 'run'}",
        f"data.eval_path={eval_path or 'null'}",
        "reward.function=areal_lite.rewards.math:math_reward",
    ]
    assert main(["eval", *overrides]) == 2
    line = capsys.readouterr().err
    assert "data.eval_path" in line and "give held-out problems" in line
    assert "eval.problems" not in line and not (tmp_path / "run").exists()
