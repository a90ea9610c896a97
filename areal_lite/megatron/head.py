"""From hidden states to per-token results: a log-prob and an entropy, or a value.

A head is called on the last pipeline stage as head(chunk, hidden, following):

* hidden: [l / tp, 1, hidden], this tensor-parallel rank's share,
* following: int64 [l], the token after each.

It returns a tuple of float32 [l] about `following`, equal on all tensor-parallel ranks.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from areal_lite.megatron.logprobs import lm_logprobs
from areal_lite.megatron.model import Backbone
from areal_lite.megatron.parallel import current_device, process_group

Head = Callable[[Backbone, Tensor, Tensor], tuple[Tensor, ...]]


def language_head(temperature: float, vocab_size: int, fp32: bool) -> Head:
    """Make the head that returns (log-prob of the token, entropy of its distribution), in nats.

    fp32: compute the output layer in float32.
    """

    def head(chunk: Backbone, hidden: Tensor, following: Tensor) -> tuple[Tensor, Tensor]:
        return lm_logprobs(
            _whole_sequence(hidden)[:, 0],
            chunk.output_weight(),
            following,
            temperature,
            process_group(parallel_state.get_tensor_model_parallel_group()),
            vocab_size=vocab_size,
            fp32=fp32,
        )

    return head


class ValueLayer(torch.nn.Module):
    """Map a hidden state to one number, in place of the output layer.

    It is zero before training, and the same on all tensor-parallel ranks.
    """

    def __init__(self, config):
        super().__init__()
        self.weight = torch.nn.Parameter(
            torch.zeros(1, config.hidden_size, dtype=config.params_dtype, device=current_device())
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden.float(), self.weight.float())


def value_head(chunk: Backbone, hidden: Tensor, following: Tensor) -> tuple[Tensor]:
    """Return the value of the state before the token."""
    return (chunk.output_layer(_whole_sequence(hidden))[:, 0, 0],)


def _whole_sequence(hidden: Tensor) -> Tensor:
    """Return [l, 1, hidden] on every tensor-parallel rank.

    Each rank must then find the same gradient of it.
    """
    return gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
