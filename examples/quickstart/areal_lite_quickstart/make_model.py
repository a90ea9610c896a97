"""Write a small, randomly initialized checkpoint in Hugging Face format.

python -m areal_lite_quickstart.make_model out=FOLDER num_layers=2 …
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from areal_lite.cli import run_command
from areal_lite.data.model_folder import DELTA_NETS
from areal_lite.system.files import new_folder
from areal_lite_quickstart.command import EXPERTS, MakeModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

# What adds to the residual stream.
_RESIDUAL = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "experts.down_proj")
_INTERVAL = 2  # of layers with full attention, where others have a gated delta net
_UNTIED = ("qwen3_moe", "qwen3_next", "glm4_moe", "gpt_oss", "deepseek_v3")
PAD, EOS = "<pad>", "<eos>"
CHARACTERS = "\n" + "".join(map(chr, range(32, 127)))

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


def build_char_tokenizer() -> PreTrainedTokenizerFast:
    """Build a tokenizer with one token per printable ASCII character, 98 tokens.

    Any other character becomes `?`. `<pad>` is id 0 and `<eos>` is id 1, spelled out, too.
    The chat template adds only `<eos>` after an assistant's message, so a user's message is its own
    prompt. Ids never change, so saved models stay valid.
    """
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    vocab = {token: i for i, token in enumerate([PAD, EOS, *CHARACTERS])}
    # BPE without merges splits text into characters and needs no pre-tokenizer.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
        chat_template=CHAT_TEMPLATE,
    )


def run(config: MakeModelConfig) -> int:
    """Write the checkpoint to `config.out`, complete or not at all.

    Raises ValueError if the settings do not fit together or the folder exists.
    """
    _check(config)
    tokenizer = build_char_tokenizer()
    model = _new_model(config, tokenizer)
    out = Path(config.out)
    with new_folder(out) as scratch:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        _write_what_sglang_reads(scratch / "config.json", config.architecture)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{out}: {parameters / 1e6:.2f} M parameters, {len(tokenizer)} tokens of vocabulary")
    return 0


def _check(config: MakeModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        raise ValueError(
            f"num_heads={config.num_heads} is not a multiple of num_kv_heads={config.num_kv_heads}"
        )
    if config.architecture in _UNTIED and config.tie_embeddings:
        raise ValueError(
            f"tie_embeddings=true with architecture={config.architecture}, whose embeddings SGLang"
            " does not share: set it to false"
        )
    if config.architecture == "olmo3" and config.num_heads * config.head_dim != config.hidden_size:
        raise ValueError(
            f"num_heads={config.num_heads} x head_dim={config.head_dim} is not"
            f" hidden_size={config.hidden_size}, as SGLang wants it for olmo3: set head_dim"
        )
    if config.architecture == "deepseek_v3" and config.num_kv_heads != config.num_heads:
        raise ValueError(
            f"num_kv_heads={config.num_kv_heads} with architecture=deepseek_v3, whose heads have"
            f" keys of their own: set it to num_heads={config.num_heads}"
        )
    if config.experts_per_token > config.num_experts:
        raise ValueError(
            f"experts_per_token={config.experts_per_token} of num_experts={config.num_experts}:"
            " choose fewer"
        )
    if Path(config.out).exists():
        raise ValueError(f"out={config.out} exists already: remove it or choose another folder")


def _write_what_sglang_reads(path: Path, architecture: str) -> None:
    """Write where SGLang reads it: OLMo 3's base of rotations, and which layers have attention."""
    values = json.loads(path.read_text())
    if architecture == "olmo3":
        values["rope_theta"] = values.pop("rope_parameters")["rope_theta"]
    if architecture in DELTA_NETS:
        values["full_attention_interval"] = _INTERVAL
    path.write_text(json.dumps(values, indent=2) + "\n")


def _new_model(config: MakeModelConfig, tokenizer: PreTrainedTokenizerFast) -> PreTrainedModel:
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

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
            **_architecture_settings(config),
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            # Scale what each layer adds to the residual stream, as GPT-2 does.
            if name.endswith(_RESIDUAL):
                parameter /= (2 * config.num_layers) ** 0.5
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    return model


def _architecture_settings(config: MakeModelConfig) -> dict[str, Any]:
    settings = {}
    if config.architecture in EXPERTS:
        settings |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.experts_per_token,
            "moe_intermediate_size": config.mlp_size,
            "norm_topk_prob": True,
        }
    if config.architecture == "glm4_moe":
        settings |= {"n_routed_experts": settings.pop("num_experts"), "attention_bias": True}
    if config.architecture == "deepseek_v3":
        settings |= {"n_routed_experts": settings.pop("num_experts"), "n_group": 1}
        settings |= {"moe_layer_freq": 1, "topk_method": "noaux_tc"}
        settings |= {"topk_group": 1, "first_k_dense_replace": 1, "v_head_dim": config.head_dim}
        settings |= dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 2 * config.head_dim)
        settings |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim"), config.head_dim)
    if config.architecture == "gpt_oss":
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        settings |= {"swiglu_limit": 7.0, "rope_parameters": rope}
    if config.architecture in DELTA_NETS:
        settings |= {
            "full_attention_interval": _INTERVAL,
            "shared_expert_intermediate_size": config.mlp_size,
            "linear_num_key_heads": config.num_kv_heads,
            "linear_num_value_heads": config.num_heads,
            "linear_key_head_dim": config.head_dim,
            "linear_value_head_dim": config.head_dim,
        }
    if config.architecture == "gemma3_text":
        settings["query_pre_attn_scalar"] = config.head_dim
    if config.architecture == "mistral":
        settings["sliding_window"] = None
    return settings


if __name__ == "__main__":
    sys.exit(run_command("make-model", sys.argv[1:]))
