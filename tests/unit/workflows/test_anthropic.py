"""The agents' endpoint and the real `anthropic` client: a conversation is one trace."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import anthropic
import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from areal_lite.data.tokenizer import Tokenizer
from areal_lite.workflows.endpoint.server import AgentEndpoint, Conversations
from tests.unit.rollout.episodes import Scripted, chat_prompt, playing, save_chat_tokenizer

TOOLS = [{"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}]
CALL = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
CHAT_TOOL = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object"}},
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return save_chat_tokenizer(tmp_path_factory.mktemp("model"))


class Asker:
    """A client of an episode."""

    def __init__(self, url: str, key: str, scripted: Scripted, conversations: Conversations):
        self.url, self.key = url, key
        self.scripted, self.conversations = scripted, conversations
        self.client = AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key, max_retries=0)

    async def ask(self, messages: list, **settings) -> anthropic.types.Message:
        settings = {"model": "policy", "max_tokens": 200, **settings}
        return await self.client.messages.create(messages=messages, **settings)

    def texts(self) -> list[str]:
        """Return the traces with their markers."""
        decode = self.conversations.episode.tokenizer._fast.decode
        traces = self.conversations.traces(1.0)
        return [decode(t.tokens.tolist(), skip_special_tokens=False) for t in traces]


def with_script(
    tokenizer: Tokenizer, script: list[str], test: Callable[[Asker], Awaitable], **settings
) -> None:
    @contextlib.asynccontextmanager
    async def asking() -> AsyncIterator[Asker]:
        endpoint = AgentEndpoint()
        await endpoint.listen()
        prompt = chat_prompt(tokenizer)
        async with playing(tokenizer, prompt, script, **settings) as (episodes, scripted, _):
            with endpoint.conversations(episodes[0], max_traces=2) as (key, conversations):
                asker = Asker(endpoint.base_url, key, scripted, conversations)
                async with asker.client:
                    yield asker
        await endpoint.close()

    async def main() -> None:
        async with asking() as asker:
            await test(asker)

    asyncio.run(main())


def user(content: object) -> dict:
    return {"role": "user", "content": content}


def assistant(answer: anthropic.types.Message) -> dict:
    return {"role": "assistant", "content": [b.model_dump() for b in answer.content]}


def result(call_id: str, content: object) -> dict:
    return {"type": "tool_result", "tool_use_id": call_id, "content": content}


def test_a_conversation_with_tools_is_one_trace(tokenizer) -> None:
    """Calls go out as blocks, results come back as blocks, and no token is written again."""

    async def test(asker: Asker) -> None:
        settings = {"system": [{"type": "text", "text": "Be kind."}], "tools": TOOLS}
        messages = [user("Look")]
        answer = await asker.ask(messages, extra_body={"temperature": 0.7}, **settings)
        assert answer.stop_reason == "tool_use" and answer.role == "assistant"
        text, *calls = answer.content
        assert text.text == "I look." and [call.input for call in calls] == [{"at": "it"}] * 2
        assert answer.usage.input_tokens == len(asker.scripted.seen[0][1])
        assert answer.usage.output_tokens == len(asker.scripted.seen[0][2])
        red = [{"type": "text", "text": "re"}, {"type": "text", "text": "d"}]
        results = [result(calls[0].id, red), result(calls[1].id, "blue")]
        said = {"type": "text", "text": "So?"}
        messages += [assistant(answer), user([*results, said])]
        answer = await asker.ask(messages, **settings)
        assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
        assert [block.text for block in answer.content] == ["Red."]
        # The other API continues the same conversation.
        calls = [
            {"id": c.id, "type": "function", "function": {"name": "look", "arguments": "{}"}}
            for c in calls
        ]
        chat = [
            {"role": "developer", "content": "Be kind."},
            user("Look"),
            {"role": "assistant", "content": "I look.", "tool_calls": calls},
            *({"role": "tool", "tool_call_id": "x", "content": c} for c in ("red", "blue")),
            user("So?"),
            {"role": "assistant", "content": "Red."},
            user("Bye"),
        ]
        async with AsyncOpenAI(base_url=asker.url, api_key=asker.key) as client:
            completion = await client.chat.completions.create(
                model="policy", messages=chat, tools=[CHAT_TOOL]
            )
        assert completion.choices[0].message.content == "Bye."
        (trace,) = asker.texts()
        assert trace == (
            "<|im_start|>system\nTools: look<|im_end|>\n"
            "<|im_start|>system\nBe kind.<|im_end|>\n"
            "<|im_start|>user\nLook<|im_end|>\n"
            f"<|im_start|>assistant\nI look.{CALL}{CALL}<|im_end|>\n"
            "<|im_start|>user\n<tool_response>red</tool_response><|im_end|>\n"
            "<|im_start|>user\n<tool_response>blue</tool_response><|im_end|>\n"
            "<|im_start|>user\nSo?<|im_end|>\n"
            "<|im_start|>assistant\nRed.<|im_end|>\n"
            "<|im_start|>user\nBye<|im_end|>\n"
            "<|im_start|>assistant\nBye.<|im_end|>"
        )

    with_script(tokenizer, [f"I look.{CALL}{CALL}", "Red.", "Bye."], test)


def test_why_an_answer_ends(tokenizer) -> None:
    async def test(asker: Asker) -> None:
        answer = await asker.ask([user("Count")], stop_sequences=[" four", ", three"])
        assert answer.content[0].text == "one, two"
        assert (answer.stop_reason, answer.stop_sequence) == ("stop_sequence", ", three")
        messages = [user("Count"), assistant(answer), user("On")]
        answer = await asker.ask(messages, max_tokens=2)
        assert (answer.stop_reason, answer.content[0].text) == ("max_tokens", "on")
        messages += [assistant(answer), user("On")]
        answer = await asker.ask(messages, tools=TOOLS)
        assert answer.stop_reason == "tool_use"
        assert [block.type for block in answer.content] == ["tool_use"]
        answer = await asker.ask([*messages, assistant(answer), user("On")], tools=TOOLS)
        assert [block.text for block in answer.content] == [""], "a client may read block 0"
        assert len(asker.texts()) == 2, "other tools begin a trace"

    with_script(tokenizer, ["one, two, three", "onwards", CALL, ""], test)


def test_a_retry_gets_the_answer_that_the_client_missed(tokenizer) -> None:
    async def test(asker: Asker) -> None:
        first = await asker.ask([user("a?")])
        retry = {"x-stainless-retry-count": "1"}
        again = await asker.ask([user("a?")], extra_headers=retry)
        assert again.model_dump() == first.model_dump()
        assert len(asker.scripted.seen) == 1

    with_script(tokenizer, ["a", "b"], test)


def test_refusals_have_the_form_that_the_client_knows(tokenizer) -> None:
    async def test(asker: Asker) -> None:
        with pytest.raises(anthropic.BadRequestError, match="top_k=5 must be -1 or 0: ") as error:
            await asker.ask([user("Hi")], extra_body={"top_k": 5})
        assert error.value.body["error"]["type"] == "invalid_request_error"
        for form in ({"output_config": {"format": {"type": "json_schema"}}}, {"top_p": 0.5}):
            with pytest.raises(anthropic.BadRequestError, match="sample from the whole vocabulary"):
                await asker.ask([user("Hi")], extra_body=form)
        image = {"type": "image", "source": {"type": "url", "url": "http://x"}}
        with pytest.raises(anthropic.BadRequestError, match="reads and writes text only"):
            await asker.ask([user([image])])
        with pytest.raises(anthropic.NotFoundError, match="POST /v1/messages/count_tokens is not"):
            await asker.client.messages.count_tokens(model="policy", messages=[user("Hi")])
        answer = await asker.ask([user("Hi")])
        with pytest.raises(anthropic.BadRequestError, match="context length") as error:
            await asker.ask([user("Hi"), assistant(answer), user("x" * 60)])
        assert error.value.body["error"]["code"] == "context_length_exceeded"
        stranger = asker.client.with_options(api_key="of no episode")
        with pytest.raises(anthropic.AuthenticationError, match="no episode has this API key"):
            await stranger.messages.create(model="policy", max_tokens=1, messages=[user("Hi")])
        assert asker.conversations.truncated and len(asker.texts()) == 1

    with_script(tokenizer, ["yes"], test, max_new_tokens=60)


@pytest.mark.parametrize("evaluates", [False, True])
def test_an_evaluation_samples_in_its_own_way(tokenizer, evaluates) -> None:
    """An agent asks as in training, and cannot know what an evaluation does."""

    async def test(asker: Asker) -> None:
        episode = asker.conversations.episode
        asker.conversations.episode = replace(
            episode, params=replace(episode.params, temperature=0.6, evaluates=evaluates)
        )
        asked = asker.ask([user("Hi")], extra_body={"temperature": 0.7})
        if evaluates:
            await asked
            assert asker.scripted.params[0].temperature == 0.6
        else:
            with pytest.raises(anthropic.BadRequestError, match="temperature=0.7 must be 0.6"):
                await asked

    with_script(tokenizer, ["Hello"], test)
