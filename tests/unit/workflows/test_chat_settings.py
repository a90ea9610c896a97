"""Settings of requests to the agents' endpoint: what they change, and what stays exact."""

import asyncio

import openai
import pytest
from anthropic import AsyncAnthropic

from areal_lite.data.tokenizer import Tokenizer
from areal_lite.trajectory import Trajectory
from tests.unit.rollout.episodes import save_chat_tokenizer
from tests.unit.workflows.test_conversations import (
    START,
    Asker,
    asking,
    assert_recorded,
    traces_of,
    user,
)

ARGUMENTS = {"type": "object", "properties": {}}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "", "parameters": ARGUMENTS}}
    for name in ("look", "listen")
]
LOOK = {"type": "function", "function": {"name": "look"}}
FUNCTION_TOOLS = [
    {"type": "function", "name": name, "parameters": ARGUMENTS} for name in ("look", "listen")
]
BEGUN = f"{START}system Tools: look listen a? "


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return save_chat_tokenizer(tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("choice", "begin", "said"),
    [
        ("required", '<tool_call>{"name":"', 'look", "arguments": {"at": "it"}}</tool_call>'),
        (LOOK, '<tool_call>{"name":"look", "arguments":', ' {"at": "it"}}</tool_call>'),
    ],
)
def test_a_required_call_is_begun_for_the_policy(tokenizer, choice, begin: str, said: str) -> None:
    """Its beginning is context: the policy samples the rest, and is trained on it."""

    async def agent(asker: Asker) -> None:
        chat = asker.client.chat.completions
        settings = {"model": "policy", "tools": TOOLS, "tool_choice": choice}
        answer = await chat.create(messages=[user("a?")], **settings)
        (call,) = answer.choices[0].message.tool_calls
        assert (call.function.name, call.function.arguments) == ("look", '{"at": "it"}')
        assert answer.choices[0].finish_reason == "tool_calls"
        assert answer.usage.prompt_tokens == len(asker.scripted.seen[0][1])
        assert answer.usage.completion_tokens == len(asker.scripted.seen[0][2])
        result = {"role": "tool", "tool_call_id": call.id, "content": "red"}
        messages = [user("a?"), answer.choices[0].message.model_dump(exclude_none=True), result]
        # A call that the policy spoils is text, as the policy wrote it.
        answer = await chat.create(messages=messages, **settings)
        message = answer.choices[0].message
        assert message.tool_calls is None and message.content == begin + " or not?"
        messages += [message.model_dump(exclude_none=True), user("b?")]
        await asker.ask(messages, tools=TOOLS)

    script = [said, " or not?", "Red."]
    context = begin.replace("\n", " ")
    red = "<tool_response>red</tool_response>"
    assert traces_of(tokenizer, agent, script) == [
        f"{BEGUN}{context}<{said}> {red} {context}< or not?> b? <Red.>"
    ]


def test_every_api_requires_calls_in_its_own_words(tokenizer) -> None:
    said = {"any": 'look", "arguments": {}}</tool_call>', "named": " {}}</tool_call>"}

    async def agent(asker: Asker) -> None:
        responses = asker.client.responses
        for choice in ("required", {"type": "function", "name": "look"}):
            answer = await responses.create(
                model="policy", input="a?", tools=FUNCTION_TOOLS, tool_choice=choice
            )
            assert [(i.type, i.name) for i in answer.output] == [("function_call", "look")]
        url = str(asker.client.base_url).removesuffix("/v1/")
        own = [{"name": name, "input_schema": ARGUMENTS} for name in ("look", "listen")]
        async with AsyncAnthropic(base_url=url, api_key=asker.client.api_key) as client:
            for choice in ({"type": "any"}, {"type": "tool", "name": "look"}):
                message = await client.messages.create(
                    model="policy",
                    max_tokens=90,
                    messages=[user("a?")],
                    tools=own,
                    tool_choice=choice,
                )
                assert [(b.type, b.name) for b in message.content] == [("tool_use", "look")]
            both = await client.messages.create(
                model="policy",
                max_tokens=300,
                messages=[user("a?")],
                tools=own,
                tool_choice={"type": "auto", "disable_parallel_tool_use": True},
            )
            assert len(both.content) == 1, "the first of two calls"

    call = '<tool_call>{"name": "look"}</tool_call>'
    traces_of(tokenizer, agent, [*said.values(), *said.values(), call + call])


@pytest.mark.parametrize(
    "choice", [{"type": "function", "function": {"name": "smell"}}, "always", {"type": "custom"}]
)
def test_a_choice_of_no_tool_is_refused(tokenizer, choice) -> None:
    async def agent(asker: Asker) -> None:
        with pytest.raises(openai.BadRequestError, match="the tools are: look, listen"):
            await asker.ask([user("a?")], tools=TOOLS, tool_choice=choice)
        await asker.ask([user("a?")])

    assert traces_of(tokenizer, agent, ["a"]) == ["a? <a>"]


def test_several_answers_to_a_request_are_traces(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        first = await asker.ask([user("a?")])
        many = {"model": "policy", "messages": [*first, user("b?")], "n": 3}
        answer = await asker.client.chat.completions.create(**many)
        texts = [choice.message.content for choice in answer.choices]
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert sorted(texts) == ["1", "2", "3"]
        assert answer.usage.prompt_tokens == len(asker.scripted.seen[-1][1])
        assert answer.usage.completion_tokens == 3 * len(asker.scripted.seen[-1][2])
        again = await asker.client.chat.completions.create(
            **many, extra_headers={"x-stainless-retry-count": "1"}
        )
        assert again.choices == answer.choices, "a retry"
        chosen = {"role": "assistant", "content": texts[1]}
        await asker.ask([*first, user("b?"), chosen, user("c?")])
        chosen_texts.append(texts[1])

    chosen_texts: list[str] = []
    texts = traces_of(tokenizer, agent, ["a", "1", "2", "3", "end"])
    (chosen,) = chosen_texts
    # The conversation goes on in one of the answers. The others begin with its tokens.
    whole = [text.replace("<a>", "a") for text in texts]
    assert sum("<a>" in text for text in texts) == 1
    others = {"1", "2", "3"} - {chosen}
    assert set(whole) == {f"a? a b? <{chosen}> c? <end>", *(f"a? a b? <{o}>" for o in others)}


def test_more_answers_than_traces_are_refused_before_any_is_sampled(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        with pytest.raises(openai.BadRequestError, match="the episode has 2 ") as error:
            await asker.ask([user("a?")], n=3)
        assert error.value.code == "too_many_traces" and not asker.scripted.seen
        await asker.ask([user("a?")], n=2)

    texts = traces_of(tokenizer, agent, ["1", "2"], max_traces=2)
    assert sorted(texts) == ["a? <1>", "a? <2>"]


def test_log_probs_are_those_of_the_trace(tokenizer) -> None:
    async def main() -> None:
        async with asking(tokenizer, ["one, two, three", "no"], 16, 1000) as asker:
            chat = asker.client.chat.completions
            settings = {"model": "policy", "messages": [user("a?")], "logprobs": True}
            answer = await chat.create(**settings, top_logprobs=2, stop=", three")
            plain = await chat.create(**settings)
            traces = asker.conversations.traces(0.5)
        assert_recorded(traces, asker.scripted)
        trace: Trajectory = traces[0]
        tokens = answer.choices[0].logprobs.content
        assert answer.choices[0].message.content == "one, two"
        assert "".join(t.token for t in tokens) == "one, two, three"
        assert [bytes(t.bytes).decode() for t in tokens] == [t.token for t in tokens]
        sampled = trace.behavior_logprobs[trace.loss_mask].tolist()
        assert [t.logprob for t in tokens] == pytest.approx(sampled)
        for token in tokens:  # no other log-prob is known
            (only,) = token.top_logprobs
            assert (only.token, only.logprob) == (token.token, token.logprob)
        first = plain.choices[0].logprobs.content[0]
        assert first.token == "n" and first.top_logprobs == []

    asyncio.run(main())


def test_system_messages_at_the_beginning_become_one(tokenizer) -> None:
    """Many templates take one system message, and only there."""
    only_first = (
        "{%- for m in messages %}{%- if m.role == 'system' and not loop.first %}"
        "{{ raise_exception('System message must be at the beginning') }}{%- endif %}{%- endfor %}"
    )
    template = tokenizer.chat_template
    tokenizer.chat_template = only_first + template

    async def agent(asker: Asker) -> None:
        system = [
            {"role": "system", "content": "Be kind."},
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, TEXT]},
        ]
        first = await asker.ask([*system, user("a?")])
        await asker.ask([*first, user("b?")])

    try:
        texts = traces_of(tokenizer, agent, ["a", "b"])
    finally:
        tokenizer.chat_template = template
    assert texts == [f"{START}system Be kind.  Be brief. a? <a> b? <b>"]


TEXT = {"type": "text", "text": "brief."}
# Current clients and frameworks send these. None may change what is sampled.
IGNORED = {
    **{"seed": 5, "reasoning_effort": "low", "verbosity": "low", "service_tier": "auto"},
    **{"store": True, "metadata": {"a": "b"}, "prompt_cache_key": "k", "safety_identifier": "me"},
    **{"prediction": {"type": "content", "content": "x"}, "modalities": ["text"], "unknown": [1]},
    **{"max_tokens": None, "stop": None, "tools": None, "tool_choice": None, "n": None},
}


@pytest.mark.parametrize("key", IGNORED)
def test_unknown_settings_are_ignored(tokenizer, key: str) -> None:
    async def agent(asker: Asker) -> None:
        answer = await asker.ask([user("a?")], extra_body={key: IGNORED[key]})
        assert answer[-1]["content"] == "a"
        assert asker.scripted.params[0].max_new_tokens == 1000

    assert traces_of(tokenizer, agent, ["a"]) == ["a? <a>"]


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens"])
def test_either_limit_of_tokens_holds(tokenizer, key: str) -> None:
    async def agent(asker: Asker) -> None:
        answer = await asker.ask([user("a?")], **{key: 2})
        assert answer[-1]["content"] == "He"

    assert traces_of(tokenizer, agent, ["Hello"]) == ["a? <He>"]


def test_a_path_that_is_not_served_is_an_error_of_the_api(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        with pytest.raises(
            openai.NotFoundError, match="POST /v1/embeddings is not served"
        ) as error:
            await asker.client.embeddings.create(model="policy", input="a")
        assert error.value.body["code"] == "not_found"
        await asker.ask([user("a?")])

    traces_of(tokenizer, agent, ["a"])
