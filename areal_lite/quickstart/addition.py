"""Addition by column: a task small enough that a tiny model learns it within minutes on two cores.

A problem is two numbers of the same count of digits. Every digit is written after the letter of its place: units, tens,
hundreds are `a`, `b`, `c` in the first number, `A`, `B`, `C` in the second and `z`, `y`, `x` in the sum, so that finding
a digit is a look-up and not counting. The answer is worked out from the right, one line a column: the two digits, the
carry into the column, and after `=` the carry out of it and the digit of the sum. It is then stated after `#`:

    prompt       b4a7+B8A5=?
    completion   a7+A5+0=1z2
                 b4+B8+1=1y3
                 #x1y3z2

Contract and invariants:
  * Problem i of a split depends on (seed, split, index, max_digits, weights) only: on no state, no process, no
    `PYTHONHASHSEED`. A dataset is therefore resumed by its index alone.
  * No pair {a, b}, in either order, is in both splits, whatever the seed, the index or `max_digits`.
  * A demonstration's errors are carried on consistently: what follows a slip is right given the slip.
  * A completion has 14 characters a digit and 1 more, and 2 more with a carry out of the last column: 15 to 115 for
    `max_digits=8`. Digit counts are skewed to short by default, which gives lengths a long tail.
"""

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "test"]

FIRST, SECOND, SUM = (
    "abcdefghijkl",
    "ABCDEFGHIJKL",
    "zyxwvutsrqpon",
)  # the letters of the places, units first
MAX_DIGITS = len(FIRST)
DEFAULT_MAX_DIGITS = 8
_DECAY = 0.7  # default weight of one more digit, relative to the digit count before it
_TEST_ONE_IN = 8  # one pair in so many is held out


@dataclass(frozen=True)
class Problem:
    """`a + b`, both written with exactly `digits` digits."""

    a: int
    b: int
    digits: int

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= MAX_DIGITS:
            raise ValueError(f"digits must be in 1..{MAX_DIGITS}, got {self.digits}")
        if not (0 <= self.a < 10**self.digits and 0 <= self.b < 10**self.digits):
            raise ValueError(
                f"{self.a} and {self.b} must be non-negative numbers of at most {self.digits} digits"
            )


def split_of(a: int, b: int) -> Split:
    """The split that the unordered pair {a, b} belongs to, for ever: one pair in eight is held out."""
    low, high = sorted((a, b))
    return "test" if zlib.crc32(f"{low}+{high}".encode()) % _TEST_ONE_IN == 0 else "train"


def make_problem(
    split: Split,
    index: int,
    *,
    seed: int = 0,
    max_digits: int = DEFAULT_MAX_DIGITS,
    weights: Sequence[float] | None = None,
) -> Problem:
    """Problem `index` (>= 0) of a split; a pure function of its arguments.

    `weights[d - 1]` is the relative frequency of numbers with d digits, d = 1..max_digits; by default each further
    digit is 0.7 times as frequent as the one before. Raises ValueError for an unknown split, a negative index, a
    `max_digits` outside 1..12, or weights that are not `max_digits` non-negative numbers with a positive sum.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split must be 'train' or 'test', got {split!r}")
    if index < 0:
        raise ValueError(f"index must not be negative, got {index}")
    if not 1 <= max_digits <= MAX_DIGITS:
        raise ValueError(f"max_digits must be in 1..{MAX_DIGITS}, got {max_digits}")
    if weights is None:
        weights = [_DECAY**d for d in range(max_digits)]
    elif len(weights) != max_digits or min(weights) < 0 or not 0 < sum(weights) < float("inf"):
        raise ValueError(
            f"weights must be {max_digits} non-negative numbers with a positive sum, got {list(weights)}"
        )

    rng = random.Random(
        f"{seed}/{split}/{index}"
    )  # a string seed is hashed with SHA-512: stable everywhere
    (digits,) = rng.choices(range(1, max_digits + 1), weights)
    low, high = (10 ** (digits - 1) if digits > 1 else 0), 10**digits
    while (
        True
    ):  # each split holds pairs of every digit count, so this ends: 8 draws on average for "test"
        a, b = rng.randrange(low, high), rng.randrange(low, high)
        if split_of(a, b) == split:
            return Problem(a, b, digits)


def prompt(problem: Problem) -> str:
    """The question, each digit after the letter of its place: `b4a7+B8A5=?`."""
    return f"{_placed(problem.a, problem.digits, FIRST)}+{_placed(problem.b, problem.digits, SECOND)}=?"


def answer(problem: Problem) -> str:
    """The right answer as it must stand after `#`, without leading zeros: `x1y3z2`."""
    total = problem.a + problem.b
    return _placed(total, max(problem.digits, len(str(total))), SUM)


def demonstration(
    problem: Problem, rng: random.Random, *, forget_carry: float = 0.0, wrong_sum: float = 0.0
) -> str:
    """A worked solution by an imperfect teacher: scratchpad and answer, with no end marker and no padding.

    Each carry of 1 is taken for 0 with probability `forget_carry`, the one out of the last column included; each
    column's sum is replaced by a wrong one (uniform over 0..19) with probability `wrong_sum`. With both 0 the answer
    is always right. Raises ValueError for a probability outside 0..1.
    """
    for name, p in (("forget_carry", forget_carry), ("wrong_sum", wrong_sum)):
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"{name} must be a probability, got {p}")
    lines, units, carry = [], [], 0
    for place in range(problem.digits):
        x, y = (number // 10**place % 10 for number in (problem.a, problem.b))
        total = x + y + carry
        if rng.random() < wrong_sum:
            total = rng.choice([other for other in range(20) if other != total])
        lines.append(
            f"{FIRST[place]}{x}+{SECOND[place]}{y}+{carry}={total // 10}{SUM[place]}{total % 10}\n"
        )
        units.append(total % 10)
        carry = 0 if rng.random() < forget_carry else total // 10
    if carry:
        units.append(carry)
    return (
        "".join(lines) + "#" + "".join(f"{SUM[i]}{units[i]}" for i in reversed(range(len(units))))
    )


def _placed(number: int, digits: int, letters: str) -> str:
    text = f"{number:0{digits}d}"
    return "".join(
        place + digit for place, digit in zip(reversed(letters[:digits]), text, strict=True)
    )
