"""Settings of the objective: advantages, corrections, losses. Formulas are in docs/algorithms.md.

Symbols: w is the weight of a token that an older policy sampled, r the ratio of the policy that is
being trained to the proximal policy, R a reward. conf/algo holds published recipes.
"""

from dataclasses import dataclass, field
from typing import Literal

from areal_lite.config.fields import MAX_TOKENS, setting


@dataclass
class CorrectionConfig:
    """The weight w of tokens that an older policy sampled."""

    mode: str = setting(
        "cap",
        "cap: truncate w at algo.correction.cap. mask: leave tokens outside [low, cap] out of the "
        "loss. off: w = 1.",
        choices=("cap", "mask", "off"),
    )
    level: str = setting(
        "token",
        "What shares one w: a token, or a sequence, by the mean or the product of its weights.",
        choices=("token", "geometric", "product"),
    )
    cap: float = setting(5.0, "Upper bound of w.", within=(1, 1e6))
    low: float | None = setting(None, "mask: lower bound of w. null is 1 / cap.", within=(0, 1))


@dataclass
class AdvantageConfig:
    """The advantages, computed from rewards."""

    estimator: str = setting(
        "grpo",
        "How advantages are estimated. gae trains a critic. off: they are 0, so that only "
        "algo.kl teaches.",
        choices=("grpo", "rloo", "reinforce_pp", "gae", "off"),
    )
    mean: str = setting(
        "group", "grpo: whose mean reward is the baseline.", choices=("group", "batch")
    )
    std: str = setting(
        "group",
        "grpo: divide by the standard deviation of the group or the batch, or not at all.",
        choices=("group", "batch", "off"),
    )
    credit: str = setting(
        "outcome",
        "outcome: the reward of an episode. turns: what a turn and later ones earned.",
        choices=("outcome", "turns"),
    )
    whiten: bool = setting(False, "Normalize the advantages over all tokens of the batch.")
    gamma: float = setting(
        1.0, "reinforce_pp, gae: discount per token. credit=turns: per turn.", within=(0, 1)
    )
    lam: float = setting(1.0, "gae: lambda, which trades variance for bias.", within=(0, 1))


@dataclass
class ShapingConfig:
    """The reward that is trained on: scale (R + bias), plus penalties."""

    scale: float = setting(1.0, "Factor of the reward.", within=(1e-6, 1e6))
    bias: float = setting(0.0, "Added to the reward before scaling.", within=(-1e6, 1e6))
    overlong_margin: int = setting(
        0,
        "Tokens before rollout.max_new_tokens over which a penalty grows to 1. 0: no penalty.",
        within=(0, MAX_TOKENS),
    )
    mask_truncated: bool = setting(
        False, "Leave trajectories that reached rollout.max_new_tokens out of the loss."
    )


@dataclass
class KLConfig:
    """The divergence from the reference policy."""

    coef: float = setting(
        0.0,
        "Coefficient. 0: no KL term. tb: the temperature beta of the target, ref exp(R / beta).",
        within=(0, 100),
    )
    estimator: str = setting("k3", "Estimator of the KL divergence.", choices=("k1", "k2", "k3"))
    into: str = setting(
        "loss",
        "Where the term goes: into the loss, the reward, or the advantage of each token.",
        choices=("loss", "reward", "advantage"),
    )


@dataclass
class CriticConfig:
    """The value model of algo.advantage.estimator=gae, which begins as a copy of the policy."""

    lr: float = setting(1e-5, "Learning rate.", within=(1e-12, 1))


@dataclass
class AlgoConfig:
    """The objective: loss, advantages and corrections. Formulas are in docs/algorithms.md."""

    loss: str = setting(
        "ppo",
        "Policy loss. tb is Trajectory Balance. module:name is a loss of your own, or a recipe of "
        "examples/recipes.",
        choices=("ppo", "gspo", "cispo", "reinforce", "tb"),
        importable=True,
    )
    decoupled: bool = setting(
        True, "Trust region around the proximal policy. false: around the behavior policy."
    )
    prox: str = setting(
        "recompute",
        "Log-probs of the proximal policy. recompute: under the weights before the step; a "
        "forward pass computes what the first update does not. loglinear: interpolated between "
        "versions, without a forward pass.",
        choices=("recompute", "loglinear"),
    )
    eps_low: float = setting(0.2, "Lower clip range of r: 1 - eps_low.", within=(0, 1))
    eps_high: float = setting(0.2, "Upper clip range of r: 1 + eps_high.", within=(0, 1e6))
    dual_clip: float | None = setting(
        None, "ppo: bound of the loss of tokens with a negative advantage.", within=(1, 1e6)
    )
    reduction: str = setting(
        "token",
        "Mean of the loss: over tokens; over each sequence and then over sequences; or a "
        "sequence's sum divided by rollout.max_new_tokens.",
        choices=("token", "sequence", "constant"),
    )
    entropy_coef: float = setting(0.0, "Coefficient of the entropy bonus.", within=(0, 100))
    routing_replay: bool = setting(
        False,
        "Mixture of experts: the trainer sends each token to the experts that the server chose.",
    )
    reference: str | None = setting(
        None,
        "Checkpoint folder of the reference policy: a teacher with the same tokens, or ${model}.",
    )
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)

    @property
    def prox_pass(self) -> Literal["all", "rest", "none"]:
        """Return which tokens have a forward pass for their proximal log-probs before the updates.

        all: every token, because the targets, or Trajectory Balance, depend on them.
        rest: the tokens that the first update does not run on. Its own pass has the same weights.
        none: the loss interpolates them.
        """
        if self.prox == "loglinear":
            return "none"
        for_targets = self.kl.coef and self.kl.into != "loss"
        return "all" if self.loss == "tb" or for_targets else "rest"
