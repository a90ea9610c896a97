"""Streams of the agents' endpoint, by the real clients, and as the APIs document their events."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable

import aiohttp
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, LengthFinishReasonError
from openai.lib.streaming.chat import ChatCompletionStreamState

from areal_lite.data.tokenizer import Tokenizer
from tests.unit.rollout.episodes import save_chat_tokenizer
from tests.unit.workflows.test_conversations import Asker, asking

CALL = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
FUNCTION = {"name": "look", "parameters": {"type": "object"}}
# The client's helper for streams takes only strict tools.
CHAT_TOOL = {"type": "function", "function": {**FUNCTION, "strict": True}}
MESSAGES_TOOL = {"name": "look", "input_schema": {"type": "object"}}
RESPONSES_TOOL = {"type": "function", **FUNCTION}
HI = [{"role": "user", "content": "Hi"}]
# What the policy says, and the limit of its tokens: text, calls with and without text, a cut text.
SAID = [("Hello", 90), (f"I look.{CALL}{CALL}", 200), (CALL, 90), ("", 90), ("Hello", 3)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return save_chat_tokenizer(tmp_path_factory.mktemp("model"))


def with_script(
    tokenizer: Tokenizer, script: list[str], test: Callable[[Asker], Awaitable[None]]
) -> None:
    async def main() -> None:
        async with asking(tokenizer, script, 16, 1000) as asker:
            await test(asker)

    asyncio.run(main())


async def raw_events(asker: Asker, path: str, body: dict) -> list[tuple[str | None, object]]:
    """Return the name and the data of each event, as the standard says they are read."""
    url, key = str(asker.client.base_url), asker.client.api_key
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, json={**body, "stream": True}, headers=headers) as answer,
    ):
        assert answer.status == 200 and answer.content_type == "text/event-stream"
        blocks = (await answer.text()).split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        data = fields["data"]
        events.append((fields.get("event"), data if data == "[DONE]" else json.loads(data)))
    return events


def without(value: object, *keys: str) -> object:
    """Return a JSON value without what differs between two answers."""
    if isinstance(value, dict):
        return {k: without(v, *keys) for k, v in value.items() if k not in keys}
    return [without(v, *keys) for v in value] if isinstance(value, list) else value


@pytest.mark.parametrize(("said", "limit"), SAID)
def test_openai_chat(tokenizer, said: str, limit: int) -> None:
    """The client joins the chunks to what it gets without a stream."""

    async def test(asker: Asker) -> None:
        settings = {"model": "policy", "messages": HI, "tools": [CHAT_TOOL], "max_tokens": limit}
        chat = asker.client.chat.completions
        whole = await chat.create(**settings, logprobs=True)
        options = {"include_usage": True}
        state = ChatCompletionStreamState(input_tools=[CHAT_TOOL])
        stream = await chat.create(**settings, logprobs=True, stream=True, stream_options=options)
        async for chunk in stream:
            with contextlib.suppress(LengthFinishReasonError):  # of the last chunk, when it has it
                state.handle_chunk(chunk)
        joined = state.current_completion_snapshot
        keys = ("id", "created", "parsed", "parsed_arguments", "index", "service_tier")
        keys += ("system_fingerprint", "refusal", "audio", "annotations", "function_call")
        one, other = (without(a.model_dump(), *keys) for a in (whole, joined))
        for answer in (one, other):  # the client writes empty text and no calls in two ways
            message = answer["choices"][0]["message"]
            message["content"] = message["content"] or None
            message["tool_calls"] = message["tool_calls"] or None
        assert one == other
        assert sum(t.logprob for t in joined.choices[0].logprobs.content) < 0

    with_script(tokenizer, [said, said], test)


def test_the_chunks_of_openai_chat(tokenizer) -> None:
    async def test(asker: Asker) -> None:
        body = {"messages": HI, "tools": [CHAT_TOOL], "stream_options": {"include_usage": True}}
        *events, (_, end) = await raw_events(asker, "chat/completions", body)
        assert end == "[DONE]" and all(name is None for name, _ in events)
        *chunks, usage = [data for _, data in events]
        assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert usage["choices"] == [] and usage["usage"]["total_tokens"] > 0
        assert all(chunk["usage"] is None for chunk in chunks)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        call = choices[2]["delta"]["tool_calls"][0]["id"]
        begun = {"name": "look", "arguments": ""}
        assert [choice["delta"] for choice in choices] == [
            {"role": "assistant", "content": ""},
            {"content": "I look."},
            {"tool_calls": [{"index": 0, "id": call, "type": "function", "function": begun}]},
            {"tool_calls": [{"index": 0, "function": {"arguments": '{"at": "it"}'}}]},
            {},
        ]
        assert [c["finish_reason"] for c in choices] == [None] * 4 + ["tool_calls"]
        plain = await raw_events(asker, "chat/completions", {"messages": HI, "n": 2})
        found = [c for _, data in plain[:-1] for c in data["choices"]]
        texts = [c["delta"].get("content") for c in found]
        assert [c["index"] for c in found] == [0, 0, 0, 1, 1, 1]
        assert texts[::3] == ["", ""] and texts[2::3] == [None, None]
        assert set(texts[1::3]) == {"one", "two"}  # in either order: both are asked for at once
        assert not any("usage" in data for _, data in plain[:-1])

    with_script(tokenizer, [f"I look.{CALL}", "one", "two"], test)


@pytest.mark.parametrize(("said", "limit"), SAID)
def test_anthropic(tokenizer, said: str, limit: int) -> None:
    async def test(asker: Asker) -> None:
        url = str(asker.client.base_url).removesuffix("/v1/")
        settings = {"model": "policy", "messages": HI, "tools": [MESSAGES_TOOL]}
        async with AsyncAnthropic(base_url=url, api_key=asker.client.api_key) as client:
            whole = await client.messages.create(**settings, max_tokens=limit)
            async with client.messages.stream(**settings, max_tokens=limit) as stream:
                joined = await stream.get_final_message()
        one, other = (without(m.model_dump(exclude_none=True), "id") for m in (whole, joined))
        assert one == without(other, "parsed_output")

    with_script(tokenizer, [said, said], test)


def test_the_events_of_anthropic(tokenizer) -> None:
    async def test(asker: Asker) -> None:
        body = {"messages": HI, "tools": [MESSAGES_TOOL], "max_tokens": 200}
        events = await raw_events(asker, "messages", body)
        assert all(name == data["type"] for name, data in events)
        block = ["content_block_start", "content_block_delta", "content_block_stop"]
        assert [name for name, _ in events] == [
            *("message_start", *block, *block, "message_delta", "message_stop"),
        ]
        data = [data for _, data in events]
        message = data[0]["message"]
        assert message["content"] == [] and message["stop_reason"] is None
        assert message["usage"]["input_tokens"] > 0
        assert [d["index"] for d in data[1:7]] == [0, 0, 0, 1, 1, 1]
        assert data[1]["content_block"] == {"type": "text", "text": ""}
        assert data[2]["delta"] == {"type": "text_delta", "text": "I look."}
        use = data[4]["content_block"]
        assert (use["type"], use["name"], use["input"]) == ("tool_use", "look", {})
        assert data[5]["delta"] == {"type": "input_json_delta", "partial_json": '{"at": "it"}'}
        assert data[7]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
        assert data[7]["usage"]["output_tokens"] > 0

    with_script(tokenizer, [f"I look.{CALL}"], test)


@pytest.mark.parametrize(("said", "limit"), SAID)
def test_responses(tokenizer, said: str, limit: int) -> None:
    async def test(asker: Asker) -> None:
        settings = {"model": "policy", "input": "Hi", "tools": [RESPONSES_TOOL]}
        settings |= {"max_output_tokens": limit, "include": ["message.output_text.logprobs"]}
        responses = asker.client.responses
        whole = await responses.create(**settings)
        kinds, pieces = [], []
        async with responses.stream(**settings) as stream:
            async for event in stream:
                kinds.append(event.type)
                pieces += [event.delta] if event.type.endswith(".delta") else []
        ended = "response.incomplete" if limit == 3 else "response.completed"
        assert kinds[-1] == ended and whole.status == ended.removeprefix("response.")
        if limit > 3:
            joined = await stream.get_final_response()
            keys = ("id", "call_id", "created_at", "parsed", "parsed_arguments")
            one, other = (without(r.model_dump(), *keys) for r in (whole, joined))
            assert one == other
        calls = [item.arguments for item in whole.output if item.type == "function_call"]
        texts = [whole.output_text] if whole.output[0].type == "message" else []
        assert pieces == texts + calls

    with_script(tokenizer, [said, said], test)


def test_the_events_of_responses(tokenizer) -> None:
    async def test(asker: Asker) -> None:
        body = {"input": "Hi", "tools": [RESPONSES_TOOL]}
        events = await raw_events(asker, "responses", body)
        assert all(name == data["type"] for name, data in events)
        assert [data["sequence_number"] for _, data in events] == list(range(len(events)))
        assert [name.removeprefix("response.") for name, _ in events] == [
            *("created", "in_progress"),
            *("output_item.added", "content_part.added", "output_text.delta"),
            *("output_text.done", "content_part.done", "output_item.done"),
            *("output_item.added", "function_call_arguments.delta"),
            *("function_call_arguments.done", "output_item.done"),
            "completed",
        ]
        data = [data for _, data in events]
        begun, ended = data[0]["response"], data[-1]["response"]
        assert begun["status"] == "in_progress" and begun["output"] == []
        assert begun["id"] == ended["id"] and ended["status"] == "completed"
        assert [data[7]["item"], data[11]["item"]] == ended["output"]
        assert data[2]["item"]["content"] == [] and data[8]["item"]["arguments"] == ""
        assert {d["item_id"] for d in data[3:7]} == {data[2]["item"]["id"]}
        assert {d["output_index"] for d in data[8:12]} == {1}
        assert data[4]["delta"] == data[5]["text"] == data[6]["part"]["text"] == "I look."
        assert data[9]["delta"] == data[10]["arguments"] == '{"at": "it"}'

    with_script(tokenizer, [f"I look.{CALL}"], test)


def test_a_refusal_of_a_stream_is_no_stream(tokenizer) -> None:
    async def test(asker: Asker) -> None:
        url, headers = str(asker.client.base_url), {"x-api-key": asker.client.api_key}
        bodies = {"chat/completions": {"messages": HI}, "responses": {"input": "Hi"}}
        async with aiohttp.ClientSession(headers=headers) as session:
            for path, body in (bodies | {"messages": {"messages": HI}}).items():
                refused = {**body, "stream": True, "top_p": 0.5}
                async with session.post(url + path, json=refused) as answer:
                    assert answer.status == 400
                    assert "top_p=0.5" in (await answer.json())["error"]["message"]

    with_script(tokenizer, [], test)


def test_a_streamed_conversation_is_one_trace(tokenizer) -> None:
    """Each way to ask continues what the others began."""

    async def test(asker: Asker) -> None:
        client: AsyncOpenAI = asker.client
        chat = {"model": "policy", "messages": list(HI)}
        async with client.chat.completions.stream(**chat) as stream:
            answer = (await stream.get_final_completion()).choices[0].message
        chat["messages"] += [answer.model_dump(exclude_none=True), *HI]
        async with client.responses.stream(model="policy", input=chat["messages"]) as stream:
            response = await stream.get_final_response()
        chat["messages"] += [{"role": "assistant", "content": response.output_text}, *HI]
        url = str(client.base_url).removesuffix("/v1/")
        async with AsyncAnthropic(base_url=url, api_key=client.api_key) as other:
            plain = [{k: m[k] for k in ("role", "content")} for m in chat["messages"]]
            settings = {"model": "policy", "max_tokens": 9, "messages": plain}
            async with other.messages.stream(**settings) as stream:
                assert await stream.get_final_text() == "c"
        (trace,) = asker.conversations.traces(0.5)
        answers = [answer for _, _, answer in asker.scripted.seen]
        assert trace.check().num_sampled == sum(map(len, answers)) and len(answers) == 3
        assert trace.tokens[trace.loss_mask].tolist() == sum(answers, [])

    with_script(tokenizer, ["a", "b", "c"], test)
