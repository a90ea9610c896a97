"""The diversity of the completions of one prompt.

A collapsing policy loses this first, and a replay buffer keeps it.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from areal_lite.trajectory import Trajectory


def diversity(prompts: Iterable[Sequence[Trajectory]]) -> dict[str, float]:
    """Measure diversity, as means over prompts; 0 without prompts.

    Args:
        prompts: the scored trajectories of each prompt.

    Returns:
        `distinct_share`: different completions as a share of all completions.
        `distinct_correct`: number of different completions with a positive reward.
    """
    shares: list[float] = []
    correct: list[int] = []
    for trajectories in prompts:
        completions = {t.tokens.tobytes(): (t.reward or 0.0) > 0 for t in trajectories}
        shares.append(len(completions) / len(trajectories))
        correct.append(sum(completions.values()))
    return {
        "distinct_share": float(np.mean(shares or 0)),
        "distinct_correct": float(np.mean(correct or 0)),
    }
