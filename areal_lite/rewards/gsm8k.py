r"""Verifier of grade-school mathematics (GSM8K): compares numbers exactly.

A completion states its answer after `####`, in `\boxed{}`, after `answer is` or `Answer:`, or after
`A:` at the start of a line. The last such place with a number in it counts. A completion that
consists of one number states that number. Other numbers do not count: a model that lists numbers
must not be paid for one of them.

Time is linear in the length of the text. Only its last 10,000 characters are read, in them only the
last 20 places, and of each place only the first 1,000 characters after its mark.

Numbers are compared as fractions: 0.5, 1/2, \frac{1}{2} and 50% are equal, and 0.333 is not 1/3.
A percentage equals both the number before the sign and its hundredth (the data set writes 50 where
a person writes 50%).

The functions are pure, and nothing that the model wrote makes them raise.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

# Repetitions of more than one character class are possessive or bounded, and cannot overlap.
_STATEMENT = re.compile(
    r"""
    \#\#\#\#                                            # the data set's mark
    | \\boxed\s*+\{
    | \banswer\b [^.\n:=]{0,40}? (?: \bis\b | [:=] )    # The answer is, Final answer:
    | ^[ \t*]*+ A:
    """,
    re.VERBOSE | re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n")
_NUMBER = re.compile(
    r"""
    (?P<sign> (?<![\w)]) - (?= [$.0-9] ) )? \$? \s? (?P<sign2> - (?= [.0-9] ) )?
    (?: (?P<whole> [0-9]+ ) \s+ (?= [0-9]+ / [0-9] ) )?             # the 2 of 2 1/2
    (?P<number>
        [0-9]{1,3} (?: ,[0-9]{3} )+ (?![0-9]) (?: \.[0-9]+ )? | [0-9]+ (?: \.[0-9]+ )? | \.[0-9]+
    )
    (?: \s? / \s? (?P<denominator> [0-9]+ (?! \.?[0-9] ) ) )?
    \s? (?P<percent> % )?
    """,
    re.VERBOSE,
)
# As LaTeX reads it: each of the two parts is in braces or is one digit.
_FRACTION = re.compile(
    r"""
    \\[dt]?frac
    \s*+ (?: \{ \s*+ (-?[0-9]++) \s*+ \} | ([0-9]) )
    \s*+ (?: \{ \s*+ ([0-9]++) \s*+ \} | ([0-9]) )
    (?= ([0-9]?) )
    """,
    re.VERBOSE,
)
# A longer number is not the answer to a school problem, and costs time.
_MAX_CHARACTERS = 100
_LAST_CHARACTERS = 10_000
_LAST_STATEMENTS = 20
_STATEMENT_CHARACTERS = 1_000


@dataclass(frozen=True)
class Number:
    """A number as it was written: 50% has the value 50."""

    value: Fraction
    percent: bool = False

    def equals(self, other: Number) -> bool:
        """Return whether the numbers are equal; 50% equals both 50 and 1/2."""
        if self.percent == other.percent:
            return self.value == other.value
        percentage, plain = (self.value, other.value) if self.percent else (other.value, self.value)
        return plain in (percentage, percentage / 100)


def gsm8k_reward(completion: str, answer: str) -> float:
    """Return 1.0 if `completion` states the number of `answer`, else 0.0.

    `answer` is a number, or a worked solution of the data set, which ends with `#### number`.
    Raises ValueError if `answer` has no number: an error of the data.
    """
    right = first_number(answer.rpartition("####")[2])
    if right is None:
        raise ValueError(f"there is no number in the answer {answer!r}")
    stated = stated_number(completion)
    return float(stated is not None and stated.equals(right))


def stated_number(completion: str) -> Number | None:
    """Return the number that a completion states as its answer, None if there is none."""
    text = _plain(completion[-_LAST_CHARACTERS:])
    for statement in reversed(list(_STATEMENT.finditer(text))[-_LAST_STATEMENTS:]):
        number = first_number(_statement_text(text, statement))
        if number is not None:
            return number
    bare = completion.strip()
    match = _NUMBER.fullmatch(_plain(bare).rstrip(".")) if len(bare) <= _MAX_CHARACTERS else None
    return _number(match) if match else None


def first_number(text: str) -> Number | None:
    """Return the first number of a text, None if there is none."""
    match = _NUMBER.search(_plain(text))
    return _number(match) if match else None


def _plain(text: str) -> str:
    """Replace LaTeX and typographic forms of numbers by plain ones."""
    text = text.replace("{,}", ",").replace("\\!", "").replace("\\$", "$").replace("\\%", "%")
    text = text.replace("\u2212", "-").replace("\u2013", "-")
    text = re.sub(r"(?<=[0-9])\\[dt]?frac", r" \\frac", text)  # 2\frac{1}{2} is two and a half
    return _FRACTION.sub(_plain_fraction, text)


def _plain_fraction(match: re.Match) -> str:
    """Write a LaTeX fraction as 1/2, apart from a digit that follows it."""
    above, above_digit, below, below_digit, next_digit = match.groups()
    return f"{above or above_digit}/{below or below_digit}{' ' if next_digit else ''}"


def _statement_text(text: str, statement: re.Match) -> str:
    """Return the text from a mark to the end of its sentence or braces, after the last `=`."""
    rest = text[statement.end() : statement.end() + _STATEMENT_CHARACTERS]
    if statement[0].endswith("{"):
        rest = rest[: _closing_brace(rest)]
    else:
        rest = rest.lstrip(" \t\r\n*:")
        end = _SENTENCE_END.search(rest)
        rest = rest[: end.start()] if end else rest
    return rest.rpartition("=")[2]


def _closing_brace(text: str) -> int:
    """Return where the brace opened before `text` closes; the length of `text` if it does not."""
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return len(text)


def _number(match: re.Match) -> Number | None:
    if len(match[0]) > _MAX_CHARACTERS or int(match["denominator"] or 1) == 0:
        return None
    value = Fraction(match["number"].replace(",", "")) / int(match["denominator"] or 1)
    value += int(match["whole"] or 0)
    if match["sign"] or match["sign2"]:
        value = -value
    return Number(value, percent=match["percent"] is not None)
