"""Verifier of mathematics: expressions, sets, intervals, matrices; by Math-Verify, which parses LaTeX and compares with sympy.

Math-Verify's own time-outs are off. They are made of SIGALRM, which does nothing outside the main thread and turns a slow comparison into
a silent 0; here the pool kills a process that takes too long and says so.
"""

from __future__ import annotations


def math_reward(completion: str, answer: str) -> float:
    """1.0 if what `completion` states last (`\\boxed{}` before other mathematics) equals `answer`, an expression or a text with one.

    Raises ValueError for an answer in which there is no mathematics: an error of the data, not of the model.
    """
    from math_verify import parse, verify  # sympy takes most of a second; only a worker pays it

    def parsed(text: str) -> list:
        return parse(text, parsing_timeout=None)

    gold = parsed(answer) or parsed(f"\\boxed{{{answer}}}")
    if not gold:
        raise ValueError(f"there is no mathematics in the answer {answer!r}")
    return float(verify(gold, parsed(completion), timeout_seconds=None))
