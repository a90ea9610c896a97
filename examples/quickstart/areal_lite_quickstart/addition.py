"""Column addition: a task so small that a tiny model learns it within minutes on two cores.

A problem is the sum of two numbers with equally many digits. Each digit is written after the letter
of its place: units, tens and hundreds are `a`, `b`, `c` in the first number, `A`, `B`, `C` in the
second and `z`, `y`, `x` in the sum. So the model finds a digit by looking up a letter, without
counting. The solution goes from right to left, one line per column: the two digits, the carry into
the column, and after `=` the carry out of it and the digit of the sum. The answer follows after
`#`:

    prompt       b4a7+B8A5=?
    completion   a7+A5+0=1z2
                 b4+B8+1=1y3
                 #x1y3z2

Invariants:
  * problem i of a split depends on (seed, split, index, max_digits, weights) only, so an index is
    all that is needed to resume;
  * no pair {a, b}, in either order, is in both splits, whatever the seed, the index or
    `max_digits`;
  * errors in a demonstration are carried on: everything after a slip is right given the slip;
  * a completion has 14 characters per digit and 1 more, and 2 more with a carry out of the last
    column: 15 to 115 for `max_digits=8`. Short numbers are more frequent by default, which gives
    lengths a long tail.
"""

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "test"]

# The letters of the places, units first.
FIRST = "abcdefghijkl"
SECOND = "ABCDEFGHIJKL"
SUM = "zyxwvutsrqpon"
MAX_DIGITS = len(FIRST)
# Default weight of a digit count, relative to the count before it.
_DECAY = 0.7
# One pair in this many is held out.
_TEST_ONE_IN = 8


@dataclass(frozen=True)
class Problem:
    """The problem `a + b`, both written with exactly `digits` digits."""

    a: int
    b: int
    digits: int


def split_of(a: int, b: int) -> Split:
    """Return the split of the unordered pair {a, b}."""
    low, high = sorted((a, b))
    return "test" if zlib.crc32(f"{low}+{high}".encode()) % _TEST_ONE_IN == 0 else "train"


def make_problem(
    split: Split,
    index: int,
    *,
    seed: int = 0,
    max_digits: int = 8,
    weights: Sequence[float] | None = None,
) -> Problem:
    """Return problem `index` of a split; a pure function of its arguments.

    Args:
        index: at least 0.
        max_digits: in 1..12.
        weights: relative frequency of numbers with d digits at index d - 1, d = 1..max_digits. By
            default a digit count is 0.7 times as frequent as the one before.

    Raises ValueError if an argument is outside its range.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    if index < 0:
        raise ValueError(f"index must not be negative, got {index}")
    if type(max_digits) is not int or not 1 <= max_digits <= MAX_DIGITS:
        raise ValueError(f"max_digits must be an integer in 1..{MAX_DIGITS}, got {max_digits!r}")
    if weights is None:
        weights = [_DECAY**d for d in range(max_digits)]
    elif not _are_weights(weights, max_digits):
        raise ValueError(
            f"weights must be {max_digits} non-negative numbers with a positive sum,"
            f" got {weights!r}"
        )

    # A string seed is hashed with SHA-512, so it is the same everywhere.
    rng = random.Random(f"{seed}/{split}/{index}")
    (digits,) = rng.choices(range(1, max_digits + 1), weights)
    low = 10 ** (digits - 1) if digits > 1 else 0
    high = 10**digits
    # Each split has pairs of every digit count, so this ends, after 8 draws on average for "test".
    while True:
        a, b = rng.randrange(low, high), rng.randrange(low, high)
        if split_of(a, b) == split:
            return Problem(a, b, digits)


def _are_weights(given: object, number: int) -> bool:
    numbers = given if isinstance(given, Sequence) else ()
    if len(numbers) != number or not all(isinstance(one, int | float) for one in numbers):
        return False
    return min(numbers) >= 0 and 0 < sum(numbers) < float("inf")


def prompt(problem: Problem) -> str:
    """Return the question: `b4a7+B8A5=?`."""
    first = _placed(problem.a, problem.digits, FIRST)
    return f"{first}+{_placed(problem.b, problem.digits, SECOND)}=?"


def answer(problem: Problem) -> str:
    """Return the right answer, without leading zeros: `x1y3z2`."""
    total = problem.a + problem.b
    return _placed(total, max(problem.digits, len(str(total))), SUM)


def demonstration(problem: Problem, rng: random.Random, *, forget_carry: float = 0.0) -> str:
    """Return an imperfect teacher's solution: scratchpad and answer, without an end token.

    A carry of 1, that of the last column included, is taken for 0 with probability `forget_carry`.
    """
    lines: list[str] = []
    units: list[int] = []
    carry = 0
    for place in range(problem.digits):
        x, y = (number // 10**place % 10 for number in (problem.a, problem.b))
        carry_out, unit = divmod(x + y + carry, 10)
        column = f"{FIRST[place]}{x}+{SECOND[place]}{y}+{carry}"
        lines.append(f"{column}={carry_out}{SUM[place]}{unit}\n")
        units.append(unit)
        carry = 0 if rng.random() < forget_carry else carry_out
    if carry:
        units.append(carry)
    stated = "".join(f"{SUM[i]}{units[i]}" for i in reversed(range(len(units))))
    return f"{''.join(lines)}#{stated}"


def _placed(number: int, digits: int, letters: str) -> str:
    """Write a number with `digits` digits, each after the letter of its place."""
    places = reversed(letters[:digits])
    return "".join(p + digit for p, digit in zip(places, f"{number:0{digits}d}", strict=True))


def addition_reward(completion: str, answer: str) -> float:
    """Return 1.0 if the text after the last `#` of `completion` is `answer`, else 0.0.

    The work that leads to it does not count, nor does white space around it. Never raises, whatever
    the model wrote.
    """
    _, mark, stated = completion.rpartition("#")
    return float(bool(mark) and stated.strip() == answer.strip())
