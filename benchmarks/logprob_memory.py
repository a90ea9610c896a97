"""Peak memory of log-probs, forward and backward, with a vocabulary of 152k tokens.

    python benchmarks/logprob_memory.py [--hidden 64] [--vocab 151936] [--tokens 4096 16384]

The memory must not grow with tokens x vocabulary. Each measurement is a process of its own.
`extra` is its peak, less the memory before (hidden states, weight, targets) and less the gradients
that it must leave behind. It is resident memory, or the allocator's count on a GPU. `plain` is
log_softmax of all logits, at a size that fits. The script writes results/logprob_memory.json.
"""

import argparse
import json
import resource
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import psutil
import torch

from areal_lite.megatron.logprobs import lm_logprobs

RESULTS = Path(__file__).with_name("results") / "logprob_memory.json"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MIB = 2**20


def plain(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (hidden @ weight.t()).log_softmax(-1).gather(-1, targets[:, None])[:, 0]


def ours(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return lm_logprobs(hidden, weight, targets)[0]


def peak() -> int:
    return (
        torch.cuda.max_memory_allocated()
        if DEVICE == "cuda"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )


def measure(function, tokens: int, hidden_size: int, vocab: int) -> dict[str, float]:
    torch.set_num_threads(1)
    hidden = torch.randn(tokens, hidden_size, device=DEVICE, requires_grad=True)
    weight = torch.randn(vocab, hidden_size, device=DEVICE, requires_grad=True)
    targets = torch.randint(0, vocab, (tokens,), device=DEVICE)
    function(
        hidden[:2], weight[:64], targets[:2] % 64
    ).sum().backward()  # libraries that load at the first call
    hidden.grad = weight.grad = None
    before = (
        torch.cuda.memory_allocated() if DEVICE == "cuda" else psutil.Process().memory_info().rss
    )
    start = time.perf_counter()
    function(hidden, weight, targets).sum().backward()
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    gradients = 4 * (hidden.numel() + weight.numel())
    return {
        "seconds": time.perf_counter() - start,
        "gradients_mib": gradients / MIB,
        "extra_mib": (peak() - before - gradients) / MIB,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--plain", type=int, default=1024)
    args = parser.parse_args()
    rows = []
    for function, tokens in [(plain, args.plain), *((ours, n) for n in args.tokens)]:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            row = {
                "function": function.__name__,
                "tokens": tokens,
                **pool.submit(measure, function, tokens, args.hidden, args.vocab).result(),
            }
        row["all_logits_mib"] = 4 * tokens * args.vocab / MIB
        print(
            f"{row['function']:5s} {tokens:6d} tokens: "
            f"all logits {row['all_logits_mib']:6.0f} MiB, extra {row['extra_mib']:6.0f} MiB, "
            f"{row['seconds']:.1f} s",
            flush=True,
        )
        rows.append(row)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(
        json.dumps({"settings": vars(args) | {"device": DEVICE}, "rows": rows}, indent=2) + "\n"
    )


if __name__ == "__main__":
    main()
