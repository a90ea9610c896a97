"""Routing replay: routers choose the experts that the servers recorded (algo.routing_replay).

Server and trainer compute router logits that differ by rounding, and weights move between sampling
and training. Where the k-th and the next expert are close, they choose different ones, and the
log-prob of a token jumps. Replay of the recorded choice removes that (R3, arXiv:2510.11370).

* Only the choice is replayed. The weights of the chosen experts are still the softmax of this
  model's logits, so its router gets their gradient. An expert that was not chosen gets none, as
  without replay. The trainer has no balancing loss, which would see the choice.
* Every forward pass of the policy replays: that of the proximal log-probs and that of the update.
  Reference and critic route by themselves.
* A token without a recorded route, padding too, is routed by this model's own router.

Megatron's `RouterReplay` keeps one list of the routers of a process, which here has several models,
and replays for all tokens or none. An object of this class takes its place in a router.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class RoutingReplay:
    """The choice of one router, in `layer` of the whole model, from 0."""

    def __init__(self, layer: int, device: torch.device):
        self.layer = layer
        # [l, top_k], of the tokens that the next forward pass of this rank's router sees
        self.routes: Tensor | None = None
        # the recorded routes so far, and those of them that this router would not have chosen
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Any = None,
    ) -> tuple[Tensor, Tensor]:
        """Choose experts, in place of Megatron's own top-k, `default_compute_topk`.

        scores: [l, experts], logits or probabilities. Returns the scores and the numbers of the
        chosen experts, [l, top_k] each.
        """
        values, own = default_compute_topk(scores, topk, num_groups, group_topk)
        if self.routes is None:
            return values, own
        routes = self.routes.long()
        recorded = routes[:, :1] < scores.shape[1]
        changed = recorded[:, 0] & (own.sort(dim=1).values != routes).any(dim=1)
        self.counts += torch.stack((recorded.sum(), changed.sum()))
        chosen = torch.where(recorded, routes, own)
        return scores.gather(1, chosen), chosen


def install_replay(chunk: Any, device: torch.device) -> list[RoutingReplay]:
    """Let the routers of a chunk replay. Raises ValueError for a model without experts."""
    replays = []
    for layer in chunk.decoder.layers:
        if not hasattr(layer.mlp, "router"):
            raise ValueError(
                "algo.routing_replay=true is for a mixture of experts, and this model has none: "
                "set it to false"
            )
        layer.mlp.router.router_replay = RoutingReplay(layer.layer_number - 1, device)
        replays.append(layer.mlp.router.router_replay)
    return replays


def changed_share(replays: Sequence[RoutingReplay]) -> float:
    """Return the share of recorded routes that the routers of all ranks would not have chosen.

    It is over the forward passes since the last call; NaN without recorded routes. Every rank calls
    it.
    """
    counts = torch.stack([replay.counts for replay in replays]).sum(0)
    dist.all_reduce(counts)
    for replay in replays:
        replay.counts.zero_()
    recorded, changed = counts.tolist()
    return changed / recorded if recorded else float("nan")
