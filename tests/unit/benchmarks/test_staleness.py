"""The pure parts of the staleness study: cells, carries and statistics."""

import math
import random
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf
from scipy import stats

from areal_lite.algo.advantages import grpo
from areal_lite.algo.correction import Correction
from areal_lite.algo.losses import LossInputs, ppo_loss
from areal_lite.config.command_line import compose_config
from areal_lite.run_dir.store import Store
from areal_lite.trajectory import Group, Trajectory
from areal_lite_quickstart import addition
from benchmarks.staleness import paired
from benchmarks.staleness.carries import carry_logprobs
from benchmarks.staleness.checks import check_run, check_study
from benchmarks.staleness.pictures import draw_drift
from benchmarks.staleness.studies import ARMS, STUDIES, Cell
from benchmarks.staleness.tables import best_rate, page

rewards = st.lists(st.floats(0, 1), min_size=10, max_size=60)
accuracies = st.integers(0, 512).map(lambda right: right / 512)


@pytest.mark.parametrize("study", STUDIES)
def test_cells_are_the_runs_that_they_name(study: str) -> None:
    cells = STUDIES[study](3)
    assert len({cell.name for cell in cells}) == len(cells)
    for cell in cells[:: max(1, len(cells) // 6)]:
        config = OmegaConf.to_object(
            compose_config("train", ["model=warm", "run_dir=run", *cell.settings])
        )
        assert config.buffer.max_staleness == cell.lag and config.buffer.window == 0
        assert config.rollout.interrupt == "none"
        assert (config.trainer.lr, config.seed, config.data.args["seed"]) == (cell.lr, 3, 3)
        assert config.algo.eps_low == config.algo.eps_high == cell.eps
        assert (config.trainer.steps, config.trainer.minibatches) == (cell.steps, cell.minibatches)


def test_every_arm_differs_from_decoupled_in_what_it_adds() -> None:
    configs = {}
    for arm in ARMS:
        settings = Cell(arm, 8, 1e-4, 1).settings
        configs[arm] = OmegaConf.to_object(
            compose_config("train", ["model=w", "run_dir=r", *settings])
        )
    base = configs["decoupled"]
    changed = {
        arm: {
            key
            for part, reference in ((config.algo, base.algo), (config.trainer, base.trainer))
            for key, value in vars(part).items()
            if value != getattr(reference, key)
        }
        for arm, config in configs.items()
    }
    assert changed == {
        "decoupled": set(),
        "behavior": {"decoupled"},
        "unweighted": {"correction"},
        "moment": {"loss"},
        "decay": {"loss", "lr_schedule"},
        "product": {"correction"},
        "settled": {"correction", "lr_schedule"},
        "decoupled_sgd": {"optimizer"},
        "behavior_sgd": {"decoupled", "optimizer"},
    }


def test_the_drift_of_every_cell_can_be_drawn(tmp_path: Path) -> None:
    cells = [cell for study in STUDIES.values() for cell in study(1)]
    records = [vars(cell) | {"behave_kl": 0.01, "accuracy": 0.5} for cell in cells]
    draw_drift(records, tmp_path / "drift.png")
    assert (tmp_path / "drift.png").stat().st_size > 1000


def test_the_probability_of_a_carry_is_the_policys(tmp_path: Path) -> None:
    """A policy that writes a due carry with probability p[version], and says so."""
    p = {0: 0.12, 1: 0.5, 3: 0.97}
    rng = random.Random(1)
    store = Store(tmp_path / "trajectories.sqlite")
    for number, version in enumerate(p):
        some = [_completion(rng, i, version, p[version]) for i in range(40)]
        group = Group(
            group_id=number,
            prompt_id=str(number),
            size=len(some),
            trajectories=[t for t, _ in some],
        )
        for sample, trajectory in enumerate(group.trajectories):
            trajectory.group_id, trajectory.sample_index = number, sample
        store.admit(number, str(number), number, number + 1, len(some), 0.0)
        store.finish(group, [(None, text) for _, text in some], None, 1.0)
    store.close()
    found = carry_logprobs(tmp_path / "trajectories.sqlite")
    assert found[2] is None and len(found) == 4
    for version, probability in p.items():
        assert found[version] == pytest.approx(math.log(probability), abs=1e-4)


def _completion(rng: random.Random, index: int, version: int, p: float) -> tuple[Trajectory, str]:
    """Return a teacher's solution as a trajectory whose carries have their probabilities."""
    problem = addition.make_problem("train", index, max_digits=6)
    text = addition.demonstration(problem, rng, forget_carry=1 - p)
    logprobs = [0.0] * (len(text) + 3)
    lines, start, due = text.split("\n"), 3, False
    for line in lines[:-1]:
        taken = line[line.index("=") - 1]
        if due:
            logprobs[start + line.index("=") - 1] = math.log(p if taken == "1" else 1 - p)
        due = line[line.index("=") + 1] == "1"
        start += len(line) + 1
    versions = np.repeat([-1, version], [3, len(text)]).astype(np.int32)
    trajectory = Trajectory(
        group_id=0,
        prompt_id="",
        sample_index=0,
        tokens=np.ones(len(versions), np.int32),
        loss_mask=versions >= 0,
        behavior_logprobs=np.array(logprobs, np.float32),
        versions=versions,
        finish_reason="stop",
        reward=0.0,
    )
    return trajectory, text


@pytest.mark.parametrize(
    "fault, message",
    [
        (None, ""),
        ("stuck", "stuck batch: steps 1 and 2"),
        ("tokens", "rogue normalizer: step 2"),
        ("short", "step 2 used 1 groups"),
    ],
)
def test_a_run_is_checked_by_its_store(tmp_path: Path, fault: str | None, message: str) -> None:
    store = Store(tmp_path / "trajectories.sqlite")
    metrics = [
        {"step": step, "trained_tokens": 0.0, "tokens": 0.0, "reward_mean": 0.0} for step in (1, 2)
    ]
    for number in range(3 if fault == "short" else 4):
        step = number // 2
        trajectory, text = _completion(random.Random(1), number, step, 0.5)
        trajectory.group_id = number
        index = number % 2 if fault == "stuck" else number
        prompt = str(index)
        group = Group(group_id=number, prompt_id=prompt, size=1, trajectories=[trajectory])
        store.admit(number, prompt, index, number + 1, 1, 0.0)
        store.finish(group, [(None, text)], None, 1.0)
        store.use([number], step)
        metrics[step]["trained_tokens"] += len(text)
        metrics[step]["tokens"] += len(text)
    store.close()
    if fault == "tokens":
        metrics[1]["trained_tokens"] += 1
    if fault is None:
        check_run(tmp_path / "trajectories.sqlite", metrics, 2)
        return
    with pytest.raises(ValueError, match=message):
        check_run(tmp_path / "trajectories.sqlite", metrics, 2)


def test_runs_are_checked_against_each_other() -> None:
    run = {"clip_fraction": 0.1, "name": "x", "steps": 110, "minibatches": 4}
    check_study([{**run, "seed": seed, "prompts": seed} for seed in (1, 1, 2)])
    with pytest.raises(ValueError, match="runs of seed 1 saw different"):
        check_study([{**run, "seed": 1, "prompts": prompts} for prompts in (1, 2)])
    with pytest.raises(ValueError, match="two seeds saw the same"):
        check_study([{**run, "seed": seed, "prompts": 1} for seed in (1, 2)])
    with pytest.raises(ValueError, match="idle clip: x"):
        check_study([{**run, "seed": 1, "prompts": 1, "clip_fraction": 0.0}])


@given(st.lists(st.tuples(accuracies, accuracies), min_size=2, max_size=12))
def test_a_difference_is_that_of_a_paired_t_test(pairs: list[tuple[float, float]]) -> None:
    a, b = zip(*pairs)
    found = paired.difference(a, b)
    spread = np.std(np.subtract(a, b), ddof=1)
    if spread < 1e-9:
        assert found.low == pytest.approx(found.high) and found.mean == pytest.approx(a[0] - b[0])
        return
    reference = stats.ttest_rel(a, b).confidence_interval(0.95)
    assert found[1:3] == pytest.approx((reference.low, reference.high))


@given(rewards, st.floats(0, 1))
def test_steps_to_a_threshold_by_brute_force(values: list[float], threshold: float) -> None:
    means = [sum(values[i - 10 : i]) / 10 for i in range(10, len(values) + 1)]
    first = next((i for i, mean in enumerate(means, 10) if mean >= threshold - 1e-9), None)
    if all(abs(mean - threshold) > 1e-9 for mean in means):
        assert paired.steps_to(values, threshold) == first
    assert paired.best_mean(values) == pytest.approx(max(means))
    assert paired.last_mean(values) == pytest.approx(means[-1])


def test_one_pair_has_no_interval() -> None:
    with pytest.raises(ValueError, match="two pairs"):
        paired.difference([1.0], [0.5])


def record(
    arm: str, seed: int, lag: int, accuracy: float, rewards: list[float], lr: float = 1e-4
) -> dict:
    cell = asdict(Cell(arm, lag, lr, seed, steps=len(rewards)))
    return {**cell, "accuracy": accuracy, "rewards": rewards, "clip_fraction": 0.01, "behave_kl": 0}


def test_tables_compare_runs_of_a_seed() -> None:
    """Decoupled reaches 0.6 at steps 15 and 20, behavior at 30 and 40: in half the steps."""
    curves = [[0.5] * n + [1.0] * (60 - n) for n in (13, 18, 28, 38)]
    records = [
        record("decoupled", 1, 8, 0.9, curves[0]),
        record("decoupled", 2, 8, 0.8, curves[1]),
        record("behavior", 2, 8, 0.7, curves[3]),
        record("behavior", 1, 8, 0.6, curves[2]),
        record("behavior", 1, 0, 0.1, curves[0]),
    ]
    _, _, first, _, second = page("speed", records).split("\n\n")
    reached, pairs = first.splitlines(), second.splitlines()
    assert len(reached) == 2 + 3 and len(pairs) == 2 + 1
    assert "| decoupled | 2 | 0.850 (0.800–0.900) |" in reached[4] and "| 15, 20 |" in reached[4]
    assert "| behavior | 2 | 0.650 (0.600–0.700) |" in reached[3] and "| 30, 40 |" in reached[3]
    assert "+0.200 (-1.071 to +1.471)" in pairs[2]  # t(0.975, 1) is 12.706
    assert "| 0.50 (0.50 to 0.50) |" in pairs[2]


def test_accuracy_is_compared_with_that_of_fresh_data() -> None:
    """The shares are 0.5 and 1: their mean is 0.75, and t(0.975, 1) is 12.706."""
    curve = [0.5] * 20
    fresh = [record("decoupled", seed, 0, 0.8, curve) for seed in (1, 2)]
    other_rate = [record("decoupled", 1, 0, 0.1, curve, 3e-5)]
    stale = [record("moment", seed, 16, e, curve) for seed, e in ((1, 0.4), (2, 0.8), (3, 0.9))]
    shares = page("cures", [*fresh, *other_rate, *stale]).split("\n\n")[-1].splitlines()
    assert len(shares) == 2 + 1
    assert "| moment | 0.0001 | 2 | 0.750 (-2.427 to 3.927) | 0.500 |" in shares[2]


def test_arms_are_compared_at_their_own_best_learning_rates() -> None:
    """Rates are chosen in seed 1, which has them all: 3e-4 for decoupled, 1e-4 for the other."""
    ends = {("decoupled", 1e-4): 0.5, ("decoupled", 3e-4): 0.9}
    ends |= {("behavior", 1e-4): 0.7, ("behavior", 3e-4): 0.6}
    records = [record(arm, 1, 8, e, [e] * 20, lr) for (arm, lr), e in ends.items()]
    # Alone at its rate in seed 2: it does not count for the choice.
    records += [record("behavior", 2, 8, 0.1, [0.1] * 20, 1e-4)]
    records += [record("decoupled", 2, 8, 0.3, [0.3] * 20, 3e-4)]
    assert best_rate([r for r in records if r["arm"] == "behavior"]) == 1e-4
    assert best_rate([r for r in records if r["lr"] == 1e-4]) is None
    best = page("grid", records).split("\n\n")[-1].splitlines()
    assert len(best) == 2 + 1
    assert "| 0.0003, 0.0001 |" in best[2] and "| behavior | 2 | +0.200 (" in best[2]


def test_alignment_and_direction_of_gradients() -> None:
    from benchmarks.staleness.gradients import measured

    noise = torch.Generator().manual_seed(1)
    fresh = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(64, 1)
    own = torch.tensor([[0.5, 0.75**0.5, 0.0, 0.0]]).repeat(64, 1)
    assert measured(own, fresh, "other") == {"alignment": [0.5, 0.0], "direction": [0.5, 0.0]}
    # Noise of the size of the gradient lowers the alignment by the root of two, and no direction.
    side = torch.randn(64, 1, generator=noise).sign()
    noisy = own + side * torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    found = measured(noisy, fresh, "other")
    assert found["alignment"][0] == pytest.approx(0.5 / 2**0.5, abs=0.002)
    assert found["direction"][0] == pytest.approx(0.5, abs=0.02)
    noisy = fresh + side * torch.tensor([[0.0, 0.0, 1.0, 0.0]])
    found = measured(noisy, noisy, "fresh")
    assert found["alignment"][0] == pytest.approx(0.5**0.5, abs=0.02)
    assert found["direction"][0] == pytest.approx(1.0)


@pytest.mark.parametrize("level", ["token", "geometric", "product"])
def test_the_gradient_of_a_batch_is_that_of_the_loss(level: str) -> None:
    from benchmarks.staleness.gradients import Batch, padded, surrogate

    rows = [([5, 6, 7, 1], 2, 1.0, 0), ([5, 7], 1, 0.0, 0), ([6, 6, 1], 2, 0.0, 1)]
    rows += [([6, 6, 7, 7, 1], 2, 1.0, 1)]
    batch = padded(rows)
    assert isinstance(batch, Batch) and batch.mask.sum(1).tolist() == [2, 1, 1, 3]
    assert batch.attention.sum(1).tolist() == [4, 2, 3, 5]
    noise = torch.Generator().manual_seed(2)
    logps = torch.randn(batch.mask.shape, generator=noise).requires_grad_()
    behavior = logps.detach() + 0.4 * torch.randn(batch.mask.shape, generator=noise)
    correction = Correction("cap", 1.3, level=level)
    (got,) = torch.autograd.grad(surrogate(batch, logps, behavior, correction), logps)
    ids = torch.arange(len(rows))[:, None].expand_as(batch.mask)[batch.mask]
    flat = LossInputs(
        logprobs=logps[batch.mask],
        prox=logps[batch.mask].detach(),
        behavior=behavior[batch.mask],
        advantages=grpo(batch.rewards, batch.groups)[ids],
        mask=torch.ones_like(ids, dtype=torch.bool),
        sequence_ids=ids,
    )
    loss = ppo_loss(flat, denominator=len(ids), eps_low=0.2, eps_high=0.2, correction=correction)
    (expected,) = torch.autograd.grad(loss.loss, logps)
    torch.testing.assert_close(got, -expected)
