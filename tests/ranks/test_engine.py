"""The Megatron engine on real processes over gloo, against transformers and torch.optim.AdamW."""

import math
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.ranks.engine_worker import SETTINGS, TEMPERATURE, random_batch
from tests.ranks.processes import run_ranks

WORKER = Path(__file__).with_name("engine_worker.py")
MODELS = ("qwen3_tied", "qwen3_untied", "qwen2_tied", "qwen2_untied")
RUNS = {"single": (1, 1), "tp2": (2, 1), "dp2": (1, 2)}


def make_model(name: str, folder: Path, layers: int = 2) -> None:
    kind, tie = name.split("_")
    common = dict(
        vocab_size=98,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    common |= dict(
        tie_word_embeddings=tie == "tied",
        max_position_embeddings=256,
        rms_norm_eps=1e-6,
        rope_theta=10000.0,
    )
    torch.manual_seed(sum(map(ord, name)))
    if kind == "moe":
        experts = dict(
            num_experts=4, num_experts_per_tok=2, norm_topk_prob=True, moe_intermediate_size=48
        )
        model = transformers.Qwen3MoeForCausalLM(
            transformers.Qwen3MoeConfig(head_dim=32, **experts, **common)
        )
    elif kind == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(head_dim=32, **common))
    else:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**common))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms and biases that matter
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(3.0)
    model.float().save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("engine")


@pytest.fixture(scope="module")
def results(folder) -> dict[str, dict]:
    """Return the results of each run. tp2 comes first: the single run loads its checkpoint."""
    for name in MODELS:
        make_model(name, folder / name)
    models = {name: str(folder / name) for name in MODELS}
    loads = {"single": str(folder / "tp2" / "checkpoint"), "tp2": None, "dp2": None}
    for name in ("tp2", "dp2", "single"):
        tp, dp = RUNS[name]
        run_ranks(
            WORKER,
            {
                "tp": tp,
                "dp": dp,
                "models": models,
                "out": str(folder / name),
                "load_from": loads[name],
            },
            folder / name,
            tp * dp,
        )
    return {name: torch.load(folder / name / "results.pt", weights_only=False) for name in RUNS}


def reference_model(folder: Path, name: str) -> torch.nn.Module:
    return transformers.AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)


def reference(model: torch.nn.Module, batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Compute (log-probs, entropy) of all tokens, one sequence at a time."""
    logprobs, entropies = [], []
    for start, end in zip(batch.cu_seqlens[:-1], batch.cu_seqlens[1:]):
        tokens = torch.from_numpy(batch.tokens[start:end].astype("int64"))
        logp = (model(tokens[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
        logprobs += [torch.zeros(1), logp.gather(-1, tokens[1:, None])[:, 0]]
        entropies += [torch.zeros(1), -(logp.exp() * logp).sum(-1)]
    return torch.cat(logprobs), torch.cat(entropies)


def learning_rate(update: int) -> float:
    """Return the rate of update 1, 2, ...: linear warm-up, then a cosine down to the least."""
    peak, least, warmup, total = (SETTINGS[k] for k in ("lr", "min_lr", "lr_warmup_steps", "steps"))
    if update <= warmup:
        return peak * update / warmup
    return least + (peak - least) * 0.5 * (
        1 + math.cos(math.pi * (update - warmup) / (total - warmup))
    )


def reference_updates(model: torch.nn.Module, updates: int) -> list[dict[str, float]]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [
        {"params": matrices, "weight_decay": SETTINGS["weight_decay"]},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        groups, betas=(0.9, SETTINGS["adam_beta2"]), eps=SETTINGS["adam_eps"]
    )
    history = []
    for step in range(updates):
        batch = random_batch(12, 98, seed=step)
        logprobs, entropy = reference(model, batch)
        weights = torch.from_numpy(batch.rewards[batch.sequence_ids])
        loss = -((weights * logprobs).sum() + 0.1 * entropy.sum()) / len(batch.tokens)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), SETTINGS["clip_grad"])
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step + 1)
        optimizer.step()
        history.append(
            {
                "loss": loss.item(),
                "grad_norm": norm.item(),
                "lr": learning_rate(step + 1),
                "tokens": len(batch.tokens),
            }
        )
    return history


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", MODELS)
def test_logprobs_match_transformers(results, folder, run, name):
    with torch.no_grad():
        expected, _ = reference(reference_model(folder, name), random_batch(16, 98, seed=100))
    got = results[run][f"logprobs/{name}"]
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() <= 5e-6


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("name", MODELS)
def test_export_gives_the_same_bits_back(results, folder, run, name):
    exported = folder / run / f"export_{name}"
    before, after = weights_of(folder / name), weights_of(exported)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    assert (exported / "tokenizer.json").is_file()
    assert transformers.AutoModelForCausalLM.from_pretrained(exported).dtype == torch.float32
    assert not list((folder / run).glob(".*"))  # nothing half-written is left


@pytest.mark.parametrize("name", ("qwen3_tied", "qwen2_untied"))
def test_updates_match_adamw_on_transformers(results, folder, name):
    model = reference_model(folder, name)
    history = reference_updates(model, 3)
    expected = {
        key: value
        for key, value in model.state_dict().items()
        if not (key == "lm_head.weight" and name.endswith("_tied"))
    }
    assert any(h["grad_norm"] > SETTINGS["clip_grad"] for h in history)  # clipping is tested too
    for run in RUNS:
        for got, want in zip(results[run][f"metrics/updated_{name}"], history, strict=True):
            assert got["skipped"] == 0.0
            for key, value in want.items():
                assert got[key] == pytest.approx(value, rel=2e-5, abs=2e-6), (run, key)
        assert largest_difference(weights_of(folder / run / f"updated_{name}"), expected) <= 1e-6


def test_updates_do_not_depend_on_packing(results, folder):
    a, b = (
        weights_of(folder / "single" / name)
        for name in ("updated_qwen3_tied", "updated_one_microbatch")
    )
    assert largest_difference(a, b) <= 1e-6


@pytest.mark.parametrize("run", RUNS)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(results, folder, run):
    assert results[run]["extra"] == {"step": 3, "note": "three updates"}
    assert results[run]["metrics/resumed"] == results[run]["metrics/uninterrupted"]
    a, b = (weights_of(folder / run / name) for name in ("uninterrupted", "resumed"))
    assert largest_difference(a, b) == 0.0


def test_a_checkpoint_of_two_ranks_resumes_on_one(results, folder):
    for got, want in zip(
        results["single"]["metrics/resharded"], results["tp2"]["metrics/uninterrupted"], strict=True
    ):
        assert got == pytest.approx(want, rel=2e-5, abs=2e-6)
    a, b = weights_of(folder / "single" / "resharded"), weights_of(folder / "tp2" / "uninterrupted")
    assert largest_difference(a, b) <= 1e-6


@pytest.mark.parametrize("run", RUNS)
def test_a_loss_that_is_not_finite_on_one_rank_changes_nothing(results, run):
    outcome = results[run]["poison"]
    assert outcome["first"]["skipped"] == 0.0
    assert outcome["bad"]["skipped"] == 1.0
    assert outcome["same"]
    assert outcome["next"]["skipped"] == 0.0
    assert math.isfinite(outcome["next"]["loss"])


def test_bfloat16_trains_with_float32_masters(results):
    history = results["single"]["bfloat16"]
    assert results["single"]["bfloat16/dtypes"] == ["torch.float32", "torch.bfloat16"]
    assert history[-1]["loss"] < history[0]["loss"] - 0.01
