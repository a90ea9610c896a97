"""Each finding in a run that has the failure; a healthy run, and real runs, without it."""

import fcntl
import json
import os
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from omegaconf import OmegaConf

from areal_lite.cli import main
from areal_lite.config import TrainConfig
from areal_lite.run_dir.controller_status import ControllerStatus, TrainerPhase, write_status
from areal_lite.run_dir.store import Store
from areal_lite.system.files import write_json
from areal_lite.tools.diagnose import diagnosis
from areal_lite.tools.diagnose.diagnosis import GUIDE, alarm_line, diagnose
from areal_lite.tools.diagnose.history import Finding, History, Severity, Sign, read_history
from areal_lite.trajectory import Group
from tests.unit.tools.report.recorded_run import unpack
from tests.unit.tools.report.synthetic_run import T0, trajectory, write_group

STEPS = 30
STEP_S = 10.0
# One step of a healthy run, four versions of staleness allowed.
HEALTHY: dict[str, Any] = {
    "time_s": STEP_S,
    "reward_mean": 0.6,
    "uniform_groups_share": 0.3,
    "staleness_max": 3,
    "truncated_share": 0.02,
    "trajectories": 64,
    "tokens": 6400,
    "masked_tokens": 0,
    "nonfinite_tokens": 0,
    "distinct_share": 0.9,
    "queue_depth": 4,
    "in_flight": 60,
    "concurrency_limit": 64,
    "workflow_failures": 0,
    "reward_failures": 0,
    "wait_s": 1.0,
    "loop_lag_p99_s": 0.005,
    "loss": 0.01,
    "grad_norm": 0.3,
    "skipped": 0.0,
    "ess": 0.97,
    "clip_fraction": 0.002,
    "ratio_max": 1.6,
    "rejected": 0.0,
    "weight_max": 2.0,
    "entropy": 0.4,
    "pause_s": 0.2,
    "failed": [],
    "logprob_diff": 0.004,
}
END = T0 + STEPS * STEP_S


@cache
def config_text(*overrides: str) -> str:
    config = OmegaConf.structured(TrainConfig(model="model", run_dir="run"))
    return OmegaConf.to_yaml(OmegaConf.merge(config, OmegaConf.from_dotlist(list(overrides))))


def make_run(
    run_dir: Path,
    *overrides: str,
    steps: int = STEPS,
    planned: int = STEPS,
    evals: tuple[float, ...] = (),
    ended: bool = True,
    logs: dict[str, str] | None = None,
    **series: Any,
) -> Path:
    """Write a healthy run but for `series`: a value, or a function of the step number from 1."""
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(config_text(f"trainer.steps={planned}", *overrides))
    os.utime(run_dir / "config.yaml", (T0, T0))
    lines = []
    for step in range(1, steps + 1):
        changed = {key: value(step) if callable(value) else value for key, value in series.items()}
        at = {"step": step, "version": step, "logged_at": T0 + step * STEP_S}
        lines.append(json.dumps({**at, **HEALTHY, **changed}))
    (run_dir / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    records = [
        {"name": "held-out", "version": i * steps // (len(evals) - 1), "sampled": accuracy}
        for i, accuracy in enumerate(evals)
    ]
    (run_dir / "evals.jsonl").write_text(
        "".join(f"{json.dumps({**record, 'problems': 400})}\n" for record in records)
    )
    (run_dir / "logs").mkdir()
    for name, text in (logs or {}).items():
        (run_dir / "logs" / name).write_text(text)
        os.utime(run_dir / "logs" / name, (END, END))
    if ended:
        write_json(run_dir / "summary.json", {})
    return run_dir


def findings(run_dir: Path, now: float = END) -> dict[str, Finding]:
    return {finding.name: finding for finding in diagnose(read_history(run_dir, now))}


def the_only(run_dir: Path, name: str, severity: Severity, now: float = END) -> str:
    """Return the evidence of the only finding, which must be `name`."""
    found = findings(run_dir, now)
    assert list(found) == [name], found
    assert found[name].severity is severity, found
    return found[name].evidence


ALARM, HINT = Severity.ALARM, Severity.HINT
# name, severity, what the run has, and a number that the evidence must tell.
CASES: list[tuple[str, Severity, dict[str, Any], str]] = [
    ("bad_numbers", ALARM, {"skipped": lambda step: float(step in (7, 9))}, "first: step 7"),
    ("bad_numbers", ALARM, {"grad_norm": lambda step: None if step == 4 else 0.3}, "1 of 30"),
    ("bad_numbers", ALARM, {"nonfinite_tokens": lambda step: 3 * (step > 20)}, "30 tokens"),
    ("logprob_mismatch", ALARM, {"logprob_diff": lambda step: 0.2}, "0.2 nats"),
    (
        "logprob_mismatch",
        ALARM,
        {"logprob_diff": lambda step: 1e-7 if step < 15 else 0.02},
        "0.02 nats",
    ),
    ("reward_collapse", ALARM, {"reward_mean": lambda step: 0.7 if step < 18 else 0.1}, "0.10"),
    ("entropy_collapse", ALARM, {"entropy": lambda step: 0.5 * 0.8**step}, "entropy 0.269"),
    ("low_ess", ALARM, {"ess": 0.3}, "ess 0.30"),
    ("low_ess", HINT, {"weight_max": 9.0, "ess": 0.8}, "cap of 5 in 100%"),
    ("low_ess", HINT, {"rejected": 0.2}, "20.0% of the tokens"),
    ("low_ess", HINT, {"behave_kl": 0.06}, "behave_kl 0.060"),
    ("reward_failures", ALARM, {"reward_failures": lambda step: 20 * step}, "600 failures, 23.8%"),
    ("reward_failures", HINT, {"reward_failures": lambda step: 2 * step}, "60 failures, 3.0%"),
    # The count starts again with each start of the controller.
    ("workflow_failures", HINT, {"workflow_failures": lambda step: 3 * (step % 15)}, "84 failures"),
    ("truncated", HINT, {"truncated_share": 0.3}, "30%"),
    ("truncated", ALARM, {"truncated_share": 0.7}, "70%"),
    ("few_signals", HINT, {"uniform_groups_share": 0.8, "reward_mean": 0.9}, "80%"),
    ("few_signals", HINT, {"uniform_groups_share": 0.8, "reward_mean": 0.1}, "80%"),
    (
        "gradient_spikes",
        HINT,
        {"grad_norm": lambda step: 2760.0 if step == 12 else 0.3},
        "2.8k at step 12",
    ),
    ("slow_servers", HINT, {"wait_s": 6.0}, "waits 60%"),
    ("slow_servers", HINT, {"wait_s": 5.0, "staleness_max": 4, "in_flight": 20}, "31%"),
    ("slow_trainer", HINT, {"wait_s": 0.01, "queue_depth": 90, "in_flight": 2}, "90 groups"),
    (
        "slow_trainer",
        HINT,
        {"wait_s": 0.01, "queue_depth": 3, "in_flight": 2, "admission_lead": 1},
        "3 groups",
    ),
    ("long_pauses", HINT, {"pause_s": 3.0}, "30% of the time"),
    ("stragglers", HINT, {"straggler_wait_s": 3.0}, "wait 30% of the time"),
    ("overdue_tokens", HINT, {"masked_tokens": 1280}, "20% of the tokens"),
    ("busy_controller", HINT, {"loop_lag_p99_s": 0.4}, "0.40 s"),
    (
        "failed_servers",
        HINT,
        {"failed": lambda step: ["server-1"] * (step == 3)},
        "left out of a push: 1",
    ),
]


@pytest.mark.parametrize(
    ("name", "severity", "series", "number"), CASES, ids=[f"{case[0]}-{case[3]}" for case in CASES]
)
def test_a_failure_is_the_only_finding(
    tmp_path: Path, name: str, severity: Severity, series: dict[str, Any], number: str
) -> None:
    assert number in the_only(make_run(tmp_path / "run", **series), name, severity)


@pytest.mark.parametrize(
    ("in_flight", "title", "change"),
    [
        (64, "The trainer waits for the servers", "raise `server.count`"),
        (20, "The staleness bound holds generation back", "raise `buffer.max_staleness` by one"),
    ],
)
def test_why_the_trainer_waits(tmp_path: Path, in_flight: int, title: str, change: str) -> None:
    run_dir = make_run(tmp_path / "run", wait_s=5.0, staleness_max=4, in_flight=in_flight)
    found = findings(run_dir)["slow_servers"]
    assert found.title.startswith(title) and found.change.startswith(change)


def test_no_bound_holds_a_replay_buffer_back(tmp_path: Path) -> None:
    for bound in (4, 0):
        replay = ["buffer.replay.capacity=8", f"buffer.max_staleness={bound}"]
        waits = {"wait_s": 5.0, "staleness_max": 9, "in_flight": 20}
        found = findings(make_run(tmp_path / f"run-{bound}", *replay, **waits))["slow_servers"]
        assert found.title == "The trainer waits for the servers"
        assert "largest staleness 9, of any age" in found.evidence


def test_prompts_in_quarantine_are_found(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run")
    held = {"p7": {"prompt_index": 7, "failure": "it hung at my.py:3 in f", "lasts": True}}
    (run_dir / "quarantine.json").write_text(json.dumps(held))
    assert "1 prompts; the last: p7: it hung at my.py:3 in f" in the_only(
        run_dir, "quarantine", HINT
    )


def test_restarts_of_the_controller_and_the_trainer_are_found(tmp_path: Path) -> None:
    again = (
        "2026-01-01 00:00:00 the trainer exited with status 9:\n  its last lines\n"
        "controller and trainer start again from step 4 in 1 s (restart 1 of 5 within an hour): "
        "the trainer exited with status 9\n"
    )
    run_dir = make_run(tmp_path / "a", logs={"restarts.log": again})
    evidence = the_only(run_dir, "restarted", HINT)
    assert "restarts: 1; " in evidence and evidence.endswith("the trainer exited with status 9")
    run_dir = make_run(tmp_path / "b", logs={"restarts.log": 3 * again})
    assert "restarts: 3; " in the_only(run_dir, "restarted", ALARM)


def test_a_healthy_run_has_no_findings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path / "run", evals=(0.4, 0.5, 0.6))
    assert not findings(run_dir)
    assert alarm_line(run_dir) is None
    assert main(["diagnose", f"run_dir={run_dir}"]) == 0
    out = capsys.readouterr().out
    assert "ended, step 30 of 30" in out and "No findings: no check found anything wrong." in out


def test_a_check_that_fails_costs_no_other_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(run: History) -> Sign | None:
        raise ZeroDivisionError

    run_dir = make_run(tmp_path / "run", evals=(0.9, 0.5, 0.1))
    expected = findings(run_dir)
    assert expected
    monkeypatch.setattr(diagnosis, "GUIDE", [replace(diagnosis.GUIDE[0], check=fail), *GUIDE])
    found = findings(run_dir)
    failed = found.pop("failed_check")
    assert found == expected
    assert failed.title == "The check fail failed" and failed.evidence == "ZeroDivisionError: "


@pytest.mark.parametrize("name", ["async", "sync"])
def test_recorded_runs_have_no_alarm_and_the_hints_that_are_true(tmp_path: Path, name: str) -> None:
    found = findings(unpack(name, tmp_path))
    # They solve most problems. A step lasts less than a second, and an evaluation several steps.
    expected = {"few_signals": HINT}
    if name == "async":
        expected |= {"long_pauses": HINT, "mixed_evaluations": HINT}
    assert {key: finding.severity for key, finding in found.items()} == expected
    assert "56 at the top, 1 at the bottom" in found["few_signals"].evidence or name != "async"


def test_a_trainer_that_must_wait_for_its_own_pushes_is_no_finding(tmp_path: Path) -> None:
    """Nothing may start for the steps after a push before it has come."""
    waits = {"wait_s": 6.0, "staleness_max": lambda step: (step - 1) % 5}
    assert not findings(make_run(tmp_path / "turns", "sync.every=5", **waits))
    run_dir = make_run(tmp_path / "ahead", "sync.every=3", **waits)
    assert findings(run_dir).keys() == {"slow_servers"}


def test_a_run_shorter_than_its_lead_has_no_middle(tmp_path: Path) -> None:
    """All of it is start or end: a trainer that waits there says nothing about speed."""
    run_dir = make_run(tmp_path / "run", "buffer.max_staleness=40", wait_s=6.0)
    assert not findings(run_dir)


def test_the_command_prints_alarms_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = make_run(tmp_path / "run", ess=0.2, loop_lag_p99_s=0.5)
    assert main(["diagnose", f"run_dir={run_dir}"]) == 0
    blocks = capsys.readouterr().out.split("\n\n")[1:]
    assert [block.split()[0] for block in blocks] == ["ALARM", "HINT"]
    assert "lower trainer.lr or buffer.max_staleness" in blocks[0]
    assert alarm_line(run_dir) == f"areal-lite diagnose {run_dir} explains 2 findings"


def test_one_cause_is_one_finding(tmp_path: Path) -> None:
    run_dir = make_run(
        tmp_path / "run",
        logprob_diff=0.5,
        ess=0.1,
        reward_mean=lambda step: 0.7 if step < 18 else 0.0,
    )
    the_only(run_dir, "logprob_mismatch", ALARM)


def test_too_few_steps_are_not_judged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = make_run(tmp_path / "run", steps=3, planned=3, ess=0.1, truncated_share=1.0)
    assert not findings(run_dir)
    main(["diagnose", f"run_dir={run_dir}"])
    assert "few steps" in capsys.readouterr().out


def test_low_entropy_of_a_solved_task_is_right(tmp_path: Path) -> None:
    falling = {"entropy": lambda step: 0.5 * 0.8**step}
    assert not findings(make_run(tmp_path / "a", reward_mean=0.98, **falling))
    # The newest evaluation has solved it, though the mean reward of the recent steps has not.
    assert not findings(make_run(tmp_path / "b", evals=(0.1, 0.99), reward_mean=0.9, **falling))


@pytest.mark.parametrize(
    "key", ["wait_s=9", "pause_s=9"], ids=["the trainer waits", "servers pause"]
)
def test_waits_of_the_synchronous_schedule_are_right(tmp_path: Path, key: str) -> None:
    name, _, value = key.partition("=")
    values = {name: float(value), "staleness_max": 0}
    assert not findings(make_run(tmp_path / "run", "buffer.max_staleness=0", **values))


@pytest.mark.parametrize("estimator", ["gae", "reinforce_pp", "off"])
def test_equal_rewards_matter_only_where_groups_are_compared(
    tmp_path: Path, estimator: str
) -> None:
    run_dir = make_run(
        tmp_path / "run", f"algo.advantage.estimator={estimator}", uniform_groups_share=0.9
    )
    assert not findings(run_dir)


def test_held_out_accuracy_falls_while_the_reward_rises(tmp_path: Path) -> None:
    rising = {"reward_mean": lambda step: 0.3 + 0.02 * step}
    run_dir = make_run(tmp_path / "a", evals=(0.4, 0.6, 0.45), **rising)
    assert "60.0% (version 15) -> 45.0%" in the_only(run_dir, "falling_accuracy", ALARM)
    # Also against the accuracy before training.
    run_dir = make_run(tmp_path / "b", evals=(0.6, 0.5, 0.4), **rising)
    assert "(version 0)" in the_only(run_dir, "falling_accuracy", ALARM)
    # Within two standard errors of 400 problems, or along with the reward, it is no such case.
    assert not findings(make_run(tmp_path / "c", evals=(0.5, 0.6, 0.54), **rising))
    falling = {"reward_mean": lambda step: 0.9 - 0.01 * step}
    assert not findings(make_run(tmp_path / "d", evals=(0.5, 0.6, 0.4), **falling))


@pytest.mark.parametrize("evals", [(1.2, 2.4, 0.5), (-0.2, -0.5, -0.9), (0.5, 3.0, 1.0)])
def test_rewards_that_are_no_shares_have_no_accuracy(tmp_path: Path, evals: tuple) -> None:
    run_dir = make_run(tmp_path / "run", evals=evals, reward_mean=lambda step: 0.1 * step)
    assert not findings(run_dir)


def test_evaluations_that_mix_the_weights_of_many_steps(tmp_path: Path) -> None:
    def run_with(name: str, *spans: tuple[int, int]) -> Path:
        run_dir = make_run(tmp_path / name, "eval.every=10")
        lines = [
            {"name": "held-out", "version": a, "versions": list(range(a, b + 1)), "problems": 400}
            for a, b in spans
        ]
        text = "".join(f"{json.dumps({**line, 'sampled': 0.5})}\n" for line in lines)
        (run_dir / "evals.jsonl").write_text(text)
        return run_dir

    mixed = run_with("a", (0, 5), (10, 16), (20, 20))
    evidence = the_only(mixed, "mixed_evaluations", HINT)
    assert "1 of 3 evaluations, 10 steps apart; the one of version 10 was answered by" in evidence
    assert not findings(run_with("b", (0, 5), (10, 10)))
    # Every answer failed, so no version sampled a token.
    unanswered = run_with("c", (0, 0))
    (unanswered / "evals.jsonl").write_text(
        '{"name": "h", "version": 0, "greedy": 0.0, "problems": 9, "versions": []}\n'
    )
    assert not findings(unanswered)


def test_uniform_groups_are_counted_from_the_store(tmp_path: Path) -> None:
    # Rewards of -1 and 3: the mean of 1.2 lies above one half, but most uniform groups failed.
    run_dir = make_run(tmp_path / "run", uniform_groups_share=0.75, reward_mean=1.2)
    store = Store(run_dir / "trajectories.sqlite")
    for group_id, rewards in enumerate([(-1, -1), (-1, -1), (3, 3), (-1, 3)]):
        members = [
            trajectory(group_id, sample, [(0, 5)], T0, T0 + 1, reward=float(reward))
            for sample, reward in enumerate(rewards)
        ]
        group = Group(group_id=group_id, prompt_id=f"p{group_id}", size=2, trajectories=members)
        write_group(store, group, step=STEPS - 1)
    store.close()
    assert "1 at the top, 2 at the bottom" in the_only(run_dir, "few_signals", HINT)


STATUS = ControllerStatus(
    version=12,
    step=9,
    trainer=TrainerPhase.WAITING,
    batch_step=9,
    missing_groups=5,
    queued_groups=3,
    running_groups=8,
    capacity=0,
    in_flight=64,
    concurrency_limit=64,
    requests=60,
    servers_ready=1,
    servers_announced=1,
    evaluating=[],
)
STALLS = {
    "servers": ({}, "waits for 5 groups; the servers hold 60 requests"),
    "reward": ({"requests": 0}, "the workflow or the reward function hangs"),
    "trainer": (
        {"trainer": TrainerPhase.TRAINING},
        "the controller waits for the trainer (step 9, training): see logs/trainer.log",
    ),
    "no server": ({"servers_ready": 0}, "the controller waits for a server"),
}


@pytest.mark.parametrize("role", STALLS)
def test_a_stall_names_the_role(tmp_path: Path, role: str) -> None:
    changes, blamed = STALLS[role]
    run_dir = make_run(tmp_path / "run", planned=99, ended=False)
    write_status(run_dir, msgspec.structs.replace(STATUS, **changes))
    with open(run_dir / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Ten usual steps without progress are none yet.
        assert not findings(run_dir, END + 10 * STEP_S)
        os.utime(run_dir / "controller_status.json", (END + 200, END + 200))
        evidence = the_only(run_dir, "stalled", ALARM, END + 205)
        assert "no step for 205 s after step 30 (usually 10.0 s)" in evidence and blamed in evidence
        assert "the controller hangs" in the_only(run_dir, "stalled", ALARM, END + 300)
        (run_dir / "controller_status.json").unlink()
        assert "no controller" in the_only(run_dir, "stalled", ALARM, END + 300)


def test_the_time_before_a_resume_is_no_stall(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "run", planned=99, ended=False)
    started = END + 86_400
    os.utime(run_dir / "config.yaml", (started, started))
    with open(run_dir / "lock", "wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        timeout_s = TrainConfig(model="model").server.start_timeout_s
        assert not findings(run_dir, started + timeout_s)
        evidence = the_only(run_dir, "stalled", ALARM, started + timeout_s + 101)
        assert f"no step for {timeout_s + 101:.0f} s after step 30" in evidence


def test_a_run_that_ended_early_says_why(tmp_path: Path) -> None:
    error = "2026-11-22 02:22:27,719 ERROR areal_lite.trainer.loop: 5 skipped steps in a row\n"
    run_dir = make_run(tmp_path / "a", planned=99, logs={"trainer.log": f"step 1\n{error}"})
    assert "5 skipped steps in a row" in the_only(run_dir, "ended_early", ALARM)
    # Killed: no summary, no process, no error.
    run_dir = make_run(tmp_path / "b", planned=99, ended=False)
    assert "step 30 of 99; no error" in the_only(run_dir, "ended_early", HINT)
    # Stopped on request.
    (run_dir / "stop").touch()
    assert not findings(run_dir)


def test_servers_that_restart_are_an_alarm(tmp_path: Path) -> None:
    again = "2026-11-22 02:22:28 server-0 is started again in 1 s (restart 1 of 5): exited with 9\n"
    given_up = "2026-11-22 02:30:28 server-0 is given up after 5 restarts: exited with status 9\n"
    run_dir = make_run(tmp_path / "a", logs={"servers.log": again})
    assert "restarts: 1, given up: 0" in the_only(run_dir, "failed_servers", HINT)
    run_dir = make_run(tmp_path / "b", logs={"servers.log": 3 * again})
    the_only(run_dir, "failed_servers", ALARM)
    run_dir = make_run(tmp_path / "c", logs={"servers.log": again + given_up})
    assert "exited with status 9" in the_only(run_dir, "failed_servers", ALARM)


def test_failures_show_the_last_one(tmp_path: Path) -> None:
    line = "2026-11-22 02:22:28 WARNING x: rollout of p-7, sample 2: no reward: f: no answer in 5 s"
    run_dir = make_run(
        tmp_path / "run", reward_failures=lambda step: 9 * step, logs={"controller.log": line}
    )
    found = the_only(run_dir, "reward_failures", ALARM)
    assert "the last: p-7, sample 2: no reward: f: no answer in 5 s" in found


def test_a_folder_without_a_run_is_a_mistake(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["diagnose", f"run_dir={tmp_path}"]) == 1
    assert "is not a run directory" in capsys.readouterr().err


def test_the_newest_steps_are_enough(tmp_path: Path) -> None:
    """Leave out the counts of earlier steps."""
    run = make_run(tmp_path / "run", resting=lambda step: 100 + step)
    newest = read_history(run, END, newest=10)
    assert len(newest.metrics) == 10 and newest.step == STEPS and newest.complete
    assert newest.count("resting") == 9
    assert read_history(run, END).count("resting") == 100 + STEPS
    assert diagnose(newest) == []
