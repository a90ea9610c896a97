"""The studies: which runs there are, and what differs between them.

The task is sums of three digits, and the teacher of the warm-up forgot 88 % of the carries. So the
carry is what the model has to learn, from a probability near 0.1. A step has 16 groups of 16
trajectories in four minibatches, at a constant learning rate. `buffer.fixed_lag` makes every token
exactly `lag` versions old after the first steps, at any speed of the machine.
"""

from dataclasses import dataclass
from itertools import product

STEPS = 110
GROUPS = 16
MODEL = "hidden_size=96 num_layers=3 mlp_size=192"
WARM_UP = (
    "data.max_digits=3 batch_size=32 forget_carry=0.88"
    " trainer.steps=400 trainer.lr=4e-3 trainer.min_lr=8e-5 trainer.lr_schedule=cosine"
    " trainer.lr_warmup_steps=20 trainer.weight_decay=0.01"
)
COMMON = (
    "data.max_digits=3 algo=quickstart algo.prox=recompute"
    " rollout.group_size=16 rollout.max_new_tokens=64 rollout.max_concurrent=256"
    f" trainer.batch_groups={GROUPS} trainer.minibatches=4 trainer.lr_schedule=constant"
    " trainer.lr_warmup_steps=0 trainer.adam_eps=1e-5 trainer.save_every=0"
    f" trainer.steps={STEPS} buffer.fixed_lag=true eval.problems=512"
)
ARMS = {
    "decoupled": "algo.decoupled=true algo.correction.mode=cap",
    "behavior": "algo.decoupled=false algo.correction.mode=cap",
    "unweighted": "algo.decoupled=true algo.correction.mode=off",
}
"""decoupled: clip around the proximal policy, weights to the behavior policy capped at 5.
behavior: clip around the behavior policy. unweighted: decoupled without the weight."""


@dataclass(frozen=True)
class Cell:
    """One run: an arm of a study, at a lag in steps and a learning rate, with a seed."""

    study: str
    arm: str
    lag: int
    lr: float
    seed: int
    eps: float = 0.1

    @property
    def name(self) -> str:
        return f"{self.study}-{self.arm}-lag{self.lag}-lr{self.lr:g}-eps{self.eps:g}-{self.seed}"

    @property
    def settings(self) -> list[str]:
        """Return the overrides of `areal-lite train`, without paths."""
        return [
            *COMMON.split(),
            *ARMS[self.arm].split(),
            f"buffer.max_staleness={self.lag}",
            f"trainer.lr={self.lr:g}",
            f"algo.eps_low={self.eps:g}",
            f"algo.eps_high={self.eps:g}",
            f"seed={self.seed}",
            f"data.seed={self.seed}",
        ]


LRS = (3e-5, 1e-4, 3e-4)


def grid(seed: int) -> list[Cell]:
    """Return every arm at every learning rate, at lag 8 and without lag."""
    return [Cell("grid", arm, lag, lr, seed) for lag, arm, lr in product((8, 0), ARMS, LRS)]


def speed(seed: int, lr: float = 1e-4) -> list[Cell]:
    """Return the speed limit: each arm at each lag and both clip ranges."""
    return [
        Cell("speed", arm, lag, lr, seed, eps)
        for eps, lag, arm in product((0.1, 0.2), (8, 4, 2, 0), ARMS)
    ]


STUDIES = {"grid": grid, "speed": speed}
