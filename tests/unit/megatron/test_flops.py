"""The operations of a model against what torch counts while transformers computes the same.

transformers decodes token by token, so that each token meets the keys that it sees and no others,
and continues a shared prefix from a copy of its cache.
"""

import copy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PretrainedConfig

from areal_lite.megatron import flops
from areal_lite.megatron.flops import Operations, utilization
from areal_lite.megatron.packing import make_microbatches
from tests.ranks.test_architectures import MODELS, make_model
from tests.ranks.test_families import FAMILIES
from tests.unit.megatron.sequences import batch_of

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12, 13]
SEQUENCES = [PROMPT + [20, 21, 22], PROMPT + [20, 23], PROMPT + [24, 25, 26, 27]]
KINDS = ("llama3_untied", "qwen3_window", "smollm3", "gemma3", "moe", "glm4_moe", "gpt_oss")
LATENT = ("deepseek", "moonlight")
NETS = ("qwen3_next", "qwen3_5")


@pytest.fixture
def model(tmp_path, request) -> Path:
    folder = tmp_path / request.param
    if request.param in FAMILIES:
        MODELS.setdefault(request.param, FAMILIES[request.param])
    make_model(request.param, folder)
    return folder


def load(folder: Path) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    model.set_experts_implementation("eager")
    return model


def operations(folder: Path, *, backward: bool = False, frozen: bool = False) -> float:
    """Return what is counted for SEQUENCES, of which all tokens behind PROMPT are scored."""
    batch = batch_of([len(one) for one in SEQUENCES])
    batch.tokens = np.concatenate(SEQUENCES).astype(np.int32)
    starts = np.repeat(batch.cu_seqlens[:-1], batch.lengths)
    scored = np.arange(len(batch.tokens)) - starts >= len(PROMPT)
    found = make_microbatches(batch, 100, scored=scored)
    counter = Operations(AutoConfig.from_pretrained(folder), folder, has_head=True, frozen=frozen)
    return counter.count(found, backward=backward)


def counted(counter: FlopCounterMode) -> np.ndarray:
    """Return what torch counted: of weights, and of attention.

    Rotations' angles are left out, and what a gated delta net does between its projections.
    """
    total = np.zeros(2)
    for name, operations in counter.get_flop_counts().items():
        for operation, count in operations.items():
            sign = (name == "Global") - name.endswith(("rotary_emb", "linear_attn"))
            sign += ".linear_attn." in name and "proj" in name
            total[int("bmm" in str(operation))] += sign * count
    return total


@torch.no_grad()
def decoded(model: torch.nn.Module) -> np.ndarray:
    """Count the operations of each distinct prefix once, and of the logits behind each prompt."""
    caches = {(): DynamicCache(config=model.config)}
    with FlopCounterMode(display=False) as counter:
        for sequence in SEQUENCES:
            for end in range(1, len(sequence)):  # the last token is only scored
                prefix = tuple(sequence[:end])
                if prefix in caches:
                    continue
                cache = caches[prefix] = copy.deepcopy(caches[prefix[:-1]])
                states = model.model(torch.tensor([prefix[-1:]]), past_key_values=cache)[0]
                if end >= len(PROMPT):
                    model.lm_head(states)
    return counted(counter)


def net(hf: PretrainedConfig) -> int:
    """Count a token's operations in a gated delta net, between its projections.

    The convolution, and three products with the state of each head: what the key reads, what it
    writes, and what the query reads.
    """
    keys = hf.linear_num_key_heads * hf.linear_key_head_dim
    values = hf.linear_num_value_heads * hf.linear_value_head_dim
    convolution = 2 * (2 * keys + values) * hf.linear_conv_kernel_dim
    return convolution + 3 * 2 * values * hf.linear_key_head_dim


@pytest.mark.parametrize("model", (*KINDS, *LATENT, *NETS), indirect=True)
def test_a_forward_pass_takes_what_transformers_takes(model: Path) -> None:
    hf = AutoConfig.from_pretrained(model)
    expected = decoded(load(model)).sum()
    if model.name in NETS:
        tokens = len({tuple(one[:end]) for one in SEQUENCES for end in range(1, len(one))})
        expected += net(hf) * tokens * hf.layer_types.count("linear_attention")
    assert operations(model) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("model", ["llama3_untied", "moe"], indirect=True)
@pytest.mark.parametrize("frozen", [False, True])
def test_backward_takes_what_autograd_takes(model: Path, frozen: bool) -> None:
    reference = load(model).requires_grad_(not frozen)
    states = torch.randn(1, 7, reference.config.hidden_size, requires_grad=True)
    counts = []
    for backward in (False, True):
        with FlopCounterMode(display=False) as counter:
            logits = reference(inputs_embeds=states).logits
            if backward:
                logits.sum().backward()
        counts.append(counted(counter))
    expected = (decoded(reference) * counts[1] / counts[0]).sum()
    assert operations(model, backward=True, frozen=frozen) == pytest.approx(expected, rel=1e-9)


def test_use_is_a_share_of_the_peak_of_all_ranks(monkeypatch) -> None:
    monkeypatch.setattr(flops.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flops.dist, "get_world_size", lambda: 4)
    name = "NVIDIA H100 80GB HBM3"
    monkeypatch.setattr(flops.torch.cuda, "get_device_name", lambda: name)
    assert utilization(989e12, 0.5) == {"mfu": 0.5}
    name = "NVIDIA H100 PCIe"
    assert utilization(756e12, 1.0) == {"mfu": 0.25}
    name = "NVIDIA H100 80GB HBM3 MIG 1g.10gb"
    assert utilization(989e12, 0.5) == {}
    name = "Tesla T4"
    assert utilization(989e12, 0.5) == {}


def test_a_machine_without_a_gpu_has_no_such_share() -> None:
    assert utilization(1.0, 1.0) == {}
