"""Training throughput of dynamic microbatches against fixed padded ones, on a long-tailed batch.

    python benchmarks/packing.py [--sequences 64] [--budget 2048] [--rounds 5] [--hidden 128]

All sides are the same policy on one thread, from the batch to the updated weights, and take turns.

* Dynamic: whole sequences of up to `budget` tokens, without padding.
* Fixed: rows in their original order. Their number is such that `budget` suffices even if every row
  is as long as the longest one. Rows are padded to the longest of their microbatch or of the batch.
  Padding is computed like any token and has no loss.

Real tokens per second are from medians, of wall-clock time and of processor time. Trust the second
one on a busy machine. The losses must agree. The script writes results/packing.json.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import transformers
from train_step import batch_of, make_model

from areal_lite.config import TrainerConfig
from areal_lite.megatron.packing import Microbatch, make_microbatches
from areal_lite.megatron.parallel import shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.train_batch import TrainBatch

RESULTS = Path(__file__).with_name("results") / "packing.json"


def padded(batch: TrainBatch, widths: np.ndarray) -> TrainBatch:
    """Pad sequence i to `widths[i]` tokens."""
    result = batch_of(widths, vocab=1)
    token_index = np.arange(len(batch.tokens)) + np.repeat(
        result.cu_seqlens[:-1] - batch.cu_seqlens[:-1], batch.lengths
    )
    result.tokens[token_index] = batch.tokens
    result.loss_mask[:] = False
    result.loss_mask[token_index] = batch.loss_mask
    return result


def rows_in_order(batch: TrainBatch, rows: int) -> list[Microbatch]:
    """Split the sequences, in order, into microbatches of `rows` sequences each."""
    microbatches = []
    for first in range(0, batch.num_sequences, rows):
        part = batch.select(range(first, min(first + rows, batch.num_sequences)))
        (microbatch,) = make_microbatches(part, len(part.tokens))
        microbatch.token_index += int(batch.cu_seqlens[first])
        microbatches.append(microbatch)
    return microbatches


def step_of(
    engine: Policy, batch: TrainBatch, microbatches: Callable[[], list[Microbatch]]
) -> Callable[[], float]:
    mask, count = torch.from_numpy(batch.loss_mask), float(batch.loss_mask.sum())

    def loss(logprobs, entropy, microbatch):
        return -(logprobs * mask[microbatch.token_index]).sum() / count, {}

    return lambda: engine.update(microbatches(), loss)["loss"]


def sides(
    model: Path, batch: TrainBatch, budget: int
) -> tuple[dict[str, Callable[[], float]], dict[str, int]]:
    """Return a training step of each side and the number of tokens that it computes."""
    longest = int(batch.lengths.max())
    rows = budget // longest
    starts = np.arange(0, batch.num_sequences, rows)
    of_microbatch = np.repeat(np.maximum.reduceat(batch.lengths, starts), rows)[
        : batch.num_sequences
    ]
    batches = {
        "dynamic": batch,
        "padded to the microbatch's longest": padded(batch, of_microbatch),
        "padded to the batch's longest": padded(batch, np.full(batch.num_sequences, longest)),
    }
    settings = TrainerConfig(
        steps=10**6, tokens_per_microbatch=budget, device="cpu", dtype="float32"
    )
    steps = {}
    for name, data in batches.items():
        microbatches = (
            (lambda: make_microbatches(batch, budget))
            if name == "dynamic"
            else (lambda data=data: rows_in_order(data, rows))
        )
        steps[name] = step_of(Policy(settings, model, seed=1), data, microbatches)
    return steps, {name: len(data.tokens) for name, data in batches.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in dict(
        sequences=64, budget=2048, rounds=5, hidden=128, layers=4, vocab=512
    ).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    lengths = np.clip(
        np.random.default_rng(0).lognormal(4.5, 0.8, args.sequences), 16, args.budget // 2
    ).astype(int)
    batch = batch_of(lengths, args.vocab)
    with tempfile.TemporaryDirectory() as folder:
        steps, computed = sides(make_model(Path(folder), args), batch, args.budget)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(args.rounds + 1):
        losses = []
        for name, step in steps.items():
            wall, busy = time.perf_counter(), time.process_time()
            losses.append(step())
            seconds[name].append((time.perf_counter() - wall, time.process_time() - busy))
        if max(losses) - min(losses) > 1e-3:
            raise RuntimeError(f"the sides differ: {losses}")
    shutdown()
    print(
        f"{len(lengths)} sequences of {lengths.min()} to {lengths.max()} tokens, "
        f"{lengths.sum()} in all, budget {args.budget}"
    )
    rows = {}
    for name, taken in seconds.items():
        row = {"computed_tokens": computed[name]}
        for i, clock in enumerate(("wall", "processor")):
            row[f"{clock}_tokens_per_s"] = len(batch.tokens) / statistics.median(
                t[i] for t in taken[1:]
            )  # the first warms up
            row[f"{clock}_ratio"] = (
                rows.get("dynamic", row)[f"{clock}_tokens_per_s"] / row[f"{clock}_tokens_per_s"]
            )
        rows[name] = row
        print(
            f"{name:35s} {row['computed_tokens']:6d} tokens computed, "
            f"{row['wall_tokens_per_s']:6.0f} real tok/s of wall-clock, "
            f"{row['processor_tokens_per_s']:6.0f} of processor time; "
            f"dynamic {row['wall_ratio']:.2f} and {row['processor_ratio']:.2f} times that"
        )
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({"settings": vars(args), "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
