"""Runs whose stored data have a fault that spoils an experiment, and runs that only look so."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from areal_lite.run_dir.metrics import read_metrics
from areal_lite.run_dir.store import Store
from areal_lite.tools.report.run_data import read_columns
from areal_lite.trajectory import Group, Trajectory
from benchmarks.staleness import checks
from tests.unit.tools.diagnose.test_findings import findings, make_run

GROUPS, SIZE, STEPS = 4, 3, 30
PROMPT = 2


def sample(rng: np.random.Generator, group: int, index: int, step: int) -> Trajectory:
    """Draw a completion of 3 to 8 tokens, each of a probability of about 0.1."""
    length = int(rng.integers(3, 9))
    sampled = np.repeat([False, True], [PROMPT, length])
    logprobs = np.where(sampled, rng.normal(-2.3, 0.1, len(sampled)), 0)
    return Trajectory(
        group_id=group,
        prompt_id=f"prompt-{group}",
        sample_index=index,
        tokens=rng.integers(0, 90, len(sampled)).astype(np.int32),
        loss_mask=sampled,
        behavior_logprobs=logprobs.astype(np.float32),
        versions=np.where(sampled, step, -1).astype(np.int32),
        finish_reason="stop",
        reward=float(rng.integers(0, 2)),
    )


Batches = list[list[list[Trajectory]]]  # by step, group and sample


def batches(seed: int = 0) -> Batches:
    rng = np.random.default_rng(seed)
    return [
        [
            [sample(rng, step * GROUPS + group, i, step) for i in range(SIZE)]
            for group in range(GROUPS)
        ]
        for step in range(STEPS)
    ]


def copied(source: Trajectory, group: int, index: int) -> Trajectory:
    """Return `source` as another sample. Its log-probs may differ: the weights have changed."""
    parts = {name: getattr(source, name) for name in ("tokens", "loss_mask", "versions", "reward")}
    logprobs = np.where(source.loss_mask, source.behavior_logprobs * 0.99, 0).astype(np.float32)
    return Trajectory(
        group_id=group,
        prompt_id=f"prompt-{group}",
        sample_index=index,
        behavior_logprobs=logprobs,
        finish_reason="stop",
        **parts,
    )


def write_run(
    run_dir: Path,
    data: Batches,
    *overrides: str,
    trained: Batches | None = None,
    prompt: Callable[[int], int] = lambda group: (7 * group) % 120,
    **series,
) -> Path:
    """Write a run that stored `data` and trained on `trained`, by default the same."""
    trained = trained or data
    tokens = [sum(int(t.loss_mask.sum()) for g in batch for t in g) for batch in trained]
    rewards = [float(np.mean([t.reward for g in batch for t in g])) for batch in trained]
    metrics = {
        "tokens": lambda step: tokens[step - 1],
        "trained_tokens": lambda step: float(tokens[step - 1]),
        "reward_mean": lambda step: rewards[step - 1],
    }
    make_run(run_dir, "trainer.minibatches=2", *overrides, **{**metrics, **series})
    store = Store(run_dir / "trajectories.sqlite")
    for step, batch in enumerate(data):
        for members in batch:
            number = members[0].group_id
            store.admit(number, f"prompt-{number}", prompt(number), number + 1, SIZE, 0.0)
            group = Group(
                group_id=number,
                prompt_id=f"prompt-{number}",
                size=SIZE,
                trajectories=members,
            )
            store.finish(group, [(None, None)] * len(members), None, 1.0)
            store.use([number], step)
    store.close()
    return run_dir


def test_a_sound_run_has_no_findings(tmp_path: Path) -> None:
    assert not findings(write_run(tmp_path / "run", batches()))
    assert not findings(write_run(tmp_path / "files", batches(), "data.source=jsonl"))


def test_the_same_samples_in_two_steps(tmp_path: Path) -> None:
    data = batches()
    data[12] = [
        [copied(t, 12 * GROUPS + group, t.sample_index) for t in members]
        for group, members in enumerate(data[11])
    ]
    store = write_run(tmp_path / "run", data) / "trajectories.sqlite"
    found = checks.repeated_batch(read_columns(store), store)
    assert found and "steps 12 and 13 have the same 12 samples" in found


def test_steps_whose_tokens_are_not_kept_are_not_compared(tmp_path: Path) -> None:
    data = batches()
    data[12] = [
        [copied(t, 12 * GROUPS + group, t.sample_index) for t in members]
        for group, members in enumerate(data[11])
    ]
    first = max(data[4][2], key=lambda t: len(t.tokens))
    data[4][2] = [copied(first, 4 * GROUPS + 2, index) for index in range(SIZE)]
    run_dir = write_run(tmp_path / "run", data)
    store = Store(run_dir / "trajectories.sqlite")
    store.trim(1, since=12)
    store.close()
    columns, path = read_columns(store._path), store._path
    assert checks.repeated_samples(columns, path) is checks.repeated_batch(columns, path) is None


def test_a_certain_policy_may_repeat_itself(tmp_path: Path) -> None:
    """Batches of equal rewards and lengths that the policy writes with certainty."""
    data = batches()
    for step, batch in enumerate(data):
        for group, members in enumerate(batch):
            for index in range(SIZE):
                same = copied(data[0][0][0], step * GROUPS + group, index)
                same.behavior_logprobs = np.full_like(same.behavior_logprobs, -1e-3)
                members[index] = same
    run_dir = write_run(tmp_path / "run", data)
    store = run_dir / "trajectories.sqlite"
    assert checks.repeated_samples(read_columns(store), store) is None
    assert checks.repeated_batch(read_columns(store), store) is None


def test_a_trainer_that_got_the_batch_before(tmp_path: Path) -> None:
    data = batches()
    trained = [*data[:20], data[19], *data[21:]]
    run_dir = write_run(tmp_path / "run", data, trained=trained)
    columns = read_columns(run_dir / "trajectories.sqlite")
    found = checks.stuck_metrics(columns, read_metrics(run_dir))
    assert found and "step 21 reports" in found and "as the batch of step 20 has" in found


@pytest.mark.parametrize("off", [-1, 12])
def test_a_loss_that_counts_other_tokens(tmp_path: Path, off: int) -> None:
    data = batches()
    tokens = [sum(int(t.loss_mask.sum()) for g in batch for t in g) for batch in data]
    run_dir = write_run(
        tmp_path / "run",
        data,
        trained_tokens=lambda step: tokens[step - 1] - 5 + off * (step == 8),
        masked_truncated=3.0,
        masked_overdue=2.0,
        masked_nonfinite=0.0,
    )
    columns = read_columns(run_dir / "trajectories.sqlite")
    found = checks.rogue_tokens(columns, read_metrics(run_dir))
    assert found and f"step 8 divides by {tokens[7] - 5 + off:,} tokens and masks 5" in found
    assert f"{tokens[7]:,} were sampled" in found


def test_samples_of_a_group_that_no_seed_told_apart(tmp_path: Path) -> None:
    data = batches()
    for step in (4, 25):
        first = max(data[step][2], key=lambda t: len(t.tokens))
        data[step][2] = [copied(first, step * GROUPS + 2, index) for index in range(SIZE)]
    store = write_run(tmp_path / "run", data) / "trajectories.sqlite"
    found = checks.repeated_samples(read_columns(store), store)
    assert found and "2 of the newest" in found
    assert "group 18 of step 5: 3 times the same tokens" in found


def test_prompts_that_come_again_and_their_order(tmp_path: Path) -> None:
    sound = write_run(tmp_path / "a", batches()) / "trajectories.sqlite"
    assert checks.repeated_prompts(read_columns(sound)) is None
    cycle = write_run(tmp_path / "b", batches(), prompt=lambda group: group % GROUPS)
    fault = checks.repeated_prompts(read_columns(cycle / "trajectories.sqlite"))
    assert fault == "steps 1 and 2 have the same prompts"
    other = write_run(tmp_path / "c", batches(1)) / "trajectories.sqlite"
    assert checks.prompt_order(sound) == checks.prompt_order(other)
    shorter = write_run(tmp_path / "d", batches()[:-1], steps=STEPS - 1)
    assert checks.prompt_order(shorter / "trajectories.sqlite") != checks.prompt_order(sound)
