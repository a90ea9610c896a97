"""The sequences of a batch that show whether server and trainer agree."""

import numpy as np

from areal_lite.train_batch import TrainBatch
from areal_lite.trajectory import Trajectory
from areal_lite.weights.agreement import difference_of_fresh


def sequence(versions: list[int], kv_version: int, difference: float) -> Trajectory:
    """A prompt of one token, then sampled tokens whose log-probs are `difference` from -1."""
    versions = np.array([-1, *versions], np.int32)
    logprobs = np.where(versions >= 0, -1 - difference, 0).astype(np.float32)
    tokens = np.arange(len(versions), dtype=np.int32)
    return Trajectory(
        group_id=0,
        prompt_id="p",
        sample_index=0,
        tokens=tokens,
        loss_mask=versions >= 0,
        behavior_logprobs=logprobs,
        versions=versions,
        finish_reason="stop",
        reward=1.0,
        kv_version=kv_version,
    ).check()


def test_only_sequences_of_the_current_version_are_compared() -> None:
    during_a_push, queued_during_one, unknown = (
        sequence([4, 5], 4, 0.5),
        sequence([5, 5], 4, 0.5),
        sequence([5], -1, 0.5),
    )
    older, fresh = sequence([4, 4], 4, 0.5), sequence([5, 5, 5], 5, 0.25)
    batch = TrainBatch.from_trajectories([during_a_push, queued_during_one, fresh, older, unknown])
    # The trainer's log-probs of prompts do not matter.
    own = np.where(batch.loss_mask, np.float32(-1), np.float32(7))
    assert difference_of_fresh(batch, own, 5) == 0.25
    assert difference_of_fresh(batch, own, 6) is None
