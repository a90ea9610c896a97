"""Requests that weight pushes interrupt, and the tokens that carry the wrong version.

Two models differ in the output layer alone. KV caches stay true under both, and the log-prob of a
token says which model sampled it.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from transformers import Qwen3Config, Qwen3ForCausalLM

from areal_lite.servers.blocking import post, start_post
from areal_lite.servers.registry import ServerInfo

REQUESTS, TOKENS, PUSHES = 8, 600, 6
PROMPTS = np.random.default_rng(0).integers(2, 90, (REQUESTS, 16)).tolist()


def save_models(folder: Path, head_dim: int = 16) -> list[Path]:
    """Write the two models: the second one's output layer is twice the first one's."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=98,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        max_position_embeddings=2048,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.1,
    )
    folders = [folder / name for name in "ab"]
    for path in folders:
        Qwen3ForCausalLM(config).float().save_pretrained(path)
    files = [path / "model.safetensors" for path in folders]
    weights = load_file(files[0])
    weights["lm_head.weight"] = 2 * weights["lm_head.weight"]
    save_file(weights, files[1], metadata={"format": "pt"})
    return folders


def push_disk(server: ServerInfo, model: Path, version: int) -> None:
    body = {"model_path": str(model), "weight_version": str(version), "flush_cache": False}
    post(server, "/update_weights_from_disk", body, 60)


def generate_across_pushes(
    server: ServerInfo, models: list[Path], push: Callable, versions: range, *, pause: bool = True
) -> list[dict]:
    """Return answers that pushes interrupted. Odd versions are those of the second model.

    `pause`: whether the server is paused in place during a push.
    """
    params = {"max_new_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True}
    body = {"sampling_params": params, "return_logprob": True}
    calls = [start_post(server, "/generate", {**body, "input_ids": p}, 120) for p in PROMPTS]
    for version in versions:
        time.sleep(0.3)
        if pause:
            post(server, "/pause_generation", {"mode": "in_place"}, 60)
        push(server, models[version % 2], version)
        if pause:
            post(server, "/continue_generation", {"torch_empty_cache": False}, 60)
    return [call.result() for call in calls]


@torch.no_grad()
def wrong_tags(models: list[Path], answers: list[dict], noise: float = 0.01) -> tuple[int, int]:
    """Return how many tokens carry the tag of the other model, and how many seams there are.

    A token counts if its two log-probs differ by more than `noise`, in nats.
    """
    trunk = Qwen3ForCausalLM.from_pretrained(models[0], dtype=torch.float32).eval()
    heads = [load_file(folder / "model.safetensors")["lm_head.weight"] for folder in models]
    wrong = seams = 0
    for prompt, answer in zip(PROMPTS, answers):
        meta = answer["meta_info"]
        logprobs, tokens, _ = zip(*meta["output_token_logprobs"])
        hidden = trunk.model(torch.tensor([[*prompt, *tokens]])).last_hidden_state[0]
        hidden = hidden[len(prompt) - 1 : -1]
        chosen = torch.tensor(tokens)[:, None]
        own = [(hidden @ h.T).log_softmax(-1).gather(1, chosen)[:, 0].numpy() for h in heads]
        sampled_by_second = np.abs(own[1] - logprobs) < np.abs(own[0] - logprobs)
        clear = np.abs(own[1] - own[0]) > noise
        spans = meta["weight_versions"]
        lengths = [span["end"] - span["start"] for span in spans]
        odd = np.repeat([int(span["version"]) % 2 == 1 for span in spans], lengths)
        wrong += int((clear & (odd != sampled_by_second)).sum())
        seams += len(spans) - 1
    return wrong, seams
