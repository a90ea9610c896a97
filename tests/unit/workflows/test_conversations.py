"""Conversations of one episode, by the real `openai` client: which trace a request belongs to."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable

import openai
import pytest
from openai import AsyncOpenAI

from areal_lite.data.tokenizer import Tokenizer
from areal_lite.trajectory import Trajectory
from areal_lite.workflows.endpoint.server import AgentEndpoint, Conversations
from tests.unit.rollout.episodes import Scripted, chat_prompt, playing, save_chat_tokenizer

END, START = "<|im_end|>", "<|im_start|>"
RETRY = {"x-stainless-retry-count": "1"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return save_chat_tokenizer(tmp_path_factory.mktemp("model"))


class Asker:
    """An agent's client. `texts` has what the policy says in turn."""

    def __init__(self, client: AsyncOpenAI, scripted: Scripted, conversations: Conversations):
        self.client, self.scripted, self.conversations = client, scripted, conversations

    async def ask(self, messages: list[dict], **settings) -> list[dict]:
        """Send messages and return them with the answer."""
        completion = await self.client.chat.completions.create(
            model="policy", messages=messages, **settings
        )
        return [*messages, completion.choices[0].message.model_dump(exclude_none=True)]


def user(text: str) -> dict:
    return {"role": "user", "content": text}


@contextlib.asynccontextmanager
async def asking(
    tokenizer: Tokenizer, script: list[str], max_traces: int, budget: int, **parsers: str
) -> AsyncIterator[Asker]:
    endpoint = AgentEndpoint(**parsers)
    await endpoint.listen()
    prompt = chat_prompt(tokenizer)
    async with playing(tokenizer, prompt, script, max_new_tokens=budget) as (episodes, scripted, _):
        with endpoint.conversations(episodes[0], max_traces) as (key, conversations):
            async with AsyncOpenAI(base_url=endpoint.base_url, api_key=key, max_retries=0) as c:
                yield Asker(c, scripted, conversations)
    await endpoint.close()


def traces_of(
    tokenizer: Tokenizer,
    agent: Callable,
    script: list[str],
    max_traces: int = 16,
    budget: int = 1000,
    **parsers: str,
) -> list[str]:
    """Play an agent; return the texts of its traces, with every answer in angle brackets."""

    async def main() -> list[str]:
        async with asking(tokenizer, script, max_traces, budget, **parsers) as asker:
            await agent(asker)
            traces = asker.conversations.traces(0.5)
        assert_recorded(traces, asker.scripted)
        return [text_of(tokenizer, trace) for trace in traces]

    return asyncio.run(main())


def text_of(tokenizer: Tokenizer, trace: Trajectory) -> str:
    """Return the text of a trace without markers, with `<...>` around what was sampled."""
    parts, before = [], False
    for token, sampled in zip(trace.tokens.tolist(), trace.loss_mask.tolist()):
        parts += [">" if before else "<"] if sampled != before else []
        parts.append(tokenizer._fast.decode([token], skip_special_tokens=False))
        before = sampled
    text = "".join(parts) + (">" if before else "")
    for marker in (f"{START}user\n", f"{START}assistant\n", END):
        text = text.replace(marker, "")
    return text.replace("\n", " ")


def assert_recorded(traces: list[Trajectory], scripted: Scripted) -> None:
    """Every answer is sampled in one trace, after exactly the tokens that the server saw."""
    places = set()
    for _, given, answer in scripted.seen:
        start, end = len(given), len(given) + len(answer)
        found = [
            number
            for number, trace in enumerate(traces)
            if trace.tokens[:end].tolist() == given + answer
            and trace.loss_mask[start:end].all()
            and (number, start) not in places
        ]
        assert found, (given, answer)
        places.add((found[0], start))
    assert sum(trace.num_sampled for trace in traces) == sum(len(a) for _, _, a in scripted.seen)
    for trace in traces:
        trace.check()
        assert trace.reward == 0.5


def test_a_compacted_history_is_a_trace_of_its_own(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        first = await asker.ask([user("a?")])
        await asker.ask([*first, user("sum up")])
        second = await asker.ask([user("known: s. b?")])
        await asker.ask([*second, user("c?")])

    assert traces_of(tokenizer, agent, ["a", "s", "b", "c"]) == [
        "a? <a> sum up <s>",
        "known: s. b? <b> c? <c>",
    ]


def test_what_an_agent_appends_to_a_stopped_answer_is_not_sampled(tokenizer) -> None:
    """Some agents repeat the stop text, and write what they did behind it, into the answer."""

    async def agent(asker: Asker) -> None:
        first = await asker.ask([user("a?")], stop=["#"])
        first[-1]["content"] += "# done: 1"
        second = await asker.ask([*first, user("b?")], stop=["#"])
        second[-1]["content"] += "#"
        await asker.ask([*second, user("c?")])
        changed = [*second[:-1], {**second[-1], "content": "B# done: 2"}]
        await asker.ask([*changed, user("d?")])
        other = [{**first[-1], "content": "x # more"} if m is first[-1] else m for m in first]
        await asker.ask([*other, user("e?")])

    assert traces_of(tokenizer, agent, ["x #", "y#", "z", "v", "w"]) == [
        "a? <x #> done: 1 b? <y#> c? <z>",
        "a? x # done: 1 b? B# done: 2 d? <v>",
        "a? x # more e? <w>",
    ]


def test_what_an_agent_appends_to_an_ended_answer_is_another_history(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        first = await asker.ask([user("a?")], stop=["#"])
        first[-1]["content"] += " done: 1"
        await asker.ask([*first, user("b?")])

    assert traces_of(tokenizer, agent, ["x", "y"]) == ["a? <x>", "a? x done: 1 b? <y>"]


def test_an_edited_history_begins_with_the_tokens_before_the_edit(tokenizer) -> None:
    """The template would drop the thought of the first answer, and the trace keeps it."""

    async def agent(asker: Asker) -> None:
        first = await asker.ask([user("a?")])
        second = await asker.ask([*first, user("b?")])
        await asker.ask([*first, user("B?")])
        await asker.ask([user("A?"), *first[1:], user("b?")])
        await asker.ask([*second, user("c?")])

    script = ["<think>so</think> a", "b", "B", "other", "c"]
    assert traces_of(tokenizer, agent, script) == [
        "a? <think>so</think> a B? <B>",
        "A? a b? <other>",
        "a? <<think>so</think> a> b? <b> c? <c>",
    ]


def test_interleaved_conversations_grow_side_by_side(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        main = await asker.ask([user("main")])
        sub = await asker.ask([{"role": "system", "content": "sub"}, user("x?")])
        main = await asker.ask([*main, user("it says x")])
        sub = await asker.ask([*sub, user("y?")])
        await asker.ask([*main, user("it says y")])

    assert traces_of(tokenizer, agent, ["m1", "x", "m2", "y", "m3"]) == [
        f"{START}system sub x? <x> y? <y>",
        "main <m1> it says x <m2> it says y <m3>",
    ]


def test_requests_at_the_same_time(tokenizer) -> None:
    """Samples of one prompt are traces, and so is the second of two ways to go on."""
    chosen = []

    async def agent(asker: Asker) -> None:
        first, second = await asyncio.gather(*(asker.ask([user("a?")]) for _ in range(2)))
        assert first != second
        await asyncio.gather(*(asker.ask([*first, user("more")]) for _ in range(2)))
        chosen.append(first[1]["content"])

    texts = traces_of(tokenizer, agent, ["1", "2", "3", "4"])
    (first,) = chosen
    (other,) = {"1", "2"} - {first}
    assert set(texts) in (
        {f"a? <{other}>", f"a? <{first}> more <3>", f"a? {first} more <4>"},
        {f"a? <{other}>", f"a? <{first}> more <4>", f"a? {first} more <3>"},
    )


def test_a_retry_gets_the_answer_that_the_client_missed(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        first = await asker.ask([user("a?")])
        assert await asker.ask([user("a?")], extra_headers=RETRY) == first
        both = (asker.ask([*first, user("b?")], extra_headers=h) for h in (None, RETRY))
        one, other = await asyncio.gather(*both)
        assert one == other and len(asker.scripted.seen) == 2
        again = await asker.ask([user("a?")])  # not a retry: another sample
        assert again[-1]["content"] == "A"

    assert traces_of(tokenizer, agent, ["a", "b", "A"]) == ["a? <a> b? <b>", "a? <A>"]


def test_a_thought_that_the_agent_drops_begins_a_trace(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        first = await asker.ask([user("a?")])
        assert first[1]["content"] == "<think>so</think> a"
        await asker.ask([user("a?"), {"role": "assistant", "content": "a"}, user("b?")])

    script = ["<think>so</think> a", "b"]
    assert traces_of(tokenizer, agent, script) == ["a? <<think>so</think> a>", "a? a b? <b>"]


def test_other_tools_begin_a_trace(tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]

    async def agent(asker: Asker) -> None:
        first = await asker.ask([user("a?")])
        second = await asker.ask([*first, user("b?")], tools=tools)
        await asker.ask([*second, user("c?")], tools=tools)

    assert traces_of(tokenizer, agent, ["a", "b", "c"]) == [
        "a? <a>",
        f"{START}system Tools: f a? a b? <b> c? <c>",
    ]


CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


@pytest.mark.parametrize(
    ("said", "settings", "arguments"),
    [
        (f"{CALL}{CALL}", {}, ['{"x": 1}'] * 2),
        (f"{CALL}{CALL}", {"parallel_tool_calls": False}, ['{"x": 1}']),
        (CALL, {"tool_choice": "none"}, []),
        (CALL.replace("arguments", "parameters"), {}, ['{"x": 1}']),
        (CALL.replace("1}", "NaN}"), {}, []),
        (CALL.replace("1}", '"\\ud800"}'), {}, []),
        (f"<think>{CALL}</think>done", {}, []),
        (f"<think>{CALL}", {}, []),
        (f"<think>{CALL}</think>{CALL}", {}, ['{"x": 1}']),
        ("done", {"extra_body": {"top_k": -1, "min_p": 0, "repetition_penalty": 1.0}}, []),
    ],
)
def test_calls_of_an_answer(tokenizer, said: str, settings: dict, arguments: list[str]) -> None:
    async def agent(asker: Asker) -> None:
        *_, answer = await asker.ask([user("a?")], tools=TOOLS, **settings)
        calls = answer.get("tool_calls") or []
        assert [call["function"]["arguments"] for call in calls] == arguments
        if not arguments:
            assert answer["content"] == said
        calls = [{**call, "function": {"name": "f", "arguments": ""}} for call in calls]
        await asker.ask([user("a?"), {**answer, "tool_calls": calls or None}, user("b?")])

    traces_of(tokenizer, agent, [said, "b"])


def test_the_first_request_is_bounded_like_a_prompt(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        asker.conversations.most_first = 5
        with pytest.raises(
            openai.BadRequestError, match="more than data.max_prompt_tokens=5"
        ) as error:
            await asker.ask([user("a long question?")])
        assert error.value.code == "context_length_exceeded" and asker.conversations.truncated
        asker.conversations.most_first = 50
        await asker.ask([user("a?")])

    assert traces_of(tokenizer, agent, ["a"]) == ["a? <a>"]


def test_a_token_that_the_model_lacks_ends_the_episode_and_no_server(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        first = await asker.ask([user("a?")])
        object.__setattr__(asker.conversations.episode.params, "vocab_size", 5)
        with pytest.raises(openai.BadRequestError, match="token .* is not one of the model's 5"):
            await asker.ask([*first, user("b?")])

    assert traces_of(tokenizer, agent, ["a"]) == ["a? <a>"]


def test_the_number_of_traces_is_bounded(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        first = await asker.ask([user("a?")])
        await asker.ask([user("b?")])
        with pytest.raises(openai.BadRequestError, match="max_traces") as error:
            await asker.ask([user("c?")])
        assert error.value.code == "too_many_traces" and asker.conversations.truncated
        await asker.ask([*first, user("d?")])

    texts = traces_of(tokenizer, agent, ["a", "b", "d"], max_traces=2)
    assert texts == ["b? <b>", "a? <a> d? <d>"]


def test_each_trace_has_a_budget_and_shares_it_with_its_beginning(tokenizer) -> None:
    """An agent that compacts when it is refused goes on with a whole budget."""
    turn = len(tokenizer.encode(tokenizer.render_after_answer([user("")])))
    long = user("x" * (57 - turn))  # fits into 60 tokens, and not into 54

    async def agent(asker: Asker) -> None:
        first = await asker.ask([user("a?")])  # of 6 tokens
        for history in (first, await asker.ask([*first, user("b?")]), first):
            with pytest.raises(openai.BadRequestError, match="context length") as error:
                await asker.ask([*history, long])
            assert error.value.code == "context_length_exceeded"
        await asker.ask([user("known: a"), long])

    texts = traces_of(tokenizer, agent, ["first", "b", "last"], budget=60)
    assert texts == ["a? <first> b? <b>", f"known: a {long['content']} <last>"]


def test_a_random_agent(tokenizer) -> None:
    """Every answer is trained on once, after repeats, edits and requests at the same time."""
    for seed in range(8):
        rng = random.Random(seed)

        async def agent(asker: Asker, rng: random.Random = rng) -> None:
            histories: list[list[dict]] = [[]]

            async def step() -> None:
                history = list(rng.choice(histories))
                history = (
                    history[: rng.randrange(len(history) + 1)] if rng.random() < 0.3 else history
                )
                if history and rng.random() < 0.2:
                    history[rng.randrange(len(history))] = user("edited")
                histories.append(await asker.ask([*history, user(rng.choice("ab"))]))

            for _ in range(6):
                await asyncio.gather(*(step() for _ in range(rng.randrange(1, 4))))

        texts = traces_of(tokenizer, agent, [rng.choice(["x", "y "]) for _ in range(40)], 99, 5000)
        assert len(texts) > 1
