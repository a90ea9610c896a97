r"""Verifier of mathematics: expressions, sets, intervals and matrices.

Math-Verify parses the LaTeX and compares with sympy. What a model writes can cost either of them
hours or all memory. Three bounds prevent that, and a completion beyond one of them scores 0:

* The last 10,000 characters are read. The stated result is the last `\boxed{}` in them, with those
  before it that `and`, `or` or a comma joins to it. Without a box it is the last 500 characters.
* A result is not parsed if it has more than 1,000 characters, brackets nested more than 10 deep,
  or a power or a factorial with more than a million digits.
* The rest runs in a forked process with 3 s of processor time and 1 GiB of memory.

Math-Verify's own time-outs are off. They use SIGALRM, which only the main thread can, and which
does not interrupt a power of large integers.
"""

from __future__ import annotations

import logging
import math
import multiprocessing
import re
import resource
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path

_LAST_CHARACTERS = 10_000
_UNBOXED_CHARACTERS = 500
_RESULT_CHARACTERS = 1_000
_RESULT_DEPTH = 10
_RESULT_DIGITS = 1e6
_PROCESSOR_S = 3
_MEMORY_BYTES = 1 << 30
# A result must not depend on how busy the machine is. This only ends a process that sleeps.
_WALL_CLOCK_S = 12.0

# It warns once a process that its time-outs are off.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_TEXT = re.compile(r"[$#]|(?<!\\)%|\\boxed|\\[(\[]|[A-Za-z]{2,} [A-Za-z]{2,}")
_BRACE = re.compile(r"\\boxed\s*+\{|\\[{}]|[{}]")
_JOINT = re.compile(r"[\s$\\(),;]{0,9}(?:and|or)?[\s$\\(),;]{0,9}")
# 9^{9^{9}}, and (x+1)^{9}, whose base is not a number.
_POWER = re.compile(r"(?<![0-9])[0-9]*+(?:\s{0,9}(?:\^|\*\*)[{(\s-]{0,9}[0-9]++)+")
_FACTORIAL = re.compile(r"(?<![0-9])([0-9]++)[)}\s]{0,9}!")


def math_reward(completion: str, answer: str) -> float:
    r"""Return 1.0 if the last result that `completion` states equals `answer`, else 0.0.

    `answer` is an expression, or a text with one in it. Raises ValueError if it has no mathematics
    or is not parsed: an error of the data.
    """
    gold = _parse_answer(answer)
    result = stated_result(completion)
    return 0.0 if is_oversized(result) else _compare_in_child(gold, result)


def stated_result(completion: str) -> str:
    r"""Return the text of the stated result: boxes in dollars, or the end of the completion."""
    text = completion[-_LAST_CHARACTERS:]
    boxes = _boxes(text)
    if not boxes:
        return text[-_UNBOXED_CHARACTERS:]
    start, end = boxes.pop()
    while boxes and _JOINT.fullmatch(text, boxes[-1][1], start):
        start, _ = boxes.pop()
    return f"${text[start:end]}$"


def is_oversized(result: str) -> bool:
    """Return whether a result is too long, too deep or too large to be parsed."""
    if len(result) > _RESULT_CHARACTERS:
        return True
    depth = deepest = 0
    for bracket in re.findall(r"[{}()\[\]]", result):
        depth = depth + 1 if bracket in "{([" else max(depth - 1, 0)
        deepest = max(deepest, depth)
    powers = (_power_digits(m[0]) for m in _POWER.finditer(result))
    factorials = (_power_digits(f"{m[1]}^{m[1]}") for m in _FACTORIAL.finditer(result))
    return deepest > _RESULT_DEPTH or max([*powers, *factorials], default=0) > _RESULT_DIGITS


def _power_digits(power: str) -> float:
    """Estimate the decimal digits of a^(b^(c…)), with a = 10 if that is not a number."""
    base, *exponents = map(
        float, re.findall(r"[0-9]+", power if power[0].isdigit() else "10" + power)
    )
    value = exponents.pop()
    for exponent in reversed(exponents):
        digits = value * math.log10(max(exponent, 2.0))
        value = 10.0**digits if digits < 300 else math.inf
    return value * math.log10(max(base, 2.0))


def _boxes(text: str) -> list[tuple[int, int]]:
    r"""Find every `\boxed{…}` outside other boxes, in order, as (start, end)."""
    found: list[tuple[int, int]] = []
    is_open: list[re.Match] = []
    for brace in _BRACE.finditer(text):
        if brace[0] == "}" and is_open:
            opening = is_open.pop()
            if opening[0] != "{":
                while found and found[-1][0] > opening.start():
                    found.pop()
                found.append((opening.start(), brace.end()))
        elif brace[0].endswith("{") and brace[0] != r"\{":
            is_open.append(brace)
    return found


@lru_cache(maxsize=1024)
def _parse_answer(answer: str) -> list:
    """Parse the right answer. Raises ValueError."""
    if is_oversized(answer[-_RESULT_CHARACTERS:]):
        raise ValueError(f"the answer is too large a number or nested too deep: {answer[:100]!r}")
    boxed = f"\\boxed{{{answer}}}"
    # In a text Math-Verify looks for the last number: it would take the 2 of y=2x.
    texts = (answer, boxed) if _TEXT.search(answer) else (boxed, answer)
    gold = _parse(texts[0]) or _parse(texts[1])
    if not gold:
        raise ValueError(f"there is no mathematics in the answer {answer!r}")
    return gold


def _parse(text: str) -> list:
    # sympy takes most of a second to import, which only a worker pays.
    from math_verify import parse

    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _compare_in_child(gold: list, result: str) -> float:
    """Return the reward of a result; 0.0 if the comparison exceeds its limits."""
    context = multiprocessing.get_context("fork")  # with the parsers that the parent has warmed up
    receiver, sender = context.Pipe(duplex=False)
    child = context.Process(target=_compare, args=(gold, result, sender))
    child.start()
    sender.close()
    try:
        return float(receiver.poll(_WALL_CLOCK_S) and receiver.recv_bytes() == b"equal")
    except EOFError:  # a limit has ended it
        return 0.0
    finally:
        receiver.close()
        child.kill()
        child.join()


def _compare(gold: list, result: str, sender: Connection) -> None:
    """Run in the child: send whether the results are equal."""
    from math_verify import verify

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    memory = used + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_S, _PROCESSOR_S))
    equal = verify(gold, _parse(result), timeout_seconds=None)
    sender.send_bytes(b"equal" if equal else b"different")
