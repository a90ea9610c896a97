r"""Verifier of grade-school mathematics (GSM8K): compares numbers exactly.

A completion states its answer after `####`, in `\boxed{}`, after `answer is` or `Answer:`, after
`A:` at the start of a line, or in `<answer>`. The last such place with a number in it counts, but
`not 5` states nothing. Without one, a number counts that is all of the completion, or the only one
that its last line marks (`**42**`, `$42$`). Of an equation its right side counts. Other numbers do
not count: a model that lists numbers must not be paid for one of them. After `</think>`, only what
follows counts.

An expression is not its first number: `3x`, `3 + 4`, `3, 4`, `10-12` and `8:30` state none. Powers
are numbers: `2^4`, `1e3`, `1.5 \times 10^3`.

Numbers are compared as fractions: 0.5, 1/2, \frac{1}{2} and 50% are equal, and 0.333 is not 1/3.
A number with a scale (`50%`, `5 million`) equals both what stands before the scale and the product:
the data set writes 50 where a person writes 50%.

Time is linear in the length of the text, of which only a part is read (`_LAST_CHARACTERS`).
"""

import re
import unicodedata
from dataclasses import dataclass
from fractions import Fraction

# Repetitions of more than one character class are possessive or bounded, and cannot overlap.
_STATEMENT = re.compile(
    r"""
    \#\#\#\#                                            # the data set's mark
    | \\(?: boxed | fbox ) \s*+ \{
    | <answer>
    | \banswer\b [^.\n:=<]{0,40}? (?: \bis\b | [:=] )   # The answer is, Final answer:
    | ^[ \t*]*+ A:
    """,
    re.VERBOSE | re.IGNORECASE | re.MULTILINE,
)
_SENTENCE_END = re.compile(r"[.!?](?:\s|$)|\n|</answer>")
_POWER = r"\s? (?: \^ | \*\* ) \s? (?: \{ \s? (-?[0-9]{1,3}) \s? \} | (-?[0-9]{1,3}) (?! [\w.] ) )"
_NUMBER = re.compile(
    rf"""
    (?P<sign> (?<![\w)\]}}]) [-+] \s? (?= [$.0-9] ) )? \$? \s? (?P<sign2> - (?= [.0-9] ) )?
    (?: (?P<whole> [0-9]+ ) \s+ (?: and \s )? (?= [0-9]+ / [0-9] ) )?    # the 2 of 2 1/2
    (?P<number>
        [0-9]{{1,3}} (?: (?: ,[0-9]{{3}} )+ | (?: [ ][0-9]{{3}} )+ ) (?![0-9]) (?: \.[0-9]+ )?
        | [0-9]+ (?: \.[0-9]+ )? | \.[0-9]+
    )
    (?P<power> {_POWER} )?
    (?: \s? / \s? (?P<denominator> [0-9]+ (?! \.?[0-9] ) ) )?
    (?P<ten> e [+-]?[0-9]{{1,3}} (?! [\w.] )
        | \s? (?: [x×*·] | \\times | \\cdot ) \s? 10 {_POWER} )?
    (?: \s? (?P<scale> % | (?: percent | per\scent | hundred | thousand | million | billion )\b ) )?
    """,
    re.VERBOSE | re.IGNORECASE,
)
_SCALES = {"%": -2, "percent": -2, "per cent": -2, "hundred": 2, "thousand": 3}  # powers of ten
_SCALES |= {"million": 6, "billion": 9}
_NEGATION = re.compile(r"\b(?:not|never|neither)\b|n['’]t\b", re.IGNORECASE)
# What may not come before a number: a function, an index, an operator, or a variable.
_OPENS = re.compile(
    r"\\(?:sqrt|[dt]?frac|binom|log|ln|sin|cos|tan|[lgn]eq?)(?![a-z])|[\^√_]"
    r"|(?:^|[^A-Za-z])[A-Za-z]\s?[-<>≤≥]?\s?$|(?:[-+*/×·÷≠<>≤≥]=?|!=)\s?$"
)
_EQUALS = re.compile(r"(?<![<>!=])=+")
# What may follow it: the end, punctuation, a mark, a unit, a word. Anything else is an expression.
_CLOSES = re.compile(
    r"""
    \s?+ (?: $
        | (?! [.,;:] \s? -?\$?[0-9] [0-9.,]*+ \s? (?: [,;)}\]$] | and\b | or\b | $ ) )
          (?: [.,;?"'’”)\]}$°€£`—<] | : (?![0-9]) | \*\*? (?! \s?[0-9(\\] ) )
        | \\ (?: text | mathrm | mbox | degree | circ | q?quad | [,;:!%)\]\s] ) | \^ \{? \\circ
        | (?! (?: or | to | and | through | plus | minus | times | over )\s -?\$?[0-9] )
          (?: [-/]\s? )? (?: [^\W\d_]{2,} | [mglhsdpcCFLNWV]\b | [^\W\d_a-zA-Zπ] )
        | (?<=\s) (?: a\b | \( ) | [\u2600-\U0010ffff]
    )
    """,
    re.VERBOSE,
)
_MARKED = re.compile(
    r"\*\*([^*\n]{1,100})\*\*|`([^`\n]{1,100})`|\$\$?([^$\n]{1,100})\$\$?(?![0-9])"
    r"|\\[(\[]([^\\\n]{1,100})\\[)\]]"
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
# Minus and dash; spaces that do not break, of which ~ is LaTeX's.
_CHARACTERS = str.maketrans("\u2212\u2013\u00a0\u2009\u202f~", "--    ")
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_SUPERSCRIPTS = re.compile("(?<=[0-9])[²³]")
_TAG = re.compile(r"</?(?:b|strong|i|em|u|p|span|code)>")
_MAX_CHARACTERS = 100  # a longer number is not the answer to a school problem, and costs time
_LAST_CHARACTERS = 10_000
_LAST_STATEMENTS = 20  # in them
_STATEMENT_CHARACTERS = 1_000  # after the mark of a statement


@dataclass(frozen=True)
class Number:
    """A number as it was written: 50% has the value 50 and the scale 1/100."""

    value: Fraction
    scale: Fraction = Fraction(1)

    def equals(self, other: "Number") -> bool:
        """Return whether the numbers are equal; 50% equals both 50 and 1/2."""
        products = self.value * self.scale, other.value * other.scale
        return products[0] == products[1] or (
            self.value == other.value and Fraction(1) in (self.scale, other.scale)
        )


def gsm8k_reward(completion: str, answer: str) -> float:
    """Return 1.0 if `completion` states the number of `answer`, else 0.0.

    `answer` is a number, or a worked solution that states one as a completion does; of any other
    text it is the first number. Raises ValueError if there is none: an error of the data.
    """
    right, stated = check_answer(answer), stated_number(completion)
    return float(stated is not None and stated.equals(right))


def check_answer(answer: str) -> Number:
    """Return the number of an answer of the data. Raises ValueError if there is none."""
    match = _NUMBER.search(_plain(answer.rpartition("####")[2]))
    right = stated_number(answer) or (_number(match) if match else None)
    if right is None:
        raise ValueError(f"there is no number in the answer {answer[:100]!r}")
    return right


def stated_number(completion: str) -> Number | None:
    """Return the number that a completion states as its answer, None if there is none."""
    completion = completion.rpartition("</think>")[2].strip()
    text = _plain(completion[-_LAST_CHARACTERS:])
    for statement in reversed(list(_STATEMENT.finditer(text))[-_LAST_STATEMENTS:]):
        stated = _statement_text(text, statement)
        match = _NUMBER.search(stated)
        if match and not _NEGATION.search(stated, 0, match.start()):
            return _alone(match)
    return _unannounced(completion)


def _unannounced(completion: str) -> Number | None:
    """Return the number that is the whole completion, or the only marked one of its last line."""
    bare = completion.strip()
    right = _right_side(_plain(bare[-_MAX_CHARACTERS:]).rstrip(".")).lstrip()
    if len(bare) <= _MAX_CHARACTERS and (match := _NUMBER.fullmatch(right)):
        return _number(match)
    last = bare[-_STATEMENT_CHARACTERS:].rpartition("\n")[2]
    texts = ("".join(groups) for groups in _MARKED.findall(last))
    marked = [_right_side(_plain(text).strip(" .")).lstrip() for text in texts]
    numbers = [match for text in marked if (match := _NUMBER.match(text))]
    return _alone(numbers[0]) if len(numbers) == 1 else None


def _plain(text: str) -> str:
    """Replace LaTeX and typographic forms of numbers by plain ones."""
    for old, new in (("{,}", ","), ("\\!", ""), ("\\$", "$"), ("\\%", "%"), ("\\,", " ")):
        text = text.replace(old, new)
    text = text.translate(_CHARACTERS)
    text = _VULGAR.sub(lambda m: " " + unicodedata.normalize("NFKC", m[0]).replace("⁄", "/"), text)
    text = _SUPERSCRIPTS.sub(lambda m: "^" + unicodedata.normalize("NFKC", m[0]), text)
    text = re.sub(r"(?<=[0-9])\\[dt]?frac", r" \\frac", text)  # 2\frac{1}{2} is two and a half
    return _FRACTION.sub(_plain_fraction, _TAG.sub("", text))


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
    return _right_side(rest)


def _right_side(text: str) -> str:
    """Return what follows the last `=`, if there is one."""
    return _EQUALS.split(text)[-1].rstrip()


def _closing_brace(text: str) -> int:
    """Return where the brace opened before `text` closes; the length of `text` if it does not."""
    depth = 1
    for brace in re.finditer(r"[{}]", text):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return brace.start()
    return len(text)


def _alone(match: re.Match) -> Number | None:
    """Return a number that is not a part of an expression, a list, a range or a time."""
    text = match.string
    if _OPENS.search(text, 0, match.start()) or not _CLOSES.match(text, match.end()):
        return None
    return _number(match)


def _number(match: re.Match) -> Number | None:
    """Return the value of a match of _NUMBER; None if it is too long or divides by zero."""
    ten = _exponent(match["ten"]) if match["ten"] else 0
    power = _exponent(match["power"]) if match["power"] else 1
    digits = len(match["number"])
    if len(match[0]) > _MAX_CHARACTERS or max(digits * abs(power), abs(ten)) > _MAX_CHARACTERS:
        return None
    value, below = Fraction(re.sub("[, ]", "", match["number"])), int(match["denominator"] or 1)
    if below == 0 or (value == 0 and power < 0):
        return None
    value = value**power / below * Fraction(10) ** ten + int(match["whole"] or 0)
    if "-" in (match["sign"] or "") + (match["sign2"] or ""):
        value = -value
    return Number(value, Fraction(10) ** _SCALES.get((match["scale"] or "").lower(), 0))


def _exponent(text: str) -> int:
    """Return the last integer of a power: 3 of `e3` and of `\times 10^{3}`."""
    return int(re.findall(r"[+-]?[0-9]+", text)[-1])
