"""Made-up run directories: `hand_made` for exact numbers, `simulate` to look at.

`python -m tests.unit.tools.report.synthetic_run DIR` makes the directory DIR with a simulated run
and its report.
"""

import heapq
import random
from pathlib import Path

import numpy as np

from areal_lite.config import LoggerConfig, TrainConfig, save_config
from areal_lite.run_dir.metrics import STEP_KEYS, MetricsLog, append_event
from areal_lite.run_dir.store import Store
from areal_lite.system.files import write_json
from areal_lite.trajectory import Group, Trajectory

T0 = 1_700_000_000.0
PROMPT = 10  # tokens of every prompt
# Rollout groups of `hand_made` by state.
GROUPS = {"in_flight": 0, "finished": 1, "used": 2, "filtered": 0, "dropped": 0}


def step_record(step, **values):
    return {**dict.fromkeys(STEP_KEYS, 0.0), "step": step, "version": step + 1, **values}


def trajectory(group_id, sample_index, segments, started_at, finished_at, reward=1.0):
    """Make a trajectory; `segments` are (version, tokens)."""
    versions = np.repeat([version for version, _ in segments], [tokens for _, tokens in segments])
    return Trajectory(
        group_id=group_id,
        prompt_id=f"prompt-{group_id}",
        sample_index=sample_index,
        tokens=np.zeros(PROMPT + len(versions), np.int32),
        loss_mask=np.repeat([False, True], [PROMPT, len(versions)]),
        behavior_logprobs=np.repeat(np.array([0, -1], np.float32), [PROMPT, len(versions)]),
        versions=np.concatenate([np.full(PROMPT, -1), versions]).astype(np.int32),
        finish_reason="stop",
        reward=reward,
        started_at=started_at,
        finished_at=finished_at,
    ).check()


def write_group(store, group, step=None):
    """Admit and finish a group, and use it at `step` unless that is None."""
    last = max(t.finished_at for t in group.trajectories)
    store.admit(
        group.group_id,
        group.prompt_id,
        group.group_id,
        group.group_id + 1,
        group.size,
        group.trajectories[0].started_at,
    )
    store.finish(group, [("1+1=", "2")] * len(group.trajectories), None, last)
    if step is not None:
        store.use([group.group_id], step)


def config_of(run_dir, steps, max_staleness):
    config = TrainConfig(model="model", run_dir=str(run_dir))
    config.trainer.steps, config.buffer.max_staleness = steps, max_staleness
    return config


def hand_made(run_dir, killed=False):
    """Make a run of two steps of one group of two, and a third group that was never used.

    `killed`: the run died while it wrote the line of the second step.
    """
    config = config_of(run_dir, steps=2, max_staleness=2)
    save_config(config, run_dir)
    groups = [
        [
            trajectory(0, 0, [(0, 30)], T0 + 1, T0 + 3),
            trajectory(0, 1, [(0, 20), (1, 40)], T0 + 1, T0 + 8),
        ],
        [
            trajectory(1, 0, [(1, 50)], T0 + 6, T0 + 9),
            trajectory(1, 1, [(0, 10), (1, 10)], T0 + 2, T0 + 9),
        ],
        [trajectory(2, 0, [(1, 500), (2, 500)], T0 + 6, T0 + 20)],
    ]
    store = Store(run_dir / "trajectories.sqlite")
    for step, members in enumerate(groups):
        group = Group(
            group_id=members[0].group_id,
            prompt_id=members[0].prompt_id,
            size=2,
            trajectories=members,
        )
        write_group(store, group, step if step < (1 if killed else 2) else None)
    store.close()
    log = MetricsLog(run_dir, LoggerConfig(), {})
    append_event(run_dir, "evals", {"version": 0, "greedy": 0.30, "sampled": 0.20, "problems": 50})
    push = {"logged_at": T0 + 6, "time_s": 6.0, "paused_at": T0 + 5, "pause_s": 0.1}
    log.log(step_record(0, reward_mean=0.5, staleness_mean=0.5, staleness_max=1, tokens=90, **push))
    if killed:
        log.close()
        with open(run_dir / "metrics.jsonl", "a") as file:
            file.write('{"step": 1, "version": 2, "rew')
        return config
    push = {"logged_at": T0 + 11, "time_s": 11.0, "paused_at": T0 + 10, "pause_s": 0.3}
    log.log(
        step_record(1, reward_mean=0.75, staleness_mean=1.0, staleness_max=2, tokens=70, **push)
    )
    log.close()
    append_event(run_dir, "evals", {"version": 2, "greedy": 0.60, "sampled": 0.70, "problems": 50})
    write_json(
        run_dir / "controller_totals.json",
        {"groups": GROUPS, "drained": 0, "trajectories_lost": 0},
    )
    return config


def simulate(
    run_dir,
    steps=60,
    batch_groups=4,
    group_size=8,
    slots=64,
    max_staleness=4,
    step_s=4.0,
    pause_s=0.12,
    tokens_per_s=40.0,
):
    """Make a run with a push every `step_s` seconds and long-tailed lengths.

    `slots` requests run at once. Pushes interrupt in place. The oldest groups are used first.
    """
    rng = random.Random(1)
    config = config_of(run_dir, steps, max_staleness)
    save_config(config, run_dir)
    # pushes[k] is the push of version k + 1.
    pushes = [T0 + 20 + step_s * (k + rng.uniform(-0.15, 0.15)) for k in range(steps)]
    pauses = [pause_s * rng.uniform(0.7, 1.6) for _ in range(steps)]
    free = [T0 + rng.uniform(0, 0.05) for _ in range(slots)]
    heapq.heapify(free)
    store, groups = Store(run_dir / "trajectories.sqlite"), []
    store.begin()
    for group_id in range(batch_groups * steps + 12):
        due = group_id // batch_groups - max_staleness - 1
        born = T0 if due < 0 else pushes[due] + pauses[due]
        reward_rate = 0.35 + 0.45 * min(1.0, group_id / (batch_groups * steps))
        members = []
        for sample_index in range(group_size):
            start = max(heapq.heappop(free), born) + rng.uniform(0, 0.02)
            segments, end = _generate(
                start,
                int(min(2000, max(20, rng.lognormvariate(5.0, 0.9)))),
                tokens_per_s,
                pushes,
                pauses,
            )
            heapq.heappush(free, end)
            members.append(
                trajectory(
                    group_id, sample_index, segments, start, end, float(rng.random() < reward_rate)
                )
            )
        groups.append(
            Group(
                group_id=group_id,
                prompt_id=members[0].prompt_id,
                size=group_size,
                trajectories=members,
            )
        )
        write_group(
            store, groups[-1], group_id // batch_groups if group_id < batch_groups * steps else None
        )
    store.commit()
    store.close()
    _log_steps(run_dir, groups, batch_groups, pushes, pauses, rng)
    for version, greedy, sampled in (
        (0, 0.41, 0.36),
        (steps // 3, 0.55, 0.51),
        (2 * steps // 3, 0.7, 0.64),
        (steps, 0.83, 0.79),
    ):
        append_event(
            run_dir,
            "evals",
            {"version": version, "greedy": greedy, "sampled": sampled, "problems": 200},
        )
    return config


def _generate(now, tokens, tokens_per_s, pushes, pauses):
    """Return [(version, tokens)] and the end of a sequence of `tokens` tokens started at `now`."""
    segments = []
    version = sum(push <= now for push in pushes)
    while tokens:
        limit = pushes[version] if version < len(pushes) else float("inf")
        count = min(tokens, max(0.0, (limit - now) * tokens_per_s) // 1)
        if count:
            segments.append((version, int(count)))
        tokens -= int(count)
        now += count / tokens_per_s
        if tokens:
            now, version = pushes[version] + pauses[version], version + 1
    return segments, now


def _log_steps(run_dir, groups, batch_groups, pushes, pauses, rng):
    log = MetricsLog(run_dir, LoggerConfig(), {})
    for step, (push, pause) in enumerate(zip(pushes, pauses, strict=True)):
        batch = [
            t
            for group in groups[step * batch_groups : (step + 1) * batch_groups]
            for t in group.trajectories
        ]
        staleness = np.maximum(step - np.concatenate([t.versions[t.loss_mask] for t in batch]), 0)
        log.log(
            step_record(
                step,
                logged_at=push + pause + rng.uniform(0, 0.1),
                time_s=push - T0,
                reward_mean=np.mean([t.reward for t in batch]),
                staleness_mean=staleness.mean(),
                staleness_max=staleness.max(),
                tokens=len(staleness),
                paused_at=push,
                pause_s=pause,
            )
        )
    log.close()


if __name__ == "__main__":
    import sys

    from areal_lite.tools.report.figure import write_report

    directory = Path(sys.argv[1])
    directory.mkdir(parents=True)
    simulate(directory)
    print(write_report(directory))
