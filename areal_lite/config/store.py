"""Settings of the trajectory store."""

from dataclasses import dataclass

from areal_lite.config.fields import setting


@dataclass
class StoreConfig:
    """The store: every rollout group and trajectory of a run, in trajectories.sqlite."""

    max_gib: float | None = setting(
        50.0,
        "Largest size of the file. Beyond it, the oldest groups lose their tokens, log-probs and "
        "texts, and their rows stay. Those that were used or that failed come last. What a resume "
        "or a replay buffer needs is kept even so. null: no limit.",
        minimum=0.001,
        maximum=1_000_000,
    )
