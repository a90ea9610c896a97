"""SGLang's allocator of pages of the KV cache, without its Triton kernels.

A page holds some consecutive tokens of one request. Attention reads the keys and values of a
request one after the other, so it waits for memory more rarely the larger a page is. Requests share
whole pages of a prompt only.
"""

import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.utils import get_num_new_pages
from torch import Tensor


class CpuPageAllocator(PagedTokenToKVPoolAllocator):
    """The parent class, with its two kernels in torch. Both return None if too few are free."""

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
