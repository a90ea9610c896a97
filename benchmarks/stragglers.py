"""Measure what is trained on when answers have a long tail: mask and window.

    python benchmarks/stragglers.py    # a minute on one core

Admission and queue are those of the controller (controller/admission.py, controller/queue.py).
Generation and training are modelled, not run: every running trajectory gets a token in each unit of
time, a step takes `STEP_TIME` units, and a push takes none. Each prompt has a typical length, and
these are log-normal. Every arm has the same prompts and lengths. The first `WARM_UP` steps are not
counted.

Writes <out>/stragglers.json, one record per arm, and <out>/stragglers.png.
"""

import argparse
import heapq
import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from areal_lite.config import BufferConfig, TrainConfig, TrainerConfig
from areal_lite.controller.buffer import AdmissionGate, GroupQueue
from areal_lite.trajectory import Group, Trajectory

ROOT = Path(__file__).resolve().parents[1]
BATCH, GROUP_SIZE, CONCURRENT, STEP_TIME = 16, 4, 128, 60
MEDIAN, SPREAD, WITHIN, LONGEST = 48, 0.9, 0.2, 640
WARM_UP = 20
SAMPLED_PROMPTS = 5000
ARMS = {
    "mask": {"max_staleness": 4},
    "window 32": {"max_staleness": 4, "window": 2 * BATCH},
    "window 96": {"max_staleness": 8, "window": 6 * BATCH},
}
EDGES = np.array([1, 20, 40, 80, 160, 320, LONGEST + 1])


@dataclass
class Totals:
    """The sampled and trained lengths of a run, and its waits; arrays are by trajectory length.

    Args:
        sampled: tokens of the groups that left the queue.
        trained: those that entered the loss.
        trajectories: trajectories that were trained on.
        ages: tokens in the loss by staleness, in steps.
        time: units of time.
        waited, held: those without a batch, and those with a whole batch that was held back.
    """

    sampled: np.ndarray
    trained: np.ndarray
    trajectories: np.ndarray
    ages: np.ndarray
    time: float = 0.0
    waited: float = 0.0
    held: float = 0.0


class Run:
    """One simulated run: an event is the end of a group, and the trainer acts between events."""

    def __init__(self, arm: dict, steps: int, seed: int):
        config = TrainConfig(
            model="",
            buffer=BufferConfig(**arm),
            trainer=TrainerConfig(batch_groups=BATCH),
        )
        buffer = config.buffer
        self.queue = GroupQueue(buffer.max_staleness, buffer.window)
        self.gate = AdmissionGate(max_staleness=config.max_lead, batch_groups=BATCH)
        self.bound, self.steps, self.seed = buffer.max_staleness, steps, seed
        self.next_id = 0  # of a group, and the number of its prompt
        self.pushes = [0.0]  # the time of each version
        self.ends: list[tuple[float, int]] = []
        self.groups: dict[int, tuple[float, np.ndarray]] = {}
        self.totals = self.nothing()

    def nothing(self) -> Totals:
        bins = len(EDGES) - 1
        return Totals(*(np.zeros(n) for n in (bins, bins, bins, self.bound + 1)))

    def run(self) -> Totals:
        """Run the warm-up and `steps` steps."""
        now, asked = 0.0, 0.0
        while self.gate.step < WARM_UP + self.steps:
            self.submit(now)
            if self.train():
                self.totals.waited += now - asked
                self.totals.time += now - asked + STEP_TIME
                # The step ends; groups end meanwhile, and free slots for others.
                asked = now + STEP_TIME
                while self.ends and self.ends[0][0] <= asked:
                    now = self.end_group()
                    self.submit(now)
                now = asked
                self.pushes.append(now)
                self.gate.on_version(self.gate.step + 1)
                if self.gate.step == WARM_UP:
                    self.totals = self.nothing()
            else:
                held = self.queue.held_back(BATCH, self.oldest_running())
                before, now = now, self.end_group()
                self.totals.held += (now - before) * held
        return self.totals

    def oldest_running(self) -> int | None:
        return min(self.groups, default=None)

    def submit(self, now: float) -> None:
        """Start groups while admission and concurrency allow it."""
        while self.gate.can_admit() and (len(self.groups) + 1) * GROUP_SIZE <= CONCURRENT:
            lengths = prompt_lengths(self.seed, self.next_id)
            self.groups[self.next_id] = (now, lengths)
            heapq.heappush(self.ends, (now + float(lengths.max()), self.next_id))
            self.gate.on_admitted()
            self.next_id += 1

    def end_group(self) -> float:
        """Queue the group that ends next, with the versions that sampled it; return the time."""
        now, group_id = heapq.heappop(self.ends)
        start, lengths = self.groups.pop(group_id)
        trajectories = []
        for sample_index, length in enumerate(lengths.tolist()):
            times = start + np.arange(length)
            versions = np.searchsorted(self.pushes, times, side="right") - 1
            trajectories.append(answer(group_id, sample_index, versions))
        self.gate.on_accepted()
        self.queue.put(
            Group(
                group_id=group_id,
                prompt_id=str(group_id),
                size=GROUP_SIZE,
                trajectories=trajectories,
            )
        )
        return now

    def train(self) -> bool:
        """Take the batch of the next step, if there is one, and count what it trains on."""
        step = self.gate.step
        batch = self.queue.take(BATCH, step, 1, self.oldest_running())
        if batch is None:
            return False
        for group in batch.groups:
            self.count_sampled(group)
        (shard,) = batch.shards
        self.totals.trained += by_length(
            shard.lengths - 1, np.bincount(shard.sequence_ids, shard.loss_mask)
        )
        self.totals.trajectories += by_length(shard.lengths - 1, np.ones(shard.num_sequences))
        ages = step - shard.versions[shard.loss_mask]
        self.totals.ages += np.bincount(ages, minlength=self.bound + 1)
        return True

    def count_sampled(self, group: Group) -> None:
        lengths = np.array([t.num_sampled for t in group.trajectories])
        self.totals.sampled += by_length(lengths, lengths)


def prompt_lengths(seed: int, prompt: int) -> np.ndarray:
    """Return the lengths of the answers to a prompt, the same in each arm."""
    rng = np.random.default_rng([seed, prompt])
    logs = np.log(MEDIAN) + SPREAD * rng.normal() + WITHIN * rng.normal(size=GROUP_SIZE)
    return np.exp(logs).round().clip(4, LONGEST).astype(int)


def answer(group_id: int, sample_index: int, versions: np.ndarray) -> Trajectory:
    """Make a trajectory after a prompt of one token, from the versions of its tokens."""
    versions = np.append(-1, versions).astype(np.int32)
    return Trajectory(
        group_id=group_id,
        prompt_id="",
        sample_index=sample_index,
        tokens=np.zeros(len(versions), np.int32),
        loss_mask=versions >= 0,
        behavior_logprobs=np.zeros(len(versions), np.float32),
        versions=versions,
        finish_reason="stop",
        reward=0.0,
    )


def by_length(lengths: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Sum `weights` by bin of length: float64 [len(EDGES) - 1]."""
    return np.histogram(lengths, EDGES, weights=weights)[0]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    args = parser.parse_args()
    records = []
    for arm, settings in ARMS.items():
        runs = [Run(settings, args.steps, seed).run() for seed in args.seeds]
        records.append(record(arm, runs, args.seeds))
        print(json.dumps(records[-1]), flush=True)
    args.out.mkdir(parents=True, exist_ok=True)
    settings = {
        "batch_groups": BATCH,
        "group_size": GROUP_SIZE,
        "max_concurrent": CONCURRENT,
        "step_time": STEP_TIME,
        "median_length": MEDIAN,
        "longest": LONGEST,
        "steps": args.steps,
        "seeds": args.seeds,
        "length_bins": EDGES.tolist(),
    }
    (args.out / "stragglers.json").write_text(
        json.dumps({"settings": settings, "arms": records}, indent=1) + "\n"
    )
    plot(records, args.out / "stragglers.png")


def tokens_of_data(seeds: list[int]) -> np.ndarray:
    """Return the tokens of a batch by length, as the prompts have them: a mean over many."""
    lengths = [prompt_lengths(seed, prompt) for seed in seeds for prompt in range(SAMPLED_PROMPTS)]
    flat = np.concatenate(lengths)
    return by_length(flat, flat) * BATCH / len(lengths)


def record(arm: str, runs: list[Totals], seeds: list[int]) -> dict:
    """Describe an arm: sums over the runs of all seeds.

    `loss_tokens_by_length` are the tokens in the loss, as a share of those that the data have.
    """
    names = ("sampled", "trained", "trajectories", "ages", "time", "waited", "held")
    sampled, trained, trajectories, ages, time, waited, held = (
        sum(getattr(run, name) for run in runs) for name in names
    )
    steps = trajectories.sum() / (BATCH * GROUP_SIZE)
    return {
        "arm": arm,
        "settings": ARMS[arm],
        "trained_share": round(float(trained.sum() / sampled.sum()), 4),
        "trained_share_by_length": (trained / np.maximum(sampled, 1)).round(4).tolist(),
        "loss_tokens_by_length": (trained / steps / tokens_of_data(seeds)).round(4).tolist(),
        "largest_staleness": int(np.flatnonzero(ages)[-1]),
        "tokens_by_staleness": (ages / ages.sum()).round(4).tolist(),
        "time_per_step": round(time / steps, 2),
        "held_share": round(held / time, 4),
        "wait_share": round((waited - held) / time, 4),
        "trained_tokens_per_time": round(float(trained.sum() / time), 2),
    }


COLORS = dict(zip(ARMS, ("#d1662b", "#7a52cc", "#1f6fb4", "#2f855a")))


def plot(records: list[dict], path: Path) -> None:
    """Draw which tokens are trained on, the lengths of the batches, and the time of a step."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 4), layout="constrained")
    labels = [f"{low}–{high - 1}" for low, high in zip(EDGES, EDGES[1:])]
    places = np.arange(len(labels))
    parts = {"trains": 0.9, "waits for groups": 0.5, "waits for a straggler": 0.25}
    for number, r in enumerate(records):
        style = {"color": COLORS[r["arm"]], "label": r["arm"]}
        # Lines that lie on each other stay visible.
        line = {**style, "marker": "o", "markersize": 9 - 2 * number, "linewidth": 4 - number}
        left.plot(places, r["trained_share_by_length"], **line)
        middle.bar(places + 0.21 * (number - 1.5), r["loss_tokens_by_length"], 0.19, **style)
        shares = (1 - r["held_share"] - r["wait_share"], r["wait_share"], r["held_share"])
        bottom = 0.0
        for share, alpha in zip(shares, parts.values()):
            height = share * r["time_per_step"]
            right.bar(number, height, 0.6, bottom=bottom, color=style["color"], alpha=alpha)
            bottom += height
    left.set(ylim=(0, 1.05), title="share of the sampled tokens that is trained on")
    middle.set(title="tokens in the loss, 1: as many as the data have")
    for axes in (left, middle):
        axes.set(xticks=places, xticklabels=labels, xlabel="length of the trajectory, tokens")
    left.legend(frameon=False, loc="lower left")
    right.set(
        xticks=range(len(records)),
        xticklabels=[f"{r['arm']}\nbound {r['settings']['max_staleness']}" for r in records],
        title="time of a step, in token times",
        ylim=(0, 140),
    )
    keys = [plt.Rectangle((0, 0), 1, 1, color="#4a5568", alpha=alpha) for alpha in parts.values()]
    right.legend(keys, parts, frameon=False, loc="upper right", ncols=2)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main()
