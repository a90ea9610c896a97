"""Every shipped configuration composes and is valid; every mistake is one clear line."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from areal_lite import extensions
from areal_lite.cli import main, run_command
from areal_lite.config import (
    TrainConfig,
    changed_settings,
    find_command,
    load_config,
    save_config,
    source_configs,
    stored_settings,
)
from areal_lite.config.command_line import compose_config, config_dir
from areal_lite.config.data import sampling_of_evaluation
from areal_lite.launch.preflight import check_config
from areal_lite_quickstart.command import SftConfig


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in ("config.json", "tokenizer.json"):
        (folder / file).write_text("{}")
    return folder


def complaint(capsys, command: str, *args: str) -> str:
    task = ["+task=addition"] if command == "train" else []
    assert main([command, *task, *args]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


@pytest.mark.parametrize("command", ["train", "quickstart", "make-model", "sft", "eval"])
def test_every_command_has_help_with_its_settings(command, capsys):
    assert run_command(command, ["--help"]) == 0
    assert "seed" in (out := capsys.readouterr().out) or "prompts" in out


@pytest.mark.parametrize(
    "schedule", sorted(p.stem for p in (config_dir() / "schedule").glob("*.yaml"))
)
def test_every_schedule_composes(schedule, capsys):
    assert main(["train", f"schedule={schedule}", "--cfg", "job"]) == 0
    assert "max_staleness" in capsys.readouterr().out


PRESETS = sorted(p.stem for p in (config_dir() / "algo").glob("*.yaml"))


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("command", ["train", "quickstart"])
def test_every_preset_composes_and_is_valid(preset, command, model, tmp_path):
    where = [f"run_dir={tmp_path / 'run'}"]
    where += [f"model={model}", "+task=addition"] if command == "train" else []
    teacher = [f"algo.reference={model}"] if preset == "distill" else []
    config = OmegaConf.to_object(compose_config(command, [f"algo={preset}", *where, *teacher]))
    check_config(find_command(command), config)
    written = OmegaConf.to_container(
        OmegaConf.load(config_dir() / "algo" / f"{preset}.yaml"), resolve=False
    )
    written.pop("reference", None)
    for key, value in written.items():  # what the file says arrives: nothing is laid over it
        got = getattr(config.algo, key)
        assert (
            {k: getattr(got, k) for k in value} == value
            if isinstance(value, dict)
            else got == value
        )


def test_the_published_recipes_are_there():
    expected = "areal cispo dapo dr_grpo grpo gspo olmorl pipelinerl ppo reinforce_pp rloo tba"
    assert {*expected.split(), "distill"} <= set(PRESETS)


@pytest.mark.parametrize("preset", sorted({*PRESETS} - {"quickstart"}))
def test_every_recipe_cites_its_paper_and_the_code_it_was_read_from(preset):
    text = (config_dir() / "algo" / f"{preset}.yaml").read_text()
    header = " ".join(line[2:] for line in text.splitlines() if line.startswith("# "))
    assert re.search(r"arXiv \d{4}\.\d{5}|ringtech\.notion\.site", header)
    assert re.search(r"Sources?: ", header)


@pytest.mark.parametrize(
    "override, message",
    [
        (
            "trainer.batch_group=3",
            "unknown key trainer.batch_group; did you mean trainer.batch_groups?",
        ),
        ("schedule=asink", "async"),
        ("trainer.batch_groups=x", "trainer.batch_groups=x: Value 'x' of type 'str' could not"),
        ("buffer.max_staleness=-1", "buffer.max_staleness=-1: must be at least 0"),
        ("trainer.data_parallel=5", "trainer.batch_groups=32 cannot be dealt equally"),
        ("rollout.interrupt=later", "rollout.interrupt=later: choose one of in_place"),
        ("reward.function=no.such:thing", "no.such"),
        ("data.source=jsonl", "data.path is not set"),
        ("server.host=0.0.0.0", "set server.api_key"),
        ("trainer.lr=0", "trainer.lr=0.0: must be at least 1e-12"),
        ("rollout.temperature=0", "rollout.temperature=0: training needs answers that differ"),
        ("rollout.group_size=1000", "less than one group"),
        ("algo.kl.coef=0.1", "algo.kl.coef=0.1 needs a reference policy: set algo.reference"),
        (
            "algo.loss=tb",
            "algo.loss=tb has a KL term in its target, and no advantages: set algo.kl.coef",
        ),
        ("algo.correction.mode=clip", "algo.correction.mode=clip: choose one of cap, mask, off"),
        ("algo.correction.cap=0.5", "algo.correction.cap=0.5: must be at least 1"),
        ("algo.loss=no.such:loss", "algo.loss=no.such:loss: cannot import no.such"),
        ("algo.loss=vapo", "choose one of ppo, gspo, cispo, reinforce, tb, or name your own"),
        ("algo.advantage.estimator=vapo", "choose one of grpo, rloo, reinforce_pp, gae, off"),
        ("algo=distill", "algo.kl.coef=1.0 needs a reference policy: set algo.reference"),
        ("algo.advantage.estimator=off", "leaves nothing to learn from: set algo.kl.coef"),
        ("algo.shaping.overlong_margin=9999", "choose 0 to rollout.max_new_tokens"),
        ("algo.reference=nowhere", "algo.reference=nowhere: no config.json there"),
        ("rollout.group_size=1", "a group of one has nothing to be compared with"),
        ("algo.advantage.mean=batch", "divides by 0 in a group of equal rewards: set"),
        ("rollout.filters=[os:nothing]", "rollout.filters=os:nothing: os has no callable"),
        (
            "rollout.retire_above=1.5",
            "rollout.retire_above=1.5: must be at least 0 and at most 0.999",
        ),
        ("rollout.retire_above=0.9", "data.source=addition always makes new ones"),
        ("rollout.rest_unsolved=4", "rollout.rest_unsolved=4 needs prompts that come again"),
        ("buffer.replay.capacity=100", "algo.loss=ppo cannot: set algo.loss=tb"),
        (
            "buffer.replay.recency_probability=2",
            "buffer.replay.recency_probability=2.0: must be at least 0 and at most 1",
        ),
        ("eval.sets=[nowhere.jsonl]", "eval.sets: nowhere.jsonl: no such file"),
        ("eval.sets=[one/aime,other/aime]", "two have the same name"),
        (
            "logger.trackers=[wandbb]",
            "wandbb is unknown: choose from module:Class, mlflow, swanlab",
        ),
        ("trainer.lr_schedule=sawtooth", "trainer.lr_schedule=sawtooth: choose one of constant"),
        ("buffer.freshness=never", "buffer.freshness=never: choose one of auto, eager"),
        ("trainer.lr=nan", "trainer.lr=nan: must be at least 1e-12"),
        ("server.count=70000", "server.count=70000: must be at least 1 and at most 1024"),
        ("trainer.lr", "trainer.lr has no value: write trainer.lr=…"),
        ("eval.sets=[a,[b]]", "eval.sets=['a', ['b']]: a list of single values has no inner"),
        ("rollout.filters=[{a: b}]", "rollout.filters=[{'a': 'b'}]: a list of single values has"),
        ("logger.trackers=[null]", "logger.trackers=[null]: a list of texts has no null"),
        ("server.host=::1", "choose an IPv4 address of this machine, or node"),
        ("debug=some", "debug=some: choose one of off, train_only"),
        ("debug=train_only", "debug=train_only has no servers: set eval.problems=0"),
    ],
)
def test_a_mistake_is_one_line(model, tmp_path, capsys, override, message):
    line = complaint(
        capsys,
        "train",
        f"model={model}",
        f"run_dir={tmp_path / 'run'}",
        override,
    )
    assert message in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "override, message",
    [
        ("server.args=[1]", "server.args=[1]: Cannot merge DictConfig with ListConfig"),
        ("data.args.x=${data.args.x}", "data.args.x: Recursive interpolation detected"),
        ("schedule=", "unknown schedule=; there are async, one_step, sync"),
    ],
)
def test_a_mistake_is_told_without_the_terms_of_hydra(model, capsys, override, message):
    line = complaint(capsys, "train", f"model={model}", override)
    assert line.removeprefix("areal-lite: ").rstrip() == message


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["algo.kl.into=reward"], "algo.advantage.estimator=off leaves nothing to learn from"),
        (["algo.kl.coef=0"], "algo.advantage.estimator=off leaves nothing to learn from"),
        (["algo.kl.estimator=k3"], "set algo.kl.estimator=k1"),
        (["algo.prox=loglinear"], "algo.kl.into=advantage needs the log-probs before the update"),
        (["rollout.filters=[zero_variance]"], "algo.advantage.estimator=off learns from, too"),
    ],
)
def test_a_teacher_must_teach(model, capsys, overrides, message):
    teacher = [f"model={model}", "algo=distill", f"algo.reference={model}"]
    assert message in complaint(capsys, "train", *teacher, *overrides)


@pytest.mark.parametrize(
    "overrides, message",
    [
        (["algo.advantage.mean=batch", "rollout.group_size=1"], "a group of one has nothing"),
        (["algo.kl.into=loss"], "algo.kl.estimator=k1: in the loss its gradient is 0 on average"),
    ],
)
def test_a_term_without_effect_is_refused(model, capsys, overrides, message):
    where = [f"model={model}", f"algo.reference={model}", "algo=rloo"]
    assert message in complaint(capsys, "train", *where, *overrides)


def test_a_teacher_has_the_same_tokens(tmp_path, capsys):
    vocabularies = {"student": "ab", "larger": "abc", "other": "ba", "smaller": "a"}
    for name, letters in vocabularies.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text('{"vocab_size": 4}')
        vocabulary = {letter: number for number, letter in enumerate(letters)}
        tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="a"))
        tokenizer.save(str(tmp_path / name / "tokenizer.json"))

    def overrides(teacher: str) -> list[str]:
        return [
            f"model={tmp_path / 'student'}",
            "algo=distill",
            f"algo.reference={tmp_path / teacher}",
            "rollout.group_size=1",
        ]

    check_config(
        find_command("train"),
        OmegaConf.to_object(compose_config("train", ["+task=addition", *overrides("larger")])),
    )
    for teacher, message in ("other", "'a' is 1 there and 0 in"), ("smaller", "'b' is None there"):
        line = complaint(capsys, "train", *overrides(teacher))
        assert message in line or "token 'b' is 0 there and 1 in" in line
        assert "choose a reference policy with the same tokenizer" in line


def test_the_proximal_policy_must_suit_the_updates(model, tmp_path, capsys):
    where = [f"model={model}", f"run_dir={tmp_path / 'run'}"]
    line = complaint(
        capsys, "train", *where, "algo.loss=examples.recipes.m2po:loss", "algo.prox=loglinear"
    )
    assert "algo.loss=examples.recipes.m2po:loss needs the log-probs before the update" in line
    line = complaint(capsys, "train", *where, "algo=tba", "algo.prox=loglinear")
    assert "algo.prox=loglinear: algo.loss=tb needs the log-probs before the update" in line


def test_a_mistake_in_a_stage_of_the_quickstart_has_its_full_key(tmp_path, capsys):
    where = f"run_dir={tmp_path / 'run'}"
    line = complaint(capsys, "quickstart", where, "sft.trainer.data_parallel=3")
    assert (
        "sft.trainer.batch_groups=32 cannot be dealt equally to sft.trainer.data_parallel=3" in line
    )
    line = complaint(capsys, "quickstart", where, "sft.batch_size=0")
    assert "sft.batch_size=0: must be at least 1" in line


@pytest.mark.parametrize(
    "override, message",
    [
        ("trainer.batch_groups=10001", "more than the 10000 prompts that a replay buffer keeps"),
        ("rollout.group_size=21", "buffer.replay.capacity=20 holds less than a group"),
        ("debug=train_only:runs/a", "has no servers: set eval.problems=0"),
    ],
)
def test_what_replay_does_not_go_with(model, tmp_path, capsys, override, message):
    replay = ["algo=tba", f"algo.reference={model}", "buffer.replay.capacity=20"]
    assert message in complaint(
        capsys, "train", f"model={model}", f"run_dir={tmp_path / 'run'}", *replay, override
    )


def test_train_only_names_what_its_stored_run_lacks(model, tmp_path, capsys):
    where = [
        f"model={model}",
        f"run_dir={tmp_path / 'run'}",
        f"debug=train_only:{tmp_path}",
        "eval.problems=0",
    ]
    assert "needs a stored run" in complaint(capsys, "train", *where, "debug=train_only")
    assert "with its config.yaml and trajectories.sqlite" in complaint(capsys, "train", *where)
    (tmp_path / "trajectories.sqlite").touch()
    (tmp_path / "config.yaml").write_text("buffer: {max_staleness: 1}")
    assert "set eval.problems=0" in complaint(capsys, "train", *where[:-1])


def test_arguments_of_a_tracker_have_names(model, tmp_path, capsys):
    given = ["logger.trackers=[wandb]", "logger.args.wandb=offline"]
    line = complaint(capsys, "train", f"model={model}", f"run_dir={tmp_path / 'run'}", *given)
    assert "logger.args.wandb=offline: it is a section: set its keys, logger.args.wandb.KEY" in line


def test_a_missing_model_is_named(tmp_path, capsys):
    assert "no config.json there" in complaint(capsys, "train", f"model={tmp_path / 'nowhere'}")
    assert "model is not set" in complaint(capsys, "train")


def test_data_and_reward_have_no_default(model, tmp_path, capsys):
    where = [f"model={model}", f"run_dir={tmp_path / 'run'}"]
    for settings, message in (
        ([], "data.source is not set: name your data: jsonl, hf, addition, reasoning_gym, or"),
        (["data.source=addition"], "reward.function is not set: name what scores a completion"),
    ):
        assert main(["train", *where, *settings]) == 2
        assert message in capsys.readouterr().err


def test_unknown_command(capsys):
    assert "did you mean train?" in complaint(capsys, "trian")


def test_a_run_directory_is_not_overwritten(model, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert "holds a run already" in complaint(
        capsys, "train", f"model={model}", f"run_dir={tmp_path}"
    )


def test_config_comes_back_from_a_run_directory(tmp_path):
    config = TrainConfig(model="m", run_dir="r", seed=7)
    config.server.args = {"chunked_prefill_size": 2048}
    save_config(config, tmp_path)
    assert load_config(tmp_path) == config
    with pytest.raises(ValueError, match="config.yaml"):
        load_config(tmp_path, SftConfig)


@pytest.mark.parametrize("text", ["${x}", "${seed}", "${oc.env:HOME}", "a ${b", r"\${seed}", "\\"])
def test_text_that_looks_like_a_reference_stays_text(text, tmp_path):
    """The command line takes it as \\${x}. What is resolved once is never resolved again."""
    config = TrainConfig(model="m", run_dir=str(tmp_path))
    config.data.system_prompt, config.rollout.stop = text, [text]
    config.data.sources = {"a": {"weight": 2, "workflow_args": {"prompt": text}}}
    save_config(config, tmp_path)
    assert load_config(tmp_path) == config and changed_settings(config, tmp_path) == {}
    source = source_configs(config)["a"]
    assert source.data.system_prompt == source.rollout.workflow_args["prompt"] == text
    assert sampling_of_evaluation(config).stop == [text]


def test_earlier_configurations_are_kept_on_any_file_system(tmp_path, monkeypatch):
    """Some have no hard links. A user may have removed an earlier configuration."""
    monkeypatch.setattr("os.link", lambda *_: pytest.fail("a hard link"))
    for seed in (1, 2, 3):
        save_config(TrainConfig(model="m", seed=seed), tmp_path)
    (tmp_path / "config-1.yaml").unlink()
    save_config(TrainConfig(model="m", seed=4), tmp_path)
    names = ("config-2.yaml", "config-3.yaml", "config.yaml")
    assert [stored_settings(tmp_path, name)["seed"] for name in names] == [2, 3, 4]
    assert (tmp_path / "config-3.yaml").stat().st_mode & 0o777 == 0o600, "it may hold a key"


@pytest.mark.parametrize("safe_path", [False, True])
def test_the_script_finds_modules_of_the_current_folder_as_python_m_does(
    model, tmp_path, safe_path
):
    (tmp_path / "my_flow.py").write_text("async def flow(episode): ...")
    script = tmp_path / "bin" / "areal-lite"
    script.parent.mkdir()
    script.write_text("import sys; from areal_lite.cli import main; sys.exit(main())")
    arguments = [
        "train",
        "--prepare",
        f"model={model}",
        f"run_dir={tmp_path / 'run'}",
        "rollout.workflow=my_flow:flow",
        "+task=addition",
    ]
    path = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = (
        path
        | {"PYTHONPATH": str(config_dir().parent)}
        | ({"PYTHONSAFEPATH": "1"} if safe_path else {})
    )
    done = subprocess.run(
        [sys.executable, script, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == (2 if safe_path else 0), done.stderr
    assert ("cannot import my_flow" in done.stderr) == safe_path


def test_a_mistake_shows_before_torch_is_imported():
    """The command line answers at once: nothing heavy is imported for it."""
    code = (
        "import sys; from areal_lite.cli import main; status = main(['train', 'trainer.lr=x']); "
        "sys.exit(100 + ('torch' in sys.modules) + status)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 102, done.stderr


def test_the_help_of_training_loads_only_the_core():
    code = (
        "import sys; from areal_lite.cli import main; main(['train', '--help']); "
        "parts = ('areal_lite.tools', 'areal_lite.cpu', 'areal_lite_quickstart'); "
        "print([name for name in sys.modules if name.startswith(parts)], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == "[]\n"


def test_without_the_tools_the_dry_run_says_what_to_install(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(extensions, "load", lambda group, name: None)
    where = [f"model={model}", f"run_dir={tmp_path / 'run'}", "eval.problems=0"]
    where += ["data.source=jsonl", f"data.path={__file__}", "reward.function=fnmatch:fnmatch"]
    assert main(["train", "--dry-run", *where]) == 1
    assert "--dry-run needs the tools" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [["--help"], ["train", "--help"], ["diagnose", "--help"], ["train", "--cfg", "job"]]
    + [["slurm", "--print", "model={model}", "+task=addition", "run_dir=none"]],
)
def test_a_reader_that_leaves_ends_the_command_silently(words, model):
    """The end of a pipe that is closed causes no error, even if all output is still in a buffer."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [word.format(model=model) for word in words]
    code = f"import sys; from areal_lite.cli import main; sys.exit(main({words}))"
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    command = [sys.executable, "-c", code]
    with os.fdopen(writer, "wb") as stdout:
        done = subprocess.run(
            command, stdout=stdout, stderr=subprocess.PIPE, timeout=60, env=environment
        )
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_working_directory_that_is_gone_is_one_line(tmp_path, monkeypatch, capsys):
    def gone():
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(os, "getcwd", gone)
    assert "the working directory is gone: change to" in complaint(capsys, "train", "model=m")
