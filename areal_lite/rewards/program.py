"""Verifier of programs: Python that the model wrote, run in the sandbox against tests.

The program is the last fenced code block of the completion, or the whole completion if there is
none. `answer` is JSON:

    {"inputs": ["1 2\\n", …], "outputs": ["3\\n", …]}     what the program prints for each input
    {"tests": "assert add(1, 2) == 3\\n…"}                statements that run after it, in the same
    program

Optional keys are "time_limit_s" (5, for all tests together, less than reward.timeout_s) and
"memory_mb" (512, at least 64). An answer that is no JSON object is taken as such statements. White
space at the ends of lines and of the text does not count.

The reward is 1.0 if all tests pass, else 0.0. A program that is too slow, too large or prints too
much fails. A sandbox that cannot run is an error, never a 0. Programs share their process with
`tests`: one that exits early fails, but one that is made to deceive (with objects that equal
everything) can pass. `inputs` and `outputs` are compared outside the process.
"""

import math
import os
import re
import secrets
import time
from typing import Annotated

import msgspec

from areal_lite.rewards.pool import ENV_TIMEOUT_S
from areal_lite.rewards.sandbox.run import Limits, Outcome, run_python

_FENCED = re.compile(r"^[ \t]*```[^\n]*\n(.*?)^[ \t]*```", re.DOTALL | re.MULTILINE)


class Tests(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The content of `answer`."""

    inputs: list[str] = []
    outputs: list[str] = []
    tests: str = ""
    time_limit_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 5.0
    memory_mb: Annotated[int, msgspec.Meta(ge=64, le=1 << 20)] = 512


async def program_reward(completion: str, answer: str) -> float:
    """Return the reward. Raises ValueError if `answer` has no tests, or SandboxError."""
    tests = parse_tests(answer, float(os.environ.get(ENV_TIMEOUT_S, "inf")))
    program = extract_program(completion)
    deadline = time.monotonic() + tests.time_limit_s

    async def run(code: str, stdin: str = "") -> Outcome | None:
        left = deadline - time.monotonic()
        if left <= 0:
            return None
        return await run_python(code, stdin, Limits(time_s=left, memory_mb=tests.memory_mb))

    if tests.tests:
        # Printed at the very end, so that a program that exits early has not passed.
        passed = secrets.token_hex(16)
        outcome = await run(f"{program}\n\n{tests.tests}\n\nprint({passed!r})\n")
        if not (outcome and outcome.ok and outcome.stdout.rstrip().endswith(passed)):
            return 0.0
    for given, expected in zip(tests.inputs, tests.outputs):
        outcome = await run(program, given)
        if not (outcome and outcome.ok and _lines(outcome.stdout) == _lines(expected)):
            return 0.0
    return 1.0


def extract_program(completion: str) -> str:
    """Return the program in a completion."""
    blocks = _FENCED.findall(completion)
    return blocks[-1] if blocks else completion


def parse_tests(answer: str, timeout_s: float = math.inf) -> Tests:
    """Parse the tests of an answer.

    Raises ValueError if there are none, or if a limit makes no sense. A program that may run for
    `timeout_s`, the pool's limit for one reward, would be dropped instead of failing.
    """
    if answer.lstrip().startswith("{"):
        try:
            tests = msgspec.json.decode(answer, type=Tests)
        except msgspec.MsgspecError as error:
            raise ValueError(
                f"the answer is not a test: {error}; it begins {answer[:100]!r}"
            ) from error
    else:
        tests = Tests(tests=answer)
    if tests.time_limit_s >= timeout_s:
        raise ValueError(
            f"the answer's time_limit_s={tests.time_limit_s:g} must be less than"
            f" reward.timeout_s={timeout_s:g}: {answer[:100]!r}"
        )
    if len(tests.inputs) != len(tests.outputs) or not (tests.inputs or tests.tests.strip()):
        raise ValueError(
            f"the answer has {len(tests.inputs)} inputs, {len(tests.outputs)} outputs"
            f" and no more tests: {answer[:100]!r}"
        )
    return tests


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.strip().splitlines()]
