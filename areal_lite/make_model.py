"""`areal-lite make-model`: a small Qwen3-architecture checkpoint from nothing, in Hugging Face format."""

from __future__ import annotations

import shutil
from pathlib import Path

from areal_lite.config import MakeModelConfig


def run(config: MakeModelConfig) -> int:
    """Write the checkpoint to `config.out`, complete or not at all. Raises ValueError for sizes that do not fit together."""
    if config.num_heads % config.num_kv_heads:
        raise ValueError(f"num_heads={config.num_heads} is not a multiple of num_kv_heads={config.num_kv_heads}")
    out = Path(config.out)
    if out.exists():
        raise ValueError(f"out={config.out} exists already: remove it or choose another folder")
    import torch
    import transformers
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    from areal_lite.data.char_tokenizer import build_char_tokenizer

    tokenizer = build_char_tokenizer()
    torch.manual_seed(config.seed)
    transformers.utils.logging.disable_progress_bar()
    model = Qwen3ForCausalLM(
        Qwen3Config(
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
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):  # what a layer adds to the residual stream, as in GPT-2
                parameter /= (2 * config.num_layers) ** 0.5
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.parent.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)
    print(f"{out}: {sum(p.numel() for p in model.parameters()) / 1e6:.2f} M parameters, {len(tokenizer)} tokens of vocabulary")
    return 0
