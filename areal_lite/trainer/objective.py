"""Build an objective (areal_lite/algo/objectives) from `algo` of the configuration."""

from collections.abc import Callable
from functools import partial
from typing import Any

from areal_lite.algo.correction import Correction
from areal_lite.algo.losses import (
    LossInputs,
    LossOutput,
    cispo_loss,
    gepo_loss,
    gspo_loss,
    ppo_loss,
    reinforce_loss,
)
from areal_lite.algo.objectives.balance import BalanceObjective
from areal_lite.algo.objectives.base import Objective
from areal_lite.algo.objectives.estimator import AdvantageEstimator
from areal_lite.algo.objectives.ratio import RatioObjective
from areal_lite.algo.objectives.rewards import KLTerm, RewardShaping
from areal_lite.algo.rejection import Rejection
from areal_lite.config import AlgoConfig, CorrectionConfig, TrainConfig

PolicyLoss = Callable[[LossInputs], LossOutput]


def _trust_region(algo: AlgoConfig) -> dict[str, Any]:
    return {
        "eps_low": algo.eps_low,
        "eps_high": algo.eps_high,
        "decoupled": algo.decoupled,
        "correction": correction(algo.correction),
    }


# algo.loss -> the loss with its settings bound. docs/algorithms.md tells how to add one.
RATIO_LOSSES: dict[str, Callable[[AlgoConfig], PolicyLoss]] = {
    "ppo": lambda algo: partial(ppo_loss, dual_clip=algo.dual_clip, **_trust_region(algo)),
    "gspo": lambda algo: partial(gspo_loss, **_trust_region(algo)),
    "gepo": lambda algo: partial(gepo_loss, eps_low=algo.eps_low, eps_high=algo.eps_high),
    "cispo": lambda algo: partial(cispo_loss, **_trust_region(algo)),
    "reinforce": lambda algo: partial(reinforce_loss, correction=correction(algo.correction)),
}


def build_objective(config: TrainConfig) -> Objective:
    """Build the objective of a run. Raises ValueError for an unknown `algo.loss`."""
    algo = config.algo
    shaping = RewardShaping(**vars(algo.shaping), max_new_tokens=config.rollout.max_new_tokens)
    if algo.loss == "tb":
        return BalanceObjective(
            shaping=shaping,
            beta_start=algo.tb_beta,
            beta_end=algo.tb_beta if algo.tb_beta_end is None else algo.tb_beta_end,
            beta_steps=algo.tb_beta_steps,
        )
    if algo.loss not in RATIO_LOSSES:
        raise ValueError(f"algo.loss={algo.loss}: use tb or one of {', '.join(RATIO_LOSSES)}")
    return RatioObjective(
        policy_loss=RATIO_LOSSES[algo.loss](algo),
        correction=correction(algo.correction),
        rejection=Rejection(**vars(algo.rejection)),
        reduction=algo.reduction,
        length=algo.reduction_length or config.rollout.max_new_tokens,
        shaping=shaping,
        estimator=AdvantageEstimator(**vars(algo.advantage)),
        kl=KLTerm(**vars(algo.kl)),
        entropy_coef=algo.entropy_coef,
        prox=algo.prox,
        prox_pass=algo.prox_pass,
        correct_mismatch=algo.correct_mismatch,
        oldest=config.buffer.max_staleness,
        compares_with_group=algo.loss == "gepo",
        scale_lr_by_ess=algo.scale_lr_by_ess,
    )


def correction(config: CorrectionConfig) -> Correction:
    """Convert the configuration of a behavior correction."""
    settings: dict[str, Any] = {**vars(config)}
    settings["veto"] = tuple(config.veto) if config.veto else None
    return Correction(**settings)
