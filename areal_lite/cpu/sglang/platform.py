"""The out-of-tree platform for SGLang without a GPU: psutil and plain torch."""

from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

# Under any other name SGLang would run Triton kernels, which need a GPU.
ATTENTION_BACKEND = "torch_native"


class CpuPlatform(SRTPlatform, CpuDeviceMixin):
    """The CPU as SGLang sees it."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    # SRTPlatform precedes the mixin and declares these two without a body.
    get_device_total_memory = CpuDeviceMixin.get_device_total_memory
    get_current_memory_usage = CpuDeviceMixin.get_current_memory_usage

    def init_backend(self) -> None:
        """Register attention and operators: called in each worker before its model runner."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend
        from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS

        from areal_lite.cpu.sglang.attention import PagedCpuAttention
        from areal_lite.cpu.sglang.operators import register_operators

        register_attention_backend(ATTENTION_BACKEND)(PagedCpuAttention)
        register_operators(self.get_dispatch_key_name())
        # SGLang keeps routes in host memory, which it would register with CUDA.
        ALLOC_MEMORY_FUNCS["cpu"] = _host_memory

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        class Pool(MHATokenToKVPool):
            """The cache of keys and values; with drafts SGLang would move them by Triton."""

            def _init_kv_copy_and_warmup(self) -> None:
                self._kv_copy_config = None

        return Pool

    def get_mla_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

        class LatentPool(MLATokenToKVPool):
            """The cache of short vectors; SGLang gives it a size for another kind of attention."""

            def __init__(self, *args: Any, index_head_dim: Any = None, **named: Any) -> None:
                super().__init__(*args, **named)

        return LatentPool

    def get_paged_allocator_cls(self) -> type:
        from areal_lite.cpu.sglang.attention import CpuPageAllocator

        return CpuPageAllocator


def _host_memory(dims: tuple[int, ...], dtype: torch.dtype, *_: Any, **__: Any) -> torch.Tensor:
    return torch.empty(dims, dtype=dtype)
