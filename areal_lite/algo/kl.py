"""Terms beside the policy loss: divergence from a reference policy, and entropy.

With d = lp_theta - lp_ref at tokens that were sampled from the policy, these estimate
KL(theta || ref) (Schulman, "Approximating KL divergence", 2020):

    k1 = d                  unbiased, can be negative; its expected gradient as a loss is 0, so it
                            belongs in the reward only
    k2 = d^2 / 2            biased; its expected gradient on-policy is that of the KL, so it is the
                            estimate for a loss
    k3 = exp(-d) - 1 + d    unbiased, >= 0; its gradient is that of KL(ref || theta)
                            (GRPO, arXiv 2402.03300, eq. 4)
"""

import torch
from torch import Tensor

ESTIMATORS = ("k1", "k2", "k3")


def kl_estimate(logprobs: Tensor, reference: Tensor, mask: Tensor, *, estimator: str) -> Tensor:
    """Estimate the divergence at each token: float [t], 0 where masked."""
    if estimator not in ESTIMATORS:
        raise ValueError(f"algo.kl.estimator={estimator}: use one of {', '.join(ESTIMATORS)}")
    difference = torch.where(mask, logprobs - reference.detach(), torch.zeros_like(logprobs))
    if estimator == "k1":
        return difference
    return difference**2 / 2 if estimator == "k2" else (-difference).exp() - 1 + difference


def kl_loss(
    logprobs: Tensor,
    reference: Tensor,
    mask: Tensor,
    weights: Tensor,
    *,
    estimator: str,
    importance: Tensor | None = None,
) -> Tensor:
    """Compute sum_t weight_t k_t, to be added to the policy loss times a coefficient.

    weights: float [t], from `reduction_weights`; importance: float [t], w of correction.py, for
    tokens that another policy sampled, taken as a constant.
    """
    value = weights * kl_estimate(logprobs, reference, mask, estimator=estimator)
    return (value if importance is None else importance.detach() * value).sum()


def entropy_loss(entropy: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
    """Compute -sum_t weight_t H_t, the entropy bonus (Mnih et al., arXiv 1602.01783) as a loss.

    It is added to the policy loss times a coefficient. entropy: float [t], of the next-token
    distribution, in nats, with gradient.
    """
    return -(weights * torch.where(mask, entropy, torch.zeros_like(entropy))).sum()
