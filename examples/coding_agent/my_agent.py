"""A coding agent: it shows a file and a failed test, edits the file, and runs the tests again.

The policy names an operator, and the agent writes it into `calc.py`. The tests run in the sandbox,
like everything that depends on what a model says.
"""

import functools
import json
import re

from openai import AsyncOpenAI

from areal_lite.data.prompts import Prompt
from areal_lite.rewards.sandbox.run import Limits, run_python

FIRST = "{code}\n{failure}. Which operator is right: +, - or *? Answer with the operator."
AGAIN = "Now {failure}. Answer with another operator."
# It writes the files into the scratch folder of the sandbox.
PROGRAM = """
import json, runpy, sys
for name, text in json.loads({files!r}).items():
    open(name, "w").write(text)
sys.path.insert(0, ".")
runpy.run_path("test_calc.py")
"""
LIMITS = Limits(time_s=5.0, memory_mb=256)
# Samples of a group edit alike, and a sandbox takes tens of milliseconds to start.
tested: dict[str, str] = {}


@functools.cache
def client(base_url: str) -> AsyncOpenAI:
    """Return one client for all episodes."""
    return AsyncOpenAI(base_url=base_url, api_key="one per episode")


async def agent(base_url: str, api_key: str, prompt: Prompt) -> float:
    """Edit the file until its tests pass, at most twice. Return the reward."""
    policy = client(base_url).with_options(api_key=api_key)
    files = dict(prompt.info["files"])
    failure = await run_tests(files)
    messages = [{"role": "user", "content": FIRST.format(code=files["calc.py"], failure=failure)}]
    for reward in (1.0, 0.5):
        completion = await policy.chat.completions.create(
            model="policy", messages=messages, max_tokens=8
        )
        message = completion.choices[0].message
        files["calc.py"] = edited(files["calc.py"], message.content or "")
        if not (failure := await run_tests(files)):
            return reward
        again = {"role": "user", "content": AGAIN.format(failure=failure)}
        messages += [message.model_dump(exclude_none=True), again]
    return 0.0


def edited(code: str, answer: str) -> str:
    """Write the first operator of an answer into the code."""
    named = re.search(r"[-+*]", answer)
    return re.sub(r" [-+*] ", f" {named[0]} ", code) if named else code


async def run_tests(files: dict[str, str]) -> str:
    """Return what the first failed test says; "" if all pass."""
    content = json.dumps(files)
    if content not in tested:
        outcome = await run_python(PROGRAM.format(files=content), limits=LIMITS)
        said = outcome.stderr.strip().rpartition("\n")[2].removeprefix("AssertionError: ")
        tested[content] = "" if outcome.ok else said or "the tests did not end"
    return tested[content]
