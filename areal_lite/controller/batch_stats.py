"""What a step's batch looks like, over all data-parallel ranks: for metrics. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from areal_lite.trajectory import Group


def batch_stats(
    groups: Sequence[Group], version: int, max_staleness: int | None
) -> dict[str, float]:
    """Facts about `groups` as seen by a trainer at `version`.

    AdmissionGate is per sampled token (versions), of those that are not overdue and so trained on (all, without a bound); lengths are sampled
    tokens of a trajectory; `*_share` are shares of trajectories. `reward_std` is over all trajectories; `uniform_groups_share` is the share
    of groups whose members all got the same reward, which have no advantage to learn from.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = np.array([t.reward for t in trajectories], np.float64)
    starts = np.concatenate(([0], np.cumsum([len(t.tokens) for t in trajectories])))[:-1]
    versions = np.concatenate([t.versions for t in trajectories])
    sampled = versions >= 0
    begins_segment = sampled & (
        versions != np.concatenate(([-1], versions[:-1]))
    )  # no sequence begins with a sampled token
    oldest = np.minimum.reduceat(np.where(sampled, versions, np.iinfo(np.int32).max), starts)
    staleness = version - versions[sampled]
    trained = staleness if max_staleness is None else staleness[staleness <= max_staleness]
    logprobs = np.concatenate(
        [t.behavior_logprobs for t in trajectories]
    )  # 0 where nothing was sampled
    lengths = np.add.reduceat(sampled, starts, dtype=np.int64)
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "uniform_groups_share": float(
            np.mean([len({t.reward for t in group.trajectories}) == 1 for group in groups])
        ),
        "staleness_mean": float(trained.mean()) if len(trained) else 0.0,
        "staleness_max": int(trained.max(initial=0)),
        "interrupted_share": float(np.mean(np.maximum.reduceat(versions, starts) > oldest)),
        "segments_mean": float(np.count_nonzero(begins_segment) / len(trajectories)),
        "length_mean": float(lengths.mean()),
        "length_max": int(lengths.max()),
        "truncated_share": float(np.mean([t.finish_reason == "length" for t in trajectories])),
        "trajectories": len(trajectories),
        "tokens": int(lengths.sum()),
        "nonfinite_tokens": int(np.count_nonzero(~np.isfinite(logprobs))),
    }
