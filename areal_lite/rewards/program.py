"""Verifier of programs: Python that the model wrote, run in the sandbox against tests.

The program is the last fenced code block of the completion, or all of it if there is none. `answer` says what to try it with, as JSON:

    {"inputs": ["1 2\\n", …], "outputs": ["3\\n", …]}     what it must print for each input, but for white space at ends of lines and of the text
    {"tests": "assert add(1, 2) == 3\\n…"}                statements run after it, in the same program

and optionally "time_limit_s" (5) for all of it together and "memory_mb" (512). Any other text is taken for such statements.

The reward is 1.0 if everything passes, else 0.0; too slow, too large and too talkative are failures of the program. That the sandbox cannot
run is an error (`on_failure` of the reward), never a 0. A program with `tests` shares its process with them: one that leaves early fails,
but one that is made to deceive, such as by objects that equal everything, can; `inputs` and `outputs` are compared out of its reach.
"""

from __future__ import annotations

import re
import secrets
import time

import msgspec

from areal_lite.rewards.sandbox.run import Limits, Outcome, run_python

_FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


class Tests(msgspec.Struct, forbid_unknown_fields=True):
    inputs: list[str] = []
    outputs: list[str] = []
    tests: str = ""
    time_limit_s: float = 5.0
    memory_mb: int = 512


async def program_reward(completion: str, answer: str) -> float:
    """1.0 or 0.0. Raises ValueError for an answer that is no test, SandboxError if there is no sandbox."""
    tests, program = parse_tests(answer), extract_program(completion)
    deadline = time.monotonic() + tests.time_limit_s

    async def run(code: str, stdin: str = "") -> Outcome | None:
        left = deadline - time.monotonic()
        return await run_python(code, stdin, Limits(left, tests.memory_mb)) if left > 0 else None

    if tests.tests:
        passed = secrets.token_hex(
            16
        )  # printed at the very end, so that a program that exits early has not passed
        outcome = await run(f"{program}\n\n{tests.tests}\n\nprint({passed!r})\n")
        if not (outcome and outcome.ok and outcome.stdout.rstrip().endswith(passed)):
            return 0.0
    for given, expected in zip(tests.inputs, tests.outputs):
        outcome = await run(program, given)
        if not (outcome and outcome.ok and _lines(outcome.stdout) == _lines(expected)):
            return 0.0
    return 1.0


def extract_program(completion: str) -> str:
    blocks = _FENCED.findall(completion)
    return blocks[-1] if blocks else completion


def parse_tests(answer: str) -> Tests:
    """Raises ValueError if there is nothing to test with."""
    if answer.lstrip().startswith("{"):
        try:
            tests = msgspec.json.decode(answer, type=Tests)
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"the answer is not a test: {error}; it begins {answer[:100]!r}"
            ) from error
    else:
        tests = Tests(tests=answer)
    if len(tests.inputs) != len(tests.outputs) or not (tests.inputs or tests.tests.strip()):
        raise ValueError(
            f"the answer has {len(tests.inputs)} inputs, {len(tests.outputs)} outputs and no more tests: {answer[:100]!r}"
        )
    return tests


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
