"""Agent code as users write it: it uses the openai package and knows nothing of training."""

import functools

from openai import AsyncOpenAI, BadRequestError


@functools.cache
def shared(base_url):
    """Return one client for all episodes: to make one takes longer than a small model's answer."""
    return AsyncOpenAI(base_url=base_url, api_key="of no episode")


async def three_turns(base_url, api_key, prompt):
    """Ask three times in one conversation; reward 1, or less if a request is refused."""
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
    """Ask once; raise KeyError if the answer has an odd number of characters."""
    client = shared(base_url).with_options(api_key=api_key)
    completion = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": prompt.text}]
    )
    if len(completion.choices[0].message.content) % 2:
        raise KeyError("odd")


async def forgets(base_url, api_key, prompt):
    """Ask up to three times, with the end of the last answer only; reward its share of letters."""
    client = shared(base_url).with_options(api_key=api_key)
    said = ""
    for _ in range(3):
        messages = [{"role": "user", "content": prompt.text + said[-4:]}]
        completion = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=40
        )
        said = completion.choices[0].message.content
        if said[-1:] < "@":
            break
    return sum(map(str.isalpha, said)) / 40
