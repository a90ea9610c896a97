"""A plugin of SGLang for servers of tests: plain memory where page-locked memory is asked for.

SGLang keeps adapters in page-locked memory, which torch refuses where there is no GPU.
"""

import functools
from collections.abc import Callable

import torch


def install() -> None:
    """Let torch make tensors in plain memory in this process."""
    torch.Tensor.pin_memory = lambda tensor, *_: tensor
    for name in ("empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, _pageable(getattr(torch, name)))


def _pageable(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args, pin_memory: bool = False, **options) -> torch.Tensor:
        return make(*args, **options)

    return made
