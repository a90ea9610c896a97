"""Verifier of programs: Python that the model wrote, run in the sandbox against tests.

`answer` has the tests, in one of the forms in which data sets have them, and perhaps limits
(docs/workflows.md, Programs and the sandbox). Anything else is an error of the data.

The reward is 1.0 if all tests pass, else 0.0. White space at the ends of lines and of the text does
not count. A program that is too slow, too large or prints too much fails; `exit()` is an end like
any other. A sandbox that cannot run is an error, never a 0.

The tests share a process, and results are compared outside of it. After a failure that an earlier
test may have caused, the program runs anew. Statements share their process with the program: one
that is made to deceive (with objects that equal everything) can pass.
"""

import ast
import json
import math
import os
import re
import secrets
import textwrap
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import Annotated, Any

import msgspec

from areal_lite.rewards.sandbox import driver
from areal_lite.rewards.sandbox.run import Limits, Outcome, run_python
from areal_lite.rewards.worker import ENV_TIMEOUT_S

_DRIVER = Path(driver.__file__).read_text() + "\n\nmain()\n"
# A test may last this many times its processor seconds, and a reward takes some time of its own.
_PATIENCE = 3.0
_MARGIN_S = 0.5
_OUTPUT_BYTES = 1 << 20
_OPENING = re.compile(
    r"(?:^[ \t]*+|(?<=[\s:]))(?P<fence>```+|~~~+)[ \t]*+(?P<language>[\w.+#-]*)[^`\n]*$",
    re.MULTILINE,
)
_CLOSING = {fence: re.compile(rf"{fence}+[ \t\r]*+$", re.MULTILINE) for fence in ("```", "~~~")}
_INLINE = re.compile(r"```+[ \t]*+(?:python3?|py)[ \t]([^`\n]+)```")
_PYTHON = re.compile(r"py(thon)?[0-9.]*", re.IGNORECASE)
_CLOSINGS = 8  # fences that may close a block: a docstring may have some
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# What data sets call the keys of an answer.
_NAMES = {"input": "inputs", "output": "outputs", "func_name": "fn_name", "entry_point": "fn_name"}
_NAMES |= {"test": "tests", "test_list": "tests", "test_setup_code": "setup"}
_NAMES |= {"test_imports": "setup"}
_LIMITS = {"checker", "tolerance", "time_limit_s", "memory_mb"}
_KEYS = {"inputs", "outputs", "fn_name", "tests", "setup", "test_cases", "testtype", *_LIMITS}


class Tests(msgspec.Struct, kw_only=True):
    """The tests of an answer: statements, or what is given to the program and should come out."""

    given: list[Any] = []
    expected: list[Any] = []
    fn_name: str | None = None
    setup: str = ""  # before the program
    statements: str = ""
    checker: str | None = None  # the source of check(given, expected, result) -> bool
    tolerance: Annotated[float, msgspec.Meta(ge=0)] | None = None  # relative to numbers above 1
    time_limit_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 5.0  # of the processor, each
    memory_mb: Annotated[int, msgspec.Meta(ge=64, le=1 << 20)] = 512

    def accepts(self, number: int, result: Any) -> bool:
        """Return whether a test may have this result: a text that was printed, or a value."""
        expected = self.expected[number]
        if self.fn_name is None:
            return _equal_text(result, expected, self.tolerance)
        # Some data sets keep values as JSON, and some put each in a list.
        wanted = [expected]
        if isinstance(expected, str):
            with suppress(ValueError):
                wanted.append(json.loads(expected))
        if isinstance(expected, list) and len(expected) == 1:
            wanted += expected
        return any(_equal_value(result, value, self.tolerance) for value in wanted)


async def program_reward(completion: str, answer: str) -> float:
    """Return the reward. Raises ValueError if `answer` has no tests, or SandboxError."""
    timeout_s = float(os.environ.get(ENV_TIMEOUT_S, "inf"))
    tests = parse_tests(answer, timeout_s)
    program = extract_program(completion, starts=tests.fn_name is None and not tests.statements)
    if not program.strip():
        return 0.0
    program = f"{tests.setup}\n{program}" if tests.setup else program
    patience_s = _PATIENCE * tests.time_limit_s * max(len(tests.given), 1)
    deadline = time.monotonic() + min(patience_s, max(timeout_s - _MARGIN_S, timeout_s / 2))
    return float(await _passes(program, tests, deadline))


async def _passes(program: str, tests: Tests, deadline: float) -> bool:
    if tests.statements:
        done = secrets.token_hex(16)
        task = {"statements": tests.statements, "done": done}
        return (await _drive(program, task, tests, deadline))[0] == [done]
    if tests.fn_name is None:
        task = {"inputs": tests.given}
    else:
        task = {"calls": tests.given, "function": tests.fn_name}
    results, ended_well = await _drive(program, task, tests, deadline)
    passed = await _count_right(results, 0, tests, deadline)
    if tests.fn_name is None and (passed or (ended_well and not results)):
        # Something of an earlier test may be left, or `os._exit` has ended the process of all.
        for number in range(passed, len(tests.given)):
            outcome = await _run(program, tests.given[number], tests, deadline)
            if not (outcome and outcome.ok):
                return False
            passed += await _count_right([outcome.stdout], number, tests, deadline)
            if passed == number:
                return False
    return passed == len(tests.given)


async def _count_right(results: list[Any], first: int, tests: Tests, deadline: float) -> int:
    """Count the right results of the tests from `first` on, until one is wrong."""
    numbers = range(first, first + len(results))
    if tests.checker is None:
        right = map(tests.accepts, numbers, results)
    else:
        calls = [[tests.given[n], tests.expected[n], results[n - first]] for n in numbers]
        task = {"calls": calls, "function": "check"}
        right = (await _drive(tests.checker, task, tests, deadline))[0] if calls else []
    return sum(1 for _ in takewhile(bool, right))


async def _drive(
    program: str, task: dict[str, Any], tests: Tests, deadline: float
) -> tuple[list[Any], bool]:
    """Return the results of driver.py, and whether its process ended without an error."""
    task = {"program": program, "time_s": tests.time_limit_s, **task}
    outcome = await _run(_DRIVER, json.dumps(task), tests, deadline)
    results: list[Any] = []
    with suppress(ValueError):  # a limit ended it in this line
        for line in outcome.stdout.splitlines() if outcome else ():
            results.append(json.loads(line))
    return results, outcome is not None and outcome.ok


async def _run(code: str, given: str, tests: Tests, deadline: float) -> Outcome | None:
    """Run `code` until the deadline; None after it."""
    if (left := deadline - time.monotonic()) <= 0:
        return None
    size = _OUTPUT_BYTES + 2 * sum(len(json.dumps(result)) for result in tests.expected)
    # The driver keeps the input of a test in a file, and its output in another one.
    inputs = (len(str(one).encode(errors="replace")) for one in tests.given)
    file_mb = (max([size, *inputs]) >> 20) + 4
    limits = Limits(time_s=left, memory_mb=tests.memory_mb, output_bytes=size, file_mb=file_mb)
    return await run_python(code, given, limits)


def extract_program(completion: str, starts: bool = True) -> str:
    """Return the program in a completion: its last block of Python, or all of it without a block.

    A block that only uses what an earlier one defines is an example, and is left out; unless the
    program `starts` by its own statements and has no others. One that defines more belongs to the
    earlier ones. What a model thinks (until `</think>`) has no program.
    """
    text = completion.rpartition("</think>")[2]
    if not (blocks := list(_blocks(text))):
        return text
    tagged = [source for language, source in blocks if _PYTHON.fullmatch(language)]
    untagged = [source for language, source in blocks if not language]
    sources = tagged or untagged or [source for _, source in blocks]
    trees = [(source, tree) for source in sources if (tree := _parsed(source)) is not None]
    if not trees:
        return sources[-1]
    while len(trees) > 1:
        source, tree = trees[-1]
        defined, used = _names(tree.body)
        before = [node for _, other in trees[:-1] for node in other.body]
        outside = [node for node in before if not isinstance(node, _DEFINITIONS)]
        known = _names(outside)[0].union(*(_defines(other) for _, other in trees[:-1]))
        if not (used - defined) & known:
            return source
        starts_before = any(_starts(other) for _, other in trees[:-1])
        if _defines(tree) or "input(" in source or "stdin" in source or starts > starts_before:
            return "\n\n".join(source for source, _ in trees)
        trees.pop()
    return trees[0][0]


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """Yield language and content of each fenced block. The last one may lack its end."""
    at = 0
    while opening := _OPENING.search(text, at):
        yield from (("python", inline[1]) for inline in _INLINE.finditer(text, at, opening.start()))
        language, start = opening["language"], min(opening.end() + 1, len(text))
        is_python = _PYTHON.fullmatch(language)
        closings = _CLOSING[opening["fence"][:3]].finditer(text, start)
        closings = islice(closings, _CLOSINGS if is_python else 1)
        ends = [(end.start(), end.end()) for end in closings] or [(len(text), len(text))]
        contents = [(textwrap.dedent(text[start:end]), after) for end, after in ends]
        whole = (pair for pair in contents if _parsed(pair[0]) is not None)
        content, at = next(whole, contents[0]) if is_python else contents[0]
        yield language, content
    yield from (("python", inline[1]) for inline in _INLINE.finditer(text, at))


def _parsed(source: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings(action="ignore"):
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _names(nodes: Iterable[ast.AST]) -> tuple[set[str], set[str]]:
    """Return the names defined below `nodes`, and the names used there."""
    defined, used = set(), set()
    for node in (below for each in nodes for below in ast.walk(each)):
        if isinstance(node, ast.Name):
            (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.alias):
            defined.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, _DEFINITIONS):
            defined.add(node.name)
    return defined, used


def _defines(tree: ast.Module) -> set[str]:
    return {node.name for node in tree.body if isinstance(node, _DEFINITIONS)}


def _starts(tree: ast.Module) -> bool:
    """Return whether a program does more than to define things."""
    return any(
        isinstance(node, ast.For | ast.While | ast.If | ast.With | ast.Try)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call))
        for node in tree.body
    )


def parse_tests(answer: str, timeout_s: float = math.inf) -> Tests:
    """Parse the tests of an answer.

    Raises ValueError if there are none, or if a limit makes no sense. A test that may run for
    `timeout_s`, the pool's limit for one reward, would be dropped instead of failing.
    """
    try:
        tests = msgspec.convert(_fields(_decoded(answer.strip())), Tests)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"the answer has no tests: {error}; it begins {answer[:100]!r}") from error
    if tests.time_limit_s >= timeout_s:
        raise ValueError(
            f"the answer's time_limit_s={tests.time_limit_s:g} must be less than"
            f" reward.timeout_s={timeout_s:g}: {answer[:100]!r}"
        )
    return tests


check_answer = parse_tests


def _decoded(text: str) -> Any:
    """Decode JSON, or a list or dictionary of Python; anything else stays text."""
    if text[:1] not in ("{", "["):
        return text
    try:
        return json.loads(text)
    except ValueError:
        value = ast.literal_eval(text)  # a set, too, or a tuple
        return value if isinstance(value, list | dict) else text


def _fields(content: Any) -> dict[str, Any]:
    """Return the fields of Tests. Raises ValueError or TypeError."""
    if isinstance(content, str):
        return {"statements": _statements(content)}
    if isinstance(content, list):
        if content and all(isinstance(part, str) for part in content):
            return {"statements": _statements("\n".join(content))}
        return _fields({"test_cases": content})
    fields: dict[str, Any] = {}
    for key, value in content.items():
        name = str(_NAMES.get(key, key))
        if name not in _KEYS:
            raise ValueError(f"the key {key!r} is unknown; known are {', '.join(sorted(_KEYS))}")
        if name in fields and name != "setup":
            raise ValueError(f"the key {key!r} repeats another key")
        if name == "setup":
            value = f"{fields.get(name, '')}\n{_joined(value)}".strip()
        fields[name] = [value] if key in ("input", "output") else value
    for number, case in enumerate(_list(fields.pop("test_cases", []))):
        if not isinstance(case, dict) or not {"input", "output"} <= case.keys():
            raise ValueError(f"test {number} must be an object with input and output: {case!r:.50}")
        fields.setdefault("inputs", []).append(case["input"])
        fields.setdefault("outputs", []).append(case["output"])
        fields |= {
            str(_NAMES.get(k, k)): v for k, v in case.items() if k not in ("input", "output")
        }
    if fields.get("testtype", "stdin") not in ("stdin", "functional"):
        raise ValueError(f"testtype={fields['testtype']!r} is neither stdin nor functional")
    if fields.get("testtype") == "functional" and not fields.get("fn_name"):
        raise ValueError("functional tests need fn_name, the name of the function")
    return _tests(fields)


def _tests(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of Tests for an answer's fields, whose names are in _KEYS."""
    limits = {key: fields[key] for key in _LIMITS & fields.keys()}
    name, setup = fields.get("fn_name"), fields.get("setup", "")
    if "tests" in fields:
        statements = _joined(fields["tests"])
        if name and re.search(r"^def check\(", statements, re.MULTILINE):  # as in HumanEval
            statements += f"\ncheck({name})\n"
        return {**limits, "statements": _statements(f"{setup}\n{statements}")}
    given, expected = _list(fields.get("inputs", [])), _list(fields.get("outputs", []))
    if not given or len(given) != len(expected):
        raise ValueError(f"it has {len(given)} inputs, {len(expected)} outputs and no more tests")
    if name is None:
        given, expected = [_text(one) for one in given], [_text(one) for one in expected]
    else:
        given = [_arguments(one) for one in given]
        expected = json.loads(json.dumps(expected))  # as results come: tuples are lists
    return {**limits, "given": given, "expected": expected, "fn_name": name, "setup": setup}


def _statements(source: str) -> str:
    """Return tests that are statements. Raises ValueError if they cannot fail."""
    if (tree := _parsed(source)) is None:
        raise ValueError("it is neither JSON nor Python")
    if not any(isinstance(node, ast.Assert | ast.Raise) for node in ast.walk(tree)):
        raise ValueError("its statements assert nothing")
    if all(isinstance(n, (*_DEFINITIONS, ast.Import, ast.ImportFrom)) for n in tree.body):
        raise ValueError("nothing calls its functions: add the call, or entry_point")
    return source


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.50} is not a list")
    return value


def _joined(value: Any) -> str:
    """Return statements, which may be a list of texts."""
    lines = [value] if isinstance(value, str) else _list(value)
    if not all(isinstance(line, str) for line in lines):
        raise ValueError("tests are texts, or lists of texts")
    return "\n".join(lines)


def _text(value: Any) -> str:
    """Return what a program reads or prints: text, a number, or a list of lines."""
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise ValueError(f"{value!r:.50} is neither text nor a number: functions need fn_name")
    return str(value)


def _arguments(value: Any) -> list[Any]:
    """Return the arguments of a call, which LiveCodeBench has as lines of JSON."""
    if isinstance(value, str):
        return [json.loads(line) for line in value.splitlines()]
    if not _fits_json(_list(value)):
        raise ValueError(f"{value!r:.50} is not as JSON has it: no sets, and texts as keys")
    return value


def _fits_json(value: Any) -> bool:
    """Return whether JSON has a value of Python, a tuple as a list."""
    if isinstance(value, dict):
        return all(isinstance(key, str) for key in value) and _fits_json([*value.values()])
    if isinstance(value, list | tuple):
        return all(map(_fits_json, value))
    return value is None or isinstance(value, str | int | float)


def _equal_text(printed: Any, expected: str, tolerance: float | None) -> bool:
    """Compare what was printed, without white space at the ends of lines and of the text."""
    if not isinstance(printed, str):
        return False
    lines = [[line.rstrip() for line in text.strip().splitlines()] for text in (printed, expected)]
    if tolerance is None or lines[0] == lines[1]:
        return lines[0] == lines[1]
    words = [text.split() for text in (printed, expected)]
    return len(words[0]) == len(words[1]) and all(
        one == two or _near(one, two, tolerance) for one, two in zip(*words)
    )


def _equal_value(result: Any, expected: Any, tolerance: float | None) -> bool:
    if isinstance(result, list) and isinstance(expected, list):
        return len(result) == len(expected) and all(
            _equal_value(one, two, tolerance) for one, two in zip(result, expected)
        )
    if isinstance(result, dict) and isinstance(expected, dict):
        return result.keys() == expected.keys() and all(
            _equal_value(result[key], expected[key], tolerance) for key in result
        )
    same = type(result) is type(expected) or not isinstance(result, bool | str)
    numbers = isinstance(result, int | float) and isinstance(expected, int | float)
    return (same and result == expected) or (
        numbers and tolerance is not None and _near(result, expected, tolerance)
    )


def _near(one: Any, two: Any, tolerance: float) -> bool:
    """Return whether two numbers are equal within a tolerance, relative above 1."""
    try:
        one, two = float(one), float(two)
    except (ValueError, OverflowError):
        return False
    return abs(one - two) <= tolerance * max(1.0, abs(two)) < math.inf
