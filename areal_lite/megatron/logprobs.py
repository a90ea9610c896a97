"""Log-probability of given tokens and entropy, straight from the last hidden states: the full logits never exist.

With x = hidden @ weight^T / temperature and logZ = logsumexp(x) over the whole vocabulary:

    logprob = x[target] - logZ          d logprob / d x = onehot(target) - p
    entropy = logZ - sum(p x)           d entropy / d x = -p (log p + entropy)

Forward and backward go over the tokens a chunk at a time. Backward computes the logits of a chunk again, except for those of the first
chunks (`KEPT` logits), so memory does not grow with tokens x vocabulary. Each rank of the tensor-parallel group holds a slice of the
vocabulary: one all-gather of four numbers per token makes the results equal on all ranks, one all-reduce the gradient of the hidden states.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK = 1024  # tokens
KEPT = 1 << 25  # logits kept for backward: 128 MiB in float32


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
    """Log-prob of `targets` and entropy of softmax(hidden @ weight^T / temperature): float32 [t], nats. Both carry gradients.

    hidden [t, h]: the same on all ranks of the tensor-parallel `group` (None: no slices), and so is its gradient, already summed over it.
    weight [V / tp, h]: this rank's rows of the LM head. Its gradient adds up in float32, under Megatron's DDP right in `main_grad`.
    targets int64 [t]: ids of the whole vocabulary. Ids from `vocab_size` on are padding and have probability 0.
    fp32: compute the head in float32, whatever the dtype (float64 stays). Otherwise matrix products have the dtype of the weight.
    chunk: how many tokens at a time.
    """
    first = len(weight) * (group.rank() if group is not None else 0)
    width = len(weight) if vocab_size is None else min(max(vocab_size - first, 0), len(weight))
    chunk = max(min(chunk, len(hidden)), 1)
    keep = KEPT // max(chunk * width, 1) if torch.is_grad_enabled() else 0
    return _LmLogProbs.apply(
        hidden, weight, targets - first, temperature, group, width, fp32, chunk, keep
    )


class _LmLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, local, temperature, group, width, fp32, chunk, keep):
        head = _head(weight, width, fp32)
        owned = (local >= 0) & (local < width)
        column = torch.where(owned, local, 0)
        # Of this rank's logits: the peak, and relative to it the sum of exp, the sum of x exp, and the target's x.
        # A rank without columns adds nothing: sums of zero below any other peak.
        stats = torch.zeros(
            4,
            len(hidden),
            dtype=torch.promote_types(hidden.dtype, torch.float32),
            device=hidden.device,
        )
        peak, total, weighted, chosen = stats
        peak.fill_(torch.finfo(stats.dtype).min)
        kept = []
        for rows in _chunks(len(hidden), width, chunk):
            x = _logits(hidden[rows], head, temperature, stats.dtype)
            torch.amax(x, -1, out=peak[rows])
            x.sub_(peak[rows, None])
            chosen[rows] = x.gather(-1, column[rows, None])[:, 0]
            e = x.exp()
            torch.sum(e, -1, out=total[rows])
            torch.sum(e.mul_(x), -1, out=weighted[rows])
            if len(kept) < keep:
                kept.append(x)
            del x, e  # before the next chunk needs as much
        chosen.masked_fill_(~owned, -math.inf)
        shift, total, weighted, chosen = _combine(stats, group)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(hidden, weight, column, owned, peak, log_total - shift, entropy)
        ctx.kept, ctx.options = kept, (temperature, group, width, fp32, chunk)
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_logprob: Tensor | None, grad_entropy: Tensor | None):
        hidden, weight, column, owned, peak, log_z, entropy = (
            ctx.saved_tensors
        )  # log_z is relative to this rank's peak
        temperature, group, width, fp32, chunk = ctx.options
        kept, ctx.kept = ctx.kept[::-1], []
        grad_logprob = (
            torch.zeros_like(entropy) if grad_logprob is None else grad_logprob / temperature
        )
        grad_entropy = None if grad_entropy is None else grad_entropy / temperature
        grad_chosen = grad_logprob * owned
        head = _head(weight, width, fp32)
        grad_hidden = torch.zeros(hidden.shape, dtype=head.dtype, device=hidden.device)
        grad_weight = _gradient_buffer(weight) if ctx.needs_input_grad[1] else None
        for rows in _chunks(len(hidden), width, chunk):
            if kept:
                logp = kept.pop().sub_(log_z[rows, None])
            else:
                logp = _logits(hidden[rows], head, temperature, peak.dtype).sub_(
                    peak[rows, None] + log_z[rows, None]
                )
            if grad_entropy is None:
                slope = logp.exp_().mul_(-grad_logprob[rows, None])
            else:
                p = logp.exp()
                slope = (
                    logp.add_(entropy[rows, None])
                    .mul_(-grad_entropy[rows, None])
                    .sub_(grad_logprob[rows, None])
                    .mul_(p)
                )
                del p
            slope.scatter_add_(-1, column[rows, None], grad_chosen[rows, None])
            slope = slope.to(head.dtype)
            torch.mm(slope, head, out=grad_hidden[rows])
            if grad_weight is not None:
                _add_product(grad_weight[:width], slope.t(), hidden[rows].to(head.dtype))
            del logp, slope
        if group is not None and group.size() > 1:
            dist.all_reduce(grad_hidden, group=group)
        return grad_hidden.to(hidden.dtype), _result(weight, grad_weight), *[None] * 7


def _chunks(tokens: int, width: int, size: int) -> list[slice]:
    return (
        [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]
        if width
        else []
    )


def _head(weight: Tensor, width: int, fp32: bool) -> Tensor:
    """The rows of `weight` that are tokens, in the dtype of the matrix products."""
    return (
        weight[:width].to(torch.promote_types(weight.dtype, torch.float32))
        if fp32
        else weight[:width]
    )


def _logits(hidden: Tensor, head: Tensor, temperature: float, dtype: torch.dtype) -> Tensor:
    x = torch.mm(hidden.to(head.dtype), head.t()).to(dtype)
    return x if temperature == 1.0 else x.div_(temperature)


def _combine(
    stats: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """From each rank's (peak, sum of exp, sum of x exp, target's x), relative to its own peak, those of the whole vocabulary.

    Relative to the highest peak; first of the four is this rank's peak.
    """
    every = stats
    if group is not None and group.size() > 1:
        every = stats.new_empty(group.size() * 4, stats.shape[1])
        dist.all_gather_into_tensor(every, stats, group=group)
    peak, total, weighted, chosen = every.view(-1, *stats.shape).unbind(1)
    highest = peak.amax(0)
    shift = peak - highest
    scale = shift.exp()
    total, weighted = total * scale, (weighted + total * shift) * scale
    return stats[0] - highest, total.sum(0), weighted.sum(0), (chosen + shift).amax(0)


def _gradient_buffer(weight: Tensor) -> Tensor:
    """What products are added to, in at least float32: Megatron's own buffer where there is one."""
    if hasattr(weight, "main_grad"):
        return weight.main_grad
    return torch.zeros(
        weight.shape, dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device
    )


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def _result(weight: Tensor, grad: Tensor | None) -> Tensor | None:
    """What autograd gets. Megatron's hook must see some gradient, which it ignores, or for tied weights adds: zeros, then."""
    if grad is None or not hasattr(weight, "main_grad"):
        return None if grad is None else grad.to(weight.dtype)
    weight.grad_added_to_main_grad = True
    return (
        torch.zeros_like(weight)
        if getattr(weight, "zero_out_wgrad", False)
        else torch.empty_like(weight)
    )
