"""The diversity of the completions of one prompt.

A collapsing policy loses this first, and a replay buffer keeps it.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from areal_lite.trajectory import Trajectory, episode_reward


def diversity(prompts: Iterable[Sequence[Sequence[Trajectory]]]) -> dict[str, float]:
    """Measure diversity, as means over prompts; 0 without prompts.

    Args:
        prompts: the scored episodes of each prompt. Their traces are one completion.

    Returns:
        `distinct_share`: different completions as a share of all completions.
        `distinct_correct`: number of different completions with a positive reward.
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
