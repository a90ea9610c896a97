"""Agent code as users have it: it knows nothing of training, only the openai package."""

import functools

from openai import AsyncOpenAI, BadRequestError


@functools.cache
def shared(base_url):
    """One connection pool for all episodes: making one takes long (it loads certificates), longer than an answer of a small model."""
    return AsyncOpenAI(base_url=base_url, api_key="of no episode")


async def three_turns(base_url, api_key, prompt):
    """Asks, asks back twice with its own bookkeeping of the conversation, and grades itself by the number of answers that it got."""
    client = shared(base_url).with_options(api_key=api_key)
    messages = [{"role": "user", "content": prompt.text}]
    for turn in range(3):
        try:
            completion = await client.chat.completions.create(
                model="policy", messages=messages, max_tokens=8
            )
        except BadRequestError:
            return turn / 4
        messages.append(completion.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "?"})
    return 1.0


async def fails_often(base_url, api_key, prompt):
    client = shared(base_url).with_options(api_key=api_key)
    completion = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": prompt.text}]
    )
    if len(completion.choices[0].message.content) % 2:
        raise KeyError("odd")
