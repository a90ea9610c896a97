"""Findings about learning: signal, objective, numbers and optional features.

Each is a pure function of a history.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any

import numpy as np

from areal_lite.config import source_configs
from areal_lite.config.data import shares
from areal_lite.config.rules import CLIPPED_LOSSES, clip_is_idle, tolerated_staleness
from areal_lite.tools.diagnose.history import History, Sign, alarm, hint, limit
from areal_lite.tools.formatting import short

# Below this many nats a difference grows by rounding alone.
_ROUNDING = 1e-3
_AGENT = "areal_lite.rollout.workflows.agent:Agent"
_MAX_TRACES = 16  # its default


def bad_numbers(run: History) -> Sign | None:
    """Find skipped updates, values that are not finite, and tokens without a log-prob."""
    skipped = [m["step"] for m in run.metrics if m.get("skipped") or m.get("critic_skipped")]
    lost = [
        m["step"] for m in run.metrics if {m.get(k, 0.0) for k in ("loss", "grad_norm")} & {None}
    ]
    tokens = int(np.nansum(run.values("nonfinite_tokens")))
    if not (skipped or lost or tokens):
        return None
    steps = sorted({*skipped, *lost})
    return alarm(
        f"{len(steps)} of {len(run.metrics)} steps with a loss or gradient that is not finite"
        f"{f' (first: step {steps[0]})' if steps else ''}, "
        f"{tokens:,} tokens whose log-prob is not finite"
    )


def logprob_mismatch(run: History) -> Sign | None:
    """Find servers and a trainer that disagree about the same tokens under the same weights."""
    recent, first = run.recent("logprob_diff"), run.first("logprob_diff")
    if not len(recent):
        return None
    now, before = float(np.median(recent)), float(np.median(first)) if len(first) else math.nan
    grew = now > max(_ROUNDING, limit("logprob_growth") * before)
    if now <= limit("logprob_diff") and not grew:
        return None
    return alarm(f"logprob_diff is {now:.2g} nats (median of recent steps), first {before:.2g}")


def low_ess(run: History) -> Sign | None:
    """Find behavior weights that are far from 1: few tokens then decide the update."""
    ess, largest, out = run.recent("ess"), run.recent("weight_max"), run.recent("rejected")
    if not len(ess) or run.config.algo.loss == "tb":
        return None
    correction = run.config.algo.correction
    capped = float(np.mean(largest >= correction.cap)) if len(largest) else 0.0
    rejected = float(out.mean()) if len(out) else 0.0
    moved = run.recent("behave_kl")
    drift = float(moved.mean()) if len(moved) else 0.0
    text = (
        f"ess {ess.mean():.2f}; behave_kl {drift:.3f}; a weight at the cap of {correction.cap:g} "
        f"in {capped:.0%} of the recent steps; {rejected:.1%} of the tokens rejected"
    )
    if ess.mean() < limit("ess"):
        return alarm(text)
    at_cap = correction.mode == "cap" and capped > limit("capped_steps")
    far = drift > limit("behave_kl")
    return hint(text) if far or at_cap or rejected > limit("rejected") else None


def too_stale(run: History) -> Sign | None:
    """Find tokens that are older than the objective is known to tolerate."""
    oldest, tolerance = run.recent("staleness_max"), tolerated_staleness(run.config.algo)
    if tolerance is None or not len(oldest) or oldest.max() <= tolerance.steps:
        return None
    return hint(
        f"tokens up to {oldest.max():.0f} steps old; {tolerance.objective} is known to tolerate "
        f"{tolerance.steps} ({tolerance.shown})"
    )


def entropy_collapse(run: History) -> Sign | None:
    """Find a policy that lost its entropy before the task is solved."""
    first, recent, reward = run.first("entropy"), run.recent("entropy"), run.recent("reward_mean")
    if not (len(first) and len(recent) and len(reward)):
        return None
    best = float(np.nanmax(run.columns.reward, initial=1.0))
    if reward.mean() >= limit("solved_reward") * best:
        return None
    if recent.mean() > limit("entropy_ratio") * first.mean():
        return None
    return alarm(
        f"entropy {first.mean():.3g} -> {recent.mean():.3g} nats a token; "
        f"reward {reward.mean():.2f}"
    )


def reward_collapse(run: History) -> Sign | None:
    """Find a reward that fell far below what it was."""
    window, rewards = int(limit("recent_steps")), run.values("reward_mean")
    if len(rewards) < 2 * window or not np.isfinite(rewards).all() or rewards.min() < 0:
        return None
    means = np.convolve(rewards, np.full(window, 1 / window), "valid")
    best = int(means.argmax())
    if means[-1] >= limit("reward_ratio") * means[best]:
        return None
    return alarm(
        f"mean reward of {window} steps {means[best]:.2f} (until step {best + window}) -> "
        f"{means[-1]:.2f} (until step {len(rewards)})"
    )


def falling_accuracy(run: History) -> Sign | None:
    """Find a held-out accuracy that falls while the reward does not."""
    rewards, least = run.values("reward_mean"), int(limit("least_steps"))
    sets: dict[str, list[tuple[dict[str, Any], float]]] = defaultdict(list)
    for line in run.evals:
        if (accuracy := _accuracy(line)) is not None:
            sets[line["name"]].append((line, accuracy))
    for name, lines in sets.items():
        (_, last), (best, top) = lines[-1], max(lines, key=lambda pair: pair[1])
        error = math.sqrt((last * (1 - last) + top * (1 - top)) / best["problems"])
        steps = int(np.sum(run.values("step") <= best["version"]))
        # No reward exists before training, so the first ones of training are used.
        earlier = rewards[max(steps - least, 0) : max(steps, least)]
        later = rewards[max(steps, len(rewards) - least) :]
        if top - last <= limit("accuracy_drop") + 2 * error or not len(later):
            continue
        if later.mean() >= earlier.mean():
            return alarm(
                f"{name}: accuracy {top:.1%} (version {best['version']}) -> {last:.1%}, reward "
                f"{earlier.mean():.2f} -> {later.mean():.2f}"
            )
    return None


def mixed_evaluations(run: History) -> Sign | None:
    """Find evaluations in which the weights changed for too long to compare them."""
    every, share = run.config.eval.every, limit("mixed_share")
    mixed = [line for line in run.evals if every and np.ptp(line["versions"]) > share * every]
    if not mixed:
        return None
    first = mixed[0]["versions"]
    return hint(
        f"{len(mixed)} of {len(run.evals)} evaluations, {every} steps apart; the one of version "
        f"{mixed[0]['version']} was answered by versions {first[0]} to {first[-1]}"
    )


def _accuracy(line: dict[str, Any]) -> float | None:
    """Return the accuracy at the temperature of training, or the greedy one."""
    return line["greedy"] if line.get("sampled") is None else line["sampled"]


def too_easy(run: History) -> Sign | None:
    """Find groups whose trajectories all succeed: they have no advantage to learn from."""
    return _no_signal(run, easy=True)


def too_hard(run: History) -> Sign | None:
    """Find groups whose trajectories all fail: they have no advantage to learn from."""
    return _no_signal(run, easy=False)


def _no_signal(run: History, easy: bool) -> Sign | None:
    """Report uniform groups if most of them are easy (or hard), as `easy` says."""
    advantage = run.config.algo.advantage
    compares_groups = advantage.estimator == "rloo" or (
        advantage.estimator == "grpo" and advantage.mean == "group"
    )
    uniform = run.recent("uniform_groups_share")
    if not len(uniform) or not compares_groups or uniform.mean() <= limit("uniform_share"):
        return None
    up, down = _uniform_groups(run)
    if (up >= down) != easy:
        return None
    text = (
        f"{uniform.mean():.0%} of the recent groups have equal rewards: {up} at the top, {down} at "
        f"the bottom; mean reward {run.recent('reward_mean').mean():.2f}"
    )
    return alarm(text) if uniform.mean() >= limit("uniform_alarm") else hint(text)


def _uniform_groups(run: History) -> tuple[int, int]:
    """Count the recent groups with equal rewards, in the upper and the lower half of all rewards.

    Without trajectories, by the mean reward of each step: a group of the larger half.
    """
    columns, known = run.columns, np.isfinite(run.columns.reward)
    first = run.metrics[-int(limit("recent_steps")) :][0]["step"] - 1
    middle = (np.nanmin(columns.reward) + np.nanmax(columns.reward)) / 2 if known.any() else 0.5
    rewards: dict[int, set[float]] = defaultdict(set)
    chosen = known & (columns.step >= first)
    for group, reward in zip(columns.group[chosen].tolist(), columns.reward[chosen].tolist()):
        rewards[group].add(reward)
    if not rewards:
        means = run.recent("reward_mean")
        return int((means > middle).sum()), int((means <= middle).sum())
    # If all rewards of the run are equal, a positive one counts as a success.
    middle = 0.0 if np.nanmin(columns.reward) == np.nanmax(columns.reward) else middle
    uniform = [min(found) for found in rewards.values() if len(found) == 1]
    return sum(r > middle for r in uniform), sum(r <= middle for r in uniform)


def idle_clip(run: History) -> Sign | None:
    """Find a clip that never removed a gradient."""
    clipped, ratio = run.values("clip_fraction"), run.values("ratio_max")
    clipped = clipped[np.isfinite(clipped)]
    if run.config.algo.loss not in CLIPPED_LOSSES or len(clipped) < limit("recent_steps"):
        return None
    if clipped.any():
        return None
    largest = f"{np.nanmax(ratio):.3g}" if np.isfinite(ratio).any() else "unknown"
    always = "; with these settings it is always 1" if clip_is_idle(run.config) else ""
    return hint(
        f"clip_fraction was 0 in all {len(clipped)} steps; largest ratio {largest}; "
        f"algo.prox={run.config.algo.prox}, trainer.minibatches={run.config.trainer.minibatches}"
        f"{always}"
    )


def truncated(run: History) -> Sign | None:
    """Find trajectories that end at the limit of new tokens."""
    share = run.recent("truncated_share")
    if not len(share) or share.mean() <= limit("truncated_share"):
        return None
    longest = run.config.rollout.max_new_tokens
    text = f"{share.mean():.0%} of the recent trajectories reached rollout.max_new_tokens={longest}"
    return alarm(text) if share.mean() > limit("truncated_alarm") else hint(text)


def gradient_spikes(run: History) -> Sign | None:
    """Find gradients that are far larger than usual and were clipped."""
    norms = run.values("grad_norm")
    known = norms[np.isfinite(norms)]
    if len(known) < limit("recent_steps"):
        return None
    usual = float(np.median(known))
    high = np.flatnonzero(norms > max(run.config.trainer.clip_grad, limit("grad_spike") * usual))
    if not len(high):
        return None
    top = int(high[np.argmax(norms[high])])
    steps = "1 step" if len(high) == 1 else f"{len(high)} steps"
    return hint(
        f"{steps} above {limit('grad_spike'):g} times the median of {short(usual)}; "
        f"{short(float(norms[top]))} at step {run.metrics[top]['step']}"
    )


def duplicates(run: History) -> Sign | None:
    """Find prompts whose completions are nearly all the same."""
    shares, size = run.recent("distinct_share"), run.config.rollout.group_size
    if not len(shares) or size < 2:
        return None
    distinct = (shares.mean() * size - 1) / (size - 1)
    if distinct >= limit("distinct_share"):
        return None
    return hint(
        f"{shares.mean():.0%} of the completions of a prompt differ, {1 / size:.0%} is none"
    )


def faint_adapters(run: History) -> Sign | None:
    """Find adapters that are still tiny, in a run that does not learn."""
    shares_of_weights = run.recent("adapter_share")
    first, recent = run.first("reward_mean"), run.recent("reward_mean")
    if not (len(shares_of_weights) and len(first) and len(recent)):
        return None
    if shares_of_weights[-1] >= limit("adapter_share"):
        return None
    if recent.mean() > first.mean() + limit("reward_rise"):
        return None
    return hint(
        f"after {run.step} steps the adapters have {shares_of_weights[-1]:.2g} of the size of the "
        f"weights; reward {first.mean():.2f} -> {recent.mean():.2f}; "
        f"trainer.lr={run.config.trainer.lr:g}, trainer.lora.rank={run.config.trainer.lora.rank}"
    )


def lost_routes(run: History) -> Sign | None:
    """Find a run that should replay routes, and whose tokens have none."""
    recent = run.metrics[-int(limit("recent_steps")) :]
    if not run.config.algo.routing_replay or len(recent) < limit("least_steps"):
        return None
    if any(step.get("routes_changed") is not None for step in recent):
        return None
    return alarm(f"no token of the recent {len(recent)} steps has a recorded route")


def changed_routes(run: History) -> Sign | None:
    """Find routers that have moved far from the routes that they replay."""
    changed, first = run.recent("routes_changed"), run.first("routes_changed")
    if not len(changed) or changed.mean() <= limit("routes_changed"):
        return None
    before = f", first {first.mean():.0%}" if len(first) else ""
    return hint(f"{changed.mean():.0%} of the recorded routes{before}")


def distant_teacher(run: History) -> Sign | None:
    """Find a student that learns from a teacher alone and does not come closer to it."""
    first, recent = run.first("reference_kl"), run.recent("reference_kl")
    if run.config.algo.advantage.estimator != "off" or not (len(first) and len(recent)):
        return None
    if first.mean() < limit("teacher_kl") or recent.mean() < limit("teacher_ratio") * first.mean():
        return None
    return alarm(f"reference_kl {first.mean():.3g} -> {recent.mean():.3g} nats a token")


def split_episodes(run: History) -> Sign | None:
    """Find agents whose requests seldom continue a conversation."""
    traces, most = run.recent("traces_mean"), _most_traces(run)
    if not len(traces) or most is None or traces.mean() <= limit("traces_share") * most:
        return None
    return hint(f"{traces.mean():.1f} traces in an episode, of at most {most}")


def _most_traces(run: History) -> int | None:
    """Return the most traces of an episode of any agent; None without agents."""
    found = [
        int(own.rollout.workflow_args.get("max_traces", _MAX_TRACES))
        for own in source_configs(run.config).values()
        if own.rollout.workflow == _AGENT
    ]
    return max(found, default=None)


def rare_source(run: History) -> Sign | None:
    """Find data sources that give less to the batches than their weights say."""
    recent = run.metrics[-int(limit("recent_steps")) :]
    planned = shares(source_configs(run.config))
    if len(planned) < 2 or len(recent) < limit("recent_steps"):
        return None
    counts = {name: sum(step.get(f"groups/{name}", 0) for step in recent) for name in planned}
    total = sum(counts.values())
    rare = [
        f"{name}: {counts[name] / total:.0%} of the recent groups, {share:.0%} by its weight"
        for name, share in planned.items()
        if total and counts[name] < limit("source_share") * share * total
    ]
    return hint("; ".join(rare)) if rare else None


def silent_source(run: History) -> Sign | None:
    """Find data sources whose groups have equal rewards, unlike the groups of others."""
    silent = []
    for name in run.config.data.sources:
        uniform, reward = (
            run.recent(f"{key}/{name}") for key in ("uniform_groups_share", "reward_mean")
        )
        if len(uniform) and uniform.mean() >= limit("uniform_alarm"):
            silent.append(
                f"{name}: {uniform.mean():.0%} of its recent groups have equal rewards, "
                f"mean reward {np.mean(reward):.2f}"
            )
    return hint("; ".join(silent)) if silent else None


def blind_critic(run: History) -> Sign | None:
    """Find a critic that predicts the returns no better than their mean does."""
    explained = run.recent("value_explained")
    if not len(explained) or len(run.metrics) < 2 * limit("recent_steps"):
        return None
    if explained.mean() >= limit("value_explained"):
        return None
    return hint(
        f"value_explained {explained.mean():.2f} (0 knows the mean, 1 everything); "
        f"algo.critic.lr={run.config.algo.critic.lr:g}"
    )
