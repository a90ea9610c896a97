"""What the trainer saves by computing shared prefixes once, against the plain layout.

    python -m benchmarks.prefixes [--steps 9] [--model FOLDER] [--examples compaction coding_agent]

One optimizer step of 64 sequences of 128 tokens that share 0, 50, 85 or 95 % of all tokens, in both
layouts, in turns in one process on one thread. Times are medians of processor time. A step also has
a part that does not depend on tokens, such as AdamW: the time of a step of two tokens. The ideal
saving is the shared part of the rest. Memory is the growth of the process at its peak.

With --model, a folder of a chat model, it also takes the steps of a small task: 8 groups of 8
answers of 6 to 14 tokens to prompts of 45. `scored` is the plain layout with an output layer for
sampled tokens only. The losses of all sides must agree.

With --examples it runs these agents, and trains on the batches of each run again in both layouts,
with one thread and without servers: medians of the steps. The script writes
results/prefixes.json, and keeps what is there of the parts that it leaves out.
"""

import argparse
import ctypes
import gc
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from areal_lite.config import TrainerConfig
from areal_lite.megatron.packing import make_microbatches
from areal_lite.megatron.parallel import shutdown
from areal_lite.megatron.policy import Policy
from areal_lite.train_batch import TrainBatch
from benchmarks.launch import ROOT
from benchmarks.train_step import batch_of, make_model

RESULTS = Path(__file__).with_name("results") / "prefixes.json"
SEQUENCES, LENGTH = 64, 128
BUDGET = 8192
SIDES = {
    "plain": dict(share=False, scored=False),
    "scored": dict(share=False, scored=True),
    "shared": dict(share=True, scored=True),
}


def grouped_batch(group: int, prompt: int, answers: np.ndarray, vocab: int) -> TrainBatch:
    """Make groups of `group` sequences with prompts of `prompt` tokens; answers: their lengths."""
    batch, rng = batch_of(prompt + answers, vocab), np.random.default_rng(2)
    starts = batch.cu_seqlens[:-1].reshape(-1, group)
    for first, *others in starts:
        for start in others:
            batch.tokens[start : start + prompt] = batch.tokens[first : first + prompt]
    places = np.concatenate([np.arange(n) for n in batch.lengths])
    batch.versions[places < max(prompt, 1)] = -1
    batch.rewards = rng.normal(size=len(answers)).astype(np.float32)
    return replace(batch, loss_mask=batch.versions >= 0)


def step_of(policy: Policy, batch: TrainBatch, share: bool, scored: bool) -> Callable[[], float]:
    """Return an update on the mean negative log-likelihood, which returns its loss."""
    mask, count = torch.from_numpy(batch.loss_mask), float(batch.loss_mask.sum())
    options = dict(share=share, scored=batch.sampled if scored else None)

    def loss(logprobs, entropy, microbatch):
        return -(logprobs * mask[microbatch.token_index]).sum() / count, {}

    return lambda: policy.update(make_microbatches(batch, BUDGET, **options), loss)["loss"]


def growth_at_peak(step: Callable[[], float]) -> int:
    """Return the bytes by which a step makes the process grow at its peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status("VmRSS")
    step()
    return _status("VmHWM") - before


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def measure(steps: dict[str, Callable[[], float]], repeats: int) -> dict[str, dict[str, float]]:
    """Take the steps in turns; return seconds of processor time and bytes at the peak of each."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(repeats + 1):  # the first one warms up
        losses = {}
        for name, step in steps.items():
            begin = time.process_time()
            losses[name] = step()
            seconds[name] += [time.process_time() - begin] * (number > 0)
        if max(losses.values()) - min(losses.values()) > 1e-4:
            raise RuntimeError(f"the sides differ: {losses}")
    return {
        name: {"processor_s": statistics.median(taken), "peak_bytes": growth_at_peak(steps[name])}
        for name, taken in seconds.items()
    }


def compare(policy: Policy, batch: TrainBatch, vocab: int, repeats: int) -> dict:
    steps = {name: step_of(policy, batch, **side) for name, side in SIDES.items()}
    row: dict = measure(steps, repeats)
    tiny = {"fixed": step_of(policy, batch_of(np.array([2]), vocab), **SIDES["plain"])}
    fixed = measure(tiny, repeats)["fixed"]["processor_s"]
    computed = sum(len(m.trie.token) for m in make_microbatches(batch, BUDGET))
    row["fixed_s"], row["computed"] = fixed, computed / len(batch.tokens)
    # The scored side has the same output layer, so what is left is the layout's.
    scored, shared = row["scored"]["processor_s"], row["shared"]["processor_s"]
    possible = (scored - fixed) * (1 - row["computed"])
    row["saving"] = (scored - shared) / possible if possible else None
    row["ratio"] = shared / row["plain"]["processor_s"]
    row["ratio_to_scored"] = shared / scored
    return row


def replay(example: str, work: Path, steps: int) -> dict[str, dict[str, float]]:
    """Run an example, and train on its batches again in both layouts.

    Returns of each layout the seconds of a step, and the share of the tokens that it computes.
    """
    stored = run_example(example, work / example, steps)
    found = {}
    for side in ("plain", "shared"):
        again = [f"debug=train_only:{stored}", f"trainer.share_prefixes={side == 'shared'}"]
        folder = run_example(example, work / f"{example}-{side}", steps, *again)
        lines = [json.loads(line) for line in open(folder / "metrics.jsonl")]
        found[side] = {
            key: statistics.median(line[key] for line in lines[1:])
            for key in ("train_s", "computed_share")
        }
    return found


def run_example(example: str, folder: Path, steps: int, *settings: str) -> Path:
    """Run an example, of `steps` steps without evaluations, and return its run directory."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    own = [f"run_dir={folder}", f"trainer.steps={steps}", "eval.problems=0", *settings]
    with open(folder.with_suffix(".log"), "w") as log:
        subprocess.run(
            ["bash", ROOT / "examples" / example / "run.sh", *own],
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
            stdout=log,
            stderr=log,
            check=True,
        )
    return folder


def show(name: str, row: dict) -> None:
    sides = ", ".join(
        f"{side} {1e3 * row[side]['processor_s']:,.0f} ms and {row[side]['peak_bytes'] >> 20:,} MiB"
        for side in SIDES
    )
    saving = "" if row["saving"] is None else f", {row['saving']:.2f} of the possible saving"
    print(f"{name}: computes {row['computed']:.0%}: {sides}; ratio {row['ratio']:.3f}{saving}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    for name, default in dict(steps=9, hidden=256, layers=4, vocab=2048).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--examples", nargs="+", default=[])
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "prefixes")
    args = parser.parse_args()
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for example in args.examples:
        results[example] = row = replay(example, args.work, args.steps)
        print(example, row, flush=True)
    if not args.examples:
        results |= one_step(args)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


def one_step(args: argparse.Namespace) -> dict:
    """Measure single steps of a toy, and of a chat model if there is one."""
    torch.set_num_threads(1)
    settings = TrainerConfig(steps=10**6, lr=1e-9, device="cpu", dtype="float32")
    sizes = {name: getattr(args, name) for name in ("steps", "hidden", "layers", "vocab")}
    results: dict = {"settings": {**sizes, "model": args.model and args.model.name}}
    with tempfile.TemporaryDirectory() as folder:
        policy = Policy(settings, make_model(Path(folder), args), seed=1)
        for share in (0, 50, 85, 95):
            prompt = round(share / 100 * LENGTH * SEQUENCES / (SEQUENCES - 1))
            answers = np.full(SEQUENCES, LENGTH - prompt)
            batch = grouped_batch(SEQUENCES, prompt, answers, args.vocab)
            results[f"{share} %"] = row = compare(policy, batch, args.vocab, args.steps)
            show(f"{share} % shared", row)
    if args.model:
        policy = Policy(settings, args.model, seed=1)
        answers = np.random.default_rng(3).integers(6, 15, 64)
        batch = grouped_batch(8, 45, answers, policy.hf_config.vocab_size)
        results["chat model"] = row = compare(policy, batch, 1000, max(args.steps // 3, 1))
        show("chat model", row)
    shutdown()
    return results


if __name__ == "__main__":
    main()
