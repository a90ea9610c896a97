r"""Verifier of mathematics: expressions, sets, intervals and matrices.

Math-Verify parses the LaTeX and compares with sympy. Its own time-outs are off: they use SIGALRM,
which does nothing outside the main thread and turns a slow comparison into a silent 0. The reward
pool kills a slow process instead and reports it.
"""


def math_reward(completion: str, answer: str) -> float:
    r"""Return 1.0 if the last result that `completion` states equals `answer`, else 0.0.

    `\boxed{}` takes precedence over other mathematics. `answer` is an expression, or a text with
    one in it. Raises ValueError if `answer` has no mathematics: an error of the data.
    """
    # sympy takes most of a second to import, which only a worker pays.
    from math_verify import parse, verify

    def parsed(text: str) -> list:
        return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]

    gold = parsed(answer) or parsed(f"\\boxed{{{answer}}}")
    if not gold:
        raise ValueError(f"there is no mathematics in the answer {answer!r}")
    return float(verify(gold, parsed(completion), timeout_seconds=None))
