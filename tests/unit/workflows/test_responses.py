"""OpenAI's Responses API of the agents' endpoint, by the real `openai` client."""

import openai
import pytest

from areal_lite.data.tokenizer import Tokenizer
from tests.unit.rollout.episodes import save_chat_tokenizer
from tests.unit.workflows.test_conversations import START, Asker, traces_of

CALL = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'
TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}
SYSTEM = f"{START}system "
TOOLS = f"{SYSTEM}Tools: look "


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Tokenizer:
    return save_chat_tokenizer(tmp_path_factory.mktemp("model"))


def user(text: str) -> dict:
    return {"role": "user", "content": text}


async def create(asker: Asker, given: object, **settings) -> openai.types.responses.Response:
    return await asker.client.responses.create(model="policy", input=given, **settings)


def test_a_conversation_by_the_ids_of_responses(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        settings = {"tools": [TOOL], "instructions": "Be kind."}
        first = await create(asker, "a?", **settings)
        said, *calls = first.output
        assert (first.status, first.output_text, said.role) == ("completed", "I look.", "assistant")
        assert [(c.name, c.arguments) for c in calls] == [("look", '{"at": "it"}')] * 2
        assert first.usage.input_tokens == len(asker.scripted.seen[0][1])
        assert first.usage.output_tokens == len(asker.scripted.seen[0][2])
        results = [
            {"type": "function_call_output", "call_id": call.call_id, "output": said}
            for call, said in zip(calls, ("red", [{"type": "input_text", "text": "blue"}]))
        ]
        second = await create(asker, results, previous_response_id=first.id, **settings)
        assert second.previous_response_id == first.id and second.output_text == "Red."
        last = await create(asker, "b?", previous_response_id=second.id, **settings)
        assert last.output_text == "B."
        # The instructions of a response do not hold for the next.
        await create(asker, "c?", previous_response_id=last.id, tools=[TOOL])
        # A response may be followed in two ways.
        await create(asker, "d?", previous_response_id=second.id, **settings)

    said = f"I look.{CALL}{CALL}"
    results = "<tool_response>red</tool_response> <tool_response>blue</tool_response>"
    kind = f"{TOOLS}{SYSTEM}Be kind. a?"
    assert traces_of(tokenizer, agent, [said, "Red.", "B.", "C.", "D."]) == [
        f"{kind} <{said}> {results} <Red.> b? <B.>",
        f"{TOOLS}a? I look. {results} Red. b? B. c? <C.>",
        f"{kind} {said} {results} Red. d? <D.>",
    ]


def test_a_conversation_by_items(tokenizer) -> None:
    """An agent that keeps the items itself, as with store=false, has one trace."""

    async def agent(asker: Asker) -> None:
        items: list = [{"role": "developer", "content": "Be kind."}, user("a?")]
        settings = {"tools": [TOOL], "store": False, "instructions": "Be brief."}
        first = await create(asker, items, **settings)
        items += [item.model_dump(exclude_none=True) for item in first.output]
        items.append({"type": "reasoning", "id": "rs_1", "summary": []})
        items += [
            {"type": "function_call_output", "call_id": item.call_id, "output": "red"}
            for item in first.output
            if item.type == "function_call"
        ]
        second = await create(asker, items, **settings)
        items += [*second.output, user("b?")]
        await create(asker, items, **settings)
        with pytest.raises(openai.BadRequestError, match="is no response of this episode") as error:
            await create(asker, "c?", previous_response_id=second.id)
        assert error.value.code == "previous_response_not_found"

    (text,) = traces_of(tokenizer, agent, [f"I look.{CALL}", "Red.", "B."])
    red = "<tool_response>red</tool_response>"
    kind = f"{SYSTEM}Be brief.  Be kind. "
    assert text == f"{TOOLS}{kind}a? <I look.{CALL}> {red} <Red.> b? <B.>"


def test_an_answer_that_is_cut_is_incomplete(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        cut = await create(asker, "a?", max_output_tokens=2)
        assert (cut.status, cut.output_text) == ("incomplete", "He")
        assert cut.incomplete_details.reason == "max_output_tokens"
        assert cut.max_output_tokens == 2
        longer = await create(asker, "b?", previous_response_id=cut.id)
        assert longer.status == "completed" and longer.incomplete_details is None

    assert traces_of(tokenizer, agent, ["Hello", "B"]) == ["a? <He> b? <B>"]


def test_a_retry_gets_the_response_that_the_client_missed(tokenizer) -> None:
    async def agent(asker: Asker) -> None:
        first = await create(asker, "a?")
        again = await create(asker, "a?", extra_headers={"x-stainless-retry-count": "1"})
        assert again.id == first.id
        await create(asker, "b?", previous_response_id=again.id)

    assert traces_of(tokenizer, agent, ["a", "b"]) == ["a? <a> b? <b>"]


REFUSED = [
    ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "the tools are: none"),
    ({"text": {"format": {"type": "json_object"}}}, "ask for JSON in a message"),
    ({"conversation": "conv_1"}, "conversation is not supported: give previous_response_id"),
    ({"prompt": {"id": "pmpt_1"}}, "prompt is not supported"),
    ({"background": True}, "background=True must be False"),
    ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "item of type 'item_reference'"),
    ({"input": [user([{"type": "input_image", "image_url": "x"}])]}, "reads and writes text only"),
    ({"input": [user([{"type": "input_audio"}])]}, "reads and writes text only"),
    ({"top_p": 0.5}, "top_p=0.5 must be 1"),
]


@pytest.mark.parametrize(("settings", "complaint"), REFUSED)
def test_what_is_refused_is_named(tokenizer, settings: dict, complaint: str) -> None:
    async def agent(asker: Asker) -> None:
        with pytest.raises(openai.BadRequestError, match=complaint):
            await asker.client.responses.create(**{"model": "policy", "input": "a?", **settings})
        await create(asker, "a?", reasoning={"effort": "low"}, truncation="auto", top_p=1)

    assert traces_of(tokenizer, agent, ["a"]) == ["a? <a>"]
