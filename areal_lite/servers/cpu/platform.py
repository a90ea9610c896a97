"""The out-of-tree platform that SGLang runs on when there is no GPU: device queries by psutil, every operator in plain torch."""

from __future__ import annotations

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.interface import PlatformEnum, SRTPlatform

# SGLang asks by this name, in several places, whether Triton kernels may run; any other name would need a GPU for them.
ATTENTION_BACKEND = "torch_native"


class CpuPlatform(SRTPlatform, CpuDeviceMixin):
    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    # SRTPlatform precedes the mixin and declares these two without a body.
    get_device_total_memory = CpuDeviceMixin.get_device_total_memory
    get_current_memory_usage = CpuDeviceMixin.get_current_memory_usage

    def init_backend(self) -> None:
        """Called once in each worker, before a model runner exists: put our attention where SGLang looks for it."""
        from sglang.srt.layers.attention.attention_registry import register_attention_backend

        from areal_lite.servers.cpu.attention import PagedCpuAttention

        register_attention_backend(ATTENTION_BACKEND)(PagedCpuAttention)

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

        return PagedTokenToKVPoolAllocator
