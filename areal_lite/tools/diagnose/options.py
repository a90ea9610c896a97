"""Findings about what only some runs have: adapters, replayed routes, teachers, traces, sources.

Each is a pure function of a history.
"""

from __future__ import annotations

import numpy as np

from areal_lite.config import source_configs
from areal_lite.config.sources import shares
from areal_lite.tools.diagnose.history import History
from areal_lite.tools.diagnose.limits import limit
from areal_lite.tools.diagnose.sign import Sign, alarm, hint

_AGENT = "areal_lite.rollout.workflows.agent:Agent"
_MAX_TRACES = 16  # its default


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
    """Find data sources whose groups have equal rewards, while those of others differ."""
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
