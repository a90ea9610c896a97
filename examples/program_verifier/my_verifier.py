"""A verifier that runs what the model wrote, in the sandbox.

The model adds two numbers column by column, such as `a7+A5+0=1z2`. Such a line is a claim that
Python can check: `assert 7+5+0 == int("12")`. The reward is for an answer that is right and whose
work holds. What the model writes may be anything, so Python runs in the sandbox: the kernel bounds
the time, the memory and the files of such a program, and it has no network.
"""

import re

from areal_lite.rewards.sandbox.run import Limits, run_python

LIMITS = Limits(time_s=2.0, memory_mb=256)
# The samples of a group are often equal, and a sandbox takes tens of milliseconds to start.
held: dict[str, bool] = {}


async def work_reward(completion: str, answer: str) -> float:
    """Return 1 if the answer is right and every line of the work holds, else 0."""
    work, _, stated = completion.rpartition("#")
    if stated.strip() != answer:
        return 0.0
    program = assertions(work)
    if program not in held:
        held[program] = (await run_python(program, limits=LIMITS)).ok
    return float(held[program])


def assertions(work: str) -> str:
    """Write each line of the work as an assertion, without the letters of the places."""
    lines = [line.partition("=") for line in re.sub("[A-Za-z]", "", work).splitlines()]
    return "\n".join(f'assert {left} == int("{right}")' for left, _, right in lines)
