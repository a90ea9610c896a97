"""The command of the simulator: its tables, its advice, its files, and what it refuses."""

import json

import pytest

from areal_lite.cli import checked_config, run_command
from benchmarks.simulate.command import (
    QUESTIONS,
    advise,
    compare,
    divided,
    num_gpus,
    simulated,
)
from benchmarks.simulate.settings import COMPARISONS

SMALL = [
    "server.count=6",
    "trainer.data_parallel=2",
    "trainer.batch_groups=8",
    "rollout.group_size=2",
    "rollout.max_new_tokens=1024",
    "rollout.max_concurrent=96",
    "simulate.length_mean=300",
    "simulate.steps=3",
    "simulate.warm_up=2",
]


@pytest.fixture(scope="module")
def config():
    return checked_config("simulate", SMALL)


def test_it_prints_a_table_and_writes_its_file(tmp_path, capsys) -> None:
    out = tmp_path / "results" / "small.json"
    assert (
        run_command("simulate", [*SMALL, "simulate.compare=[schedules]", f"simulate.out={out}"])
        == 0
    )
    printed = capsys.readouterr().out
    for text in (
        "8: 6 generate, 2 train",
        "trained tokens a second",
        "one_step",
    ):
        assert text in printed
    record = json.loads(out.read_text())
    names = [row["name"] for row in record["comparisons"]["schedules"]]
    assert (
        names == ["sync", "one_step", "async", "async, GPUs in turn"]
        and record["run"]["tokens_per_s"] > 0
    )


@pytest.mark.parametrize("question", COMPARISONS)
def test_every_question_has_variants(question: str, config) -> None:
    config.simulate.gpus = [8, 16]
    variants = list(compare(question, config))
    assert len(variants) > 1 and QUESTIONS[question]
    assert len({v.name for v in variants}) == len(variants)
    if question == "servers":
        assert {v.gpus for v in variants} == {8}


def test_gpus_are_divided_as_ranks_and_servers_can_use_them(config) -> None:
    config = checked_config("simulate", [*SMALL, "trainer.tensor_parallel=2"])
    for gpus in (16, 100, 512):
        variant = divided(config, gpus, 0.25)
        assert num_gpus(variant) == gpus
        assert 8 % variant.trainer.data_parallel == 0
        assert variant.rollout.max_concurrent == 16 * variant.server.count


@pytest.mark.parametrize(
    "overrides, advice",
    [
        (["simulate.step_fixed_s=100"], "more trainer GPUs"),
        (["server.count=1", "simulate.step_fixed_s=0"], "more servers"),
        (["buffer.max_staleness=0", "rollout.interrupt=none"], "wait for each other"),
        (["simulate.push_fixed_s=20", "simulate.step_fixed_s=0"], "push less often"),
    ],
)
def test_the_advice_names_the_bottleneck(overrides: list[str], advice: str) -> None:
    config = checked_config("simulate", [*SMALL, "simulate.warm_up=8", *overrides])
    assert advice in " ".join(advise(config, simulated(config)))


IN_TURN = ["server.args.enable_memory_saver=true", "rollout.interrupt=retract"]
IN_TURN += ["sync.transport=disk", "trainer.offload=true", "server.count=8"]
TWO = ["server.count=2", "trainer.data_parallel=2"]
TWO += ["simulate.step_fixed_s=0", "simulate.push_fixed_s=0"]
IN_TURN += ["trainer.data_parallel=8", "trainer.batch_groups=8"]


def test_servers_that_take_turns_are_paused_in_each_step() -> None:
    config = checked_config("simulate", [*SMALL, *IN_TURN, "simulate.step_fixed_s=20"])
    summary = simulated(config)
    assert num_gpus(config) == 8 and summary.train_share > 0.5
    assert summary.pause_share == pytest.approx(summary.train_share + summary.push_share, abs=0.01)
    config.server.args.clear()
    apart = simulated(config)
    assert apart.pause_share < 0.1 and apart.step_s < summary.step_s


def test_all_gpus_of_any_number_are_used_in_turn() -> None:
    few = ["simulate.gpus=[16,64]", "simulate.steps=1", "simulate.warm_up=0"]
    config = checked_config("simulate", [*SMALL, *IN_TURN, *few])
    assert [(v.name, v.gpus) for v in compare("scale", config)] == [("16", 16), ("64", 64)]
    assert [(v.name, v.gpus) for v in compare("servers", config)] == [("8 of 8", 8)]
    apart = checked_config("simulate", [*SMALL, *few])
    assert {v.gpus for v in compare("schedules", apart)} == {8}


@pytest.mark.parametrize(
    "question, overrides",
    [
        ("scale", ["simulate.gpus=[2]", "server.tensor_parallel=4"]),
        ("scale", ["simulate.gpus=[2]", "trainer.tensor_parallel=4"]),
        ("scale", ["simulate.gpus=[2]", "trainer.tensor_parallel=4", *IN_TURN]),
        ("scale", ["simulate.gpus=[]"]),
        ("staleness", ["sync.every=40", "buffer.max_staleness=60", "trainer.steps=100"]),
    ],
)
def test_a_question_without_an_answer_is_one_line(
    question: str, overrides: list[str], capsys, tmp_path
) -> None:
    few = ["simulate.steps=1", "simulate.warm_up=0", f"simulate.out={tmp_path / 'out.json'}"]
    assert (
        run_command("simulate", [*SMALL, *few, *overrides, f"simulate.compare=[{question}]"]) == 0
    )
    assert "no value is possible with these settings" in capsys.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["comparisons"] == {question: []}


def test_the_only_server_is_not_lost() -> None:
    config = checked_config("simulate", [*SMALL, "server.count=1", "simulate.steps=1"])
    assert [v.name for v in compare("loss", config)] == ["0"]
    config = checked_config("simulate", [*SMALL, "server.count=3", "simulate.steps=1"])
    assert [v.name for v in compare("loss", config)] == ["0", "2 for 300 s", "2 for good"]


@pytest.mark.parametrize(
    "overrides, advice",
    [
        (["simulate.step_fixed_s=30"], "only if the model does not fit otherwise"),
        ([*TWO, "server.args.max_running_requests=2"], "in turn is faster"),
        (["server.count=1", "trainer.data_parallel=1"], "too few"),
    ],
)
def test_the_advice_says_when_to_take_turns(overrides: list[str], advice: str) -> None:
    config = checked_config("simulate", [*SMALL, *IN_TURN, *overrides])
    assert advice in " ".join(advise(config, simulated(config)))


@pytest.mark.parametrize(
    "override, reason",
    [
        ("trainer.data_parallel=3", "cannot be dealt equally to trainer.data_parallel=3"),
        ("simulate.length_mean=2000", "must be below rollout.max_new_tokens=1024"),
        ("server.args.max_total_tokens=1200", "1,224 tokens does not fit a KV cache of 1,200"),
        ("simulate.measured_run=/nowhere", "config.yaml cannot be read"),
    ],
)
def test_what_cannot_be_simulated_is_one_line(override: str, reason: str, capsys) -> None:
    assert run_command("simulate", [*SMALL, override]) != 0
    error = capsys.readouterr().err
    assert reason in error and error.count("\n") == 1
