"""`compare_attention.py DTYPE TOLERANCE`: exit with 0 if both backends agree on random batches."""

import sys
from types import SimpleNamespace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_lite.cpu.sglang.stand_ins import install_stand_ins

install_stand_ins()

import sglang  # noqa: E402, F401  first: it loads the platform itself
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

from areal_lite.cpu.kernels.paged_attention import PAGE  # noqa: E402
from areal_lite.cpu.sglang.attention import PagedCpuAttention  # noqa: E402

PAGES, CONTEXT, LAYER = 25, 64, 1


class Pool:
    """Offer plain tensors to attention in place of SGLang's KV pool."""

    page_size = PAGE

    def __init__(self, keys: torch.Tensor, values: torch.Tensor):
        self.keys, self.values = keys.clone(), values.clone()

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        assert layer_id == LAYER
        return self.keys

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        assert layer_id == LAYER
        return self.values

    def set_kv_buffer(self, layer, where, k: torch.Tensor, v: torch.Tensor) -> None:
        self.keys[where.loc], self.values[where.loc] = (
            k.to(self.keys.dtype),
            v.to(self.values.dtype),
        )


@st.composite
def batches(draw) -> dict:
    decode = draw(st.booleans())
    new = st.just(1) if decode else st.integers(1, 12)
    return {
        "decode": decode,
        "requests": draw(st.lists(st.tuples(st.integers(0, 40), new), min_size=1, max_size=6)),
        "kv_heads": draw(st.sampled_from([1, 2])),
        "group": draw(st.sampled_from([1, 2, 4])),
        "head_dim": draw(st.sampled_from([16, 32])),
        "seed": draw(st.integers(0, 2**31)),
    }


def build(case: dict, dtype: torch.dtype):
    """(runner, layer, batch, q, k, v): a random ragged batch, its prefixes already in the cache."""
    torch.manual_seed(case["seed"])
    prefix, new = (torch.tensor(x) for x in zip(*case["requests"]))
    heads, kv_heads, dim = case["kv_heads"] * case["group"], case["kv_heads"], case["head_dim"]
    pages = torch.randperm(PAGES)
    rows = torch.randperm(len(prefix) + 2)[: len(prefix)]
    table = torch.zeros(len(prefix) + 2, CONTEXT, dtype=torch.int32)
    out_slots, used = [], 0
    for row, p, n in zip(rows, prefix, new):
        count = -(-(p + n) // PAGE)
        mine = (pages[used : used + count, None] * PAGE + torch.arange(PAGE)).flatten()[: p + n]
        used += count
        table[row, : p + n] = mine.int()
        out_slots.append(mine[p:])
    cache = [torch.randn(PAGES * PAGE, kv_heads, dim).to(dtype) for _ in range(2)]
    q, k, v = (torch.randn(int(new.sum()), h * dim).to(dtype) for h in (heads, kv_heads, kv_heads))
    layer = SimpleNamespace(
        layer_id=LAYER,
        tp_q_head_num=heads,
        tp_k_head_num=kv_heads,
        qk_head_dim=dim,
        v_head_dim=dim,
        scaling=dim**-0.5,
        is_cross_attention=False,
        attn_type=AttentionType.DECODER,
        sliding_window_size=-1,
    )
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE if case["decode"] else ForwardMode.EXTEND,
        req_pool_indices=rows,
        seq_lens=prefix + new,
        extend_prefix_lens=prefix,
        extend_seq_lens=new,
        out_cache_loc=torch.cat(out_slots),
        encoder_lens=None,
    )
    kv = (k.view(-1, kv_heads, dim), v.view(-1, kv_heads, dim))

    def runner(backend: type) -> SimpleNamespace:
        keys, values = cache
        if backend is PagedCpuAttention:  # it keeps the keys of a page in another order
            keys = keys.unflatten(0, (-1, PAGE)).permute(0, 2, 3, 1).reshape(keys.shape)
        return SimpleNamespace(
            device="cpu",
            req_to_token_pool=SimpleNamespace(req_to_token=table),
            token_to_kv_pool=Pool(keys, values),
        )

    return runner, layer, batch, q, *kv


def compare(dtype: torch.dtype, tolerance: float) -> int:
    seen = 0

    @settings(max_examples=60, deadline=None, derandomize=True, database=None)
    @given(case=batches())
    def check(case: dict) -> None:
        nonlocal seen
        runner, layer, batch, q, k, v = build(case, dtype)
        outputs = []
        for kind in (TorchNativeAttnBackend, PagedCpuAttention):
            backend = kind(runner(kind))
            backend.init_forward_metadata(batch)
            forward = backend.forward_decode if case["decode"] else backend.forward_extend
            outputs.append(forward(q, k, v, layer, batch))
        torch.testing.assert_close(outputs[1], outputs[0], atol=tolerance, rtol=0)
        seen += 1

    check()
    return seen


if __name__ == "__main__":
    print(compare(getattr(torch, sys.argv[1]), float(sys.argv[2])), "batches agree")
