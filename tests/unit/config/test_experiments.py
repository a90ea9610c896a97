"""Every shipped experiment and task is valid and has a plan; wrong names get a hint."""

import json
from pathlib import Path

import pytest

from areal_lite.cli import checked_config, main
from areal_lite.clusters import SlurmConfig
from areal_lite.config.command_line import config_dir
from areal_lite_quickstart.make_model import build_char_tokenizer

EXPERIMENTS = sorted(path.stem for path in (config_dir() / "experiment").glob("*.yaml"))
TASKS = sorted(path.stem for path in (config_dir() / "task").glob("*.yaml"))
# Nodes that the file says it is for; the others are for one.
CLUSTERS = {"areal": 16, "olmorl": 9, "pipelinerl": 2}
QWEN = dict(
    model_type="qwen2",
    architectures=["Qwen2ForCausalLM"],
    hidden_size=512,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=1024,
    tie_word_embeddings=False,
)


@pytest.fixture
def model(tmp_path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN))
    build_char_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def where(model, tmp_path, monkeypatch) -> list[str]:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # whatever this machine has
    return [f"model={model}", f"run_dir={tmp_path / 'run'}"]


TASK = "+task=addition"
SHARED = ("one_gpu", "in_turn")  # they go with another experiment


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_is_valid_and_has_a_plan(name, where, capsys):
    where += [TASK] if name in SHARED else []
    config = checked_config("train", [f"+experiment={name}", *where])
    gpus = config.trainer.world_size + config.server.count * config.server.tensor_parallel
    assert name in SHARED or gpus == 8 * CLUSTERS.get(name, 1) or name == "tba_gsm8k" and gpus == 4
    assert main(["train", "--dry-run", f"+experiment={name}", *where]) == 0
    assert f"{config.trainer.steps:,} steps" in capsys.readouterr().out


@pytest.mark.parametrize("name", [name for name in EXPERIMENTS if name not in SHARED])
def test_every_experiment_fits_its_nodes(name, where, capsys):
    config = checked_config(
        "slurm", [f"+experiment={name}", *where, f"cluster.nodes={CLUSTERS.get(name, 1)}"]
    )
    assert (
        isinstance(config, SlurmConfig)
        and config.server.host == "node"
        and len(config.server.api_key) == 32
    )
    assert (
        main(
            [
                "slurm",
                "--print",
                f"+experiment={name}",
                *where,
                f"cluster.nodes={CLUSTERS.get(name, 1)}",
            ]
        )
        == 0
    )
    assert "start trainer" in capsys.readouterr().out


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_valid(name, where, tmp_path):
    files = [tmp_path / "train.jsonl", tmp_path / "test.jsonl"]
    for file in files:
        file.write_text('{"question": "1+1", "answer": "2"}\n')
    own = [f"data.path={files[0]}", f"data.eval_path={files[1]}"] if name == "jsonl" else []
    assert checked_config("train", [f"+task={name}", *where, *own]).data.source


def test_what_an_experiment_says_can_be_overridden(where):
    config = checked_config(
        "train",
        ["+experiment=areal", "schedule=sync", "algo=dapo", "trainer.data_parallel=2", *where],
    )
    assert config.trainer.data_parallel == 2 and config.algo.eps_high == 0.28


def test_settings_with_keys_of_the_users_own_take_new_ones_with_and_without_a_plus(where):
    config = checked_config(
        "slurm",
        [
            *where,
            TASK,
            "cluster.options.partition=x",
            "cluster.options={account: a, qos: 1}",
            "+server.args.a=2",
            "server.args.b.c=3",
        ],
    )
    assert config.cluster.options == {
        "partition": "x",
        "account": "a",
        "qos": 1,
    } and config.server.args == {"a": 2, "b": {"c": 3}}
    tools = ["+experiment=tools_gsm8k", *where]
    of_the_file = checked_config("train", tools).rollout.workflow_args
    assert checked_config(
        "train", [*tools, "rollout.workflow_args.max_turns=9"]
    ).rollout.workflow_args == {**of_the_file, "max_turns": 9}


@pytest.mark.parametrize(
    "args, message",
    [
        (["train", "+experiment=areel"], "unknown experiment=areel; did you mean areal?"),
        (["train", "+experment=areal"], "unknown key experment; did you mean +experiment?"),
        (["train", "experiment=areal"], "use +experiment=areal"),
        (["train", "+trainer.stepps=3"], "unknown key trainer.stepps; did you mean trainer.steps?"),
        (
            ["train", "schedule=asink"],
            "unknown schedule=asink; did you mean async? there are async, one_step, sync",
        ),
        (
            ["train", "+task=gsm8"],
            "did you mean gsm8k? there are addition, games, gsm8k, harbor, jsonl, math",
        ),
        (
            ["slurm", "cluster.option.partition=x"],
            "unknown key cluster.option; did you mean cluster.options?",
        ),
        (
            ["train", "rollout.workflow_arg.max_turns=3"],
            "unknown key rollout.workflow_arg; did you mean rollout.workflow_args?",
        ),
        (["train", "server.arg={a: 1}"], "unknown key server.arg; did you mean server.args?"),
        (["train", "server.args.a"], "server.args.a has no value: write server.args.a=…"),
        (["train", "server.args=3"], "server.args=3: Cannot assign int"),
        *(
            (["train", f"rollout.{key}=1"], f"unknown key rollout.{key}; to train, sample from")
            for key in ("top_p", "top_k", "min_p")
        ),
        (["train", "rollout.top_p=0.9"], "did you mean eval.sampling.top_p?"),
        (["train", "eval.temperature=0"], "rollout.temperature or eval.sampling.temperature?"),
        (
            ["train", "eval.sampling.topp=0.9"],
            "eval.sampling: unknown key topp; did you mean top_p? choose one of temperature, "
            "top_p, top_k, max_new_tokens, stop",
        ),
        (["train", "rollout.stop=[a,1.5]"], "rollout.stop: 1.5 is neither a text of 1 to 1000"),
        (["train", "rollout.stop=['']"], "rollout.stop: '' is neither a text of 1 to 1000"),
        (["eval", "sampling.stop=[-1]"], "sampling.stop of evaluation: -1 is neither a text"),
        (["eval", "sampling.n=2"], "sampling: unknown key n; choose one of temperature, top_p"),
        (["eval", "sampling.top_p=0"], "sampling: top_p=0.0: must be at least 1e-06 and at most 1"),
        (["eval", "sampling.top_k=some"], "sampling: top_k: Value 'some' of type 'str' could not"),
        (["train", "eval.sampling.temperature=null"], "temperature: Incompatible value 'None'"),
        (["chat", "rollout.temperature=0"], "unknown key rollout; did you mean temperature?"),
        (["train", "rollout.temperature=0"], "for greedy evaluation, eval.sampling.temperature=0"),
        (["train", "lr=3"], "unknown key lr; did you mean algo.critic.lr or trainer.lr?"),
        (
            ["train", "trainer=3"],
            "trainer=3: trainer is a section: set its keys, trainer.KEY=VALUE",
        ),
        (
            ["train", "rollout.filters=a:b"],
            "rollout.filters=a:b: write a list, rollout.filters=[a:b]",
        ),
        (["train", "server.args={a:1"], "cannot read server.args={a:1: check its brackets"),
        (
            ["train", "data.path=${nowhere}"],
            "data.path: Interpolation key 'nowhere' not found",
        ),
        (
            ["slurm", "cluster.container=docker"],
            "cluster.container=docker: choose one of none, pyxis, apptainer",
        ),
        (["slurm", "cluster.container=pyxis"], "set cluster.image"),
        (["slurm", "server.host=127.0.0.1", "cluster.nodes=2"], "other nodes cannot reach that"),
        (["train", "--dryrun"], "unknown option --dryrun; did you mean --dry-run?"),
        (["eval", "--dry-run"], "--dry-run is for `areal-lite train`"),
        (["train", "--print"], "--print is for `areal-lite slurm`"),
        (["train", "trainer.lr=0"], "trainer.lr=0.0: must be at least 1e-12"),
    ],
)
def test_a_mistake_is_one_line_that_helps(args, message, model, tmp_path, capsys):
    assert main([*args, f"model={model}", f"run_dir={tmp_path / 'run'}"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and message in lines[0], lines
    assert not (tmp_path / "run").exists()
