"""Each family of models in each layout that it allows, against transformers, and across layouts.

test_architectures.py has the models and layouts that came first. Sequences are up to 39 tokens
long, so windows of 5 to 7 tokens cut most of them, also the prefixes that they share.
"""

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.olmo3.modeling_olmo3 import Olmo3RotaryEmbedding

from areal_lite.config import TrainerConfig
from areal_lite.data.model_folder import has_window
from areal_lite.tools.memory import activation_bytes_per_token, rank_memory, rank_parameters
from tests.ranks.architectures_worker import SETTINGS, UPDATES, VOCAB
from tests.ranks.engine_worker import random_batch
from tests.ranks.test_architectures import (
    EXPERTS,
    LLAMA3,
    MODELS,
    launch,
    make_model,
    reference_logprobs,
    weights_of,
)
from tests.ranks.test_checkpoint import kept_after_layers
from tests.ranks.test_muon import scaled

YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "beta_fast": 8.0,
    "original_max_position_embeddings": 16,
    "rope_theta": 1e4,
}
UNTIED = {"tie_word_embeddings": False}
TYPES = {"layer_types": ["sliding_attention", "full_attention"] * 2}
NO_PAD = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e5}
GEMMA = NO_PAD | TYPES | {"sliding_window": 6, "head_dim": 16, "query_pre_attn_scalar": 24}
# Random layers give results that are almost zero, and norms of these amplify rounding.
OLMO = NO_PAD | UNTIED | TYPES | {"sliding_window": 6, "rms_norm_eps": 1e-3}
LATENT = (
    NO_PAD
    | UNTIED
    | {"qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 20}
    | {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
    | {"num_key_value_heads": 4, "first_k_dense_replace": 1, "routed_scaling_factor": 1.7}
    | {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
)
NETS = {
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    # A state of one token gives results that are almost zero, and their norm amplifies rounding.
    "rms_norm_eps": 1e-3,
}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 48}
FAMILIES = {
    "mistral_window": ("mistral", UNTIED | {"sliding_window": 5}),
    "qwen2_window": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 2},
    ),
    "qwen3_window": (
        "qwen3",
        TYPES | {"use_sliding_window": True, "sliding_window": 7, "rope_parameters": YARN},
    ),
    "smollm3": ("smollm3", NO_PAD | {"no_rope_layer_interval": 2}),
    "smollm3_window": (
        "smollm3",
        NO_PAD
        | UNTIED
        | {"use_sliding_window": True, "sliding_window": 5, "no_rope_layers": [1, 0, 0, 1]}
        | {"rope_parameters": LLAMA3 | {"rope_theta": 1e4}},
    ),
    "llama_yarn": ("llama", UNTIED | {"rope_parameters": YARN}),
    "qwen2_yarn": ("qwen2", {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}}),
    "phi4": (
        "phi3",
        NO_PAD
        | UNTIED
        | {"partial_rotary_factor": 0.5}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    ),
    "phi3_window": ("phi3", NO_PAD | UNTIED | {"sliding_window": 5}),
    "olmo3": ("olmo3", OLMO),
    "olmo3_yarn": ("olmo3", OLMO | {"rope_parameters": YARN}),
    "gemma3": ("gemma3_text", GEMMA),
    "gemma3_linear": (
        "gemma3_text",
        GEMMA
        | {"num_key_value_heads": 4, "layer_types": None, "sliding_window_pattern": 3}
        | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": {"rope_theta": 3e2}}},
    ),
    "gpt_oss": (
        "gpt_oss",
        NO_PAD
        | UNTIED
        | TYPES
        | {"sliding_window": 6, "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": YARN | {"truncate": False}, "swiglu_limit": 7.0},
    ),
    "deepseek": ("deepseek_v3", LATENT | {"q_lora_rank": 24, "n_group": 4, "topk_group": 2}),
    "moonlight": (
        "deepseek_v3",
        LATENT
        | {"q_lora_rank": None, "n_group": 1, "topk_group": 1, "n_shared_experts": 2}
        | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}},
    ),
    "qwen3_next": ("qwen3_next", UNTIED | NETS | SHARED | {"norm_topk_prob": True}),
    "qwen3_5": ("qwen3_5_text", NETS | {"layer_types": None, "full_attention_interval": 2}),
    "qwen3_5_moe": ("qwen3_5_moe_text", NETS | SHARED),
    "glm4_moe": (
        "glm4_moe",
        NO_PAD
        | UNTIED
        | {"n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 2}
        | {"n_group": 4, "topk_group": 2, "moe_intermediate_size": 64}
        | {"attention_bias": True, "use_qk_norm": True, "routed_scaling_factor": 1.7},
    ),
    "glm4_moe_plain": (
        "glm4_moe",
        NO_PAD
        | UNTIED
        | {"n_routed_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 2}
        | {"moe_intermediate_size": 32},
    ),
}
# Each has a relative with the same operators above, or is that with fewer of them.
ALIKE = ("qwen2_window", "smollm3", "llama_yarn", "phi3_window", "olmo3", "gemma3")
ALIKE += ("moonlight", "qwen3_5", "glm4_moe_plain")
LAYOUTS = {
    "single": {},
    "tensor": {"tensor_parallel": 2},
    "context": {"context_parallel": 2},
    "pipeline": {"pipeline_parallel": 2},
    "interleaved": {"pipeline_parallel": 2, "virtual_pipeline": 2},
    "data": {"data_parallel": 2},
    "recomputed": {"tensor_parallel": 2, "recompute": "full"},
    "tensor_pipeline": {"tensor_parallel": 2, "pipeline_parallel": 2},
    "tensor_context": {"tensor_parallel": 2, "context_parallel": 2},
    "context_pipeline": {"context_parallel": 2, "pipeline_parallel": 2, "recompute": "full"},
    "expert": {"data_parallel": 2, "expert_parallel": 2},
    "tensor_expert": {"tensor_parallel": 2, "data_parallel": 2, "expert_parallel": 2},
}
UNADAPTED = ("deepseek", "moonlight")
ADAPTED = ("single", "tensor", "context", "pipeline")
QUICK = ("tensor",)  # as two ranks do all that one does
# Fused and gated projections, latent attention, a delta net, and experts apart and stacked.
ORTHOGONAL = ("moonlight", "gpt_oss", "phi4", "qwen3_next", "glm4_moe")


def families(layout: str) -> tuple[str, ...]:
    """Return the families that allow a layout."""
    nets = {name for name, (_, fields) in FAMILIES.items() if NETS.items() <= fields.items()}
    if "context_parallel" in LAYOUTS[layout]:
        return tuple(name for name in FAMILIES if name not in nets)
    if "expert_parallel" in LAYOUTS[layout]:
        experts = {"num_experts", "n_routed_experts", "num_local_experts"}
        return tuple(name for name, (_, fields) in FAMILIES.items() if experts & fields.keys())
    return tuple(FAMILIES)


CASES = [
    pytest.param(
        layout, name, marks=() if layout in QUICK and name not in ALIKE else pytest.mark.slow
    )
    for layout in LAYOUTS
    for name in families(layout)
]


def quick_unless_alike(names: Iterable[str]) -> list:
    """Parametrize a test by families, of which those that are alike are slow."""
    return [pytest.param(name, marks=pytest.mark.slow if name in ALIKE else ()) for name in names]


def place(layout: str, name: str) -> str:
    """Return the folder of a layout's results. Families that are alike run apart."""
    return layout + "_alike" * (name in ALIKE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("families")
    with pytest.MonkeyPatch.context() as patch:
        for name, family in FAMILIES.items():
            patch.setitem(MODELS, name, family)
            make_model(name, folder / name)
    return folder


@pytest.fixture(scope="module")
def results(folder):
    """results(layout, name): what each of its ranks computed for a family."""

    @cache
    def run(layout: str, alike: bool) -> list[dict]:
        names = tuple(name for name in families(layout) if alike == (name in ALIKE))
        models = {name: str(folder / name) for name in names}
        lora = [name for name in names if name not in UNADAPTED and layout in ADAPTED]
        muon = [name for name in ORTHOGONAL if name in names]
        options = {"saved": str(folder / "checkpoints"), "lora": lora, "muon": muon}
        out = folder / place(layout, names[0])
        return launch(LAYOUTS[layout], models, names, out, **options)

    return lambda layout, name: [rank[name] for rank in run(layout, name in ALIKE)]


def reference(folder: Path) -> torch.nn.Module:
    """Load a model in transformers, which stretches the angles of all layers of OLMo 3.

    The model was trained with stretched angles in its layers without a window only, and SGLang
    computes it so.
    """
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    if model.config.model_type == "olmo3":
        config = AutoConfig.from_pretrained(folder)
        config.rope_parameters = {"rope_type": "default", "rope_theta": 1e4}
        plain = Olmo3RotaryEmbedding(config)

        def turn(layer, args, named):
            angles = plain(args[0], torch.arange(args[0].shape[1])[None])
            return args, named | {"position_embeddings": angles}

        for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
            if kind == "sliding_attention":
                layer.register_forward_pre_hook(turn, with_kwargs=True)
    return model


def logprobs(model: torch.nn.Module, seed: int) -> torch.Tensor:
    with torch.no_grad():
        return reference_logprobs(model, random_batch(8, VOCAB, seed=seed))


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the gradients by the names of a file, which has the matrices of experts one by one."""
    gradients = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        layer, experts, kind = name.partition(".mlp.experts.")
        if not experts or model.config.model_type == "gpt_oss":
            gradients[name] = parameter.grad
            continue
        parts = ("down_proj",) if kind == "down_proj" else ("gate_proj", "up_proj")
        for number, each in enumerate(parameter.grad):
            for part, gradient in zip(parts, each.chunk(len(parts))):
                gradients[f"{layer}{experts}{number}.{part}.weight"] = gradient
    return gradients


@pytest.mark.parametrize("layout, name", CASES)
def test_a_family_computes_and_trains_as_transformers_do(results, folder, tmp_path, layout, name):
    first, *others = results(layout, name)
    model = reference(folder / name)
    expected = logprobs(model, 100)
    for rank in (first, *others):
        assert (rank["logprobs"] - expected).abs().max() <= 1e-5
    betas = (0.9, SETTINGS["adam_beta2"])
    options = {"lr": SETTINGS["lr"], "eps": SETTINGS["adam_eps"], "weight_decay": 0.0}
    optimizer = torch.optim.AdamW(model.parameters(), betas=betas, **options)
    for step in range(UPDATES):
        batch = random_batch(8, VOCAB, seed=step)
        loss = -reference_logprobs(model, batch).sum() / len(batch.tokens)
        optimizer.zero_grad()
        loss.backward()
        if step == 0 and first["gradients"]:
            gradients = gradients_of(model)
            assert gradients.keys() == first["gradients"].keys()
            for key, gradient in gradients.items():
                error = (first["gradients"][key] - gradient).norm()
                assert error <= 1e-4 * gradient.norm(), key
        optimizer.step()
        assert first["metrics"][step]["loss"] == pytest.approx(loss.item(), rel=2e-5)
    expected = logprobs(model, 101)
    for rank in (first, *others):
        assert (rank["updated"] - expected).abs().max() <= 1e-5
        assert (rank["loaded"] - rank["updated"]).abs().max() <= 1e-5
    exported = folder / place(layout, name) / f"{name}_updated"
    assert (logprobs(reference(exported), 101) - expected).abs().max() <= 1e-5
    model.save_pretrained(tmp_path)
    before, after = weights_of(folder / name), weights_of(tmp_path)
    trained = weights_of(exported)
    assert after.keys() == trained.keys()
    # Adam divides by the size of a gradient, so the errors of tiny gradients count more than above.
    for key, tensor in after.items():
        moved = (tensor - before[key]).norm()
        assert (trained[key] - tensor).norm() <= 1e-3 * moved, key


@pytest.mark.parametrize("layout, name", [case for case in CASES if case.values[1] in ORTHOGONAL])
def test_muon_updates_each_matrix_of_a_file(results, folder, layout, name):
    ranks, model = results(layout, name), reference(folder / name)
    batch = random_batch(8, VOCAB, seed=0)
    (-reference_logprobs(model, batch).sum() / len(batch.tokens)).backward()
    before, after = (
        weights_of(folder / name),
        weights_of(folder / place(layout, name) / f"{name}_muon"),
    )
    found = gradients_of(model)
    matrices = [key for key in found if ".layers." in key and found[key].ndim == 2]
    if name == "gpt_oss":  # all experts in one tensor
        matrices = [key for key in matrices if not key.endswith("_bias")]
        matrices += [key for key in found if found[key].ndim == 3]
    for key in matrices:
        each = found[key].double()
        each = each if each.ndim == 3 else each[None]
        wanted = SETTINGS["lr"] * torch.stack([scaled(matrix) for matrix in each])
        got = (before[key].double() - after[key].double()).view_as(wanted)
        assert (got - wanted).norm() <= 2e-3 * wanted.norm(), key
    trainer = TrainerConfig(**LAYOUTS[layout], optimizer="muon")
    hf = AutoConfig.from_pretrained(folder / name)
    for number, rank in enumerate(ranks):
        stage = number * trainer.pipeline_parallel // len(ranks)
        assert 4 * rank["moments"] == rank_memory(hf, trainer, 4, stage).moments


@pytest.mark.parametrize("layout, name", CASES)
def test_an_export_gives_the_same_bits_back(results, folder, layout, name):
    results(layout, name)
    before, after = weights_of(folder / name), weights_of(folder / place(layout, name) / name)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    "layout, name",
    [case for case in CASES if case.values[0] in ADAPTED and case.values[1] not in UNADAPTED],
)
def test_adapters_are_the_same_in_each_layout_and_their_sum_is_exported(
    results, folder, layout, name
):
    rank, alone = results(layout, name)[0], results("single", name)[0]
    exported = folder / place(layout, name) / f"{name}_adapted"
    assert (logprobs(reference(exported), 101) - rank["adapted"]).abs().max() <= 1e-5
    before, merged, pushed = weights_of(folder / name), weights_of(exported), rank["adapters"]
    changed = {key for key, tensor in merged.items() if not torch.equal(tensor, before[key])}
    names = {key.rpartition(".lora_")[0] for key in pushed}
    assert changed == {f"{name}.weight" for name in names}
    for weight in names:
        a, b = (pushed[f"{weight}.lora_{which}.weight"] for which in "AB")
        total = before[f"{weight}.weight"] + 2.0 * b @ a
        torch.testing.assert_close(merged[f"{weight}.weight"], total, atol=1e-6, rtol=0)
    assert pushed.keys() == alone["adapters"].keys()
    for key, tensor in alone["adapters"].items():
        # Adam moves B by 1e-3 in each update.
        assert (pushed[key] - tensor).abs().max() <= 1e-5, key


@pytest.mark.parametrize("layout, name", CASES)
def test_the_plan_counts_the_parameters_of_each_rank(results, folder, layout, name):
    ranks, trainer = results(layout, name), TrainerConfig(**LAYOUTS[layout])
    stages = [number * trainer.pipeline_parallel // len(ranks) for number in range(len(ranks))]
    hf = AutoConfig.from_pretrained(folder / name)
    for rank, stage in zip(ranks, stages, strict=True):
        assert rank["parameters"] == sum(rank_parameters(hf, trainer, stage))


@pytest.mark.parametrize("itemsize", [4, 2])
@pytest.mark.parametrize("name", quick_unless_alike(FAMILIES))
def test_the_plan_knows_what_autograd_keeps(results, folder, name, itemsize):
    got = results("single", name)[0]["memory"][itemsize]
    hf = AutoConfig.from_pretrained(folder / name)
    planned = activation_bytes_per_token(hf, TrainerConfig(), itemsize, 0)
    planned = got["tokens"] * (planned + kept_after_layers(hf, itemsize))
    if itemsize == 2 and (any(has_window(hf)) or hf.model_type == "gpt_oss"):
        assert got["kept"] > planned, "masks, which the kernels of a GPU do not need"
    else:
        assert got["kept"] == pytest.approx(planned, rel=0.05)
