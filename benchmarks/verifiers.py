r"""Time of each verifier against the length of degenerate texts, which a collapsing policy prints.

    python benchmarks/verifiers.py [--lengths 1000 4000 16000 64000 256000] [--repeats 5]

A pattern is repeated to a length. Times are processor seconds, of child processes too, and the best
of `repeats`. Verifiers are linear at worst. The slope of log time over log length, between the two
longest texts, shows that: about 1 or less for a linear verifier, 2 for a quadratic one. The script
writes results/verifiers.md.
"""

from __future__ import annotations

import argparse
import gc
import math
import resource
import time
from collections.abc import Callable
from pathlib import Path

from areal_lite.rewards.exact import exact_reward
from areal_lite.rewards.gsm8k import gsm8k_reward
from areal_lite.rewards.math import math_reward
from areal_lite.rewards.program import extract_program
from areal_lite_quickstart.addition import addition_reward

RESULTS = Path(__file__).with_name("results") / "verifiers.md"

VERIFIERS: dict[str, Callable[[str], object]] = {
    "gsm8k": lambda text: gsm8k_reward(text, "4"),
    "math": lambda text: math_reward(text, "4"),
    "exact": lambda text: exact_reward(text, "4"),
    "addition": lambda text: addition_reward(text, "4"),
    "program (extraction)": extract_program,
}
# name -> (what comes first, what is repeated)
PATTERNS = {
    "newlines": ("", "\n"),
    "spaces": ("", " "),
    "stars": ("", "* \n"),
    "digits": ("", "1"),
    "digits apart": ("", "1 "),
    "thousands": ("1", ",111"),
    "sums": ("", "1+"),
    "powers": ("", "9^"),
    "factorials": ("9", "!"),
    "signs": ("5", " - $"),
    "marks": ("", "####"),
    "marks with text": ("", "#### x "),
    "mark, then digits": ("#### ", "1"),
    "mark, then spaces": ("#### 1", " "),
    "mark, then denominator": ("#### 1/", "9"),
    "mark, then equal signs": ("#### ", "="),
    "answer": ("", "answer "),
    "answer is": ("", "answer is "),
    "final answer is": ("", "final answer is "),
    "A:": ("", "A:\n"),
    "boxes, open": ("", r"\boxed{"),
    "boxes, closed": ("", r"\boxed{5}"),
    "boxes, joined": ("", r"\boxed{5}, "),
    "box of spaces": (r"\boxed", " "),
    "box of braces": (r"\boxed{", "{}"),
    "dollars": ("", "$"),
    "dollar pairs": ("", "$5$ and "),
    "dollars with boxes": ("", r"$\boxed{"),
    "opening parentheses": ("", r"\("),
    "opening brackets": ("", r"\["),
    "fractions, open": ("", r"\frac{"),
    "fraction, then spaces": (r"\frac1", " "),
    "fractions, then spaces": ("", r"\frac1 "),
    "parentheses": ("", "("),
    "bars": ("", "|"),
    "roots": ("", r"\sqrt{"),
    "fences": ("", "```\n"),
    "fences, inside a line": ("```\n", "x```\n"),
    "fences, indented": ("", "\t``` x\n"),
}


def text_of(pattern: str, length: int) -> str:
    """Repeat a pattern to a text of `length` characters."""
    first, repeated = PATTERNS[pattern]
    return (first + repeated * (length // len(repeated) + 1))[:length]


def processor_s() -> float:
    """Return the processor time of this process and of its children that have ended, in seconds."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def measure(verify: Callable[[str], object], text: str, repeats: int) -> float:
    """Return the processor time of one call, in seconds, without that of the garbage collector.

    A large process needs seconds to look through all of its objects, whoever made them.
    """
    times = []
    gc.disable()
    try:
        for _ in range(repeats):
            start = processor_s()
            verify(text)
            times.append(processor_s() - start)
    finally:
        gc.enable()
    return min(times)


def table(verifier: str, lengths: list[int], repeats: int) -> str:
    """Measure a verifier with every pattern, and return a table in Markdown."""
    verify = VERIFIERS[verifier]
    verify("4")  # imports
    head = [f"{verifier}, ms", *(f"{length:,}" for length in lengths), "slope"]
    rows = [f"| {' | '.join(head)} |", "|---" + "|--:" * (len(lengths) + 1) + "|"]
    for pattern in PATTERNS:
        times = [measure(verify, text_of(pattern, length), repeats) for length in lengths]
        slope = math.log(times[-1] / times[-2]) / math.log(lengths[-1] / lengths[-2])
        cells = [pattern, *(f"{1000 * seconds:.2f}" for seconds in times), f"{slope:.1f}"]
        rows.append(f"| {' | '.join(cells)} |")
        print(rows[-1], flush=True)
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[4**n * 1000 for n in range(5)])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    tables = [table(verifier, args.lengths, args.repeats) for verifier in VERIFIERS]
    note = (
        "`python benchmarks/verifiers.py` wrote this table: processor time of one call in"
        " milliseconds against the length of the text in characters."
    )
    RESULTS.write_text("\n\n".join([note, *tables]) + "\n")
    print(RESULTS)


if __name__ == "__main__":
    main()
