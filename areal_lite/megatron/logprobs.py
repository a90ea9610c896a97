"""From the last hidden states to per-token results: log-prob and entropy, or a value.

A head is called on the last pipeline stage as head(chunk, hidden, rows, targets): hidden is
[l / tp, 1, hidden], this tensor-parallel rank's share; rows is int64 [r], the tokens whose hidden
states are asked for, and targets int64 [r], the token after each. It returns a tuple of float32 [r]
about `targets`, equal on all tensor-parallel ranks.

The full logits never exist. With x = hidden @ weight^T / temperature, p = softmax(x) and
logZ = logsumexp(x) over the whole vocabulary:

    logprob = x[target] - logZ          d logprob / d x = onehot(target) - p
    entropy = logZ - sum(p x)           d entropy / d x = -p (log p + entropy)

Each rank of the tensor-parallel group holds a slice of the vocabulary.

Forward:
    Step 1. Compute the logits of a chunk of tokens on this rank's slice.
    Step 2. Reduce them to four numbers for each token: the peak, and relative to the peak the sum
            of exp(x), the sum of x exp(x), and the target's x. Keep the logits of the first chunks.
    Step 3. All-gather the four numbers and combine them over the slices.
Backward:
    Step 4. For each chunk take the kept logits or compute them again; turn them into the gradient.
    Step 5. All-reduce the gradient of the hidden states over the slices.

The number of logits that are kept is bounded, so memory does not grow with tokens x vocabulary. A
GPU keeps as many as its free memory allows: computing them again costs more than keeping them.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.autograd.function import once_differentiable

from areal_lite.megatron.kernels import fused, kernels
from areal_lite.megatron.model import Backbone
from areal_lite.megatron.parallel import current_device, process_group

CHUNK = 1024  # tokens

Head = Callable[[Backbone, Tensor, Tensor, Tensor], tuple[Tensor, ...]]


class _Options(NamedTuple):
    temperature: float
    group: dist.ProcessGroup | None
    width: int  # rows of this rank's slice that are tokens
    chunk: int  # tokens
    keep: int  # chunks whose logits are kept
    inputs: torch.dtype  # of both matrices of a product
    logits: torch.dtype  # of the result in forward
    wide: bool  # products of half-precision matrices are added in float32


def choose_products(weight: torch.dtype, fp32: bool) -> tuple[torch.dtype, torch.dtype, bool]:
    """Choose inputs, logits and wide of `_Options` for a weight of this dtype.

    A GPU multiplies half-precision matrices as they are and adds in float32, at full speed, as
    SGLang does for its float32 output layer. On a CPU, torch must convert the matrices.
    """
    exact = torch.promote_types(weight, torch.float32)
    wide = kernels.wide_products and weight != exact
    logits = exact if fp32 else weight
    return weight if wide else logits, logits, wide


def lm_logprobs(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float = 1.0,
    group: dist.ProcessGroup | None = None,
    *,
    vocab_size: int | None = None,
    fp32: bool = False,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """Compute log-probs of `targets` and entropies of softmax(hidden @ weight^T / temperature).

    Both are float32 [t], in nats, and carry gradients.

    Args:
        hidden: [t, h], the same on all ranks of `group`. So is its gradient, already summed.
        weight: [V / tp, h], this rank's rows of the output layer. Its gradient adds up in float32,
            under Megatron's DDP right in `main_grad`.
        targets: int64 [t], ids of the whole vocabulary.
        group: the tensor-parallel ranks; None for a weight that is not split.
        vocab_size: ids from here on are padding and have probability 0.
        fp32: compute logits in float32, whatever the dtype of the weight (float64 stays).
        chunk: tokens computed at a time.
    """
    first = len(weight) * (group.rank() if group is not None else 0)
    width = len(weight) if vocab_size is None else min(max(vocab_size - first, 0), len(weight))
    chunk = max(min(chunk, len(hidden)), 1)
    keep = 0
    if torch.is_grad_enabled():
        kept = kernels.logits_to_keep(weight.device, chunk * width)
        keep = kept // max(chunk * width, 1)
    products = choose_products(weight.dtype, fp32)
    options = _Options(temperature, group, width, chunk, keep, *products)
    return _LmLogProbs.apply(hidden, weight, targets - first, options)


class _LmLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, local: Tensor, options: _Options):
        """Compute the results. `local`: targets, counted from the first row of this slice."""
        head = _head(weight, options)
        owned = (local >= 0) & (local < options.width)
        column = torch.where(owned, local, 0)
        # A rank without columns adds nothing: its sums are zero and its peak is below any other.
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        stats = torch.zeros(4, len(hidden), dtype=dtype, device=hidden.device)
        peak, sum_exp, sum_x_exp, target_x = stats
        peak.fill_(torch.finfo(dtype).min)
        kept = []
        for rows in _chunks(len(hidden), options):
            # Step 1.
            x = _logits(hidden[rows], head, options, dtype)
            # Step 2.
            peak[rows], sum_exp[rows], sum_x_exp[rows], target_x[rows] = _reduce(x, column[rows])
            if len(kept) < options.keep:
                kept.append(x)
            del x  # before the next chunk needs as much
        target_x.masked_fill_(~owned, -math.inf)
        # Step 3.
        shift, sum_exp, sum_x_exp, target_x = _combine(stats, options.group)
        log_sum = sum_exp.log()
        entropy = log_sum - sum_x_exp / sum_exp
        ctx.save_for_backward(hidden, weight, column, owned, peak, log_sum - shift, entropy)
        ctx.kept = kept
        ctx.options = options
        ctx.set_materialize_grads(False)
        return target_x - log_sum, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor | None):  # pyright: ignore[reportIncompatibleMethodOverride]
        # log_z is relative to this rank's peak.
        hidden, weight, column, owned, peak, log_z, entropy = ctx.saved_tensors
        options = ctx.options
        kept, ctx.kept = ctx.kept[::-1], []
        grad_logprob, grad_entropy = (
            None if grad is None else grad / options.temperature for grad in grads
        )
        if grad_logprob is None:
            grad_logprob = torch.zeros_like(entropy)
        grad_target = grad_logprob * owned
        head = _head(weight, options)
        grad_hidden = torch.zeros(hidden.shape, dtype=head.dtype, device=hidden.device)
        grad_weight = _gradient_buffer(weight) if ctx.needs_input_grad[1] else None
        for rows in _chunks(len(hidden), options):
            # Step 4.
            if kept:
                x, shift = kept.pop(), log_z[rows]
            else:
                x = _logits(hidden[rows], head, options, peak.dtype)
                shift = peak[rows] + log_z[rows]
            factors = grad_logprob[rows], grad_target[rows], column[rows]
            if grad_entropy is not None:
                factors += grad_entropy[rows], entropy[rows]
            slope = _slope(x, shift, head.dtype, *factors)
            grad_hidden[rows] = kernels.linear(slope, head.t())
            if grad_weight is not None:
                product = slope.t(), hidden[rows].to(head.dtype)
                _add_product(grad_weight[: options.width], *product, options.wide)
            del x, slope
        # Step 5.
        if options.group is not None and options.group.size() > 1:
            dist.all_reduce(grad_hidden, group=options.group)
        return grad_hidden.to(hidden.dtype), _weight_gradient(weight, grad_weight), None, None


@fused
def _reduce(x: Tensor, column: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Subtract the peaks from logits x [c, V / tp] in place, and return their four numbers [c]."""
    peak = x.amax(-1)
    x.sub_(peak[:, None])
    target_x = x.gather(-1, column[:, None])[:, 0]
    e = x.exp()
    sum_exp = e.sum(-1)
    return peak, sum_exp, e.mul_(x).sum(-1), target_x


@fused
def _slope(
    x: Tensor,
    shift: Tensor,
    dtype: torch.dtype,
    grad_logprob: Tensor,
    grad_target: Tensor,
    column: Tensor,
    grad_entropy: Tensor | None = None,
    entropy: Tensor | None = None,
) -> Tensor:
    """Compute the gradient of the logits, [c, V / tp]. Their log-probs are x - shift; x is lost.

    grad_target: the gradient of the log-prob where the target, `column`, is this rank's, else 0.
    """
    logp = x.sub_(shift[:, None])
    if grad_entropy is None or entropy is None:
        slope = logp.exp_().mul_(-grad_logprob[:, None])
    else:
        p = logp.exp()
        slope = logp.add_(entropy[:, None]).mul_(-grad_entropy[:, None])
        slope.sub_(grad_logprob[:, None]).mul_(p)
    target = slope.gather(-1, column[:, None]) + grad_target[:, None]
    return slope.to(dtype).scatter_(-1, column[:, None], target.to(dtype))


def _chunks(tokens: int, options: _Options) -> list[slice]:
    if not options.width:
        return []
    starts = range(0, tokens, options.chunk)
    return [slice(start, min(start + options.chunk, tokens)) for start in starts]


def _head(weight: Tensor, options: _Options) -> Tensor:
    """Return the rows of `weight` that are tokens, in the dtype of the matrix products."""
    return weight[: options.width].to(options.inputs)


def _logits(hidden: Tensor, head: Tensor, options: _Options, dtype: torch.dtype) -> Tensor:
    hidden = hidden.to(head.dtype)
    if options.logits == head.dtype:
        x = kernels.linear(hidden, head).to(dtype)
    else:
        x = torch.mm(hidden, head.t(), out_dtype=dtype)
    return x if options.temperature == 1.0 else x.div_(options.temperature)


def _combine(
    stats: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Combine the four numbers of each rank, relative to its own peak, over the vocabulary.

    Returns them relative to the highest peak; the first is this rank's peak.
    """
    every = stats
    if group is not None and group.size() > 1:
        every = stats.new_empty(group.size() * 4, stats.shape[1])
        dist.all_gather_into_tensor(every, stats, group=group)
    peak, sum_exp, sum_x_exp, target_x = every.view(-1, *stats.shape).unbind(1)
    highest = peak.amax(0)
    shift = peak - highest
    scale = shift.exp()
    sum_x_exp = (sum_x_exp + sum_exp * shift) * scale
    sum_exp = sum_exp * scale
    return stats[0] - highest, sum_exp.sum(0), sum_x_exp.sum(0), (target_x + shift).amax(0)


def _gradient_buffer(weight: Tensor) -> Tensor:
    """Return the buffer, of at least float32, that products are added to."""
    main_grad = getattr(weight, "main_grad", None)  # Megatron's own
    if main_grad is not None:
        return main_grad
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return torch.zeros(weight.shape, dtype=dtype, device=weight.device)


def _add_product(total: Tensor, a: Tensor, b: Tensor, wide: bool) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif wide:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def _weight_gradient(weight: Tensor, grad: Tensor | None) -> Tensor | None:
    """Return the gradient for autograd.

    Where it is already in `main_grad`, Megatron's hook must still see some gradient, which it
    ignores, or, for tied weights, adds; then it must be zero.
    """
    if grad is None:
        return None
    if not hasattr(weight, "main_grad"):
        return grad.to(weight.dtype)
    weight.grad_added_to_main_grad = True  # pyright: ignore[reportAttributeAccessIssue]
    zero = getattr(weight, "zero_out_wgrad", False)
    return torch.zeros_like(weight) if zero else torch.empty_like(weight)


def lm_head(
    chunk: Backbone,
    hidden: Tensor,
    rows: Tensor,
    targets: Tensor,
    temperature: float,
    vocab_size: int,
    fp32: bool,
) -> tuple[Tensor, Tensor]:
    """Return (log-prob of the token, entropy of its distribution), in nats; see `lm_logprobs`."""
    hidden, weight = _whole_sequence(hidden)[:, 0].index_select(0, rows), chunk.output_weight()
    group = process_group(parallel_state.get_tensor_model_parallel_group())
    options: Any = {"vocab_size": vocab_size, "fp32": fp32}
    return lm_logprobs(hidden, weight, targets, temperature, group, **options)


class ValueLayer(torch.nn.Module):
    """Map a hidden state to one number, zero before training, in place of the output layer."""

    def __init__(self, config):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=current_device())
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.float(), self.weight.float())


def value_head(chunk: Backbone, hidden: Tensor, rows: Tensor, targets: Tensor) -> tuple[Tensor]:
    """Return the value of each state."""
    return (chunk.output_layer(_whole_sequence(hidden))[rows, 0, 0],)


def _whole_sequence(hidden: Tensor) -> Tensor:
    """Return [l, 1, hidden] on every tensor-parallel rank.

    Each rank must then find the same gradient of it.
    """
    return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
