"""A training step of a mixture of experts in two checkouts of this project, in turn.

    python benchmarks/experts.py --before FOLDER [--rounds 5] [--steps 10] [--tokens 4096]

FOLDER is the other checkout, for example of `git worktree add FOLDER COMMIT`. Each round starts a
process in each of them, whose fastest step counts, in processor time. The first model is that of
examples/mixture_of_experts. Ratios are medians of the rounds. Both checkouts must have the same
losses. The script writes results/experts.json.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from areal_lite.cpu.device import rank_environment

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "experts.json"
SIZES = ("hidden_size", "moe_intermediate_size", "num_experts", "num_experts_per_tok")
MODELS = {
    "the example's": dict(zip(SIZES, (96, 96, 8, 2))),
    "larger experts": dict(zip(SIZES, (256, 192, 32, 2))),
    "many experts": dict(zip(SIZES, (256, 64, 64, 8))),
}


def measure(name: str, steps: int, tokens: int) -> dict[str, list[float]]:
    """Train on random sequences with the checkout on the path; return times in s, and losses."""
    import numpy as np
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from areal_lite.config import TrainerConfig
    from areal_lite.megatron.packing import make_microbatches
    from areal_lite.megatron.parallel import shutdown
    from areal_lite.megatron.policy import Policy
    from benchmarks.train_step import batch_of

    torch.manual_seed(0)
    heads = MODELS[name]["hidden_size"] // 32
    config = Qwen3MoeConfig(
        **MODELS[name],
        num_hidden_layers=2,
        norm_topk_prob=True,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=32,
        vocab_size=64,
        tie_word_embeddings=False,
    )
    seen: dict[str, list[float]] = {"seconds": [], "losses": []}
    with tempfile.TemporaryDirectory() as folder:
        Qwen3MoeForCausalLM(config).float().save_pretrained(folder)
        policy = Policy(TrainerConfig(dtype="float32", device="cpu", lr=1e-5), folder, seed=1)
        batch = batch_of(np.full(tokens // 32, 32), 64)
        for _ in range(steps + 2):
            start = time.process_time()
            microbatches = make_microbatches(batch, tokens)
            metrics = policy.update(microbatches, lambda logprobs, *_: (-logprobs.mean(), {}))
            seen["seconds"].append(time.process_time() - start)
            seen["losses"].append(metrics["loss"])
        shutdown()
    return seen


def measured_in(checkout: Path, name: str, args: argparse.Namespace) -> dict[str, list[float]]:
    command = [sys.executable, __file__, "--measure", name]
    command += ["--steps", str(args.steps), "--tokens", str(args.tokens)]
    path = os.pathsep.join(map(str, (checkout, ROOT)))  # benchmarks that it may lack
    environment = os.environ | rank_environment() | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="the other checkout")
    for name, default in dict(rounds=5, steps=10, tokens=4096).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--measure", choices=MODELS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(measure(args.measure, args.steps, args.tokens)))
        return
    if args.before is None or not (args.before / "areal_lite").is_dir():
        parser.error(f"--before={args.before} has no folder areal_lite: name the other checkout")
    results: dict[str, Any] = {"steps": args.steps, "rounds": args.rounds, "tokens": args.tokens}
    for name in MODELS:
        seconds: dict[str, list[float]] = {"before": [], "after": []}
        for _ in range(args.rounds):
            losses = []
            for side, checkout in (("before", args.before.resolve()), ("after", ROOT)):
                seen = measured_in(checkout, name, args)
                seconds[side].append(min(seen["seconds"][2:]))
                losses.append(seen["losses"])
            if (error := max(abs(a - b) for a, b in zip(*losses, strict=True))) > 1e-3:
                raise RuntimeError(f"{name}: the losses of the two checkouts differ by {error}")
        ratios = sorted(a / b for a, b in zip(seconds["after"], seconds["before"], strict=True))
        ms = {f"{side}_ms": 1e3 * statistics.median(found) for side, found in seconds.items()}
        results[name] = ms | {"ratio": statistics.median(ratios), "all ratios": ratios}
        print(name, json.dumps(results[name]), flush=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
