"""Build the objective (areal_lite/algo) that the section `algo` of the configuration describes."""

from collections.abc import Callable
from functools import partial
from typing import Any

from areal_lite.algo import losses
from areal_lite.algo.correction import Correction
from areal_lite.algo.objective import Objective, OwnLoss, PolicyObjective
from areal_lite.algo.trajectory_balance import BalanceObjective
from areal_lite.config import AlgoConfig, TrainConfig
from areal_lite.extensions import load_object

PolicyLoss = Callable[[losses.LossInputs], losses.LossOutput]


def _trust_region(algo: AlgoConfig) -> dict[str, Any]:
    return {
        "eps_low": algo.eps_low,
        "eps_high": algo.eps_high,
        "decoupled": algo.decoupled,
        "correction": Correction(**vars(algo.correction)),
    }


# algo.loss -> the loss with its settings bound.
RATIO_LOSSES: dict[str, Callable[[AlgoConfig], PolicyLoss]] = {
    "ppo": lambda algo: partial(losses.ppo_loss, dual_clip=algo.dual_clip, **_trust_region(algo)),
    "gspo": lambda algo: partial(losses.gspo_loss, **_trust_region(algo)),
    "cispo": lambda algo: partial(losses.cispo_loss, **_trust_region(algo)),
    "reinforce": lambda algo: partial(
        losses.reinforce_loss, correction=Correction(**vars(algo.correction))
    ),
}


def build_objective(config: TrainConfig) -> Objective:
    """Build the objective of a run. Raises ValueError for a loss that cannot be used."""
    algo, longest = config.algo, config.rollout.max_new_tokens
    if algo.loss == "tb":
        return BalanceObjective(algo=algo, max_new_tokens=longest)
    if algo.loss in RATIO_LOSSES:
        policy_loss = RATIO_LOSSES[algo.loss](algo)
        return PolicyObjective(algo=algo, policy_loss=policy_loss, max_new_tokens=longest)
    loss = load_object("algo.loss", algo.loss)
    own = loss if isinstance(loss, OwnLoss) else OwnLoss(loss)
    if own.prepare and algo.prox == "loglinear":
        raise ValueError(
            f"algo.prox=loglinear: algo.loss={algo.loss} needs the log-probs before the update, "
            "use recompute"
        )
    return PolicyObjective(algo=algo, policy_loss=own, max_new_tokens=longest)
