"""A run that is killed at any moment and resumes.

No prompt is lost or drawn twice in an epoch, and no step trains on what lost weights sampled.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from areal_lite.config import TrainConfig, find_command, save_config
from areal_lite.data.sampler import PromptSampler, SourceOrder
from areal_lite.launch.preflight import check_config, check_run_dir_of
from areal_lite.run_dir.metrics import append_event, forget_after, read_events
from areal_lite.run_dir.resume import (
    clear_stop_request,
    lock_run_dir,
    remove_files,
    start_version,
    stop_requested,
)
from areal_lite.run_dir.store import Recovered, Store
from areal_lite.trajectory import Group, Trajectory

BATCH = 2
FIVE = SourceOrder(5, 3)
NO_END = SourceOrder(None, weight=3)


def group(group_id: int, version: int, reward: float = 0.5) -> Group:
    """Return a group with one trajectory that began a version before it ended."""
    versions = np.array([-1, max(0, version - 1), version], np.int32)
    logprobs = np.array([0, -1, -1], np.float32)
    one = Trajectory(
        group_id=group_id,
        prompt_id=f"p{group_id}",
        sample_index=0,
        tokens=np.arange(3, dtype=np.int32),
        loss_mask=versions >= 0,
        behavior_logprobs=logprobs,
        versions=versions,
        finish_reason="stop",
        reward=reward,
    )
    return Group(group_id=group_id, prompt_id=f"p{group_id}", size=1, trajectories=[one])


def new_store() -> Store:
    """A store whose files are gone when it is closed."""
    folder = Path(tempfile.mkdtemp())
    store = Store(folder / "trajectories.sqlite")
    shutil.rmtree(folder)
    return store


class Run:
    """Do to store and sampler what the dispatcher does, one event at a time."""

    def __init__(self, *sources: SourceOrder):
        self.sources = sources
        self.store, self.sampler = new_store(), PromptSampler(*sources)
        self.prompts: list[int] = []  # of each group
        self.batch: list[int] = []  # groups of the batch that the trainer has
        self.version, self.saved, self.now = 0, 0, 0.0

    def groups(self, state: str) -> list[int]:
        return [t["group_id"] for t in self.store.groups() if t["state"] == state]

    def tick(self) -> float:
        self.now += 1.0
        return self.now

    def admit(self, _: int) -> None:
        index = self.sampler.next()
        self.store.admit(len(self.prompts), f"p{index}", index, self.sampler.drawn, 1, self.tick())
        self.prompts.append(index)

    def finish(self, which: int, state: str = "finished") -> None:
        if flying := self.groups("in_flight"):
            chosen = flying[which % len(flying)]
            self.store.finish(
                group(chosen, self.version),
                [(None, None)],
                "why" if state == "filtered" else None,
                self.tick(),
                state,
            )

    def filter(self, which: int) -> None:
        self.finish(which, "filtered")

    def drop(self, which: int) -> None:
        if open_ := self.groups("in_flight") + self.waiting():
            chosen = open_[which % len(open_)]
            self.store.drop(chosen, "failed", self.tick())
            self.sampler.put_back(self.prompts[chosen])

    def waiting(self) -> list[int]:
        return [group.group_id for group in self.store.waiting_groups()]

    def assign(self, _: int) -> None:
        if not self.batch and len(waiting := self.waiting()) >= BATCH:
            self.batch = waiting[:BATCH]
            self.store.assign(self.batch, self.version)

    def train(self, which: int) -> None:
        self.assign(which)
        if self.batch:
            self.store.use(self.batch, self.version)
            self.version += 1
            self.batch = []

    def save(self, _: int) -> None:
        self.saved = self.version

    def kill(self, _: int) -> None:
        """Go on from the newest checkpoint, by what the store says alone."""
        flying = [self.prompts[t] for t in self.groups("in_flight")]
        before = {t["group_id"]: t for t in self.store.groups()}
        recovered = self.store.recover(self.saved, self.tick())
        counts = self.store.counts()
        assert len(self.prompts) == sum(counts.values())
        assert len(self.store.waiting_groups()) == counts["finished"]
        assert self.store.filtered().total() == counts["filtered"]
        if self.saved == self.version:  # nothing but what was in flight is lost
            assert (recovered.drawn, recovered.put_back) == (
                self.sampler.drawn,
                list(self.sampler.returned) + flying,
            )
        for row in self.store.groups():
            old = before[row["group_id"]]
            kept = old["state"] in ("filtered", "dropped") or (
                old["state"] == "used" and old["step"] < self.saved
            )
            assert not kept or row == old
            assert row["state"] != "in_flight" and (
                row["state"] != "used" or row["step"] < self.saved
            )
        assert all(
            t["max_version"] <= self.saved
            for state in ("finished", "used")
            for t in self.store.trajectories(state=state)
        )
        lost = [
            t
            for t in self.store.groups()
            if t["state"] == "dropped" and before[t["group_id"]]["state"] in ("finished", "used")
        ]
        newest = {t["group_id"]: t["max_version"] for t in self.store.trajectories(state="dropped")}
        assert all(newest[t["group_id"]] > self.saved for t in lost), (
            "a trajectory that could be used was thrown away"
        )
        self.version = self.saved
        self.batch = []
        self.restore_sampler(recovered)

    def kill_controller(self, _: int) -> None:
        """Go on under the trainer, which keeps its step and its batch: only what flew is lost."""
        assert self.store.completed_steps() == self.version
        flying = [self.prompts[t] for t in self.groups("in_flight")]
        before = {t["group_id"]: t for t in self.store.groups() if t["state"] != "in_flight"}
        waiting, put_back = self.waiting(), list(self.sampler.returned)
        recovered = self.store.recover(self.version, self.tick(), trainer_runs=True)
        assert {t["group_id"]: t for t in self.store.groups() if t["group_id"] in before} == before
        assert [t.group_id for t in self.store.assigned_groups(self.version)] == self.batch
        finished = self.store.counts()["finished"]
        assert self.waiting() == waiting and finished == len(waiting) + len(self.batch)
        assert (recovered.drawn, recovered.put_back) == (self.sampler.drawn, put_back + flying)
        self.restore_sampler(recovered)

    def restore_sampler(self, recovered: Recovered) -> None:
        self.sampler = PromptSampler(*self.sources)
        self.sampler.check_draws(recovered.draws)
        self.sampler.resume(recovered.drawn, recovered.put_back)

    def check(self) -> None:
        """Each drawn prompt belongs to a group that was not dropped, or was put back."""
        fresh = PromptSampler(*self.sources)
        drawn = Counter(fresh.next() for _ in range(self.sampler.drawn))
        held = Counter(t["prompt_index"] for t in self.store.groups() if t["state"] != "dropped")
        assert drawn == held + Counter(list(self.sampler.returned))
        assert self.store.missing_trajectories() == 0


EVENTS = ["admit"] * 4 + ["finish"] * 4 + ["assign", "train", "train"]
EVENTS += ["filter", "drop", "save", "kill", "kill_controller"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(EVENTS), st.integers(0, 9)), max_size=60),
    st.sampled_from([[NO_END], [SourceOrder(1, 3)], [FIVE], [FIVE, SourceOrder(2, 3), NO_END]]),
)
def test_any_history_of_events(events: list[tuple[str, int]], sources: list[SourceOrder]) -> None:
    run = Run(*sources)
    for event, number in [*events, ("kill", 0)]:
        getattr(run, event)(number)
        run.check()
    run.store.close()


def test_waiting_groups_are_recovered_whole_and_in_order() -> None:
    run = Run(NO_END)
    for _ in range(6):
        run.admit(0)
    for which in (5, 3, 0):
        run.store.finish(group(which, 0), [(None, None)], None, run.tick())
    run.store.use([3], 0)
    recovered = run.store.recover(0, run.tick())
    waiting = run.store.waiting_groups()
    counts = run.store.counts()
    assert [g.group_id for g in waiting] == [0, 3, 5]
    assert (sum(counts.values()), counts["finished"]) == (6, 3)
    want, got = group(3, 0).trajectories[0], waiting[1].trajectories[0]
    for name in ("tokens", "loss_mask", "behavior_logprobs", "versions"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
    assert (recovered.drawn, recovered.put_back) == (6, [1, 2, 4])
    assert [t["reason"] for t in run.store.groups() if t["state"] == "dropped"] == [
        "resume: was in flight"
    ] * 3


def test_another_order_of_prompts_is_refused() -> None:
    run = Run(FIVE)
    for _ in range(7):
        run.admit(0)
        run.drop(0)
    draws = run.store.recover(0, run.tick()).draws
    assert [drawn for drawn, _ in draws] == [1], "all later ones were put back before"
    for _ in range(12):
        run.admit(0)
    draws = run.store.recover(0, run.tick()).draws
    run.sampler.check_draws(draws)
    for other in (
        PromptSampler(SourceOrder(6, 3)),
        PromptSampler(SourceOrder(5, 4)),
        PromptSampler(SourceOrder(None)),
        PromptSampler(FIVE, FIVE),
    ):
        with pytest.raises(
            ValueError, match="cannot resume: prompt .* would be .* with num_prompts="
        ):
            other.check_draws(draws)


def test_rewards_by_prompt_in_the_order_of_finishing() -> None:
    store = new_store()
    for group_id, index in enumerate([4, 7, 4, 9]):
        store.admit(group_id, f"p{index}", index, group_id + 1, 1, 0.0)
    for now, (group_id, reward) in enumerate([(2, 1.0), (0, 0.25), (1, 0.0)]):
        store.finish(
            group(group_id, 0, reward),
            [(None, None)],
            None,
            float(now),
            "filtered" if group_id == 1 else "finished",
        )
    assert list(store.rewards()) == [(4, [1.0], 3), (4, [0.25], 1), (7, [0.0], 2)]


def test_an_empty_store_is_a_start() -> None:
    store = new_store()
    assert store.recover(0, 0.0) == (0, [], [], [])
    assert sum(store.counts().values()) == 0


def test_logs_are_cut_where_the_run_resumes(tmp_path) -> None:
    for step in range(1, 5):
        append_event(tmp_path, "metrics", {"step": step})
    for version in (0, 2, 4):
        append_event(tmp_path, "evals", {"version": version})
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "to')
    forget_after(tmp_path, 2)
    assert [m["step"] for m in read_events(tmp_path, "metrics")] == [1, 2]
    assert [e["version"] for e in read_events(tmp_path, "evals")] == [0, 2]
    assert (tmp_path / "metrics.jsonl").read_bytes().endswith(b"}\n")
    forget_after(tmp_path / "nowhere", 2)


def test_a_run_dir_is_locked_and_cleaned(tmp_path) -> None:
    run_dir = tmp_path / "run"
    (run_dir / "servers").mkdir(parents=True)
    (run_dir / "checkpoints" / "step-12").mkdir(parents=True)
    stale = [
        "stop",
        "controller.json",
        "summary.json",
        "servers/server-0.json",
        "servers/server-0.unhealthy",
    ]
    kept = [
        "config.yaml",
        "metrics.jsonl",
        "trajectories.sqlite",
        "checkpoints/step-12/manifest.json",
    ]
    for name in stale + kept:
        (run_dir / name).touch()
    with lock_run_dir(run_dir):
        remove_files(run_dir)
        assert not any((run_dir / name).exists() for name in stale) and all(
            (run_dir / name).exists() for name in kept
        )
        code = (
            "import sys; from pathlib import Path; "
            "from areal_lite.run_dir.resume import lock_run_dir; "
            "lock_run_dir(Path(sys.argv[1])).__enter__()"
        )
        second = subprocess.run(
            [sys.executable, "-c", code, str(run_dir)], capture_output=True, text=True
        )
        assert second.returncode and "a run is going on there" in second.stderr.splitlines()[-1]
    with lock_run_dir(run_dir):
        assert start_version(run_dir) == 12


def test_sigusr1_asks_for_a_stop(tmp_path) -> None:
    before = signal.getsignal(signal.SIGUSR1)
    with lock_run_dir(tmp_path):
        assert not stop_requested(tmp_path)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop_requested(tmp_path)
    assert stop_requested(tmp_path) and signal.getsignal(signal.SIGUSR1) == before
    clear_stop_request(tmp_path)
    assert not stop_requested(tmp_path)


def test_a_run_that_cannot_resume_is_refused(tmp_path, capsys) -> None:
    for name in ("model", "other"):
        (tmp_path / name).mkdir()
        for file in ("config.json", "tokenizer.json"):
            (tmp_path / name / file).write_text("{}")
    run_dir = tmp_path / "run"
    settings = {"model": tmp_path / "model", "run_dir": run_dir, "resume": "auto"}
    reward = "areal_lite_quickstart.addition:addition_reward"
    settings |= {"data.source": "addition", "reward.function": reward}
    save_config(checked(settings), run_dir)  # the first start finds nothing
    save_config(checked(settings | {"trainer.steps": 7, "eval.problems": 0}), run_dir)
    assert (run_dir / "config-1.yaml").exists() and "steps: 7" in (
        run_dir / "config.yaml"
    ).read_text()
    for other, complaint in (
        ({"model": tmp_path / "other"}, "model=.*other: the run in .* started with .*model and"),
        ({"seed": 9}, "seed=9: the run .* started with 1"),
        ({"resume": "never"}, "holds a run already.*resume=auto"),
        ({"resume": "maybe"}, "resume=maybe: choose one of never, auto"),
        (
            REPLAY,
            "buffer.replay.capacity=8: the run started with 0",
        ),
    ):
        with pytest.raises(ValueError, match=complaint):
            checked(settings | other)
    half = checked(settings)
    half.debug = "train_only:a"
    with pytest.raises(ValueError, match="debug=train_only:a continues no run"):
        check_run_dir_of(half)


REPLAY = {
    "buffer.replay.capacity": 8,
    "algo.loss": "tb",
    "algo.reference": "${model}",
    "algo.kl.coef": 0.1,
}


def checked(settings: dict[str, object]) -> TrainConfig:
    config = OmegaConf.merge(
        OmegaConf.structured(TrainConfig),
        OmegaConf.from_dotlist([f"{k}={v}" for k, v in settings.items()]),
    )
    check_config(find_command("train"), OmegaConf.to_object(config))
    return OmegaConf.to_object(config)
