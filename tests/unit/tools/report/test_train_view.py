"""The content of the panel of a training run."""

from dataclasses import replace

import msgspec
import pytest

from areal_lite.config import TrainConfig
from areal_lite.run_dir.controller_status import TrainerPhase
from areal_lite.tools.report.panel import View
from areal_lite.tools.report.train_view import RunState, eta, step_line, train_view
from tests.unit.run_dir.sample_status import STATUS

STEP = {
    "step": 7,
    "time_s": 2.0,
    "wait_s": 0.5,
    "reward_mean": 0.5,
    "tokens": 3000,
    "trajectories": 64,
    "staleness_mean": 1.25,
    "staleness_max": 4,
    "pause_s": 0.032,
    "clip_fraction": 0.0042,
    "behavior_weight": 0.98,
    "weight_max": 1.31,
}


def config(**changes) -> TrainConfig:
    made = TrainConfig(model="model", run_dir="runs/first")
    made.trainer.steps, made.trainer.batch_groups = 20, 8
    made.buffer.max_staleness, made.server.count = 4, 2
    for key, value in changes.items():
        setattr(made, key, value)
    return made


RUN = RunState(
    config=config(),
    steps=[STEP | {"step": 6, "time_s": 4.0}, STEP],
    rewards=[0.0, 0.5],
    evaluation={"version": 5, "greedy": 0.875, "sampled": 0.75},
    status=STATUS,
    since_step_s=1.0,
)

WAITS = "waits for 3 of 8 groups of step 8"


def values(view: View) -> dict[str, str]:
    """Return the values of all rows by name."""
    rows = [*(row for section in view.sections for row in section.rows), *view.waits]
    return {row.name: row.value for row in rows}


def test_every_number_of_a_run():
    view = train_view(RUN)
    assert (view.done, view.total, view.title) == (7, 20, "training · runs/first")
    assert view.eta_s == 13 * 3.0 - 1.0
    assert values(view) == {
        "reward": "0.5 ▁█",
        "greedy accuracy": "87.5%, step 5",
        "sampled accuracy": "75.0%, step 5",
        "servers ready": "1 of 2",
        "in flight": "16 of 32",
        "pause of a push": "32 ms",
        "tokens": "1k/s",
        "trajectories": "21.3/s",
        "a step": "3 s, waits 17%",
        "staleness": "mean 1.25, max 4",
        "clipped": "0.42% of tokens",
        "behavior weight": "mean 0.98, max 1.31",
        "trainer": WAITS,
        "servers": "generate: 15 requests, evaluation included",
        "evaluation": "of step 4 in progress",
    }


def test_the_reward_of_each_data_source():
    sources = {f"reward_mean/{name}": value for name, value in zip("abcde", (0.25, None, 1, 0, 0))}
    shown = values(train_view(replace(RUN, steps=[STEP, STEP | sources])))
    assert list(shown)[:5] == ["reward", "  a", "  b", "  c", "  d"], "the first four"
    assert (shown["  a"], shown["  b"], shown["  c"]) == ("0.25", "–", "1")


def test_the_pace_leaves_out_the_first_step():
    first, second = {**STEP, "step": 1, "time_s": 60.0}, {**STEP, "step": 2}
    assert train_view(replace(RUN, steps=[first])).eta_s is None
    both = train_view(replace(RUN, steps=[first, second]))
    assert both.eta_s == 18 * 2.0 - 1.0
    assert values(both)["a step"].startswith("2 s")


def test_before_the_first_step_nothing_is_known():
    view = train_view(RunState(config=config()))
    assert (view.done, view.eta_s, view.line) == (0, None, {})
    shown = values(view)
    assert shown.pop("trainer") == "loads the model"
    assert shown.pop("servers") == "start"
    assert {text.strip() for text in shown.values()} == {"–"}


def test_what_a_step_does_not_have_is_unknown():
    shown = values(train_view(replace(RUN, steps=[{**STEP, "pause_s": None, "wait_s": None}])))
    assert shown["pause of a push"] == "–" and shown["a step"] == "2 s"
    lean = {key: STEP[key] for key in STEP if key not in ("clip_fraction", "behavior_weight")}
    shown = values(train_view(replace(RUN, steps=[lean])))
    assert shown["clipped"] == shown["behavior weight"] == "–"


@pytest.mark.parametrize(
    "changes, trainer, servers",
    [
        (
            {"trainer": TrainerPhase.LOADING},
            "loads the model",
            "generate: 15 requests, evaluation included",
        ),
        (
            {"trainer": TrainerPhase.TRAINING},
            "trains on step 8",
            "generate: 15 requests, evaluation included",
        ),
        (
            {"trainer": TrainerPhase.PUSHING},
            "pushes its weights to the servers",
            "take new weights",
        ),
        (
            {"servers_announced": 0, "servers_ready": 0},
            "waits for 3 of 8 groups of step 8",
            "start",
        ),
        (
            {"servers_ready": 0},
            "waits for 3 of 8 groups of step 8",
            "wait for the weights of step 7",
        ),
        (
            {"trainer": TrainerPhase.TRAINING, "capacity": 0},
            "trains on step 8",
            "finish 15 requests; new ones would be too stale",
        ),
        (
            {"trainer": TrainerPhase.TRAINING, "capacity": 0, "version": 15, "step": 15},
            "trains on step 16",
            "finish 15 requests; no more are needed",
        ),
        (
            {"trainer": TrainerPhase.TRAINING, "capacity": 0, "requests": 0, "version": 6},
            "trains on step 8",
            "idle; new ones would be too stale",
        ),
        (
            {"trainer": TrainerPhase.TRAINING, "capacity": None, "requests": 0},
            "trains on step 8",
            "have no requests: rewards or tools are at work",
        ),
    ],
)
def test_who_waits_for_what(changes, trainer, servers):
    status = msgspec.structs.replace(STATUS, **changes)
    shown = values(train_view(replace(RUN, status=status)))
    assert (shown["trainer"], shown["servers"]) == (trainer, servers)


def test_requests_are_in_flight_only_on_servers():
    for changes, flying, servers in (
        ({}, "16 of 32", "generate: 15 requests"),
        ({"servers_ready": 0, "servers_announced": 0}, "16 wait for a server", "start"),
    ):
        status = msgspec.structs.replace(STATUS, evaluating=[], **changes)
        shown = values(train_view(replace(RUN, status=status)))
        assert (shown["in flight"], shown["servers"]) == (flying, servers)


def test_the_end_of_a_run():
    view = train_view(replace(RUN, steps=[{**STEP, "step": 20}], status=None))
    assert (view.done, view.eta_s) == (20, None)
    assert values(view)["trainer"] == "all steps done, saves the model"
    assert values(view)["servers"] == "stop"


def test_a_run_without_servers_shows_none():
    view = train_view(replace(RUN, config=config(debug="train_only"), status=None))
    assert [section.title for section in view.sections] == [
        "learning",
        "speed",
        "decoupled PPO, staleness up to 4",
    ]
    assert [(row.name, row.value) for row in view.waits] == [("trainer", "trains on step 8")]


def test_other_objectives_have_off_policy_data_too():
    other = config()
    other.algo.loss = "tb"
    titles = [section.title for section in train_view(replace(RUN, config=other)).sections]
    assert titles[-1] == "off-policy data, staleness up to 4"


def test_a_long_step_is_given_in_minutes():
    shown = values(train_view(replace(RUN, steps=[{**STEP, "time_s": 130.0}])))
    assert shown["a step"] == "2:10, waits 0%"


def test_the_line_of_a_step_without_a_push():
    step = {"reward_mean": 0.5, "staleness_mean": None, "tokens": 300, "time_s": 1.5}
    fields = {"reward": 0.5, "staleness": None, "tok_per_s": 200.0}
    assert step_line(step | {"pause_s": None}) == fields | {"pause": None}
    assert step_line(step | {"pause_s": 0.04}) == fields | {"pause": "40 ms"}


@pytest.mark.parametrize(
    "times_s, left, since_s, expected",
    [([], 5, 0, None), ([2, 4], 5, 1, 14), ([2], 0, 0, None), ([2], 1, 5, 0)],
)
def test_eta(times_s, left, since_s, expected):
    assert eta(times_s, left, since_s) == expected
