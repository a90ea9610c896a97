"""An exponential moving average of a model's weights: the averaged policy of PPO-EWMA.

With theta_0 the weights before training, theta_i those after update i, and a decay b, the average
after n updates is

    sum_i b^(n - i) theta_i / W_n,    W_n = sum_i b^(n - i),    i = 0 ... n

(Hilton et al., arXiv 2110.00641). The division by W_n corrects the bias of the first updates. Late
in training the average is as old as the weights of b / (1 - b) updates ago.

Each rank averages its own parameters, in float32. Ranks with equal parameters have equal averages.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.dist_checkpointing.optimizer import (
    get_param_id_to_sharded_param_map,
    make_sharded_optimizer_tensor,
)
from torch.nn import Parameter


class WeightAverage:
    """The average of `parameters`, which are updated in place.

    tensors: float32, one for each parameter, in the same order.
    weight: W_n.
    """

    def __init__(self, parameters: Iterable[Parameter], decay: float):
        self._parameters = list(parameters)
        self._decay = decay
        self.tensors = [p.detach().to(torch.float32, copy=True) for p in self._parameters]
        self.weight = 1.0

    @torch.no_grad()
    def update(self) -> None:
        """Add the present weights to the average."""
        self.weight = self._decay * self.weight + 1.0
        for average, parameter in zip(self.tensors, self._parameters):
            average.lerp_(parameter.float(), 1.0 / self.weight)

    @contextmanager
    def as_weights(self) -> Iterator[None]:
        """Let the model compute with the average inside the block, in its own dtype."""
        own = [parameter.data for parameter in self._parameters]
        for parameter, average in zip(self._parameters, self.tensors):
            parameter.data = average.to(parameter.dtype)
        try:
            yield
        finally:
            for parameter, data in zip(self._parameters, own):
                parameter.data = data

    def to(self, device: torch.device) -> None:
        """Move the average. `update` and `as_weights` need it where the parameters are."""
        self.tensors = [tensor.to(device) for tensor in self.tensors]

    def sharded_state(self, model: dict[str, Any]) -> dict[str, Any]:
        """Return the state to be saved, or to be filled. `model` is the sharded model's state."""
        sharded = get_param_id_to_sharded_param_map(model, iter(self._parameters))
        return {
            "weight": self.weight,
            "tensors": {
                str(i): make_sharded_optimizer_tensor(sharded[i], tensor, prefix="average")
                for i, tensor in enumerate(self.tensors)
            },
        }

    @torch.no_grad()
    def restore(self, state: dict[str, Any]) -> None:
        """Set the average to a loaded state."""
        self.weight = state["weight"]
        for i, tensor in enumerate(self.tensors):
            tensor.copy_(state["tensors"][str(i)])
