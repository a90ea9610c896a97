"""The studies: which runs there are, and what differs between them.

The task is sums of three digits, and the teacher of the warm-up forgot 88 % of the carries. So the
carry is what the model has to learn, from a probability near 0.1. A step has 16 groups of 16
trajectories in four minibatches, at a constant learning rate. Groups are used in order, a push
waits for all requests in flight, and nothing else limits these. So every token is exactly `lag`
versions old after the first steps, at any speed of the machine.
"""

from dataclasses import dataclass
from itertools import product

GROUPS = 16
MODEL = "hidden_size=96 num_layers=3 mlp_size=192"
WARM_UP = (
    "max_digits=3 batch_size=32 forget_carry=0.88"
    " trainer.steps=400 trainer.lr=4e-3 trainer.min_lr=8e-5 trainer.lr_schedule=cosine"
    " trainer.lr_warmup_steps=20 trainer.weight_decay=0.01"
)
COMMON = (
    "+task=addition data.args.max_digits=3 algo=quickstart algo.prox=recompute"
    " rollout.group_size=16 rollout.max_new_tokens=64 rollout.max_concurrent=32768"
    f" trainer.batch_groups={GROUPS} trainer.lr_schedule=constant"
    " trainer.lr_warmup_steps=0 trainer.adam_eps=1e-5 trainer.save_every=0"
    " rollout.interrupt=none buffer.window=0 eval.problems=512"
)
_DECOUPLED = "algo.decoupled=true algo.correction.mode=cap"
_BEHAVIOR = "algo.decoupled=false algo.correction.mode=cap"
_MOMENT = f"{_DECOUPLED} algo.loss=examples.recipes.stale:loss"
_PRODUCT = f"{_DECOUPLED} algo.correction.level=product algo.correction.cap=2"
ARMS = {
    "decoupled": _DECOUPLED,
    "behavior": _BEHAVIOR,
    "unweighted": "algo.decoupled=true algo.correction.mode=off",
    "moment": _MOMENT,
    "decay": f"{_MOMENT} trainer.lr_schedule=linear",
    "product": _PRODUCT,
    "settled": f"{_PRODUCT} trainer.lr_schedule=wsd",
    "decoupled_sgd": f"{_DECOUPLED} trainer.optimizer=sgd",
    "behavior_sgd": f"{_BEHAVIOR} trainer.optimizer=sgd",
}
"""decoupled: clip around the proximal policy, weights to the behavior policy capped at 5.
behavior: clip around the behavior policy. unweighted: decoupled without the weight.

The others are decoupled with one addition. moment: tokens leave the loss by the second moment of
the log-ratio. decay: the same, with a learning rate that falls to zero. product: one weight per
trajectory, capped at 2. settled: the same, with a learning rate that falls to zero in the last
fifth of the steps. decoupled_sgd, behavior_sgd: an optimizer that does not rescale gradients.

runs.jsonl also has runs of arms whose settings are gone: ess, variation, range, sequence, averaged,
penalty."""


@dataclass(frozen=True)
class Cell:
    """One run: an arm at a lag in steps and a learning rate, with a seed.

    A cell that belongs to several studies is run once.
    """

    arm: str
    lag: int
    lr: float
    seed: int
    eps: float = 0.1
    minibatches: int = 4
    steps: int = 110

    @property
    def name(self) -> str:
        return (
            f"{self.arm}-lag{self.lag}-lr{self.lr:g}-eps{self.eps:g}"
            f"-updates{self.minibatches}x{self.steps}-{self.seed}"
        )

    @property
    def settings(self) -> list[str]:
        """Return the overrides of `areal-lite train`, without paths."""
        return [
            *COMMON.split(),
            *ARMS[self.arm].split(),
            f"buffer.max_staleness={self.lag}",
            "buffer.freshness=eager",
            f"trainer.lr={self.lr:g}",
            f"trainer.minibatches={self.minibatches}",
            f"trainer.steps={self.steps}",
            f"algo.eps_low={self.eps:g}",
            f"algo.eps_high={self.eps:g}",
            f"seed={self.seed}",
        ]


CLIPS = ("decoupled", "behavior", "unweighted")
CURES = (*CLIPS, "product", "settled", "moment", "decay")
LRS = (3e-5, 1e-4, 3e-4)
CURE_LRS = (3e-5, 6e-5, 1e-4, 1.5e-4)
SGD_LRS = (0.1, 0.3)


def grid(seed: int) -> list[Cell]:
    """Return every clip at every learning rate, at lag 8, and fresh data for comparison."""
    fresh = [Cell("decoupled", 0, lr, seed) for lr in LRS]
    return [*[Cell(arm, 8, lr, seed) for lr, arm in product(LRS, CLIPS)], *fresh]


def speed(seed: int) -> list[Cell]:
    """Return the speed limit: each clip at each lag and both clip ranges."""
    return [
        Cell(arm, lag, 1e-4, seed, eps)
        for eps, lag, arm in product((0.1, 0.2), (8, 4, 2, 0), CLIPS)
    ]


def limit(seed: int) -> list[Cell]:
    """Return both clips with an optimizer that does not make up for tokens without gradient."""
    return [
        Cell(arm, 8, lr, seed) for lr, arm in product(SGD_LRS, ("decoupled_sgd", "behavior_sgd"))
    ]


def weight(seed: int) -> list[Cell]:
    """Return what the weight does where no clip acts: one update a step."""
    return [
        Cell(arm, lag, lr, seed, minibatches=1, steps=220)
        for lag, lr, arm in product((16, 64), (1e-4, 3e-4, 1e-3), ("decoupled", "unweighted"))
    ]


def cures(seed: int) -> list[Cell]:
    """Return every arm at large lags, and fresh data for comparison."""
    stale = product((16, 32, 64), CURE_LRS, CURES)
    fresh = product((0,), CURE_LRS, ("decoupled", "decay", "settled"))
    return [Cell(arm, lag, lr, seed, steps=220) for lag, lr, arm in (*stale, *fresh)]


STUDIES = {"grid": grid, "speed": speed, "limit": limit, "weight": weight, "cures": cures}
