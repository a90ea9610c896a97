"""An agent of a framework: smolagents 1.26, in a thread for each episode in flight.

It rewords its earlier calls, so that each of its requests begins another trace.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the first number
        b: the second number
    """
    return a + b


THREADS = ThreadPoolExecutor(256)


async def agent(base_url, api_key, prompt):
    model = OpenAIModel("policy", base_url, api_key=api_key, tool_choice="auto")
    adder = ToolCallingAgent([add], model, verbosity_level=0)
    said = await asyncio.get_running_loop().run_in_executor(THREADS, adder.run, prompt.text)
    return float(str(said) == prompt.answer)
