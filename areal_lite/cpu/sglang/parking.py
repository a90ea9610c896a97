"""Parked servers without a GPU: they give host memory back (areal_lite/weights/turns.py)."""

from typing import Any

import torch
from sglang.srt.utils.torch_memory_saver_adapter import _TorchMemorySaverAdapterNoop

from areal_lite.cpu.sglang.decoder import packed

_CACHES = ("k_buffer", "v_buffer", "kv_buffer")


class HostMemory(_TorchMemorySaverAdapterNoop):
    """The memory of a server process, of which SGLang says when to give it back.

    As on a GPU, what was in it is lost: it comes back as NaN.
    """

    runner: Any = None  # the ModelRunner whose memory it is

    def __init__(self) -> None:
        self._shapes: dict[str, list[torch.Size]] = {}

    def pause(self, tag: str) -> None:
        """Free the weights, or the cache."""
        packed.clear()  # copies of weights
        self._shapes[tag] = [tensor.shape for tensor in self._tensors(tag)]
        for tensor in self._tensors(tag):
            tensor.data = tensor.new_empty(0)

    def resume(self, tag: str) -> None:
        """Allocate the memory again, filled with NaN."""
        for tensor, shape in zip(self._tensors(tag), self._shapes.pop(tag), strict=True):
            tensor.data = tensor.new_full(shape, torch.nan)

    def _tensors(self, tag: str) -> list[torch.Tensor]:
        if tag == "weights":
            return list(self.runner.model.parameters())
        pool = self.runner.token_to_kv_pool
        return [tensor for name in _CACHES for tensor in getattr(pool, name, ())]


memory = HostMemory()


def adapter(enable: bool) -> HostMemory:
    return memory


def know_runner(self: Any) -> None:
    """Let `memory` be that of a ModelRunner."""
    self.memory_saver_adapter, memory.runner = memory, self
