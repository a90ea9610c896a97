"""Import and export tables: every rank's part, and the tensors back bit by bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig

from areal_lite.data.model_folder import DELTA_NETS
from areal_lite.megatron.architectures import ARCHITECTURES, layer_mapping, layout
from areal_lite.megatron.parameters import Stacked, padded_vocab

EXPERT = 3


class File:
    """A tensor in a file that counts the elements read."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor, self.read = tensor, 0

    def get_shape(self) -> list[int]:
        return list(self.tensor.shape)

    def __getitem__(self, index) -> torch.Tensor:
        part = self.tensor[index].clone()
        self.read += part.numel()
        return part


@st.composite
def cases(draw):
    """Draw (configuration, ranks): sizes that can be split this way, and any vocabulary."""
    ranks = draw(st.integers(1, 4))
    groups = ranks * draw(st.integers(1, 3))
    config = AutoConfig.for_model(
        draw(st.sampled_from(sorted(ARCHITECTURES))),
        vocab_size=draw(st.integers(1, 23)),
        hidden_size=groups * 12,
        num_hidden_layers=3,
        num_key_value_heads=groups,
        num_attention_heads=groups * draw(st.integers(1, 4)),
        head_dim=draw(st.sampled_from([2, 4])),
        intermediate_size=ranks * draw(st.integers(1, 5)),
        moe_intermediate_size=ranks * 2,
        tie_word_embeddings=draw(st.booleans()),
        shared_expert_intermediate_size=ranks * 3,
        linear_num_key_heads=groups,
        linear_num_value_heads=groups * draw(st.integers(1, 3)),
        linear_key_head_dim=draw(st.integers(1, 3)),
        linear_value_head_dim=draw(st.integers(1, 3)),
        full_attention_interval=2,
        q_lora_rank=draw(st.sampled_from([None, 5])),
        kv_lora_rank=7,
        qk_nope_head_dim=3,
        v_head_dim=5,
    )
    return config, ranks


def names(hf) -> list[str]:
    layers = [
        f"decoder.layers.{layer}.{part}".format(expert=EXPERT)
        for layer in (1, 2)  # of both kinds, where there are two
        for part in layer_mapping(hf, layer)
    ]
    return [
        *layers,
        "embedding.word_embeddings.weight",
        "output_layer.weight",
        "decoder.final_layernorm.weight",
    ]


def shape(name: str, hf) -> tuple[int, ...]:
    """Return the shape of a Hugging Face tensor."""
    if ".linear_attn." in name:
        return net_shape(name, hf)
    if name.endswith("e_score_correction_bias"):
        return (5,)
    if name.endswith("self_attn.sinks"):
        return (hf.num_attention_heads,)
    if hf.model_type == "gpt_oss" and ".experts." in name:
        hidden, width = hf.hidden_size, hf.intermediate_size
        kind = name.rpartition(".")[2]
        sizes = (hidden, 2 * width) if kind.startswith("gate") else (width, hidden)
        return (5, *sizes[kind.endswith("bias") :])
    if hf.model_type == "deepseek_v3" and "self_attn" in name:
        return latent_shape(name.split(".")[-2], hf)
    part = "moe_" if "experts." in name else "shared_expert_" if ".shared_expert." in name else ""
    width = getattr(hf, f"{part}intermediate_size", 0)
    heads, groups, dim, hidden = (
        hf.num_attention_heads,
        hf.num_key_value_heads,
        hf.head_dim,
        hf.hidden_size,
    )
    rows = {
        "embed_tokens": hf.vocab_size,
        "lm_head": hf.vocab_size,
        "q_proj": heads * dim * (2 if hf.model_type in DELTA_NETS else 1),
        "k_proj": groups * dim,
        "v_proj": groups * dim,
    }
    rows |= {
        "o_proj": hidden,
        "gate_proj": width,
        "up_proj": width,
        "down_proj": hidden,
        "gate": 5,
        "router": 5,
        "q_norm": heads * dim if hf.model_type == "olmo3" else dim,
        "k_norm": groups * dim if hf.model_type == "olmo3" else dim,
        "qkv_proj": (heads + 2 * groups) * dim,
        "gate_up_proj": 2 * width,
        "shared_expert_gate": 1,
    }
    columns = {"o_proj": heads * dim, "down_proj": width}
    module, kind = name.split(".")[-2:]
    if kind == "bias" or "norm" in module:
        return (rows.get(module, hidden),)
    return (rows[module], columns.get(module, hidden))


def latent_shape(module: str, hf) -> tuple[int, ...]:
    """Return the shape of a tensor of multi-latent attention."""
    heads, rank, queries = hf.num_attention_heads, hf.kv_lora_rank, hf.q_lora_rank
    query = hf.qk_nope_head_dim + hf.qk_rope_head_dim
    return {
        "q_proj": (heads * query, hf.hidden_size),
        "q_a_proj": (queries, hf.hidden_size),
        "q_a_layernorm": (queries,),
        "q_b_proj": (heads * query, queries),
        "kv_a_proj_with_mqa": (rank + hf.qk_rope_head_dim, hf.hidden_size),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (hf.qk_nope_head_dim + hf.v_head_dim), rank),
        "o_proj": (hf.hidden_size, heads * hf.v_head_dim),
    }[module]


def net_shape(name: str, hf) -> tuple[int, ...]:
    """Return the shape of a tensor of a gated delta net."""
    heads = hf.linear_num_value_heads
    keys, values = (
        hf.linear_num_key_heads * hf.linear_key_head_dim,
        heads * hf.linear_value_head_dim,
    )
    module, kind = name.split(".")[-2:]
    if module == "linear_attn":
        return (heads,)
    if module == "conv1d":
        return 2 * keys + values, 1, hf.linear_conv_kernel_dim
    if module == "norm":
        return (hf.linear_value_head_dim,)
    if module == "out_proj":
        return hf.hidden_size, values
    parts = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads}
    return sum(parts[letter] for letter in module.removeprefix("in_proj_")), hf.hidden_size


def net_by_head(name: str, tensors: list[torch.Tensor], hf, rank: int, ranks: int) -> torch.Tensor:
    """Interleave, for each key head of the rank, its rows of everything that a token passes."""
    number, ratio = hf.linear_num_key_heads, hf.linear_num_value_heads // hf.linear_num_key_heads
    key, value = hf.linear_key_head_dim, ratio * hf.linear_value_head_dim
    if "in_proj_qkvz" in name:  # grouped already
        parts = [part.chunk(number) for part in tensors]
    else:
        widths = [key * number, key * number, value * number]
        parts = [part.chunk(number) for part in tensors[0].split(widths)]
        parts += [part.chunk(number) for part in tensors[1:]]
    own = range(rank * number // ranks, (rank + 1) * number // ranks)
    return torch.cat([part[group] for group in own for part in parts])


def qkv_by_head(tensors: list[torch.Tensor], hf, rank: int, ranks: int) -> torch.Tensor:
    """Interleave, for each key-value group of the rank: its query heads, its key, its value.

    Gates of the queries, which a file has after each of them, come after all queries.
    """
    if hf.model_type in DELTA_NETS:
        blocks = tensors[0].split(hf.head_dim)
        ratio = hf.num_attention_heads // hf.num_key_value_heads
        pairs = [blocks[start : start + 2 * ratio] for start in range(0, len(blocks), 2 * ratio)]
        ordered = [head for group in pairs for head in (*group[::2], *group[1::2])]
        tensors = [torch.cat(ordered), *tensors[1:]]
    query, key, value = (t.split(hf.head_dim) for t in tensors)
    per_group, own = len(query) // len(key), len(key) // ranks
    heads = []
    for group in range(rank * own, (rank + 1) * own):
        heads += [*query[group * per_group : (group + 1) * per_group], key[group], value[group]]
    return torch.cat(heads)


def expected_expert(name: str, entry: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return a rank's part of an expert of gpt-oss, whose gates and ups alternate."""
    if "gate_up" in name:
        return torch.cat([entry[..., i::2].tensor_split(ranks, -1)[rank] for i in (0, 1)], -1).t()
    return entry if name.endswith("bias") else entry.tensor_split(ranks)[rank].t()


def expected(plan, tensors: list[torch.Tensor], hf, rank: int, ranks: int) -> torch.Tensor:
    name, first = plan.names[0], tensors[0]
    if isinstance(plan, Stacked):
        return expected_expert(name, first[EXPERT], rank, ranks)
    if "in_proj" in name or "conv1d" in name:
        return net_by_head(name, tensors, hf, rank, ranks)
    if "A_log" in name or "dt_bias" in name:
        return first.tensor_split(ranks)[rank]
    if "qkv_proj" in name:
        keys = hf.num_key_value_heads * hf.head_dim
        tensors = list(first.split([len(first) - 2 * keys, keys, keys]))
    if "gate_up_proj" in name:
        tensors = list(first.chunk(2))
    if name.endswith("o_proj.bias"):
        return first
    if name.endswith("sinks"):
        return first.tensor_split(ranks)[rank]
    if hf.model_type == "deepseek_v3" and ("q_proj" in name or "_b_proj" in name):
        return first.tensor_split(ranks)[rank]
    if "q_norm" in name or "k_norm" in name:
        return first.tensor_split(ranks)[rank] if hf.model_type == "olmo3" else first
    if "q_proj" in name or "qkv_proj" in name:
        return qkv_by_head(tensors, hf, rank, ranks)
    if "gate_proj" in name or "gate_up_proj" in name:
        return torch.cat([t.tensor_split(ranks)[rank] for t in tensors])
    if "o_proj" in name or "down_proj" in name or "out_proj" in name:
        return first.tensor_split(ranks, 1)[rank]
    if "embed_tokens" in name or "lm_head" in name:
        padded = torch.zeros(padded_vocab(hf, ranks), first.shape[1])
        padded[: len(first)] = first
        return padded.tensor_split(ranks)[rank]
    return first


@given(cases(), st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_parts_follow_megatrons_layout_and_return_the_same_bits(case, random):
    hf, ranks = case
    torch.manual_seed(random.randrange(2**31))
    for name in names(hf):
        plan = layout(name, hf)
        tensors = [torch.randn(shape(n, hf)) for n in plan.names]
        shards = []
        read = 0
        for rank in range(ranks):
            files = [File(t) for t in tensors]
            shards.append(plan.shard(hf, files, rank, ranks))
            assert torch.equal(shards[-1], expected(plan, tensors, hf, rank, ranks)), name
            read += sum(f.read for f in files)
        if isinstance(plan, Stacked):
            tensors = [tensor[EXPERT] for tensor in tensors]
        size = sum(t.numel() for t in tensors)
        # A rank reads only what it holds.
        assert read == (size * ranks if plan.replicated else size), name
        back = plan.join(hf, shards[:1] if plan.replicated else shards)
        assert len(back) == len(tensors) and all(
            torch.equal(a, b) for a, b in zip(back, tensors)
        ), name


def test_names_count_over_the_whole_model():
    hf = AutoConfig.for_model("qwen3_moe", tie_word_embeddings=True)
    assert layout("decoder.layers.11.mlp.experts.local_experts.7.linear_fc1.weight", hf).names == (
        "model.layers.11.mlp.experts.7.gate_proj.weight",
        "model.layers.11.mlp.experts.7.up_proj.weight",
    )
    assert layout("decoder.layers.0.mlp.router.weight", hf).names == (
        "model.layers.0.mlp.gate.weight",
    )
    # The last pipeline stage has a copy of the embedding.
    assert layout("output_layer.weight", hf).names == ("model.embed_tokens.weight",)
    hf.tie_word_embeddings = False
    assert layout("output_layer.weight", hf).names == ("lm_head.weight",)


def test_one_rank_copies_only_what_is_interleaved():
    hf = AutoConfig.for_model(
        "qwen3",
        vocab_size=7,
        hidden_size=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=4,
        intermediate_size=6,
    )
    for name in names(hf):
        plan = layout(name, hf)
        part = plan.shard(hf, [File(torch.randn(shape(n, hf))) for n in plan.names], 0, 1)
        storage = part.untyped_storage().data_ptr()
        shared = [t.untyped_storage().data_ptr() == storage for t in plan.join(hf, [part])]
        assert shared == [False] * 3 if "linear_qkv" in name else all(shared), name


def test_shapes_that_do_not_fit_are_refused():
    hf = AutoConfig.for_model("qwen3", vocab_size=10, hidden_size=16)
    with pytest.raises(
        ValueError,
        match="model.embed_tokens.weight has 12 rows, but config.json says vocab_size=10",
    ):
        layout("embedding.word_embeddings.weight", hf).shard(hf, [File(torch.zeros(12, 16))], 0, 2)
    with pytest.raises(ValueError, match="q_proj.weight has 12 rows, but config.json implies 4096"):
        layout("decoder.layers.0.self_attention.linear_qkv.weight", hf).shard(
            hf, [File(torch.zeros(12, 16))] * 3, 0, 2
        )
    with pytest.raises(
        ValueError, match="15 rows or columns cannot be split over 2 tensor-parallel ranks"
    ):
        layout("decoder.layers.0.mlp.linear_fc2.weight", hf).shard(
            hf, [File(torch.zeros(16, 15))], 0, 2
        )


@pytest.mark.parametrize(
    "vocab, ranks, rows", [(98, 1, 98), (98, 2, 98), (97, 2, 98), (97, 4, 100), (3, 4, 4)]
)
def test_vocabulary_is_padded_to_a_multiple_of_the_ranks(vocab, ranks, rows):
    assert padded_vocab(AutoConfig.for_model("llama", vocab_size=vocab), ranks) == rows
