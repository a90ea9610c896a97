"""How different the completions of one prompt are: what a policy that collapses loses first, and what a replay buffer keeps."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from areal_lite.trajectory import Trajectory


def diversity(prompts: Iterable[Sequence[Trajectory]]) -> dict[str, float]:
    """Means over prompts, each given by its trajectories: `distinct_share`, different completions among all; `distinct_correct`, how many
    different ones have a positive reward. 0 without prompts."""
    shares, correct = [], []
    for trajectories in prompts:
        completions = {t.tokens.tobytes(): t.reward > 0 for t in trajectories}
        shares.append(len(completions) / len(trajectories))
        correct.append(sum(completions.values()))
    return {
        "distinct_share": float(np.mean(shares or 0)),
        "distinct_correct": float(np.mean(correct or 0)),
    }
