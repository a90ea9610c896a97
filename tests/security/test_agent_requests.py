"""Requests to the agents' endpoint that are wrong, too large or never end cost one answer each."""

import asyncio
import contextlib
import json
import random
import socket
import time
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import aiohttp
import pytest
import uvloop

from areal_lite.controller.batches import LoopLag
from areal_lite.data.tokenizer import characters_per_token
from areal_lite.workflows.endpoint import server as endpoint
from areal_lite.workflows.endpoint.server import AgentEndpoint
from areal_lite.workflows.tool_calls import AnswerParser
from tests.security.mutation import mutated
from tests.unit.rollout.episodes import chat_prompt, playing, save_chat_tokenizer

CHAT, MESSAGES, RESPONSES = "/chat/completions", "/messages", "/responses"
USER = [{"role": "user", "content": "Hi"}]
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


class Agent:
    """Sends raw requests under the key of an episode."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str):
        self._session, self._url, self._key = session, url, key

    async def post(self, raw: bytes | str, path: str = CHAT, **headers: str) -> tuple[int, str]:
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {self._key}",
            **headers,
        }
        async with self._session.post(self._url + path, data=raw, headers=headers) as answer:
            return answer.status, await answer.text()


@contextlib.asynccontextmanager
async def serving(folder, texts: int = 4, budget: int = 1000) -> AsyncIterator[tuple]:
    """Yield an endpoint, an agent and its conversations."""
    tokenizer = save_chat_tokenizer(folder)
    server = AgentEndpoint()
    await server.listen()
    script = ["yes"] * texts
    async with (
        aiohttp.ClientSession() as session,
        playing(tokenizer, chat_prompt(tokenizer), script, max_new_tokens=budget) as (episodes, *_),
    ):
        with server.conversations(episodes[0]) as (key, conversations):
            yield server, Agent(session, server.base_url, key), conversations
    await server.close()


def with_agent(folder, test: Callable, **settings) -> None:
    async def main() -> None:
        async with serving(folder, **settings) as (server, agent, conversations):
            await test(server, agent, conversations)

    uvloop.run(main())


def chat(content: object = "Hi", **message) -> dict:
    return {"messages": [{"role": "user", "content": content, **message}]}


def assistant(call: object) -> dict:
    return {"messages": [{"role": "assistant", "content": "", "tool_calls": call}]}


def arguments(text: object) -> dict:
    return assistant([{**CALL, "function": {"name": "f", "arguments": text}}])


DEEP = "[" * 100_000
WRONG = {
    "not UTF-8": b'{"messages": "\xff\xfe"}',
    "deep": DEEP,
    "deep and closed": '{"messages": ' + DEEP + "]" * 100_000 + "}",
    "5000 digits": '{"messages": [], "max_tokens": ' + "9" * 5000 + "}",
    "NaN": '{"messages": [{"role": "user", "content": "Hi"}], "temperature": NaN}',
    "half a pair in content": '{"messages": [{"role": "user", "content": "\\ud800"}]}',
    "half a pair in a role": '{"messages": [{"role": "\\udc00", "content": "a"}]}',
    "half a pair in stop": '{"messages": [{"role": "user", "content": "Hi"}], "stop": "\\ud800!"}',
    "half a pair in arguments": arguments('"\\ud800"'),
    "deep arguments": arguments(DEEP),
    "arguments that are no text": arguments(5),
    "arguments that are no JSON": arguments("{"),
    "calls that are a number": assistant(5),
    "calls that are a text": assistant("abc"),
    "a call that is null": assistant([None]),
    "a call of a list": assistant([{**CALL, "function": {"name": [], "arguments": "{}"}}]),
    "a part without text": chat([{"type": "text"}]),
    "a part with a number": chat([{"type": "text", "text": 1}]),
    "a part with null": chat([{"type": "text", "text": None}]),
    "a part that is a text": chat(["a"]),
    "content that is a number": chat(1),
    "a name that is a list": chat(name=[]),
    "a role that is null": chat(role=None),
    "no messages": {},
    "n is true": {**chat(), "n": True},
    "top_p is true": {**chat(), "top_p": True},
    "stream is 0": {**chat(), "stream": 0},
    "temperature is true": {**chat(), "temperature": True},
    "max_tokens is true": {**chat(), "max_tokens": True},
    "max_tokens is 1.0": {**chat(), "max_tokens": 1.0},
    "tools are a text": {**chat(), "tools": "abc"},
    "tools are numbers": {**chat(), "tools": [1]},
    "tools are an object": {**chat(), "tools": {"a": 1}},
    "stop is empty": {**chat(), "stop": ""},
    "stop is an object": {**chat(), "stop": {"a": 1}},
    "many stops": {**chat(), "stop": ["a"] * 100_000},
    "a long stop": {**chat(), "stop": "a" * 100_000},
    "a list": [],
    "null": None,
}


def tool_use(**fields) -> dict:
    blocks = [{"type": "tool_use", "id": "c", "name": "f", "input": {}, **fields}]
    return {"messages": [{"role": "assistant", "content": blocks}, *USER]}


# Requests of Anthropic's API; both APIs read JSON in the same way.
WRONG_MESSAGES = {
    "a role of OpenAI's": chat(role="tool"),
    "an answer to continue": {"messages": [*USER, {"role": "assistant", "content": "I"}]},
    "blocks that are texts": chat(["a"]),
    "no blocks": chat([]),
    "an image": chat([{"type": "image", "source": {}}]),
    "a result that is an image": chat([{"type": "tool_result", "content": [{"type": "image"}]}]),
    "a result that is a number": chat([{"type": "tool_result", "content": 1}]),
    "a tool without a name": tool_use(name=None),
    "a system that is a number": {**chat(), "system": 1},
    "a system of images": {**chat(), "system": [{"type": "image"}]},
    "a tool of theirs": {**chat(), "tools": [{"type": "web_search_20250305", "name": "w"}]},
    "a type of tool that is a list": {**chat(), "tools": [{"type": []}]},
    "tools that are numbers": {**chat(), "tools": [1]},
    "stop sequences that are numbers": {**chat(), "stop_sequences": [1]},
    "another temperature": {**chat(), "temperature": 0.1},
    "top_k": {**chat(), "top_k": 5},
    "a tool to choose": {**chat(), "tool_choice": {"type": "any"}},
    "a tool to choose that is a list": {**chat(), "tool_choice": [{}]},
    "stream is 1": {**chat(), "stream": 1},
    "max_tokens of 0": {**chat(), "max_tokens": 0},
}

FUNCTION = {"type": "function", "name": "f", "parameters": {}}
WRONG_RESPONSES = {
    "no input": {},
    "no items": {"input": []},
    "an input that is a number": {"input": 1},
    "items that are texts": {"input": ["a"]},
    "an item without a role": {"input": [{"content": "a"}]},
    "an item of theirs": {"input": [{"type": "web_search_call"}]},
    "a type of item that is a list": {"input": [{"type": [1]}]},
    "an image": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    "arguments that are no JSON": {
        "input": [{"type": "function_call", "name": "f", "arguments": "{"}]
    },
    "an output that is a number": {"input": [{"type": "function_call_output", "output": 1}]},
    "instructions that are a list": {"input": "a", "instructions": [1]},
    "an unknown response": {"input": "a", "previous_response_id": "resp_x"},
    "a response that is a list": {"input": "a", "previous_response_id": [1]},
    "a tool of theirs to choose": {
        **{"input": "a", "tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}}
    },
    "a tool to choose without its name": {
        **{"input": "a", "tools": [FUNCTION], "tool_choice": {"type": "function", "name": []}}
    },
    "text that is a number": {"input": "a", "text": 1},
    "a form": {"input": "a", "text": {"format": {"type": "json_object"}}},
    "store is 1": {"input": "a", "store": 1},
    "background": {"input": "a", "background": True},
    "max_output_tokens of 0": {"input": "a", "max_output_tokens": 0},
}


def test_every_wrong_request_is_answered_with_400_and_costs_nothing(tmp_path) -> None:
    async def test(server, agent: Agent, conversations) -> None:
        wrong = {CHAT: WRONG, MESSAGES: WRONG_MESSAGES, RESPONSES: WRONG_RESPONSES}
        for path, cases in wrong.items():
            for case, request in cases.items():
                raw = request if isinstance(request, str | bytes) else json.dumps(request)
                status, text = await agent.post(raw, path)
                assert status == 400 and json.loads(text)["error"]["message"], (case, status, text)
        status, text = await agent.post(
            json.dumps(chat()), **{"Content-Type": "application/json; charset=foo"}
        )
        assert status == 400 and "charset 'foo'" in text
        status, text = await agent.post(json.dumps(chat()), **{"Content-Encoding": "gzip"})
        assert status == 200, "the episode goes on"

    with_agent(tmp_path, test)


def test_values_as_deep_as_the_decoder_takes(tmp_path) -> None:
    async def test(server, agent: Agent, conversations) -> None:
        for depth in (200, 500, 800, 900, 950, 980, 990, 1000, 1100):
            nested = "[" * depth + "]" * depth
            for key in ("logit_bias", "n", "stop", "max_tokens", "temperature", "tools"):
                raw = json.dumps(chat())[:-1] + f', "{key}": {nested}}}'
                status, text = await agent.post(raw)
                assert status == 400, (depth, key, status, text)
            for content in ('{"a": ' + nested + "}", nested):
                status, text = await agent.post(f'{{"messages": [{{"role": {content}}}]}}')
                assert status == 400, (depth, status, text)
            # What is ignored or repeated may be as deep as an answer can be written.
            for path, known in (CHAT, chat()), (RESPONSES, {"input": "Hi"}):
                raw = json.dumps(known)[:-1] + f', "metadata": {nested}}}'
                status, text = await agent.post(raw, path)
                assert status == 200 or depth > 500 and status == 400, (depth, path, status, text)
        status, _ = await agent.post(json.dumps(chat()))
        assert status == 200, "the episode goes on"

    with_agent(tmp_path, test, texts=30)


def test_a_template_that_fails_costs_its_episode_only(tmp_path) -> None:
    async def test(server, agent: Agent, conversations) -> None:
        conversations.episode.tokenizer.chat_template = "{{ 1 // 0 }}"
        status, text = await agent.post(json.dumps(chat()))
        assert status == 400 and "ZeroDivisionError" in text

    with_agent(tmp_path, test)


def test_a_long_text_holds_up_nothing(tmp_path) -> None:
    """It is refused without encoding where it cannot fit, and encoded in a thread where it can."""

    async def test(server, agent: Agent, conversations) -> None:
        lag = LoopLag()
        watching = asyncio.create_task(lag.watch())
        messages = chat("a" * 1_000_000)["messages"]
        status, text = await agent.post(json.dumps({"messages": messages}))
        assert status == 200
        messages += [json.loads(text)["choices"][0]["message"], *chat("b" * 1_000_000)["messages"]]
        started = time.monotonic()
        status, text = await agent.post(json.dumps({"messages": messages}))
        assert status == 400 and "context_length_exceeded" in text and conversations.truncated
        assert time.monotonic() - started < 2
        assert lag.take_p99() < 1
        watching.cancel()
        status, text = await agent.post(b" " * (4 << 20))
        assert status == 413 and "request_too_large" in text
        assert [t.finish_reason for t in conversations.traces(0.0)] == ["length"]

    with_agent(tmp_path, test)


def test_texts_that_fit_are_never_refused_by_their_length(tmp_path) -> None:
    """Whatever the text: a token stands for at most `characters_per_token` characters."""
    tokenizer = save_chat_tokenizer(tmp_path)
    rng = random.Random(0)
    texts = ["<|im_start|>" * 50, "\u00e9" * 100, "e\u0301" * 100, "\u1112\u1161\u11ab" * 50]
    texts += ["".join(chr(rng.randrange(32, 0xD800)) for _ in range(100)) for _ in range(50)]
    for text in texts:
        assert len(text) <= tokenizer.characters_per_token * len(tokenizer.encode(text))


BYTE_LEVEL = {
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated"},
            {"type": "ByteLevel"},
        ],
    },
    "model": {"type": "BPE", "vocab": {"a": 0, "aaaa": 1}},
    "added_tokens": [{"content": "<|end|>", "lstrip": False, "rstrip": False}],
}


def test_the_bound_is_infinite_for_tokenizers_that_leave_text_out() -> None:
    assert characters_per_token(BYTE_LEVEL) == 4 * len("<|end|>")
    removing = {"type": "Split", "pattern": {"Regex": " "}, "behavior": "Removed"}
    stripping = [{"content": "<s>", "lstrip": False, "rstrip": True}]
    collapsing = {"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}
    for change in (
        {"pre_tokenizer": removing},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"normalizer": {"type": "Strip"}},
        {"normalizer": {"type": "Sequence", "normalizers": [collapsing]}},
        {"added_tokens": stripping},
        {"model": {"type": "Unigram", "vocab": []}},
    ):
        assert characters_per_token(BYTE_LEVEL | change) == float("inf"), change


def test_tool_calls_that_never_end_take_no_time(tmp_path) -> None:
    tokenizer = save_chat_tokenizer(tmp_path)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    for name, mark in (("hermes", "<tool_call>"), ("qwen", "<tool_call>\n"), ("llama3", "{")):
        parser = AnswerParser(tokenizer, name)
        text = mark * 100_000
        started = time.monotonic()
        assert parser.parse(text, tools) == ("", "", text, [], True)
        assert time.monotonic() - started < 1
    deep = "<tool_call>" + DEEP + "</tool_call>"
    parsed = AnswerParser(tokenizer, "hermes").parse(f"a {deep} b", tools)
    assert parsed.calls == [] and parsed.is_broken and parsed.said == f"a {deep} b"


STARTS = [b"", b"POST /v1/chat", b"POST /v1/chat/completions HTTP/1.1\r\nA: "]


def test_connections_without_a_request_end_and_leave_descriptors(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(endpoint, "_IDLE_S", 0.5)
    monkeypatch.setattr(endpoint, "_BODY_TIMEOUT_S", 0.5)
    monkeypatch.setattr(endpoint.resource, "getrlimit", lambda _: (60, 60))

    async def test(server, agent: Agent, conversations) -> None:
        url = urlsplit(server.base_url)
        where = (url.hostname, url.port)

        def stall() -> list[socket.socket]:
            strangers = [socket.create_connection(where) for _ in range(60)]
            for number, stranger in enumerate(strangers):
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(STARTS[number % len(STARTS)])
            return strangers

        strangers = await asyncio.to_thread(stall)
        await asyncio.sleep(0.2)
        assert len(server._runner.server.connections) <= 30
        await asyncio.sleep(1.0)
        status, _ = await agent.post(json.dumps(chat()))
        assert status == 200, "all connections were taken for good"
        head = (
            "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n"
            f"Authorization: Bearer {agent._key}\r\n\r\n{{"
        )
        reader, writer = await asyncio.open_connection(*where)
        writer.write(head.encode())
        assert b"408" in await asyncio.wait_for(reader.readline(), 5)
        writer.close()
        for stranger in strangers:
            stranger.close()

    with_agent(tmp_path, test)


@pytest.mark.parametrize("target", ["/v1/chat/completions", "/v1/models", "/", "*"])
def test_a_client_without_a_key_gets_one_answer_and_cannot_hold_its_connection(
    tmp_path, target: str
) -> None:
    """Not by further requests either, whose answers it does not read."""

    async def test(server, agent: Agent, conversations) -> None:
        url = urlsplit(server.base_url)
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        method = "OPTIONS" if target == "*" else "GET"
        writer.write(f"{method} {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode() * 100)
        assert (await reader.readline()).startswith(b"HTTP/1.1 4")
        with contextlib.suppress(ConnectionError):
            assert b"HTTP/1.1 " not in await asyncio.wait_for(reader.read(), 5)
        assert not server._runner.server.connections
        writer.close()

    with_agent(tmp_path, test)


def test_connections_at_once_wait_for_their_turn(tmp_path) -> None:
    """Hundreds of episodes begin at once. None waits a second for the kernel to try again."""

    async def test(server, agent: Agent, conversations) -> None:
        url = urlsplit(server.base_url)
        # The loop accepts none of them meanwhile.
        waiting = [
            socket.create_connection((url.hostname, url.port), timeout=0.9) for _ in range(300)
        ]
        for connection in waiting:
            connection.close()
        status, _ = await agent.post(json.dumps(chat()))
        assert status == 200

    with_agent(tmp_path, test)


ITEMS = [
    {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
    {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "r"},
]
WORDS = [b"null", b"true", b"[", b"{}", b"1e999", b'"\\ud800"', b"\xff", b"-", b"9" * 5000]


def fuzz(folder, cases: int, seed: int) -> None:
    rng = random.Random(seed)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    own_tools = [{"name": "f", "input_schema": {}}]
    blocks = [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]
    used = tool_use()["messages"][:1] + chat(blocks)["messages"]
    honest = [
        (CHAT, {**chat(), "temperature": 0.7, "n": 1, "stop": ["x"], "max_tokens": 5}),
        (CHAT, {**chat([{"type": "text", "text": "a"}]), "tools": tools}),
        (CHAT, {**assistant([CALL]), "tools": tools, "logit_bias": {}, "user": "me"}),
        (MESSAGES, {**chat(), "system": "a", "stop_sequences": ["x"], "max_tokens": 5}),
        (MESSAGES, {"messages": used, "tools": own_tools, "max_tokens": 5}),
        (MESSAGES, {**chat(), "tools": own_tools, "tool_choice": {"type": "any"}, "stream": True}),
        (CHAT, {**chat(), "stream": True, "stream_options": {"include_usage": True}, "n": 2}),
        (CHAT, {**chat(), "logprobs": True, "top_logprobs": 1, "tool_choice": "none"}),
        (RESPONSES, {"input": "a", "instructions": "b", "stream": True, "store": False}),
        (RESPONSES, {"input": ITEMS, "tools": [FUNCTION], "tool_choice": "required"}),
    ]

    async def test(server, agent: Agent, conversations) -> None:
        statuses = {200: 0, 400: 0}
        for _ in range(cases):
            # Each request begins an episode of its own.
            conversations.__init__(conversations.episode, 16, conversations.parser, False)
            started = time.monotonic()
            path, request = rng.choice(honest)
            status, text = await agent.post(mutated(rng, json.dumps(request).encode(), WORDS), path)
            assert time.monotonic() - started < 5
            assert status in statuses, text
            statuses[status] += 1
        assert min(statuses.values()) > 0, statuses

    with_agent(folder, test, texts=cases, budget=1000)


def test_mutated_requests(tmp_path) -> None:
    fuzz(tmp_path, 1_000, seed=1)


@pytest.mark.slow
def test_many_mutated_requests(tmp_path) -> None:
    for seed in range(2, 22):
        fuzz(tmp_path / str(seed), 3_000, seed)
