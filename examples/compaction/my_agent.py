"""An agent that compacts its history: it asks for a column with the column before it only.

Each request is a conversation of its own, so it is a trace of its own. The traces of an episode
share its reward.
"""

import functools

from openai import AsyncOpenAI

from areal_lite.data.prompts import Prompt
from areal_lite_quickstart.prompts import AdditionPrompts


def long_sums(config, tokenizer, split, *, max_digits: int, seed: int = 1) -> AdditionPrompts:
    """Return the prompts: sums of numbers of exactly `max_digits` digits."""
    weights = [0.0] * (max_digits - 1) + [1.0]
    return AdditionPrompts(
        config, tokenizer, split, max_digits=max_digits, seed=seed, weights=weights
    )


# The column that was answered becomes the first one of the next question.
ONE_BACK = str.maketrans("bBy", "aAz")


@functools.cache
def client(base_url: str) -> AsyncOpenAI:
    """Return one client for all episodes: to make one takes longer than a small model's answer."""
    return AsyncOpenAI(base_url=base_url, api_key="one per episode")


async def agent(base_url: str, api_key: str, prompt: Prompt) -> float:
    """Add column by column, with one request for each. Return the share of right digits."""
    policy = client(base_url).with_options(api_key=api_key)
    first, second = prompt.text.removesuffix("=?").split("+")  # c4b7a9 and C1B8A5
    before, line, total = ("0", "0"), "a0+A0+0=0z0", ""
    for column in zip(first[::-2], second[::-2]):  # the units come first
        question = f"b{column[0]}a{before[0]}+B{column[1]}A{before[1]}=?"
        line = await ask(policy, f"{question}{line}\n", stop="\n")
        total = line[-1:] + total  # b7+B8+1=1y6 is 7 + 8 + 1: a carry of 1, and a digit of 6
        before, line = column, line.translate(ONE_BACK)
    carry = line[-3:-2].replace("0", "")
    return share(carry + total, prompt.answer)


async def one_trace(base_url: str, api_key: str, prompt: Prompt) -> float:
    """Ask for the whole solution at once, for comparison."""
    policy = client(base_url).with_options(api_key=api_key)
    solution = await ask(policy, prompt.text)
    return share(solution.partition("#")[2].strip()[1::2], prompt.answer)


def share(digits: str, answer: str) -> float:
    """Return the share of right digits, counted from the units: x1y3z2 is 132."""
    right = answer[1::2]
    equal = sum(a == b for a, b in zip(reversed(digits), reversed(right)))
    return equal / max(len(digits), len(right))


async def ask(policy: AsyncOpenAI, text: str, stop: str | None = None) -> str:
    """Begin a conversation, and return the answer."""
    completion = await policy.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": text}], stop=stop
    )
    return completion.choices[0].message.content or ""
