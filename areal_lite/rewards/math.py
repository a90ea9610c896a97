r"""Verifier of mathematics: expressions, sets, intervals and matrices.

The stated result is the last `\boxed{}`, with those before it that `and`, `or` or a comma joins to
it; without one the last `<answer>`, or the end of the completion. A later "the answer is" wins over
a box, and after `</think>` only what follows counts. A formula on a line of its own needs no `$`.

Math-Verify parses the LaTeX and compares with sympy. It rounds to six decimals; here the rounding
is relative for numbers below 1. What it leaves out is read before: bases (`101_2` is 5), times,
choices (`B`), thousands, degrees. The policy where people disagree: a percentage equals the number
before the sign and its hundredth. A missing unit is accepted, a different one is not (5 m, 5 cm).

What a model writes can cost the parser or sympy hours or all memory. The bounds below prevent that:
a completion beyond one of them scores 0. What is not too large to parse runs in a forked process.
"""

import logging
import math
import multiprocessing
import re
import resource
import sys
from functools import lru_cache
from pathlib import Path

_LAST_CHARACTERS = 10_000  # that are read
_UNBOXED_CHARACTERS = 500  # of them, without a box or a mark
_RESULT_CHARACTERS = 1_000
_RESULT_DEPTH = 10  # of nested brackets
_RESULT_DIGITS = 1e6  # of a power or a factorial
_PROCESSOR_S = 3
_MEMORY_BYTES = 1 << 30
# A result must not depend on how busy the machine is. This only ends a process that sleeps.
_WALL_CLOCK_S = 12.0
_EQUAL = 3  # an exit status that no error has

# It warns that its time-outs are off: they need the main thread, and interrupt no large power.
logging.getLogger("math_verify").setLevel(logging.ERROR)

_TEXT = re.compile(r"[$#]|\\boxed|\\[(\[]|[A-Za-z]{2,} [A-Za-z]{2,}")
_BRACE = re.compile(r"\\(?:boxed|fbox)\s*+\{|\\[{}]|[{}]")
# What may stand between boxes that are one result, and how much of it.
_JOINT = re.compile(
    r"(?:\\q?quad|\\(?:text|mathrm)\{[^{}]{0,40}\}|\\[()\[\],;:!\s]|[\s$(),;]|and|or"
    r"|[A-Za-z](?:_\{?\w{1,3}\}?)?\s?=)*+"
)
_JOINT_CHARACTERS = 80
_BARE_CHARACTERS = 100
_TAGGED = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_ANNOUNCED = re.compile(r"\banswers?\b[^.\n:]{0,30}?(?:\bis\b|\bare\b|:)[\s*]", re.IGNORECASE)
_MATRIX = re.compile(r"\\begin\{.{0,1000}?\\end\{", re.DOTALL)
_SENTENCE = re.compile(r"\.\s|\n")
# A formula without marks: no word in it but the names of functions, and no `a)` before it.
# Its alternatives exclude each other: `(…)++` never matches a whole text in Python 3.11.2.
_FORMULA = re.compile(
    r"(?!\w{1,2}[).:]\s)(?:\\(?:begin|end)\{[a-z]+\}|\\(?!boxed|fbox|begin|end)[A-Za-z]+"
    r"|\\[^A-Za-z()\[\]]|(?<![A-Za-z])(?:[A-Za-z]|pi|sqrt|log|ln|sin|cos|tan)(?![A-Za-z])"
    r"|[0-9_\u0370-\u03ff]|[^\w$#\\])+"
)
_NUMBERS = re.compile(r"-?[0-9.,:/%°\s]*|.*!", re.DOTALL)
_NEGATED = re.compile(r"(?:\bnot|n['’]t)\s+(?:equal\s+to\s+)?\S{1,40}\s*\Z", re.IGNORECASE)
# 9^{9^{9}}, and (x+1)^{9}, whose base is not a number.
_POWER = re.compile(r"(?<![0-9])[0-9]*+(?:\s{0,9}(?:\^|\*\*)[{(\s-]{0,9}[0-9]++)+")
_FACTORIAL = re.compile(r"(?<![0-9])([0-9]++)[)}\s]{0,9}!")

_CHARACTERS = {ord(old): new for old, new in zip("\u2212\u2013\u2014\u00a0\u2009\u202f", "---   ")}
_CHARACTERS |= {ord("√"): "sqrt", ord("²"): "^2", ord("³"): "^3"}
_CHARACTERS |= {ord(old): f"\\{new} " for old, new in zip("π∞×·", ("pi", "infty", "times", "cdot"))}
_DEGREES = r"\s?(?:\^\s?(?:\{\s?\\circ\s?\}|\\circ)|°|\\degree)"
_PERCENT = re.compile(r"\s?(?:\\?%|\\text\{\s?percent\s?\}|\b(?:percent(?:age)?|pct)\b)")
# Other forms of what Math-Verify knows, in the order in which they are replaced.
_FORMS = (
    (r"\\varnothing", r"\\emptyset"),
    (r"(?<=[0-9])(?:\\[,!;:]|\{,\}|~)(?=[0-9]{3}(?![0-9]))", ""),
    (r"(?<=[0-9])\{:\}(?=[0-9])", ":"),
    (r"(?<=[0-9])[eE]([+-]?[0-9]{1,4})(?![\w.])", r"\\times 10^{\1}"),
    (r"(?<=[\w)}])( ?)\*\*\1(?:\(([^()]{1,50})\)|(-?\w++(?:\.[0-9]++)?)(?! ?\*\*))", r"^{\2\3}"),
    (r"(?<![A-Za-z\\])pi(?![A-Za-z])", r"\\pi "),
    (r"(?<![A-Za-z\\])sqrt ?(?:\(([^()]{1,50})\)|([0-9]++|[A-Za-z]\b))", r"\\sqrt{\1\2}"),
    (r"\+\s?-", "-"),
    (r"(?<![\w.])([0-9]+)\.0+(?![0-9])", r"\1"),
    (r"(?<![\w.])1(?=i\b)", ""),
    (r"(?<!\.)\.(?=[\s}$]*+\Z)", ""),  # a full stop, also in a box
)
_THOUSANDS = re.compile(
    r"(?:(?<![0-9.])[0-9]{1,3}(?: [0-9]{3})+|= ?[0-9]{1,3}(?:,[0-9]{3})+)(?![0-9,])"
)
_BASE = re.compile(r"(?<![\w.])([0-9][0-9A-Z]{0,99})_(?:\{\s?([0-9]{1,2})\s?\}|([0-9]{1,2}))")
_DOTS = re.compile(r"\\[lc]?dots|\.\.\.|…")
_TIME = re.compile(r"[0-9]{1,2}:[0-9]{2}(?::[0-9]{2})?")
_CHOICE = re.compile(r"\(?([A-J])\)?")
_CHOSEN = re.compile(
    r"\b(?:answer|choice|option)\b[^.\n]{0,20}?(?:\bis|:)?[\s*$(]*([A-J])(?![\w'’])"
    r"|\A[\s*$(]*([A-J])(?:[).:*$]|\s*\Z)",
    re.IGNORECASE,
)
_UNIT = re.compile(
    r"(?:\\(?:text|mathrm|mbox|textrm)\{\s?([A-Za-z. ]{1,20}?)\s?\}|(?<=[0-9\s}])([A-Za-z]{1,12}))"
    r"(?:\^\{?([0-9])\}?)?\Z"
)
_UNITS = {
    name: names.split()[0]
    for names in (
        "mm millimeter millimeters;cm centimeter centimeters;m meter meters metre metres",
        "km kilometer kilometers;in inch inches;ft foot feet;yd yard yards;mi mile miles",
        "s sec second seconds;min minute minutes;h hr hrs hour hours;day days;week weeks",
        "month months;year years yr;mg;g gram grams;kg kilogram kilograms;lb lbs pound pounds",
        "oz ounce ounces;ml milliliter milliliters;l liter liters litre litres;am a.m.;pm p.m.",
        "dollar dollars;cent cents",
    )
    for names in names.split(";")
    for name in names.split()
}


def math_reward(completion: str, answer: str) -> float:
    r"""Return 1.0 if the last result that `completion` states equals `answer`, else 0.0.

    `answer` is an expression, or a text with one in it. Raises ValueError if it has no mathematics
    or is not parsed: an error of the data.
    """
    gold, stated = _Result(answer), _Result(stated_result(completion))
    if choice := _CHOICE.fullmatch(gold.bare):
        chosen = ["".join(letters) for letters in _CHOSEN.findall(stated.bare)]
        return float(bool(chosen) and chosen[-1].upper() == choice[1])
    right = _parse_answer(gold.text)
    if is_oversized(stated.text) or _contradicts(gold, stated):
        return 0.0
    if (equal := _compare_texts(gold.bare, stated.bare)) is not None:
        return float(equal)
    return _compare_in_child(right, stated.text, [gold.percent, stated.percent])


class _Result:
    """A right answer, or a stated one.

    `text` is for Math-Verify, without the unit, whose name and power are `unit`. `bare` is the
    result alone, empty if there is more than that.
    """

    def __init__(self, text: str):
        self.percent = _PERCENT.search(text) is not None
        self.text = _plain(text)
        bare = _bare(self.text)
        self.bare = bare if len(bare) <= _BARE_CHARACTERS else ""
        self.unit: tuple[str, str] | None = None
        match = _UNIT.search(self.bare)
        if match and len(match[2] or "") == 1 and not _NUMBERS.fullmatch(bare, 0, match.start()):
            match = None  # a variable
        if match and (name := _UNITS.get((match[1] or match[2]).strip().lower())):
            self.unit = name, match[3] or "1"
            self.bare = self.bare[: match.start()].strip()
            self.text = f"${self.bare}$"
        elif self.bare and not _TEXT.search(text):
            self.text = self.text.strip().removesuffix(".")


def stated_result(completion: str) -> str:
    r"""Return the text of the stated result: boxes in dollars, or the end of the completion."""
    text = completion[-_LAST_CHARACTERS:]
    text = text.rpartition("</think>")[2].strip()
    text = _MATRIX.sub(lambda match: " ".join(match[0].split()), text)
    if tagged := _TAGGED.findall(text):
        text = tagged[-1] if "\\boxed" in tagged[-1] else f"\\boxed{{{tagged[-1].strip()}}}"
    boxes = _boxes(text)
    after = boxes[-1][1] if boxes else 0
    if announced := list(_ANNOUNCED.finditer(text, after)):
        rest = text[announced[-1].end() :].lstrip(" \n*")
        return _with_marks(_SENTENCE.split(rest, maxsplit=1)[0])
    if not boxes:
        return _with_marks(text[-_UNBOXED_CHARACTERS:])
    start, end = boxes.pop()
    while boxes and start - boxes[-1][1] <= _JOINT_CHARACTERS:
        if not _JOINT.fullmatch(text, boxes[-1][1], start):
            break
        start, _ = boxes.pop()
    return f"${text[start:end]}$"


def _with_marks(text: str) -> str:
    """Return the last line in dollars if it is a formula: bare, its last number would count."""
    last = text.strip().rpartition("\n")[2].lstrip(" *=>→⇒∴•").rstrip(" .*")
    is_formula = _FORMULA.fullmatch(last) and not _NUMBERS.fullmatch(last)
    return f"${last}$" if is_formula else text


def _plain(text: str) -> str:
    """Write the forms that Math-Verify does not read in forms that it does."""
    text = text.translate(_CHARACTERS).replace("\\fbox", "\\boxed")
    for pattern, replacement in _FORMS:
        text = re.sub(pattern, replacement, text)
    if re.search(r"\\?(?:sin|cos|tan|cot|sec|csc)\b", text):
        text = re.sub(rf"([0-9]+(?:\.[0-9]+)?){_DEGREES}", r"\\frac{\1\\pi}{180}", text)
    text = re.sub(_DEGREES, "", text)
    text = _THOUSANDS.sub(lambda match: re.sub("[ ,]", "", match[0]), text)
    return _PERCENT.sub("", _BASE.sub(_in_base, text))


def _in_base(match: re.Match) -> str:
    """Write a number with a base in base ten."""
    try:
        return str(int(match[1], int(match[2] or match[3])))
    except ValueError:  # not a number in this base
        return match[0]


def _bare(text: str) -> str:
    r"""Return a result without dollars, a box or `\text{}` around it, and without a full stop."""
    text = text.strip(" \n$.")
    while wrapped := re.fullmatch(
        r"\\(?:boxed|fbox|text|mathrm|textbf|mathbf)\s?\{(.*)\}", text, re.DOTALL
    ):
        if "}" in re.sub(r"\{[^{}]*\}", "", re.sub(r"\{[^{}]*\}", "", wrapped[1])):
            break  # the last brace closes another one
        text = wrapped[1].strip(" \n$.")
    return text


def _contradicts(gold: _Result, stated: _Result) -> bool:
    """Return whether a result has another unit, is a false chain of numbers, or is negated."""
    if None not in (gold.unit, stated.unit) and gold.unit != stated.unit:
        return True
    parts = [part.strip() for part in stated.bare.split("=")]
    numbers = all(re.fullmatch(r"-?[0-9]+(?:\.[0-9]+)?", part) for part in parts)
    return (numbers and len(set(parts)) > 1) or bool(_NEGATED.search(stated.text.strip(" \n$.")))


def _compare_texts(gold: str, stated: str) -> bool | None:
    """Compare times, and lists with dots, as texts; None for anything else."""
    texts = [re.sub(r"\s|\\[,;!]|\\text\{\s*\}", "", text) for text in (gold, stated)]
    if _DOTS.search(gold) or all(map(_TIME.fullmatch, texts)):
        return _DOTS.sub("…", texts[0]) == _DOTS.sub("…", texts[1])
    if any(map(_TIME.fullmatch, texts)) and not all(":" in text for text in texts):
        return False
    return None


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


def check_answer(answer: str) -> None:
    """Raise ValueError for an answer of the data that is empty or cannot be parsed for its size."""
    if not answer.strip():
        raise ValueError(f"there is no mathematics in the answer {answer!r}")
    if is_oversized(answer[-_RESULT_CHARACTERS:]):
        raise ValueError(f"the answer is too large a number or nested too deep: {answer[:100]!r}")


@lru_cache(maxsize=1024)
def _parse_answer(answer: str) -> list:
    """Parse the right answer. Raises ValueError."""
    check_answer(answer)
    boxed = f"\\boxed{{{answer}}}"
    # In a text Math-Verify looks for the last number: it would take the 2 of y=2x.
    texts = (answer, boxed) if _TEXT.search(answer) else (boxed, answer)
    if not (gold := _parse(texts[0]) or _parse(texts[1])):
        raise ValueError(f"there is no mathematics in the answer {answer!r}")
    return gold


def _parse(text: str) -> list:
    # sympy takes most of a second to import, which only a worker pays.
    from math_verify import parse

    return parse(text, parsing_timeout=None)  # pyright: ignore[reportArgumentType]


def _compare_in_child(gold: list, result: str, percent: list[bool]) -> float:
    """Return the reward, 0.0 beyond the limits. `percent`: which of both are percentages."""
    context = multiprocessing.get_context("fork")  # with the parsers that the parent has warmed up
    child = context.Process(target=_compare, args=(gold, result, percent))
    child.start()
    try:
        child.join(_WALL_CLOCK_S)
        return float(child.exitcode == _EQUAL)
    finally:
        child.kill()
        child.join()


def _compare(gold: list, result: str, percent: list[bool]) -> None:
    """Run in the child: exit with _EQUAL if the results are equal."""
    from math_verify import verify

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    memory = used + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    resource.setrlimit(resource.RLIMIT_CPU, (_PROCESSOR_S, _PROCESSOR_S))
    stated = _parse(result)
    pairs = [(gold, stated)]
    if percent[0] != percent[1]:
        pairs.append((_hundredths(gold), stated) if percent[0] else (gold, _hundredths(stated)))
    digits = _decimals([*gold, *stated])
    equal = any(
        verify(*pair, float_rounding=digits, numeric_precision=digits + 9, timeout_seconds=None)
        for pair in pairs
    )
    sys.exit(_EQUAL if equal else 0)


def _hundredths(parsed: list) -> list:
    return [one / 100 for one in parsed if getattr(one, "is_number", False)]


def _decimals(parsed: list) -> int:
    """Return the decimals to which numbers are rounded: six places of the smallest one below 1."""
    import sympy

    smallest = 0.0  # its logarithm
    numbers = [one for one in parsed if isinstance(one, sympy.Basic)]
    while numbers:
        one = numbers.pop()
        if not (isinstance(one, sympy.Expr) and one.is_number):
            numbers += one.args
        elif (size := sympy.Abs(one.doit()).evalf(3)).is_Float and 0 < size < 1:
            smallest = min(smallest, float(sympy.log(size, 10).evalf(5)))
    return 6 + math.floor(-smallest)
