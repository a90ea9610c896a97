"""An agent of your own: any code that talks to a model through the OpenAI API.

It knows nothing of training. Its API key belongs to one episode, and each conversation under this
key becomes a trajectory.
"""

import functools

from openai import AsyncOpenAI

from areal_lite.data.prompts import Prompt


@functools.cache
def client(base_url: str) -> AsyncOpenAI:
    """Return one client for all episodes: to make one takes longer than a small model's answer."""
    return AsyncOpenAI(base_url=base_url, api_key="one per episode")


async def agent(base_url: str, api_key: str, prompt: Prompt) -> float:
    """Ask, check the answer, and ask once more if it is wrong. Return the reward."""
    policy = client(base_url).with_options(api_key=api_key)
    messages = [{"role": "user", "content": prompt.text}]
    for reward in (1.0, 0.5):
        completion = await policy.chat.completions.create(
            model="policy", messages=messages, max_tokens=64
        )
        message = completion.choices[0].message
        if (message.content or "").rpartition("#")[2].strip() == prompt.answer:
            return reward
        # What was said before stays as it was, so this is the same conversation.
        messages += [message.model_dump(exclude_none=True), {"role": "user", "content": "\n"}]
    return 0.0
