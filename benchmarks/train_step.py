"""One optimizer step of the trainer's policy against transformers with torch.optim.AdamW.

    python benchmarks/train_step.py [--steps 15] [--tokens 2048] [--hidden 256] [--layers 4]

Both sides have the same tokens and weights. They take turns in one process, on one thread, so that
other load of the machine falls on both. Ratios are of medians, of wall-clock time and of processor
time. Trust the second one on a busy machine. One batch has sequences of equal length, where the
plain side pads nothing and is at its best. The other is long-tailed, and the plain side pads it.
The loss is the mean negative log-likelihood. The policy also computes entropies. The losses of
both sides must agree. The script writes results/train_step.json.

It also says what share of the machine's peak the engine reaches: operations of its matrices, 6 for
each weight and token, against the fastest product of large matrices that torch offers here.

What the proximal log-probs cost is the difference of two training steps of four minibatches, with
decoupled PPO: `algo.prox=recompute`, and `loglinear`, which has no forward pass before the updates.
It is given as a share of the latter.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from areal_lite.config import AlgoConfig, TrainConfig, TrainerConfig
from areal_lite.megatron.packing import make_microbatches
from areal_lite.megatron.parallel import shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.train_batch import TrainBatch
from areal_lite.trainer.objective import build_objective
from areal_lite.trainer.step import build_models, policy_step

RESULTS = Path(__file__).with_name("results") / "train_step.json"
Step = Callable[[], float]
GROUP, MINIBATCHES = 2, 4


def batch_of(lengths: np.ndarray, vocab: int) -> TrainBatch:
    total, count = int(lengths.sum()), len(lengths)
    mask = np.ones(total, bool)
    mask[np.cumsum(lengths) - lengths] = False  # nothing predicts a first token
    return TrainBatch(
        tokens=np.random.default_rng(1).integers(0, vocab, total).astype(np.int32),
        loss_mask=mask,
        behavior_logprobs=np.zeros(total, np.float32),
        versions=np.zeros(total, np.int32),
        rewards=(np.arange(count) % 2).astype(np.float32),
        group_ids=np.arange(count) // GROUP,
        sample_indices=np.arange(count, dtype=np.int32),
        trace_indices=np.zeros(count, np.int32),
        truncated=np.zeros(count, bool),
        kv_versions=np.zeros(count, np.int32),
        source_keys=np.zeros(count, np.int64),
        cu_seqlens=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
    )


def make_model(folder: Path, args: argparse.Namespace) -> Path:
    torch.manual_seed(0)
    heads = args.hidden // 64
    config = Qwen3Config(
        hidden_size=args.hidden,
        intermediate_size=3 * args.hidden,
        num_hidden_layers=args.layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        head_dim=64,
        vocab_size=args.vocab,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).float().save_pretrained(folder)
    return folder


def engine_step(model: Path, batch: TrainBatch, settings: TrainerConfig) -> Step:
    """Return a step from the batch to the updated weights, with packing."""
    engine = Policy(settings, model, seed=1)
    mask, count = torch.from_numpy(batch.loss_mask), float(batch.loss_mask.sum())

    def loss(logprobs, entropy, microbatch):
        index = microbatch.token_index
        return -(logprobs * mask[index]).sum() / count, {"entropy": entropy.detach().sum()}

    def step() -> float:
        return engine.update(make_microbatches(batch, settings.tokens_per_microbatch), loss)["loss"]

    return step


def training_step(model: Path, batch: TrainBatch, settings: TrainerConfig, prox: str) -> Step:
    """Return a training step of four minibatches with these proximal log-probs."""
    settings = replace(settings, minibatches=MINIBATCHES, lr=1e-9)
    config = TrainConfig(model=str(model), algo=AlgoConfig(prox=prox), trainer=settings)
    objective = build_objective(config)
    models = build_models(config, objective)
    return lambda: policy_step(models, objective, batch, config, 0).metrics["loss"]


def peak(size: int = 1024, tries: int = 20) -> float:
    """Return operations a second of processor time of large float32 products, the best of some."""
    a, b = torch.randn(size, size), torch.randn(size, size)
    products = (
        lambda: a @ b,
        lambda: torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], ""),
    )
    best = 0.0
    for product in products:
        for _ in range(tries):
            begin = time.process_time()
            product()
            best = max(best, 2 * size**3 / (time.process_time() - begin))
    return best


def matrix_operations(model: Path, tokens: int) -> int:
    """Return the operations of a step's matrices: 6 for each weight and token."""
    network = AutoModelForCausalLM.from_pretrained(model)
    weights = sum(p.numel() for p in network.parameters() if p.ndim == 2)
    return 6 * weights * tokens  # the embedding is a gather, but it is the head, too


def plain_step(model: Path, batch: TrainBatch, settings: TrainerConfig) -> Step:
    """Run one forward pass of the sequences as rows, padded to the longest.

    Without padding there is no mask.
    """
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    betas = (0.9, settings.adam_beta2)
    optimizer = torch.optim.AdamW(
        network.parameters(), lr=settings.lr, betas=betas, eps=settings.adam_eps, weight_decay=0.0
    )
    rows = torch.nn.utils.rnn.pad_sequence(
        [
            torch.from_numpy(t.astype(np.int64))
            for t in np.split(batch.tokens, batch.cu_seqlens[1:-1])
        ],
        batch_first=True,
    )
    real = torch.arange(rows.shape[1]) < torch.from_numpy(batch.lengths)[:, None]
    attention_mask = None if real.all() else real.long()

    def step() -> float:
        optimizer.zero_grad()
        logits = network(rows, attention_mask=attention_mask, use_cache=False).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, rows[:, 1:, None])[..., 0]
        loss = -(logprobs * real[:, 1:]).sum() / real[:, 1:].sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), settings.clip_grad)
        optimizer.step()
        return loss.item()

    return step


def compare(model: Path, batch: TrainBatch, steps: int) -> dict[str, float]:
    settings = TrainerConfig(
        steps=10**6, tokens_per_microbatch=10**6, device="cpu", dtype="float32", lr=1e-4
    )
    sides = {
        "recompute": training_step(model, batch, settings, "recompute"),
        "loglinear": training_step(model, batch, settings, "loglinear"),
        "engine": engine_step(model, batch, settings),
        "plain": plain_step(model, batch, settings),
    }
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
    for number in range(steps + 2):
        losses = {}
        for name, step in sides.items():
            wall, busy = time.perf_counter(), time.process_time()
            losses[name] = step()
            seconds[name].append((time.perf_counter() - wall, time.process_time() - busy))
        if abs(losses["engine"] - losses["plain"]) > 1e-3:
            raise RuntimeError(f"step {number}: the two sides differ: {losses}")
    row = {}
    for i, clock in enumerate(("wall", "processor")):
        median = {
            name: statistics.median(taken[i] for taken in seconds[name][2:]) for name in sides
        }  # the first two warm up
        row |= {f"{name}_{clock}_ms": 1e3 * value for name, value in median.items()}
        row[f"{clock}_ratio"] = median["engine"] / median["plain"]
    row["proximal_share"] = row["recompute_processor_ms"] / row["loglinear_processor_ms"] - 1
    operations = matrix_operations(model, int(batch.cu_seqlens[-1]))
    row["peak_share"] = 1e3 * operations / row["engine_processor_ms"] / peak()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in dict(steps=15, tokens=2048, hidden=256, layers=4, vocab=2048).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    equal = np.full(args.tokens // 128, 128)
    tailed = np.clip(np.random.default_rng(0).lognormal(4.0, 0.9, 1000), 8, 512).astype(int)
    count = int(np.searchsorted(np.cumsum(tailed), args.tokens))
    tailed = tailed[: count - count % (GROUP * MINIBATCHES)]
    results = {"settings": vars(args)}
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder), args)
        for name, lengths in {"equal lengths": equal, "long-tailed lengths": tailed}.items():
            results[name] = row = compare(model, batch_of(lengths, args.vocab), args.steps)
            print(f"{name}: {len(lengths)} sequences of {lengths.min()} to {lengths.max()} tokens")
            print(
                f"share of the peak {row['peak_share']:.2f}, "
                f"proximal log-probs take {row['proximal_share']:.2f} of a training step"
            )
            for clock in ("wall", "processor"):
                ms = [row[f"{side}_{clock}_ms"] for side in ("engine", "plain")]
                print(
                    f"{clock:>12s} time: engine {ms[0]:7.1f} ms, plain {ms[1]:7.1f} ms, "
                    f"ratio {row[f'{clock}_ratio']:.3f}",
                    flush=True,
                )
    shutdown()
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
