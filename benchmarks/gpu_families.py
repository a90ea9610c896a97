"""The part of gpu.py about families of models: each one in the trainer and in a server.

Models are small, but have the heads, windows and experts of the published ones. `tiny` models have
a window that cuts their short sequences, and also run without a GPU.
"""

import json
import re
import tempfile
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from importlib.util import find_spec
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import gpu_runs
import numpy as np
import torch
from gpu_parts import CUDA, DEVICE, Result, random_batch, reference_logprobs
from gpu_prefixes import Lengths, grouped_batch
from gpu_runs import generate, serving
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import import_utils

from areal_lite.config import TrainerConfig
from areal_lite.megatron.packing import Microbatch, make_microbatches
from areal_lite.megatron.parallel import shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.train_batch import TrainBatch

SERVER_ARGS: dict[str, str | bool] = {}  # more options of SGLang for every server
SERVED = {"mem_fraction_static": 0.15, "max_total_tokens": 32768, "max_running_requests": 16}
TOGETHER = 8  # families that are tried at the same time
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 128}
NETS = {
    "head_dim": 256,
    "layer_types": None,
    "full_attention_interval": 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "rms_norm_eps": 1e-3,  # a state of one token is almost zero, and its norm amplifies rounding
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Gemma 3": (
        "gemma3_text",
        WINDOWS | {"head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True},
    ),
    "gpt-oss": (
        "gpt_oss",
        WINDOWS
        | {"head_dim": 64, "num_local_experts": 16, "num_experts_per_tok": 4}
        | {"swiglu_limit": 7.0},
    ),
    "DeepSeek-V3": (
        "deepseek_v3",
        EXPERTS
        | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
        | {"kv_lora_rank": 256, "q_lora_rank": 192, "num_key_value_heads": 8}
        | {"n_routed_experts": 16, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
        | {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    ),
    "GLM-4.5": (
        "glm4_moe",
        EXPERTS
        | {"head_dim": 128, "n_routed_experts": 16, "use_qk_norm": True, "attention_bias": True}
        | {"first_k_dense_replace": 1},
    ),
    "Qwen3-Next": (
        "qwen3_next",
        NETS
        | EXPERTS
        | {"num_experts": 16, "shared_expert_intermediate_size": 128, "norm_topk_prob": True},
    ),
    "Qwen3.5": ("qwen3_5_text", NETS),
    "SmolLM3": ("smollm3", {"no_rope_layer_interval": 4}),
    "Phi-4": ("phi3", {"partial_rotary_factor": 0.75, "sliding_window": None}),
}


def families(tiny: bool) -> Result:
    """Compute and train each family in each layout, and compare it with transformers."""
    numbers: dict[str, Any] = {"kernels of flash-linear-attention": find_spec("fla") is not None}
    checks: dict[str, bool] = {}
    with ThreadPoolExecutor(TOGETHER if CUDA else 1) as pool:
        for name, (found, held) in zip(FAMILIES, pool.map(partial(_alone, tiny), FAMILIES)):
            numbers |= {f"{name}: {key}": value for key, value in found.items()}
            checks |= {f"{name}: {key}": value for key, value in held.items()}
    return numbers, checks


def _alone(tiny: bool, name: str) -> Result:
    """Compare a family in a process of its own, whose later work an error on the GPU would end."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return _caught(pool.submit(_family, name, tiny, SERVER_ARGS).result)


def _caught(function: Callable[[], Result]) -> Result:
    """Return the result of a function, or its error: the others still have something to tell."""
    try:
        return function()
    except Exception as error:
        traceback.print_exc()
        what = re.split("[;\n]", str(error))[0]  # the log has the rest
        return {"error": f"{type(error).__name__}: {what}"}, {"it runs": False}


def _family(name: str, tiny: bool, server_args: dict[str, str | bool]) -> Result:
    """Compare one family with transformers: in the trainer, then in a server."""
    torch.backends.cudnn.allow_tf32 = False
    # Transformers' own loops: kernels of other packages round float32 to fewer bits.
    import_utils.is_flash_linear_attention_available = lambda: False
    gpu_runs.SERVER_ARGS.update(server_args)
    model = _save_model(name, tiny)
    numbers, checks = _caught(lambda: _trained(model, tiny))
    more, held = _caught(lambda: _served(model, tiny))
    return numbers | {f"server: {key}": value for key, value in more.items()}, checks | {
        f"server: {key}": value for key, value in held.items()
    }


def _trained(model: Path, tiny: bool) -> Result:
    """Compare the trainer, plain and with shared prefixes, in bfloat16 and in float32."""
    lengths = Lengths(20, 12, 4, 3) if tiny else Lengths(300, 200, 4, 6)
    vocab = AutoConfig.from_pretrained(model).vocab_size
    batch = grouped_batch(lengths, vocab)
    sequences = np.split(batch.tokens, batch.cu_seqlens[1:-1])
    mask = torch.from_numpy(batch.loss_mask).to(DEVICE)
    exact, rounded = (
        torch.cat(reference_logprobs(model, dtype, sequences))[mask]
        for dtype in (torch.float32, torch.bfloat16)
    )
    rounding = (rounded - exact).abs().mean().item()
    norm = _reference_norm(model, batch)
    found: dict[str, float] = {"transformers in bfloat16": rounding}
    norms: dict[str, float] = {}
    for dtype in ("float32", "bfloat16"):
        settings = TrainerConfig(lr=1e-9, tokens_per_microbatch=1 << 16, dtype=dtype)
        policy = Policy(settings, model, 1)
        for layout, share in (("plain", False), ("shared", True)):
            microbatches = make_microbatches(
                batch, settings.tokens_per_microbatch, scored=batch.sampled, share=share
            )
            got = policy.logprobs(microbatches).float()[mask]
            found[f"{dtype}, {layout}"] = (got - exact).abs().mean().item()
            norms[f"{dtype}, {layout}"] = policy.update(microbatches, _loss(batch))["grad_norm"]
        shutdown()
    off = {key: abs(value / norm - 1) for key, value in norms.items()}
    numbers = {
        "errors of log-probs, nats": {key: float(f"{x:.2g}") for key, x in found.items()},
        "norm of the gradient is off by": {key: float(f"{x:.2g}") for key, x in off.items()},
    }
    checks = {}
    for key in norms:
        exactly = key.startswith("float32")
        checks[f"log-probs, {key}"] = found[key] < (1e-4 if exactly else 1.6 * rounding)
        checks[f"gradients, {key}"] = off[key] < (1e-3 if exactly else 0.05)
    return numbers, checks


def _served(model: Path, tiny: bool) -> Result:
    """Compare the log-probs of what a server samples, in bfloat16."""
    vocab = AutoConfig.from_pretrained(model).vocab_size
    with serving(model, model.parent / "server.log", **(SERVED if CUDA else {})) as server:
        done = generate(server, 8, 20 if tiny else 200, vocab)
    sequences = [one["tokens"] for one in done]
    batch = random_batch(np.array([len(tokens) for tokens in sequences]), 2)
    batch.tokens[:] = np.concatenate(sequences)
    policy = Policy(TrainerConfig(dtype="bfloat16"), model, 1)
    own = policy.logprobs(policy.microbatches(batch)).float().cpu()
    shutdown()
    exact, rounded = (
        torch.cat([x.cpu()[32:] for x in reference_logprobs(model, dtype, sequences)])
        for dtype in (torch.float32, torch.bfloat16)
    )
    served = torch.from_numpy(np.concatenate([one["logprobs"] for one in done]))
    trained = torch.cat([x[32:] for x in own.split([len(tokens) for tokens in sequences])])
    rounding = (rounded - exact).abs().mean().item()
    off = (served - exact).abs().mean().item()
    apart = (served - trained).abs().mean().item()
    numbers = {
        "errors of transformers and of the server, difference to the trainer, nats": [
            float(f"{x:.2g}") for x in (rounding, off, apart)
        ]
    }
    return numbers, {"log-probs": off < 1.6 * rounding, "trainer agrees": apart < 1.6 * rounding}


def _save_model(name: str, tiny: bool) -> Path:
    """Write a random model in bfloat16 and return its folder."""
    folder = Path(tempfile.mkdtemp()) / "model"
    kind, fields = FAMILIES[name]
    window = {"sliding_window": 7 if tiny else 128} if WINDOWS.items() <= fields.items() else {}
    sizes: dict[str, Any] = dict(
        vocab_size=512 if tiny else 8192,
        hidden_size=64 if tiny else 512,
        intermediate_size=96 if tiny else 1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        tie_word_embeddings=False,
        max_position_embeddings=2048,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
        initializer_range=0.04,
    )
    if kind == "gemma3_text":  # layers with a window have an embedding of their own
        del sizes["rope_parameters"]
    none = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(sizes | none | window | fields))
    with DEVICE:
        model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, tensor in (*model.named_parameters(), *model.named_buffers()):
            if key.endswith("A_log"):  # states that last from several tokens to a sequence
                tensor.uniform_(-5, 0)
            elif key.endswith(("sinks", "e_score_correction_bias")):
                tensor.normal_(0, 0.1)
    model.bfloat16().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    if "full_attention_interval" in fields:  # it is not saved, and SGLang reads it
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    return folder


def _loss(batch: TrainBatch):
    """Return the loss of `Policy.update`: minus the mean log-prob of the sampled tokens."""
    mask, count = torch.from_numpy(batch.loss_mask).to(DEVICE), float(batch.loss_mask.sum())

    def loss(logprobs: Tensor, entropy: Tensor, microbatch: Microbatch) -> tuple[Tensor, dict]:
        return -(logprobs * mask[microbatch.token_index]).sum() / count, {}

    return loss


def _reference_norm(model: Path, batch: TrainBatch) -> float:
    """Return the norm of the gradient of that loss by transformers in float32."""
    network: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(DEVICE)
    count = float(batch.loss_mask.sum())
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:]):
        ids = torch.from_numpy(batch.tokens[start:end].astype(np.int64)).to(DEVICE)
        mask = torch.from_numpy(batch.loss_mask[start:end]).to(DEVICE)[1:]
        values = network(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        (-(values * mask).sum() / count).backward()
    grads = [p.grad for p in network.parameters() if p.grad is not None]
    return torch.nn.utils.get_total_norm(grads).item()
