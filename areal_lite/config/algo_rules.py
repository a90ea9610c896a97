"""Rules over several settings of the objective, and what it needs of the others."""

import math

from areal_lite.config.algo import AlgoConfig
from areal_lite.config.commands import TrainConfig
from areal_lite.config.sources import reference_folders


def check_algo(config: TrainConfig) -> None:
    _proximal_policy(config)
    _reference_policy(config)
    _routing_replay(config)
    _correction(config)
    _rejection(config)
    _baseline(config.algo)
    _without_reward(config)
    shaping, rollout = config.algo.shaping, config.rollout
    if shaping.overlong_margin > rollout.max_new_tokens:
        raise ValueError(
            f"algo.shaping.overlong_margin={shaping.overlong_margin}: "
            f"choose 0 to rollout.max_new_tokens={rollout.max_new_tokens}"
        )
    advantage = config.algo.advantage
    compares = advantage.estimator in ("grpo", "rloo") and advantage.mean != "batch"
    if rollout.group_size == 1 and (config.algo.loss == "tb" or compares):
        raise ValueError(
            "rollout.group_size=1: a group of one has nothing to be compared with; use 2 or more, "
            "or algo.advantage.estimator=reinforce_pp or gae"
        )


def _proximal_policy(config: TrainConfig) -> None:
    algo, minibatches = config.algo, config.trainer.minibatches
    if algo.prox == "reuse" and minibatches > 1:
        raise ValueError(
            "algo.prox=reuse is exact with one minibatch only, "
            f"trainer.minibatches={minibatches}: use recompute"
        )
    if algo.prox != "recompute" and not algo.correct_mismatch:
        raise ValueError(
            f"algo.prox={algo.prox}: algo.correct_mismatch=false needs the log-probs before the "
            "update, use recompute"
        )
    before_loss = algo.kl.coef and algo.kl.into != "loss"
    if algo.prox != "recompute" and (before_loss or algo.loss == "tb"):
        cause = f"algo.kl.into={algo.kl.into}" if before_loss else "algo.loss=tb"
        raise ValueError(
            f"algo.prox={algo.prox}: {cause} needs the log-probs before the update, use recompute"
        )


def _reference_policy(config: TrainConfig) -> None:
    algo = config.algo
    if algo.kl.coef and algo.kl.to != "reference" and algo.kl.into != "loss":
        raise ValueError(
            f"algo.kl.to={algo.kl.to} is a penalty on the update: set algo.kl.into=loss"
        )
    if algo.kl.coef and algo.kl.into == "advantage" and algo.kl.estimator != "k1":
        raise ValueError(
            f"algo.kl.estimator={algo.kl.estimator}: algo.kl.into=advantage follows the gradient "
            "of the KL divergence with k1 only, set algo.kl.estimator=k1"
        )
    to_reference = algo.kl.coef and algo.kl.to == "reference"
    if None in reference_folders(config).values() and (to_reference or algo.loss == "tb"):
        cause = "algo.loss=tb" if algo.loss == "tb" else f"algo.kl.coef={algo.kl.coef}"
        where = " or data.sources.NAME.reference" if config.data.sources else ""
        raise ValueError(
            f"{cause} needs a reference policy: set algo.reference{where} to a checkpoint folder "
            "(algo.reference='${model}' is the initial policy)"
        )
    if algo.loss == "tb" and algo.scale_lr_by_ess:
        raise ValueError("algo.scale_lr_by_ess=true: algo.loss=tb has no weights, set it to false")
    if algo.loss == "tb" and not algo.correct_mismatch:
        raise ValueError("algo.correct_mismatch=false: algo.loss=tb has no ratios, set it to true")
    if algo.loss == "tb" and (
        algo.kl.coef or algo.entropy_coef or algo.advantage.estimator == "gae"
    ):
        raise ValueError(
            "algo.loss=tb has its own KL term (algo.tb_beta) and no advantages: set "
            "algo.kl.coef=0, algo.entropy_coef=0 and an estimator other than gae"
        )


def _routing_replay(config: TrainConfig) -> None:
    trainer = config.trainer
    if not config.algo.routing_replay:
        return
    if trainer.recompute == "full" and trainer.pipeline_parallel > 1:
        raise ValueError(
            f"trainer.recompute=full with trainer.pipeline_parallel={trainer.pipeline_parallel}: "
            "layers are computed again after the routes of later microbatches were set, so with "
            "algo.routing_replay=true use recompute=selective or one stage"
        )
    if config.server.args.get("enable_return_routed_experts", True) is not True:
        raise ValueError(
            "server.args.enable_return_routed_experts=false: algo.routing_replay=true needs the "
            "routes of the servers, so remove it"
        )


def _correction(config: TrainConfig) -> None:
    veto = config.algo.correction.veto
    if veto is not None and not (len(veto) == 2 and 0 <= veto[0] < 1 < veto[1]):
        raise ValueError(
            f"algo.correction.veto={list(veto)}: give [low, high] with low < 1 < high, or null"
        )


def _baseline(algo: AlgoConfig) -> None:
    advantage = algo.advantage
    if advantage.mean != "optimal":
        return
    if advantage.leave_one_out:
        raise ValueError(
            "algo.advantage.leave_one_out=true corrects a mean, and algo.advantage.mean=optimal is "
            "none: set one of them otherwise"
        )
    if algo.prox != "recompute":
        raise ValueError(
            f"algo.prox={algo.prox}: algo.advantage.mean=optimal needs the log-probs before the "
            "update, use recompute"
        )


def _without_reward(config: TrainConfig) -> None:
    kl = config.algo.kl
    if config.algo.advantage.estimator != "off":
        return
    if not kl.coef or kl.into == "reward":
        raise ValueError(
            "algo.advantage.estimator=off leaves nothing to learn from: set algo.kl.coef, and "
            "algo.kl.into=advantage or loss"
        )
    if config.rollout.active_sampling:
        raise ValueError(
            "rollout.active_sampling=true leaves out groups of equal rewards, which "
            "algo.advantage.estimator=off learns from, too: set it to false"
        )


def _rejection(config: TrainConfig) -> None:
    algo, rejection = config.algo, config.algo.rejection
    if rejection.by is None:
        return
    name = f"algo.rejection.by={rejection.by}"
    if algo.loss == "tb":
        raise ValueError(f"{name}: algo.loss=tb trains on every token, so set it to null")
    on_policy = 1.0 if rejection.by == "ratio" else 0.0
    below = -math.inf if rejection.below is None else rejection.below
    if not below <= on_policy <= rejection.above:
        raise ValueError(
            f"{name} is {on_policy:g} for fresh tokens, which algo.rejection.above="
            f"{rejection.above:g} and algo.rejection.below={rejection.below} would reject: choose "
            f"below <= {on_policy:g} <= above"
        )
    if rejection.level == "sequence" and rejection.outward:
        raise ValueError(
            "algo.rejection.outward=true looks at tokens, and algo.rejection.level=sequence "
            "rejects all of a sequence: use level=token or batch"
        )
    if rejection.level == "batch":
        _batch_rejection(algo)


def _batch_rejection(algo: AlgoConfig) -> None:
    rejection = algo.rejection
    if rejection.by in ("ratio", "k1") or rejection.below is not None or not rejection.above:
        raise ValueError(
            "algo.rejection.level=batch bounds the mean of a distance that is 0 or more, from "
            f"above only: use by=square, k3 or tv instead of {rejection.by}, above > 0, and "
            "below=null"
        )
    if algo.prox != "recompute":
        raise ValueError(
            f"algo.prox={algo.prox}: algo.rejection.level=batch needs the log-probs before the "
            "update, use recompute"
        )
