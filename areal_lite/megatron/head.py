"""From hidden states to what is wanted of each token: its log-prob and the entropy before it, or its value.

A head is called on the last pipeline stage as head(chunk, hidden, following): hidden [l, 1, hidden] (with sequence parallelism this rank's
share of them), following int64 [l], the token after each. It returns a tuple of float32 [l], equal on all tensor-parallel ranks, about
`following`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from areal_lite.megatron.logprobs import lm_logprobs
from areal_lite.megatron.model import Backbone, device

Head = Callable[[Backbone, Tensor, Tensor], tuple[Tensor, ...]]


def language_head(temperature: float, vocab_size: int, fp32: bool) -> Head:
    """The head that gives (log-prob of the token, entropy of the distribution it is drawn from), in nats. fp32: output layer in float32."""
    return partial(_language, temperature, vocab_size, fp32)


def _language(
    temperature: float,
    vocab_size: int,
    fp32: bool,
    chunk: Backbone,
    hidden: Tensor,
    following: Tensor,
) -> tuple[Tensor, Tensor]:
    hidden, group = (
        whole_sequence(chunk, hidden)[:, 0],
        parallel_state.get_tensor_model_parallel_group(),
    )
    return lm_logprobs(
        hidden,
        chunk.output_weight(),
        following,
        temperature,
        group,
        vocab_size=vocab_size,
        fp32=fp32,
    )


class ValueLayer(torch.nn.Module):
    """One number per token, in place of the output layer; zero before training. The same on all tensor-parallel ranks."""

    def __init__(self, config):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=device())
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.float(), self.weight.float())


def value_head(chunk: Backbone, hidden: Tensor, following: Tensor) -> tuple[Tensor]:
    """The head that gives the value of the state before the token."""
    return (chunk.output_layer(whole_sequence(chunk, hidden))[:, 0, 0],)


def whole_sequence(chunk: Backbone, hidden: Tensor) -> Tensor:
    """[l, 1, hidden] on every tensor-parallel rank, of which each must find the same gradient."""
    if not chunk.config.sequence_parallel:
        return hidden
    return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
