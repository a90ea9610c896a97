"""Log-probability of given tokens and entropy, from vocabulary-parallel logits.

With x = logits / temperature and logZ = logsumexp(x) over the whole vocabulary:

    logprob = x[target] - logZ          d logprob / d x = onehot(target) - p
    entropy = logZ - sum(p x)           d entropy / d x = -p (log p + entropy)

Each rank of the tensor-parallel group holds the logits of a slice of the vocabulary; two all-reduces make both results equal on all ranks.
Forward and backward go over `CHUNK` tokens at a time, so only a chunk ever exists in float32; what stays alive are the logits themselves.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

CHUNK = 1024  # tokens


class _VocabParallelLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits: Tensor, targets: Tensor, temperature: float, group: dist.ProcessGroup | None, chunk: int):
        tokens, width = logits.shape
        parallel = group is not None and group.size() > 1
        local = targets - width * group.rank() if parallel else targets
        owned = (local >= 0) & (local < width)
        local = local.clamp(0, width - 1)
        peak = logits.amax(-1).float() / temperature
        if parallel:
            dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
        # Relative to the peak: the sum of exp, the sum of x exp, and the target's x on the rank that owns it.
        total, weighted, chosen = sums = torch.empty(3, tokens, device=logits.device)
        for rows in _chunks(tokens, chunk):
            x = (logits[rows].float() / temperature).sub_(peak[rows, None])
            chosen[rows] = x.gather(-1, local[rows, None])[:, 0] * owned[rows]
            e = x.exp()
            torch.sum(e, -1, out=total[rows])
            torch.sum(e.mul_(x), -1, out=weighted[rows])
        if parallel:
            dist.all_reduce(sums, group=group)
        log_total = total.log()
        entropy = log_total - weighted / total
        ctx.save_for_backward(logits, local, owned, peak + log_total, entropy)
        ctx.temperature, ctx.chunk = temperature, chunk
        ctx.set_materialize_grads(False)
        return chosen - log_total, entropy

    @staticmethod
    def backward(ctx, grad_logprob: Tensor | None, grad_entropy: Tensor | None):
        logits, local, owned, log_z, entropy = ctx.saved_tensors
        grad = torch.empty_like(logits)
        for rows in _chunks(len(logits), ctx.chunk):
            logp = (logits[rows].float() / ctx.temperature).sub_(log_z[rows, None])
            p = logp.exp()
            slope = torch.zeros_like(p) if grad_entropy is None else logp.add_(entropy[rows, None]).mul_(-grad_entropy[rows, None])
            if grad_logprob is not None:
                slope.sub_(grad_logprob[rows, None])
            slope.mul_(p)
            if grad_logprob is not None:
                slope.scatter_add_(-1, local[rows, None], (grad_logprob[rows] * owned[rows])[:, None])
            grad[rows] = slope.div_(ctx.temperature)
        return grad, None, None, None, None


def _chunks(tokens: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, tokens)) for start in range(0, tokens, size)]


def logprobs_and_entropy(
    logits: Tensor, targets: Tensor, temperature: float = 1.0, group: dist.ProcessGroup | None = None, chunk: int = CHUNK
) -> tuple[Tensor, Tensor]:
    """Log-prob of `targets` (int64 [T], ids of the whole vocabulary) and entropy of softmax(logits / temperature): float32 [T], nats.

    logits [T, V / tp]: this rank's slice of the vocabulary, of any floating dtype; `group` is the tensor-parallel group (None: no slices).
    Both results carry gradients.
    """
    return _VocabParallelLogProbs.apply(logits, targets, temperature, group, chunk)
