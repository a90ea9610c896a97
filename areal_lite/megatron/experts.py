"""Mixtures of experts: the router, all experts of a rank at once, and routing replay.

A router chooses k experts for each token and weighs their results. Each token becomes k rows, one
for each of its experts. Rows are sorted by expert, so that two grouped products compute all experts
of a rank together. The weight of a row is applied between the two products, where a row is short.

Experts are spread over ranks in one of two ways (parallel.py):

* Whole experts (`trainer.expert_parallel`): rows travel to the rank of their expert and back.
* Parts of each expert (tensor parallelism): each rank computes all tokens with its part, and the
  results are summed.

Nothing waits for the GPU, except for the number of rows that ranks exchange.
"""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    set_tensor_model_parallel_attributes,
)
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.shared_experts import SharedExpertMLP
from torch import Tensor
from torch.autograd.function import once_differentiable

from areal_lite.megatron.kernels import gated, grouped_linear, grouped_sums
from areal_lite.megatron.parallel import current_device, process_group, whole_weight


class Rows(NamedTuple):
    """The rows of t tokens, each of which has k experts, in the order of their experts."""

    order: Tensor  # int64 [t k], the index of each row in [t, k]
    places: Tensor  # int64 [t, k], the rows of each token
    ends: Tensor  # int32 [experts], where the rows of each expert end

    @classmethod
    def sort(cls, chosen: Tensor, experts: int) -> "Rows":
        """Sort the rows of the experts `chosen`, int64 [t, k] below `experts`."""
        flat = chosen.flatten()
        order = flat.argsort(stable=True)
        rows, numbers = (torch.arange(n, device=flat.device) for n in (len(flat), experts))
        places = torch.empty_like(order).scatter_(0, order, rows).view_as(chosen)
        ends = torch.searchsorted(flat[order], numbers, right=True, out_int32=True)
        return cls(order, places, ends)

    def spread(self, x: Tensor) -> Tensor:
        """Copy each token to its rows: [t, n] -> [t k, n]."""
        return _Move.apply(x, self, True)  # pyright: ignore[reportReturnType]

    def collect(self, rows: Tensor) -> Tensor:
        """Sum the rows of each token: [t k, n] -> [t, n]."""
        return _Move.apply(rows, self, False)  # pyright: ignore[reportReturnType]


class _Move(torch.autograd.Function):
    """Each direction is the gradient of the other. torch's own would round after each addition."""

    @staticmethod
    def forward(ctx, x: Tensor, rows: Rows, spread: bool) -> Tensor:
        ctx.rows, ctx.spread = rows, spread
        if spread:
            return x.index_select(0, rows.order // rows.places.shape[1])
        return x.index_select(0, rows.places.flatten()).unflatten(0, rows.places.shape).sum(1)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _Move.forward(ctx, grads[0], ctx.rows, not ctx.spread), None, None


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, ends)
        return grouped_linear(x, weight, ends)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, ends = ctx.saved_tensors
        grad, (needs_x, needs_weight, _) = grads[0].contiguous(), ctx.needs_input_grad
        return (
            grouped_linear(grad, weight.transpose(1, 2), ends) if needs_x else None,
            grouped_sums(grad, x, ends) if needs_weight else None,
            None,
        )


class Experts(MegatronModule):
    """The experts of this rank: gated MLPs, in one parameter for each of their two products.

    Biases of both products are parameters, too, where the configuration has linear biases.
    """

    def __init__(self, config: TransformerConfig):
        super().__init__(config=config)
        self.group = process_group(parallel_state.get_expert_model_parallel_group())
        self.split = process_group(parallel_state.get_expert_tensor_parallel_group())
        assert config.num_moe_experts is not None and config.moe_ffn_hidden_size is not None
        number = config.num_moe_experts // self.group.size()
        self.indices = [self.group.rank() * number + i for i in range(number)]
        width = config.moe_ffn_hidden_size // self.split.size()
        sizes: Any = dict(dtype=config.params_dtype, device=current_device())

        def made(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.empty(number, *shape, **sizes))

        # Gate and up projection. Ranks have a part of each.
        self.linear_fc1 = made(2, width, config.hidden_size)
        self.linear_fc2 = made(config.hidden_size, width)
        self.activation, self.limit = config.activation_func, config.activation_func_clamp_value
        if config.add_bias_linear:
            self.linear_fc1_bias = made(2, width)
            self.linear_fc2_bias = made(config.hidden_size)
        for name, parameter in self.named_parameters():
            whole = name == "linear_fc2_bias" and self.split.size() > 1
            set_tensor_model_parallel_attributes(parameter, not whole, 2, 1)
            # Tells Megatron which ranks have the same experts.
            parameter.allreduce = self.group.size() == 1  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """Compute weighted rows: x [n, hidden], weights [n], ends as in `Rows` -> [n, hidden]."""
        inner: Any = _GroupedLinear.apply(x, self.linear_fc1.flatten(1, 2), ends)
        own: Tensor | None = None  # [n, experts], 1 for the expert of each row
        if hasattr(self, "linear_fc1_bias"):
            numbers = torch.searchsorted(ends, torch.arange(len(x), device=x.device), right=True)
            own = x.new_zeros(len(x), len(ends)).scatter_(1, numbers[:, None], 1)
            inner = inner.addmm(own, self.linear_fc1_bias.flatten(1))
        inner = gated(inner, weights, self.activation, self.limit)
        out: Any = _GroupedLinear.apply(inner, self.linear_fc2, ends)
        if own is not None:
            # Ranks that sum their results add a part of the bias each, and all have its gradient.
            bias, part = self.linear_fc2_bias, 1 / self.split.size()
            bias = part * bias + (1 - part) * (bias - bias.detach())
            out = out.addmm(own * weights[:, None].to(out.dtype), bias)
        return out

    def single(self, name: str, stacked: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the matrices or biases of single experts in `stacked`, of parameter `name`.

        Their names count experts over the whole model, as in architectures.py.
        """
        before, _, product = name.rpartition(".")
        matrices = stacked.flatten(1, 2) if product.startswith("linear_fc1") else stacked
        kind = "bias" if product.endswith("_bias") else "weight"
        product = product.removesuffix("_bias")
        for index, matrix in zip(self.indices, matrices, strict=True):
            yield f"{before}.local_experts.{index}.{product}.{kind}", matrix

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None
    ) -> dict[str, Any]:
        layers = len(sharded_offsets)
        parts = [(group.rank(), group.size()) for group in (self.group, self.split)]
        replica = process_group(parallel_state.get_expert_data_parallel_group()).rank()
        return {
            prefix + name: ShardedTensor.from_rank_offsets(
                prefix + name,
                parameter,
                *sharded_offsets,
                (layers, *parts[0]),
                *([(layers + 2, *parts[1])] if parameter.ndim > 2 else []),
                replica_id=(0, 0 if parameter.ndim > 2 else self.split.rank(), replica),
                prepend_axis_num=layers,
            )
            for name, parameter in self.named_parameters()
        }


class Router(torch.nn.Module):
    """The router of one layer. Every rank has the whole router."""

    def __init__(self, config: TransformerConfig):
        super().__init__()
        assert config.num_moe_experts is not None
        self.top_k, self.over_all = config.moe_router_topk, config.moe_router_pre_softmax
        self.groups = config.moe_router_num_groups or 1
        self.top_groups = config.moe_router_group_topk or 1
        self.scale = config.moe_router_topk_scaling_factor
        experts = config.num_moe_experts
        self.weight = whole_weight(config, experts, config.hidden_size)
        self.bias = whole_weight(config, experts) if config.add_bias_linear else None
        self.correction = None
        if config.moe_router_score_function == "sigmoid":
            # Its update would follow the load of experts (arXiv:2408.15664), which no loss does.
            bias = torch.empty(experts, dtype=torch.float32, device=current_device())
            self.correction = torch.nn.Parameter(bias, requires_grad=False)
        self.replay: RoutingReplay | None = None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Choose experts for tokens [t, hidden]: (int64 [t, k], their weights float32 [t, k]).

        Weights are the softmax of the chosen logits, the softmax of all logits, or sigmoids divided
        by the sum of the chosen ones.
        """
        if self.correction is not None:
            scores = F.linear(x.float(), self.weight.float()).sigmoid()  # as in SGLang
        else:
            scores = F.linear(x, self.weight, self.bias).float()
            scores = scores.softmax(-1) if self.over_all else scores
        chosen = self._rank(scores.detach()).topk(self.top_k).indices
        if self.replay is not None:
            chosen = self.replay(chosen, len(self.weight))
        weights = scores.gather(1, chosen)
        if self.correction is not None:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        elif not self.over_all:
            weights = weights.softmax(-1)
        return chosen, weights if self.scale is None else weights * self.scale

    def _rank(self, scores: Tensor) -> Tensor:
        """Return what the largest ones are chosen by, [t, experts].

        Of groups of experts, those whose two best have the largest sums take part.
        """
        if self.correction is not None:
            scores = scores + self.correction
        if self.groups == 1:
            return scores
        grouped = scores.unflatten(1, (self.groups, -1))
        best = grouped.topk(2).values.sum(-1).topk(self.top_groups).indices
        others = torch.ones_like(grouped[..., :1], dtype=torch.bool).scatter(1, best[..., None], 0)
        return grouped.masked_fill(others, -torch.inf).flatten(1)


class MixtureOfExperts(MegatronModule):
    """A router, its experts and an MLP for all tokens beside them, in place of a layer's MLP."""

    def __init__(self, config: TransformerConfig):
        super().__init__(config=config)
        self.router = Router(config)
        self.experts = Experts(config)
        self.shared_experts = None  # computes every token, and may have a gate
        if config.moe_shared_expert_intermediate_size:
            group = process_group(parallel_state.get_tensor_model_parallel_group())
            layers = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            groups: Any = SimpleNamespace(tp=group)
            gate = config.moe_shared_expert_gate
            self.shared_experts = SharedExpertMLP(config, layers, gate=gate, pg_collection=groups)

    def forward(self, hidden_states: Tensor, **_) -> tuple[Tensor, None]:
        x = hidden_states.flatten(0, -2)
        chosen, weights = self.router(x)
        if self.experts.group.size() > 1:
            out = self._elsewhere(x, chosen, weights)
        elif (split := self.experts.split).size() > 1:
            every = (
                gather_from_sequence_parallel_region(y, group=split) for y in (x, chosen, weights)
            )
            out = reduce_scatter_to_sequence_parallel_region(self._here(*every), group=split)
        else:
            out = self._here(x, chosen, weights)
        out = out.view_as(hidden_states)
        if self.shared_experts is not None:
            out = out + self.shared_experts(hidden_states)
        return out, None

    def _here(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute tokens [t, hidden] with this rank's experts, which are counted from 0."""
        rows = Rows.sort(chosen, len(self.experts.indices))
        weights = weights.flatten().gather(0, rows.order)
        return rows.collect(self.experts(rows.spread(x), weights, rows.ends))

    def _elsewhere(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute tokens [t, hidden] with the experts of all ranks of the group."""
        group, own = self.experts.group, len(self.experts.indices)
        rows = Rows.sort(chosen, own * group.size())
        sent = rows.ends.diff(prepend=rows.ends.new_zeros(1))  # rows for each expert
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=group)
        # The one time that the GPU is waited for.
        to, back = torch.stack((sent, received)).view(2, group.size(), own).sum(2).tolist()
        numbers = torch.arange(own, device=x.device).repeat(group.size())
        theirs = numbers.repeat_interleave(received, output_size=sum(back))
        theirs_x = all_to_all(group, rows.spread(x), back, to)
        weights = all_to_all(group, weights.flatten().gather(0, rows.order), back, to)
        out = self._here(theirs_x, theirs[:, None], weights[:, None])
        return rows.collect(all_to_all(group, out, to, back))


class RoutingReplay:
    """The experts that one router chooses: the recorded ones (R3, arXiv:2510.11370).

    docs/training.md (Routing replay) says why, and what is replayed. A token without a recorded
    route, padding too, is routed by this model's own router.
    """

    def __init__(self, layer: int, device: torch.device):
        self.layer = layer  # among the layers of the whole model that have experts
        # [l, top_k], of the tokens that the next forward pass of this rank's router sees
        self.routes: Tensor | None = None
        # recorded routes so far, and how many of them this router would have chosen otherwise
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)

    def __call__(self, own: Tensor, experts: int) -> Tensor:
        """Return the recorded choice of `experts`, and the router's `own` where there is none.

        Both are int64 [l, top_k].
        """
        if self.routes is None:
            return own
        routes = self.routes.long()
        recorded = routes[:, :1] < experts
        changed = recorded[:, 0] & (own.sort(dim=1).values != routes).any(dim=1)
        self.counts += torch.stack((recorded.sum(), changed.sum()))
        return torch.where(recorded, routes, own)


def install_replay(chunk: Any, device: torch.device) -> list[RoutingReplay]:
    """Let the routers of a chunk replay. Raises ValueError for a model without experts."""
    if chunk.config.num_moe_experts is None:
        raise ValueError(
            "algo.routing_replay=true is for a mixture of experts, and this model has none: "
            "set it to false"
        )
    replays, sparse = [], sparse_layers(chunk.config)
    for layer in chunk.decoder.layers:
        if sparse[layer.layer_number - 1]:
            number = sum(sparse[: layer.layer_number]) - 1
            layer.mlp.router.replay = RoutingReplay(number, device)
            replays.append(layer.mlp.router.replay)
    return replays


def sparse_layers(config: TransformerConfig) -> list[bool]:
    """Return for each layer of the model whether it has experts."""
    if isinstance(config.moe_layer_freq, list):
        return [each == 1 for each in config.moe_layer_freq]
    return [config.num_moe_experts is not None] * config.num_layers


def changed_share(chunks: Sequence[Any]) -> float:
    """Return the share of recorded routes that the routers of all ranks would not have chosen.

    It is of the passes since the last call; NaN without recorded routes. Every rank calls it.
    """
    replays = [replay for chunk in chunks for replay in chunk.replays]
    none = torch.zeros(2, dtype=torch.int64, device=current_device())  # a stage of dense layers
    counts = torch.stack([none, *(replay.counts for replay in replays)]).sum(0)
    dist.all_reduce(counts)
    for replay in replays:
        replay.counts.zero_()
    recorded, changed = counts.tolist()
    return changed / recorded if recorded else float("nan")
