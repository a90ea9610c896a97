"""What the controller measures: the groups of a batch, and the lag of its event loop."""

import asyncio
from collections.abc import Iterable, Sequence

import numpy as np

from areal_lite.trajectory import FinishReason, Group, Trajectory, episode_reward

# What is also reported of each data source.
_BY_SOURCE = ("reward_mean", "uniform_groups_share", "length_mean", "trajectories")


def batch_stats(
    groups: Sequence[Group], version: int, max_staleness: int | None
) -> dict[str, float]:
    """Describe a batch as a trainer at `version` sees it.

    * `staleness_*`: versions, over the sampled tokens that are not overdue and so are trained on
      (all of them without a bound).
    * `length_*`: sampled tokens of a trajectory.
    * `*_share`: shares of trajectories, except `uniform_groups_share`, the share of groups whose
      rewards are all equal: such a group has no advantage to learn from.
    * `reward_*`: over episodes. `traces_mean`: trajectories of an episode.
    """
    trajectories = [t for group in groups for t in group.trajectories]
    rewards = np.array([reward for group in groups for reward in group.rewards], np.float64)
    starts = np.concatenate(([0], np.cumsum([len(t.tokens) for t in trajectories])))[:-1]
    versions = np.concatenate([t.versions for t in trajectories])
    sampled = versions >= 0
    # No sequence starts with a sampled token, so a segment never continues the previous sequence.
    begins_segment = sampled & (versions != np.concatenate(([-1], versions[:-1])))
    oldest = np.minimum.reduceat(np.where(sampled, versions, np.iinfo(np.int32).max), starts)
    interrupted = np.maximum.reduceat(versions, starts) > oldest
    staleness = version - versions[sampled]
    trained = staleness if max_staleness is None else staleness[staleness <= max_staleness]
    # Log-probs are 0 where nothing was sampled.
    logprobs = np.concatenate([t.behavior_logprobs for t in trajectories])
    lengths = np.add.reduceat(sampled, starts, dtype=np.int64)
    uniform = [len({t.reward for t in group.trajectories}) == 1 for group in groups]
    truncated = [t.finish_reason == FinishReason.LENGTH for t in trajectories]
    return {
        "reward_mean": float(rewards.mean()),
        "reward_std": float(rewards.std()),
        "uniform_groups_share": float(np.mean(uniform)),
        "staleness_mean": float(trained.mean()) if len(trained) else 0.0,
        "staleness_max": int(trained.max(initial=0)),
        "interrupted_share": float(np.mean(interrupted)),
        "segments_mean": float(np.count_nonzero(begins_segment) / len(trajectories)),
        "length_mean": float(lengths.mean()),
        "length_max": int(lengths.max()),
        "truncated_share": float(np.mean(truncated)),
        "trajectories": len(trajectories),
        "traces_mean": len(trajectories) / len(rewards),
        "tokens": int(lengths.sum()),
        "nonfinite_tokens": int(np.count_nonzero(~np.isfinite(logprobs))),
    }


def source_stats(groups: Sequence[Group], sources: Sequence[str]) -> dict[str, float]:
    """Describe the groups of each named data source that has any, as `key/NAME`."""
    by_source: dict[str, list[Group]] = {}
    for group in groups:
        by_source.setdefault(group.prompt_id.partition("/")[0], []).append(group)
    stats: dict[str, float] = {}
    for name in filter(None, sources):
        if own := by_source.get(name):
            stats[of_source("groups", name)] = len(own)
            for key, value in batch_stats(own, 0, None).items():
                if key in _BY_SOURCE:
                    stats[of_source(key, name)] = value
    return stats


def of_source(key: str, source: str) -> str:
    """Return the name of a metric of one data source; `key` itself for one without a name."""
    return f"{key}/{source}" if source else key


def diversity(prompts: Iterable[Sequence[Sequence[Trajectory]]]) -> dict[str, float]:
    """Return `distinct_share` and `distinct_correct`, means over prompts; 0 without prompts.

    They are the share of different completions among the episodes of a prompt, and the number of
    different ones with a positive reward. The traces of an episode are one completion.
    """
    shares: list[float] = []
    correct: list[int] = []
    for episodes in prompts:
        completions = {
            tuple(t.tokens.tobytes() for t in traces): episode_reward(traces) > 0
            for traces in episodes
        }
        shares.append(len(completions) / len(episodes))
        correct.append(sum(completions.values()))
    return {
        "distinct_share": float(np.mean(shares or 0)),
        "distinct_correct": float(np.mean(correct or 0)),
    }


_INTERVAL_S = 0.01


class LoopLag:
    """Measures the lag of the running event loop."""

    def __init__(self) -> None:
        self._lags_s: list[float] = []

    async def watch(self) -> None:
        """Sleep and measure. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _INTERVAL_S
            await asyncio.sleep(_INTERVAL_S)
            self._lags_s.append(loop.time() - due)

    def take_p99(self) -> float:
        """Return the 99th percentile of the lags since the last call, in seconds; 0 if none."""
        lags, self._lags_s = self._lags_s, []
        return float(np.quantile(lags, 0.99)) if lags else 0.0
