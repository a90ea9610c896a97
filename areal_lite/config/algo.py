"""Typed configuration of an objective, `algo` of a training run: advantages, corrections, losses. What each choice computes: areal_lite/algo."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class CorrectionConfig:
    """Weight w of tokens that another policy sampled, from lp_prox - lp_behav; algo/correction.py."""

    mode: str = "cap"  # cap (truncate) | mask (reject) | off
    level: str = "token"  # token | geometric (a sequence's mean) | product (a sequence's sum)
    cap: float = 5.0  # upper bound of w
    low: float | None = None  # mask: lower bound; null is 1 / cap
    veto: list[float] | None = (
        None  # [low, high]: a token whose w lies outside takes its whole sequence out
    )


@dataclass
class AdvantageConfig:
    """From rewards to advantages; algo/advantages.py."""

    estimator: str = "grpo"  # grpo | rloo | reinforce_pp | gae (trains a critic)
    mean: str = "group"  # grpo: baseline over the group | batch
    std: str = "group"  # grpo: divide by the deviation of the group | batch | off
    leave_one_out: bool = False  # grpo: the baseline of a trajectory is the mean of the others
    whiten: bool = False  # then normalise over all tokens of the batch
    gamma: float = 1.0  # reinforce_pp, gae
    lam: float = 1.0  # gae


@dataclass
class ShapingConfig:
    """From what the reward function says to what is trained on: scale (r + bias), clipped, plus a penalty; algo/shaping.py."""

    scale: float = 1.0
    bias: float = 0.0
    clip: float | None = None
    overlong_margin: int = (
        0  # tokens before rollout.max_new_tokens from which on length costs up to 1; 0: never
    )
    mask_truncated: bool = False  # leave trajectories that ran out of tokens out of the loss


@dataclass
class KLConfig:
    """Divergence from the reference policy; algo/kl.py."""

    coef: float = 0.0
    estimator: str = "k3"  # k1 | k2 | k3
    into: str = "loss"  # loss | reward


@dataclass
class CriticConfig:
    """The value model of algo.advantage.estimator=gae: same architecture, start and Megatron settings as the policy."""

    lr: float = 1e-5
    clip_grad: float = 1.0
    clip_value: float | None = 0.2  # how far a value may move in a step


@dataclass
class AlgoConfig:
    """Advantages, loss and corrections; formulas in areal_lite/algo, published recipes in conf/algo."""

    loss: str = "ppo"  # ppo | gspo | cispo | reinforce | tb (Trajectory Balance)
    decoupled: bool = (
        True  # trust region around the proximal policy; False: naive PPO around the behavior policy
    )
    prox: str = "recompute"  # recompute | reuse (exact with one minibatch) | loglinear
    eps_low: float = 0.2
    eps_high: float = 0.2
    dual_clip: float | None = None  # ppo
    reduction: str = (
        "token"  # mean over tokens | sequence: over each sequence, then over sequences | constant
    )
    reduction_length: int | None = (
        None  # constant: a sequence's divisor; null is rollout.max_new_tokens
    )
    entropy_coef: float = 0.0
    tb_beta: float = 0.1  # tb: temperature of the target, ref exp(R / beta)
    tb_beta_end: float | None = (
        None  # where beta is after tb_beta_steps, in a straight line; null: it does not change
    )
    tb_beta_steps: int = 500
    reference: str | None = (
        None  # a Hugging Face checkpoint folder, such as ${model}; for kl and tb
    )
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    shaping: ShapingConfig = field(default_factory=ShapingConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
