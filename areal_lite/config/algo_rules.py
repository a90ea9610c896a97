"""Rules over several settings of the objective, and what it needs of the others."""

from areal_lite.config.commands import TrainConfig
from areal_lite.config.data import reference_folders


def check_algo(config: TrainConfig) -> None:
    _balance(config)
    _divergence(config)
    _routing_replay(config)
    margin, limit = config.algo.shaping.overlong_margin, config.rollout.max_new_tokens
    if margin > limit:
        raise ValueError(
            f"algo.shaping.overlong_margin={margin}: choose 0 to rollout.max_new_tokens={limit}"
        )
    advantage = config.algo.advantage
    compares = advantage.estimator in ("grpo", "rloo") and advantage.mean != "batch"
    if config.rollout.group_size == 1 and (config.algo.loss == "tb" or compares):
        raise ValueError(
            "rollout.group_size=1: a group of one has nothing to be compared with; use 2 or more, "
            "or algo.advantage.estimator=reinforce_pp or gae"
        )
    if advantage.estimator == "off" and "zero_variance" in config.rollout.filters:
        raise ValueError(
            "rollout.filters=[zero_variance] leaves out groups of equal rewards, which "
            "algo.advantage.estimator=off learns from, too: leave it out"
        )


def _balance(config: TrainConfig) -> None:
    algo = config.algo
    if algo.loss != "tb":
        return
    if not algo.kl.coef or algo.entropy_coef or algo.advantage.estimator == "gae":
        raise ValueError(
            "algo.loss=tb has a KL term in its target, and no advantages: set algo.kl.coef above "
            "0, algo.entropy_coef=0 and an estimator other than gae"
        )


def _divergence(config: TrainConfig) -> None:
    """Check what a KL term needs."""
    algo, kl = config.algo, config.algo.kl
    if kl.coef and None in reference_folders(config).values():
        where = " or data.sources.NAME.reference" if config.data.sources else ""
        raise ValueError(
            f"algo.kl.coef={kl.coef} needs a reference policy: set algo.reference{where} to a "
            "checkpoint folder (algo.reference='${model}' is the initial policy)"
        )
    if kl.coef and kl.into == "advantage" and kl.estimator != "k1":
        raise ValueError(
            f"algo.kl.estimator={kl.estimator}: algo.kl.into=advantage follows the gradient "
            "of the KL divergence with k1 only, set algo.kl.estimator=k1"
        )
    before_loss = kl.coef and kl.into != "loss"
    if algo.prox == "loglinear" and (before_loss or algo.loss == "tb"):
        cause = f"algo.kl.into={kl.into}" if before_loss else "algo.loss=tb"
        raise ValueError(
            f"algo.prox=loglinear: {cause} needs the log-probs before the update, use recompute"
        )
    has_own_loss = ":" in algo.loss
    teaches = kl.coef and kl.into != "reward"
    if algo.advantage.estimator == "off" and not (teaches or has_own_loss):
        raise ValueError(
            "algo.advantage.estimator=off leaves nothing to learn from: set algo.kl.coef, and "
            "algo.kl.into=advantage or loss"
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
