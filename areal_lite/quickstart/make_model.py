"""`areal-lite make-model`: a small checkpoint from nothing, of any architecture that the trainer knows, in Hugging Face format."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from areal_lite.config import MakeModelConfig


def run(config: MakeModelConfig) -> int:
    """Write the checkpoint to `config.out`, complete or not at all. Raises ValueError for sizes that do not fit together."""
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_heads={config.num_heads} is not a multiple of num_kv_heads={config.num_kv_heads}"
        )
    if config.architecture == "qwen3_moe" and config.tie_embeddings:
        raise ValueError(
            "tie_embeddings=true with architecture=qwen3_moe, where SGLang does not share them: set it to false"
        )
    if config.experts_per_token > config.num_experts:
        raise ValueError(
            f"experts_per_token={config.experts_per_token} of num_experts={config.num_experts}: choose fewer"
        )
    out = Path(config.out)
    if out.exists():
        raise ValueError(f"out={config.out} exists already: remove it or choose another folder")
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    from areal_lite.quickstart.char_tokenizer import build_char_tokenizer

    tokenizer = build_char_tokenizer()
    torch.manual_seed(config.seed)
    transformers.utils.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            config.architecture,
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.mlp_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            tie_word_embeddings=config.tie_embeddings,
            max_position_embeddings=config.max_position,
            rope_theta=config.rope_theta,
            initializer_range=config.init_std,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=None,
            **_extras(config),
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # What a layer adds to the residual stream, as in GPT-2.
            if name.endswith(("o_proj.weight", "down_proj.weight", "experts.down_proj")):
                parameter /= (2 * config.num_layers) ** 0.5
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)
    print(
        f"{out}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(tokenizer)} tokens of vocabulary"
    )
    return 0


def _extras(config: MakeModelConfig) -> dict[str, Any]:
    """What only some architectures have."""
    experts = dict(
        num_experts=config.num_experts,
        num_experts_per_tok=config.experts_per_token,
        moe_intermediate_size=config.mlp_size,
        norm_topk_prob=True,
    )
    return {"qwen3_moe": experts, "mistral": {"sliding_window": None}}.get(config.architecture, {})
