"""The table and the picture of the comparison, from its records."""

from pathlib import Path

import matplotlib.pyplot as plt

from benchmarks.against_trl.tasks import TASKS
from benchmarks.staleness.paired import steps_to

SKIPPED = 2
WINDOW = 3
SIDES = {"areal_lite": ("#0072b2", "areal_lite"), "trl": ("#d55e00", "TRL GRPOTrainer")}


def rate(record: dict, skipped: int = SKIPPED) -> float:
    """Return trajectories a second, without the first steps."""
    seconds = record["seconds"]
    common = TASKS[record["task"]].common
    trajectories = common["groups"] * common["group_size"] * (len(seconds) - skipped)
    return trajectories / (seconds[-1] - seconds[skipped - 1])


def seconds_to(record: dict, threshold: float) -> float | None:
    """Return the seconds until the mean reward of three steps is `threshold`, or None."""
    step = steps_to(record["rewards"], threshold, WINDOW)
    return None if step is None else record["seconds"][step - 1]


def row(record: dict) -> str:
    """Return one run in a line."""
    thresholds = TASKS[record["task"]].thresholds
    times = _both([seconds_to(record, t) for t in thresholds])
    return f"{rate(record):.1f} trajectories/s; seconds to a reward of {thresholds}: {times}"


_TOP = """# Speed and learning next to TRL

Command: `python -m benchmarks.against_trl`. Both sides train the same model on the same prompts,
with the same reward, clip range and optimizer, on two cores without a GPU. They run in turn. TRL
has the fastest of the settings below, and each side its best learning rate, which is constant.
TRL's clock starts with the model loaded, ours with the first request to a server that is ready.
The rewards are 0.9 and 0.95 for the toys, 0.5 and 0.7 for `chat`, as means of three steps.

The toys are warmed-up models of half a million weights, and an update takes 16 groups of 8. TRL
generates 64 groups and makes four updates with them. areal_lite makes a step and a push of each
update, and its data is at most three updates old. The answers of `short` have 43 to 45 tokens.
Those of `long_tail` have 15 to 171. There areal_lite trains on four times the trajectories, so that
both train for about as long.

`chat` is SmolLM2-135M-Instruct, which learns to add (examples/chat_model): 8 groups of 8, one
update a step, prompts of 45 tokens and answers of up to 16. areal_lite makes twice as many steps,
and its data is at most one step old. TRL ends answers at the token that ends a turn, which the
model's tokenizer does not name.

TRL's asynchronous trainer (`trl.experimental.async_grpo` of 1.16) does not run without a GPU: it
loads every model with an attention that is FlashAttention 3, and sends weights by NCCL.

![Mean reward over the seconds of training](against_trl.png)

"""


def table(found: dict) -> str:
    """Return a page with a row per task and seed, and the settings that were tried."""
    lines = [
        "| task | seed | commit | trajectories/s: areal_lite, TRL | ratio "
        "| seconds to the first reward | ratio | seconds to the second | ratio "
        "| seconds in all | accuracy at the end |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for task, seed in sorted({(r["task"], r["seed"]) for r in found["runs"]}):
        pair = {r["side"]: r for r in found["runs"] if (r["task"], r["seed"]) == (task, seed)}
        if len(pair) == len(SIDES):
            lines.append(_pair(task, seed, pair["areal_lite"], pair["trl"]))
    lines += ["", "| task | TRL's microbatch | continuous batching | threads | trajectories/s |"]
    lines.append("|---|---|---|---|---|")
    for task, tried in found["tried"].items():
        lines += [
            f"| {task} | {one['micro_batch']} | {'yes' if one['continuous_batching'] else 'no'} "
            f"| {one['threads']} | {one['trajectories_s']:.1f} |"
            for one in tried
        ]
    lines += [
        "",
        "| task | side | learning rate | seconds to the two rewards (seed 1) |",
        "|---|---|---|---|",
    ]
    for task, sides in found["rates"].items():
        lines += [
            f"| {task} | {SIDES[side][1]} | {one['lr']:g} "
            f"| {_both([one['seconds'][str(t)] for t in TASKS[task].thresholds])} |"
            for side, rates in sides.items()
            for one in rates
        ]
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items())
    return _TOP + "\n".join([*lines, "", f"Versions: {versions}."]) + "\n"


def _pair(task: str, seed: int, own: dict, other: dict) -> str:
    cells = [task, str(seed), own["commit"], f"{rate(own):.0f}, {rate(other):.0f}"]
    cells.append(f"{rate(own) / rate(other):.1f}")
    for threshold in TASKS[task].thresholds:
        a, b = seconds_to(own, threshold), seconds_to(other, threshold)
        cells.append(_both([a, b]))
        cells.append("–" if a is None or b is None else f"{b / a:.1f}")
    cells.append(f"{own['seconds'][-1]:.0f}, {other['seconds'][-1]:.0f}")
    cells.append(f"{own['accuracy']:.3f}, {other['accuracy']:.3f}")
    return f"| {' | '.join(cells)} |"


def _both(seconds: list[float | None]) -> str:
    return ", ".join("never" if x is None else f"{x:.0f}" for x in seconds)


def draw(found: dict, path: Path) -> None:
    """Draw the reward over the seconds of training, a panel per task."""
    tasks = list(dict.fromkeys(record["task"] for record in found["runs"]))
    figure, axes = plt.subplots(
        1, len(tasks), figsize=(4.2 * len(tasks), 3.0), layout="constrained", squeeze=False
    )
    for panel, task in zip(axes[0], tasks, strict=True):
        for record in (r for r in found["runs"] if r["task"] == task):
            color, label = SIDES[record["side"]]
            panel.plot(record["seconds"], record["rewards"], color=color, label=label)
        panel.set(title=task.replace("_", " "), xlabel="seconds of training", ylim=(0, 1.02))
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.3)
    axes[0][0].set_ylabel("mean reward of a step")
    named = dict(zip(*reversed(axes[0][0].get_legend_handles_labels()), strict=True))
    axes[0][0].legend(named.values(), named.keys(), frameon=False, loc="lower right")
    figure.savefig(path, dpi=130)
    plt.close(figure)
