"""SGLang's torch attention backend, with its Python loops replaced by one kernel.

The result is that of SGLang's `TorchNativeAttnBackend`: softmax(scale · q Kᵀ) V, causal, with
grouped queries, for any mix of lengths, cached prefixes and chunks. Decoding is the case of one
query token per request. Layers may have a window and sinks. Everything else than causal
self-attention (encoders) goes to the parent class.

It reads pages of the KV cache, each of some consecutive tokens of one request: the larger a page,
the more rarely attention waits for memory. Requests share whole pages of a prompt only.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.utils import get_num_new_pages
from torch import Tensor

from areal_lite.cpu.kernels.paged_attention import PAGE, paged_attention

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


_ALL = 2**62  # a window over all tokens
_NO_SINKS = np.empty(0, np.float32)


class AttentionSpans(NamedTuple):
    """Query token t attends to the first `lengths[t]` slots in row `rows[t]` of `req_to_token`.

    Both are int64 [tokens], the same for every layer.
    """

    rows: np.ndarray
    lengths: np.ndarray

    @classmethod
    def of(cls, batch: ForwardBatch) -> AttentionSpans:
        if batch.forward_mode.is_decode():
            return cls(batch.req_pool_indices.numpy(), batch.seq_lens.numpy())
        assert batch.extend_seq_lens is not None
        counts = batch.extend_seq_lens.numpy()
        ends = np.cumsum(counts)
        before = np.repeat(batch.seq_lens.numpy() - ends, counts)
        return cls(
            np.repeat(batch.req_pool_indices.numpy(), counts), before + np.arange(1, ends[-1] + 1)
        )

    def shares(self, most: int) -> list[slice]:
        """Return at most `most` ranges of query tokens, with about as many keys to read in each."""
        ends = np.cumsum(self.lengths)
        cuts = np.searchsorted(ends, ends[-1] * np.arange(1, most) / most).tolist()
        bounds = [0, *cuts, len(ends)]
        return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False) if a < b]


class PagedCpuAttention(TorchNativeAttnBackend):
    """The attention backend of the CPU platform."""

    def __init__(self, *args, **named) -> None:
        super().__init__(*args, **named)
        self._threads = ThreadPoolExecutor(torch.get_num_threads())

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._spans = AttentionSpans.of(forward_batch)
        self._shares = self._spans.shares(torch.get_num_threads())

    @property
    def slots(self) -> np.ndarray:
        """Return the slots of the tokens of each request, [requests, tokens]."""
        assert self.req_to_token_pool is not None
        return self.req_to_token_pool.req_to_token.numpy()

    def keep_rows(self, rows: np.ndarray) -> None:
        """Let only these tokens of the batch attend, int64 [rows]."""
        self._spans = AttentionSpans(self._spans.rows[rows], self._spans.lengths[rows])
        self._shares = self._spans.shares(torch.get_num_threads())

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        if self.is_plain(layer, forward_batch):
            return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks)
        return super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, sinks=None):
        if self.is_plain(layer, forward_batch):
            return self._attend(q, k, v, layer, forward_batch, save_kv_cache, sinks)
        return super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)

    def is_plain(self, layer: RadixAttention, batch: ForwardBatch) -> bool:
        """Return whether the kernel computes the attention of this layer, now and always."""
        return (
            is_plain_attention(layer)
            and self.token_to_kv_pool.page_size == PAGE
            and not self.use_sliding_window_kv_pool
            and batch.encoder_lens is None
        )

    def _attend(
        self, q, k, v, layer: RadixAttention, batch: ForwardBatch, save_kv_cache: bool, sinks
    ) -> Tensor:
        if save_kv_cache and k is not None:
            keys, values = self._cache(layer)
            pages, offsets = batch.out_cache_loc // PAGE, batch.out_cache_loc % PAGE
            heads = (-1, layer.tp_k_head_num, layer.qk_head_dim)
            keys[pages, :, :, offsets] = k.reshape(heads).to(keys.dtype)
            values[pages, offsets] = v.reshape(heads).to(values.dtype)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim).float().contiguous()
        out = torch.empty_like(query)
        size = layer.sliding_window_size  # without the token itself
        window = _ALL if size is None or size < 0 else size + 1
        scores = _NO_SINKS if sinks is None else sinks.float().numpy()
        self.attend(query.numpy(), *self.cache(layer), layer.scaling, out.numpy(), window, scores)
        return out.to(q.dtype).flatten(1)

    def cache(self, layer: RadixAttention) -> tuple[np.ndarray, np.ndarray]:
        """Return the cache of a layer as the kernels take it.

        These are the keys, [pages, kv_heads, head_dim, PAGE], and the values,
        [pages, PAGE, kv_heads, head_dim].
        """
        keys, values = self._cache(layer)
        return _numpy(keys), _numpy(values)

    def _cache(self, layer: RadixAttention) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        _, heads, dim = keys.shape
        return keys.view(-1, heads, dim, PAGE), values.view(-1, PAGE, heads, dim)

    def attend(
        self,
        query: np.ndarray,
        keys: np.ndarray,
        values: np.ndarray,
        scale: float,
        out: np.ndarray,
        window: int = _ALL,
        sinks: np.ndarray = _NO_SINKS,
    ) -> None:
        """Set `out` to the attention of the batch's tokens, whose keys are in the cache.

        Args:
            query: float32 [tokens, heads, head_dim].
            keys, values: from `cache`.
            scale: of the dot products.
            out: float32 [tokens or more, heads, head_dim], of which those of the tokens are
                written.
            window, sinks: as in `paged_attention`.
        """
        slots = self.slots
        settings = np.float32(scale), window, sinks

        def attend(tokens: slice) -> None:
            rows, lengths = (each[tokens] for each in self._spans)
            own, result = query[tokens], out[tokens]
            paged_attention(own, keys, values, slots, rows, lengths, settings, result)

        # The kernel runs without Python's lock.
        others = [self._threads.submit(attend, share) for share in self._shares[1:]]
        attend(self._shares[0])
        for other in others:
            other.result()


def is_plain_attention(layer: RadixAttention) -> bool:
    """Return whether a layer's tokens attend to tokens up to themselves, and fit the kernel."""
    return (
        layer.attn_type == AttentionType.DECODER
        and not layer.is_cross_attention
        and layer.qk_head_dim == layer.v_head_dim
        and layer.qk_head_dim % PAGE == 0
    )


def _numpy(cache: torch.Tensor) -> np.ndarray:
    """Return the same memory as an array: float32, or the bits of bfloat16 as uint16."""
    if cache.dtype == torch.bfloat16:
        return cache.view(torch.uint16).numpy()
    if cache.dtype == torch.float32:
        return cache.numpy()
    raise ValueError(
        f"a KV cache of {cache.dtype} is not supported without a GPU:"
        " set server.args.dtype to float32 or bfloat16"
    )


class CpuPageAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's allocator of pages, with its Triton kernels in torch.

    Both methods return None if too few pages are free.
    """

    def alloc_extend(
        self,
        prefix_lens: Tensor,
        prefix_lens_cpu: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
        last_loc: Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> Tensor | None:
        """Return slots, int64 [extend_num_tokens], for the new tokens of requests in prefill.

        Args:
            prefix_lens: int64 [requests], tokens that have slots.
            seq_lens: int64 [requests], tokens that will have slots.
            last_loc: int64 [requests], the slot of the last token that has one, or -1.
        """
        pages = num_new_pages
        if pages is None:
            pages = int(get_num_new_pages(seq_lens_cpu, self.page_size, prefix_lens_cpu))
        if not self._has_free(pages):
            return None
        slots = torch.empty(extend_num_tokens, dtype=torch.int64)
        alloc_extend_naive(
            prefix_lens, seq_lens, last_loc, self.free_pages, slots, self.page_size, self.device
        )
        self.free_pages = self.free_pages[pages:]
        return slots

    def alloc_decode(
        self, seq_lens: Tensor, seq_lens_cpu: Tensor, last_loc: Tensor
    ) -> Tensor | None:
        """Return slots, int64 [requests], for one new token of each request.

        Args:
            seq_lens: int64 [requests], tokens with the new one.
            last_loc: int64 [requests], the slot of the token before it.
        """
        starts_page = (seq_lens % self.page_size == 1).nonzero().squeeze(1)
        if not self._has_free(len(starts_page)):
            return None
        slots = (last_loc + 1).to(torch.int64)
        slots[starts_page] = self.free_pages[: len(starts_page)] * self.page_size
        self.free_pages = self.free_pages[len(starts_page) :]
        return slots

    def _has_free(self, pages: int) -> bool:
        if pages > len(self.free_pages):
            self.merge_and_sort_free()
        return pages <= len(self.free_pages)
